"""The decoder against plain references: transformers' own forward, itself in a batch, the law of p."""

import functools
import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from proposing import CHAINS, COPIES, TREES, proposer_named
from stand_ins import prompts, target
from torch import Tensor

from draftforge.errors import ContextLengthError, InputError
from draftforge.specdec import decoder
from draftforge.specdec.decoder import decode_rounds, generate
from draftforge.specdec.models import CausalModel
from draftforge.specdec.proposers.base import Ask, Draft, Proposer
from draftforge.specdec.requests import DecodeRun, Generation, Lap, Request, RoundTimer, until_stop
from draftforge.specdec.sampling import probabilities
from draftforge.specdec.sampling_settings import SamplingSettings
from draftforge.specdec.tree import TreeBatch

GREEDY = SamplingSettings()
WARM = SamplingSettings(temperature=0.7, top_p=0.9)
PROPOSERS = (*CHAINS, *TREES)
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ012345678"


def decode(ids: list[int]) -> str:
    return "".join(LETTERS[token] for token in ids)


def run(model: CausalModel, proposer: Proposer | None, requests: list[Request], **options: object) -> list[Generation]:
    done = dict(generate(model, proposer, requests, decode=decode, **options))  # type: ignore[arg-type]
    return [done[index] for index in range(len(requests))]


def greedy_requests(count: int = 6, max_new: int = 24) -> list[Request]:
    stops = frozenset({5, 17})
    lengths = [max_new - 3 * (index % 4) for index in range(count)]
    return [Request(ids, GREEDY, 9, length, stops) for ids, length in zip(prompts(count), lengths)]


def reference_greedy(model: CausalModel, request: Request) -> list[int]:
    """Greedy decoding with transformers' own forward and no cache at all."""
    ids, penalty = list(request.prompt_ids), request.sampling.repetition_penalty
    while len(ids) - len(request.prompt_ids) < request.max_new_tokens:
        with torch.no_grad():
            logits_V: Tensor = model.model(torch.tensor([ids]), use_cache=False).logits[0, -1]
        seen = sorted(set(ids))
        logits_V[seen] = torch.where(logits_V[seen] > 0, logits_V[seen] / penalty, logits_V[seen] * penalty)
        ids.append(int(logits_V.argmax()))
        if ids[-1] in request.stop_ids or any(
            s in decode(ids[len(request.prompt_ids) :]) for s in request.stop_strings
        ):
            break
    return ids[len(request.prompt_ids) :]


@functools.cache
def of_all_kinds() -> tuple[list[Request], list[list[int]]]:
    """Greedy requests that end by length, by a stop id, by a string that two tokens spell; penalised or not. And the
    answers to them by passes over the whole text."""
    model, penalties = target(), itertools.cycle([1.0, 1.3, 4.0, 1.0])
    requests = [
        replace(
            request,
            sampling=SamplingSettings(repetition_penalty=penalty),
            stop_ids=request.stop_ids if n % 2 else frozenset(),
        )
        for n, (request, penalty) in enumerate(zip(greedy_requests(10), penalties))
    ]
    answers = [reference_greedy(model, request) for request in requests]
    for n, place in ((0, 0), (4, 9), (8, 5)):
        spelled = decode(answers[n][place : place + 2])
        requests[n] = replace(requests[n], stop_strings=(spelled,))
        answers[n] = reference_greedy(model, requests[n])
    return requests, answers


def test_plain_greedy_equals_transformers() -> None:
    requests, expected = of_all_kinds()
    answers = run(target(), None, requests, batch_size=3)
    assert [answer.tokens for answer in answers] == expected
    assert {answer.finish for answer in answers} == {"stop", "length"}
    bare = run(target(), None, [replace(request, sampling=GREEDY) for request in requests], batch_size=10)
    assert [a.tokens == b.tokens for a, b in zip(answers, bare)] == [n % 4 not in (1, 2) for n in range(10)]


@pytest.mark.slow
@pytest.mark.parametrize("name", PROPOSERS)
def test_greedy_output_equals_plain_decoding(name: str) -> None:
    """And every token of it is accounted for by a round."""
    model, (requests, expected) = target(), of_all_kinds()
    answers = run(model, proposer_named(name, model), requests, draft_tokens=4, batch_size=4)
    assert [answer.tokens for answer in answers] == expected
    rounds = [round_ for answer in answers for round_ in answer.rounds]
    if name not in COPIES:  # no pass by accident: some drafts are accepted and some are not
        assert 0 < sum(r.accepted for r in rounds) < sum(r.drafted for r in rounds)
    for request, answer in zip(requests, answers):
        assert sum(r.emitted for r in answer.rounds) == len(answer.tokens) - 1  # the prefill's token is no round
        emitted = 1
        for r in answer.rounds:
            levels = max(min(4, request.max_new_tokens - emitted - 1), 0)
            assert r.accepted <= levels
            assert r.drafted <= (levels if name in CHAINS else 10) and (r.drafted == 0) >= (levels == 0)
            assert r.emitted in (r.accepted, r.accepted + 1)
            emitted += r.emitted


@pytest.mark.parametrize(
    "name", ["small", "medusa", "dflash", "lookup", "cascade", "lookahead", "small-tree", "small-dynamic"]
)
def test_with_nothing_to_draft_it_is_plain_decoding(name: str) -> None:
    model, requests = target(), greedy_requests(3, max_new=12)
    answers = run(model, proposer_named(name, model), requests, draft_tokens=0, batch_size=2)
    assert [answer.tokens for answer in answers] == [reference_greedy(model, request) for request in requests]
    assert all(round_ == (0, 0, 1, 0) for answer in answers for round_ in answer.rounds)


@pytest.mark.parametrize(("name", "rule"), [("small", "token"), ("eagle3-reduced", "block"), ("eagle3", "onehot")])
def test_every_rule_is_greedy_at_temperature_zero(name: str, rule: str) -> None:
    model, requests = target(), greedy_requests(4)
    greedy = run(model, proposer_named(name, model), requests, rule="greedy")
    other = run(model, proposer_named(name, model), requests, rule=rule)
    assert [(a.tokens, a.rounds) for a in greedy] == [(a.tokens, a.rounds) for a in other]


SAMPLED = [
    ("small", "token"),
    ("eagle3-reduced", "block"),
    ("medusa-tree", "onehot"),
    ("small-merged", "multiround"),
    ("small-distinct", "recursive"),
    ("small-distinct", "traversal"),
]
"""Each rule that is not `match`, whose tokens are those of plain decoding (test_mixed_batches.py)."""
EVERY_PROCESSOR = SamplingSettings(temperature=0.9, top_k=6, top_p=0.95, min_p=0.02, repetition_penalty=1.2)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("small", "token"),
        ("small", "block"),
        ("cascade-small", "block"),
        ("small-tree", "onehot"),
        ("small-merged", "multiround"),
        ("small-distinct", "traversal"),
    ],
)
def test_no_number_serves_twice(name: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for two nodes, rounds, purposes or requests. A sample of answers is too coarse to show what that breaks."""
    model, proposer, original = target(), proposer_named(name, target()), decoder.verify_batch
    propose, used = proposer.propose, list[float]()

    def verifying(rule: str, p: Tensor, q: Tensor | None, tree: TreeBatch, u_BN: Tensor, u_final: Tensor) -> object:
        used.extend([*u_BN.flatten().tolist(), *u_final.flatten().tolist()])
        return original(rule, p, q, tree, u_BN, u_final)

    def proposing(ask: Ask) -> Draft:
        if ask.uniforms is not None:
            used.extend(ask.uniforms(proposer.most_nodes(3)).flatten().tolist())
        return propose(ask)

    monkeypatch.setattr(decoder, "verify_batch", verifying)
    monkeypatch.setattr(proposer, "propose", proposing)
    requests = [Request(ids, WARM, seed, 16) for seed, ids in enumerate(prompts(4))]
    run(model, proposer, requests, rule=rule, draft_tokens=3, batch_size=3)
    assert len(set(used)) == len(used) > 100


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rule"), [(None, "token"), *SAMPLED])
def test_sampled_answers_follow_the_target(name: str | None, rule: str) -> None:
    """Chi-square of the first three tokens together against the exact law, over many seeds: all processors are on,
    on both models, and answers take one to three rounds."""
    model, prompt, trials, depth = target(), [3, 1, 4], 1500, 4
    requests = [Request(prompt, EVERY_PROCESSOR, seed, depth) for seed in range(trials)]
    proposer = None if name is None else proposer_named(name, model)
    answers = run(model, proposer, requests, rule=rule, draft_tokens=2, batch_size=64)
    seen = Counter(tuple(answer.tokens) for answer in answers)
    law = enumerate_law(model, prompt, EVERY_PROCESSOR, depth)
    assert set(seen) <= set(law)
    if name not in (None, "lookup", "lookahead"):  # hardly anything comes twice
        assert sum(r.accepted for answer in answers for r in answer.rounds) > 0
    cells = [(seen[key], trials * p) for key, p in law.items() if trials * p >= 5]
    rest = (trials - sum(n for n, _ in cells), trials - sum(e for _, e in cells))
    cells.append(rest) if rest[1] > 1 else None
    statistic = sum((n - e) ** 2 / e for n, e in cells)
    freedom = len(cells) - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5  # about four sigma


def enumerate_law(
    model: CausalModel, prompt: list[int], settings: SamplingSettings, depth: int
) -> dict[tuple[int, ...], float]:
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(depth):
        longer: dict[tuple[int, ...], float] = {}
        for prefix, mass in law.items():
            ids = [*prompt, *prefix]
            seen_V = torch.zeros(model.vocab_size, dtype=torch.bool)
            seen_V[ids] = True
            with torch.no_grad():
                p = probabilities(model.logits(model.states(torch.tensor([ids])).hidden_BTH[0, -1]), settings, seen_V)
            for token in p.nonzero()[:, 0].tolist():
                longer[(*prefix, token)] = mass * float(p[token])
        law = longer
    return law


def test_timer_collects_every_round() -> None:
    model, requests = target(), greedy_requests(2)
    timer = RoundTimer(model.device)
    steps = [
        dict(done) for done in decode_rounds(DecodeRun(model, proposer_named("small", model), requests, timer=timer))
    ]
    answers = {index: answer for done in steps for index, answer in done.items()}
    assert len(timer.rounds) == sum(len(answer.rounds) for answer in answers.values()) == len(steps) - 1
    assert all(r.draft > 0 and r.verify > 0 and r.total > r.draft + r.verify for r in timer.rounds)


def test_a_round_that_was_launched_ahead_takes_from_the_end_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("draftforge.specdec.requests.time.perf_counter", lambda: now)
    timer, laps = RoundTimer(torch.device("cpu")), dict[str, Lap]()
    # Begun or ended at these times: the second and third begin inside the one before, the fourth after all of them.
    for name, at in [("a", 1.0), ("b", 2.0), ("a", 5.0), ("c", 6.0), ("b", 8.0), ("c", 12.0), ("d", 20.0), ("d", 21.0)]:
        now = at
        if name not in laps:
            laps[name] = timer.start()
            for _ in range(4):
                laps[name].mark()
        else:
            timer.end(laps[name], 0, 1)
    assert [one.total for one in timer.rounds] == [4.0, 3.0, 4.0, 1.0]


def test_two_decoders_may_take_turns() -> None:
    model, requests = target(), greedy_requests(2)
    alone = [run(model, proposer_named("small", model), [request]) for request in requests]
    turns = [decode_rounds(DecodeRun(model, proposer_named("small", model), [request])) for request in requests]
    done: list[dict[int, Generation]] = [{}, {}]
    for steps in itertools.zip_longest(*turns, fillvalue=[]):
        for found, step in zip(done, steps):
            found.update(step)
    assert [found[0].tokens for found in done] == [one[0].tokens for one in alone]


@given(
    st.lists(st.integers(0, 4), max_size=12), st.lists(st.integers(0, 4), min_size=1, max_size=5),
    st.lists(st.text("abcd", min_size=1, max_size=4), min_size=1, max_size=2),
)  # fmt: skip
def test_a_stop_string_is_found_wherever_tokens_part_it(known: list[int], new: list[int], stops: list[str]) -> None:
    """Against a scan of the whole text; what came before held none, or the answer would have ended there.

    Token 4 spells nothing, as special tokens do that are left out of a text.
    """

    def spell(ids: list[int]) -> str:
        return "".join("abcd"[token] for token in ids if token < 4)

    if any(stop in spell(known) for stop in stops):
        return
    kept, stopped = until_stop(known, new, Request([0], GREEDY, 0, 30, stop_strings=tuple(stops)), spell)
    ends = [n for n in range(1, len(new) + 1) if any(stop in spell([*known, *new[:n]]) for stop in stops)]
    assert (kept, stopped) == (new[: ends[0]], True) if ends else (new, False)


def test_a_barrier_holds_requests_back_until_all_before_it_are_answered() -> None:
    model, ends = target(), [0, 2, 5, 7]
    requests = [Request(ids, GREEDY, 0, 4 + 5 * (n % 3)) for n, ids in enumerate(prompts(7))]
    free = dict(generate(model, None, requests, batch_size=3))
    held = dict(generate(model, None, requests, batch_size=3, barriers=frozenset(ends)))
    assert {n: one.tokens for n, one in held.items()} == {n: one.tokens for n, one in free.items()}
    parts = [[held[n] for n in range(start, end)] for start, end in itertools.pairwise(ends)]
    for before, after in itertools.pairwise(parts):
        assert max(one.arrivals[-1] for one in before) <= min(one.begun for one in after)
    assert max(one.arrivals[0] for one in parts[1]) <= min(one.arrivals[-1] for one in parts[1])  # side by side


def test_refusals_name_value_and_rule() -> None:
    model = target()
    with pytest.raises(ContextLengthError, match="must fit the context of 256"):
        run(model, None, [Request([1] * 250, GREEDY, 0, 10)])
    with pytest.raises(InputError, match="empty prompt"):
        run(model, None, [Request([], GREEDY, 0, 10)])
    with pytest.raises(InputError, match="temperature 0"):
        run(model, proposer_named("small", model), [Request([1], WARM, 0, 10)], rule="greedy")
    with pytest.raises(InputError, match="must be one of"):
        run(model, proposer_named("small", model), [Request([1], GREEDY, 0, 10)], rule="magic")
    with pytest.raises(InputError, match="need `decode`"):
        list(generate(model, None, [Request([1], GREEDY, 0, 4, stop_strings=("a",))]))
    with pytest.raises(InputError, match="none may be empty"):
        run(model, None, [Request([1], GREEDY, 0, 4, stop_strings=("a", ""))])
    unfit = {"small-sampled": ("token", "takes chains, not trees"), "small-dynamic": ("traversal", "use onehot")}
    for name, (rule, message) in {**unfit, "small-distinct": ("multiround", "takes drafts drawn")}.items():
        with pytest.raises(InputError, match=message):
            run(model, proposer_named(name, model), [Request([1], WARM, 0, 4)], rule=rule)
