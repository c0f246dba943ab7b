"""LiteLLM's StandardLoggingPayload, as its field reference lists it."""

import json
from pathlib import Path
from typing import Any

import pytest
from log_reading import SAMPLES, read_log, write_lines

from draftforge.data.chat_template import without_billing
from draftforge.data.conversation import NO_ARGUMENTS, NO_SYSTEM_PROMPT
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
        ({}, NO_SYSTEM_PROMPT),
        ({"prompt_tokens": 0}, None),
        ({"prompt_tokens": None}, None),
        ({"model_parameters": {"system": "s"}, "prompt_tokens": 3}, NO_ARGUMENTS),
        ({"messages": [first, {"role": "user", "content": "Hi"}]}, NO_ARGUMENTS),
        ({"call_type": "acompletion"}, NO_ARGUMENTS),
    ):
        lines = [payload(model="m", **fields), payload(call_type="completion", model="other")]
        read = read_log(write_lines(tmp_path / "l.jsonl", *lines), "litellm")
        expected = [] if counter is None else [f"litellm, model m{counter}"]
        assert [one.counter for one in read.records][:-1] == expected
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
        ({"call_type": "completion", "custom_llm_provider": "text-completion-openai"}, "raw prompt"),
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


@pytest.mark.parametrize("encode", [lambda value: value, json.dumps])
def test_litellm_tells_what_a_clients_extra_body_sent(tmp_path: Path, encode: Any) -> None:
    """LiteLLM 1.110 puts the fields into the body that it sends."""
    off = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    line = payload(call_type="acompletion", model_parameters=encode(off))
    (sent,) = read_log(write_lines(tmp_path / "l.jsonl", line), "litellm").records
    assert sent.template_args == {"enable_thinking": False}
