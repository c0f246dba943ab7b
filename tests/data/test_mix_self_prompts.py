"""Prompts that the target makes up: its user-turn prefix, until its end of turn."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from draftforge.data import prompts
from draftforge.data.prompts import prompts_of, user_turn
from draftforge.errors import InputError
from draftforge.specdec.requests import TargetSettings
from draftforge.specdec.targets import Target


@pytest.fixture(scope="module")
def target(tiny_target_folder: Path) -> Target:
    return Target.load(TargetSettings(model=str(tiny_target_folder), device="cpu", dtype="float32"))


@pytest.fixture
def tokenizer(tiny_target_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_target_folder)


def test_prefix_and_ending_of_the_user_turn(tokenizer: Any) -> None:
    turn = user_turn(tokenizer)
    assert tokenizer.decode(turn.prefix_ids) == "<|im_start|>user\n"
    assert (turn.ending, turn.ending_id) == ("<|im_end|>", tokenizer.convert_tokens_to_ids("<|im_end|>"))


def test_template_that_ends_a_turn_with_plain_text(tokenizer: Any) -> None:
    tokenizer.chat_template = "### User: {{ messages[0].content }}\n### Reply:"
    assert user_turn(tokenizer)[1:] == ("###", None)


@pytest.mark.parametrize(
    "template, rule",
    [
        (None, "has no chat template"),
        ("no messages", "does not show a user message once"),
        ("{{ messages[0].content }}", "puts nothing before a user message"),
    ],
)
def test_templates_without_a_prefix_are_refused(tokenizer: Any, template: str | None, rule: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(InputError, match=rule):
        user_turn(tokenizer)


def test_prompts_are_repeatable_whatever_the_batch(target: Target) -> None:
    prompts = prompts_of(target, batch_size=8)(8, 0, 48)
    assert prompts and all(prompt.strip() and "<|im_end|>" not in prompt for prompt in prompts)
    assert prompts_of(target, batch_size=3)(8, 0, 48) == prompts


def test_unfinished_and_empty_prompts_are_drawn_anew(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = target.tokenizer.convert_tokens_to_ids("<|im_end|>")
    word = target.tokenizer("order", add_special_tokens=False)["input_ids"]
    outcomes = iter([[stop], word, [*word, stop], [stop], [*word, *word, stop]])
    seeds: list[int] = []

    def answers(target: Target, requests: list[Any], batch_size: int) -> Any:
        seeds.extend(request.seed for request in requests)
        yield from ((i, next(outcomes)) for i in range(len(requests)))

    monkeypatch.setattr(prompts, "_answers", answers)
    assert prompts_of(target)(2, 0, 9) == ["order", "orderorder"]
    assert len(set(seeds)) == 5
