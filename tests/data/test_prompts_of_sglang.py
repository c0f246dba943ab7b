"""Prompts as SGLang 0.5.23 makes them: the right values come from its own `OpenAIServingChat`, run with these templates
on these requests."""

from typing import Any

import pytest
from byte_level import byte_level_tokenizer

from draftforge.data.chat_template import turn_ids, turn_prompt
from draftforge.data.conversation import turns
from draftforge.data.logs.chat import LeftOut, Timing
from draftforge.data.records import Record, parse
from draftforge.data.settings import FileSource

SHOWN = """{% for m in messages %}{{ m | tojson }}{% endfor %}{{ tools | tojson if tools }}\
{% if thinking is defined %} thinking={{ thinking }}{% endif %}\
{% if reasoning_effort is defined %} effort={{ reasoning_effort }}{% endif %}"""
IN_PARTS = SHOWN + "{# image #}"
FLAT = "{% for t in tools %}{{ t.name ~ raise_exception('unknown') if t.function else t.name }} {% endfor %}"
LOW = "{# truncate_history_thinking #}{{ low_effort if low_effort is defined }}"
USER = {"role": "user", "content": "Hi"}
HI = '{"role": "user", "content": "Hi"}'
TOOL = {"parameters": {"type": "object"}, "name": "f"}
PARTS = [{"type": "text", "text": text, "x": 1} for text in ("a", "", "b")]
THOUGHTS = [{"type": "thinking", "thinking": "t"}, {"type": "reasoning", "text": "t"}]


def asked(**request: Any) -> Record:
    request = {"messages": [USER], **request}
    source = FileSource(kind="sglang", path="s.log", domain="chat", limit=None, weight=None)
    line = {"request": request, "messages": request["messages"]}
    return parse(line, "messages", source, "s.log:1", timing=Timing())


def with_call(arguments: Any, **more: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"arguments": arguments, "name": "f"}, **more}
    return {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, USER]}


def shown_call(arguments: str, id: str = "null") -> str:
    call = f'{{"id": {id}, "index": null, "type": "function", "function": {{"name": "f", "arguments": {arguments}}}}}'
    return f'{HI}{{"role": "assistant", "content": "", "tool_calls": [{call}]}}{HI}'


CASES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "all fields of a call": (
        SHOWN,
        with_call('{"b": 1, "a": {}}', id="c1", x=1),
        shown_call('{"b": 1, "a": {}}', '"c1"'),
    ),
    "no arguments": (SHOWN, with_call(None), shown_call("null")),
    "arguments that are objects": (SHOWN, with_call({"n": 1 << 64}), shown_call('{"n": 18446744073709551616}')),
    "numbers past 64 bits": (
        SHOWN,
        with_call('{"n": 18446744073709551616, "m": 18446744073709551615, "l": -9223372036854775809}'),
        shown_call('{"n": 1.8446744073709552e+19, "m": 18446744073709551615, "l": -9.223372036854776e+18}'),
    ),
    "calls that are none": (
        SHOWN,
        {"messages": [USER, {"role": "assistant", "content": "a", "tool_calls": []}, USER]},
        HI + '{"role": "assistant", "content": "a", "tool_calls": []}' + HI,
    ),
    "no content": (
        SHOWN,
        {"messages": [{"role": "system"}, {"role": "tool", "tool_call_id": "c1"}, USER]},
        '{"role": "system", "content": ""}{"role": "tool", "content": "", "tool_call_id": "c1"}' + HI,
    ),
    "an empty content": (
        IN_PARTS,
        {"messages": [{"role": "system", "content": []}, {"role": "tool", "content": []}, USER]},
        '{"role": "system", "content": []}{"role": "tool", "content": ""}' + HI,
    ),
    "parts behind all other fields, without thoughts": (
        IN_PARTS,
        {
            "messages": [
                USER,
                {"role": "assistant", "name": "n", "content": [*PARTS[:1], *THOUGHTS], "reasoning_content": "r"},
                USER,
            ]
        },
        HI
        + '{"role": "assistant", "name": "n", "reasoning_content": "r", "content": [{"type": "text", "text": "a"}]}'
        + HI,
    ),
    "a tool's parts": (
        IN_PARTS,
        {"messages": [USER, {"role": "tool", "tool_call_id": "c1", "content": PARTS}]},
        HI + '{"role": "tool", "tool_call_id": "c1", "content": "a  b"}',
    ),
    "names and ids": (
        SHOWN,
        {"messages": [{**USER, "name": "n"}, {"role": "function", "name": "", "content": "a", "tool_call_id": "c1"}]},
        HI + '{"role": "function", "content": "a", "tool_call_id": "c1", "name": ""}',
    ),
    "reasoning under one name": (
        SHOWN,
        {"messages": [USER, {"role": "assistant", "content": "a", "reasoning_content": "r"}, USER]},
        HI + '{"role": "assistant", "content": "a", "reasoning_content": "r"}' + HI,
    ),
    "a tool of another type": (
        SHOWN,
        {"tools": [{"type": "custom", "function": {**TOOL, "description": "d"}}]},
        HI + '[{"type": "custom", "function": {"parameters": {"type": "object"}, "name": "f", "description": "d"}, '
        '"defer_loading": null}]',
    ),
    "a tool that is loaded later, as is said beside it": (
        SHOWN,
        {"tools": [{"type": "function", "function": TOOL, "defer_loading": True}]},
        HI + '[{"type": "function", "function": {"parameters": {"type": "object"}, "name": "f", "description": null, '
        '"defer_loading": true}, "defer_loading": true}]',
    ),
    "a tool that says another thing than what stands beside it": (
        SHOWN,
        {"tools": [{"function": {**TOOL, "defer_loading": False}, "defer_loading": True}]},
        HI + '[{"type": "function", "function": {"parameters": {"type": "object"}, "name": "f", '
        '"defer_loading": false, "description": null}, "defer_loading": true}]',
    ),
    "a tool that is loaded later, as it says itself": (
        SHOWN,
        {"tools": [{"type": "function", "function": {"defer_loading": False, **TOOL}}]},
        HI + '[{"type": "function", "function": {"defer_loading": false, "parameters": {"type": "object"}, '
        '"name": "f", "description": null}, "defer_loading": null}]',
    ),
    "an effort of null among the arguments": (
        SHOWN,
        {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": None, "thinking": None}},
        HI + " thinking=None effort=low",
    ),
    "an effort in numbers": (SHOWN, {"reasoning_effort": "0.5"}, HI + " thinking=True effort=0.5"),
    "reasoning that is switched on": (
        SHOWN,
        {"reasoning": {"effort": None, "enabled": "Yes"}},
        HI + " thinking=True",
    ),
    "a template that fails at tools": (FLAT, {"tools": [{"type": "function", "function": TOOL}]}, "f "),
    "the first of several templates": ({"tool_use": "with tools", "default": "plain"}, {}, "with tools"),
    "a low effort, as Nemotron's templates are told of it": (LOW, {"reasoning_effort": "low"}, "True"),
    # The server moves one among the template arguments into the request, before it processes the messages.
    "a low effort among the arguments": (LOW, {"chat_template_kwargs": {"reasoning_effort": "low"}}, "True"),
    "another effort among the arguments": (
        LOW,
        {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
        "",
    ),
}
TOKENIZER = byte_level_tokenizer(["Hithere Hithere"], 266)


@pytest.mark.parametrize("case", CASES)
def test_a_prompt_is_that_of_sglang(case: str) -> None:
    TOKENIZER.chat_template, request, prompt = CASES[case]
    conversation = asked(**request).conversation(cluster="k", split="train")
    assert turn_prompt(TOKENIZER, conversation, turns(conversation)[-1]).whole == prompt


def test_a_prefill_is_tokenized_by_itself() -> None:
    """`_append_assistant_prefix_to_prompt_ids`: its ids are not those of the whole text."""
    TOKENIZER.chat_template = "{{ messages[0].content }}"
    request = {"messages": [USER, {"role": "assistant", "content": "there"}], "continue_final_message": True}
    conversation = asked(**request).conversation(cluster="k", split="train")
    (turn,) = turns(conversation)
    assert turn_ids(TOKENIZER, conversation, turn) == [*TOKENIZER("Hi").input_ids, *TOKENIZER("there").input_ids]
    assert turn_ids(TOKENIZER, conversation, turn) != TOKENIZER("Hithere").input_ids


def talk(**message: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "content": "a", **message}, USER]}


REFUSED, UNREAD = "request that the engine refuses", "messages in an unread form"


@pytest.mark.parametrize(
    "request_fields, reason",
    [
        # What its schema or `normalize_reasoning_inputs` refuses.
        (talk(tool_call_id=1), REFUSED),
        (talk(tool_calls={"id": "c1"}), REFUSED),
        (talk(tool_calls=[{"type": "custom", "function": {"name": "f"}}]), REFUSED),
        (talk(content=[{"type": "thinking", "thinking": "t", "text": "t"}]), REFUSED),
        ({"messages": [{"role": "user", "content": [{"type": "reasoning", "text": "t"}]}]}, REFUSED),
        ({"reasoning_effort": "no_think"}, REFUSED),
        ({"reasoning_effort": 1}, REFUSED),
        ({"reasoning": {"effort": ""}}, REFUSED),
        # What its template engine is given twice, and what `SamplingParams.verify` refuses after the line is logged.
        ({"chat_template_kwargs": {"tools": []}}, "reserved template argument"),
        ({"top_p": 0}, REFUSED),
        ({"top_k": 0}, REFUSED),
        ({"repetition_penalty": 2.5}, REFUSED),
        ({"max_tokens": -1}, REFUSED),
        ({"min_tokens": 3, "max_tokens": 2}, REFUSED),
        ({"regex": "a", "response_format": {"type": "json_object"}}, REFUSED),
        ({"regex": "a", "tool_choice": "required", "tools": [{"function": {"name": "f"}}]}, REFUSED),
        # What a template may be shown, and no message here holds.
        (talk(phase="commentary"), UNREAD),
        (talk(prefix=False), UNREAD),
        ({"messages": [{"role": "tool", "content": "a", "reasoning_content": "r"}]}, UNREAD),
        (talk(tools=[]), "tools inside a message"),
        ({"messages": [{"role": "system", "content": "a", "tools": [TOOL]}, USER]}, "tools inside a message"),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"items": {"type": ["null", "null"]}}}}]},
            "tools that the engine rewrites",
        ),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"items": {"type": "varchar"}}}}]},
            "tools that the engine rewrites",
        ),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"anyOf": [{"type": ["int"]}]}}}]},
            "tools that the engine rewrites",
        ),
        ({"max_tokens": 0}, "no token asked for"),
    ],
)
def test_what_sglang_never_answered_or_shows_in_another_form_is_left_out(request_fields: Any, reason: str) -> None:
    with pytest.raises(LeftOut, match=reason):
        asked(**request_fields)


def test_what_sglang_takes_is_no_reason() -> None:
    schema = {"type": "object", "properties": {"type": {"type": ["string", "null"]}}, "default": {"type": "varchar"}}
    kept = {"tools": [{"function": {"name": "f", "parameters": schema}}], "temperature": 0, "top_k": 0}
    # Fields of vLLM's schema are none of its own.
    others = {"add_special_tokens": True, "chat_template": "x", "truncate_prompt_tokens": 5, "prompt_token_ids": [1]}
    others |= {"regex": "a", "min_tokens": 5, "response_format": {"type": "text"}}
    record = asked(**kept, **others, max_completion_tokens=0, max_tokens=5, repetition_penalty=2.0)
    assert record.max_new_tokens == 5 and record.tools is not None
