"""Every way of drafting, and every rule, for requests as unlike as they can be: in a batch each has the
answer and the rounds that it has alone, to the last bit of float32.
"""

import functools

import pytest
from proposing import CHAINS, COPIES, DRAWN_TREES, TREES, proposer_named, takes
from stand_ins import prompts, target

from draftforge.errors import InputError
from draftforge.specdec.decoder import generate
from draftforge.specdec.models import CausalModel
from draftforge.specdec.proposers import Proposer
from draftforge.specdec.requests import DecodeRun, Generation, Request
from draftforge.specdec.rules import RULES
from draftforge.specdec.sampling import SamplingSettings

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ012345678"
SETTINGS = [
    SamplingSettings(temperature=0.7, top_p=0.9),
    SamplingSettings(),
    SamplingSettings(temperature=0.9, top_k=6, top_p=0.95, min_p=0.02, repetition_penalty=1.2),
    SamplingSettings(repetition_penalty=1.4),
    SamplingSettings(temperature=1.2, min_p=0.05),
]
LONGEST = [1, 24, 5, 21, 2, 18, 24, 9, 15]
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


def run(model: CausalModel, proposer: Proposer | None, asked: list[Request], rule: str, batch: int) -> list[Generation]:
    done = dict(generate(model, proposer, asked, rule, 3, batch, decode=decode))
    return [done[index] for index in range(len(asked))]


NAMES = (*CHAINS, *TREES, *DRAWN_TREES)
EVERY_RULE = ("small", "small-tree", "small-sampled", "small-distinct")
"""Ways of drafting that meet all rules that take them; the others meet one each."""


def pairs() -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for number, name in enumerate(NAMES):
        rules = [rule for rule in RULES if takes(rule, name)]
        found += [(name, rule) for rule in (rules if name in EVERY_RULE else [rules[number % len(rules)]])]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_run_takes_exactly_the_rules_that_suit_the_draft(name: str) -> None:
    model = target()
    proposer, warm = proposer_named(name, model), [Request([1], SETTINGS[0], 0, 2)]
    for rule in (rule for rule in RULES if rule != "greedy"):
        if takes(rule, name):
            DecodeRun(model, proposer, warm, rule)
        else:
            with pytest.raises(InputError, match=f"rule: '{rule}': "):
                DecodeRun(model, proposer, warm, rule)


@pytest.mark.parametrize(("name", "rule"), pairs())
def test_answers_and_rounds_are_what_they_are_alone(name: str, rule: str) -> None:
    model, asked = target(), requests(greedy=rule == "greedy")
    alone = run(model, proposer_named(name, model), asked, rule, batch=1)
    together = run(model, proposer_named(name, model), asked, rule, batch=4)
    assert [(a.tokens, a.finish, a.rounds) for a in alone] == [(a.tokens, a.finish, a.rounds) for a in together]
    rounds = [r for answer in alone for r in answer.rounds]
    assert sum(r.accepted for r in rounds) > 0 or name in COPIES
    assert {a.finish for a in alone} == {"stop", "length"}


@functools.cache
def plain_answers() -> list[Generation]:
    return run(target(), None, requests(), "match", batch=4)


@pytest.mark.parametrize("name", ["small", "eagle3-reduced", "lookup", "cascade", "small-dynamic", "small-distinct"])
def test_greedy_slots_beside_drawing_ones_have_the_plain_answer(name: str) -> None:
    model = target()
    answers = run(model, proposer_named(name, model), requests(), "match", batch=4)
    assert [a.tokens for a in answers] == [a.tokens for a in plain_answers()]
