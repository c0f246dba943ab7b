"""Initial drafts: pruned, taken from another model, reduced; and what is refused."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import LONG_ROPE, tiny
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from draftforge.data.store import Capture
from draftforge.errors import InputError, MissingFileError, TokenizerMismatchError
from draftforge.specdec.drafts.eagle3 import Eagle3Draft
from draftforge.specdec.drafts.small import SmallDraft
from draftforge.specdec.formats.checkpoint import load_draft, read_meta
from draftforge.specdec.models import CausalModel
from draftforge.specdec.targets import Target
from draftforge.train.families.base import default_aux_layers
from draftforge.train.families.initial_draft import store_initial_draft
from draftforge.train.families.initial_weights import evenly_spaced_layers, prune, prune_config
from draftforge.train.settings import Eagle3Settings, EagleSettings, MedusaSettings, Settings, SmallSettings

LoadTarget = Callable[[], Target]


def started(settings: Settings, capture: Capture, folder: Path, load_target: Any) -> Any:
    return load_draft(
        store_initial_draft(settings, 0, capture, folder, load_target), torch.device("cpu"), torch.float32
    ).draft


def test_layers_are_spread_evenly_with_first_and_last() -> None:
    assert evenly_spaced_layers(6, 30) == [0, 6, 12, 17, 23, 29]
    assert evenly_spaced_layers(2, 30) == [0, 29]
    assert evenly_spaced_layers(5, 5) == [0, 1, 2, 3, 4]
    for total in range(2, 40):
        for count in range(2, total + 1):
            kept = evenly_spaced_layers(count, total)
            assert (kept[0], kept[-1], len(set(kept))) == (0, total - 1, count)
    with pytest.raises(InputError, match=r"draft\.layers 7: must be between 2 and the target's 4"):
        evenly_spaced_layers(7, 4)


def test_a_pruned_draft_holds_the_targets_own_weights(
    tiny_capture: Capture, load_tiny_target: LoadTarget, tmp_path: Path
) -> None:
    draft = started(SmallSettings(layers=[0, 2, 3]), tiny_capture, tmp_path, load_tiny_target)
    theirs = load_tiny_target().model.state_dict()
    ours = draft.model.state_dict()
    assert draft.model.config.num_hidden_layers == 3
    for name, tensor in ours.items():
        for to, source in (("layers.1.", "layers.2."), ("layers.2.", "layers.3.")):
            if to in name:
                name = name.replace(to, source)
                break
        assert torch.equal(tensor, theirs[name]), name
    assert read_meta(tmp_path / "init").extra == {"layers": [0, 2, 3]}
    assert AutoTokenizer.from_pretrained(tmp_path / "init").get_vocab() == load_tiny_target().tokenizer.get_vocab()


def test_keeping_every_layer_keeps_every_logit(load_tiny_target: LoadTarget) -> None:
    target = load_tiny_target()
    ids = torch.randint(300, (2, 9))
    whole = SmallDraft(prune(target, [0, 1, 2, 3]))
    assert torch.equal(whole.logits(whole(ids)), target.logits(target.states(ids).hidden_BTH))


@pytest.mark.parametrize("context", [16, 17])
def test_a_small_draft_of_a_long_rope_rotates_as_its_target_is_served(context: int) -> None:
    phi = ("phi3", {"original_max_position_embeddings": 16, "rope_parameters": LONG_ROPE})
    target = CausalModel(tiny(*phi), context)
    ids = torch.randint(61, (1, 12))
    whole = SmallDraft(prune(target, list(range(target.num_layers))))
    torch.testing.assert_close(whole(ids), target.states(ids).hidden_BTH, atol=1e-5, rtol=1e-5)


def test_lists_with_an_entry_per_layer_are_cut(load_tiny_target: LoadTarget) -> None:
    config = load_tiny_target().model.config
    config.layer_types = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    pruned = prune_config(config, [0, 3])
    assert pruned.layer_types == ["full_attention", "sliding_attention"]
    assert (pruned.num_hidden_layers, config.num_hidden_layers) == (2, 4)


def test_first_and_last_layer_must_be_kept(tiny_capture: Capture, load_tiny_target: LoadTarget, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"draft\.layers \[0, 2\]: must start at 0 and end at 3"):
        store_initial_draft(SmallSettings(layers=[0, 2]), 0, tiny_capture, tmp_path, load_tiny_target)
    assert not (tmp_path / "init").exists()


def other_model(folder: Path, tokenizer: Any, vocabulary: int, positions: int = 512) -> Path:
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=positions,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def no_target() -> Target:
    raise AssertionError("needs no target")


@pytest.mark.parametrize("vocabulary", [300, 320, 296])
def test_another_model_with_the_same_tokenizer(
    vocabulary: int, tiny_capture: Capture, tiny_target_folder: Path, tmp_path: Path
) -> None:
    """Embeddings padded to another size are brought to the target's; the target itself is not needed."""
    source = other_model(tmp_path / "m", AutoTokenizer.from_pretrained(tiny_target_folder), vocabulary)
    draft = started(SmallSettings(from_model=str(source)), tiny_capture, tmp_path / "t", no_target)
    assert draft.vocab_size == tiny_capture.vocab_size


def test_another_tokenizer_is_refused(tiny_capture: Capture, tiny_target_folder: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_target_folder)
    tokenizer.add_tokens(["<new>"])
    source = other_model(tmp_path / "m", tokenizer, 301)
    with pytest.raises(TokenizerMismatchError, match=r"draft\.from_model: .*must be the target's [0-9a-f]{12}"):
        store_initial_draft(SmallSettings(from_model=str(source)), 0, tiny_capture, tmp_path / "t", no_target)
    with pytest.raises(MissingFileError, match=r"draft\.from_model: .*nowhere"):
        store_initial_draft(
            SmallSettings(from_model=str(tmp_path / "nowhere")), 0, tiny_capture, tmp_path / "t", no_target
        )


def test_a_reduced_eagle3_starts_from_the_targets_head(
    tiny_capture: Capture, load_tiny_target: LoadTarget, tmp_path: Path
) -> None:
    draft = started(Eagle3Settings(draft_vocabulary=120), tiny_capture, tmp_path, load_tiny_target)
    assert isinstance(draft, Eagle3Draft) and draft.embed_tokens is None
    ids = draft.draft_ids
    assert {*tiny_capture.special_ids, *tiny_capture.stop_ids} <= set(ids.tolist())
    assert torch.equal(draft.lm_head.weight, load_tiny_target().model.lm_head.weight[ids])
    covered = json.loads((tmp_path / "init" / "draftforge.json").read_text())["extra"]["coverage"]
    answers = [token for sample in tiny_capture.samples("train") for token in sample.answer_ids]
    assert covered == pytest.approx(sum(token in set(ids.tolist()) for token in answers) / len(answers))


def test_the_seed_decides_fresh_weights(tiny_capture: Capture, load_tiny_target: LoadTarget, tmp_path: Path) -> None:
    def fresh(name: str, seed: int) -> torch.Tensor:
        init = store_initial_draft(Eagle3Settings(), seed, tiny_capture, tmp_path / name, load_tiny_target)
        draft = load_draft(init, torch.device("cpu"), torch.float32).draft
        assert isinstance(draft, Eagle3Draft)
        return draft.fc.weight

    first = fresh("a", 0)
    assert torch.equal(first, fresh("b", 0)) and not torch.equal(first, fresh("c", 1))


def test_captured_layers_by_default() -> None:
    assert default_aux_layers(30) == (2, 15, 27)
    assert default_aux_layers(32) == (2, 16, 29)
    for total in range(3, 12):
        low, middle, high = default_aux_layers(total)
        assert 1 <= low < middle < high <= total
    with pytest.raises(InputError, match="has 2 layers"):
        default_aux_layers(2)


def test_a_warm_start_of_another_kind_is_refused(
    tiny_capture: Capture, load_tiny_target: LoadTarget, tmp_path: Path
) -> None:
    init = store_initial_draft(SmallSettings(layers=2), 0, tiny_capture, tmp_path / "a", load_tiny_target)
    with pytest.raises(InputError, match=r"is of family small, but this recipe trains eagle3"):
        store_initial_draft(Eagle3Settings(init_from=init), 0, tiny_capture, tmp_path / "b", load_tiny_target)


def test_a_warm_start_of_another_shape_than_the_recipe_names_is_refused(
    tiny_capture: Capture, load_tiny_target: LoadTarget, tmp_path: Path
) -> None:
    small = store_initial_draft(SmallSettings(layers=2), 0, tiny_capture, tmp_path / "small", load_tiny_target)
    named = Eagle3Settings(draft_vocabulary=120, aux_layers=(1, 2, 4), intermediate_size=64)
    eagle = store_initial_draft(named, 0, tiny_capture, tmp_path / "eagle", load_tiny_target)
    first = store_initial_draft(
        EagleSettings(intermediate_size=64), 0, tiny_capture, tmp_path / "first", load_tiny_target
    )
    medusa = store_initial_draft(MedusaSettings(), 0, tiny_capture, tmp_path / "medusa", load_tiny_target)
    wrong: list[tuple[Settings, str]] = [
        (SmallSettings(layers=3, init_from=small), f"draft.layers = 3: init_from {small} has 2 layers"),
        (SmallSettings(layers=[0, 1, 3], init_from=small), f"draft.layers = [0, 1, 3]: init_from {small} has 2 layers"),
        (
            Eagle3Settings(draft_vocabulary=99, init_from=eagle),
            f"= 99: init_from {eagle} drafts 120 tokens",
        ),
        (Eagle3Settings(aux_layers=(1, 2, 3), init_from=eagle), f"[1, 2, 3]: init_from {eagle} reads [1, 2, 4]"),
        (Eagle3Settings(intermediate_size=96, init_from=eagle), f"intermediate_size = 96: init_from {eagle} has 64"),
        (Eagle3Settings(train_embeddings=True, init_from=eagle), "has no embeddings of its own"),
        (EagleSettings(intermediate_size=96, init_from=first), f"intermediate_size = 96: init_from {first} has 64"),
        (MedusaSettings(draft_tokens=5, init_from=medusa), f"draft.draft_tokens = 5: init_from {medusa} has 4 heads"),
        (MedusaSettings(blocks=2, init_from=medusa), f"draft.blocks = 2: init_from {medusa} has 1 a head"),
    ]
    for settings, says in wrong:
        with pytest.raises(InputError, match=re.escape(says)):
            store_initial_draft(settings, 0, tiny_capture, tmp_path / "out", no_target)
        assert not (tmp_path / "out" / "init").exists()
    fitting: list[Settings] = [
        SmallSettings(layers=2, init_from=small),
        SmallSettings(layers=[0, 3], init_from=small),
        Eagle3Settings(init_from=eagle),  # what it does not name, the draft decides
        named.model_copy(update={"init_from": eagle}),
        EagleSettings(init_from=first),
        MedusaSettings(init_from=medusa),
    ]
    for number, settings in enumerate(fitting):
        store_initial_draft(settings, 0, tiny_capture, tmp_path / f"fits-{number}", no_target)


def test_a_draft_that_is_too_short_for_the_capture_is_refused(
    tiny_capture: Capture, tiny_target_folder: Path, tmp_path: Path
) -> None:
    source = other_model(tmp_path / "m", AutoTokenizer.from_pretrained(tiny_target_folder), 300, positions=16)
    longest = max(
        len(sample.prompt_ids) + len(sample.answer_ids)
        for split in ("train", "selection", "holdout")
        for sample in tiny_capture.samples(split)
    )
    with pytest.raises(InputError, match=rf"draft\.from_model: .*context of 16 tokens .*, {longest} tokens$"):
        store_initial_draft(SmallSettings(from_model=str(source)), 0, tiny_capture, tmp_path / "t", no_target)
    assert not (tmp_path / "t" / "init").exists()
