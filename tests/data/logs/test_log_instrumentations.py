"""Observations of Langfuse that other libraries' OpenTelemetry instrumentations logged: none logs all that was sent."""

import json
from pathlib import Path
from typing import Any

import pytest
from byte_level import byte_level_tokenizer
from log_reading import read_log, write_lines

from draftforge.data.chat_template import render
from draftforge.data.conversation import NO_ARGUMENTS, NOT_ALL, Conversation, Message, turns
from draftforge.data.logged_prompts import OTHER_COUNT, UNPROVEN, PromptCheck
from draftforge.data.mix import build_mix, load_mix
from draftforge.data.settings import MixSettings

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<new>"
WRAPPED = {"frequency_penalty": 0, "presence_penalty": 0}  # by Langfuse's client for Python
AI_SDK = {"maxRetries": "2", "system": "openai.chat"}
SCOPES = [
    *("ai", "litellm", "langfuse", "my-own-service", "", "pydantic-ai", "strands.telemetry.tracer", "haystack"),
    *("agent_framework", "semantic_kernel", "gcp.vertex.agent", "logfire.openai", "@traceloop/instrumentation-openai"),
    *(f"openinference.instrumentation.{name}" for name in ("openai", "openai_agents", "litellm", "langchain")),
    *(f"opentelemetry.instrumentation.{name}" for name in ("openai", "openai.v1", "openai_v2", "anthropic")),
]
OTHERS: list[dict[str, Any]] = [
    *({"metadata": {"scope": {"name": name, "version": "1"}, "resourceAttributes": {}}} for name in SCOPES),
    {"metadata": json.dumps({"scope": {"name": "ai"}})},
    {"metadata": {"scope": json.dumps({"name": "ai"})}},
    {"metadata": {"scope.name": "ai", "scope.version": "1", "resourceAttributes.service.name": "shop"}},
    {"metadata": {"scope": {"attributes": {}}}},
    {"metadata": {"resourceAttributes": {"service.name": "shop"}}},
    {"metadata": {"resourceAttributes.service.name": "shop"}},
    # A span of another library that Langfuse's own tracer sent: its attributes are kept.
    {"metadata": {"scope": {"name": "langfuse-sdk"}, "attributes": {"llm.model_name": "m"}}},
    # LiteLLM's callback `langfuse` sends through Langfuse's client.
    {"metadata": {"scope": {"name": "langfuse-sdk"}, "litellm_call_id": "c", "hidden_params": "{}"}},
    {"metadata": {"litellm_call_id": "c"}},
    # Langfuse's older exporter for the AI SDK keeps no scope.
    {"model_parameters": AI_SDK},
    {"modelParameters": json.dumps(AI_SDK), "model_parameters": None},
    # Code of one's own (`@observe`, plugins), which may log no tools.
    {"model_parameters": {"temperature": 0.5}, "metadata": {"scope": {"name": "langfuse-sdk"}}},
    {"model_parameters": None},
]
OWN: list[dict[str, Any]] = [
    {},
    {"metadata": None},
    {"metadata": {"scope": "team"}},
    {"metadata": {"attributes": {"team": "shop"}}},
    {"metadata": {"scope": {"name": "langfuse-sdk", "version": "3.9.0", "attributes": {}}, "resourceAttributes": {}}},
    {"metadata": json.dumps({"scope": {"name": "langfuse-sdk"}})},
    {"metadata": {"scope.name": "langfuse-sdk", "resourceAttributes.service.name": "shop", "ls_provider": "openai"}},
    {"metadata": {"ls_provider": "openai"}, "model_parameters": {"max_tokens": 9, "temperature": 0.5}},
]


def observed(text: str, tokens: int | None, **fields: Any) -> str:
    one = {"type": "GENERATION", "input": [{"role": "user", "content": text}], "output": "Yes."}
    own = {"usage_details": tokens and {"input": tokens}, "model_parameters": WRAPPED}
    return json.dumps({name: value for name, value in (one | own | fields).items() if value is not None})


# A body is that of a client of Langfuse's, unless the export lacks the metadata, which tell of others.
BODY: dict[str, Any] = {"input": {"messages": [{"role": "user", "content": "Hi"}]}, "model_parameters": None}


@pytest.mark.parametrize("fields", [*OTHERS, *OWN, BODY, BODY | {"metadata": {}}])
def test_who_logged_it_stands_in_the_name_of_the_counter(tmp_path: Path, fields: dict[str, Any]) -> None:
    """Without a number of tokens, too, where one would have to show that nothing is lacking."""
    lines = [observed("Hi", tokens, model="m", **fields) for tokens in (9, 0, None)]
    records = read_log(write_lines(tmp_path / "o.jsonl", *lines), "langfuse").records
    assert [one.counter for one in records] == [
        f"langfuse, model m{NOT_ALL if fields in [*OTHERS, BODY] else NO_ARGUMENTS}"
    ] * 3


def test_they_are_asked_where_the_number_of_tokens_shows_the_served_prompt(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(["Hi there"], 262)
    tokenizer.chat_template = TEMPLATE

    def length(text: str) -> int:
        return len(render(tokenizer, [Message(role="user", content=text)]))

    lines = []
    for i, fields in enumerate([*OTHERS, *OWN]):
        who = {"model": f"m{i}", **fields}
        lines += [observed(f"{i} same {word}", length(f"{i} same {word}"), **who) for word in ("one", "two")]
        lines += [observed(f"{i} more", 40 + length(f"{i} more"), **who), observed(f"{i} uncounted", None, **who)]
        # Where most numbers are others, none of them shows anything.
        who["model"] = f"other tokenizer {i}"
        lines += [observed(f"{i} other {n}", n + length(f"{i} other {n}"), **who) for n in (0, 40, 50)]
    write_lines(tmp_path / "log.jsonl", *lines)
    source = {"kind": "langfuse", "path": "log.jsonl", "domain": "d"}
    build_mix(MixSettings.model_validate({"sources": [source], "near_threshold": 1.0}), tmp_path, tmp_path / "mix")
    mix = load_mix(tmp_path / "mix")
    assert len(mix) == len(lines)

    def refusal(check: PromptCheck, one: Conversation) -> str | None:
        (turn,) = turns(one)
        return (check.refusal(one, turn.index) or "").partition(" (")[0] or None

    check, unproven = PromptCheck(tokenizer, mix), PromptCheck(tokenizer, mix, ask_unproven=True)
    for one in mix:
        number, kind = one.messages[0].text.split(" ")[:2]
        other = UNPROVEN if int(number) < len(OTHERS) else None
        expected = {"same": None, "more": OTHER_COUNT, "uncounted": other, "other": other}[kind]
        assert refusal(check, one) == expected, one.messages[0].text
        assert refusal(unproven, one) == (expected if kind == "more" else None)
    (told,) = (line for line in check.lines() if line.startswith(f"prompt tokens of langfuse, model m0{NOT_ALL}"))
    assert "1 of 3 requests have another number" in told
    assert "; 1 not compared, as something in them was redacted or nobody counted it; instrumentations other" in told


def test_a_prompt_that_another_log_counts_needs_no_number_of_theirs(tmp_path: Path) -> None:
    """One request, logged by Langfuse's own client, too."""
    tokenizer = byte_level_tokenizer(["Hi there"], 262)
    tokenizer.chat_template = TEMPLATE
    tokens = len(render(tokenizer, [Message(role="user", content="Hi")]))
    lines = [observed("Hi", None, metadata={"scope": {"name": "ai"}}), observed("Hi", tokens)]
    fill = [observed(f"word{i} word{i * 7} word{i * 13}", None) for i in range(60)]
    write_lines(tmp_path / "log.jsonl", *lines, *fill)
    source = {"kind": "langfuse", "path": "log.jsonl", "domain": "d"}
    build_mix(MixSettings.model_validate({"sources": [source]}), tmp_path, tmp_path / "mix")
    (one,) = (one for one in load_mix(tmp_path / "mix") if one.messages[0].text == "Hi")
    assert PromptCheck(tokenizer, [one]).refusal(one, 0) is None


def of_litellm(text: str, tokens: int | None, **fields: Any) -> str:
    one = {"call_type": "acompletion", "messages": [{"role": "user", "content": text}], "prompt_tokens": tokens}
    return json.dumps(one | fields)


@pytest.mark.parametrize(
    "switch, kind, alike",
    [
        *(
            (switch, "langfuse", False)
            for switch in ("enable_thinking", "thinking", "reasoning_effort", "enable_reasoning", "")
        ),
        *(("thinking", "litellm", False), ("", "litellm", False)),
        *(("reasoning_effort", "langfuse", True), ("thinking", "litellm", True)),
    ],
)
def test_what_no_count_shows_is_not_asked_where_the_template_may_switch_reasoning(
    tmp_path: Path, switch: str, kind: str, alike: bool
) -> None:
    """Neither Langfuse's own clients nor LiteLLM log `chat_template_kwargs`, streams often tell no number of tokens,
    and templates may print one token or another (`alike`: gpt-oss, DeepSeek V3.1)."""
    tokenizer = byte_level_tokenizer(["Hi there"], 262)
    plain = TEMPLATE.replace("<new>", "{% if date_string %}{{ date_string }}{% endif %}<new>")
    switched = f"{{% if {switch} is defined %}}{{{{ {switch} }}}}{{% endif %}}"
    switched = f"{{{{ '+' if {switch} else '-' }}}}" if alike else switched
    tokenizer.chat_template = plain + (switched if switch else "")
    tokens = len(render(tokenizer, [Message(role="user", content="counted")]))
    logged = observed if kind == "langfuse" else of_litellm
    lines = [logged("counted", tokens), logged("uncounted", None)]
    told = [logged("told", None, model_parameters=WRAPPED | {"reasoning_effort": "low"})]
    fill = [logged(f"word{i} word{i * 7} word{i * 13}", None) for i in range(60)]
    write_lines(tmp_path / "log.jsonl", *lines, *told, *fill)

    def asked(name: str, args: dict[str, str], ask_unproven: bool = False) -> tuple[list[str], list[str]]:
        source = {"kind": kind, "path": "log.jsonl", "domain": "d", "template_args": args}
        settings = MixSettings.model_validate({"sources": [source], "near_threshold": 1.0})
        build_mix(settings, tmp_path, tmp_path / name)
        mix = load_mix(tmp_path / name)
        check = PromptCheck(tokenizer, mix, ask_unproven=ask_unproven)
        found = {one.messages[0].text: check.refusal(one, 0) for one in mix}
        assert set(found.values()) <= {None, UNPROVEN}
        texts = ("counted", "uncounted", "told")
        return [text for text in texts if found[text] is None], check.lines()

    shown, lines = asked("mix", {})
    of_own = ["told"] if switch in ("reasoning_effort", "enable_thinking") else []
    by_number = [] if alike else ["counted"]
    assert shown == ([*by_number, *of_own] if switch else ["counted", "uncounted", "told"])
    assert any("log no `chat_template_kwargs`" in line for line in lines) == bool(switch)
    assert len(lines) == 1
    assert asked("open", {}, ask_unproven=True)[0] == ["counted", "uncounted", "told"]
    if switch:
        assert "uncounted" in asked("set", {switch: "low"})[0]
