"""What EAGLE-3 is trained on: which position drafts which token, with which teacher; and remembered features."""

from typing import Any, NamedTuple

import pytest
import torch

from draftforge.data.batches import collate
from draftforge.data.store import Capture
from draftforge.specdec.drafts.eagle3 import Eagle3Draft
from draftforge.specdec.kernels.document_mask import Documents, QueryMask
from draftforge.specdec.targets import Target
from draftforge.train.families.eagle3 import Eagle3Family, eagle3_config
from draftforge.train.families.feature_family import copy_tables
from draftforge.train.families.ttt_alignment import Alignment
from draftforge.train.losses.linear_head import LOSS, LossSettings
from draftforge.train.losses.objectives import FullDistribution
from draftforge.train.losses.schedule import Weighted
from draftforge.train.settings import Eagle3Settings


class Talk(NamedTuple):
    prompt_ids: list[int]
    answer_ids: list[int]


def test_alignment_by_hand() -> None:
    """Prompt A B C, answer d e f: position i holds (h_i, x_{i+1}) and drafts x_{i+2+k} at step k.

        index      0 1 2 3 4 5
        token      A B C d e f
    The first drafted token d (3) comes from position 1 at step 0, from position 0 at step 1 (which is not trained).
    """
    batch = collate([Talk([10, 11, 12], [13, 14, 15]), Talk([20], [21, 22])])
    assert batch.positions_N.tolist() == [2, 3, 4, 6, 7]  # j, where the target says x_{j+1}
    place = Alignment(batch)
    assert place.trained.at_BM.tolist() == [[1, 2, 3, 6, 7]] and place.width == 5  # side by side in one row
    at_SN, valid_SN = place.rows(3)
    drafted: dict[tuple[int, int], list[int]] = {}
    for step in range(3):
        for n in range(5):
            if valid_SN[step, n]:
                row, column = divmod(int(at_SN[step, n]), place.width)
                position = int(place.trained.at_BM[row, column])
                token = int(batch.ids_BT[row, position + 2 + step])
                drafted.setdefault((step, n), []).append(token)
                assert int(batch.positions_N[n]) == position + 1 + step  # j = i + 1 + k
    assert drafted == {
        (0, 0): [13],
        (0, 1): [14],
        (0, 2): [15],
        (1, 1): [14],
        (1, 2): [15],
        (2, 2): [15],
        (0, 4): [22],  # the second sample has no position before its one-token prompt: 21 cannot be drafted
    }


def family_of(target: Target, draft_ids: torch.Tensor | None = None, **update: Any) -> Eagle3Family:
    settings = Eagle3Settings(**{"draft_tokens": 3, **update})
    torch.manual_seed(0)
    size = target.vocab_size if draft_ids is None else len(draft_ids)
    draft = Eagle3Draft(eagle3_config(settings, target, size), draft_ids, settings.train_embeddings)
    copy_tables(draft, target)
    return Eagle3Family(draft, settings, LossSettings({"kl": 1.0}), target)


@pytest.mark.parametrize("reduced", [False, True])
def test_the_loss_is_that_of_drafting_one_position_at_a_time(
    reduced: bool, target: Target, tiny_capture: Capture
) -> None:
    """Unrolled by hand with the plain causal pass: feature, own state, one token further at each step."""
    ids = torch.arange(0, 300, 2) if reduced else None
    family = family_of(target, ids)
    sample = max(tiny_capture.samples("train"), key=lambda sample: len(sample.answer_ids))
    tokens = torch.tensor([sample.prompt_ids + sample.answer_ids])
    batch = collate([sample])
    _, sums = family(family.inputs(batch, [0]))

    with torch.no_grad():
        logp = target.logits(target.states(tokens).hidden_BTH)[0].float().log_softmax(-1)
        logp = logp if ids is None else logp[:, ids]
        states = target.states(tokens, aux_layers=family.draft.config.aux_layers)
        assert states.aux_BTA is not None
        expected = [0.0, 0.0, 0.0]
        first = len(sample.prompt_ids) - 2
        for i in range(first, tokens.shape[1] - 2):
            at = QueryMask(Documents.rows(tokens), torch.tensor([[i]]))
            for k, state in enumerate(family.draft(target.embed(tokens), states.aux_BTA, at, 3)):
                j = i + 1 + k
                if j < tokens.shape[1] - 1:
                    logq = family.draft.logits(state[0, 0]).log_softmax(-1)
                    expected[k] += float((logp[j].exp() * (logp[j] - logq)).sum())
    assert sums[:, LOSS].tolist() == pytest.approx(expected, rel=1e-4)


def test_later_steps_weigh_less_in_loss_and_gradient(target: Target, tiny_capture: Capture) -> None:
    """The loss is sum_k w^k loss_k, and so is its gradient: 1, 0.5, 0.25 here."""
    batch = collate(tiny_capture.samples("train")[:2])

    def gradient(**update: Any) -> tuple[list[float], torch.Tensor, torch.Tensor]:
        family = family_of(target, **update)
        loss, sums = family(family.inputs(batch, [0, 1]))
        (grad,) = torch.autograd.grad(loss, [family.draft.fc.weight])
        return sums[:, LOSS].tolist(), loss.detach(), grad

    by_step = [gradient(draft_tokens=k, step_weights=1.0) for k in (1, 2, 3)]
    sums, loss, grad = gradient(draft_tokens=3, step_weights=0.5)
    assert float(loss) == pytest.approx(sums[0] + 0.5 * sums[1] + 0.25 * sums[2], rel=1e-5)
    first, second, third = (one[2] for one in by_step)
    torch.testing.assert_close(grad, first + 0.5 * (second - first) + 0.25 * (third - second), rtol=1e-3, atol=1e-3)
    assert family_of(target).step_weights == pytest.approx((1.0, 0.8, 0.64))
    _, loss, listed = gradient(draft_tokens=3, step_weights=[2.0, 0.5, 0.25])
    assert float(loss) == pytest.approx(2 * sums[0] + 0.5 * sums[1] + 0.25 * sums[2], rel=1e-5)
    torch.testing.assert_close(listed, grad + first, rtol=1e-3, atol=1e-3)


def test_only_the_draft_is_trained(target: Target) -> None:
    names = set(family_of(target).trainable())
    assert all(name.startswith("draft.") for name in names) and "draft.lm_head.weight" in names
    assert "draft.lm_head.weight" not in family_of(target, train_head=False).trainable()
    assert "draft.embed_tokens.weight" in family_of(target, train_embeddings=True).trainable()


def test_a_reduced_vocabulary_keeps_its_share_at_other_temperatures(target: Target, tiny_capture: Capture) -> None:
    """p at temperature 2 is that of the whole vocabulary, of which the draft has half the tokens."""
    ids = torch.arange(0, 300, 2)
    family = family_of(target, ids)
    family.set_objective({"kl": Weighted(temperature=2.0)})
    batch = collate(tiny_capture.samples("train")[:2])
    inputs = family.inputs(batch, [0, 1])
    teacher = family.rows(inputs).teacher
    assert inputs.features is not None
    for rows in (slice(0, 3), slice(3, 5)):
        found = teacher.at(rows, (1.0, 2.0))
        assert isinstance(found, FullDistribution)
        whole = target.logits(inputs.features.hidden_NH[rows]).float()
        for temperature, lse_C in zip((1.0, 2.0), found.lse_TC):
            p = (found.logits_CV / temperature - lse_C[:, None]).exp()
            torch.testing.assert_close(p, (whole / temperature).softmax(-1)[:, ids])
    loss, _ = family(inputs)
    assert bool(loss.isfinite())


def test_a_chain_drafts_neighbours_of_one_answer(target: Target, tiny_capture: Capture) -> None:
    """A sample's expected_length is the same whatever stands beside it in the batch."""
    samples = tiny_capture.samples("train")[:3]
    family = family_of(target)
    family.set_objective({"expected_length": 1.0})
    alone = [float(family(family.inputs(collate([sample]), [i]))[0].detach()) for i, sample in enumerate(samples)]
    together = float(family(family.inputs(collate(samples), [0, 1, 2]))[0].detach())
    assert together == pytest.approx(sum(alone), rel=1e-4)
    supervised = sum(len(sample.answer_ids) for sample in samples)
    assert -4 * supervised < together < -supervised  # one to four tokens a round
