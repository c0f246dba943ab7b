"""Jacobi decoding against the iteration written out with plain passes, and its rounds by hand."""

from collections.abc import Sequence

import pytest
import torch
from stand_ins import bigram, prompts, target
from torch import Tensor

from draftforge.errors import InputError
from draftforge.specdec.decoder import generate
from draftforge.specdec.models import CausalModel, States
from draftforge.specdec.proposers.base import Ask, Texts
from draftforge.specdec.proposers.lookahead import JacobiProposer
from draftforge.specdec.replay.packing import Pack, Text
from draftforge.specdec.requests import Generation, Request
from draftforge.specdec.sampling_settings import SamplingSettings

GREEDY = SamplingSettings()
STATES = States(torch.zeros(1, 1, 1), None)


def says(model: CausalModel, ids: Sequence[int], penalty: float = 1.0) -> list[int]:
    """The likeliest token after each of the ids, by a plain pass."""
    with torch.no_grad():
        logits_TV: Tensor = model.logits(model.states(torch.tensor([list(ids)])).hidden_BTH[0])
    for place, logits_V in enumerate(logits_TV):
        seen = sorted(set(ids[: place + 1]))
        logits_V[seen] = torch.where(logits_V[seen] > 0, logits_V[seen] / penalty, logits_V[seen] * penalty)
    return logits_TV.argmax(-1).tolist()


def iterate(model: CausalModel, request: Request, K: int) -> list[tuple[int, int, int]]:
    """Drafted, accepted and emitted of each round, without cache or tree."""
    penalty = request.sampling.repetition_penalty
    ids = [*request.prompt_ids, says(model, request.prompt_ids, penalty)[-1]]
    end = len(request.prompt_ids) + request.max_new_tokens
    guesses, rounds = [ids[-1]] * K, list[tuple[int, int, int]]()
    while len(ids) < end and ids[-1] not in request.stop_ids:
        draft = guesses[: min(K, end - len(ids) - 1)]
        row = says(model, [*ids, *draft], penalty)[len(ids) - 1 :]
        accepted = next((n for n, guess in enumerate(draft) if guess != row[n]), len(draft))
        new = row[: accepted + 1]
        stop = next((n for n, token in enumerate(new, 1) if token in request.stop_ids), len(new))
        rounds.append((len(draft), min(accepted, stop), stop))
        ids += new[:stop]
        guesses = row[accepted + 1 :]
        guesses += [([*new, *guesses])[-1]] * (K - len(guesses))
    return rounds


@pytest.mark.parametrize(("K", "penalty"), [(1, 1.3), (3, 1.0), (6, 1.3), (6, 1.0)])
def test_rounds_are_those_of_the_plain_iteration(K: int, penalty: float) -> None:
    """Three slots, whose requests end at unlike lengths and by stops, and which others take over."""
    model, stops = target(), frozenset({5, 17})
    setting = SamplingSettings(repetition_penalty=penalty)
    requests = [Request(ids, setting, 0, 6 + 5 * (n % 4), stops) for n, ids in enumerate(prompts(8))]
    done = dict(generate(model, JacobiProposer(), requests, draft_tokens=K, batch_size=3))
    for number, request in enumerate(requests):
        assert [r[:3] for r in done[number].rounds] == iterate(model, request, K)
    assert any(r.accepted for one in done.values() for r in one.rounds)


def answer(model: CausalModel, K: int, **options: object) -> Generation:
    ((_, generation),) = generate(model, JacobiProposer(), [Request([1], GREEDY, 0, **options)], draft_tokens=K)  # type: ignore[arg-type]
    return generation


def counting_target(vocab: int = 40) -> CausalModel:
    """After t comes t + 1."""
    return bigram(8.0 * torch.eye(vocab).roll(1, dims=1))


def test_a_chain_of_which_each_pass_mends_one_token_gains_nothing() -> None:
    """Where a token depends on the last one alone, wrong guesses make wrong guesses: 2 2 2 -> 3 3 3, and 3 is known."""
    generation = answer(counting_target(), 3, max_new_tokens=9)
    assert generation.tokens == list(range(2, 11))
    assert [r[:3] for r in generation.rounds] == [(3, 0, 1)] * 5 + [(2, 0, 1), (1, 0, 1), (0, 0, 1)]


def test_a_constant_text_is_guessed_whole_and_a_stop_ends_it() -> None:
    same = bigram(8.0 * torch.eye(6))
    assert [r[:3] for r in answer(same, 3, max_new_tokens=10).rounds] == [(3, 3, 4), (3, 3, 4), (0, 0, 1)]
    assert [r[:3] for r in answer(same, 2, max_new_tokens=6).rounds] == [(2, 2, 3), (1, 1, 2)]


def test_guesses_are_what_the_target_said_after_those_not_accepted() -> None:
    proposer = JacobiProposer()
    proposer.reserve(2, 30, 4)
    proposer.begin(torch.tensor([0, 1]), Texts.of([[3, 8], [9]]), STATES)

    def drafts(*limits: int) -> list[list[int]]:
        draft = proposer.propose(Ask(torch.tensor(limits), max(limits), [GREEDY] * len(limits), None, None))
        assert draft.chain and draft.q_BNV is None and draft.tree.drawn == "deterministic"
        counts = draft.tree.candidate_BN.sum(1).tolist()
        return [row[:count] for row, count in zip(draft.tree.tokens_BN.tolist(), counts)]

    assert drafts(4, 3) == [[8, 8, 8, 8], [9, 9, 9]]
    proposer.observe_target_argmax(torch.tensor([[8, 1, 2, 3, 4], [9, 9, 9, 7, 0]]))
    proposer.observe(Texts.of([[8, 1], [9, 9, 9, 7]]), STATES)
    assert drafts(4, 4) == [[2, 3, 4, 4], [7, 7, 7, 7]]
    proposer.observe_target_argmax(torch.tensor([[5, 6, 7, 8, 9], [1, 2, 3, 4, 5]]))
    proposer.observe(Texts.of([[5], [1, 2]]), STATES)
    proposer.move(1, 0)
    assert drafts(2) == [[3, 4]]
    proposer.begin(torch.tensor([1]), Texts.of([[6]]), STATES)
    assert drafts(0, 2) == [[], [6, 6]]


def test_no_recorded_answer_tells_its_rounds() -> None:
    assert not JacobiProposer().replayable
    with pytest.raises(InputError, match="jacobi: its guesses depend on the rounds before, decode it"):
        JacobiProposer().trace(Pack([Text([1, 2], 1)], torch.device("cpu")), 2, GREEDY, None)
