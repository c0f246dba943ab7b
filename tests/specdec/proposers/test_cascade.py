"""A cascade against its draft alone: whatever the helper guesses, node by node the same chain, in fewer passes."""

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_ins import VOCAB, llama, near_copy, prompts, target
from torch import Tensor

from draftforge.errors import InputError
from draftforge.specdec import decoder
from draftforge.specdec.decoder import generate
from draftforge.specdec.drafts.small import SmallDraft
from draftforge.specdec.models import States
from draftforge.specdec.proposers.base import Ask, Draft, Proposer, Texts
from draftforge.specdec.proposers.cascade import Ahead, CascadeProposer, Choice, Helper, LookupHelper, SmallHelper
from draftforge.specdec.proposers.factory import make_proposer
from draftforge.specdec.requests import Request
from draftforge.specdec.sampling_settings import SamplingSettings

GREEDY = SamplingSettings()
WARM = SamplingSettings(temperature=0.8, top_p=0.95)
HOT = SamplingSettings(temperature=1.2, top_k=20, repetition_penalty=1.3)
MODEL = target()
DRAFT = near_copy(MODEL)
STATES = States(torch.zeros(1, 1, 1), None)


class Guesses:
    """A helper that says what it is told to: the next of the given tokens, over and over."""

    waits = False

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens, self._at = tokens, 0

    def reserve(self, slots: int, tokens: int, levels: int) -> None: ...

    def begin(self, slots_R: Tensor, known: Texts) -> None: ...

    def move(self, source: int, destination: int, length: Tensor) -> None: ...

    def guess(self, ahead: Ahead, count: int, choose: Choice) -> tuple[Tensor, Tensor]:
        batch = len(ahead.counts_B)
        guesses = torch.tensor([[self._next() for _ in range(count)] for _ in range(batch)])
        return guesses, torch.full((batch,), count)

    def _next(self) -> int:
        self._at += 1
        return self._tokens[self._at % len(self._tokens)]


HELPERS: dict[str, Callable[[], Helper]] = {
    "lookup": LookupHelper,
    "smaller": lambda: SmallHelper(near_copy(MODEL, 0.1, seed=7), most=2),
    "itself": lambda: SmallHelper(DRAFT, most=5),
    "stubborn": lambda: Guesses([7, 7, 3, 60]),
}


def drafts_of(
    proposer: Proposer, requests: list[Request], monkeypatch: pytest.MonkeyPatch, rule: str, K: int, batch_size: int
) -> tuple[dict[int, list[int]], list[tuple[list[int], Tensor | None]]]:
    """Answers, and every slot's candidates with their q in every round."""
    seen: list[tuple[list[int], Tensor | None]] = []
    original = decoder._Decoder._draft

    def listening(self: decoder._Decoder, rows: int, sampling: list[SamplingSettings]) -> Draft:
        draft = original(self, rows, sampling)
        for slot, known in enumerate(draft.tree.candidate_BN):
            q_NV = None if draft.q_BNV is None else draft.q_BNV[slot, known]
            seen.append((draft.tree.tokens_BN[slot, known].tolist(), q_NV))
        return draft

    monkeypatch.setattr(decoder._Decoder, "_draft", listening)
    answers = dict(generate(MODEL, proposer, requests, rule=rule, draft_tokens=K, batch_size=batch_size))
    monkeypatch.setattr(decoder._Decoder, "_draft", original)
    return {number: answer.tokens for number, answer in answers.items()}, seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampling", "rule"),
    [
        ([GREEDY], "greedy"),
        ([WARM], "token"),
        ([HOT, WARM, GREEDY], "block"),
        ([HOT], "match"),
        ([HOT, WARM], "onehot"),
    ],
)
def test_the_chain_is_the_drafts_own_node_by_node(
    sampling: list[SamplingSettings], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever the helper. With refills, slots that move, limits that differ and stops."""
    stops, K = frozenset({5, 17}), 5
    asked = [Request(ids, sampling[n % len(sampling)], n, 14 - 3 * (n % 4), stops) for n, ids in enumerate(prompts(6))]
    answers, chains = drafts_of(make_proposer(DRAFT, MODEL), asked, monkeypatch, rule, K, batch_size=3)
    for helper, make in HELPERS.items():
        cascade = CascadeProposer(DRAFT, make())
        ours, helped = drafts_of(cascade, asked, monkeypatch, rule, K, batch_size=3)
        assert ours == answers, helper
        assert [tokens for tokens, _ in helped] == [tokens for tokens, _ in chains], helper
        for (_, q_NV), (_, alone_NV) in zip(helped, chains):
            assert (q_NV is None) == (alone_NV is None)
            if q_NV is not None and alone_NV is not None:
                torch.testing.assert_close(q_NV, alone_NV, atol=1e-5, rtol=1e-4)
        least = {"smaller": 1.0, "itself": 0.5}.get(helper)
        assert (
            cascade.passes <= cascade.passes_alone if least is None else cascade.passes < least * cascade.passes_alone
        )


@settings(max_examples=40)
@given(
    numbers=st.lists(st.floats(0, 1, exclude_max=True), min_size=8, max_size=8),
    guesses=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=7),
    limits=st.lists(st.integers(0, 4), min_size=2, max_size=2).filter(any),
    sampling=st.lists(st.sampled_from([GREEDY, WARM, HOT]), min_size=2, max_size=2),
)
def test_no_guess_moves_a_draw(
    numbers: list[float], guesses: list[int], limits: list[int], sampling: list[SamplingSettings]
) -> None:
    """For any numbers: so the drafted tokens have the law that they have when the draft drafts alone."""
    u_BN = torch.tensor(numbers, dtype=torch.float64).view(2, 4)
    seen_BV = torch.arange(VOCAB).expand(2, -1) % 5 == 0
    ask = Ask(torch.tensor(limits), max(limits), sampling, lambda count: u_BN[:, :count], seen_BV)
    said = []
    for proposer in (make_proposer(DRAFT, MODEL), CascadeProposer(DRAFT, Guesses(guesses))):
        proposer.reserve(2, 20, 4)
        with torch.no_grad():
            proposer.begin(torch.tensor([0, 1]), Texts.of([[3, 1, 4], [1, 5]]), STATES)
            draft = proposer.propose(ask)
        known_BN = draft.tree.candidate_BN
        assert draft.q_BNV is not None
        said.append((known_BN, draft.tree.tokens_BN[known_BN], draft.q_BNV[known_BN]))
    (known, tokens, q), (known_too, tokens_too, q_too) = said
    assert torch.equal(known, known_too) and torch.equal(tokens, tokens_too)
    torch.testing.assert_close(q, q_too, atol=1e-5, rtol=1e-4)


def passes(helper: Helper, K: int, count: int = 1) -> tuple[int, int]:
    """Passes of one round for a batch, with and without the helper; slot b asks for K - b."""
    cascade = CascadeProposer(DRAFT, helper)
    cascade.reserve(count, 30, K)
    with torch.no_grad():
        cascade.begin(torch.arange(count), Texts.of([[3, 1, 4 + slot] for slot in range(count)]), STATES)
        cascade.propose(Ask(K - torch.arange(count), K, [GREEDY] * count, None, None))
    return cascade.passes, cascade.passes_alone


def test_passes_saved_are_counted() -> None:
    """A helper that is always right leaves one pass; `most` bounds what it may guess; one that is wrong costs none."""
    (chain,) = chains([[3, 1, 4]], 6)
    assert passes(SmallHelper(DRAFT, most=9), 6) == (1, 6)
    assert passes(SmallHelper(DRAFT, most=2), 6) == (2, 6)
    assert passes(SmallHelper(DRAFT, most=1), 6) == (3, 6)
    assert passes(SmallHelper(DRAFT, most=2), 6, count=3) == (2, 6)
    wrong = next(token for token in range(VOCAB) if token not in chain)
    assert passes(Guesses([wrong]), 6) == (6, 6)
    assert passes(SmallHelper(DRAFT), 1) == (1, 1)


def chains(rows: list[list[int]], K: int) -> list[list[int]]:
    """What the draft says greedily after texts."""
    with torch.no_grad():
        for _ in range(K):
            rows = [
                [*row, int(DRAFT.lm.logits(DRAFT.lm.states(torch.tensor([row])).hidden_BTH[0, -1]).argmax())]
                for row in rows
            ]
    return [row[-K:] for row in rows]


def test_a_helper_that_draws_does_so_with_the_drafts_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same model draws the same tokens, so that not one guess is wrong above temperature 0 either."""
    cascade = CascadeProposer(DRAFT, SmallHelper(DRAFT, most=3))
    asked = [Request(ids, HOT, n, 17) for n, ids in enumerate(prompts(3))]
    drafts_of(cascade, asked, monkeypatch, "token", K=4, batch_size=1)
    assert cascade.passes_alone > 3 * cascade.passes / 1.5


def test_lookup_guesses_from_what_was_just_drafted() -> None:
    def guess(texts: list[list[int]], drafted: list[list[int]], count: int) -> list[list[int]]:
        counts = torch.tensor([len(text) for text in texts])
        ids_SL = torch.zeros(len(texts), 20, dtype=torch.long)
        for row_L, text, more in zip(ids_SL, texts, drafted):
            row_L[: len(text) + len(more)] = torch.tensor([*text, *more])
        ahead = Ahead(ids_SL, counts, torch.tensor([len(more) for more in drafted]), False)
        choose = Choice(Ask(counts, 9, [GREEDY] * len(texts), None, None), ahead)
        tokens_BG, counts_B = LookupHelper().guess(ahead, count, choose)
        return [row[:n] for row, n in zip(tokens_BG.tolist(), counts_B.tolist())]

    texts = [[1, 2, 3, 9, 8], [4, 5, 6]]
    assert guess(texts, [[2, 3], [7, 7]], 3) == [[9, 8, 2], [7, 7, 7]]
    assert guess(texts, [[], [4]], 1) == [[], [5]]


def test_refusals_name_value_and_rule() -> None:
    with pytest.raises(InputError, match=f"helper: vocab_size 40: must be {VOCAB}, the draft's"):
        CascadeProposer(DRAFT, SmallHelper(SmallDraft(llama(vocab=40))))
    with pytest.raises(InputError, match="helper: 0 guesses: must be at least 1"):
        SmallHelper(DRAFT, most=0)
