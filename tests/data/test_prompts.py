"""Prompts from files (any shape, domains by turns, bad lines named) and from the target (its user-turn prefix)."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from draftforge.data import prompts
from draftforge.data.prompts import last_turn, prompts_of, read_prompts, user_turn
from draftforge.errors import InputError, MissingFileError
from draftforge.specdec.target_settings import TargetSettings
from draftforge.specdec.targets import Target


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def texts(path: Path, most: int | None = None) -> list[str]:
    return [last_turn(record)[1].messages[-1].text for record in read_prompts([path], most)]


def test_domains_come_by_turns_and_a_smaller_number_is_a_part(tmp_path: Path) -> None:
    lines = [{"domain": domain, "turns": [f"{domain} {i}"]} for domain in ("math", "code") for i in range(5)]
    path = write(tmp_path / "p.jsonl", *lines)
    found = read_prompts([path])
    assert [record.domain for record in found] == ["code", "math"] * 5
    assert texts(path, 4) == texts(path)[:4]
    assert texts(write(tmp_path / "q.jsonl", *reversed(lines)), 4) == texts(path, 4)
    uneven = read_prompts([write(tmp_path / "u.jsonl", *lines[:7])])
    assert [record.domain for record in uneven] == ["code", "math"] * 2 + ["math"] * 3


def test_what_is_asked(tmp_path: Path) -> None:
    assert texts(write(tmp_path / "a.jsonl", {"domain": "d", "turns": ["first", "second"]})) == ["first"]
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "four"},
    ]
    path = write(tmp_path / "log.jsonl", {"messages": messages})
    (record,) = read_prompts([path])
    assert record.domain == "log"  # no line names one
    assert [message.content for message in last_turn(record)[1].messages] == ["one", "two", "three"]
    reminded = [messages[0], {"role": "system", "content": "x"}, messages[1]]
    assert texts(write(tmp_path / "s.jsonl", {"messages": reminded})) == ["x"]


def test_files_of_several_shapes_and_a_copy(tmp_path: Path) -> None:
    a = write(tmp_path / "a.txt", "plain prompt", "another")
    b = write(tmp_path / "b.prompts.jsonl", {"prompt": "third"})
    c = write(tmp_path / ".jsonl", {"turns": ["third"], "domain": "b"})
    found = read_prompts([a, b, c])
    assert sorted(record.domain for record in found) == ["a", "a", "b"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "is empty"),
        (["[1, 2]"], "p.jsonl: item 1: is a JSON number; must be an object"),
        (["{"], "p.jsonl:1: not valid JSON"),
        ([{"domain": "d", "turns": ["x"]}, {"domain": "d"}], "p.jsonl:2: turns is missing"),
        ([{"domain": "d", "turns": ["x"]}, {"turns": ["y"]}], "p.jsonl:2: has no domain"),
        ([{"domain": "d", "turns": []}], "p.jsonl:1: turns is empty"),
        ([{"domain": "no spaces", "turns": ["x"]}], "p.jsonl:1: domain 'no spaces'"),
    ],
)
def test_bad_lines(tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(InputError, match=message.replace("[", r"\[")):
        read_prompts([write(tmp_path / "p.jsonl", *lines)])


def test_what_is_left_out_of_a_file_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "asked.jsonl", {"prompt": "a"}, {"prompt": "of what?", "context": "b"})
    assert texts(path) == ["a"]
    assert "asked.jsonl: 2 read, 1 messages in an unread form" in capsys.readouterr().err


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        read_prompts([tmp_path / "none.jsonl"])


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


@pytest.mark.slow
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
