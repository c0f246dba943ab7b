"""Prompts of a benchmark: any shape, domains by turns, and bad lines named."""

import json
from pathlib import Path
from typing import Any

import pytest

from draftforge.data.prompts import last_context, read_prompts
from draftforge.errors import InputError, MissingFileError


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def texts(path: Path, most: int | None = None) -> list[str]:
    return [last_context(record)[-1].content for record in read_prompts([path], most)]


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
    assert [message.content for message in last_context(record)] == ["one", "two", "three"]
    silent = [messages[0], {"role": "system", "content": "x"}, messages[1]]
    (record,) = read_prompts([write(tmp_path / "s.jsonl", {"messages": silent})])
    with pytest.raises(InputError, match="nothing to ask"):
        last_context(record)


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


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        read_prompts([tmp_path / "none.jsonl"])
