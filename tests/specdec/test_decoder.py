"""The decoder against plain references: transformers' own forward, itself in a batch, the law of p."""

import functools
import itertools
from collections import Counter

import pytest
import torch
from proposing import CHAINS, COPIES, TREES, proposer_named
from stand_ins import prompts, target
from torch import Tensor

from draftforge.errors import ContextLengthError, InputError
from draftforge.specdec import decoder
from draftforge.specdec.decoder import decode_rounds, generate
from draftforge.specdec.models import CausalModel
from draftforge.specdec.proposers import Proposer
from draftforge.specdec.proposers.base import Ask, Draft
from draftforge.specdec.requests import DecodeRun, Generation, Request, RoundTimer
from draftforge.specdec.sampling import SamplingSettings, probabilities
from draftforge.specdec.tree import TreeBatch

GREEDY = SamplingSettings()
WARM = SamplingSettings(temperature=0.7, top_p=0.9)
PROPOSERS = (*CHAINS, *TREES)


def run(model: CausalModel, proposer: Proposer | None, requests: list[Request], **options: object) -> list[Generation]:
    done = dict(generate(model, proposer, requests, **options))  # type: ignore[arg-type]
    return [done[index] for index in range(len(requests))]


def greedy_requests(count: int = 5, max_new: int = 24) -> list[Request]:
    stops = frozenset({5, 17})
    lengths = [max_new - 3 * (index % 4) for index in range(count)]
    return [Request(ids, GREEDY, 9, length, stops) for ids, length in zip(prompts(count), lengths)]


def reference_greedy(model: CausalModel, request: Request) -> list[int]:
    """Greedy decoding with transformers' own forward and no cache at all."""
    ids = list(request.prompt_ids)
    while len(ids) - len(request.prompt_ids) < request.max_new_tokens:
        with torch.no_grad():
            logits: Tensor = model.model(torch.tensor([ids]), use_cache=False).logits
        ids.append(int(logits[0, -1].argmax()))
        if ids[-1] in request.stop_ids:
            break
    return ids[len(request.prompt_ids) :]


@functools.cache
def plain_answers(count: int = 5) -> list[Generation]:
    return run(target(), None, greedy_requests(count), batch_size=count)


def test_plain_greedy_equals_transformers() -> None:
    model, requests = target(), greedy_requests(7, max_new=30)
    answers = run(model, None, requests, batch_size=3)
    assert [answer.tokens for answer in answers] == [reference_greedy(model, request) for request in requests]
    ends = ["stop" if answer.tokens[-1] in request.stop_ids else "length" for answer, request in zip(answers, requests)]
    assert [answer.finish for answer in answers] == ends and set(ends) == {"stop", "length"}


@pytest.mark.parametrize("name", PROPOSERS)
def test_greedy_output_equals_plain_decoding(name: str) -> None:
    """And every token of it is accounted for by a round."""
    model, requests = target(), greedy_requests()
    answers = run(model, proposer_named(name, model), requests, draft_tokens=4, batch_size=3)
    assert [(a.tokens, a.finish) for a in answers] == [(a.tokens, a.finish) for a in plain_answers()]
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
        assert not set(answer.tokens[:-1]) & request.stop_ids


@pytest.mark.parametrize(
    "name", ["small", "eagle3", "medusa", "dflash", "lookup", "cascade", "lookahead", "small-tree", "small-dynamic"]
)
def test_with_nothing_to_draft_it_is_plain_decoding(name: str) -> None:
    model, requests = target(), greedy_requests(3)
    answers = run(model, proposer_named(name, model), requests, draft_tokens=0, batch_size=2)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain_answers(3)]
    assert all(round_ == (0, 0, 1, 0) for answer in answers for round_ in answer.rounds)


def ways(tokens: list[int], parents: list[int], candidates: list[bool]) -> list[tuple[int, ...]]:
    """The tokens from the root to each candidate."""
    known: dict[int, tuple[int, ...]] = {-1: ()}
    for node, (token, parent) in enumerate(zip(tokens, parents)):
        known[node] = (*known[parent], token)
    return [known[node] for node, candidate in enumerate(candidates) if candidate]


@pytest.mark.parametrize("name", PROPOSERS)
def test_drafts_do_not_depend_on_the_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal answers prove nothing here: verification repairs whatever a draft with a confused cache says."""
    model, requests = target(), greedy_requests(8)
    original = decoder._Decoder._draft

    def drafts(batch_size: int) -> dict[int, list[list[tuple[int, ...]]]]:
        seen: dict[int, list[list[tuple[int, ...]]]] = {}

        def listening(self: decoder._Decoder, rows: int, sampling: list[SamplingSettings]) -> Draft:
            draft = original(self, rows, sampling)
            tree = draft.tree
            for slot, *columns in zip(self.slots, *(x.tolist() for x in tree[:3])):
                seen.setdefault(slot.number, []).append(ways(*columns))
            return draft

        proposer = proposer_named(name, model)
        monkeypatch.setattr(decoder._Decoder, "_draft", listening)
        run(model, proposer, requests, draft_tokens=4, batch_size=batch_size)
        return seen

    assert drafts(1) == drafts(5)


@pytest.mark.parametrize(("name", "rule"), [("small", "token"), ("eagle3-reduced", "block"), ("eagle3", "onehot")])
def test_every_rule_is_greedy_at_temperature_zero(name: str, rule: str) -> None:
    model, requests = target(), greedy_requests(4)
    greedy = run(model, proposer_named(name, model), requests, rule="greedy")
    other = run(model, proposer_named(name, model), requests, rule=rule)
    assert [(a.tokens, a.rounds) for a in greedy] == [(a.tokens, a.rounds) for a in other]


SAMPLED = [
    ("small", "token"),
    ("small", "match"),
    ("cascade-small", "block"),
    ("eagle3-reduced", "block"),
    ("medusa", "token"),
    ("lookahead", "onehot"),
    ("medusa-tree", "onehot"),
    ("eagle-dynamic", "onehot"),
    ("small-sampled", "multiround"),
    ("small-merged", "multiround"),
    ("small-distinct", "recursive"),
    ("small-distinct", "traversal"),
    ("small-distinct", "match"),
]
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


@pytest.mark.parametrize("name", ["small", "eagle", "small-distinct", "small-merged"])
def test_match_gives_the_very_tokens_of_plain_sampling(name: str) -> None:
    """The target's draw at a place is the one that plain decoding makes there."""
    model = target()
    requests = [Request(ids, EVERY_PROCESSOR, i, 24) for i, ids in enumerate(prompts(6))]
    answers = run(model, proposer_named(name, model), requests, rule="match", batch_size=4)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in run(model, None, requests)]
    assert sum(r.accepted for answer in answers for r in answer.rounds) > 0


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


def test_two_decoders_may_take_turns() -> None:
    model, requests = target(), greedy_requests(2)
    alone = [run(model, proposer_named("small", model), [request]) for request in requests]
    turns = [decode_rounds(DecodeRun(model, proposer_named("small", model), [request])) for request in requests]
    done: list[dict[int, Generation]] = [{}, {}]
    for steps in itertools.zip_longest(*turns, fillvalue=[]):
        for found, step in zip(done, steps):
            found.update(step)
    assert [found[0].tokens for found in done] == [one[0].tokens for one in alone]


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
