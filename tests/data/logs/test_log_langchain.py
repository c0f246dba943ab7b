"""LangChain's messages as Langfuse's client logs them, and as LangChain's own clients send them."""

import json
from pathlib import Path
from typing import Any

import pytest
from log_reading import read_log, write_lines

from draftforge.data.conversation import OTHER_READINGS, Message

ASK = [{"role": "user", "content": "What time is it?"}]
CALLED = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "CET"}'}}

COUNTED = {"type": "GENERATION", "usage_details": {"input": 9}}
"""A generation whose tokens are counted: where bare messages have calls, these tell whether there were tools."""


def test_calls(tmp_path: Path) -> None:
    said = {"role": "assistant", "content": "", "tool_calls": [{"name": "clock", "args": {"zone": "CET"}, "id": "c1"}]}
    kept = {"type": "ai", "content": "", "additional_kwargs": {"tool_calls": [CALLED]}}
    for message in (said, kept):
        answer = json.loads(json.dumps(message).replace("c1", "c2"))
        result = {"role": "tool", "content": "noon", "tool_call_id": "c1"}
        tools = [{"name": "clock", "parameters": {"type": "object"}}]
        given = {"messages": [*ASK, message, result], "tools": tools}
        line = {"type": "GENERATION", "input": given, "output": answer}
        (record,) = read_log(write_lines(tmp_path / "o.jsonl", json.dumps(line)), "langfuse").records
        assert [one.tool_calls for one in record.messages] == [None, [CALLED], None, [CALLED | {"id": "c2"}]]


CALLS = {"tool_calls": [CALLED]}
TEXT, THOUGHT = {"type": "text", "text": "a"}, {"type": "thinking", "thinking": "why"}
BROKEN = {"name": "clock", "args": '{"zone": ', "id": "c2"}
SENT_BROKEN = {"id": "c2", "type": "function", "function": {"name": "clock", "arguments": '{"zone": '}}


@pytest.mark.parametrize(
    "said, sent, other",
    [
        ({"additional_kwargs": {"reasoning_content": "why"}}, {}, {"reasoning": "why"}),
        ({"tool_calls": [CALLED], "invalid_tool_calls": [BROKEN]}, {"tool_calls": [CALLED, SENT_BROKEN]}, [CALLED]),
        ({"invalid_tool_calls": [BROKEN]}, {"tool_calls": [SENT_BROKEN]}, None),
        ({"additional_kwargs": {"tool_calls": [{**CALLED, "index": 0}]}}, {"tool_calls": [CALLED]}, {}),
        ({"role": "system", "additional_kwargs": {"__openai_role__": "developer"}}, {"role": "developer"}, {}),
        ({"role": "user", "additional_kwargs": {"name": "Bo", "refusal": None}}, {"role": "user", "name": "Bo"}, {}),
        ({"role": "tool", "additional_kwargs": {"name": "Bo"}}, {"role": "tool"}, {}),
        (
            {"content": [TEXT, THOUGHT], "tool_calls": [CALLED]},
            {"content": ["a", "why"], **CALLS},
            {"content": "a", **CALLS},
        ),
        ({"content": [THOUGHT], "tool_calls": [CALLED]}, {"content": "why", **CALLS}, {"content": [], **CALLS}),
        # The AI SDK, events of OpenTelemetry, and calls without their wrapper.
        ({"content": [TEXT, TEXT]}, {"content": ["a", "a"]}, {"content": "aa"}),
        (
            {"role": "tool", "id": "c1", "name": "clock", "event.name": "gen_ai.tool.message"},
            {"role": "tool", "tool_call_id": "c1"},
            {},
        ),
        ({"tool_calls": [{"id": "c1", "name": "clock", "arguments": {"zone": "CET"}}]}, CALLS, {}),
    ],
)
def test_messages_as_its_clients_send_them(
    tmp_path: Path, said: dict[str, Any], sent: dict[str, Any], other: Any
) -> None:
    """As those for OpenAI's API (1.7.4) and DeepSeek's (1.1.1) do; `other`: what others may send."""
    plain = {"role": "assistant", "content": "Hm."}
    line = json.dumps({**COUNTED, "input": [*ASK, plain | said, *ASK]})
    (record,) = read_log(write_lines(tmp_path / "o.jsonl", line), "langfuse").records
    assert record.messages[1] == Message.model_validate(plain | sent)
    readings = [reading["messages"][1] for reading in (record.template_args or {}).get(OTHER_READINGS, [])]
    changed = {"tool_calls": other} if isinstance(other, list) else other
    assert readings == ([] if other == {} else [plain | (changed or {})])


@pytest.mark.parametrize(
    "form",
    [
        lambda fields: {"type": "tool", **fields},
        lambda fields: {"type": "tool", "data": fields},
        lambda fields: {"type": "constructor", "id": ["langchain", "ToolMessage"], "kwargs": fields},
    ],
)
def test_names_of_results_may_not_have_been_sent(tmp_path: Path, form: Any) -> None:
    """LangChain's client for Python sends a ToolMessage without its name, that for JavaScript with it."""
    said = {"role": "assistant", "content": "", "tool_calls": [CALLED]}
    fields = {"content": "noon", "tool_call_id": "c1", "name": "clock"}
    results = [form(fields), {"role": "tool", **fields}, form({**fields, "name": None})]
    lines = [json.dumps({**COUNTED, "input": [*ASK, said, result]}) for result in results]
    in_doubt, sent, unnamed = read_log(write_lines(tmp_path / "o.jsonl", *lines), "langfuse").records
    assert [one.messages[2].name for one in (in_doubt, sent, unnamed)] == ["clock", "clock", None]
    (other,) = (in_doubt.template_args or {})[OTHER_READINGS]
    assert [Message.model_validate(message) for message in other["messages"]] == list(unnamed.messages)
    assert not sent.template_args and not unnamed.template_args


def test_names_of_results_are_known_by_calls_in_langchains_form(tmp_path: Path) -> None:
    """Its handler (Langfuse 5.2) logs a ToolMessage as OpenAI's client sends it, and with the name; calls stay its
    own."""
    call = {"name": "clock", "args": {"zone": "CET"}, "id": "c1", "type": "tool_call"}
    result = {"role": "tool", "content": "noon", "tool_call_id": "c1", "name": "clock"}
    inputs = [
        [*ASK, {"role": "assistant", "content": "", name: [call]}, result]
        for name in ("tool_calls", "invalid_tool_calls")
    ]
    lines = [json.dumps({**COUNTED, "input": given}) for given in inputs]
    for record in read_log(write_lines(tmp_path / "o.jsonl", *lines), "langfuse").records:
        readings = (record.template_args or {})[OTHER_READINGS]
        names = [Message.model_validate(reading["messages"][2]).name for reading in readings]
        assert record.messages[2].name == "clock" and None in names


def test_what_its_client_of_the_messages_api_sent_is_left_out(tmp_path: Path) -> None:
    """It joins messages of one role (langchain-anthropic 1.7): the log has them as they were."""
    runs = [{"ls_provider": provider} for provider in ("openai", '"anthropic"', "anthropic")]  # quoted by version 5
    lines = [{"type": "GENERATION", "input": ASK, "metadata": one} for run in runs for one in (run, json.dumps(run))]
    found = read_log(write_lines(tmp_path / "o.jsonl", *map(json.dumps, lines)), "langfuse")
    assert len(found.records) == 2 and found.counts.left_out == {"messages in an unread form": 4}
