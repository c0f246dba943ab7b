"""Replay against decoding: equal count by count at temperature 0, right on average above it."""

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from proposing import CHAINS, COPIES, DECODED, SHAPE, TREES, proposer_named, taught
from stand_ins import near_copy, prompts, random_eagle3, target

from draftforge.errors import InputError
from draftforge.specdec.accept_rules import RULES
from draftforge.specdec.decoder import Request, generate
from draftforge.specdec.drafts import DraftModule
from draftforge.specdec.models import CausalModel
from draftforge.specdec.proposers.base import UNRANKED, Proposer, Trace
from draftforge.specdec.proposers.factory import make_drafter, make_proposer
from draftforge.specdec.proposers.static_tree import StaticProposer
from draftforge.specdec.proposers.tree_shape import TreeShape
from draftforge.specdec.replay.dynamic import replay_dynamic
from draftforge.specdec.replay.expected_rounds import RoundCounts, count_rounds
from draftforge.specdec.replay.packing import Pack, Text
from draftforge.specdec.replay.replay import Counted, rank_accuracies, replay, replayable
from draftforge.specdec.replay.target_trace import RecordedAnswer, TargetTrace, trace_target
from draftforge.specdec.sampling_settings import SamplingSettings

GREEDY = SamplingSettings()
WARM = SamplingSettings(temperature=1.0, top_k=12, repetition_penalty=1.2)
DRY = SamplingSettings(repetition_penalty=1.4)


def traced_by(
    model: CausalModel, proposer: Proposer, setting: SamplingSettings, *answers: RecordedAnswer
) -> TargetTrace:
    """The target's pass, as far as the proposer reads it."""
    return trace_target(model, answers, setting, proposer.aux_layers, proposer.needs_hidden_states)


def replayed(
    model: CausalModel,
    proposer: Proposer,
    setting: SamplingSettings,
    answer: RecordedAnswer,
    rules: list[str],
    Ks: list[int],
) -> list[Counted]:
    """One answer, alone."""
    (counted,) = replay(proposer, traced_by(model, proposer, setting, answer), rules, Ks)
    return counted


REPLAYED = [*(name for name in (*CHAINS, *TREES) if name not in DECODED), "small-sampled", "eagle3-distinct"]


@pytest.mark.slow
@pytest.mark.parametrize("name", REPLAYED)
def test_replay_equals_decoding_count_by_count(name: str) -> None:
    """Penalised requests and others, decoded in one batch."""
    model, settings, K = target(), (GREEDY, DRY), 3 + 2 * (REPLAYED.index(name) % 2)
    proposer = proposer_named(name, model, noise=0.1)
    requests = [Request(ids, settings[n % 2], 0, 28, frozenset({5, 17})) for n, ids in enumerate(prompts(6))]
    answers = dict(generate(model, proposer, requests, draft_tokens=K, batch_size=6))
    decoded = [count_rounds(answers[n].rounds, K) for n in range(6)]
    for first, setting in enumerate(settings):
        recorded = [RecordedAnswer(requests[n].prompt_ids, answers[n].tokens, 28) for n in range(first, 6, 2)]
        counted = replay(proposer, traced_by(model, proposer, setting, *recorded), ["greedy"], [K])
        assert [one.counts for (one,) in counted] == decoded[first::2]
    assert sum(one.accepted for one in decoded) > 0 or name in COPIES


STATIC: dict[str, Callable[[CausalModel], DraftModule]] = {
    "small": lambda model: near_copy(model, noise=0.1),
    "eagle3, 2 tokens": lambda model: random_eagle3(model, draft_vocab=2),  # fewer than the shape's siblings
    "eagle3, 40 tokens": lambda model: random_eagle3(model, draft_vocab=40),
    "medusa, 3 heads": lambda model: taught("medusa"),  # fewer than the shape's levels
    "dflash, 3 masks": lambda model: taught("dflash"),
}


@cache
def static(name: str) -> tuple[CausalModel, DraftModule]:
    model = target()
    return model, STATIC[name](model)


def tree_of(name: str) -> tuple[CausalModel, Proposer]:
    model, draft = static(name)
    return model, StaticProposer(make_drafter(draft, model), SHAPE, "deterministic")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "setting"),
    [
        *((name, WARM) for name in STATIC),
        *((name, DRY if number % 2 else GREEDY) for number, name in enumerate(STATIC)),
    ],
)
def test_one_trace_counts_static_trees_as_drafting_does(name: str, setting: SamplingSettings) -> None:
    """Drafting for real along the answer, at temperature 0 as the decoder itself does; also above it."""
    model, proposer = tree_of(name)
    accepted = 0.0
    for number, ids in enumerate(prompts(4)[1:]):
        limit = 13 + 4 * number
        ((_, answer),) = generate(model, None, [Request(ids, setting, number, limit, frozenset({5, 17}))])
        traced = traced_by(model, proposer, setting, RecordedAnswer(ids, answer.tokens, limit))
        rules = ["greedy"] if setting.greedy else ["onehot", "match"]
        for rule, K, counts in replay(proposer, traced, rules, [1, 3, 6])[0]:
            assert [counts] == replay_dynamic(proposer, traced, K), (rule, K)
            if setting.greedy:
                ((_, decoded),) = generate(
                    model, proposer, [Request(ids, setting, 0, limit, frozenset({5, 17}))], draft_tokens=K
                )
                assert counts == count_rounds(decoded.rounds, K)
            accepted += counts.accepted
    assert accepted > 0 or name == "eagle3, 2 tokens"


@pytest.mark.slow
def test_a_tree_whose_path_holds_the_stop() -> None:
    """The stop is an accepted node with children and siblings; what is below it is drafted, and not reached."""
    model, proposer = tree_of("small")
    inside = 0
    for ids in prompts(3):
        ((_, whole),) = generate(model, None, [Request(ids, GREEDY, 0, 24)])
        for stop in set(whole.tokens[4:12]):
            request = Request(ids, GREEDY, 0, 24, frozenset({stop}))
            ((_, decoded),) = generate(model, proposer, [request], draft_tokens=4)
            (counted,) = replayed(model, proposer, GREEDY, RecordedAnswer(ids, decoded.tokens, 24), ["greedy"], [4])
            assert counted.counts == count_rounds(decoded.rounds, 4)
            inside += any(r.emitted == r.accepted for r in decoded.rounds)
    assert inside > 1


@pytest.mark.slow
@pytest.mark.parametrize("shape", [None, SHAPE], ids=["chain", "tree"])
def test_drafts_whose_tokens_tie_are_counted_as_decoded(shape: TreeShape | None) -> None:
    """As in half precision, where many logits are equal: drafting and the ranks of a trace break ties alike."""
    model = target()
    draft = near_copy(model)
    exact = draft.lm.logits
    draft.lm.logits = lambda hidden: exact(hidden).div(8).round()  # type: ignore[method-assign]
    proposer = StaticProposer(make_drafter(draft, model), shape)
    requests = [Request(ids, GREEDY, 0, 28) for ids in prompts(7)]
    answers = dict(generate(model, proposer, requests))
    recorded = [RecordedAnswer(request.prompt_ids, answers[n].tokens, 28) for n, request in enumerate(requests)]
    counted = replay(proposer, traced_by(model, proposer, GREEDY, *recorded), ["greedy"], [4])
    assert [one.counts for (one,) in counted] == [count_rounds(answers[n].rounds, 4) for n in range(7)]
    assert sum(one.counts.accepted for (one,) in counted) > 20


def test_one_trace_serves_every_draft_length() -> None:
    model = target()
    proposer = proposer_named("eagle3", model)
    request = Request(prompts(1)[0], GREEDY, 0, 28)
    ((_, answer),) = generate(model, None, [request])
    recorded = RecordedAnswer(request.prompt_ids, answer.tokens, 28)
    for counted in replayed(model, proposer, GREEDY, recorded, ["greedy"], [1, 2, 4]):
        assert replayed(model, proposer, GREEDY, recorded, ["greedy"], [counted.draft_tokens]) == [counted]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("eagle3-reduced", "block"),
        ("dflash", "token"),
        ("small-tree", "match"),
        ("small-sampled", "onehot"),
        ("eagle3-dynamic", "onehot"),
    ],
)
def test_replay_above_zero_gives_the_decoders_mean(name: str, rule: str) -> None:
    """Rounds a token: replay on plain samples against decoding with other seeds, within four standard errors."""
    model, K, count, length = target(), 3, 150, 16
    proposer = proposer_named(name, model)
    prompt = [2, 7, 1]
    plain = [Request(prompt, WARM, seed, length) for seed in range(count)]
    other = [Request(prompt, WARM, 10_000 + seed, length) for seed in range(count)]
    answers = [
        RecordedAnswer(prompt, answer.tokens, length) for _, answer in generate(model, None, plain, batch_size=50)
    ]
    counted = replay(proposer, traced_by(model, proposer, WARM, *answers), [rule], [K])
    decoded = [
        count_rounds(answer.rounds, K)
        for _, answer in generate(model, proposer, other, rule=rule, draft_tokens=K, batch_size=50)
    ]
    for field in ("rounds", "drafted", "accepted"):
        ours = np.array([getattr(one.counts, field) for (one,) in counted])
        theirs = np.array([getattr(counts, field) for counts in decoded])
        error = np.sqrt((ours.var() + theirs.var()) / count)
        assert abs(ours.mean() - theirs.mean()) < 4 * error + 1e-9, field


def test_an_answer_of_one_token_has_no_round() -> None:
    model = target()
    proposer = proposer_named("small", model)
    (counted,) = replayed(model, proposer, GREEDY, RecordedAnswer([1, 2], [5], 10), ["greedy"], [2])
    assert counted.counts == RoundCounts(0.0, 0.0, 0.0, 0.0, (0.0, 0.0), (0.0, 0.0))


LOSSLESS = {name for name, rule in RULES.items() if rule.lossless}


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("small", {"token", "block", "onehot", "match"}),
        ("medusa", {"token", "block", "onehot", "match"}),
        ("dflash", {"token", "block", "onehot", "match"}),
        ("lookup", {"onehot", "match"}),
        ("suffix", {"onehot", "match"}),
        ("jacobi", set()),
        ("lookahead", set()),
        ("small-tree", {"onehot", "match"}),
        ("small-dynamic", {"onehot", "match"}),
        ("small-sampled", {"onehot"}),
        ("small-distinct", {"onehot"}),
        ("small-merged", {"onehot"}),
    ],
)
def test_which_rules_can_be_replayed(name: str, rules: set[str]) -> None:
    """At temperature 0 all that are lossless are the greedy one; above it those whose rounds the answer tells."""
    model = target()
    proposer = proposer_named(name, model)
    assert {rule for rule in RULES if replayable(proposer, rule, WARM)} == rules
    assert {rule for rule in RULES if replayable(proposer, rule, GREEDY)} == (LOSSLESS if rules else set())
    traced = traced_by(model, proposer, WARM, RecordedAnswer([1, 2], [5, 6, 7], 10))
    assert [counted.rule for counted in replay(proposer, traced, sorted(rules), [2])[0]] == sorted(rules)
    for rule in RULES.keys() - rules:
        can = ", ".join(name for name in RULES if name in rules) or "none"
        with pytest.raises(InputError, match=rf"rule: '{rule}': cannot be replayed .* can: {can}$"):
            replay(proposer, traced, [rule], [2])
    with pytest.raises(InputError, match="rule: 'often': must be one of greedy, "):
        replay(proposer, traced, ["often"], [2])


def traces_of(proposer: Proposer, model: CausalModel, K: int, length: int = 28) -> tuple[Pack, Trace]:
    """What the draft says along greedy answers."""
    done = generate(model, None, [Request(ids, GREEDY, 0, length) for ids in prompts(12)], batch_size=12)
    answers = [RecordedAnswer(prompts(12)[index], answer.tokens, length) for index, answer in done]
    traced = traced_by(model, proposer, GREEDY, *answers)
    return traced.pack, proposer.trace(traced.pack, K, GREEDY, traced.states)


def pack_of(*rounds: int) -> Pack:
    return Pack([Text([0] * (3 + count), 3) for count in rounds], torch.device("cpu"))


def test_accuracies_by_hand() -> None:
    # Column j of row r tells of token 1 + r + j: of 4 starts level 1 has 4 tokens, level 2 has 3, level 5 none.
    rank_TK = torch.tensor([[0, 1, 0, 0, 9], [1, UNRANKED, 0, 9, 9], [0, 1, 9, 9, 9], [2, 9, 9, 9, 9]])
    traces = [(pack_of(4), Trace(rank_TK, torch.zeros(4, 5)))]
    assert rank_accuracies(traces, 2) == [[0.5, 0.25], [0.0, 2 / 3], [1.0, 0.0], [1.0, 0.0], []]
    # A start at which nothing is drafted says nothing; other traces add theirs.
    more = Trace(torch.tensor([[0], [0]]), torch.zeros(2, 1), offered_R=torch.tensor([0, 1]))
    traces.append((pack_of(2), more))
    assert rank_accuracies(traces, 2)[:2] == [[0.6, 0.2], [0.0, 2 / 3]]
    assert rank_accuracies([], 2) == []


def test_the_tree_of_measured_accuracies_accepts_more() -> None:
    """Medusa heads: on one level the best ranks by measurement, so no tree of as many nodes accepts more there; and
    along the answers more than a chain, and than the tree that knows no ranks."""
    model, draft = static("medusa, 3 heads")
    chain = make_proposer(draft, model)
    traces = traces_of(chain, model, K=3)
    accuracy = rank_accuracies([traces], ranks=8)
    assert len(accuracy) == 3 and all(len(row) == 8 and 0 < sum(row) <= 1 for row in accuracy)

    def accepted(shape: TreeShape, K: int) -> float:
        """Per round, whatever the token at which it starts."""
        return float(shape.cut(K).follow(traces[1].rank_RK.numpy())[0].mean())

    for nodes in (2, 3, 6, 10):
        best = TreeShape.of_accuracies(accuracy, nodes)
        assert len(best) == nodes
        flat = TreeShape.of_accuracies(accuracy[:1], nodes)
        assert accepted(flat, 1) == pytest.approx(sum(sorted(accuracy[0], reverse=True)[:nodes]))
        naive = TreeShape(TreeShape.branching([2, 2, 2]).choices[:nodes])
        assert accepted(best, 3) >= max(accepted(TreeShape.chain(nodes), 3), accepted(naive, 3), accepted(flat, 3))
