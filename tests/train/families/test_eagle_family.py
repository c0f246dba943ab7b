"""`eagle` under training: the states that it drafts with, the regression on the target's, and the noise."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from drafted import drafted_logits, fit, fresh_family, greedy_accepted, talks
from families import SUPPORTED, tiny
from trained import SEED, Trained, sentences

from draftforge.data.batches import collate
from draftforge.data.store import Capture, Sample
from draftforge.specdec.kernels.document_mask import Documents, QueryMask
from draftforge.specdec.models import CausalModel
from draftforge.specdec.targets import Target
from draftforge.train.families.eagle import EagleFamily
from draftforge.train.losses.linear_head import LOSS
from draftforge.train.losses.objectives import FullDistribution
from draftforge.train.settings import EagleSettings


def family_of(target: CausalModel, **update: Any) -> EagleFamily:
    settings = EagleSettings.model_validate({"draft_tokens": 3, "feature_noise": 0.0, **update})
    return fresh_family(target, settings)  # type: ignore[return-value]


def longest(capture: Capture) -> Sample:
    return max(capture.samples("train"), key=lambda sample: len(sample.answer_ids))


def test_it_trains_what_it_drafts_with(target: Target, tiny_capture: Capture) -> None:
    """Step k at position i is the logits that a decoding round after x_{i+1} has for x_{i+2+k}."""
    family, sample = family_of(target), longest(tiny_capture)
    rows = family.rows(family.inputs(collate([sample]), [0]))
    ids, first = sample.prompt_ids + sample.answer_ids, len(sample.prompt_ids)
    assert rows.valid_SN is not None
    seen = 0
    for known in range(first, len(ids)):  # a round that knows ids[:known]
        drafted = drafted_logits(family.draft, target, ids[:known], ids[known : known + 2])
        for step in range(min(3, len(ids) - known)):
            n = known - first + step  # which supervised token that is
            assert rows.valid_SN[step, n]
            torch.testing.assert_close(
                family.head().logits(rows.states_SNH[step, n]), drafted[step], atol=1e-4, rtol=1e-4
            )
            seen += 1
    assert seen == int(rows.valid_SN.sum())


def test_the_regression_is_on_the_state_that_the_target_has_there(target: Target, tiny_capture: Capture) -> None:
    """Summed over positions and weighted steps, the mean over the state's width; added to the objective."""
    family, sample = family_of(target, feature_weight=0.7, step_weights=0.5), longest(tiny_capture)
    batch = collate([sample])
    loss, sums = family(family.inputs(batch, [0]))
    ids, first = sample.prompt_ids + sample.answer_ids, len(sample.prompt_ids)
    tokens = torch.tensor([ids])
    with torch.no_grad():
        hidden_BTH = target.states(tokens).hidden_BTH
        everywhere = Documents.rows(tokens).everyone()
        states = family.draft(target.embed(tokens), hidden_BTH, everywhere, 3)
        expected = 0.0
        for step, state_BTH in enumerate(states):
            for i in range(first - 2, len(ids) - 2 - step):
                error = F.smooth_l1_loss(state_BTH[0, i], hidden_BTH[0, i + 1 + step])
                expected += 0.5**step * float(error)
    assert float(sums[-1, LOSS]) == pytest.approx(expected, rel=1e-4)
    objective = sum(0.5**step * float(sums[step, LOSS]) for step in range(3))
    assert float(loss.detach()) == pytest.approx(objective + 0.7 * expected, rel=1e-4)
    without, plain = family_of(target, feature_weight=0.0, step_weights=0.5)(family.inputs(batch, [0]))
    assert float(without.detach()) == pytest.approx(objective, rel=1e-4) and len(plain) == 3


def test_a_perfect_state_costs_nothing(target: Target, tiny_capture: Capture) -> None:
    """The regression's zero is where the head says what the target says: both losses mean the same position."""
    family, sample = family_of(target, draft_tokens=1), longest(tiny_capture)
    inputs = family.inputs(collate([sample]), [0])
    assert inputs.features is not None
    rows = family.rows(inputs)
    hidden_NH = inputs.features.hidden_NH
    assert float(family._regression(hidden_NH[None], hidden_NH, torch.ones(1, len(hidden_NH), dtype=torch.bool))) == 0.0
    whole = rows.teacher.at(slice(0, len(hidden_NH)), [1.0])
    assert isinstance(whole, FullDistribution)
    torch.testing.assert_close(family.head().logits(hidden_NH), whole.logits_CV, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["gemma2", "granite"])
def test_the_targets_scale_and_soft_cap_are_part_of_its_head(kind: str) -> None:
    """A wide draft state, so that a cap shows: the logits are those that the `Drafter` makes of it."""
    model = CausalModel(tiny(*SUPPORTED[kind]).requires_grad_(False))
    family = family_of(model)
    draft = family.draft
    ids = torch.randint(1, model.vocab_size, (9,)).tolist()
    drafted = drafted_logits(draft, model, ids, [])[0]
    tokens = torch.tensor([ids])
    last = QueryMask(Documents.rows(tokens), torch.tensor([[7]]))
    state = draft(model.embed(tokens), model.states(tokens).hidden_BTH, last, 1)[0][0, 0]
    torch.testing.assert_close(family.head().logits(state), drafted, atol=1e-4, rtol=1e-4)
    raw = torch.nn.functional.linear(state, family.head().weight_VH)
    assert not torch.allclose(raw, drafted, atol=1e-2)


def test_noise_is_uniform_and_shrinks_with_the_length_of_each_text(target: Target, tiny_capture: Capture) -> None:
    """Of width 0.2 x 512 / tokens, on what the layer reads; what it is to say stays clean."""
    samples = tiny_capture.samples("train")[:4]
    batch = collate(samples, row_tokens=80)
    clean = family_of(target).inputs(batch, range(4)).features
    torch.manual_seed(3)
    noisy = family_of(target, feature_noise=0.2).inputs(batch, range(4)).features
    assert clean is not None and noisy is not None
    assert torch.equal(noisy.hidden_NH, clean.hidden_NH)
    assert batch.documents.packed
    for row, start, length, _ in batch.spans:
        share = (noisy.aux_BTA - clean.aux_BTA)[row, start : start + length] / (0.2 * 512 / length)
        assert float(share.abs().max()) == pytest.approx(0.5, abs=0.01) and float(share.abs().max()) <= 0.5001
        assert float(share.std()) == pytest.approx(12**-0.5, rel=0.05)
        assert abs(float(share.mean())) < 0.02


def test_noise_follows_from_sample_place_and_epoch_alone(target: Target, tiny_capture: Capture) -> None:
    samples = tiny_capture.samples("train")[:3]

    def noise(indexes: list[int], epoch: int = 0, row_tokens: int = 0) -> list[torch.Tensor]:
        batch = collate([samples[index] for index in indexes], row_tokens=row_tokens)
        noisy, clean = family_of(target, feature_noise=0.2), family_of(target)
        noisy.epoch = epoch
        states = [family.inputs(batch, indexes).features for family in (noisy, clean)]
        assert states[0] is not None and states[1] is not None
        added = states[0].aux_BTA - states[1].aux_BTA
        return [added[row, start : start + length] for row, start, length, _ in batch.spans]

    together, alone = noise([0, 1, 2], row_tokens=999), [noise([index])[0] for index in range(3)]
    for ours, theirs in zip(together, alone):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)  # states differ by rounding
    assert (noise([0], epoch=1)[0] - alone[0]).abs().max() > 0.1


def test_only_the_layer_is_trained(target: Target, tiny_capture: Capture) -> None:
    family = family_of(target)
    assert set(family.trainable()) == {f"draft.{name}" for name in family.draft.state_dict()}
    hidden, tables, rest = family.parameter_groups()
    assert len(hidden) == 8 and not tables and len(rest) == 1
    family(family.inputs(collate(tiny_capture.samples("train")[:2]), [0, 1]))[0].backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in family.trainable().values())
    assert target.model.get_output_embeddings().weight.grad is None


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "draft_tokens"), [(0.0, 3), (0.2, 1)])
def test_a_trained_head_decodes_losslessly_and_accepts_more(
    noise: float, draft_tokens: int, trained_drafts: Trained
) -> None:
    target = trained_drafts.target()
    lines = sentences(72, SEED + 5).splitlines()
    prompts = [target.tokenizer(line).input_ids[:12] for line in lines[64:]]
    family = family_of(target, feature_noise=noise, draft_tokens=draft_tokens)
    before = greedy_accepted(family.draft, target, prompts, draft_tokens=3)
    losses = fit(family, talks(target, lines[:64]), steps=60)
    after = greedy_accepted(family.draft, target, prompts, draft_tokens=3)
    assert sum(losses[-5:]) < 0.3 * sum(losses[:5])
    assert after > 40 > 4 * before  # of 8 answers of 16 tokens
