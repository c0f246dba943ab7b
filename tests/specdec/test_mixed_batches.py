"""Every way of drafting, and every rule, for requests as unlike as they can be: in a batch each has the drafts, the
answer and the rounds that it has alone, to the last bit of float32.
"""

import functools

import pytest
from proposing import CHAINS, COPIES, DRAWN_TREES, TREES, proposer_named, takes
from stand_ins import prompts, target

from draftforge.errors import InputError
from draftforge.specdec import decoder
from draftforge.specdec.accept_rules import RULES
from draftforge.specdec.models import CausalModel
from draftforge.specdec.proposers.base import Draft, Proposer
from draftforge.specdec.proposers.tree_shape import ROOT
from draftforge.specdec.requests import DecodeRun, Generation, Request
from draftforge.specdec.sampling_settings import SamplingSettings

pytestmark = pytest.mark.slow

Way = tuple[int, ...]

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ012345678"
SETTINGS = [
    SamplingSettings(temperature=0.7, top_p=0.9),
    SamplingSettings(),
    SamplingSettings(temperature=0.9, top_k=6, top_p=0.95, min_p=0.02, repetition_penalty=1.2),
    SamplingSettings(repetition_penalty=1.4),
    SamplingSettings(temperature=1.2, min_p=0.05),
]
LONGEST = [1, 15, 5, 12, 2, 10, 16, 8]
"""Some are gone after their first token or round, and their slots serve others."""


def decode(ids: list[int]) -> str:
    return "".join(LETTERS[token] for token in ids)


def requests(greedy: bool = False) -> list[Request]:
    return [
        Request(
            ids,
            SETTINGS[1 + 2 * (i % 2)] if greedy else SETTINGS[i % len(SETTINGS)],
            seed=(-7) ** i,
            max_new_tokens=LONGEST[i],
            stop_ids=frozenset({5, 17}) if i % 3 == 0 else frozenset(),
            stop_strings=("Q", "7a") if i % 3 == 1 else (),
        )
        for i, ids in enumerate(prompts(len(LONGEST)))
    ]


def run(
    model: CausalModel, proposer: Proposer | None, asked: list[Request], rule: str, batch: int
) -> tuple[list[Generation], dict[int, list[list[Way]]]]:
    """Answers, and by request the tokens from the root to each candidate of every round."""
    seen: dict[int, list[list[Way]]] = {}
    original = decoder._Decoder._draft

    def listening(self: decoder._Decoder, rows: int, sampling: list[SamplingSettings]) -> Draft:
        draft = original(self, rows, sampling)
        for slot, *columns in zip(self.slots, *(x.tolist() for x in draft.tree[:3])):
            seen.setdefault(slot.number, []).append(ways(*columns))
        return draft

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder._Decoder, "_draft", listening)
        done = dict(decoder.generate(model, proposer, asked, rule, 3, batch, decode=decode))
    return [done[index] for index in range(len(asked))], seen


def ways(tokens: list[int], parents: list[int], candidates: list[bool]) -> list[Way]:
    known: dict[int, Way] = {ROOT: ()}
    for node, (token, parent) in enumerate(zip(tokens, parents)):
        known[node] = (*known[parent], token)
    return [known[node] for node, candidate in enumerate(candidates) if candidate]


NAMES = (*CHAINS, *TREES, *DRAWN_TREES)
EVERY_RULE = {
    "small": RULES,
    "small-tree": RULES,
    "small-sampled": ("multiround", "traversal"),
    "small-distinct": ("recursive", "traversal", "match"),
}
"""Ways of drafting that meet those of these rules that take them; the others meet one each."""
FOR_ALL = ["match", "onehot", "typical"]
"""Above temperature 0: rules that judge every draft; others are for those that are drawn in some way."""


def pairs() -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for number, name in enumerate(NAMES):
        rules = [rule for rule in RULES if takes(rule, name)]
        several = [rule for rule in rules if rule in EVERY_RULE.get(name, ())]
        of_its_kind = [rule for rule in rules if rule not in ("greedy", *FOR_ALL)] or FOR_ALL
        found += [(name, rule) for rule in several or [of_its_kind[number % len(of_its_kind)]]]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_run_takes_exactly_the_rules_that_suit_the_draft(name: str) -> None:
    model = target()
    proposer, warm = proposer_named(name, model), [Request([1], SETTINGS[0], 0, 2)]
    for rule in RULES.keys() - {"greedy"}:
        if takes(rule, name):
            DecodeRun(model, proposer, warm, rule)
        else:
            with pytest.raises(InputError, match=f"rule: '{rule}': "):
                DecodeRun(model, proposer, warm, rule)


@functools.cache
def plain_answers() -> list[Generation]:
    return run(target(), None, requests(), "match", batch=4)[0]


@pytest.mark.parametrize(("name", "rule"), pairs())
def test_drafts_answers_and_rounds_are_what_they_are_alone(name: str, rule: str) -> None:
    """Equal answers alone would prove little: verification repairs whatever a draft with a confused cache says."""
    model, asked = target(), requests(greedy=rule == "greedy")
    alone, drafts_alone = run(model, proposer_named(name, model), asked, rule, batch=1)
    together, drafts = run(model, proposer_named(name, model), asked, rule, batch=4)
    assert [(a.tokens, a.finish, a.rounds) for a in alone] == [(a.tokens, a.finish, a.rounds) for a in together]
    assert drafts == drafts_alone
    if rule == "match":  # the target's draw at a place is the one that plain decoding makes there
        assert [(a.tokens, a.finish) for a in together] == [(a.tokens, a.finish) for a in plain_answers()]
    rounds = [r for answer in alone for r in answer.rounds]
    assert sum(r.accepted for r in rounds) > 0 or name in (*COPIES, "jacobi")
    assert {a.finish for a in alone} == {"stop", "length"}
