"""Replay against decoding: equal count by count at temperature 0, right on average above it."""

import numpy as np
import pytest
from proposing import CHAINS, TREES, proposer_named
from stand_ins import near_copy, prompts, target

from draftforge.errors import InputError
from draftforge.specdec.decoder import Request, generate
from draftforge.specdec.proposers import (
    StaticProposer,
    TreeShape,
    make_drafter,
)
from draftforge.specdec.replay import replay_sample, trace_target
from draftforge.specdec.sampling import SamplingSettings
from draftforge.specdec.walk import RoundCounts, count_rounds

GREEDY = SamplingSettings()
WARM = SamplingSettings(temperature=1.0, top_k=12, repetition_penalty=1.2)


@pytest.mark.parametrize("K", [1, 3, 5])
@pytest.mark.parametrize("setting", [GREEDY, SamplingSettings(repetition_penalty=1.4)], ids=["bare", "penalised"])
@pytest.mark.parametrize("name", [*CHAINS, *(name for name in TREES if name != "small-merged")])
def test_replay_equals_decoding_count_by_count(name: str, setting: SamplingSettings, K: int) -> None:
    model = target()
    proposer = proposer_named(name, model, noise=0.1)
    requests = [Request(ids, setting, 0, 28, frozenset({5, 17})) for ids in prompts(10)]
    total = 0.0
    for index, answer in dict(generate(model, proposer, requests, draft_tokens=K)).items():
        ids = requests[index].prompt_ids
        decoded = count_rounds(answer.rounds, K)
        traced = trace_target(model, ids, answer.tokens, setting, proposer.aux_layers, proposer.reads_states)
        (replayed,) = replay_sample(proposer, traced, ids, answer.tokens, setting, ["greedy"], [K], 28)
        assert replayed.counts == decoded
        total += decoded.accepted
    assert total > 0 or name == "lookup"


def test_one_trace_serves_every_draft_length() -> None:
    model = target()
    proposer = proposer_named("eagle3", model)
    request = Request(prompts(1)[0], GREEDY, 0, 28)
    ((_, answer),) = generate(model, None, [request])
    traced = trace_target(model, request.prompt_ids, answer.tokens, GREEDY, proposer.aux_layers, proposer.reads_states)
    together = replay_sample(proposer, traced, request.prompt_ids, answer.tokens, GREEDY, ["greedy"], [1, 2, 4], 28)
    for counted in together:
        (alone,) = replay_sample(
            proposer, traced, request.prompt_ids, answer.tokens, GREEDY, ["greedy"], [counted.draft_tokens], 28
        )
        assert alone == counted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        *((name, rule) for name in ("small", "eagle3-reduced") for rule in ("token", "block", "onehot")),
        ("small-tree", "onehot"),
        ("eagle3-dynamic", "onehot"),
    ],
)
def test_replay_above_zero_gives_the_decoders_mean(name: str, rule: str) -> None:
    """Rounds a token: replay on plain samples against decoding with other seeds, within four standard errors."""
    model, K, answers, length = target(), 3, 150, 16
    proposer = proposer_named(name, model)
    prompt = [2, 7, 1]
    plain = [Request(prompt, WARM, seed, length) for seed in range(answers)]
    other = [Request(prompt, WARM, 10_000 + seed, length) for seed in range(answers)]
    replayed: list[RoundCounts] = []
    for _, answer in generate(model, None, plain, batch_size=50):
        traced = trace_target(model, prompt, answer.tokens, WARM, proposer.aux_layers, proposer.reads_states)
        (counted,) = replay_sample(proposer, traced, prompt, answer.tokens, WARM, [rule], [K], length)
        replayed.append(counted.counts)
    decoded = [
        count_rounds(answer.rounds, K)
        for _, answer in generate(model, proposer, other, rule=rule, draft_tokens=K, batch_size=50)
    ]
    for field in ("rounds", "drafted", "accepted"):
        ours = np.array([getattr(counts, field) for counts in replayed])
        theirs = np.array([getattr(counts, field) for counts in decoded])
        error = np.sqrt(ours.var() / answers + theirs.var() / answers)
        assert abs(ours.mean() - theirs.mean()) < 4 * error + 1e-9, field


def test_an_answer_of_one_token_has_no_round() -> None:
    model = target()
    proposer = proposer_named("small", model)
    traced = trace_target(model, [1, 2], [5], GREEDY)
    (counted,) = replay_sample(proposer, traced, [1, 2], [5], GREEDY, ["greedy"], [2], 10)
    assert counted.counts == RoundCounts(0.0, 0.0, 0.0, 0.0, (0.0, 0.0), (0.0, 0.0))


def test_refuses_what_it_cannot_replay() -> None:
    model = target()
    proposer = proposer_named("small", model)
    traced = trace_target(model, [1, 2], [5, 6, 7], WARM)
    with pytest.raises(InputError, match="temperature 0"):
        replay_sample(proposer, traced, [1, 2], [5, 6, 7], WARM, ["greedy"], [2], 10)
    proposer = StaticProposer(make_drafter(near_copy(model), model), TreeShape.branching([2, 2]))
    with pytest.raises(InputError, match="cannot be replayed"):
        replay_sample(proposer, traced, [1, 2], [5, 6, 7], WARM, ["token"], [2], 10)
