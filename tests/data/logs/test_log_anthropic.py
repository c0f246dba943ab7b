"""Anthropic's Messages API: requests as vLLM turns them into chat completions; answers whole and streamed."""

import json
from pathlib import Path
from typing import Any

import pytest
from byte_level import byte_level_tokenizer
from log_reading import read_log, write_lines

from draftforge.data.chat_template import render_text
from draftforge.data.conversation import OTHER_READINGS
from draftforge.data.logs import openai
from draftforge.data.logs.anthropic import is_request, request_of
from draftforge.data.logs.chat import Entry
from draftforge.data.logs.response import answer_of
from draftforge.errors import InputError

ASKED = {"role": "user", "content": "Hi"}
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}


def text(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": one, "cache_control": {"type": "ephemeral"}} for one in texts]


def entry(body: dict[str, Any], **around: Any) -> Entry:
    value = {"path": "/v1/messages", "request": body, **around}
    (found,) = openai.entries(json.loads(json.dumps(value)), "log:1")
    return found


@pytest.mark.parametrize(
    "given, messages",
    [
        ({"system": "Be brief."}, [{"role": "system", "content": "Be brief."}]),
        ({"system": text("Be ", "brief.")}, [{"role": "system", "content": "Be brief."}]),
        ({"system": text("x-anthropic-billing-header: 1", "Be brief.")}, [{"role": "system", "content": "Be brief."}]),
        ({"system": text("")}, []),
        ({"system": ""}, []),
        ({"system": None}, []),
    ],
)
def test_the_system_prompt_comes_first(given: dict[str, Any], messages: list[Any]) -> None:
    assert entry({**given, "messages": [ASKED]}).line["messages"] == [*messages, ASKED]


@pytest.mark.parametrize(
    "role, blocks, messages",
    [
        ("user", text("Hi"), [ASKED]),
        ("user", text("a", "", "b"), [{"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}]),
        (
            "user",
            [*text("Next?"), {"type": "tool_result", "tool_use_id": "t1", "content": text("cold", "wet")}],
            [{"role": "tool", "tool_call_id": "t1", "content": "cold\nwet"}, {"role": "user", "content": "Next?"}],
        ),
        (
            "user",
            [
                {"type": "tool_result", "tool_use_id": "t1", "content": "cold"},
                {"type": "tool_result", "tool_use_id": "t2"},
            ],
            [
                {"role": "tool", "tool_call_id": "t1", "content": "cold"},
                {"role": "tool", "tool_call_id": "t2", "content": ""},
            ],
        ),
        (
            "assistant",
            [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "xx"},
                *text("I look."),
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}},
            ],
            [{"role": "assistant", "content": "I look.", "reasoning": "hm", "tool_calls": [CALL]}],
        ),
        (
            "assistant",
            [{"type": "tool_use", "id": "t1", "name": "now", "input": {}}],
            [
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "now", "arguments": "{}"}}],
                }
            ],
        ),
        (
            "assistant",
            [{"type": "tool_result", "tool_use_id": "t1", "content": "cold"}],
            [{"role": "assistant", "content": "Tool result: cold"}],
        ),
        (
            "system",
            text("x-anthropic-billing-header: 1", "Mind ", "this."),
            [{"role": "system", "content": "Mind this."}],
        ),
        ("system", "Mind this.", [{"role": "system", "content": "Mind this."}]),
        ("system", "x-anthropic-billing-header: 1", []),
        ("system", "", []),
        ("assistant", "", [{"role": "assistant", "content": ""}]),
    ],
)
def test_messages_in_blocks(role: str, blocks: Any, messages: list[Any]) -> None:
    body = {"messages": [ASKED, {"role": role, "content": blocks}, ASKED]}
    found = entry(body)
    assert found.line["messages"] == [ASKED, *messages, ASKED] == found.line["request"]["messages"]


def test_a_tool_use_without_an_id_is_left_out(tmp_path: Path) -> None:
    """vLLM names it by its clock, and a template may print that."""
    lines = []
    for id in ({}, {"id": ""}, {"id": None}, {"id": "t1"}):
        call: dict[str, Any] = {"type": "tool_use", "name": "now", "input": {}, **id}
        messages = [ASKED, {"role": "assistant", "content": [call]}, ASKED]
        lines.append(json.dumps({"path": "/v1/messages", "request": {"messages": messages}}))
    read = read_log(write_lines(tmp_path / "log.jsonl", *lines), "openai")
    assert read.counts.left_out == {"tool call without its id": 3} and read.counts.taken == 1


@pytest.mark.parametrize(
    "role, block, reason",
    [
        ("user", {"type": "image", "source": {"type": "url", "url": "x"}}, "message part that is not text"),
        ("user", {"type": "document", "source": {}}, "message part that is not text"),
        ("user", {"type": "tool_result", "content": [{"type": "image"}]}, "message part that is not text"),
        ("system", {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "x"}}, "tools inside a message"),
    ],
)
def test_messages_that_are_not_text_alone(role: str, block: dict[str, Any], reason: str) -> None:
    assert entry({"messages": [ASKED, {"role": role, "content": [*text("x"), block]}]}).left_out == reason


@pytest.mark.parametrize(
    "given, there",
    [
        ({"max_tokens": 64, "temperature": 0.5, "top_k": 5}, {"max_tokens": 64, "temperature": 0.5, "top_k": 5}),
        ({"stop_sequences": ["END"]}, {"stop": ["END"]}),
        (
            {"thinking": {"type": "disabled"}},
            {"reasoning_effort": "none", "messages_api": {"disabled": True, "own_thinking": False}},
        ),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, {"thinking_token_budget": 2048}),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
            {"response_format": {"type": "json_schema", "schema": {}}},
        ),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"reasoning_effort": "low", "min_p": 0.1, "lora_request": "x", "add_special_tokens": True}, {}),
        ({"tool_choice": {"type": "any"}}, {"tool_choice": "required"}),
        ({"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        (
            {"tool_choice": {"type": "tool", "name": "now"}},
            {"tool_choice": {"type": "function", "function": {"name": "now"}}},
        ),
        (
            {"tools": [{"name": "weather", "description": "Weather", "input_schema": WEATHER, "cache_control": {}}]},
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "weather", "description": "Weather", "parameters": WEATHER},
                    }
                ]
            },
        ),
        (
            {"tools": [{"name": "now", "type": "custom", "input_schema": {"properties": {}}}]},
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "now", "parameters": {"properties": {}, "type": "object"}},
                    }
                ]
            },
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web"}]},
            {"tools": [{"type": "web_search_20250305", "name": "web"}]},
        ),
    ],
)
def test_other_fields(given: dict[str, Any], there: dict[str, Any]) -> None:
    request, reason = request_of({"messages": [ASKED], **given})
    kept = {name: value for name, value in request.items() if value is not None and name != "messages"}
    assert reason is None and kept == there


def test_an_empty_list_of_tools_reaches_the_template_as_one(tmp_path: Path) -> None:
    """vLLM's endpoint shows `[]`, which templates tell from no tools; chat completions refuse it."""
    body = {"system": "x", "messages": [ASKED], "tools": [], "chat_template_kwargs": {"a": 1}}
    (record,) = read_log(write_lines(tmp_path / "log.jsonl", json.dumps(body)), "openai").records
    assert record.template_args == {"tools": [], "a": 1}
    tokenizer = byte_level_tokenizer(["Hi"], 262)
    tokenizer.chat_template = "{% if tools is none %}no{% else %}{{ tools | length }}{% endif %} tools"
    assert render_text(tokenizer, record.messages, record.tools, dict(record.template_args)) == "0 tools"
    assert render_text(tokenizer, record.messages, None, {}) == "no tools"


def test_roles_that_the_api_has_not_are_refused_there(tmp_path: Path) -> None:
    body = {"system": "x", "messages": [ASKED, {"role": "critic", "content": "Too short."}]}
    lines = [json.dumps(body | {"url": "/v1/messages"}), json.dumps(body)]
    read = read_log(write_lines(tmp_path / "log.jsonl", *lines), "openai")
    assert read.counts.left_out == {"request that the engine refuses": 1}
    # Chat completions take it, without the field that they have not.
    assert read.talks == [[("user", "Hi"), ("critic", "Too short.")]] and read.records[0].template_args == {}


def test_fields_that_a_message_of_the_api_has_not_are_dropped() -> None:
    """vLLM's `AnthropicMessage` has role and content, and needs both."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for name, value in {"tool_calls": [call], "reasoning": "Hm", "reasoning_content": "Hm", "name": "Ann"}.items():
        said = {"role": "assistant", "content": "x", name: value}
        found = entry({"messages": [ASKED, said, ASKED]}, url="/v1/messages")
        assert found.line["request"]["messages"] == [ASKED, {"role": "assistant", "content": "x"}, ASKED]
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    refused = entry({"messages": [ASKED, called, ASKED]}, url="/v1/messages")
    assert refused.left_out == "request that the engine refuses"
    assert entry({"messages": [ASKED, called, ASKED]}, url="/v1/chat/completions").left_out is None


def test_a_body_without_a_path_may_be_of_either_api(tmp_path: Path) -> None:
    """vLLM 0.32's chat completions pass over `system`, `thinking` and `output_config`, and show thoughts as text."""
    said: dict[str, Any] = {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, *text("y")]}
    off, talk = {"thinking": {"type": "disabled"}}, {"messages": [ASKED, said, ASKED]}
    plain: dict[str, Any] = {"tools": None, "template_args": {}, "prompt_end": "opened"}
    asked = [{"role": "user", "content": "Hi"}]
    for body, other in (
        ({"system": "x", "messages": [ASKED]}, plain | {"messages": asked}),
        ({"messages": [ASKED], **off}, plain),
        ({"messages": [ASKED], "output_config": {"effort": "low"}}, plain),
        ({"messages": [ASKED, {"role": "system", "content": "x"}], **off}, plain),
        (talk, {**plain, "messages": [*asked, {"role": "assistant", "content": ["hm", "y"]}, *asked]}),
    ):
        lines = [
            {"request": body},
            {"request": body, "url": "/v1/messages"},
            {"request": body, "url": "/v1/chat/completions"},
        ]
        lines += [{"request": body, "response": WHOLE}, {"request": body | {"anthropic_version": "1"}}]
        records = read_log(write_lines(tmp_path / "log.jsonl", *map(json.dumps, lines)), "openai").records
        (bare, theirs, chat, answered, dated) = records
        arguments = dict(bare.template_args or {})
        (found,) = arguments.pop(OTHER_READINGS)
        for message in found.get("messages", ()):
            message.pop("part_fields", None)
        assert found == other
        assert arguments == theirs.template_args == answered.template_args == dated.template_args
        assert bare.messages == theirs.messages == dated.messages and chat.template_args == {}
    # What only one of them takes, or makes the same prompt for both, is in no doubt.
    sure: list[dict[str, Any]] = [
        {"system": "x", "tools": [{"name": "x", "input_schema": {"type": "object"}}]},
        {"system": ""},
        {"stop_sequences": ["x"]},
        {"thinking": {"type": "enabled", "budget_tokens": 9}},
        {"seed": 1, **off},
        {"messages": [{"role": "system", "content": "x"}, ASKED], **off},
    ]
    lines = [{"request": {"messages": [ASKED], **one}} for one in sure]
    records = read_log(write_lines(tmp_path / "log.jsonl", *map(json.dumps, lines)), "openai").records
    assert [OTHER_READINGS in (one.template_args or {}) for one in records] == [False] * len(sure)


def test_requests_that_sglang_served_are_left_out(tmp_path: Path) -> None:
    """It makes another prompt of them, which depends on the template."""
    lines = [json.dumps({"system": "x", "messages": [ASKED]}), json.dumps({"messages": [ASKED]})]
    read = read_log(write_lines(tmp_path / "log.jsonl", *lines), "openai", engine="sglang")
    assert read.talks == [[("user", "Hi")]] and read.counts.left_out == {"Messages API of SGLang": 1}


def test_tools_and_system_reach_the_record(tmp_path: Path) -> None:
    tools = [{"name": "weather", "input_schema": WEATHER}]
    body = {"system": text("Be brief."), "messages": [ASKED], "tools": tools, "max_tokens": 9, "temperature": 0.5}
    answer = {
        "type": "message",
        "role": "assistant",
        "content": text("Cold."),
        "usage": {"input_tokens": 8, "output_tokens": 2},
    }
    lines = [
        json.dumps({"request": {"body": body, "url": "/v1/messages?beta=true"}, "response": answer}),
        json.dumps(body),
    ]
    read = read_log(write_lines(tmp_path / "log.jsonl", *lines), "openai")
    assert read.talks == [
        [("system", "Be brief."), ("user", "Hi"), ("assistant", "Cold.")],
        [("system", "Be brief."), ("user", "Hi")],
    ]
    first = read.records[0]
    assert first.tools is not None and first.tools[0]["function"]["parameters"] == WEATHER
    assert (first.max_new_tokens, first.prompt_tokens, first.answer_tokens) == (9, 8, 2)
    assert first.sampling is not None and first.sampling.temperature == 0.5


@pytest.mark.parametrize("path", ["/v1/messages/count_tokens", "/v1/responses", "/v1/messages/batches"])
def test_other_paths_are_no_chat_requests(path: str) -> None:
    assert entry({"system": "x", "messages": [ASKED]}, path=path).left_out == "no chat request"


def test_bodies_are_told_by_fields_that_only_this_api_has() -> None:
    bodies: list[dict[str, Any]] = [
        {"system": "x"},
        {"stop_sequences": ["x"]},
        {"tools": [{"name": "x", "input_schema": {}}]},
        {"tool_choice": {"type": "auto"}},
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
    ]
    assert all(map(is_request, bodies))
    bodies = [
        {"messages": [ASKED], "stop": ["x"], "tools": [{"type": "function", "function": {}}], "tool_choice": "auto"},
        {"tool_choice": {"type": "function", "function": {"name": "x"}}},
        {"messages": [{"role": "user", "content": text("x")}]},
    ]
    assert not any(map(is_request, bodies))
    # Where the path says chat completions, an engine passes over such a field.
    found = entry({"system": "x", "messages": [ASKED]}, path="/v1/chat/completions")
    assert found.line["messages"] == [ASKED]


def event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


STREAM = [
    event("message_start", message={"role": "assistant", "content": [], "usage": {"input_tokens": 9}}),
    event("content_block_start", index=0, content_block={"type": "thinking", "thinking": ""}),
    event("ping"),
    event("content_block_delta", index=0, delta={"type": "thinking_delta", "thinking": "hm"}),
    event("content_block_delta", index=0, delta={"type": "signature_delta", "signature": "s"}),
    event("content_block_start", index=1, content_block={"type": "text", "text": ""}),
    event("content_block_delta", index=1, delta={"type": "text_delta", "text": "I \u2028"}),
    event("content_block_delta", index=1, delta={"type": "text_delta", "text": "look."}),
    event(
        "content_block_start", index=2, content_block={"type": "tool_use", "id": "t1", "name": "weather", "input": {}}
    ),
    event("content_block_delta", index=2, delta={"type": "input_json_delta", "partial_json": '{"city": '}),
    event("content_block_delta", index=2, delta={"type": "input_json_delta", "partial_json": '"Oslo"}'}),
    event("content_block_stop", index=2),
    event("message_delta", delta={"stop_reason": "tool_use"}, usage={"output_tokens": 4}),
    event("message_stop"),
]
WHOLE = {
    "type": "message",
    "role": "assistant",
    "content": [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        *text("I \u2028look."),
        {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}},
    ],
}


def test_answers_whole_and_streamed_are_the_same() -> None:
    wire = "".join(f"event: {one['type']}\ndata: {json.dumps(one, ensure_ascii=False)}\n\n" for one in STREAM)
    for response in (WHOLE, STREAM, wire, wire.replace("\n", "\r\n")):
        assert answer_of(response) == {
            "role": "assistant",
            "content": "I \u2028look.",
            "reasoning": "hm",
            "tool_calls": [CALL],
        }
    assert answer_of({"type": "message", "content": text("")}) is None and answer_of(STREAM[:5]) is None


def test_parts_with_thoughts_are_of_either_api() -> None:
    said: dict[str, Any] = {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, *text("y")]}
    talk = [ASKED, said, ASKED]
    assert is_request({"messages": talk, "max_tokens": 9})
    assert not is_request({"messages": talk, "max_completion_tokens": 9})
    assert not is_request({"messages": [{"role": "system", "content": "s"}, *talk]})
    # Fields of chat completions (vLLM 0.33's schema), and thoughts where Anthropic's users and tools have none.
    beside: list[dict[str, Any]] = [
        {"documents": []},
        {"tool_choice": "none"},
        {"tools": [{"function": {"name": "x"}}]},
    ]
    assert not any(is_request({"messages": talk, **more}) for more in beside)
    inside: list[dict[str, Any]] = [{"tool_calls": None}, {"refusal": None}, {"role": "user"}]
    assert not any(is_request({"messages": [ASKED, {**said, **more}, ASKED], "max_tokens": 9}) for more in inside)


@pytest.mark.parametrize("arguments", [1, "on", ["on"]])
@pytest.mark.parametrize("fields", [{"tools": []}, {"thinking": {"type": "disabled"}}])
def test_template_arguments_that_are_no_object_break_the_schema(tmp_path: Path, fields: Any, arguments: Any) -> None:
    body = {"messages": [ASKED], "max_tokens": 9, **fields, "chat_template_kwargs": arguments}
    with pytest.raises(InputError, match="chat_template_kwargs is not an object"):
        read_log(write_lines(tmp_path / "l.jsonl", json.dumps({"path": "/v1/messages", "request": body})), "openai")


def test_tools_of_a_gateway_that_are_no_list_break_the_schema(tmp_path: Path) -> None:
    call = {"call_type": "anthropic_messages", "messages": [ASKED], "custom_llm_provider": "openai", "prompt_tokens": 3}
    line = json.dumps({**call, "model_parameters": {"system": "s", "tools": -1}})
    with pytest.raises(InputError, match="tools is not a list of objects"):
        read_log(write_lines(tmp_path / "l.jsonl", line), "litellm")
