"""The registry of accept rules: which drafts each may judge, and what it is called."""

import re
from pathlib import Path
from typing import get_args

import pytest

from draftforge.errors import InputError
from draftforge.specdec import verify
from draftforge.specdec.rules import RULES, check_rule
from draftforge.specdec.sampling import SamplingSettings
from draftforge.specdec.tree import Drawn


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
    assert {name: rule.finals(3) for name, rule in RULES.items() if rule.finals(3) != 1} == {"match": 4}


def test_only_a_lossy_rule_is_called_lossy() -> None:
    assert [name for name, rule in RULES.items() if not rule.lossless] == ["typical"]
    assert RULES["typical"].label == "typical (lossy)"
    assert RULES["block"].label == "block"


def test_a_rule_refuses_drafts_that_it_would_distort() -> None:
    assert check_rule("token", "iid").needs_q
    assert not check_rule("onehot", "deterministic").needs_q
    with pytest.raises(InputError, match="rule: 'block': takes drafts drawn iid, not deterministic"):
        check_rule("block", "deterministic")
    with pytest.raises(InputError, match="rule: 'onehot': takes drafts drawn deterministic, not iid"):
        check_rule("onehot", "iid")
    with pytest.raises(
        InputError, match="rule: 'traversal': takes drafts drawn iid or without_replacement, not determ"
    ):
        check_rule("traversal", "deterministic")


def test_a_rule_for_chains_refuses_trees() -> None:
    assert [name for name, rule in RULES.items() if not rule.trees] == ["token", "block"]
    assert check_rule("multiround", "iid", trees=True).trees
    with pytest.raises(InputError, match="rule: 'token': takes chains, not trees"):
        check_rule("token", "iid", trees=True)


def test_greedy_is_for_temperature_zero() -> None:
    assert check_rule("greedy", "iid", SamplingSettings()).greedy_only
    with pytest.raises(InputError, match=r"rule: 'greedy': is for temperature 0, not 0\.8"):
        check_rule("greedy", "iid", SamplingSettings(temperature=0.8))


def test_an_unknown_rule_is_named_with_the_known_ones() -> None:
    with pytest.raises(InputError, match="rule: 'blocks': must be one of greedy, token, block, onehot"):
        check_rule("blocks", "iid")
