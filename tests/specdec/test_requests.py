"""Per-request settings: stop strings, repetition penalties, and what is refused."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from proposing import CHAINS, COPIES, TREES, proposer_named
from stand_ins import prompts, target

from draftforge.errors import InputError
from draftforge.specdec.decoder import Generation, Request, generate
from draftforge.specdec.models import CausalModel
from draftforge.specdec.proposers import Proposer
from draftforge.specdec.requests import until_stop
from draftforge.specdec.sampling import SamplingSettings

GREEDY = SamplingSettings()
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ012345678"


def decode(ids: list[int]) -> str:
    return "".join(LETTERS[token] for token in ids)


def run(model: CausalModel, proposer: Proposer | None, requests: list[Request], **options: object) -> list[Generation]:
    done = dict(generate(model, proposer, requests, decode=decode, **options))  # type: ignore[arg-type]
    return [done[index] for index in range(len(requests))]


@pytest.mark.parametrize("name", [*CHAINS, *TREES])
def test_stop_strings_end_an_answer_as_in_plain_decoding(name: str) -> None:
    model = target()
    whole = run(model, None, [Request(ids, GREEDY, 0, 30) for ids in prompts(6)])
    stops = [decode(answer.tokens[place : place + 2]) for place, answer in zip((0, 1, 4, 9, 17, 28), whole)]
    requests = [Request(ids, GREEDY, 0, 30, stop_strings=(stop,)) for ids, stop in zip(prompts(6), stops)]
    for batch_size in (1, 4):
        answers = run(model, proposer_named(name, model), requests, batch_size=batch_size)
        for answer, stop, full in zip(answers, stops, whole):
            text = decode(full.tokens)
            assert decode(answer.tokens) == text[: text.index(stop) + 2]
            assert answer.finish == "stop"
            assert sum(r.emitted for r in answer.rounds) == len(answer.tokens) - 1


@given(
    st.lists(st.integers(0, 4), max_size=12), st.lists(st.integers(0, 4), min_size=1, max_size=5),
    st.lists(st.text("abcd", min_size=1, max_size=4), min_size=1, max_size=2),
)  # fmt: skip
def test_a_stop_string_is_found_wherever_tokens_part_it(known: list[int], new: list[int], stops: list[str]) -> None:
    """Against a scan of the whole text; what came before held none, or the answer would have ended there.

    Token 4 spells nothing, as special tokens do that are left out of a text.
    """

    def decode(ids: list[int]) -> str:
        return "".join("abcd"[token] for token in ids if token < 4)

    if any(stop in decode(known) for stop in stops):
        return
    kept, stopped = until_stop(known, new, Request([0], GREEDY, 0, 30, stop_strings=tuple(stops)), decode)
    ends = [n for n in range(1, len(new) + 1) if any(stop in decode([*known, *new[:n]]) for stop in stops)]
    assert (kept, stopped) == (new[: ends[0]], True) if ends else (new, False)


@pytest.mark.parametrize("name", [*CHAINS, *TREES])
def test_a_repetition_penalty_holds_for_target_and_draft(name: str) -> None:
    model = target()
    settings = [SamplingSettings(repetition_penalty=penalty) for penalty in (1.0, 1.3, 4.0)]
    requests = [Request(ids, settings[i % 3], 0, 24) for i, ids in enumerate(prompts(6))]
    plain = run(model, None, requests)
    bare = run(model, None, [Request(request.prompt_ids, GREEDY, 0, 24) for request in requests])
    assert [a.tokens == b.tokens for a, b in zip(plain, bare)] == [True, False, False] * 2
    for batch_size in (1, 4):
        answers = run(model, proposer_named(name, model), requests, batch_size=batch_size)
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain]
    if name not in COPIES:  # a draft that forgets the penalty would still be right now and then, but seldom
        rounds = [r for answer in answers[2::3] for r in answer.rounds]
        assert sum(r.accepted for r in rounds) > 0


def full_passes(model: CausalModel, prompt: list[int], penalty: float, first_only: bool = False) -> list[int]:
    """20 penalised tokens without a cache. `first_only`: a decoder that forgets the penalty after its first token."""
    ids = list(prompt)
    for count in range(20):
        with torch.no_grad():
            logits = model.logits(model.states(torch.tensor([ids])).hidden_BTH[0, -1])
        if count == 0 or not first_only:
            seen = sorted(set(ids))
            logits[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


def test_plain_penalised_decoding_equals_full_passes() -> None:
    model, forgetful = target(), 0
    for prompt, penalty in zip(prompts(6), [1.3, 4.0] * 3):
        (answer,) = run(model, None, [Request(prompt, SamplingSettings(repetition_penalty=penalty), 0, 20)])
        assert answer.tokens == full_passes(model, prompt, penalty)
        forgetful += answer.tokens == full_passes(model, prompt, penalty, first_only=True)
    assert forgetful < 3


def test_refusals() -> None:
    model = target()
    with pytest.raises(InputError, match="need `decode`"):
        list(generate(model, None, [Request([1], GREEDY, 0, 4, stop_strings=("a",))]))
    with pytest.raises(InputError, match="none may be empty"):
        run(model, None, [Request([1], GREEDY, 0, 4, stop_strings=("a", ""))])
    warm = SamplingSettings(temperature=1.0)
    with pytest.raises(InputError, match="takes chains, not trees"):
        run(model, proposer_named("small-sampled", model), [Request([1], warm, 0, 4)], rule="token")
    with pytest.raises(InputError, match="takes drafts drawn"):
        run(model, proposer_named("small-distinct", model), [Request([1], warm, 0, 4)], rule="multiround")
    with pytest.raises(InputError, match="use onehot"):
        run(model, proposer_named("small-dynamic", model), [Request([1], warm, 0, 4)], rule="traversal")


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
