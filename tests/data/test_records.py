"""Shapes of log lines, and the one-line errors for those that break a rule."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from draftforge.data.conversation import OTHER_READINGS
from draftforge.data.logs.chat import LeftOut
from draftforge.data.records import Record, parse
from draftforge.data.settings import FileSource, Shape
from draftforge.errors import InputError
from draftforge.specdec.sampling_settings import SamplingSettings


def read(line: Any, shape: Shape = "messages", **source: Any) -> Record:
    return parse(line, shape, FileSource(kind=shape, path="log.jsonl", **{"domain": "chat", **source}), "log.jsonl:7")


def shown(record: Record) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in record.messages]


def test_openai_line_keeps_turns_tools_and_request() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}
    line = {
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "What"}, {"type": "text", "text": "time?"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "", "tool_call_id": "c1"},
            {"role": "assistant", "content": "Noon.", "refusal": None},
        ],
        "tools": [{"type": "function", "function": {"name": "clock"}}],
        "request": {
            "temperature": 0.7,
            "top_p": 0.9,
            "max_tokens": 64,
            "chat_template_kwargs": {"enable_thinking": False},
        },
    }
    record = read(line, template_args={"enable_thinking": True, "date": "today"})
    assert shown(record)[:2] == [("developer", "Be brief."), ("user", "What\ntime?")]
    assert record.messages[1].content == ["What", "time?"] and record.messages[2].content == []
    assert record.messages[2].tool_calls == [call] and record.messages[3].tool_call_id == "c1"
    clock = {"name": "clock", "description": None, "parameters": None}
    assert record.tools == [{"type": "function", "function": clock}]
    assert record.sampling == SamplingSettings(temperature=0.7, top_p=0.9) and record.max_new_tokens == 64
    assert record.template_args == {"enable_thinking": False, "date": "today"}


@pytest.mark.parametrize(
    "line, sampling",
    [
        ({}, None),
        ({"temperature": 0}, SamplingSettings()),
        ({"top_p": 0.5}, SamplingSettings(temperature=1.0, top_p=0.5)),
        ({"repetition_penalty": 1.1}, SamplingSettings(temperature=1.0, repetition_penalty=1.1)),
        ({"temperature": 0.5, "top_k": -1, "min_p": 0.1}, SamplingSettings(temperature=0.5, min_p=0.1)),
    ],
)
def test_logged_sampling(line: dict[str, Any], sampling: SamplingSettings | None) -> None:
    assert read({"prompt": "Hi", **line}, "prompts").sampling == sampling


@pytest.mark.parametrize("encode", [lambda value: value, json.dumps])
def test_sharegpt_tools_and_calls(encode: Any) -> None:
    """The shapes of LLaMA-Factory: a call and what it gave as messages of their own, tools as JSON text."""
    call, tool = {"name": "clock", "arguments": {"zone": "CET"}}, {"name": "clock", "parameters": {"type": "object"}}
    talk = [
        {"from": "human", "value": "What time?"},
        {"from": "function_call", "value": encode(call)},
        {"from": "observation", "value": "noon"},
        {"from": "function_call", "value": encode([call, call])},
        {"from": "function_response", "value": "noon"},
        {"from": "gpt", "value": "Noon."},
    ]
    record = read({"conversations": talk, "system": "Be brief.", "tools": encode([tool])}, "sharegpt")
    roles = ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert [role for role, _ in shown(record)] == roles
    calls = [{"type": "function", "function": call}]
    assert [message.tool_calls for message in record.messages if message.role == "assistant"] == [
        calls,
        calls * 2,
        None,
    ]
    function = {"name": "clock", "description": None, "parameters": {"type": "object"}}
    assert record.tools == [{"type": "function", "function": function}]


def test_numbers_beyond_64_bits_are_no_limits() -> None:
    line = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2**70, "top_k": 2**70, "temperature": 0.5}
    record = read({**line, "trace_id": 2**70, "group": 2**70})
    assert record.max_new_tokens == 2**31 - 1 and record.sampling == SamplingSettings(temperature=0.5)
    assert record.group == str(2**70)


BESIDE: dict[Shape, dict[str, Any]] = {
    "sharegpt": {"conversations": [{"from": "human", "value": "Hi"}]},
    "messages": {"messages": [{"role": "user", "content": "Hi"}]},
    "turns": {"turns": ["Hi"]},
    "prompts": {"prompt": "Hi"},
}


@pytest.mark.parametrize("shape", BESIDE)
def test_a_system_prompt_beside_a_plain_conversation_stands_in_front_of_it(shape: Shape) -> None:
    """That of the conversation itself wins, as in LLaMA-Factory's `SharegptDatasetConverter`."""
    line = BESIDE[shape]
    for name in (
        "system",
        "system_prompt",
        "systemPrompt",
        "system_message",
        "systemInstruction",
        "system_instructions",
    ):
        for system, shown_first in (("s", [("system", "s")]), ("", []), (" ", []), (None, [])):
            assert shown(read({**line, name: system}, shape)) == [*shown_first, ("user", "Hi")]
        with pytest.raises(LeftOut, match="messages in an unread form"):
            read({**line, name: ["s"]}, shape)
        # A label is none. Engines pass over such a field of a request: nothing tells whether it was sent.
        assert shown(read({**line, name: "s"}, shape, group_field=name)) == [("user", "Hi")]
        for beside in ({"request": {name: "s"}}, {"systemPrompt": "t", "system": "u"}, {"instructions": "s"}):
            with pytest.raises(LeftOut):
                read({**line, **beside}, shape)


def test_a_conversations_own_system_prompt_wins_over_that_beside_it() -> None:
    own = [{"from": "system", "value": "t"}, {"from": "human", "value": "Hi"}]
    assert shown(read({"conversations": own, "system": "s"}, "sharegpt")) == [("system", "t"), ("user", "Hi")]
    for role in ("system", "developer"):
        messages = [{"role": role, "content": "t"}, {"role": "user", "content": "Hi"}]
        assert shown(read({"messages": messages, "system": "s"})) == [(role, "t"), ("user", "Hi")]


@pytest.mark.parametrize(
    "call, arguments",
    [
        ({"name": "f", "arguments": {"a": 1}}, {"a": 1}),
        ({"name": "f", "arguments": '{"a": 1}'}, '{"a": 1}'),
        ({"name": "f", "parameters": {"a": 1}}, {"a": 1}),  # Llama 3.1's form
        ({"type": "function", "id": "c", "function": {"name": "f", "arguments": {"a": 1}}}, {"a": 1}),
        ({"name": "f"}, {}),
    ],
)
def test_calls_of_sharegpt_have_arguments_under_several_names(call: dict[str, Any], arguments: Any) -> None:
    talk = [{"from": "human", "value": "Hi"}, {"from": "function_call", "value": json.dumps(call)}]
    talk.append({"from": "observation", "value": "x"})
    found = read({"conversations": talk}, "sharegpt").messages[1].tool_calls
    assert found == [{"type": "function", "function": {"name": "f", "arguments": arguments}}]


def test_a_table_may_hold_messages_as_json_text() -> None:
    talk = [{"role": "user", "content": "Hi"}]
    assert shown(read({"messages": json.dumps(talk)})) == [("user", "Hi")]
    with pytest.raises(InputError, match="messages is a JSON string"):
        read({"messages": "Hi"})


def test_sharegpt_turns_and_prompts() -> None:
    talk = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"}
    assert shown(read(talk, "sharegpt")) == [("system", "s"), ("user", "a"), ("assistant", "b")]
    assert shown(read({"id": 1, "turns": ["a", "b"]}, "turns")) == [("user", "a"), ("user", "b")]
    assert shown(read({"prompt": "a"}, "prompts")) == [("user", "a")]


def test_domain_and_group_of_the_line_or_of_the_source() -> None:
    line = {"prompt": "a", "domain": "code", "kind": "math", "group": 3}
    assert read(line, "prompts", domain=None).domain == "code"
    assert read(line, "prompts", domain=None, domain_field="kind").domain == "math"
    assert read(line, "prompts").domain == "chat" and read(line, "prompts").group == "3"


def test_id_is_the_content_and_key_is_everything() -> None:
    same = [read({"prompt": "a", "id": i, "temperature": t}, "prompts") for i, t in ((1, 0), (2, 0), (3, 1))]
    assert len({record.id for record in same}) == 1 and len({record.key for record in same}) == 2
    assert read({"prompt": "b"}, "prompts").id != same[0].id


BILLED = {
    "role": "system",
    "content": [{"type": "input_text", "text": "x-anthropic-billing-header: cch=abc"}],
}
TEXT = {"type": "text", "text": "Hi"}
USER = {"role": "user", "content": "Hi"}
DEFINED = {"name": "f", "parameters": {}}


@pytest.mark.parametrize(
    "shape, line, rule",
    [
        ("messages", [1], "is a JSON array; must be an object"),
        ("messages", {}, "messages is missing; must be a list of at least one"),
        ("messages", {"messages": []}, "messages is empty"),
        ("messages", {"messages": "Hi"}, "messages is a JSON string"),
        ("messages", {"messages": ["Hi"]}, "messages[0]: is a JSON string"),
        (
            "messages",
            {"messages": [{"role": 5, "content": "x"}]},
            "messages[0]: role is a JSON number; must be text",
        ),
        ("messages", {"messages": [{"role": "user", "content": 3}]}, "content is a JSON number"),
        ("messages", {"messages": [{**USER, "tool_calls": "x"}]}, "tool_calls: input should be a valid list"),
        ("messages", {"messages": [USER], "tools": {"a": 1}}, "tools is not a list of objects"),
        ("messages", {"messages": [USER], "tools": [{"type": "function"}]}, "tools[0]: has no name"),
        ("messages", {"messages": [USER], "documents": "x"}, "documents is not a list of objects"),
        (
            "messages",
            {"messages": [USER], "temperature": -1},
            "temperature: input should be greater than or equal to 0",
        ),
        ("messages", {"messages": [USER], "max_tokens": 0}, "max_tokens 0; must be a whole number of at least 1"),
        ("messages", {"messages": [USER], "group": []}, "group is a JSON array"),
        ("messages", {"messages": [USER], "chat_template_kwargs": 1}, "chat_template_kwargs is not an object"),
        ("messages", {"messages": [{"role": "user", "content": "\ud800"}]}, "not valid Unicode"),
        ("sharegpt", {"conversations": [{"from": "user2", "value": "x"}]}, "unknown role 'user2'"),
        ("sharegpt", {"conversations": [{"from": "human"}]}, "conversations[0]: value is a JSON null; must be text"),
        ("sharegpt", {"conversations": [{"from": "function_call", "value": "x"}]}, "must be JSON with a name"),
        ("turns", {"turns": ["a", ""]}, "turns[1]: is empty; must hold text"),
        ("prompts", {"text": "a"}, "prompt: is empty; must hold text"),
    ],
)
def test_bad_lines_name_place_and_rule(shape: Shape, line: Any, rule: str) -> None:
    with pytest.raises(InputError) as caught:
        read(line, shape)
    message = str(caught.value)
    assert message.startswith("log.jsonl:7: ") and rule in message and "\n" not in message


TALK = [{"from": "human", "value": "<image>What?"}]


@pytest.mark.parametrize(
    "shape, line, reason",
    [
        ("messages", {"messages": [USER], "add_special_tokens": True}, "special tokens added to the prompt"),
        ("messages", {"messages": [USER], "prompt_token_ids": [1, 2]}, "prompt given as tokens"),
        (
            "messages",
            {"messages": [USER], "kv_transfer_params": {"prompt_token_ids": [1]}},
            "prompt given as tokens",
        ),
        ("messages", {"messages": [USER], "lora_request": "x"}, "answered by an adapter"),
        ("messages", {"messages": [USER], "session_params": {"id": "s"}}, "prompt continued from another request"),
        ("messages", {"messages": [USER], "extra_body": {"chat_template": "x"}}, "chat template of its own"),
        (
            "messages",
            {"messages": [USER], "request": {"extra_body": {"chat_template": "x"}}},
            "chat template of its own",
        ),
        ("messages", {"messages": [USER], "images": ["a.png"]}, "message part that is not text"),
        *(
            ("sharegpt", {"conversations": TALK, **media}, "message part that is not text")
            for media in ({"images": ["a.png"]}, {"videos": '["a.mp4"]'}, {"audios": ["a"]}, {"image": "a.png"})
        ),
        ("prompts", {"prompt": "<image>Hi", "image": "a.png"}, "message part that is not text"),
        ("turns", {"turns": ["Hi"], "images": ["a.png"]}, "message part that is not text"),
        ("prompts", {"prompt": "Hi", "enable_thinking": False}, "settings beside the request"),
        ("messages", {"messages": [USER], "params": {"reasoning_effort": "low"}}, "settings beside the request"),
        ("sharegpt", {"conversations": TALK, "metadata": {"tools": [DEFINED]}}, "settings beside the request"),
        ("messages", {"messages": [USER], "request": {"messages": [USER, USER]}}, "another request beside it"),
        ("messages", {"messages": [{"role": "user"}]}, "messages in an unread form"),
        ("messages", {"messages": [{"role": "user", "content": None}]}, "messages in an unread form"),
        ("messages", {"messages": [{"role": "user", "parts": [{"text": "Hi"}]}]}, "messages in an unread form"),
        ("messages", {"messages": [{"role": "user", "content": None, "text": "Hi"}]}, "messages in an unread form"),
        ("messages", {"messages": [USER | {"task": "title"}]}, "messages in an unread form"),
        ("messages", {"messages": [USER | {"images": ["aGk="]}]}, "message part that is not text"),
        *(
            ("messages", {"messages": [USER | {"content": [part]}]}, "messages in an unread form")
            for part in ({"type": "text", "content": "Hi"}, {"type": "input_text", "input_text": "Hi"})
        ),
        # vLLM shows a template that loops over parts `None` in the place of its text.
        *(
            ("messages", {"messages": [USER | {"content": [TEXT, {"type": kind}]}]}, "messages in an unread form")
            for kind in ("input_text", "output_text")
        ),
        *(
            ("messages", {"messages": [USER, {"role": role, "content": "Hm"}]}, "messages in an unread form")
            for role in ("ai", "Assistant", "model", "bot")
        ),
        ("messages", {"messages": [BILLED, USER]}, "messages in an unread form"),
        ("messages", {"messages": [USER], "reasoning_effort": {"summary": "x"}}, "reasoning effort in an unread form"),
        ("messages", {"messages": [USER], "reasoning_effort": 3}, "reasoning effort in an unread form"),
    ],
)
def test_lines_that_are_left_out(shape: Shape, line: dict[str, Any], reason: str) -> None:
    with pytest.raises(LeftOut) as caught:
        read(line, shape)
    assert caught.value.reason == reason


def test_a_line_is_a_request_body() -> None:
    asked = read({"messages": [USER], "tools": [DEFINED], "request": {"enable_thinking": False}, "x": {"tools": [{}]}})
    assert asked.tools and not asked.template_args
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    record = read({"messages": [USER], **extra, "presence_penalty": 1.0, "stop": ["x"]})
    assert record.template_args == {"enable_thinking": False} and record.unfollowed == ("presence_penalty", "stop")
    record = read({"messages": [USER, {"role": "assistant", "content": "Hm"}], "images": []})
    assert record.prompt_end == "opened" and len(record.messages) == 2  # the last one is the logged answer
    high = {"enable_thinking": True, "reasoning_effort": "high"}
    assert read({"messages": [USER], "reasoning_effort": {"effort": "high", "summary": "x"}}).template_args == high


@pytest.mark.parametrize(
    "shape, line, reason",
    [
        ("sharegpt", {"tool_calls": [{"function": {"name": "f"}}]}, "messages in an unread form"),
        ("sharegpt", {"reasoning_content": "hm"}, "messages in an unread form"),
        ("sharegpt", {"name": "Ann"}, "messages in an unread form"),
        ("sharegpt", {"tools": [DEFINED]}, "messages in an unread form"),
        ("sharegpt", {"images": ["a.png"]}, "message part that is not text"),
        ("sharegpt", {"name": None, "tool_calls": [], "weight": 1, "loss": False, "html": "x"}, None),
        ("sharegpt", {"instruction": "Answer as a pirate."}, "messages in an unread form"),
        ("sharegpt", {"context": "The text."}, "messages in an unread form"),
        ("prompts", {"input": "The text."}, "messages in an unread form"),
        ("prompts", {"instruction": "Sum up in French."}, "messages in an unread form"),
        ("prompts", {"history": [["a", "b"]]}, "messages in an unread form"),
        ("prompts", {"input": "", "history": [], "query": None, "output": "x", "context": "Sum up."}, None),
    ],
)
def test_what_stands_beside_a_text_is_not_lost(shape: Shape, line: dict[str, Any], reason: str | None) -> None:
    """Fields of LLaMA-Factory's and Alpaca's data sets; a column named `input` may be the prompt itself."""
    if shape == "sharegpt":
        beside: dict[str, Any] = {name: line[name] for name in ("instruction", "context") if name in line}
        line = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes.", **line}], **beside}
    else:
        line = {"prompt": "Sum up.", **line}
    if reason is None:
        assert len(read(line, shape).messages) == len(line.get("conversations", "1"))
        return
    with pytest.raises(LeftOut) as caught:
        read(line, shape)
    assert caught.value.reason == reason


MESSAGES = [{"role": "system", "content": "Be brief."}, {"content": "Hi }] there", "role": "user"}]


@pytest.mark.parametrize(
    "prompt, asked",
    [
        (json.dumps(MESSAGES), False),
        (json.dumps(MESSAGES, indent=1), False),
        (str(MESSAGES), False),
        (str(MESSAGES).replace("}, {", "}\n {"), False),  # as NumPy prints them, and pandas writes them into a table
        ('[{"from": "human", "value": "Hi"}]', False),
        ('{"id": 1, "prompt": "Hi"}', False),
        ('{"model": "m", "messages": []}', False),
        ('[{"role": "user"}] What is wrong here?', True),
        ('{"name": "Ann"}', True),
        ('[{"name": "Ann", "role": "admin"}]', True),
        ("[1, 2]", True),
        ('{"prompt": ', True),
    ],
)
def test_messages_and_rows_printed_as_text_are_no_prompt(prompt: str, asked: bool) -> None:
    """A column of messages in CSV, or lines of JSON in a file with another name, would be asked as JSON."""
    if asked:
        assert read({"prompt": prompt}, "prompts").messages[0].content == prompt
        return
    with pytest.raises(LeftOut) as caught:
        read({"prompt": prompt}, "prompts")
    assert caught.value.reason == "messages in an unread form"


def as_sent(record: Record) -> dict[str, Any] | None:
    """What a record's other reading has in place of its own; None: there is one reading."""
    readings: list[dict[str, Any]] = (record.template_args or {}).get(OTHER_READINGS, [])
    assert len(readings) < 2
    return readings[0] if readings else None


@pytest.mark.parametrize("wrap", [lambda body: body, lambda body: {"messages": [USER], "request": body}])
def test_a_request_with_an_extra_body_has_two_readings(wrap: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """openai 3.57 puts its fields into the body, over those of the call; a body sent with that field has none of them:
    vLLM 0.32 passes over it."""
    off, tools = {"chat_template_kwargs": {"enable_thinking": False}}, [{"name": "look", "input_schema": {}}]
    own: dict[str, Any] = {"messages": [USER], "chat_template_kwargs": {"a": 1}}
    record = read(wrap({**own, "extra_body": {**off, "tools": tools}}))
    assert {**(record.template_args or {}), OTHER_READINGS: 0} == {"enable_thinking": False, OTHER_READINGS: 0}
    assert record.tools is not None
    assert as_sent(record) == {"tools": None, "template_args": {"a": 1}, "prompt_end": "opened"}
    # A text as an extra body is none, and what shapes no prompt, or is there anyway, makes no other one.
    same: list[Any] = [{}, "x", {"top_k": 5}, {"chat_template_kwargs": {"a": 1}}, {"extra_body": off}, {"tools": []}]
    for extra in same:
        one = read(wrap({**own, "extra_body": extra}))
        assert one.template_args == {"a": 1} and one.id != record.id
    # A prefill continues the message that would else be an answer.
    said = [USER, {"role": "assistant", "content": "So"}]
    record = read({"messages": said, "extra_body": {"continue_final_message": True, "add_generation_prompt": False}})
    assert record.prompt_end == "prefill" and as_sent(record) is not None
    assert (as_sent(record) or {})["prompt_end"] == "opened"
    # Another system prompt is another list of messages.
    record = read({"messages": [USER], "extra_body": {"messages": [{"role": "system", "content": "x"}, USER]}})
    assert [role for role, _ in shown(record)] == ["system", "user"]
    assert [one["role"] for one in (as_sent(record) or {})["messages"]] == ["user"]
    # Without its fields no server takes this one, so it was sent as the client sends it.
    record = read({"messages": [USER], "tools": "none", "extra_body": {"tools": tools}})
    assert record.tools is not None and as_sent(record) is None


def test_fields_of_a_table_are_text() -> None:
    texts = {"temperature": "0.7", "top_k": "-1", "max_tokens": "12.0", "prompt_tokens": "12", "presence_penalty": "0"}
    record = read({"prompt": "12", "chat_template_kwargs": '{"enable_thinking": false}', **texts}, "prompts")
    assert shown(record) == [("user", "12")] and record.template_args == {"enable_thinking": False}
    assert record.sampling == SamplingSettings(temperature=0.7) and record.unfollowed == ()
    assert record.max_new_tokens == 12 and record.prompt_tokens == 12
    with pytest.raises(LeftOut, match="special tokens"):
        read({"prompt": "a", "add_special_tokens": "True"}, "prompts")
    with pytest.raises(InputError, match="max_tokens 'many'"):
        read({"prompt": "a", "max_tokens": "many"}, "prompts")


@pytest.mark.parametrize("domain", [None, "", "two words", "a@b.org", 3, "x" * 65])
def test_bad_domains(domain: Any) -> None:
    with pytest.raises(InputError, match=r"^log\.jsonl:7: .*domain"):
        read({"prompt": "a", "domain": domain}, "prompts", domain=None)


@pytest.mark.parametrize(
    "content, kept",
    [
        ([{"type": "input_text", "text": "Hi"}], False),
        (["Hi"], False),
        ([{"type": "text", "text": None}, {"type": "output_text", "text": "Hi"}], False),
        ([{"type": "input_text", "text": "Hi"}, {"type": "text", "text": "you"}], True),
        (["Hi", {"type": "thinking", "thinking": "you"}], True),
        ([{"type": "refusal", "refusal": "Hi"}], True),
        ([], True),
    ],
)
def test_text_of_no_part_that_vllm_knows_is_shown_to_no_model(content: Any, kept: bool) -> None:
    """Seen on servers of vLLM 0.32: with one part of a type in its schema all texts are shown, without any none is."""
    for role in ("user", "system", "assistant", "tool"):
        line = {"messages": [{"role": role, "content": content}, {"role": "user", "content": "Hi"}]}
        if kept:
            assert read(line).messages[0].text == "\n".join(
                p if isinstance(p, str) else [*p.values()][1] for p in content
            )
        else:
            with pytest.raises(LeftOut, match="messages in an unread form"):
                read(line)
