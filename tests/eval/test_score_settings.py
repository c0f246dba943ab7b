"""The recipe's `score` section."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from draftforge.eval.settings import ScoreSettings
from draftforge.specdec.proposers.tree_settings import StaticTree
from draftforge.specdec.sampling_settings import SamplingSettings

WARM = SamplingSettings(temperature=0.8)


def test_defaults_score_greedy_up_to_four() -> None:
    settings = ScoreSettings()
    assert settings.draft_tokens == [1, 2, 3, 4]
    assert [sampling.key for sampling in settings.sampling] == ["t0"]
    assert settings.sampled_rules == ["token"]
    assert ScoreSettings.model_validate(settings.model_dump(mode="json")) == settings


def test_the_serving_rule_is_the_first_that_is_not_greedy() -> None:
    settings = ScoreSettings(sampling=[SamplingSettings(), WARM], rules=["block", "greedy", "onehot"])
    assert settings.sampled_rules == ["block", "onehot"]
    assert ScoreSettings(rules=["greedy"]).sampled_rules == []


def test_draft_tokens_are_sorted_once_each() -> None:
    assert ScoreSettings(draft_tokens=[4, 2, 2]).draft_tokens == [2, 4]
    assert ScoreSettings(draft_tokens=[64]).draft_tokens == [64]


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"draft_tokens": [0, 1]}, "K = 0: every K must be at least 1 and at most 64"),
        ({"draft_tokens": [1, 65]}, "K = 65: every K must be at least 1 and at most 64"),
        ({"draft_tokens": list(range(1, 10**6))}, "K = 65: every K"),
        ({"decode_draft_tokens": [10**9]}, "K = 1000000000: every K"),
        ({"draft_tokens": []}, "at least 1 item"),
        ({"rules": ["greedy", "token", "token"]}, "every rule may be named once"),
        ({"rules": ["guess"]}, "'traversal' or 'typical'"),
        ({"rules": ["greedy", "typical"]}, "typical is lossy: drafts are picked by a lossless rule"),
        ({"trees": {"4": {"kind": "static", "widths": [2]}}}, "should match pattern"),
        ({"trees": {"t": {"kind": "static"}}}, "no shape: give one of widths, choices or file"),
        ({"trees": {"t": {"kind": "static", "widths": [1], "choices": [[0]]}}}, "widths and choices: give one of"),
        ({"trees": {"t": {"kind": "static", "widths": [10, 10, 10]}}}, "1110 nodes: at most 1024 may be drafted"),
        ({"trees": {"t": {"kind": "static", "widths": [2, 0]}}}, "every node must have at least 1 child"),
        ({"trees": {"t": {"kind": "static", "choices": [[0], [1, 0]]}}}, r"its parent \[1\] is not in the tree"),
        ({"trees": {"t": {"kind": "static", "choices": [[0] * k for k in range(1, 70)]}}}, "69 levels: at most 64"),
        ({"trees": {"t": {"kind": "static", "file": "/nowhere.json"}}}, "/nowhere.json: no such file"),
        ({"trees": {"t": {"kind": "dynamic", "top_k": 0}}}, "greater than or equal to 1"),
        ({"trees": {"t": {"kind": "grown"}}}, "'static', 'dynamic', "),
        ({"sampling": [WARM], "rules": ["greedy"]}, "sampling t0.8 needs a rule beside greedy"),
        ({"sampling": [WARM, WARM]}, "every setting may be named once"),
        ({"decode_draft_tokens": [6]}, r"decode_draft_tokens \[6\]: must be among draft_tokens"),
        ({"confidence": 1.0}, "less than 1"),
        ({"bootstraps": 10}, "Extra inputs"),
    ],
)
def test_wrong_settings_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ScoreSettings.model_validate(fields)


def test_a_file_of_choices_is_read_with_the_recipe(tmp_path: Path) -> None:
    """Its content and not its name is what counts were made with."""
    path = tmp_path / "choices.json"
    path.write_text("[[0], [0, 0], [1]]")
    settings = ScoreSettings.model_validate({"trees": {"medusa": {"kind": "static", "file": str(path)}}})
    path.unlink()
    tree = settings.trees["medusa"]
    assert isinstance(tree, StaticTree) and tree.file is None and tree.levels == 2
    assert tree.choices == [[0], [1], [0, 0]]
    assert ScoreSettings.model_validate(settings.model_dump(mode="json")) == settings
