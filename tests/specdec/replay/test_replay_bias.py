"""Above temperature 0: replay tells what the decoder counts, and the plain average over positions does not.

Rounds do not start at a uniform sample of positions: a round that ends at a token the draft is bad at starts the next
one right behind it. Shapes: V tokens, T round starts, K drafted tokens.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch
from stand_ins import bigram

from draftforge.eval.acceptance import Estimate, tau
from draftforge.eval.counts import CountRow, to_table
from draftforge.specdec.decoder import Generation, Request, generate
from draftforge.specdec.drafts.small import SmallDraft
from draftforge.specdec.models import CausalModel
from draftforge.specdec.proposers.base import Proposer
from draftforge.specdec.proposers.factory import make_drafter, make_proposer
from draftforge.specdec.proposers.static_tree import StaticProposer
from draftforge.specdec.proposers.tree_shape import TreeShape
from draftforge.specdec.replay.expected_rounds import (
    RoundCounts,
    count_rounds,
    survival_block,
    survival_chosen,
    survival_match,
    survival_token,
)
from draftforge.specdec.replay.replay import replay
from draftforge.specdec.replay.target_trace import RecordedAnswer, TargetTrace, trace_target
from draftforge.specdec.sampling_settings import SamplingSettings

WARM = SamplingSettings(temperature=1.0)
K, LENGTH, ANSWERS = 4, 48, 360
PROMPT = [0]
SHAPE = TreeShape([[0], [1], [0, 0], [1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0, 0]])
Table = dict[int, dict[int, float]]
WAYS: Table = {1: {2: 1.0}, 2: {3: 1.0}, 3: {0: 1.0}, 4: {5: 1.0}, 5: {0: 1.0}, 6: {0: 1.0}, 7: {7: 0.6, 0: 0.4}}
TARGET: Table = {**WAYS, 0: {1: 0.4, 4: 0.3, 6: 0.2, 7: 0.1}}
DRAFT: Table = {**WAYS, 0: {7: 0.6, 1: 0.2, 4: 0.1, 6: 0.1}}
"""The draft is good at all tokens but those that follow token 0."""


class Case(NamedTuple):
    rule: str
    tree: bool


CASES = [
    *(Case(rule, tree=False) for rule in ("token", "block", "onehot", "match")),
    *(Case(rule, tree=True) for rule in ("onehot", "match")),
]


def model_of(table: Table, noise: float) -> CausalModel:
    p_VV = torch.full((8, 8), noise / 8)
    for token, following in table.items():
        for other, share in following.items():
            p_VV[token, other] += (1 - noise) * share
    return bigram(p_VV.log())


@cache
def models() -> tuple[CausalModel, CausalModel]:
    return model_of(TARGET, noise=0.08), model_of(DRAFT, noise=0.2)


def proposer_for(case: Case) -> Proposer:
    model, draft = models()
    small = SmallDraft(draft.model)
    return (
        StaticProposer(make_drafter(small, model), SHAPE, "deterministic") if case.tree else make_proposer(small, model)
    )


def answers_of(proposer: Proposer | None, rule: str, first_seed: int) -> list[Generation]:
    requests = [Request(PROMPT, WARM, first_seed + n, LENGTH) for n in range(ANSWERS)]
    done = dict(generate(models()[0], proposer, requests, rule=rule, draft_tokens=K, batch_size=ANSWERS))
    return [done[n] for n in range(ANSWERS)]


@cache
def plain_answers() -> list[list[int]]:
    return [answer.tokens for answer in answers_of(None, "onehot", 0)]


def estimated(counts: Sequence[RoundCounts], rule: str) -> Estimate:
    """tau with its interval, clustered by answer."""
    rows = [
        CountRow("small", 1, f"c{n}", 0, f"c{n}", "d", "selection", "128", WARM.key, rule, K, "", "replay", one)
        for n, one in enumerate(counts)
    ]
    return tau(to_table(rows), 0.95)


def error(estimate: Estimate) -> float:
    return (estimate.high - estimate.low) / (2 * 1.96)


def traced_answers() -> TargetTrace:
    return trace_target(models()[0], [RecordedAnswer(PROMPT, answer, LENGTH) for answer in plain_answers()], WARM)


def position_average(case: Case) -> float:
    """1 + the mean over all positions of what a round that starts there accepts."""
    proposer, traced = proposer_for(case), traced_answers()
    trace = proposer.trace(traced.pack, K, WARM, None)
    if case.tree or case.rule == "onehot":
        shape = proposer.shape(K)
        assert shape is not None
        survival_RK = survival_chosen(shape.follow(trace.rank_RK.numpy())[0], K)
    elif case.rule == "match":
        survival_RK = survival_match(trace.q_RK.numpy())
    else:
        assert traced.p_R is not None
        p_RK = traced.pack.ahead(traced.p_R, K, 1.0).numpy()
        survival_RK = {"token": survival_token, "block": survival_block}[case.rule](p_RK, trace.q_RK.numpy())
    return 1 + float(survival_RK.sum(1).mean())


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}-{'tree' if case.tree else 'chain'}")
def test_replay_covers_what_the_decoder_counts_and_the_average_over_positions_does_not(case: Case) -> None:
    proposer = proposer_for(case)
    replayed_counts = [counted.counts for (counted,) in replay(proposer, traced_answers(), [case.rule], [K])]
    replayed = estimated(replayed_counts, case.rule)
    answers = answers_of(proposer_for(case), case.rule, first_seed=10_000)
    decoded = estimated([count_rounds(answer.rounds, K) for answer in answers], case.rule)
    naive = position_average(case)
    apart = 3 * float(np.hypot(error(replayed), error(decoded)))
    assert abs(replayed.value - decoded.value) < apart
    assert abs(naive - decoded.value) > max(apart, 0.02 * decoded.value)
    assert not replayed.low < naive < replayed.high
