"""A target's loss on held answers is the plain one, and its change is of the same tokens."""

import copy

import pytest
import torch
import torch.nn.functional as F
from stand_ins import prompts
from stand_ins import target as make_target

from draftforge.data.store import Sample
from draftforge.eval.held_loss import held_loss, loss_change, loss_words
from draftforge.specdec.models import CausalModel
from draftforge.specdec.sampling_settings import SamplingSettings


def sample(number: int, prompt: list[int], answer: list[int]) -> Sample:
    sampling = SamplingSettings(temperature=0.7 if number % 2 else 0.0, top_k=3)
    return Sample(
        id=str(number), conversation=str(number), turn=0, cluster=f"k{number // 2}", domain="d", split="selection",
        sampling=sampling, max_new_tokens=24, finish="stop", prompt_ids=prompt, answer_ids=answer,
    )  # fmt: skip


def plain_loss(model: CausalModel, one: Sample) -> float:
    ids = torch.tensor([one.prompt_ids + one.answer_ids])
    first = len(one.prompt_ids)
    with torch.no_grad():
        logits_TV = model.logits(model.states(ids).hidden_BTH[0])[first:-1]
    return float(F.cross_entropy(logits_TV, ids[0, first + 1 :], reduction="sum"))


def test_it_is_the_cross_entropy_of_all_tokens_but_the_first_of_an_answer() -> None:
    """Whatever the answers were sampled with; an answer of one token adds nothing."""
    old = make_target()
    new = CausalModel(copy.deepcopy(old.model))
    with torch.no_grad():
        new.model.get_output_embeddings().weight.mul_(1.3)
    texts = prompts(9)
    samples = [sample(n, ids[:3], ids[3 : 4 + 2 * n]) for n, ids in enumerate(8 * text for text in texts)]
    before, after = held_loss(old, samples), held_loss(new, samples, pass_tokens=16)
    for model, found in ((old, before), (new, after)):
        for cluster, loss in found.items():
            mine = [one for one in samples if one.cluster == cluster]
            assert loss.tokens == sum(len(one.answer_ids) - 1 for one in mine)
            assert loss.nats == pytest.approx(sum(plain_loss(model, one) for one in mine), rel=1e-5)
    change = loss_change(before, after, 0.95)
    tokens = sum(len(one.answer_ids) - 1 for one in samples)
    totals = [sum(plain_loss(model, one) for one in samples) / tokens for model in (old, new)]
    assert change.tokens == tokens
    assert [change.before.value, change.after.value] == pytest.approx(totals, rel=1e-5)
    assert change.difference.value == pytest.approx(totals[1] - totals[0], rel=1e-4)
    assert change.difference.low < change.difference.value < change.difference.high
    assert loss_change(before, before, 0.95).difference[:1] == (0.0,)
    words = loss_words(change.record())
    assert f"{tokens} tokens" in words and f"{totals[1]:.3f} [" in words and f"{totals[1] - totals[0]:+.3f} [" in words


def test_without_held_answers_nothing_is_known() -> None:
    assert loss_words(loss_change({}, {}, 0.95).record()).startswith("loss on 0 tokens of held answers n/a")
