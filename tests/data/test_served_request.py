"""What of a request reaches the chat template, how its prompt ends, and which requests are left out."""

import json
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from draftforge.data.chat_template import shown_messages
from draftforge.data.conversation import turn_ends, turns
from draftforge.data.dedup import turn_keys
from draftforge.data.logs.chat import LeftOut, Timing
from draftforge.data.records import Record, parse
from draftforge.data.settings import RESERVED_ARGS, FileSource, ReservedArg
from draftforge.errors import InputError

USER = {"role": "user", "content": "Hi"}
SURE = {"role": "assistant", "content": "Sure, {"}
ANSWER = {"role": "assistant", "content": "Yes."}


def source(**settings: Any) -> FileSource:
    return FileSource(**{"kind": "openai", "path": "log.jsonl", "domain": "chat", **settings})


def asked(request: dict[str, Any], answer: dict[str, Any] | None = None, **settings: Any) -> Record:
    """The record of a request that a reader gives with its answer."""
    request = {"messages": [USER], **request}
    line = {"request": request, "messages": [*request["messages"], *([answer] if answer else [])]}
    return parse(line, "messages", source(**settings), "log.jsonl:7", timing=Timing())


def messages_of(record: Record) -> list[tuple[str, Any]]:
    return [(message.role, message.content) for message in record.messages]


@pytest.mark.parametrize(
    "request_fields, arguments",
    [
        ({}, {}),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high", "enable_thinking": True}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "high"}},
            {"reasoning_effort": "low", "enable_thinking": False},
        ),
        ({"chat_template_kwargs": {"reasoning_effort": "high"}}, {"reasoning_effort": "high"}),
        ({"documents": [{"title": "t", "text": "x"}]}, {"documents": [{"title": "t", "text": "x"}]}),
        ({"chat_template_kwargs": {"tokenize": None, "messages": "auto", "a": 1}}, {"a": 1}),  # not set
    ],
)
def test_template_arguments_as_vllm_passes_them(request_fields: dict[str, Any], arguments: dict[str, Any]) -> None:
    assert asked(request_fields, ANSWER).template_args == arguments


@pytest.mark.parametrize("name", sorted(RESERVED_ARGS - {"chat_template"}))
def test_a_reserved_name_among_template_arguments_reaches_its_place_only_if_recipe_and_engine_let_it(name: str) -> None:
    request = {"chat_template_kwargs": {name: ["x"], "a": 1}}
    for engine in ("vllm", "sglang"):
        with pytest.raises(LeftOut, match="reserved template argument"):
            asked(request, ANSWER, engine=engine)
    # The recipe may name those that an engine honours; vLLM sets two of them by the request's own fields.
    if name not in get_args(ReservedArg):
        with pytest.raises(ValidationError):
            asked(request, ANSWER, reserved_template_args=[name])
        return
    set_by_engine = name in ("add_generation_prompt", "continue_final_message")
    expected = {"a": 1} if set_by_engine else {"a": 1, name: ["x"]}
    assert asked(request, ANSWER, reserved_template_args=[name]).template_args == expected
    if set_by_engine or name == "tools":
        with pytest.raises(LeftOut, match="reserved template argument"):
            asked(request, ANSWER, engine="sglang", reserved_template_args=[name])
    else:
        assert asked(request, ANSWER, engine="sglang", reserved_template_args=[name]).template_args == expected


def test_a_recipes_own_template_arguments_have_no_reserved_name() -> None:
    with pytest.raises(ValidationError, match="tokenize: reserved; the template gets it from elsewhere"):
        asked({}, ANSWER, template_args={"tokenize": True})


@pytest.mark.parametrize(
    "request_fields, arguments",
    [
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low", "thinking": True, "enable_thinking": True}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "thinking": False, "enable_thinking": False}),
        ({"reasoning": {"effort": "high"}}, {"reasoning_effort": "high", "thinking": True, "enable_thinking": True}),
        ({"reasoning": {"enabled": True}}, {"thinking": True, "enable_thinking": True}),
        ({"reasoning": {"enabled": False}}, {}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"thinking": False, "reasoning_effort": "high"}},
            {"reasoning_effort": "high", "thinking": False, "enable_thinking": True},
        ),
    ],
)
def test_template_arguments_as_sglang_passes_them(request_fields: dict[str, Any], arguments: dict[str, Any]) -> None:
    assert asked(request_fields, ANSWER, kind="sglang").template_args == arguments
    assert asked(request_fields, ANSWER, engine="sglang").template_args == arguments


def test_a_sources_template_arguments_hold_where_the_request_says_nothing() -> None:
    args = {"enable_thinking": False, "date": "today"}
    found = asked({"reasoning_effort": "high"}, template_args=args).template_args
    assert found == {"enable_thinking": True, "date": "today", "reasoning_effort": "high"}


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
OPENAI = {"function": {"parameters": SCHEMA, "name": "weather", "description": "Of a city"}, "type": "function"}
ANTHROPIC = {"name": "weather", "description": "Of a city", "input_schema": SCHEMA}
FLAT = {"type": "function", "name": "weather", "description": "Of a city", "parameters": SCHEMA}


@pytest.mark.parametrize("tool", [OPENAI, ANTHROPIC, {"type": "custom", **ANTHROPIC}, FLAT])
def test_tools_of_any_shape_are_shown_in_openais_in_the_order_of_the_schema(tool: dict[str, Any]) -> None:
    (vllm,) = asked({"tools": [tool]}).tools or []
    assert vllm == {
        "type": "function",
        "function": {"name": "weather", "description": "Of a city", "parameters": SCHEMA},
    }
    assert list(vllm) == ["type", "function"] and list(vllm["function"]) == ["name", "description", "parameters"]
    (sglang,) = asked({"tools": [tool]}, kind="sglang").tools or []
    assert sglang == {**vllm, "defer_loading": None}
    assert [name for name in sglang["function"] if name in tool.get("function", {})] == list(tool.get("function", {}))


def test_fields_of_a_tool_that_are_missing_are_null_and_others_are_dropped() -> None:
    tool = {"type": "function", "function": {"name": "now", "strict": True, "cache_control": {}}, "cache_control": {}}
    (found,) = asked({"tools": [tool]}).tools or []
    assert found["function"] == {"name": "now", "description": None, "parameters": None, "strict": True}
    assert list(found) == ["type", "function"]


def test_tools_that_are_loaded_later_say_so_where_the_engine_says_so() -> None:
    """As vLLM's and SGLang's `_propagate_defer_loading` and serializers do it."""
    beside = {"type": "function", "function": {"strict": True, "name": "now"}, "defer_loading": True}
    (vllm,) = asked({"tools": [beside]}).tools or []
    function = {"name": "now", "description": None, "parameters": None, "strict": True, "defer_loading": True}
    assert json.dumps(vllm) == json.dumps({"type": "function", "function": function, "defer_loading": True})
    (sglang,) = asked({"tools": [beside]}, kind="sglang").tools or []
    assert sglang["defer_loading"] is True
    assert list(sglang["function"]) == ["strict", "name", "description", "parameters", "defer_loading"]
    inside = {"type": "function", "function": {"name": "now", "defer_loading": False}}
    (found,) = asked({"tools": [inside]}).tools or []
    assert found["function"]["defer_loading"] is False and "defer_loading" not in found


def test_tool_choice() -> None:
    tools = {"tools": [OPENAI, {"type": "function", "function": {"name": "now"}}]}
    named = {"type": "function", "function": {"name": "now"}}
    unknown = {"type": "function", "function": {"name": "then"}}
    for choice, vllm, sglang in (("auto", 2, 2), ("required", 2, 2), ("none", 2, 0), (named, 2, 1), (unknown, 2, 0)):
        request = {**tools, "tool_choice": choice}
        assert len(asked(request).tools or []) == vllm
        assert len(asked(request, kind="sglang").tools or []) == sglang
    assert asked({"tools": []}).tools is None


@pytest.mark.parametrize(
    "request_fields, answer, messages, end",
    [
        ({}, ANSWER, [USER, ANSWER], "opened"),
        ({}, None, [USER], "opened"),
        ({"messages": [USER, SURE], "continue_final_message": True}, ANSWER, [USER, SURE], "prefill"),
        (
            {"messages": [USER, SURE], "continue_final_message": True, "add_generation_prompt": False},
            None,
            [USER, SURE],
            "prefill",
        ),
        ({"messages": [USER, SURE]}, ANSWER, [USER, SURE], "after_answer"),
        ({"messages": [USER, SURE]}, None, [USER, SURE], "after_answer"),
        ({"add_generation_prompt": False}, ANSWER, [USER], "bare"),
        ({"add_generation_prompt": True, "continue_final_message": False}, ANSWER, [USER, ANSWER], "opened"),
    ],
)
def test_how_the_prompt_ends(request_fields: Any, answer: Any, messages: Any, end: str) -> None:
    record = asked(request_fields, answer)
    assert messages_of(record) == [(message["role"], message["content"]) for message in messages]
    assert record.prompt_end == end
    last = turns(record.conversation(cluster="k", split="train"))[-1]
    assert last.prompt_end == end and len(last.messages) == len(messages) - (end == "opened" and answer is not None)


def test_a_file_of_messages_ends_with_an_answer_unless_it_says_otherwise() -> None:
    def read(**more: Any) -> Record:
        return parse({"messages": [USER, SURE], **more}, "messages", source(kind="messages"), "a.jsonl:1")

    assert read().prompt_end == "opened" and read(continue_final_message=True).prompt_end == "prefill"
    assert read(request={"messages": [USER, SURE]}).prompt_end == "after_answer"


def test_sglang_continues_an_assistants_message_only() -> None:
    assert asked({"continue_final_message": True, "add_generation_prompt": False}).prompt_end == "prefill"
    assert asked({"continue_final_message": True, "add_generation_prompt": False}, kind="sglang").prompt_end == "opened"


@pytest.mark.parametrize(
    "request_fields, reason",
    [
        ({"chat_template": "{{ messages }}"}, "chat template of its own"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat template of its own"),
        ({"prompt_token_ids": [1, 2]}, "prompt given as tokens"),
        ({"input_ids": [1, 2]}, "prompt given as tokens"),
        ({"truncate_prompt_tokens": 64}, "prompt cut to a number of tokens"),
        ({"add_special_tokens": True}, "special tokens added to the prompt"),
        ({"lora_path": "adapters/a"}, "answered by an adapter"),
        ({"tools": [{"type": "web_search"}]}, "tools that are not functions"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools that are not functions"),
        ({"messages": [{"role": "developer", "content": "x", "tools": [OPENAI]}]}, "tools inside a message"),
        ({"messages": [{"role": "developer", "content": "x", "tools": []}]}, "tools inside a message"),  # shown as such
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "message part that is not text"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "message part that is not text"),
    ],
)
def test_a_prompt_that_cannot_be_made_again_is_left_out_with_its_reason(request_fields: Any, reason: str) -> None:
    with pytest.raises(LeftOut, match=f"^log.jsonl:7: .*left out: {reason}") as caught:
        asked(request_fields, ANSWER)
    assert caught.value.reason == reason and isinstance(caught.value, InputError)


def test_what_changes_nothing_is_no_reason() -> None:
    harmless = {"chat_template": None, "add_special_tokens": False, "lora_path": None, "truncate_prompt_tokens": -1}
    assert messages_of(asked(harmless, ANSWER)) == [("user", "Hi"), ("assistant", "Yes.")]
    # The log counts fewer tokens than the limit: nothing was cut.
    line = {"request": {"truncate_prompt_tokens": 64}, "messages": [USER]}
    assert parse(line, "messages", source(), "log.jsonl:7", timing=Timing(prompt_tokens=63)).messages
    with pytest.raises(LeftOut):
        parse(line, "messages", source(), "log.jsonl:7", timing=Timing(prompt_tokens=64))


def test_a_conversation_without_a_turn_is_left_out() -> None:
    with pytest.raises(InputError, match="messages is empty"):
        asked({"messages": []}, ANSWER)
    with pytest.raises(LeftOut, match="no turn to answer"):
        parse({"messages": [ANSWER]}, "messages", source(kind="messages"), "log.jsonl:7")


def test_a_request_is_one_prompt_and_turns_are_asked_one_by_one() -> None:
    twice = [USER, {"role": "user", "content": "There?"}]
    request = asked({"messages": twice})
    listed = parse({"turns": ["Hi", "There?"]}, "turns", source(kind="turns"), "log.jsonl:7")
    assert messages_of(request) == messages_of(listed) and request.id != listed.id
    for record, prompts in ((request, [2]), (listed, [1, 2])):
        assert [len(turn.messages) for turn in turns(record.conversation(cluster="k", split="train"))] == prompts


PARTS = [
    {"type": "text", "text": "a"},
    "b",
    {"type": "input_text", "text": "c"},
    {"type": "refusal", "refusal": "d"},
    {"type": "thinking", "thinking": "e"},
    {"type": "text", "text": None},
]


def test_contents_are_kept_as_they_were_sent() -> None:
    contents: list[tuple[Any, Any]] = [
        (" two  spaces \n", " two  spaces \n"),
        ("", ""),
        (None, []),
        ([], []),
        ([{"type": "text", "text": "one"}], "one"),
        (PARTS, ["a", "b", "c", "d", "e"]),
    ]
    for role in ("system", "user", "assistant", "tool"):
        given = [(content, kept) for content, kept in contents if role != "user" or content is not None]
        record = asked({"messages": [*({"role": role, "content": content} for content, _ in given), USER]})
        assert [message.content for message in record.messages[:-1]] == [kept for _, kept in given]


def test_other_fields_of_text_parts_are_kept_for_templates_that_loop_over_them() -> None:
    """As vLLM's `_collect_extra_fields`: what no part of its schema has."""
    mark = {"cache_control": {"type": "ephemeral"}}
    parts = [{"type": "text", "text": "a", "uuid": "u", **mark}, "b", {"type": "refusal", "refusal": "c", "n": 1}]
    record = asked({"messages": [{"role": "user", "content": parts}]})
    assert record.messages[0].part_fields == [mark, {}, {"n": 1}]
    shown = shown_messages(record.messages, True, "vllm")[0]["content"]
    assert shown == [
        {"type": "text", "text": "a", **mark},
        {"type": "text", "text": "b"},
        {"type": "text", "text": "c", "n": 1},
    ]
    assert shown_messages(record.messages, False, "vllm")[0]["content"] == "a\nb\nc"
    # One part alone is a text, with its fields; an engine that knows no others drops them.
    one = {"messages": [{"role": "user", "content": parts[:1]}]}
    assert asked(one).messages[0].content == "a" and asked(one).messages[0].part_fields == [mark]
    assert asked(one, kind="sglang").messages[0].part_fields is None
    plain = {"messages": [{"role": "user", "content": "a"}]}
    assert asked(one).id != asked(plain).id and turn_keys(asked(one)) == turn_keys(asked(plain))
    other = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "lang": "en"}]}]}
    assert turn_keys(asked(other)) != turn_keys(asked(plain))


def test_parts_that_sglang_refuses() -> None:
    thought = {"type": "thinking", "thinking": "hm"}
    said = {"role": "assistant", "content": [thought, {"type": "text", "text": "Yes."}]}
    assert asked({"messages": [USER, said, USER]}, kind="sglang").messages[1].content == ["Yes."]
    for part in ("b", {"type": "input_text", "text": "c"}, {"type": "refusal", "refusal": "d"}, thought):
        with pytest.raises(LeftOut, match="request that the engine refuses"):
            asked({"messages": [{"role": "user", "content": [part]}]}, kind="sglang")


@pytest.mark.parametrize("arguments", ["", "no JSON", "[1]", "3", "null", [1], 3])
def test_calls_that_sglang_refuses(arguments: Any) -> None:
    """As SGLang's `parse_tool_call_arguments`; vLLM shows them as an empty object."""

    def talk(role: str, arguments: Any) -> dict[str, Any]:
        call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": arguments}}
        return {"messages": [USER, {"role": role, "content": "", "tool_calls": [call]}, USER]}

    with pytest.raises(LeftOut, match="request that the engine refuses"):
        asked(talk("assistant", arguments), kind="sglang")
    with pytest.raises(LeftOut, match="request that the engine refuses"):
        asked(talk("assistant", arguments), engine="sglang")
    assert asked(talk("assistant", arguments)).messages[1].tool_calls
    for taken in ("{}", '{"a": [1]}', {"a": 1}, None):
        assert asked(talk("assistant", taken), kind="sglang").messages[1].tool_calls


def test_other_roles_reach_the_template_where_the_engine_takes_them() -> None:
    critic = {"messages": [USER, {"role": "critic", "content": "Too short.", "name": "Ann"}]}
    assert messages_of(asked(critic)) == [("user", "Hi"), ("critic", "Too short.")]
    assert shown_messages(asked(critic).messages, False, "vllm")[1] == {**critic["messages"][1]}
    with pytest.raises(LeftOut, match="request that the engine refuses"):
        asked(critic, kind="sglang")
    # SGLang writes the roles that it knows in small letters.
    called = {"messages": [USER, {"role": "Function", "content": "noon", "name": "now"}]}
    assert messages_of(asked(called, kind="sglang"))[1] == ("function", "noon")
    assert messages_of(asked(called))[1] == ("Function", "noon")
    answered = asked({"messages": [{"role": "critic", "content": "a"}, ANSWER, {"role": "critic", "content": "b"}]})
    assert turn_ends(answered) == [1, 3]


def test_the_order_of_keys_in_tools_and_calls_makes_another_prompt() -> None:
    """Templates print them in the order of the request."""

    def ids(**fields: Any) -> tuple[str, list[int]]:
        record = asked({"messages": [USER, *fields.pop("said", [])], **fields})
        return record.id, turn_keys(record)

    one, two = {"type": "object", "properties": {}}, {"properties": {}, "type": "object"}
    for make in (
        lambda value: {"tools": [{"type": "function", "function": {"name": "now", "parameters": value}}]},
        lambda value: {"documents": [value]},
        lambda value: {"chat_template_kwargs": {"schema": value}},
        lambda value: {
            "said": [
                {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "now", "arguments": value}}]},
                USER,
            ]
        },
    ):
        (first, keys), (second, others) = ids(**make(one)), ids(**make(two))
        assert first != second and keys[-1] != others[-1]
        assert ids(**make(dict(one))) == (first, keys)
    # Arguments of the template itself have no order.
    assert ids(chat_template_kwargs={"a": 1, "b": 2}) == ids(chat_template_kwargs={"b": 2, "a": 1})


def test_reasoning_of_earlier_answers() -> None:
    def reasoning(message: dict[str, Any], **settings: Any) -> str | None:
        record = asked({"messages": [USER, {"role": "assistant", "content": "x", **message}, USER]}, **settings)
        return record.messages[1].reasoning

    assert reasoning({"reasoning_content": "a"}) == reasoning({"reasoning": "a"}) == "a"
    assert reasoning({"reasoning": "a", "reasoning_content": "b"}) == "a"
    assert reasoning({"reasoning": "a", "reasoning_content": "b"}, kind="sglang") == "b"
    assert reasoning({"reasoning": None}) is None


def test_the_engine_is_kept_where_it_matters() -> None:
    parts = {"messages": [{"role": "user", "content": [PARTS[0], {"type": "text", "text": "c"}]}]}
    one = {"messages": [{"role": "user", "content": PARTS[:1]}]}
    assert asked({}, kind="sglang").engine == "sglang"  # whose texts stay texts for a template that loops over parts
    assert isinstance(asked(one, kind="sglang").messages[0].content, list)
    assert isinstance(asked(one).messages[0].content, str)
    thought = {"messages": [USER, {**ANSWER, "reasoning_content": "hm"}, USER]}
    assert asked(thought, kind="sglang").id != asked(thought).id
    assert asked({}, kind="sglang").id == asked({}).id
    assert asked(parts, kind="sglang").engine == "sglang" and asked(parts, kind="sglang").id != asked(parts).id
    assert asked({"messages": [USER, SURE]}, kind="sglang").engine == "sglang"
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "now", "arguments": "{}"}}]}
    assert asked({"messages": [USER, called, USER]}, kind="sglang").engine == "sglang"


def test_an_absent_content_is_another_content_than_an_empty_one() -> None:
    """As vLLM 0.32 hands them to a template: texts are the same, of parts there is none or an empty one."""
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    absent, empty = (
        asked({"messages": [USER, {"role": "assistant", "content": content, "tool_calls": [call]}, USER]})
        for content in (None, "")
    )
    text, parts = (
        [shown_messages(one.messages, each, "vllm")[1]["content"] for one in (absent, empty)] for each in (False, True)
    )
    assert text == ["", ""] and parts == [[], [{"type": "text", "text": ""}]]
    # Both are kept; for most templates their turns are the same, which counts once.
    assert absent.id != empty.id and turn_keys(absent) == turn_keys(empty)


@pytest.mark.parametrize("id", [{}, {"id": None}, {"id": 5}])
def test_calls_without_an_id_are_left_out(id: dict[str, Any]) -> None:
    """vLLM refuses them; so a log lacks an id that a template may print. A file of conversations never had any."""
    call = {**id, "type": "function", "function": {"name": "now", "arguments": "{}"}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    with pytest.raises(LeftOut, match="tool call without its id"):
        asked({"messages": [USER, said, {"role": "tool", "content": "noon"}]})
    with pytest.raises(LeftOut, match="tool call without its id"):
        asked({"messages": [USER, said], "continue_final_message": True})
    assert asked({}, said).messages[-1].tool_calls  # a logged answer, which is given anew
    line = {"messages": [USER, said, USER]}
    assert parse(line, "messages", source(kind="messages"), "f:1").messages[1].tool_calls


def test_ids_of_plain_conversations_stay() -> None:
    record = asked({"temperature": 0.7, "chat_template_kwargs": {"enable_thinking": False}}, ANSWER)
    assert record.id == "a4039e08ca38a8c34a371c67"
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    talk = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "noon"}]
    assert asked({"messages": talk}, ANSWER).id == "1ce0842a5e16e9ef7f210906"


def test_what_a_capture_does_not_follow_is_named() -> None:
    request = {
        "response_format": {"type": "json_object"},
        "stop": ["\n"],
        "frequency_penalty": 0.5,
        "presence_penalty": 0,
        "logit_bias": {},
        "tools": [OPENAI],
        "tool_choice": "required",
        "n": 3,
        "seed": 1,
    }
    assert set(asked(request).unfollowed) == {"response_format", "stop", "frequency_penalty", "tool_choice"}
    assert asked({"response_format": {"type": "text"}, "tool_choice": "auto"}).unfollowed == ()
