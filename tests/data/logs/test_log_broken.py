"""Whatever stands in a line of a log, a reader gives requests, leaves it out or names its place; nothing else."""

import copy
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from log_reading import SAMPLES

from draftforge.data.concurrency import Traffic, measure_concurrency
from draftforge.data.logs.containers import ContainerLines
from draftforge.data.logs.parsing import fields
from draftforge.data.logs.readers import FORMATS
from draftforge.data.record_outcomes import SourceCounts
from draftforge.data.settings import MixSettings
from draftforge.data.sources import read_records
from draftforge.errors import InputError

ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    10**400,
    1e308,
    -1e308,
    1.5,
    "",
    " ",
    "text",
    "{",
    "[1]",
    '{"a": 1}',
    "NaN",
    "9" * 400,
]
ODD += [[], {}, [None], [[]], [{}], {"role": "user"}, {"content": [None]}, {"choices": [None]}, {"function": None}]
LINES = {
    "openai": "openai.jsonl",
    "litellm": "litellm.jsonl",
    "langfuse": "langfuse.jsonl",
    "sglang": "sglang.jsonl",
    "vllm": "vllm_json.log",
}


BLOCKS = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "a"}, {"type": "tool_result", "tool_use_id": "t", "content": []}],
    },
    {
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": "b"}, {"type": "tool_use", "name": "c", "input": {}}],
    },
    {"role": "system", "content": [{"type": "text", "text": "d"}]},
    {"role": "user", "content": "e"},
]
TOOLS = [{"name": "c", "input_schema": {"type": "object"}}]
EVENTS = [
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "f"}},
    {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "id": "g", "function": {"name": "h"}}]}}]},
]
LANGCHAIN = [
    {"type": "constructor", "id": ["HumanMessage"], "kwargs": {"content": "a"}},
    {"type": "ai", "data": {"content": "", "tool_calls": [{"name": "b", "args": {}, "id": "c"}]}},
    {"role": "tool", "content": {"name": "b"}},
]
MORE: dict[str, list[Any]] = {
    "openai": [
        {
            "request": {"system": [{"type": "text", "text": "s"}], "messages": BLOCKS, "tools": TOOLS},
            "response": EVENTS,
        },
        {"request": {"messages": BLOCKS, "thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}},
    ],
    "litellm": [
        {"call_type": "anthropic_messages", "messages": BLOCKS, "model_parameters": {"system": "s", "tools": TOOLS}}
    ],
    "langfuse": [
        {"type": "GENERATION", "input": LANGCHAIN, "output": LANGCHAIN[1], "model_parameters": {"stop": ["x"]}}
    ],
}
"""Shapes that the samples lack."""


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """Every place of a JSON value, as keys."""
    yield ()
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        for rest in places(inner):
            yield key, *rest


def changed(value: Any, place: tuple[Any, ...], odd: Any) -> Any:
    if not place:
        return odd
    value = copy.copy(value)
    value[place[0]] = changed(value[place[0]], place[1:], odd)
    return value


def survives(path: Path, kind: Any, lines: list[Any]) -> None:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    counts, traffic = SourceCounts(), Traffic()
    settings = {"kind": kind, "path": path.name, "domain": "d", "skip_invalid": True}
    source = MixSettings.model_validate({"sources": [settings], "may_be_unanswered": ["d"]}).sources[0]
    try:
        for record in read_records(source, path.parent, 0, counts, traffic=traffic):
            assert record.messages and record.key
    except InputError as error:
        assert not counts.taken and "\n" not in str(error)
    else:
        assert counts.read == counts.taken + counts.skipped + sum(counts.left_out.values())
    measure_concurrency(traffic)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(data=st.data())
def test_a_value_out_of_place(tmp_path: Path, kind: str, data: st.DataObject) -> None:
    lines = [json.loads(line) for line in (SAMPLES / LINES[kind]).read_text().splitlines()] + MORE.get(kind, [])
    row = data.draw(st.integers(0, len(lines) - 1))
    place = data.draw(st.sampled_from(list(places(lines[row]))))
    lines[row] = changed(lines[row], place, data.draw(st.sampled_from(ODD)))
    survives(tmp_path / "log.jsonl", kind, lines)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(data=st.data())
def test_a_text_line_with_a_piece_missing_or_put_in(tmp_path: Path, kind: str, data: st.DataObject) -> None:
    lines = (SAMPLES / f"{kind}.log").read_text().splitlines()
    row = data.draw(st.integers(0, len(lines) - 1))
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(lines[row]))] * 2)))
    piece = data.draw(
        st.sampled_from(["", "'", '"', "(", "]", "}", ",", " ... ", "\\", "00-00 99:99:99", "obj=", "=x"])
    )
    lines[row] = lines[row][:start] + piece + lines[row][end:]
    survives(tmp_path / "log.log", kind, lines)


@pytest.mark.parametrize("text", ['":-\\' * 250_000, "a='" + "\\'" * 500_000, "a" + " " * 10**6 + "b", "a " * 500_000])
def test_a_printed_line_that_is_never_closed_takes_no_hours(text: str) -> None:
    began = time.process_time()
    assert fields(text).keys() <= {"a"}
    assert time.process_time() - began < 2.0


def test_a_string_that_is_never_closed_is_no_string() -> None:
    assert fields("a='x, b=1, c=\"y, z\", d='\\', e=2") == {"a": "'x, b=1, c=\"y, z\", d='\\'", "e": "2"}
    assert fields("a=\"x, b='y, z', c=1") == {"a": '"x', "b": "'y, z'", "c": "1"}


def test_envelopes_of_streams_that_docker_has_not_are_none() -> None:
    """Pieces of a line wait for its end: of any number of streams they would fill the memory."""
    lines = [json.dumps({"log": "x", "stream": f"s{i}"}) for i in range(3)]
    reader = ContainerLines()
    assert [found.text for line in lines if (found := reader.whole(line, "", ""))] == lines
