"""Drafts that skip sublayers of the target, against models that lack them."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from drafted import drafted_logits
from families import SUPPORTED, tiny
from pydantic import ValidationError
from stand_ins import llama, prompts, target
from torch import Tensor
from transformers import PreTrainedModel

from draftforge.errors import FormatError, InputError
from draftforge.specdec.drafts.layer_skip import SkippedDraft, SkippedLayers, check_skips
from draftforge.specdec.kv_cache import KVCache
from draftforge.specdec.models import CausalModel
from draftforge.specdec.proposers.factory import make_drafter

SETS = [
    SkippedLayers(attention=(1,)),
    SkippedLayers(mlp=(2, 0)),
    SkippedLayers(attention=(0, 3), mlp=(0,)),
    SkippedLayers(attention=(1, 2), mlp=(1, 2)),
    SkippedLayers(attention=(0, 1, 2, 3), mlp=(0, 1, 2, 3)),
]
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8, 9]])


def silenced(model: PreTrainedModel, skipped: SkippedLayers) -> PreTrainedModel:
    """A copy in which those sublayers add nothing, because their last weights are zero."""
    other = copy.deepcopy(model)
    layers: Any = other.get_decoder().layers
    with torch.no_grad():
        for number in skipped.attention:
            layers[number].self_attn.o_proj.weight.zero_()
        for number in skipped.mlp:
            for weight in layers[number].mlp.parameters():
                weight.zero_()
    return other


def logits(model: CausalModel, ids_BT: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        return model.logits(model.states(ids_BT).hidden_BTH)


@pytest.mark.parametrize("skipped", SETS, ids=str)
@pytest.mark.parametrize(("kind", "options"), SUPPORTED.values(), ids=SUPPORTED)
def test_the_view_is_the_model_whose_sublayers_add_nothing(
    kind: str, options: dict[str, Any], skipped: SkippedLayers
) -> None:
    model = tiny(kind, options)
    whole = CausalModel(model)
    before = logits(whole)
    view = SkippedDraft(whole, skipped).lm
    torch.testing.assert_close(logits(view), logits(CausalModel(silenced(model, skipped))), atol=1e-4, rtol=1e-4)
    assert (logits(view) - before).abs().max() > 0.05
    assert torch.equal(logits(whole), before)


def without_layers(model: PreTrainedModel, gone: Sequence[int]) -> PreTrainedModel:
    """A model that was built with fewer layers, numbered anew."""
    other = llama(layers=4 - len(gone), seed=1)
    theirs = {name: tensor for name, tensor in model.state_dict().items() if ".layers." not in name}
    kept = [number for number in range(4) if number not in gone]
    for new, old in enumerate(kept):
        prefix = f"model.layers.{old}."
        for name, tensor in model.state_dict().items():
            if name.startswith(prefix):
                theirs[f"model.layers.{new}.{name.removeprefix(prefix)}"] = tensor
    other.load_state_dict(theirs)
    return other


@pytest.mark.parametrize("gone", [(0,), (3,), (1, 2), (0, 2, 3)])
def test_without_whole_layers_it_is_the_shorter_model_bit_by_bit(gone: tuple[int, ...]) -> None:
    model = llama()
    view = SkippedDraft(CausalModel(model), SkippedLayers(attention=gone, mlp=gone)).lm
    assert torch.equal(logits(view), logits(CausalModel(without_layers(model, gone))))


@pytest.mark.parametrize("skipped", SETS, ids=str)
def test_drafting_on_its_own_cache_gives_the_same_logits(skipped: SkippedLayers) -> None:
    model = target(4)
    draft = SkippedDraft(model, skipped)
    ids, chain = prompts(4)[3], [7, 9, 11]
    drafted = drafted_logits(draft, model, ids, chain)
    whole = logits(CausalModel(silenced(model.model, skipped)), torch.tensor([[*ids, *chain]]))[0, len(ids) - 1 :]
    torch.testing.assert_close(drafted, whole, atol=1e-4, rtol=1e-4)


def test_it_has_no_weights_and_caches_only_what_it_runs() -> None:
    model = target(4)
    draft = SkippedDraft(model, SkippedLayers(attention=(1, 3), mlp=(0,)))
    assert not list(draft.parameters()) and not list(draft.buffers())
    theirs = {parameter.data_ptr() for parameter in model.model.parameters()}
    assert {parameter.data_ptr() for parameter in draft.lm.stack.parameters()} < theirs
    whole, part = (KVCache(2, 16, model.device) for _ in range(2))
    for lm, cache in ((model, whole), (draft.lm, part)):
        lm.states(IDS, cache.prefill(torch.tensor([0]), torch.tensor([IDS.shape[1]])))
    assert part.nbytes == whole.nbytes / 2
    drafter = make_drafter(draft, model)
    assert drafter.width == model.vocab_size and not drafter.needs_hidden_states


def test_the_target_does_not_notice_a_draft_inside_its_own_pass() -> None:
    """Not even where its layers are being captured: each layer of a pass runs the draft first."""
    model = target(4)
    view = SkippedDraft(model, SkippedLayers(attention=(1, 2), mlp=(2, 3))).lm
    alone = model.states(IDS, aux_layers=(1, 2, 3, 4))
    inner = view.states(IDS, aux_layers=(2, 4))
    seen: list[Tensor] = []

    def run_draft(*call: object) -> None:
        seen.append(view.states(IDS).hidden_BTH)

    handles = [layer.register_forward_hook(run_draft) for layer in model.stack.layers]  # type: ignore[union-attr]
    handles.append(model.stack.register_forward_pre_hook(run_draft))
    both = model.states(IDS, aux_layers=(1, 2, 3, 4))
    for handle in handles:
        handle.remove()
    assert torch.equal(both.hidden_BTH, alone.hidden_BTH)
    assert both.aux_BTA is not None and alone.aux_BTA is not None and torch.equal(both.aux_BTA, alone.aux_BTA)
    assert len(seen) == 5 and all(torch.equal(hidden, inner.hidden_BTH) for hidden in seen)
    assert inner.aux_BTA is not None and not torch.equal(inner.aux_BTA[..., -48:], alone.aux_BTA[..., -48:])


def test_a_layer_that_is_none_of_the_targets_is_refused() -> None:
    with pytest.raises(InputError, match="mlp of layer 4: the target has 4 layers, 0 the first"):
        check_skips(target(4), SkippedLayers(attention=(3,), mlp=(1, 4)))
    for layers in ((1, 1), (-1,)):
        with pytest.raises(ValidationError, match="must be layers from 0 on, each named once"):
            SkippedLayers(attention=layers)


def test_layers_of_other_parts_are_refused() -> None:
    model = target(4)
    layers: Any = model.stack.layers
    layers[2].feed_forward = layers[2].mlp
    del layers[2].mlp
    with pytest.raises(FormatError, match="LlamaForCausalLM: layer 2 has no mlp; it cannot be skipped"):
        SkippedDraft(model, SkippedLayers(attention=(0,)))
