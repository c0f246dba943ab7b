"""The recipe's `score` section."""

import pytest
from pydantic import ValidationError

from draftforge.eval.settings import ScoreSettings
from draftforge.specdec.sampling import SamplingSettings

WARM = SamplingSettings(temperature=0.8)


def test_defaults_score_greedy_up_to_four() -> None:
    settings = ScoreSettings()
    assert settings.draft_tokens == [1, 2, 3, 4] and settings.decoded_depths == [4]
    assert [sampling.key for sampling in settings.sampling] == ["t0"]
    assert settings.serving_rule == "token"
    assert ScoreSettings.model_validate(settings.model_dump(mode="json")) == settings


def test_the_serving_rule_is_the_first_that_is_not_greedy() -> None:
    settings = ScoreSettings(sampling=[SamplingSettings(), WARM], rules=["block", "greedy", "onehot"])
    assert settings.serving_rule == "block" and settings.sampled_rules == ["block", "onehot"]
    assert ScoreSettings(rules=["greedy"]).serving_rule == "greedy"


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
        ({"rules": ["typical"]}, "'greedy', 'token', 'block' or 'onehot'"),
        ({"sampling": [WARM], "rules": ["greedy"]}, "sampling t0.8 needs token, block or onehot"),
        ({"sampling": [WARM, WARM]}, "every setting may be named once"),
        ({"decode_draft_tokens": [6]}, r"decode_draft_tokens \[6\]: must be among draft_tokens"),
        ({"confidence": 1.0}, "less than 1"),
        ({"bootstraps": 10}, "Extra inputs"),
    ],
)
def test_wrong_settings_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ScoreSettings.model_validate(fields)
