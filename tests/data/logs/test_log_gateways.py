"""LiteLLM's StandardLoggingPayload and Langfuse's observations, as their field references list them."""

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from log_reading import SAMPLES, read_log, write_lines

from draftforge.data.chat_template import without_billing
from draftforge.data.conversation import NO_TOOLS, OTHER_READINGS, Message
from draftforge.errors import InputError
from draftforge.specdec.sampling_settings import SamplingSettings

ASKED = [("system", "Be brief."), ("user", "What time is it?")]


def test_litellm_payloads() -> None:
    read = read_log(SAMPLES / "litellm.jsonl", "litellm")
    assert read.talks == [
        [*ASKED, ("assistant", "")],
        [("user", "Capital of France?"), ("assistant", "Paris.")],
        [("user", "Capital of Spain?"), ("assistant", "Madrid.")],
    ]
    first, second, cached = read.records
    assert first.sampling == SamplingSettings(temperature=0.4) and first.max_new_tokens == 99
    assert first.tools is not None and first.messages[2].tool_calls is not None
    assert first.template_args == {"enable_thinking": True} and first.group == "t-1"
    assert (first.started, first.ended, first.replica) == (1795860000.25, 1795860002.75, "d-0")
    assert (first.prompt_tokens, first.answer_tokens) == (38, 12)
    assert second.sampling is None and second.replica == "gpu-0:8000"  # and neither user nor password of the address
    assert (second.started, second.ended) == (1795860001.0, 1795860003.0)
    assert (cached.started, cached.ended) == (1795860000.25, None)  # LiteLLM's own cache answered: no engine was busy
    assert len(read.times) == 11 - 1 - 2  # nor with embeddings and what was passed through
    assert read.counts.left_out == {
        "failed request": 1,
        "no chat request": 2,
        "raw prompt": 1,
        "text redacted by the log": 1,
        "no text logged": 1,
        "text cut by the log": 1,
        "message part that is not text": 1,
    }


HI = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Hello."}


def payload(**fields: Any) -> str:
    own = {"call_type": "anthropic_messages", "status": "success", "prompt_tokens": 9}
    return json.dumps({**own, "messages": [HI], **fields})


BLOCKS = [{"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "brief."}]


@pytest.mark.parametrize(
    "fields",
    [
        {"model_parameters": {"system": BLOCKS}},
        {"model_parameters": json.dumps({"system": "Be brief."})},
        {"system_prompt": BLOCKS},
        {
            "model_parameters": {"system": "Be brief."},
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        },
        {
            "system_prompt": BLOCKS,
            "messages": [{"role": "system", "content": BLOCKS}, {"role": "user", "content": "Hi"}],
        },
    ],
)
def test_litellm_system_prompts_of_the_messages_api(tmp_path: Path, fields: dict[str, Any]) -> None:
    """As blocks they stand beside the messages alone; as text also among them, and count once."""
    read = read_log(write_lines(tmp_path / "l.jsonl", payload(**fields)), "litellm")
    assert read.talks == [[("system", "Be brief."), ("user", "Hi")]]


def test_litellm_calls_of_the_messages_api_without_a_logged_system_prompt_need_a_number_of_tokens(
    tmp_path: Path,
) -> None:
    """It logs none that was sent as blocks; what was logged, and chat completions, need none."""
    first = {"role": "system", "content": ""}
    for fields, counter in (
        ({}, "litellm, model m, without a system prompt"),
        ({"prompt_tokens": 0}, None),
        ({"prompt_tokens": None}, None),
        ({"model_parameters": {"system": "s"}, "prompt_tokens": 3}, "litellm, model m"),
        ({"messages": [first, {"role": "user", "content": "Hi"}]}, "litellm, model m"),
        ({"call_type": "acompletion"}, "litellm, model m"),
    ):
        lines = [payload(model="m", **fields), payload(call_type="completion", model="other")]
        read = read_log(write_lines(tmp_path / "l.jsonl", *lines), "litellm")
        assert [one.counter for one in read.records][:-1] == ([] if counter is None else [counter])
        lacking = read.counts.left_out.get("system prompt that the log may lack", 0)
        assert lacking == (counter is None)


def test_litellm_tools_and_answers_of_the_messages_api(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    parameters = {"max_tokens": 9, "tools": [{"name": "weather", "description": "Weather", "input_schema": schema}]}
    answer = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "Cold."}]}
    lines = [payload(model_parameters=parameters, response=answer), payload(response=json.dumps(answer))]
    read = read_log(write_lines(tmp_path / "l.jsonl", *lines), "litellm")
    assert read.talks == [[("user", "Hi"), ("assistant", "Cold.")]] * 2
    function = {"name": "weather", "description": "Weather", "parameters": schema}
    assert read.records[0].tools == [{"type": "function", "function": function}]
    assert read.records[0].max_new_tokens == 9


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"status": "failure"}, "failed request"),
        ({"status_fields": {"llm_api_status": "failure"}}, "failed request"),
        ({"error_information": {"error_code": "400", "error_class": "BadRequestError"}}, "failed request"),
        ({"error_str": "boom"}, "failed request"),
        ({"response": {"error": {"message": "no"}}}, "failed request"),
        ({"response": {"object": "error", "code": 400, "message": "no"}}, "failed request"),
        (
            {
                "error_information": {"error_code": "", "error_class": ""},
                "status_fields": {"llm_api_status": "success"},
            },
            None,
        ),
        (
            {"model_parameters": {"system": [{"type": "text", "text": "a (litellm_truncated 9 chars)"}]}},
            "text cut by the log",
        ),
        ({"model_parameters": {"system": "redacted-by-litellm"}}, "text redacted by the log"),
        (
            {
                "call_type": "acompletion",
                "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "thinking_blocks": [{}]}],
            },
            "message rewritten by the gateway",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "message part that is not text",
        ),
        ({"call_type": "aresponses"}, "no chat request"),
        (
            {"proxy_server_request": json.dumps({"body": {"tools": [{"name": "look", "input_schema": {}}]}})},
            "settings beside the request",
        ),
        (
            {"call_type": "acompletion", "proxy_server_request": {"body": {"messages": [ASSISTANT]}}},
            "another request beside it",
        ),
        ({"metadata": {"requester": json.dumps({"messages": [ASSISTANT]})}}, "another request beside it"),
        (
            {"model_parameters": {"system": "s"}, "proxy_server_request": {"body": {"messages": [HI]}}},
            "another request beside it",
        ),
        (
            {
                "messages": [{"role": "system", "content": "s"}, HI],
                "proxy_server_request": {"body": {"messages": [HI], "system": "s", "model": "m"}},
            },
            None,
        ),
        (
            {"call_type": "acompletion", "proxy_server_request": json.dumps({"body": {"messages": [HI], "n": 1}})},
            None,
        ),
        (
            {"messages": "{}", "proxy_server_request": json.dumps({"tools": [{"name": "look", "input_schema": {}}]})},
            "no text logged",
        ),
    ],
)
def test_litellm_calls_that_are_left_out(tmp_path: Path, fields: dict[str, Any], reason: str | None) -> None:
    read = read_log(write_lines(tmp_path / "l.jsonl", payload(), payload(**fields)), "litellm")
    assert read.counts.left_out == ({} if reason is None else {reason: 1})


TEXT = {"type": "text", "text": "a"}
CALL = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}


def test_litellm_efforts_that_reach_some_models_alone_are_left_out(tmp_path: Path) -> None:
    """LiteLLM 1.110 makes an effort of a chat completion's `thinking`, and drops `output_config` for most models."""
    odd = [
        payload(call_type="acompletion", model_parameters={"thinking": {"type": "enabled", "budget_tokens": 2048}}),
        payload(model_parameters={"output_config": {"effort": "low"}}),
    ]
    read = read_log(write_lines(tmp_path / "l.jsonl", payload(), *odd), "litellm")
    assert read.counts.left_out == {"reasoning effort in an unread form": 2}


def test_litellm_reads_a_system_prompt_of_text_as_the_endpoint_does(tmp_path: Path) -> None:
    """The line of Claude Code's header is cut off it, where a system message among the others would go whole."""
    said = [
        {"role": "system", "content": "x-anthropic-billing-header: a\nBe brief."},
        {"role": "user", "content": "Hi"},
    ]
    (record,) = read_log(write_lines(tmp_path / "l.jsonl", payload(messages=said)), "litellm").records
    assert [without_billing(message, "vllm") for message in record.messages] == ["Be brief.", "Hi"]
    # Of other providers it is a message of the client's, and theirs is not logged.
    lines = payload(), payload(messages=said, custom_llm_provider="hosted_vllm")
    read = read_log(write_lines(tmp_path / "l.jsonl", *lines), "litellm")
    assert read.counts.left_out == {"message rewritten by the gateway": 1}


@pytest.mark.parametrize(
    "said, parameters, same",
    [
        ([], {}, True),
        ([], {"system": "Be brief.", "tools": [{"name": "weather", "input_schema": SCHEMA}]}, True),
        ([], {"system": [TEXT]}, True),
        ([], {"system": [TEXT, TEXT]}, False),  # parts, which are joined by a line break
        ([], {"system": [{"type": "text", "text": "x-anthropic-billing-header: 1"}]}, False),
        ([], {"thinking": {"type": "enabled", "budget_tokens": 2000}}, False),  # an effort
        ([], {"reasoning_effort": "medium"}, False),  # what 1.110.2 made of thinking, and logs
        ([], {"tools": []}, False),
        ([], {"tools": [{"name": "weather", "input_schema": {**SCHEMA, "additionalProperties": False}}]}, False),
        ([], {"tools": [{"name": "weather", "input_schema": SCHEMA, "strict": True}]}, False),
        ([], {"tools": [{"name": "w" * 65, "input_schema": SCHEMA}]}, False),
        ([("assistant", [TEXT, CALL]), ("user", [{"type": "tool_result", "content": "cold"}, TEXT])], {}, True),
        ([("assistant", [CALL]), ("user", [{"type": "tool_result", "content": [TEXT, TEXT]}])], {}, True),
        ([("assistant", [TEXT, TEXT]), ("user", "b")], {}, False),  # joined by nothing
        ([("assistant", [{"type": "thinking", "thinking": "hm"}, TEXT]), ("user", "b")], {}, False),
        ([("assistant", ""), ("user", "b")], {}, False),
        ([("system", "Be kind."), ("user", "b")], {}, False),
    ],
)
def test_litellm_translates_some_messages_otherwise_than_vllm(
    tmp_path: Path, said: list[tuple[str, Any]], parameters: dict[str, Any], same: bool
) -> None:
    """As LiteLLM 1.110's `translate_anthropic_to_openai`, for all providers but Anthropic's own API."""
    messages = [{"role": "user", "content": "Hi"}, *({"role": role, "content": content} for role, content in said)]
    fields = {"messages": messages, "model_parameters": parameters}
    for provider, kept in ((None, True), ("anthropic", True), ("hosted_vllm", same), ("openai", same)):
        line = payload(**fields, custom_llm_provider=provider)
        read = read_log(write_lines(tmp_path / "l.jsonl", payload(), line), "litellm")
        assert read.counts.left_out == ({} if kept else {"message rewritten by the gateway": 1})


STRICT = {"additionalProperties": False, "properties": {"a": {"additionalProperties": False}}, "type": "object"}
LOOSE = {"properties": {"a": {}}, "type": "object"}


@pytest.mark.parametrize("provider, parameters", [("hosted_vllm", LOOSE), ("openai", STRICT), (None, STRICT)])
def test_litellm_sends_chat_completions_otherwise_than_it_logs_them(
    tmp_path: Path, provider: str | None, parameters: dict[str, Any]
) -> None:
    """As LiteLLM 1.110.2 sent them to a server of ours: the log keeps the client's own roles, parts and tools."""
    said = [
        {"role": "developer", "content": "Be brief.", "name": "Ann"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [{"type": "text", "text": "Hello.", "annotations": []}]},
        {"role": "user", "content": "Bye"},
    ]
    function = {"name": "look", "description": "Looks.", "parameters": STRICT, "strict": True}
    fields = {"call_type": "acompletion", "messages": said, "custom_llm_provider": provider}
    line = payload(**fields, model_parameters={"tools": [{"type": "function", "function": function}]})
    (record,) = read_log(write_lines(tmp_path / "l.jsonl", line), "litellm").records
    system, _, answer, _ = record.messages[:4]
    assert (system.role, system.content, system.name) == ("system", "Be brief.", None)
    assert answer.part_fields == (None if provider == "hosted_vllm" else [{"annotations": []}])
    shown: dict[str, Any] = {"name": "look", "description": "Looks.", "parameters": parameters}
    shown |= {} if provider == "hosted_vllm" else {"strict": True}
    assert record.tools == [{"type": "function", "function": shown}]


def test_litellm_chat_completions_lose_their_marks_and_an_assistants_parts(tmp_path: Path) -> None:
    marked = {"role": "user", "content": [{**TEXT, "cache_control": {"type": "ephemeral"}, "lang": "en"}]}
    line = payload(call_type="acompletion", messages=[marked], custom_llm_provider="hosted_vllm")
    (record,) = read_log(write_lines(tmp_path / "l.jsonl", line), "litellm").records
    assert record.messages[0].part_fields == [{"lang": "en"}]
    talk = [marked, {"role": "assistant", "content": [TEXT, TEXT]}, marked]
    for provider, reasons in (("hosted_vllm", {"message rewritten by the gateway": 1}), ("openai", {})):
        said = payload(call_type="acompletion", messages=talk, custom_llm_provider=provider)
        assert read_log(write_lines(tmp_path / "l.jsonl", line, said), "litellm").counts.left_out == reasons


def test_labels_do_not_pass_for_fields_of_the_request(tmp_path: Path) -> None:
    odd = {"temperature": 0, "max_tokens": 5, "chat_template": "x", "documents": "x", "team": "shop"}
    line = payload(call_type="acompletion", metadata=odd, model_parameters={"top_p": 0.5})
    (record,) = read_log(write_lines(tmp_path / "l.jsonl", line), "litellm", domain=None, domain_field="team").records
    assert record.domain == "shop" and record.max_new_tokens is None and record.template_args == {}
    assert record.sampling == SamplingSettings(temperature=1, top_p=0.5)


def test_litellm_labels_of_the_metadata_name_domain_and_replica() -> None:
    source = {"domain": None, "domain_field": "user_api_key_team_alias", "replica_field": "model_group"}
    read = read_log(SAMPLES / "litellm.jsonl", "litellm", **source)
    assert {record.domain for record in read.records} == {"shop"} and read.records[0].replica == "support"


def test_litellm_needs_a_call_type(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"l\.jsonl:1: has no call_type"):
        read_log(write_lines(tmp_path / "l.jsonl", '{"messages": []}'), "litellm")


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
FUNCTION = {"type": "function", "function": {"name": "clock", "description": None, "parameters": {"type": "object"}}}
SAID = {"role": "assistant", "content": "Once"}


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
def test_langfuse_and_litellm_tell_what_a_clients_extra_body_sent(tmp_path: Path, encode: Any) -> None:
    """LiteLLM 1.110 puts the fields into the body that it sends; an input may be a body with that very field."""
    off = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    lines = [
        {"type": "GENERATION", "input": {"messages": ASK, "extra_body": encode(off["extra_body"])}},
        {"type": "GENERATION", "input": ASK, "model_parameters": encode(off)},
    ]
    (body, client) = read_log(write_lines(tmp_path / "o.jsonl", *map(json.dumps, lines)), "langfuse").records
    line = payload(messages=ASK, model_parameters=encode(off))
    (sent,) = read_log(write_lines(tmp_path / "l.jsonl", line), "litellm").records
    assert client.template_args == sent.template_args == {"enable_thinking": False}
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


PART: dict[str, Any] = {"type": "text", "text": "Hi"}


def _by(logger: str) -> dict[str, Any]:
    return {"metadata": {"scope": {"name": logger, "version": "1"}}}


_CALLS = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
_WITH_CALLS = [*ASK, {"role": "assistant", "content": "", "tool_calls": _CALLS}, *ASK]
_CALLING: dict[str, Any] = {"output": {"role": "assistant", "content": None, "tool_calls": _CALLS}}
_AGENTS, _OTHERS = "openinference.instrumentation.openai_agents", "openinference.instrumentation.openai"


@pytest.mark.parametrize(
    "fields, lacking",
    [
        ({"input": ASK, **_CALLING}, True),
        ({"input": {"messages": ASK}, **_CALLING}, True),
        ({"input": {"messages": ASK, "tools": [FUNCTION]}, **_CALLING}, False),
        ({"input": _WITH_CALLS, **_by(_OTHERS)}, True),
        ({"input": _WITH_CALLS[1]}, True),
        ({"input": _WITH_CALLS, "model_parameters": {"tools": [FUNCTION]}}, False),
        ({"input": _WITH_CALLS}, True),
        ({"input": {"messages": _WITH_CALLS}, **_by(_OTHERS)}, False),
        ({"input": ASK, **_by(_OTHERS)}, False),
        ({"input": ASK, **_by(_AGENTS)}, True),
        ({"input": {"messages": ASK, "tools": [FUNCTION]}, **_by(_AGENTS)}, False),
    ],
)
def test_langfuse_generations_whose_tools_may_not_be_logged_need_a_number_of_tokens(
    tmp_path: Path, fields: dict[str, Any], lacking: bool
) -> None:
    """OpenInference's spans of chat completions of OpenAI's SDK for agents have calls, and no tools."""
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
        # Strands Agents' events hold blocks of Bedrock's Converse API as text.
        *(
            ({"input": [*ASK, {"role": role, "content": json.dumps(blocks)}, *ASK]}, "messages in an unread form")
            for role, blocks in {
                "system": [{"text": "Be brief."}],
                "user": [{"text": "Hi"}, {"cachePoint": {"type": "default"}}],
                "assistant": [{"text": "Let me see."}, {"toolUse": {"toolUseId": "c", "name": "f", "input": {}}}],
                "tool": [{"toolResult": {"toolUseId": "c", "status": "success", "content": [{"text": "22"}]}}],
            }.items()
        ),
        ({"input": [{"role": "user", "content": '[{"text": "Hi", "language": "en"}]'}]}, None),
        ({"input": [{"role": "user", "content": "[]"}]}, None),
        # LangChain's handler for JavaScript says so of a ChatMessage of any role.
        ({"input": [*ASK, {"role": "human", "content": "Hi"}]}, "messages in an unread form"),
        # Flags of metadata, which are attributes of a span, are texts.
        *(
            ({"input": ASK, "metadata": {"enable_thinking": value}}, "settings beside the request")
            for value in (False, "false", "True")
        ),
        # The AI SDK's provider for compatible servers adds these fields to the message.
        ({"input": [ASK[0] | {"providerOptions": {"openaiCompatible": {"name": "Bo"}}}]}, "messages in an unread form"),
        (
            {"input": [{"role": "user", "content": [PART | {"providerOptions": {"openaiCompatible": {"a": 1}}}]}]},
            "messages in an unread form",
        ),
        ({"input": [ASK[0] | {"providerOptions": {"anthropic": {"cacheControl": {"type": "ephemeral"}}}}]}, None),
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
