"""Which tokens a draft likes best, where logits tie too, and the rank of a recorded answer's tokens among them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from draftforge.specdec.proposers.base import UNRANKED
from draftforge.specdec.proposers.logits import (
    likeliest,
    over_vocabulary,
    own_vocabulary,
    trace_from_logits,
    trace_level,
)
from draftforge.specdec.replay.packing import Pack, Text
from draftforge.specdec.sampling import penalised
from draftforge.specdec.sampling_settings import SamplingSettings

GREEDY = SamplingSettings()
few = st.sampled_from([float("-inf"), -1.0, -0.0, 0.0, 0.5, 2.0])
rows = st.integers(3, 40).flatmap(lambda vocab: st.lists(st.lists(few, min_size=vocab, max_size=vocab), min_size=1))


def ranking(scores: Tensor) -> Tensor:
    """All tokens, best first, of a tie the lower one first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices


@given(rows, st.integers(1, 3), st.sampled_from([torch.float32, torch.bfloat16]))
def test_ties_go_to_the_lower_token(logits: list[list[float]], count: int, dtype: torch.dtype) -> None:
    logits_NV = torch.tensor(logits, dtype=dtype)
    best_NR, tokens_NR = likeliest(logits_NV, count)
    assert torch.equal(tokens_NR, ranking(logits_NV)[:, :count])
    assert torch.equal(best_NR, logits_NV.gather(-1, tokens_NR))


@pytest.mark.parametrize("count", [1, 2, 10])
@pytest.mark.parametrize("vocab", [20, 700, 5000])
def test_ties_of_half_precision(vocab: int, count: int) -> None:
    """Every row of so coarse logits has ties, within what is asked for and at its end."""
    logits_BFV = torch.randn(3, 40, vocab, generator=torch.Generator().manual_seed(0)).mul(4).round().bfloat16()
    assert torch.equal(likeliest(logits_BFV, count)[1], ranking(logits_BFV)[..., :count])


def test_a_row_without_numbers_ranks_nothing() -> None:
    """A diverged draft must not look right: NaN is above no logit and below none."""
    logits_TV = torch.tensor([[float("nan")] * 4, [float("nan"), 1.0, 2.0, 0.0]])
    rank_T, _ = trace_from_logits(logits_TV, torch.tensor([1, 2]), GREEDY)
    assert rank_T.tolist() == [UNRANKED, 0]


@pytest.mark.parametrize("setting", [GREEDY, SamplingSettings(temperature=1.0, top_k=4, repetition_penalty=1.7)])
def test_ranks_are_places_among_the_penalised_logits(setting: SamplingSettings) -> None:
    draw = torch.Generator().manual_seed(1)
    logits_TV = torch.randn(30, 17, generator=draw).mul(2).round()
    logits_TV[:, 5] = float("-inf")
    ids = torch.randint(0, 17, (32,), generator=draw).tolist()
    rank_T, q_T = trace_level(Pack([Text(ids, 2)], logits_TV.device), 0, logits_TV, lambda row: row, 17, setting)
    for row, token in enumerate(ids[2:]):
        seen_V = torch.zeros(17, dtype=torch.bool)
        seen_V[ids[: 2 + row]] = True
        place = ranking(penalised(logits_TV[row], setting, seen_V)).tolist().index(token)
        assert int(rank_T[row]) == (UNRANKED if token == 5 else place)
        assert float(q_T[row]) == 0.0 if token == 5 else 0.0 <= float(q_T[row]) <= 1.0
    assert 5 in ids[2:] and int((rank_T == 0).sum()) > 0


@pytest.mark.parametrize("setting", [GREEDY, SamplingSettings(temperature=1.0, top_k=4, repetition_penalty=1.7)])
@pytest.mark.parametrize("ids", [[0, 2, 3, 7, 8, 11], [7, 2, 11, 0, 8, 3]], ids=["ascending", "in another order"])
def test_a_vocabulary_of_the_drafts_own_ranks_as_the_targets_does(ids: list[int], setting: SamplingSettings) -> None:
    """Equal to logits over the target's vocabulary that are -inf for what the draft cannot say, ties included."""
    draw, ids_R = torch.Generator().manual_seed(2), torch.tensor(ids)
    own_TR = torch.randn(60, 6, generator=draw).mul(2).round()
    pack = Pack([Text(torch.randint(0, 12, (62,), generator=draw).tolist(), 2)], own_TR.device)
    whole = trace_level(pack, 1, over_vocabulary(own_TR, ids_R, 12), lambda row: row, 12, setting)
    head, named_R = own_vocabulary(lambda row: row, ids_R)
    rank_T, q_T = trace_level(pack, 1, own_TR, head, 12, setting, named_R)
    assert torch.equal(rank_T, whole[0])
    assert torch.allclose(q_T, whole[1], rtol=1e-6) and int((rank_T == UNRANKED).sum()) > int((rank_T == 0).sum()) > 0
