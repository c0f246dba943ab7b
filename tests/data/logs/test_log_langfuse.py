"""Langfuse's observations, as its field reference lists them."""

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from log_reading import SAMPLES, read_log, write_lines

from draftforge.data.conversation import NO_TOOLS, OTHER_READINGS, Message
from draftforge.specdec.sampling_settings import SamplingSettings

ASKED = [("system", "Be brief."), ("user", "What time is it?")]


@pytest.mark.parametrize(
    "usage, tokens",
    [
        ({"input": 30, "output": 4, "total": 34}, 30),
        # Langfuse takes the details of a usage out of `input` (`OpenAICompletionUsageSchema` of its server).
        ({"input": 10, "input_cached_tokens": 18, "input_audio_tokens": 2, "output": 4, "output_reasoning": 1}, 30),
        ({"input_tokens": 10, "cache_read_input_tokens": 15, "cache_creation_input_tokens": 5}, 30),
        ({"prompt_tokens": 30, "completion_tokens": 4}, 30),
    ],
)
def test_langfuse_counts_all_tokens_of_a_prompt(tmp_path: Path, usage: dict[str, int], tokens: int) -> None:
    line = {"type": "GENERATION", "input": [{"role": "user", "content": "Hi"}], "usage_details": usage}
    (record,) = read_log(write_lines(tmp_path / "o.jsonl", json.dumps(line)), "langfuse").records
    assert record.prompt_tokens == tokens


@pytest.mark.parametrize("name", ["langfuse.jsonl", "langfuse.csv", "langfuse.parquet", "langfuse.jsonl.gz"])
def test_langfuse_exports(tmp_path: Path, name: str) -> None:
    path = SAMPLES / name
    if name.endswith(".parquet"):
        path = tmp_path / name
        lines = [json.loads(line) for line in (SAMPLES / "langfuse.jsonl").read_text().splitlines()]
        flat = [{key: value for key, value in line.items() if key != "tool_definitions" or value} for line in lines]
        pq.write_table(pa.Table.from_pylist([{"tool_definitions": None, **line} for line in flat]), path)
    elif name.endswith(".gz"):
        path = tmp_path / name
        path.write_bytes(gzip.compress((SAMPLES / "langfuse.jsonl").read_bytes()))
    read = read_log(path, "langfuse")
    assert read.talks == [
        [*ASKED, ("assistant", "Noon.")],
        [("user", "Which clock?"), ("assistant", "")],
        [("user", "Answer in JSON."), ("assistant", '{"colour": "red"}')],
    ]
    first, second, third = read.records
    assert first.sampling == SamplingSettings(temperature=0.7) and first.max_new_tokens is None
    assert second.tools is not None and second.messages[1].tool_calls is not None and second.sampling is None
    assert third.sampling == SamplingSettings() and third.max_new_tokens == 50
    assert [record.group for record in read.records] == ["s1", "tr2", "s1"]
    assert (first.started, first.ended, first.replica) == (1795860000.25, 1795860002.75, "gpu-3")
    assert (first.prompt_tokens, first.answer_tokens) == (38, 12)
    assert read.counts.left_out == {
        "no chat request": 1,
        "failed request": 1,
        "raw prompt": 1,
        "tools without their definitions": 1,
        "no text logged": 1,
    }


def test_langfuse_tables_of_which_each_cell_is_json(tmp_path: Path) -> None:
    """As exports of its pages were until their CSV had texts as they are."""
    asked = 'Say "hi",\nplease: \u00e9 {}'
    row: dict[str, Any] = {"id": "o1", "type": "GENERATION", "startTime": "2026-11-28T10:00:00.000Z", "model": "m"}
    row |= {"endTime": "2026-11-28T10:00:02.000Z", "sessionId": "s1", "promptTokens": 38, "output": '"Hi"'}
    row["input"] = {"messages": [{"role": "user", "content": asked}]}
    texts = [row | {"input": json.dumps(row["input"])}, row | {"type": "SPAN", "input": "Hi"}]
    encodings: list[Any] = [json.dumps, lambda cell: cell if isinstance(cell, str) else json.dumps(cell)]
    for number, encode in enumerate(encodings):
        with (tmp_path / f"{number}.csv").open("w", newline="") as file:
            table = csv.DictWriter(file, row, quoting=csv.QUOTE_ALL, lineterminator="\n")
            table.writeheader()
            table.writerows({name: encode(cell) for name, cell in one.items()} for one in (row, *texts))
        read = read_log(tmp_path / f"{number}.csv", "langfuse")
        assert read.talks == [[("user", asked), ("assistant", '"Hi"')]] * 2
        assert read.counts.left_out == {"no chat request": 1}
        assert read.records[0].group == "s1" and read.times[0][1] == 2


def test_langfuse_answers_of_its_api() -> None:
    read = read_log(SAMPLES / "langfuse_api.json", "langfuse")
    assert read.talks == [[*ASKED, ("assistant", "Noon.")]]
    (record,) = read.records
    assert record.sampling == SamplingSettings(temperature=0.7) and record.group == "tr1"
    assert (record.started, record.ended, record.prompt_tokens) == (1795860000.25, 1795860002.75, 38)
    assert read.counts.read == 2 and read.counts.left_out == {"no chat request": 1}


@pytest.mark.parametrize(
    "output, answer",
    [
        ("plain", "plain"),
        ("42", "42"),
        ('["a"]', '["a"]'),
        ({"role": "assistant", "content": "said"}, "said"),
        ([{"role": "assistant", "content": "said"}], "said"),
        ({"choices": [{"message": {"content": "said"}}]}, "said"),
        ("", None),
        (None, None),
    ],
)
def test_langfuse_answers(tmp_path: Path, output: Any, answer: str | None) -> None:
    line = {"type": "GENERATION", "input": [{"role": "user", "content": "Hi"}], "output": output}
    (talk,) = read_log(write_lines(tmp_path / "o.jsonl", json.dumps(line)), "langfuse").talks
    assert talk[1:] == ([] if answer is None else [("assistant", answer)])


ASK = [{"role": "user", "content": 'It\'s "so"?\n'}]
FUNCTION: dict[str, Any] = {
    "type": "function",
    "function": {"name": "clock", "description": None, "parameters": {"type": "object"}},
}
SAID = {"role": "assistant", "content": "Once"}
_CUT = "text cut by the log"


def with_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {**FUNCTION["function"], "parameters": {"type": "object", **schema}}}


@pytest.mark.parametrize(
    "given",
    [
        ASK,
        ASK[0],
        [ASK],
        str(ASK),
        json.dumps(ASK),
        json.dumps(json.dumps(ASK)),
        json.dumps(str(ASK)),
        {"messages": ASK},
        {"messages": json.dumps(ASK)},
        str({"messages": ASK, "stream": True, "n": None}),
        json.dumps(json.dumps({"messages": ASK})),
        [str(ASK[0])],
        [{"type": "human", "content": ASK[0]["content"]}],
        [{"type": "human", "data": {"content": ASK[0]["content"]}}],
        [{"lc": 1, "type": "constructor", "id": ["langchain", "HumanMessage"], "kwargs": ASK[0]}],
        [{"role": "user", "content": [{"type": "text", "text": ASK[0]["content"]}]}],
    ],
)
@pytest.mark.parametrize("encode", [lambda value: value, str, json.dumps])
def test_langfuse_inputs_however_they_are_encoded(tmp_path: Path, given: Any, encode: Any) -> None:
    line = {
        "type": "GENERATION",
        "input": given,
        "output": encode({"role": "assistant", "content": "Yes."}),
        "model_parameters": encode({"temperature": "0.5", "max_tokens": 9}),
        "usage_details": encode({"input": 3, "output": 2}),
        "metadata": encode({"team": "shop"}),
    }
    source = {"domain": None, "domain_field": "team"}
    (record,) = read_log(write_lines(tmp_path / "o.jsonl", json.dumps(line)), "langfuse", **source).records
    assert [(message.role, message.text) for message in record.messages] == [
        ("user", ASK[0]["content"]),
        ("assistant", "Yes."),
    ]
    assert record.sampling == SamplingSettings(temperature=0.5) and record.max_new_tokens == 9
    assert (record.prompt_tokens, record.answer_tokens, record.domain) == (3, 2, "shop")


@pytest.mark.parametrize(
    "parameters, known",
    [
        (
            {"temperature": 1, "top_p": 1, "frequency_penalty": 0, "presence_penalty": 0, "max_tokens": "Infinity"},
            set(),
        ),
        (
            json.dumps({"temperature": 0.5, "top_p": 1, "frequency_penalty": 0.1, "presence_penalty": 0}),
            {"temperature"},
        ),
        ({"temperature": None, "top_p": 1, "frequency_penalty": None, "presence_penalty": 0}, set()),
        ({"temperature": "1", "top_p": 1, "max_tokens": 9}, {"temperature", "top_p"}),
    ],
)
def test_a_setting_of_1_that_the_client_for_python_writes_for_none_is_left_to_the_server(
    tmp_path: Path, parameters: Any, known: set[str]
) -> None:
    """It alone logs both penalties at all times; without settings of the model's own, 1 is what a server takes."""
    one = {"type": "GENERATION", "input": ASK, "output": "Yes.", "model_parameters": parameters}
    (record,) = read_log(write_lines(tmp_path / "o.jsonl", json.dumps(one)), "langfuse").records
    assert {"temperature", "top_p"} - {*record.server_sampling} == known
    assert record.sampling == SamplingSettings(temperature=0.5 if known == {"temperature"} else 1.0)


@pytest.mark.parametrize(
    "given",
    [
        {"messages": ASK, "tools": [FUNCTION], "tool_choice": "auto"},
        {"messages": ASK, "tools": json.dumps([FUNCTION])},
        [*ASK, {"role": "tool", "content": FUNCTION}],
        {"messages": ASK, "tools": [{"name": "clock", "input_schema": {"type": "object"}}]},
    ],
)
def test_langfuse_tools(tmp_path: Path, given: Any) -> None:
    line = {"type": "GENERATION", "input": given, "tool_definitions": {"clock": "{}"}}
    read = read_log(write_lines(tmp_path / "o.jsonl", json.dumps(line)), "langfuse")
    assert read.talks == [[("user", ASK[0]["content"])]] and read.records[0].tools == [FUNCTION]


@pytest.mark.parametrize("encode", [lambda value: value, json.dumps])
def test_langfuse_tells_what_a_clients_extra_body_sent(tmp_path: Path, encode: Any) -> None:
    """An input may be a body with that very field."""
    off = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    lines = [
        {"type": "GENERATION", "input": {"messages": ASK, "extra_body": encode(off["extra_body"])}},
        {"type": "GENERATION", "input": ASK, "model_parameters": encode(off)},
    ]
    (body, client) = read_log(write_lines(tmp_path / "o.jsonl", *map(json.dumps, lines)), "langfuse").records
    assert client.template_args == {"enable_thinking": False}
    other: dict[str, Any] = {"tools": None, "template_args": {}, "prompt_end": "opened"}
    assert body.template_args == {"enable_thinking": False, OTHER_READINGS: [other]}


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize("encode", [str, json.dumps])
def test_langfuse_texts_that_read_like_parts_are_texts(tmp_path: Path, role: str, encode: Any) -> None:
    """A result of MCP's tools is the JSON text of its parts."""
    said = encode([{"type": "text", "text": "22 degrees"}])
    given = [*ASK, {"role": role, "content": said, "tool_call_id": "c"}, *ASK]
    inputs: list[Any] = [given, {"messages": given}, json.dumps(given), {"messages": json.dumps(given)}, str(given)]
    lines = [json.dumps({"type": "GENERATION", "input": one}) for one in inputs]
    read = read_log(write_lines(tmp_path / "o.jsonl", *lines), "langfuse")
    assert [talk[1] for talk in read.talks] == [(role, said)] * len(lines)


_CALLS = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
_WITH_CALLS = [*ASK, {"role": "assistant", "content": "", "tool_calls": _CALLS}, *ASK]
_CALLING: dict[str, Any] = {"output": {"role": "assistant", "content": None, "tool_calls": _CALLS}}


@pytest.mark.parametrize(
    "fields, lacking",
    [
        ({"input": ASK, **_CALLING}, True),
        ({"input": {"messages": ASK}, **_CALLING}, True),
        ({"input": {"messages": ASK, "tools": [FUNCTION]}, **_CALLING}, False),
        ({"input": _WITH_CALLS[1]}, True),
        ({"input": _WITH_CALLS, "model_parameters": {"tools": [FUNCTION]}}, False),
        ({"input": _WITH_CALLS}, True),
        ({"input": {"messages": _WITH_CALLS}}, False),
        ({"input": ASK}, False),
    ],
)
def test_langfuse_generations_whose_tools_may_not_be_logged_need_a_number_of_tokens(
    tmp_path: Path, fields: dict[str, Any], lacking: bool
) -> None:
    """A call shows that there were tools; beside bare messages these have no place."""
    line = {"type": "GENERATION", **fields}
    counted = line | {"usage_details": {"input": 9}}
    read = read_log(write_lines(tmp_path / "o.jsonl", *map(json.dumps, [line, counted])), "langfuse")
    assert read.counts.left_out == ({"tools without their definitions": 1} if lacking else {})
    assert str(read.records[-1].counter).endswith(NO_TOOLS) == lacking


@pytest.mark.parametrize("encode", [lambda value: value, json.dumps, str])
def test_langfuse_calls_however_they_are_encoded(tmp_path: Path, encode: Any) -> None:
    """Attributes of OpenTelemetry's events are texts, calls of the assistant's message too."""
    calls = [{"id": id, "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}} for id in ("c1", "c2")]
    results = [{"role": "tool", "content": "22", "tool_call_id": id} for id in ("c2", "c1")]
    given = [*ASK, {"role": "assistant", "content": "Let me see.", "tool_calls": encode(calls)}, *results]
    line = json.dumps({"type": "GENERATION", "input": given, "usage_details": {"input": 9}})
    (record,) = read_log(write_lines(tmp_path / "o.jsonl", line), "langfuse").records
    assert [message.tool_calls for message in record.messages] == [None, calls, None, None]


BLOCKS = [{"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "brief."}]
CHAT = {"choices": [{"message": {"role": "assistant", "content": "Hello."}}]}
ANTHROPIC = {"type": "message", "content": [{"type": "text", "text": "Hello."}]}
OWN = [{"type": "input_text", "text": "Hi"}, {"type": "input_text", "text": "there"}]


@pytest.mark.parametrize(
    "given, output, texts, other",
    [
        # vLLM's chat completions pass over a `system` field; its Messages API does not.
        ({"messages": ASK, "system": "Brief."}, "Hello.", ["Brief.", ASK[0]["content"]], [ASK[0]["content"]]),
        (
            {"messages": ASK, "system": "Brief.", "anthropic_version": "1"},
            "Hello.",
            ["Brief.", ASK[0]["content"]],
            None,
        ),
        ({"messages": ASK, "system": '{"a": 1}'}, ANTHROPIC, ['{"a": 1}', ASK[0]["content"]], None),
        # They show no text of parts that are all `input_text`; the Responses API does.
        ([{"role": "user", "content": OWN}], "Hello.", ["Hi\nthere"], [""]),
        ([{"role": "user", "content": OWN}], CHAT, ["Hi\nthere"], [""]),
        ([{"role": "user", "content": [*OWN, "!"]}], CHAT, ["Hi\nthere\n!"], [""]),
        ([{"role": "user", "content": [*OWN, {"type": "text", "text": "!"}]}], "Hello.", ["Hi\nthere\n!"], None),
        # Attributes of OpenTelemetry hold parts as text.
        ([{"role": "user", "content": json.dumps(BLOCKS)}], "Hello.", [json.dumps(BLOCKS)], ["Be \nbrief."]),
        ([{"role": "user", "content": "[1]"}], "Hello.", ["[1]"], None),
        ([*ASK, {"role": "tool", "content": json.dumps(BLOCKS)}], CHAT, [ASK[0]["content"], json.dumps(BLOCKS)], None),
    ],
)
def test_langfuse_inputs_that_may_be_of_several_apis(
    tmp_path: Path, given: Any, output: Any, texts: list[str], other: list[str] | None
) -> None:
    line = json.dumps({"type": "GENERATION", "input": given, "output": output})
    (record,) = read_log(write_lines(tmp_path / "o.jsonl", line), "langfuse").records
    assert [message.text for message in record.messages if message.role != "assistant"] == texts
    readings = (record.template_args or {}).get(OTHER_READINGS, [])
    found = [
        [Message.model_validate(message).text for message in reading["messages"] if message["role"] != "assistant"]
        for reading in readings
    ]
    assert found == ([] if other is None else [other])


def test_langfuse_parameters_of_the_ai_sdk(tmp_path: Path) -> None:
    """Its spans name the provider in the place of a system prompt."""
    of_sdk = {"system": "openai.chat", "maxRetries": "2", "maxTokens": "40", "temperature": "0.5"}
    given = [of_sdk, of_sdk | {"system": "Be brief."}, {"system": "Pirate"}, {"maxRetries": 2}]
    lines = [json.dumps({"type": "GENERATION", "input": ASK, "model_parameters": one}) for one in given]
    read = read_log(write_lines(tmp_path / "o.jsonl", *lines), "langfuse")
    assert [talk[0] for talk in read.talks] == [
        ("user", ASK[0]["content"]),
        ("system", "Be brief."),
        ("system", "Pirate"),
        ("user", ASK[0]["content"]),
    ]
    assert read.records[0].max_new_tokens == 40


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"input": "Once upon a time"}, "raw prompt"),
        ({"input": {"prompt": "Once upon a time"}}, "raw prompt"),
        ({"input": "[HumanMessage(content='Hi')]"}, "messages in an unread form"),
        ({"input": "[{'role': 'user', 'content': "}, "messages in an unread form"),
        ({"input": [{"role": "user", "parts": [{"text": "Hi"}]}]}, "messages in an unread form"),
        ({"input": {"messages": [*ASK, {"role": "user", "text": "Hi"}]}}, "messages in an unread form"),
        ({"input": [{"role": "user"}]}, "messages in an unread form"),
        # LangChain's handler for JavaScript says so of a ChatMessage of any role.
        ({"input": [*ASK, {"role": "human", "content": "Hi"}]}, "messages in an unread form"),
        # Flags of metadata, which are attributes of a span, are texts.
        *(
            ({"input": ASK, "metadata": {"enable_thinking": value}}, "settings beside the request")
            for value in (False, "false", "True")
        ),
        *(
            (
                {"input": ASK, "metadata": {"attributes": {name: json.dumps([{"type": "function", "name": "f"}])}}},
                "settings beside the request",
            )
            for name in ("gen_ai.tool.definitions", "tool_definitions")
        ),
        ({"input": ASK, "metadata": {"attributes": {"gen_ai.tool.definitions": "[]"}}}, None),
        ({"input": {"question": "Hi"}}, "messages in an unread form"),
        ({"input": ["Hi"]}, "messages in an unread form"),
        ({"input": [*ASK, {"type": "placeholder", "name": "history"}]}, "messages in an unread form"),
        ({"input": [*ASK, {"role": "tool", "content": {"name": "x", "degrees": 5}}]}, "messages in an unread form"),
        ({"input": [*ASK, {"role": "tool", "content": FUNCTION, "tool_call_id": "c"}]}, "messages in an unread form"),
        ({"input": ""}, "no text logged"),
        ({"input": {"messages": ASK, "options": {"tools": [FUNCTION]}}}, "settings beside the request"),
        ({"input": ASK, "metadata": {"tools": [FUNCTION]}}, "settings beside the request"),
        *(
            ({"input": ASK, "modelParameters": {name: "Pirate"}}, "settings beside the request")
            for name in ("system_prompt", "system_instruction", "instructions")
        ),
        ({"input": [{"role": "system", "content": "Pirate"}, *ASK], "modelParameters": {"instructions": "x"}}, None),
        ({"input": ASK, "metadata": {"body": {"messages": [SAID, *ASK]}}}, "another request beside it"),
        ({"input": ASK, "metadata": json.dumps({"sent": {"messages": [SAID]}})}, "another request beside it"),
        ({"input": {"messages": ASK, "upstream": {"messages": [SAID]}}}, "another request beside it"),
        ({"input": {"messages": ASK, "system": "s"}, "metadata": {"messages": ASK}}, "another request beside it"),
        ({"input": ASK, "metadata": {"body": {"messages": ASK, "model": "m"}, "messages": 3}}, None),
        ({"input": [{"type": "human", "content": ASK[0]["content"], "id": "1"}], "metadata": {"messages": ASK}}, None),
        ({"input": ASK, "output": {"messages": [SAID]}}, None),
        (
            {"input": ASK, "output": {"object": "response", "instructions": "Pirate", "output": [SAID]}},
            "earlier messages that the log may lack",
        ),
        ({"input": "<truncated due to size exceeding limit>"}, "text cut by the log"),
        (
            {"input": [*ASK, {"role": "tool", "content": "<truncated due to size exceeding limit>"}]},
            "text cut by the log",
        ),
        ({"input": [{"role": "user", "content": "See @@@langfuseMedia:id=1@@@"}]}, "message part that is not text"),
        # What its clients write of a text that begins with `data:`, of a number past 2⁵³ and inside twenty objects.
        *(
            (
                {"input": [{"role": "user", "content": f"<Upload handling failed for LangfuseMedia of type {kind}>"}]},
                _CUT,
            )
            for kind in ("None", "undefined")
        ),
        *(
            ({"input": {"messages": ASK, "tools": [with_schema(one)]}}, reason)
            for one, reason in (
                ({"maximum": "9223372036854775807"}, _CUT),
                ({"minimum": "-9007199254740993"}, _CUT),
                ({"enum": ["9007199254740991", 9223372036854775807, "0", "<a>"]}, None),
                ({"properties": {"a": "<dict>"}}, _CUT),
                ({"properties": {"a": {"enum": "<list>"}}}, _CUT),
                ({"description": "@@@langfuseMedia:type=a/b|id=1|source=bytes@@@"}, _CUT),
            )
        ),
        # What its client for Python writes of OpenAI's `NOT_GIVEN`.
        ({"input": {"messages": ASK, "tools": {"__module__": "openai"}}}, None),
        ({"input": {"messages": ASK, "tools": {}}}, None),
        # A prefill, or what that for JavaScript wrote of a list that grew meanwhile; the number of tokens tells.
        ({"input": [*ASK, SAID]}, "answer at the end of its messages"),
        ({"input": {"messages": [*ASK, SAID]}, "output": "Twice"}, "answer at the end of its messages"),
        ({"input": [*ASK, SAID], "output": "Once"}, None),
        ({"input": [*ASK, SAID], "usage_details": {"input": 9}}, None),
        ({"input": ASK, "level": "error"}, "failed request"),
        ({"input": ASK, "output": {"error": {"message": "no"}}}, "failed request"),
        ({"input": ASK, "output": json.dumps({"object": "error", "message": "no"})}, "failed request"),
        ({"input": ASK, "output": "Error 500"}, None),
        ({"input": ASK, "output": json.dumps({"error": "none found"})}, None),
        ({"input": ASK, "level": "WARNING"}, None),
    ],
)
def test_langfuse_generations_that_are_left_out(tmp_path: Path, fields: dict[str, Any], reason: str | None) -> None:
    lines = [{"type": "GENERATION", "input": ASK}, {"type": "GENERATION", **fields}]
    read = read_log(write_lines(tmp_path / "o.jsonl", *map(json.dumps, lines)), "langfuse")
    assert read.counts.left_out == ({} if reason is None else {reason: 1})
