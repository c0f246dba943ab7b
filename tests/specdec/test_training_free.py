"""What all training-free ways of drafting share: nothing is lost, wherever an answer ends, and at any temperature."""

from collections import Counter

import pytest
import torch
from proposing import TRAINING_FREE
from stand_ins import bigram, target
from torch import Tensor

from draftforge.specdec.decoder import generate
from draftforge.specdec.proposers import training_free
from draftforge.specdec.proposers.suffix import SuffixProposer
from draftforge.specdec.requests import Request
from draftforge.specdec.sampling_settings import SamplingSettings

GREEDY = SamplingSettings()
WARM = SamplingSettings(temperature=0.8)


def test_each_is_found_by_its_name() -> None:
    assert training_free.TRAINING_FREE.keys() == TRAINING_FREE.keys()
    for name, make in training_free.TRAINING_FREE.items():
        assert type(make(target())) is type(TRAINING_FREE[name]())


@pytest.mark.parametrize("K", [1, 2, 5, 9])
@pytest.mark.parametrize("name", TRAINING_FREE)
def test_answers_that_end_by_a_stop_inside_a_draft_or_before_it_is_whole(name: str, K: int) -> None:
    """A target that goes round in a ring is drafted right: each answer's stop and length cut a draft elsewhere."""
    ring = bigram(8.0 * torch.eye(6)[[1, 2, 0, 4, 5, 3]])
    ends = [(stop, length) for stop in (None, 1, 2) for length in (1, 2, 3, 12, 17)]
    requests = [
        Request([0, 1, 2] * 4, GREEDY, 0, length, frozenset() if stop is None else frozenset({stop}))
        for stop, length in ends
    ]
    plain = dict(generate(ring, None, requests))
    for batch_size in (1, 4):
        done = dict(generate(ring, TRAINING_FREE[name](), requests, draft_tokens=K, batch_size=batch_size))
        assert [(done[n].tokens, done[n].finish) for n in range(len(ends))] == [
            (plain[n].tokens, plain[n].finish) for n in range(len(ends))
        ]
        rounds = [r for one in done.values() for r in one.rounds]
        assert all(r.emitted <= r.accepted + 1 <= K + 1 for r in rounds)
    if name != "jacobi":
        assert any(r.emitted == r.accepted for r in rounds)  # a stop that was drafted
        assert max(r.accepted for r in rounds) >= min(K, 3)


def law(logits_VV: Tensor, last: int, length: int) -> dict[tuple[int, ...], float]:
    """The probability of every answer of a bigram target."""
    p_VV = (logits_VV / WARM.temperature).double().softmax(-1)
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        found = {
            (*way, token): mass * float(p_VV[(last, *way)[-1], token])
            for way, mass in found.items()
            for token in range(len(p_VV))
        }
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        *((name, "onehot") for name in (*TRAINING_FREE, "suffix with memory")),
        ("lookahead", "match"),
        ("suffix", "match"),
    ],
)
def test_sampled_answers_follow_the_law_where_much_is_accepted(name: str, rule: str) -> None:
    """Chi-square of whole answers of five tokens, two rounds or more, that go on from a text full of such answers."""
    torch.manual_seed(1)
    logits_VV, trials, length = 1.5 * torch.randn(4, 4), 2000, 5
    prompt = [0, 1, 2, 3, 0, 2, 1, 3, 3, 1, 0, 0, 2, 2, 3, 1, 1, 2, 0, 3]
    requests = [Request(prompt, WARM, seed, length) for seed in range(trials)]
    proposer = TRAINING_FREE[name]() if name in TRAINING_FREE else SuffixProposer(nodes=6, memory=40)
    done = dict(generate(bigram(logits_VV), proposer, requests, rule, draft_tokens=3, batch_size=100))
    rounds = [r for one in done.values() for r in one.rounds]
    assert sum(r.accepted for r in rounds) > 0.1 * len(rounds)
    seen = Counter(tuple(one.tokens) for one in done.values())
    cells = [(seen[way], trials * p) for way, p in law(logits_VV, prompt[-1], length).items() if trials * p >= 5]
    cells.append((trials - sum(n for n, _ in cells), trials - sum(e for _, e in cells)))
    statistic, freedom = sum((n - e) ** 2 / e for n, e in cells), len(cells) - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5  # about four sigma
