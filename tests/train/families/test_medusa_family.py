"""`medusa` under training: which head drafts which token, from what, and what it costs to hold them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafted import drafted_logits, fit, fresh_family, greedy_accepted, save, talks
from families import SUPPORTED, tiny
from trained import SEED, Trained, sentences

from draftforge.data.batches import collate
from draftforge.data.store import Capture
from draftforge.errors import InputError
from draftforge.specdec.drafts.medusa import MedusaDraft
from draftforge.specdec.formats import load_draft
from draftforge.specdec.models import CausalModel
from draftforge.specdec.targets import Target
from draftforge.train.families import build
from draftforge.train.families.medusa import MedusaFamily
from draftforge.train.losses.linear_head import COUNT, LOSS
from draftforge.train.settings import MedusaSettings


def family_of(target: CausalModel, lively: bool = False, **update: Any) -> MedusaFamily:
    settings = MedusaSettings.model_validate({"draft_tokens": 3, **update})
    family = fresh_family(target, settings)
    if lively:  # heads that all differ
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in family.draft.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return family  # type: ignore[return-value]


def test_each_head_trains_what_it_drafts_with(target: Target, tiny_capture: Capture) -> None:
    """Head k at position i is what a decoding round after x_{i+1} has for x_{i+2+k}."""
    family = family_of(target, lively=True, blocks=2)
    samples = tiny_capture.samples("train")[:2]
    rows = family.rows(family.inputs(collate(samples), [0, 1]))
    assert rows.valid_SN is not None
    seen = start = 0
    for sample in samples:
        ids, first = sample.prompt_ids + sample.answer_ids, len(sample.prompt_ids)
        for known in range(first, len(ids)):
            drafted = drafted_logits(family.draft, target, ids[:known], [0, 0])  # whatever is drafted above
            for head in range(min(3, len(ids) - known)):
                n = start + known - first + head
                logits = family.head()[head].logits(rows.states_SNH[head, n])
                torch.testing.assert_close(logits, drafted[head], atol=1e-4, rtol=1e-4)
                seen += 1
        start += len(sample.answer_ids)
    assert seen == int(rows.valid_SN.sum())


def test_the_loss_is_the_weighted_sum_of_the_heads(target: Target, tiny_capture: Capture) -> None:
    family = family_of(target, lively=True, step_weights=0.5)
    sample = max(tiny_capture.samples("train"), key=lambda sample: len(sample.answer_ids))
    loss, sums = family(family.inputs(collate([sample]), [0]))
    ids, first = sample.prompt_ids + sample.answer_ids, len(sample.prompt_ids)
    with torch.no_grad():
        hidden_TH = target.states(torch.tensor([ids])).hidden_BTH[0]
        logp_TV = target.logits(hidden_TH).log_softmax(-1)
        expected = [0.0] * 3
        for head in range(3):
            logq_TV = family.draft.logits(hidden_TH, head).log_softmax(-1)
            for i in range(first - 2, len(ids) - 2 - head):
                j = i + 1 + head
                expected[head] += float((logp_TV[j].exp() * (logp_TV[j] - logq_TV[i])).sum())
    assert sums[:, LOSS].tolist() == pytest.approx(expected, rel=1e-4)
    assert float(loss.detach()) == pytest.approx(sum(0.5**k * x for k, x in enumerate(expected)), rel=1e-4)
    assert sums[:, COUNT].tolist() == [len(sample.answer_ids) - head for head in range(3)]


def test_fresh_heads_say_what_the_target_says(target: Target) -> None:
    """Of the token that it knows already: blocks do nothing yet."""
    draft, hidden = family_of(target).draft, torch.randn(5, target.hidden_size)
    for head in range(3):
        torch.testing.assert_close(draft.logits(hidden, head), target.logits(hidden))
    granite = CausalModel(tiny(*SUPPORTED["granite"]))  # its logits are an eighth of the product
    hidden = torch.randn(5, granite.hidden_size)
    torch.testing.assert_close(family_of(granite).draft.logits(hidden, 0), granite.logits(hidden))


def test_frozen_heads_are_held_once_and_stored_each(target: Target, tmp_path: Path) -> None:
    family = family_of(target, train_heads=False)
    assert sorted(family.trainable()) == [f"draft.blocks.{head}.layers.0.weight" for head in range(3)]
    assert len({linear.weight.data_ptr() for linear in family.draft.lm_heads}) == 1  # type: ignore[operator]
    save(family, target, tmp_path / "draft")
    again = load_draft(tmp_path / "draft", torch.device("cpu"), torch.float32).draft
    assert isinstance(again, MedusaDraft)
    for name, tensor in family.draft.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    settings, trained = MedusaSettings(draft_tokens=3, train_heads=False), family_of(target, lively=True)
    apart = MedusaFamily(trained.draft, settings, trained.loss_settings, target)  # a warm start
    assert len({linear.weight.data_ptr() for linear in apart.draft.lm_heads}) == 3  # type: ignore[operator]


def test_a_start_of_another_width_is_refused(
    target: Target, tiny_capture: Capture, load_tiny_target: Callable[[], Target], tmp_path: Path
) -> None:
    fitting = family_of(target)
    config = fitting.draft.config.model_copy(update={"hidden_size": 64})
    other = MedusaFamily(MedusaDraft(config), MedusaSettings(draft_tokens=3), fitting.loss_settings, target)
    save(other, target, tmp_path / "other")
    settings = MedusaSettings(draft_tokens=3, init_from=tmp_path / "other")
    with pytest.raises(InputError, match=r"draft\.init_from: .*/other: hidden_size 64: must be 128, the target's"):
        build(settings, tmp_path / "other", load_tiny_target, tiny_capture, torch.device("cpu"))


def test_heads_are_told_from_the_other_matrices(target: Target) -> None:
    family = family_of(target)
    hidden, tables, rest = family.parameter_groups()
    assert [id(p) for p in tables] == [id(linear.weight) for linear in family.draft.lm_heads]
    assert len(hidden) == 3 and not rest


@pytest.mark.slow
@pytest.mark.parametrize("update", [{}, {"train_heads": False, "blocks": 2}], ids=str)
def test_trained_heads_decode_losslessly_and_accept_more(update: dict[str, Any], trained_drafts: Trained) -> None:
    target = trained_drafts.target()
    lines = sentences(72, SEED + 5).splitlines()
    prompts = [target.tokenizer(line).input_ids[:12] for line in lines[64:]]
    family = family_of(target, **update)
    before = greedy_accepted(family.draft, target, prompts, draft_tokens=3)
    losses = fit(family, talks(target, lines[:64]), steps=60)
    after = greedy_accepted(family.draft, target, prompts, draft_tokens=3)
    assert sum(losses[-5:]) < 0.2 * sum(losses[:5])
    assert after > 40 > 4 * before  # of 8 answers of 16 tokens
