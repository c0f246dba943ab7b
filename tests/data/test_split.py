"""Choices by hash: shares are met, and neither order nor company moves anything."""

from collections import Counter

import pytest

from draftforge.data.settings import MixSettings
from draftforge.data.split import require_every_split, split_of, unit, weighted_choice
from draftforge.errors import InputError


def settings(**changes: object) -> MixSettings:
    return MixSettings.model_validate({"sources": [{"kind": "prompts", "path": "p.txt"}], **changes})


def test_unit_is_even_and_depends_on_the_parts() -> None:
    numbers = [unit("a", str(i)) for i in range(4000)]
    assert all(0 <= u < 1 for u in numbers) and abs(sum(numbers) / 4000 - 0.5) < 0.02
    assert unit("a", "b") == unit("a", "b") != unit("ab", "") != unit("", "ab")


def test_split_meets_its_shares() -> None:
    counts = Counter(split_of(str(i), settings(selection_share=0.1, holdout_share=0.2)) for i in range(5000))
    assert counts["holdout"] == pytest.approx(1000, abs=120) and counts["selection"] == pytest.approx(500, abs=100)


def test_split_moves_with_the_salt_only() -> None:
    clusters = [str(i) for i in range(300)]
    plain, again, salted = ([split_of(c, s) for c in clusters] for s in (settings(), settings(), settings(salt="x")))
    assert plain == again != salted


def test_weighted_choice_meets_its_weights() -> None:
    drawn = Counter(weighted_choice("abc", [1, 2, 5], "s", str(i)) for i in range(4000))
    assert [drawn[c] / 500 for c in "abc"] == pytest.approx([1, 2, 5], rel=0.15)


def test_empty_split_says_how_to_mend_it() -> None:
    with pytest.raises(
        InputError, match=r"mix: selection is empty: 3 conversations in 2 clusters, selection_share 0.15"
    ):
        require_every_split(["train", "train", "holdout"], ["a", "a", "b"], settings())
    require_every_split(["train", "selection", "holdout"], ["a", "b", "c"], settings())


@pytest.mark.parametrize(
    "changes, rule",
    [
        ({"selection_share": 0.5, "holdout_share": 0.5}, "selection_share 0.5 + holdout_share 0.5 must be below 1"),
        ({"weights": {"domain": {"a": 0}}}, "weights.domain.a is 0.0; must be above 0"),
        ({"weights": {"length": {"a": 1}}}, "weights.length"),
        ({"domains": {"rules": [{"match": "(", "domain": "a"}]}}, "not a regular expression"),
        (
            {"domains": {"rules": [{"match": "a", "domain": "a", "role": "user", "field": "model"}]}},
            "role user and field model are set; only one",
        ),
        ({"sources": []}, "at least 1 item"),
        ({"sources": [{"kind": "jsonl", "path": "x"}]}, "does not match any of the expected tags"),
        ({"sources": [{"kind": "turns", "path": "x", "colum": "y"}]}, "Extra inputs are not permitted"),
        (
            {"sources": [{"kind": "turns", "path": "x", "weight": 1}, {"kind": "turns", "path": "y"}]},
            "1 of 2 sources have a weight; give it to all or to none",
        ),
    ],
)
def test_settings_name_the_values(changes: dict[str, object], rule: str) -> None:
    with pytest.raises(ValueError) as caught:
        settings(**changes)
    assert rule in str(caught.value)
