"""`small` under training: supervised positions only, and adapters that merge to the same function."""

from collections.abc import Callable

import pytest
import torch

from draftforge.data.batches import collate
from draftforge.data.store import Capture
from draftforge.specdec.drafts.small import SmallDraft
from draftforge.specdec.targets import Target
from draftforge.train.families.initial_weights import prune
from draftforge.train.families.small import SmallFamily
from draftforge.train.losses.linear_head import COUNT, LOSS, LossSettings
from draftforge.train.losses.objectives import OBJECTIVES, stored_entries
from draftforge.train.settings import LoraSettings, SmallSettings


def family_of(target: Target, **update: object) -> SmallFamily:
    settings = SmallSettings.model_validate({"layers": 2, **update})
    return SmallFamily(SmallDraft(prune(target, [0, 3])), settings, LossSettings({"kl": 1.0}), None)


def test_the_loss_is_that_of_the_supervised_positions(tiny_capture: Capture, load_tiny_target: object) -> None:
    family = family_of(load_tiny_target())  # type: ignore[operator]
    samples = tiny_capture.samples("train")[:4]
    batch = collate(samples, [tiny_capture.signals(sample) for sample in samples])
    loss, sums = family(family.inputs(batch, [0, 1, 2, 3]))
    expected = 0.0
    for sample in samples:
        ids = torch.tensor([sample.prompt_ids + sample.answer_ids])
        logits = family.draft.logits(family.draft(ids))[0, len(sample.prompt_ids) - 1 : -1]
        entries, places = stored_entries(tiny_capture.signals(sample))
        expected += float(OBJECTIVES["kl"](entries, logits.log_softmax(-1).gather(-1, places)).detach().sum())
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-4)
    assert float(sums[0, LOSS]) == pytest.approx(expected, rel=1e-4)
    assert int(sums[0, COUNT]) == sum(len(sample.answer_ids) for sample in samples)


def test_the_head_never_runs_on_a_prompt(tiny_capture: Capture, load_tiny_target: object) -> None:
    family = family_of(load_tiny_target())  # type: ignore[operator]
    sample = tiny_capture.samples("train")[0]
    batch = collate([sample], [tiny_capture.signals(sample)])
    rows = family.rows(family.inputs(batch, [0]))
    assert rows.states_SNH.shape[:2] == (1, len(sample.answer_ids))


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"]])
def test_merged_adapters_are_the_same_function(targets: object, load_tiny_target: object) -> None:
    family = family_of(load_tiny_target(), lora=LoraSettings.model_validate({"rank": 4, "targets": targets}))  # type: ignore[operator]
    names = family.trainable()
    assert names and all("lora_" in name for name in names)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in names.values():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    before = {name: tensor.clone() for name, tensor in family.draft.model.state_dict().items()}
    plain = family.export()
    ids = torch.randint(300, (2, 7))
    torch.testing.assert_close(plain(ids), family.draft(ids), atol=1e-4, rtol=1e-4)
    assert not any("lora" in name for name in plain.model.state_dict())
    for name, tensor in family.draft.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name  # exporting leaves no trace, so training goes on unrounded


def test_embeddings_and_head_are_told_from_the_other_matrices(load_tiny_target: object) -> None:
    family = family_of(load_tiny_target())  # type: ignore[operator]
    hidden, tables, rest = family.parameter_groups()
    names = {id(p): name for name, p in family.named_parameters()}
    assert all(".layers." in names[id(p)] for p in hidden) and len(hidden) == 2 * 7
    assert tables and all("embed_tokens" in names[id(p)] or "lm_head" in names[id(p)] for p in tables)
    assert {p.ndim for p in rest} == {1}
    assert len({*map(id, [*hidden, *tables, *rest])}) == len(list(family.parameters()))


def test_recomputed_activations_give_the_same_gradients(
    tiny_capture: Capture, load_tiny_target: Callable[[], Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model whose configuration asks for dropout too, which no draft is trained with."""
    sample = tiny_capture.samples("train")[0]
    batch = collate([sample], [tiny_capture.signals(sample)])
    target, gradients, recomputed = load_tiny_target(), [], list[torch.nn.Module]()
    monkeypatch.setattr(target.model.config, "attention_dropout", 0.5)
    for recompute in (False, True):
        family = family_of(target, activation_checkpointing=recompute)
        recomputed.clear()
        for layer in family.draft.model.get_decoder().layers:
            layer.mlp.register_forward_pre_hook(lambda module, inputs: recomputed.append(module))
        family(family.inputs(batch, [0]))[0].backward()
        assert len(recomputed) == (4 if recompute else 2)  # passes through two layers
        gradients.append({name: p.grad for name, p in family.trainable().items()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


def test_a_live_target_teaches_the_same_positions(tiny_capture: Capture, load_tiny_target: object) -> None:
    """kl of the whole distribution; expected_length over neighbours of one sample, on the true prefix."""
    target = load_tiny_target()  # type: ignore[operator]
    draft = SmallDraft(prune(target, [0, 3]))
    settings = SmallSettings(layers=2, draft_tokens=3)
    samples = tiny_capture.samples("train")[:3]
    batch = collate(samples)
    found = {}
    for name in ("kl", "expected_length"):
        family = SmallFamily(draft, settings, LossSettings({name: 1.0}), target)
        assert not family.needs_signals
        found[name] = float(family(family.inputs(batch, [0, 1, 2]))[0].detach())
    expected = {"kl": 0.0, "expected_length": 0.0}
    for sample in samples:
        ids = torch.tensor([sample.prompt_ids + sample.answer_ids])
        rows = slice(len(sample.prompt_ids) - 1, -1)
        with torch.no_grad():
            logp = target.logits(target.states(ids).hidden_BTH)[0, rows].log_softmax(-1)
            logq = draft.logits(draft(ids))[0, rows].log_softmax(-1)
        expected["kl"] += float((logp.exp() * (logp - logq)).sum())
        alpha = torch.minimum(logp.exp(), logq.exp()).sum(-1)
        for start in range(len(alpha)):
            expected["expected_length"] -= 1.0 + float(alpha[start : start + 3].cumprod(0).sum())
    assert found == pytest.approx(expected, rel=1e-4)
