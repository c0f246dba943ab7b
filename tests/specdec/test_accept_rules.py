"""The registry of accept rules: which drafts each may judge, and what it is called."""

import re
from pathlib import Path
from typing import NamedTuple, get_args

import pytest

from draftforge.errors import InputError
from draftforge.specdec import verify
from draftforge.specdec.accept_rules import RULES, check_rule, choose_rule, deciding_rule, preferred_rules, rules_for
from draftforge.specdec.proposers.tree_shape import Drawn
from draftforge.specdec.sampling_settings import SamplingSettings

COLD, WARM = SamplingSettings(), SamplingSettings(temperature=0.8)


class Ways(NamedTuple):
    """A way of drafting."""

    drawn: Drawn
    chain: bool


CHOSEN_CHAIN, CHOSEN_TREE = Ways("deterministic", True), Ways("deterministic", False)
IID_CHAIN, IID_TREE, APART_TREE = Ways("iid", True), Ways("iid", False), Ways("without_replacement", False)


def test_every_rule_has_its_function() -> None:
    assert all(callable(getattr(verify, f"verify_{name}")) for name in RULES)
    assert all(name == rule.name and rule.drawn for name, rule in RULES.items())


def test_the_documented_table_is_the_registry() -> None:
    """How drafts must be drawn, and what else a reader picks a rule by, is written down a second time on purpose."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "decoder.md").read_text()
    rows = [line for line in page.splitlines() if re.match(r"\| `\w+` \|", line)]
    yes = {True: "yes", False: "no"}
    assert rows == [
        f"| `{rule.name}` | {', '.join(way for way in get_args(Drawn) if way in rule.drawn)} | {yes[rule.trees]} "
        f"| {yes[rule.needs_q]} | {yes[rule.lossless]} | {', '.join(rule.engines) or '-'} |"
        for rule in RULES.values()
    ]


def test_the_target_draws_once_a_round_or_at_every_level() -> None:
    draws = {name: rule.target_draws(3) for name, rule in RULES.items()}
    assert {name: count for name, count in draws.items() if count != 1} == {"match": 4}


def test_only_a_lossy_rule_is_called_lossy() -> None:
    assert [name for name, rule in RULES.items() if not rule.lossless] == ["typical"]
    assert RULES["typical"].label == "typical (lossy)"
    assert RULES["block"].label == "block"


@pytest.mark.parametrize(
    ("rule", "drafts", "sampling", "message"),
    [
        ("block", CHOSEN_CHAIN, WARM, "reads the draft's probabilities; this proposer has none, use onehot"),
        ("multiround", APART_TREE, WARM, "takes drafts drawn iid, not without_replacement"),
        ("recursive", IID_TREE, WARM, "takes drafts drawn without_replacement, not iid"),
        ("token", IID_TREE, WARM, "takes chains, not trees"),
        ("block", CHOSEN_TREE, COLD, "takes chains, not trees"),
        ("greedy", IID_CHAIN, WARM, r"is for temperature 0, not 0\.8"),
        ("blocks", IID_CHAIN, WARM, "must be one of greedy, token, block, onehot"),
    ],
)
def test_a_rule_refuses_drafts_that_it_would_distort(
    rule: str, drafts: Ways, sampling: SamplingSettings, message: str
) -> None:
    with pytest.raises(InputError, match=f"rule: '{rule}': {message}"):
        check_rule(rule, drafts, sampling)


def test_a_rule_takes_drafts_that_it_keeps_lossless() -> None:
    """Above temperature 0; at 0 nothing is drawn, and a rule for chains still refuses trees."""
    ways = {"chosen": CHOSEN_CHAIN, "chain": IID_CHAIN, "tree": IID_TREE, "apart": APART_TREE}
    taken = {
        "token": ["chain"],
        "block": ["chain"],
        "onehot": ["chosen", "chain", "tree", "apart"],  # under it a proposer that could draw chooses
        "match": ["chosen", "chain", "tree", "apart"],
        "multiround": ["chain", "tree"],
        "recursive": ["apart"],
        "traversal": ["chain", "tree", "apart"],
    }
    for rule, names in taken.items():
        for name, drafts in ways.items():
            if name in names:
                assert check_rule(rule, drafts, WARM).name == rule
            else:
                with pytest.raises(InputError):
                    check_rule(rule, drafts, WARM)


def test_one_function_chooses_the_rule() -> None:
    engines = preferred_rules(["greedy", "token"], "vllm"), preferred_rules(["greedy", "token"], "vllm", "block")
    assert engines == (["onehot", "token"], ["block", "token"])
    assert preferred_rules(["greedy", "token", "onehot"], "draftforge") == ["token", "onehot"]
    assert choose_rule(COLD, IID_CHAIN, ["token"], asked="block") == "greedy"
    assert choose_rule(WARM, IID_CHAIN, ["token"], asked="block") == "block"
    assert choose_rule(WARM, IID_CHAIN, ["token"]) == "token"
    with pytest.raises(InputError, match="reads the draft's probabilities"):
        choose_rule(WARM, CHOSEN_CHAIN, ["onehot"], asked="block")
    # What decides among counted rows is what was put first when they were scored.
    for drafts in (CHOSEN_CHAIN, CHOSEN_TREE, IID_CHAIN, IID_TREE, APART_TREE):
        for preferred in (["token"], ["typical", "traversal", "block"], ["match", "typical"]):
            rules = rules_for(WARM, drafts, preferred)
            assert deciding_rule(rules, preferred) == next(rule for rule in rules if RULES[rule].lossless)


def test_each_way_of_drafting_has_a_rule() -> None:
    ways = {"chosen": CHOSEN_TREE, "lookup": CHOSEN_CHAIN, "chain": IID_CHAIN, "tree": IID_TREE, "apart": APART_TREE}

    def rules(*preferred: str) -> dict[str, list[str]]:
        return {name: rules_for(WARM, drafts, preferred) for name, drafts in ways.items()}

    chosen = {"chosen": ["onehot"], "lookup": ["onehot"]}
    assert rules("token") == chosen | {"chain": ["token"], "tree": ["multiround"], "apart": ["recursive"]}
    sampled = {"chain": ["block"], "tree": ["traversal"], "apart": ["traversal", "recursive"]}
    assert rules("traversal", "recursive", "block") == chosen | sampled
    lossy = {name: [*names, "typical"] for name, names in rules("token").items()}
    assert rules("token", "typical") == lossy == rules("typical", "token")
    assert all(rules_for(COLD, drafts, ["token"]) == ["greedy"] for drafts in ways.values())
