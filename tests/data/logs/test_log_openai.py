"""Chat-completions logs: the API reference's request, response and chunk objects, and the batch guide's two files."""

import json
from pathlib import Path
from typing import Any

import pytest
from log_reading import SAMPLES, read_log, write_lines

from draftforge.data.logs.openai import entries
from draftforge.errors import InputError
from draftforge.specdec.sampling_settings import SamplingSettings

USER = {"role": "user", "content": "Hi"}


def test_sample_gives_conversations_settings_and_times() -> None:
    read = read_log(SAMPLES / "openai.jsonl", "openai", domain=None)
    assert read.talks == [
        [("system", "Be brief."), ("user", "What time is it?"), ("assistant", "")],
        [("user", "Capital of \nFrance?"), ("assistant", "Paris.")],
        [("user", "Add 2 and 3."), ("assistant", "5"), ("user", "And 4?"), ("assistant", "9")],
        [("user", "Call two tools."), ("assistant", "")],
        [("user", "Name a prime.")],
        [("user", "A body alone.")],
    ]
    assert [record.domain for record in read.records] == ["tools", "chat", "chat", "tools", "batch", "bare"]
    assert [record.sampling for record in read.records] == [
        SamplingSettings(temperature=0.7, top_p=0.9),
        SamplingSettings(),
        None,  # an `extra_body` that was sent over HTTP is a field that no server knows
        None,
        None,
        SamplingSettings(temperature=0.2, min_p=0.05),
    ]
    first, streamed, enveloped, called = read.records[:4]
    assert first.template_args == {"enable_thinking": False} and first.max_new_tokens == 64
    assert first.tools is not None and first.tools[0]["function"]["name"] == "clock"
    assert (first.started, first.ended, first.replica) == (1795860000.0, 1795860002.5, "gpu-0")
    assert (first.prompt_tokens, first.answer_tokens) == (41, 12)
    assert (streamed.started, streamed.ended, streamed.answer_tokens) == (1795860010.0, 1795860011.5, 3)
    assert (enveloped.started, enveloped.ended) == (1795860020.0, 1795860021.0)
    assert enveloped.template_args == {}
    assert called.messages[1].tool_calls == [
        {"id": "a", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "CET"}'}},
        {"id": "b", "type": "function", "function": {"name": "clock", "arguments": "{}"}},
    ]


def test_lines_without_a_conversation_are_counted_by_reason() -> None:
    counts = read_log(SAMPLES / "openai.jsonl", "openai", domain=None).counts
    assert counts.left_out == {
        "answer without its request": 1,
        "no chat request": 1,
        "health check": 1,
        "failed request": 1,
        "message part that is not text": 1,
        "raw prompt": 1,
    }
    assert counts.read == 12 and counts.taken == 6 and counts.skipped == 0


def test_answers_that_hold_nothing_are_not_kept(tmp_path: Path) -> None:
    answers: list[Any] = [
        {"choices": []},
        {"choices": [{"index": 0, "message": {"role": "assistant", "content": None, "reasoning_content": "hm"}}]},
        "data: [DONE]\n\n",
        "no JSON",
        None,
        {"choices": [{"index": 1, "message": {"content": "second"}}, {"index": 0, "message": {"content": "first"}}]},
        [{"choices": [{"index": i, "delta": {"content": text}}]} for i, text in ((1, "second"), (0, "fir"), (0, "st"))],
    ]
    lines = [json.dumps({"request": {"messages": [USER]}, "response": answer}) for answer in answers]
    talks = read_log(write_lines(tmp_path / "log.jsonl", *lines), "openai").talks
    assert talks == [[("user", "Hi")]] * 5 + [[("user", "Hi"), ("assistant", "first")]] * 2


@pytest.mark.parametrize(
    "fields, kept",
    [
        ({"status": 500}, False),
        ({"status_code": "503"}, False),
        ({"response": {"status": 429, "body": {}}}, False),
        ({"response": {"status_code": 200, "body": {"error": {"message": "no"}}}}, False),
        ({"error": "timeout"}, False),
        ({"status": 200, "error": None}, True),
        ({"status": "ok"}, True),
        ({"error_code": 200, "error": "-", "exception": "None", "state": "not failed"}, True),
        ({"error": {"code": 0, "message": ""}}, True),
        ({"error": {"code": 0, "message": "timeout"}}, False),
    ],
)
def test_failed_requests(tmp_path: Path, fields: dict[str, Any], kept: bool) -> None:
    line = json.dumps({"request": {"messages": [USER]}, **fields})
    path = write_lines(tmp_path / "log.jsonl", json.dumps({"messages": [USER]}), line)
    assert read_log(path, "openai").counts.left_out == ({} if kept else {"failed request": 1})


@pytest.mark.parametrize(
    "line, rule",
    [
        ([1], "is a JSON number|is not a JSON object"),
        ({}, "messages is missing"),
        ({"request": {"messages": "my secret"}}, "messages is a JSON string"),
        ({"request": {"messages": []}}, "messages is empty"),
        ({"messages": [{"role": ["my secret"], "content": "x"}]}, r"messages\[0\]: role is a JSON array"),
        ({"messages": [USER], "temperature": "my secret"}, "temperature: input should be a valid number"),
        ({"messages": [USER], "max_tokens": 0}, "max_tokens 0; must be"),
        ({"request": {"messages": [USER]}, "response": {"choices": [{"message": {"content": 3}}]}}, "JSON number"),
    ],
)
def test_lines_that_break_the_schema(tmp_path: Path, line: Any, rule: str) -> None:
    path = write_lines(tmp_path / "log.jsonl", json.dumps({"messages": [USER]}), json.dumps(line))
    with pytest.raises(InputError, match=rule) as caught:
        read_log(path, "openai")
    assert "log.jsonl" in str(caught.value) and "secret" not in str(caught.value) and "\n" not in str(caught.value)
    counts = read_log(path, "openai", skip_invalid=True).counts
    assert counts.taken == 1 and counts.skipped == 1


@pytest.mark.parametrize(
    "fields, started, ended",
    [
        ({"timestamp": 100, "latency": 2}, 100.0, 102.0),
        ({"ended": 100.5, "duration_ms": 500}, 100.0, 100.5),
        ({"time": "1970-01-01T00:01:40Z", "latency_ms": 1000}, 100.0, 101.0),
        ({"start_time": 100, "end_time": 101, "duration": 9}, 100.0, 101.0),
        ({"response": {"created": 100, "choices": []}}, 100.0, None),
        ({"response": [{"choices": []}, {"created": 100, "choices": []}]}, 100.0, None),
        ({"response": 'data: {"created": 100, "choices": []}\n\ndata: [DONE]\n\n'}, 100.0, None),
        ({"ts": 100, "response": {"created": 101, "choices": []}}, 100.0, None),
        ({"created_at": "1970-01-01T00:01:40Z", "latency": 2}, 100.0, 102.0),
        ({"created_at": 300, "start_time": 100, "end_time": 101}, 100.0, 101.0),
        ({"request": {"timestamp": 100, "body": {"messages": [USER]}}}, 100.0, None),
        ({"request": {"timestamp": 300, "body": {"messages": [USER]}}, "started": 100}, 100.0, None),
        ({"started": "yesterday"}, None, None),
        ({}, None, None),
    ],
)
def test_times(tmp_path: Path, fields: dict[str, Any], started: float | None, ended: float | None) -> None:
    line = json.dumps({"request": {"messages": [USER]}, **fields})
    (record,) = read_log(write_lines(tmp_path / "log.jsonl", line), "openai").records
    assert (record.started, record.ended) == (started, ended)


def test_replica_and_group_come_from_the_fields_that_the_source_names(tmp_path: Path) -> None:
    line = json.dumps({"request": {"messages": [USER]}, "started": 1, "ended": 2, "pod": 7, "thread": "t"})
    read = read_log(write_lines(tmp_path / "log.jsonl", line), "openai", replica_field="pod", group_field="thread")
    assert read.records[0].replica == "7" and read.records[0].group == "t"
    assert read.times == [(1.0, 1.0, "7")]


def test_a_bare_body_with_a_path_is_of_that_api() -> None:
    blocks = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
    body = {"messages": [{"role": "user", "content": "Hi"}, {"role": "system", "content": blocks}]}
    [found] = entries(body | {"path": "https://host/v1/messages?beta=true"}, "log:1")
    assert found.line["messages"][-1] == {"role": "system", "content": "One.Two."}
    [chat] = entries(body, "log:1")
    assert chat.line["messages"][-1]["content"] == blocks


ANTHROPIC = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "Hello"}]}
SWITCHED_OFF = {"model": "m", "max_tokens": 9, "messages": [USER], "thinking": {"type": "disabled"}}


@pytest.mark.parametrize(
    "line, served_by_messages_api",
    [
        ({"request": SWITCHED_OFF}, True),
        ({"request": {**SWITCHED_OFF, "seed": 1}}, False),
        ({"request": {**SWITCHED_OFF, "seed": 1}, "response": ANTHROPIC}, True),
        ({"request": {**SWITCHED_OFF, "seed": 1}, "response": [{"type": "message_start", "message": {}}]}, True),
        ({"request": SWITCHED_OFF, "response": {"choices": [{"message": {"content": "Hello"}}]}}, False),
        ({"request": {**SWITCHED_OFF, "seed": 1}, "request_path": "/v1/messages?beta=true"}, True),
        ({"request": {**SWITCHED_OFF, "seed": 1}, "route": "POST https://gate/v1/messages HTTP/1.1"}, True),
        ({"request": {**SWITCHED_OFF, "seed": 1}, "note": "not of the path /v1/messages"}, False),
        ({"request": {"headers": {"Anthropic-Version": "1"}, "body": {**SWITCHED_OFF, "seed": 1}}}, True),
        ({"request": SWITCHED_OFF, "url": "/v1/chat/completions"}, False),
    ],
)
def test_what_stands_around_a_body_tells_which_api_served_it(
    line: dict[str, Any], served_by_messages_api: bool
) -> None:
    request = next(iter(entries(line, "log:1"))).line["request"]
    assert (request.get("reasoning_effort") == "none") is served_by_messages_api


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
FLAT: dict[str, Any] = {"name": "look", "input_schema": {}}
OFF = {"chat_template_kwargs": {"enable_thinking": False}}
OF_SPANS: list[tuple[dict[str, Any], bool]] = [
    ({"ai.prompt.tools": json.dumps([json.dumps({"type": "function", "name": "look", "inputSchema": {}})])}, True),
    ({"llm.request.functions.0.name": "look", "llm.request.functions.0.description": "Looks."}, True),
    ({"llm.tools.0.tool.json_schema": json.dumps(TOOLS[0])}, True),
    ({"gen_ai.tool.definitions": json.dumps(TOOLS)}, True),
    ({"model_request_parameters": {"function_tools": [{"name": "look", "parameters_json_schema": {}}]}}, True),
    ({"gen_ai.system_instructions": '[{"type": "text", "content": "Be brief."}]'}, True),
    ({"gen_ai.request.reasoning_effort": "low"}, True),
    ({"gen_ai.system": "vllm", "ai.prompt.tools": "[]", "gen_ai.tool.name": "look"}, False),
    ({"ai.response.toolCalls": [{"name": "look", "parameters": {}}], "tool_calls": TOOLS}, False),
    ({"functions": [{"name": "look", "parameters": {}}]}, False),  # engines pass over them
]
"""Attributes of spans, as the AI SDK, OpenLLMetry, OpenInference, Pydantic AI and OpenTelemetry name them."""
EFFORT, SAID = {"reasoning_effort": "high"}, {"role": "developer", "content": "Be brief."}
SYSTEM = ("systemPrompt", "system_prompt", "instructions", "system_instruction", "systemInstruction", "SystemMessage")


@pytest.mark.parametrize(
    "line, told",
    [
        ({"request": {"messages": [USER]}, "tools": TOOLS}, True),
        ({"request": {"messages": [USER]}, "params": {"tools": json.dumps(TOOLS)}}, True),
        ({"request": {"messages": [USER]}, "metadata": {"sent": {"chat_template_kwargs": {"a": 1}}}}, True),
        ({"messages": [USER], "request": {"tools": [FLAT]}}, True),
        ({"request": {"messages": [USER], "extra_body": {"tools": TOOLS}}, "params": {"tools": TOOLS}}, False),
        ({"messages": [USER], "tools": TOOLS, "metadata": {"tools": TOOLS}}, False),
        ({"request": {"messages": [USER], "tools": TOOLS}, "params": {"tools": TOOLS}}, False),
        ({"request": {"messages": [USER]}, "tools": ["look"], "metadata": {"tools": [{"name": "look"}]}}, False),
        ({"request": {"messages": [USER]}, "response": {"choices": [], "tools": TOOLS}}, False),
        ({"request": {"messages": [USER]}, "reasoning_effort": "high"}, True),
        ({"request": {"messages": [USER]}, "metadata": {"params": {"reasoning_effort": "none"}}}, True),
        ({"request": {"messages": [USER], "reasoning_effort": "low"}, "reasoning_effort": "high"}, False),
        (
            {"request": {"messages": [USER], "chat_template_kwargs": {"a": 1, "reasoning_effort": "low"}}, **EFFORT},
            False,
        ),
        ({"request": {"messages": [USER]}, "reasoning_effort": None, "params": {"reasoning_effort": ""}}, False),
        ({"messages": [USER], "reasoning_effort": "high"}, False),
        ({"messages": [USER], "system": "s", "reasoning_effort": "high"}, False),  # the endpoint passes over it
        ({"request": {"messages": [USER]}, "params": {"enable_thinking": False}}, True),
        ({"request": {"messages": [USER]}, "continue_final_message": True}, True),
        ({"request": {"messages": [USER]}, "add_generation_prompt": True}, False),
        *(({"request": {"messages": [USER], name: "Be brief."}}, True) for name in SYSTEM),
        *(({"messages": [USER], name: "Be brief."}, True) for name in SYSTEM),
        *(({"request": {"messages": [USER]}, name: [{"text": "Be brief."}]}, True) for name in SYSTEM),
        *(({"request": {"messages": [SAID, USER]}, name: "Be brief."}, False) for name in SYSTEM),
        *(({"request": {"messages": [USER]}, name: ""}, False) for name in SYSTEM),
        ({"request": {"messages": [USER]}, "config": {"generation": {"systemInstruction": "Be brief."}}}, True),
        ({"request": {"messages": [USER], "system": "s"}, "response": {"choices": []}}, True),
        ({"request": {"messages": [USER], "system": "s"}, "path": "/v1/chat/completions"}, False),
        ({"request": {"messages": [USER], "system": "s"}, "response": ANTHROPIC}, False),
        ({"request": {"messages": [USER], **OFF}, "params": {"enable_thinking": True}}, False),
        ({"request": {"messages": [USER]}, "ticket": {"instructions": "Call back."}, "system": "eu-1"}, False),
        *(({"request": {"messages": [USER]}, "metadata": {"attributes": one}}, told) for one, told in OF_SPANS),
        *(
            ({"request": {"messages": [SAID, USER], "tools": TOOLS, **EFFORT}, "metadata": one}, False)
            for one, _ in OF_SPANS
        ),
    ],
)
def test_settings_that_stand_beside_the_request_leave_it_out(line: dict[str, Any], told: bool) -> None:
    assert next(iter(entries(line, "log:1"))).left_out == ("settings beside the request" if told else None)


MEANT = {"role": "system", "content": "Be brief."}
BODY: dict[str, Any] = {"messages": [USER]}
FULLER: dict[str, Any] = {"messages": [MEANT, USER]}


@pytest.mark.parametrize(
    "line, differs",
    [
        ({"path": "/v1/chat/completions", "request": BODY, "request_body": FULLER}, True),
        ({"path": "/v1/chat/completions", "request": BODY, "body": json.dumps(FULLER)}, True),
        ({"request": BODY, "upstream_request": FULLER}, True),
        ({"request": BODY, "trace": {"sent": {"body": FULLER}}}, True),
        ({**BODY, "request": FULLER}, True),
        ({"request": {**BODY, **OFF}, "upstream_request": BODY}, True),
        ({"request": {"body": BODY, "headers": {}}, "upstream_request": {"body": FULLER}}, True),
        # The same request twice, with what shapes no prompt.
        ({"request": BODY, "request_body": json.dumps({**BODY, "model": "m"}), "metadata": {"messages": 3}}, False),
        ({"request": {**BODY, "extra_body": OFF}, "upstream_request": {**BODY, **OFF}}, False),
        ({"request": {"messages": json.dumps([USER])}, "upstream_request": {**BODY, "tools": []}}, False),
        ({"request": BODY, "response": {"choices": [], "request": FULLER}}, False),
    ],
)
def test_another_request_in_the_same_line_leaves_it_out(line: dict[str, Any], differs: bool) -> None:
    (entry,) = entries(json.loads(json.dumps(line)), "log:1")
    assert entry.left_out == ("another request beside it" if differs else None)


CUT_OFF = {"role": "assistant", "content": "Once"}
HELLO = {"choices": [{"message": {"content": "Hello"}}]}


@pytest.mark.parametrize("place", [lambda body: {"request": body}, lambda body: body])
@pytest.mark.parametrize("encode", [lambda value: value, json.dumps, str])
def test_fields_in_text_are_read_as_their_values(tmp_path: Path, place: Any, encode: Any) -> None:
    """A table, or a proxy that stores each field, holds lists and objects as text."""
    line = place({"messages": encode([USER, CUT_OFF]), "extra_body": encode(OFF)}) | {"response": HELLO}
    (record,) = read_log(write_lines(tmp_path / "log.jsonl", json.dumps(line)), "openai").records
    assert [message.text for message in record.messages] == ["Hi", "Once"]
    assert record.prompt_end == "after_answer" and record.template_args is not None
    assert record.template_args["enable_thinking"] is False

    system = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    fields = {"messages": [USER], "system": system, "output_config": {"effort": "high"}, "tools": [FLAT]}
    line = place({name: encode(value) for name, value in fields.items()}) | {"url": "/v1/messages"}
    (record,) = read_log(write_lines(tmp_path / "log.jsonl", json.dumps(line)), "openai").records
    assert [message.text for message in record.messages] == ["Be brief.", "Hi"]
    assert record.template_args == {"enable_thinking": True, "reasoning_effort": "high"} and record.tools

    line = place({"messages": encode([USER]), "thinking": encode({"type": "disabled"})}) | {"url": "/v1/messages"}
    (entry,) = entries(line, "log:1")
    assert entry.line["request"]["reasoning_effort"] == "none"


def test_texts_inside_of_a_request_stay_texts(tmp_path: Path) -> None:
    """What a client wrote as JSON is what it asked, also as a system prompt."""
    said = [MEANT | {"content": "[1, 2]"}, USER | {"content": json.dumps([{"type": "text", "text": "Hi"}])}]
    bodies = [{"messages": said}, {"messages": json.dumps(said)}, {"system": "[1, 2]", "messages": said[1:]}]
    lines = [json.dumps({"request": body, "response": ANTHROPIC}) for body in bodies]
    read = read_log(write_lines(tmp_path / "log.jsonl", *lines), "openai")
    told = [("system", "[1, 2]"), ("user", said[1]["content"])]
    assert [talk[:2] for talk in read.talks] == [told] * 3


FLAGS = [(False, [False, 0, 0.0, "0", "no", "False", "off", "n"]), (True, [True, 1, "1", "yes", "TRUE", "on", "t"])]


@pytest.mark.parametrize("meant, value", [(meant, value) for meant, values in FLAGS for value in values])
def test_flags_are_read_as_engines_read_them(tmp_path: Path, meant: bool, value: Any) -> None:
    def read(**fields: Any) -> Any:
        lines = [{"request": {"messages": [USER, CUT_OFF], **fields}}, {"messages": [USER]}]
        return read_log(write_lines(tmp_path / "log.jsonl", *map(json.dumps, lines)), "openai")

    def end(**fields: Any) -> str:
        return str(read(**fields).records[0].prompt_end)

    assert end(add_generation_prompt=value) == ("after_answer" if meant else "bare")
    assert end(continue_final_message=value) == ("prefill" if meant else "after_answer")
    strict = {"type": "function", "function": {"name": "look", "parameters": {}, "strict": value}}
    assert read(tools=[strict]).records[0].tools[0]["function"]["strict"] is meant
    left_out = {"special tokens added to the prompt": 1} if meant else {}
    assert read(add_special_tokens=value).counts.left_out == left_out
    beside = {"request": {"messages": [USER]}, "continue_final_message": value}
    assert (next(iter(entries(beside, "log:1"))).left_out is not None) is meant


@pytest.mark.parametrize("value", ["maybe", 2, [], "", {"a": 1}])
def test_flags_that_are_none_are_refused(tmp_path: Path, value: Any) -> None:
    line = json.dumps({"request": {"messages": [USER], "add_generation_prompt": value}})
    read = read_log(write_lines(tmp_path / "log.jsonl", line, json.dumps({"messages": [USER]})), "openai")
    assert read.counts.left_out == {"request that the engine refuses": 1} and read.counts.taken == 1


@pytest.mark.parametrize(
    "line",
    [
        {"request": {"messages": [USER]}, "response": {"input_tokens": 9}},
        {"request": {"messages": [USER]}, "response": {"count": 2, "max_model_len": 9, "tokens": [1, 2]}},
        {"request": {"messages": [USER]}, "response": {"object": "list", "data": [{"object": "embedding"}]}},
        {"request": {"messages": [USER]}, "handler": "/v1/messages/count_tokens"},
    ],
)
def test_messages_that_were_counted_or_embedded_are_no_chat_request(line: dict[str, Any]) -> None:
    assert next(iter(entries(line, "log:1"))).left_out == "no chat request"


def test_an_extra_body_inside_of_another_is_none(tmp_path: Path) -> None:
    extra = {"top_k": 5, "extra_body": {"tools": TOOLS}}
    line = json.dumps({"request": {"messages": [USER], "extra_body": extra}})
    (record,) = read_log(write_lines(tmp_path / "log.jsonl", line), "openai").records
    assert record.tools is None and record.sampling == SamplingSettings(temperature=1, top_k=5)


@pytest.mark.parametrize(
    "line, merged, doubted",
    [
        ({"request": {"messages": [USER], "extra_body": OFF}}, True, True),
        ({"messages": [USER], "extra_body": OFF}, True, True),
        ({"request": {"path": "/v1/chat/completions", "body": {"messages": [USER], "extra_body": OFF}}}, True, True),
        ({"request": {"headers": {"a": "b"}, "body": {"messages": [USER], "extra_body": OFF}}}, False, False),
        ({"custom_id": "1", "body": {"messages": [USER], "extra_body": OFF}}, False, False),
        ({"request": {"messages": [USER], "system": "s", "extra_body": OFF}, "response": ANTHROPIC}, True, True),
    ],
)
def test_a_body_with_headers_or_of_a_batch_is_what_was_sent(line: dict[str, Any], merged: bool, doubted: bool) -> None:
    (entry,) = entries(line, "log:1")
    assert entry.left_out is None and ("chat_template_kwargs" in entry.line["request"]) == merged
    assert bool(entry.others) == doubted
    for other in entry.others:
        assert "chat_template_kwargs" not in other and other["messages"] == entry.line["request"]["messages"]
