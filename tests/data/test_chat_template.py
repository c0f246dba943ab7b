"""What the chat template is shown of a conversation, as vLLM and SGLang show it, and the prompt that it makes."""

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest
from byte_level import byte_level_tokenizer

from draftforge.data.chat_template import render, render_text, shown_messages, takes_parts, turn_prompt
from draftforge.data.conversation import Message, turns
from draftforge.data.records import Record
from draftforge.errors import InputError

ASK = Message(role="user", content="Hi")
AS_TEXT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<new>{% endif %}"
)
IN_PARTS = """\
{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}\
{% for part in m['content'] %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"""
CALLS = """\
{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}(\
{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}){% endfor %}{% endfor %}"""
MACRO = """\
{%% macro shown(%s) %%}{%% %s %%}{%% endfor %%}{%% endmacro %%}\
{%% for message in messages %%}{{ shown(%s) }}{%% endfor %%}"""
LOOPS = "{%% for %s in %s %%}{%% for p in %s %%}{%% endfor %%}{%% endfor %%}"
NAMESPACE = "{% set ns = namespace() %}{% set ns.a = messages %}"
MARKED = """\
{% for m in messages %}{% generation %}\
{% for p in m.content %}{% endfor %}{% endgeneration %}{% endfor %}"""

Prompt = Callable[..., str]


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    """`prompt(template, messages, ...)`: the text that a tokenizer with that template makes a prompt of."""
    tokenizer = byte_level_tokenizer(["Hi there"], 262)

    def make(template: str | dict[str, str] | None, messages: list[Message], *more: Any, **named: Any) -> str:
        tokenizer.chat_template = template
        return str(tokenizer.decode(render(tokenizer, messages, *more, **named)))

    return make


def said(role: Any, *parts: str, **more: Any) -> Message:
    return Message(role=role, content=list(parts) if len(parts) != 1 else parts[0], **more)


def test_tools_and_template_arguments_reach_the_template(prompt: Prompt) -> None:
    template = "{{ tools | tojson }} {{ effort }}: {{ messages[0].content }}"
    assert prompt(template, [ASK], [{"name": "clock"}], {"effort": "high"}) == '[{"name": "clock"}] high: Hi'
    several = {"default": "plain", "tool_use": "with tools"}
    assert [prompt(several, [ASK], tools) for tools in (None, [{"name": "clock"}])] == ["plain", "with tools"]


def test_a_template_is_told_the_time_of_the_request(prompt: Prompt) -> None:
    """Not that of the capture: the same conversation gives the same prompt on any day."""
    tokenizer = byte_level_tokenizer(["Hi"], 262)
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y %H:%M') }} {{ messages[0].content }}"
    record = Record("d", (ASK,))
    for asked_at, shown in ((1795860000.5, "28 Nov 2026 10:00"), (None, "26 Jul 2024 00:00")):
        conversation = record.conversation(cluster="k", split="train", asked_at=asked_at)
        assert turn_prompt(tokenizer, conversation, turns(conversation)[0]).text == f"{shown} Hi"
    # Whoever asks now is told the time of now, also after another one was told his.
    assert prompt("{{ strftime_now('%Y') }}", [ASK]) == datetime.now().strftime("%Y")
    with pytest.raises(InputError):
        render_text(tokenizer, [said("user", "\ud800")], asked_at=0.0)
    assert prompt("{{ strftime_now('%Y') }}", [ASK]) == datetime.now().strftime("%Y")


def test_a_processors_own_template_is_shown_where_engines_show_it() -> None:
    """vLLM 0.32 takes it for requests without tools, SGLang 0.5.23 for all."""
    tokenizer = byte_level_tokenizer(["Hi"], 262)
    tokenizer.chat_template, tokenizer.processor_template = "own {{ tools }}", "processor's {{ tools }}"
    assert render_text(tokenizer, [ASK]) == "processor's None"
    assert render_text(tokenizer, [ASK], [{"name": "f"}]) == "own [{'name': 'f'}]"
    assert render_text(tokenizer, [ASK], [{"name": "f"}], engine="sglang") == "processor's [{'name': 'f'}]"


def test_text_parts_are_joined_as_the_engine_joins_them(prompt: Prompt) -> None:
    messages = [said("system", "Be brief.", "Be kind."), said("user", "one", "two", "three")]
    assert prompt(AS_TEXT, messages) == "<system>Be brief.\nBe kind.<user>one\ntwo\nthree<new>"
    assert prompt(AS_TEXT, messages, engine="sglang") == "<system>Be brief. Be kind.<user>one two three<new>"


def test_a_template_that_loops_over_parts_gets_them(prompt: Prompt) -> None:
    messages = [said("user", "one", "two"), said("assistant", "three"), said("tool", "four", "five")]
    assert prompt(IN_PARTS, messages) == "<user>[one][two]<assistant>[three]<tool>four\nfive"
    assert prompt(IN_PARTS, messages, engine="sglang") == "<user>[one][two]<assistant>three<tool>four five"


@pytest.mark.parametrize(
    "template, vllm, sglang",
    [
        (AS_TEXT, False, False),
        (IN_PARTS, True, True),
        ("{% for message in messages %}{% for part in message.content %}{% endfor %}{% endfor %}", True, True),
        ("{% for m in messages[1:] %}{% for part in m['content'] | list %}{% endfor %}{% endfor %}", True, True),
        (
            "{% set rest = messages[1:] %}{% for turn in rest %}{% for p in turn.content %}{% endfor %}{% endfor %}",
            True,
            False,
        ),
        ("{% for m in messages %}{% set c = m.content %}{% for p in c %}{% endfor %}{% endfor %}", False, False),
        ("{% for m in messages %}{% for p in m.parts %}{% endfor %}{% endfor %}", False, False),
        (
            MARKED,
            True,
            True,
        ),
        (
            "{% for m in messages %}{% set content = m.content %}{% for p in content %}{% endfor %}{% endfor %}",
            True,
            False,
        ),
        # vLLM 0.33 follows fields of namespaces, and passes over assignments to several names; 0.32 does neither.
        ("{% set ns = namespace(rest=messages[1:]) %}" + LOOPS % ("m", "ns.rest", "m.content"), True, True),
        (NAMESPACE + "{% set b = ns.a | list %}" + LOOPS % ("x", "b", "x['content']"), True, False),
        (NAMESPACE + LOOPS % ("x", "ns.b", "x.content"), False, False),
        ("{% set a, b = messages %}" + LOOPS % ("m", "messages", "m.content"), True, True),
        (MACRO % ("c", "for p in c", "message.content"), True, False),
        (MACRO % ("x, text", "for p in text", "1, text=message['content']"), True, False),
        (MACRO % ("content", "for p in content", "message.role"), False, False),
        (MACRO % ("c", "for k, v in c", "message.content"), False, False),
        ("{# no image here #}{{ messages[0].content }}", False, True),
        ("{% for m in %}", False, False),
    ],
)
def test_engines_find_out_whether_a_template_takes_parts(template: str, vllm: bool, sglang: bool) -> None:
    assert (takes_parts(template, "vllm"), takes_parts(template, "sglang")) == (vllm, sglang)


@pytest.mark.parametrize(
    "logged, shown",
    [
        ('{"a": 1}', {"a": 1}),
        ("", {}),
        (None, {}),
        ("null", {}),
        ("no JSON", {}),
        ({"b": 2}, {"b": 2}),
        ("[1]", {}),
        (3, {}),
    ],
)
def test_arguments_of_calls_are_objects(logged: Any, shown: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": logged}}
    message = said("assistant", tool_calls=[call])
    for parts in (False, True):
        (found,) = shown_messages([message], parts, "vllm")
        assert found["tool_calls"] == [{**call, "function": {"name": "now", "arguments": shown}}]
        assert found["content"] == ([] if parts else "")
    assert call["function"] == {"name": "now", "arguments": logged}  # the stored message is as logged
    missing = said("assistant", tool_calls=[{"function": {"name": "now"}}])
    assert shown_messages([missing], False, "vllm")[0]["tool_calls"][0]["function"]["arguments"] == {}
    for arguments, seen in ((None, None), ('{"a": 1}', {"a": 1})):
        given = said("assistant", tool_calls=[{"function": {"name": "now", "arguments": arguments}}])
        assert shown_messages([given], False, "sglang")[0]["tool_calls"][0]["function"]["arguments"] == seen


def test_a_call_without_parameters_renders(prompt: Prompt) -> None:
    calls = [{"function": {"name": name, "arguments": text}} for name, text in (("now", ""), ("add", '{"a": 1}'))]
    assert prompt(CALLS, [said("assistant", tool_calls=calls)]) == "now()add(a=1;)"


def test_calls_that_a_template_prints_whole_have_the_engines_order(prompt: Prompt) -> None:
    call = {"type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}, "id": "c1"}
    message, template = said("assistant", tool_calls=[call]), "{{ messages[0].tool_calls[0] | tojson }}"
    vllm, sglang = '{"arguments": {"a": 1}, "name": "now"}', '{"name": "now", "arguments": {"a": 1}}'
    assert prompt(template, [message]) == f'{{"id": "c1", "function": {vllm}, "type": "function"}}'
    first = '{"id": "c1", "index": null, "type": "function"'
    assert prompt(template, [message], engine="sglang") == f'{first}, "function": {sglang}}}'


def test_reasoning_is_shown_under_the_names_that_engines_give_it(prompt: Prompt) -> None:
    """transformers adds `thinking` from 5.24 on, and drops fields without a value; engines are bound to older ones."""
    template = "{% for m in messages %}{{ m.role }}{{ m.reasoning_content }}{{ m.thinking }}{% endfor %}"
    message = said("assistant", "Noon.", reasoning="I need the clock")
    for engine in ("vllm", "sglang"):
        assert prompt(template, [message], engine=engine) == "assistantI need the clock"
    (vllm,), (sglang,) = (shown_messages([message], False, engine) for engine in ("vllm", "sglang"))
    shown = {"role": "assistant", "content": "Noon.", "reasoning_content": "I need the clock"}
    assert sglang == shown and vllm == {**shown, "reasoning": "I need the clock"}
    whole = "{# 'developer' #}{{ messages[0] | tojson }}"
    assert (
        prompt(whole, [said("developer", "Be brief.")])
        == '{"role": "developer", "content": "Be brief.", "tools": null}'
    )


def test_names_and_call_ids_are_shown_where_engines_show_them() -> None:
    messages = [said("user", "a", name="Ann", tool_call_id="x"), said("tool", "b", name="now", tool_call_id="c1")]
    user, tool = shown_messages(messages, False, "vllm")
    assert user == {"role": "user", "content": "a", "name": "Ann"}
    assert tool == {"role": "tool", "content": "b", "name": "now", "tool_call_id": "c1"}


def test_a_developers_message_is_the_systems_where_the_template_does_not_know_the_role(prompt: Prompt) -> None:
    messages = [said("developer", "One.", "Two."), ASK, said("system", ""), said("developer", "Three.")]
    assert prompt(AS_TEXT, messages) == "<system>One.\nTwo.\n\nThree.<user>Hi<new>"
    assert prompt(IN_PARTS, messages) == "<system>One.\nTwo.\n\nThree.<user>[Hi]"
    assert prompt(IN_PARTS, messages[:2]) == "<system>[One.][Two.]<user>[Hi]"
    # A template that names the role gets it, and so does every template of SGLang's.
    assert prompt("{# 'developer' #}" + AS_TEXT, messages[:2]) == "<developer>One.\nTwo.<user>Hi<new>"
    assert prompt(AS_TEXT, messages[:2], engine="sglang") == "<developer>One. Two.<user>Hi<new>"
    # Without one, the system's messages stay where they are.
    assert prompt(AS_TEXT, [ASK, said("system", "Three.")]) == "<user>Hi<system>Three.<new>"


def test_empty_parts_stand_only_where_a_template_loops_over_them(prompt: Prompt) -> None:
    messages = [said("user", "", "one", ""), said("tool", "two", "")]
    assert prompt(AS_TEXT, messages) == "<user>one<tool>two<new>"
    assert prompt(IN_PARTS, messages) == "<user>[][one][]<tool>two\n"
    assert prompt(AS_TEXT, messages, engine="sglang") == "<user> one <tool>two <new>"


def test_empty_contents_are_kept_as_served(prompt: Prompt) -> None:
    default = "{% if messages[0].role != 'system' %}<default>{% endif %}" + AS_TEXT
    assert prompt(default, [said("system", ""), ASK]) == "<system><user>Hi<new>"
    assert prompt(default, [ASK]) == "<default><user>Hi<new>"


@pytest.mark.parametrize(
    "end, vllm, sglang",
    [
        ("after_answer", "<user>Hi<assistant>Sure, {<new>", "<user>Hi<user>Sure, {<new>"),
        ("prefill", "<user>Hi<assistant>Sure, {", "<user>Hi<new>Sure, {"),
        ("bare", "<user>Hi<assistant>Sure, {", None),
    ],
)
def test_how_a_prompt_ends(prompt: Prompt, end: Any, vllm: str, sglang: str | None) -> None:
    messages = [ASK, said("assistant", "Sure, {")]
    assert prompt(AS_TEXT, messages, prompt_end=end) == vllm
    if sglang is not None:
        assert prompt(AS_TEXT, messages, prompt_end=end, engine="sglang") == sglang


def test_a_prefill_ends_before_what_the_template_closes_a_turn_with(prompt: Prompt) -> None:
    closing = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</end>{% endfor %}"
    assert prompt(closing, [ASK, said("assistant", "Sure")], prompt_end="prefill") == "<user>Hi</end><assistant>Sure"


def test_errors_are_one_line(prompt: Prompt) -> None:
    with pytest.raises(InputError, match="its chat template refuses the messages \\(roles must alternate\\)"):
        prompt("{{ raise_exception('roles must\n alternate') }}", [ASK])
    for broken in ("{{ messages[0].content.missing() }}", "{{ 1 / 0 }}", "{{ messages[0].content + 1 }}"):
        with pytest.raises(InputError, match="its chat template refuses"):
            prompt(broken, [ASK])
    with pytest.raises(InputError, match="empty prompt"):
        prompt("{# nothing #}", [ASK])
    with pytest.raises(InputError, match=r"refuses the messages .*tokenize"):
        prompt(AS_TEXT, [ASK], None, {"tokenize": True})
    with pytest.raises(InputError, match="has no chat template"):
        prompt(None, [ASK])


def test_text_that_is_no_unicode_and_what_is_too_deep_are_errors(prompt: Prompt) -> None:
    shown = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    for arguments, reason in (
        ('{"a": "\\ud83d"}', "not valid Unicode"),
        ('{"a":' * 900 + "1" + "}" * 900, "refuses the messages"),
    ):
        call = {"function": {"name": "now", "arguments": arguments}}
        with pytest.raises(InputError, match=reason):
            prompt(shown, [said("assistant", tool_calls=[call])])


def test_tools_of_a_template_that_prints_json(prompt: Prompt) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": None, "parameters": {"b": 1, "a": 2}}}
    assert json.loads(prompt("{{ tools[0] | tojson }}", [ASK], [tool])) == tool
    assert prompt("{{ tools[0] | tojson }}", [ASK], [tool]) == json.dumps(tool)  # the order of fields is kept


INSIDE = [("system", "Be terse."), ("user", "Hi"), ("system", "Be kind.")]
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    "template, prompt",
    [
        (TURNS, "<system>Be terse.<user>Hi<system>Be kind."),
        (  # refuses it
            "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('') }}{% endif %}"
            "<{{ m.role }}>{{ m.content }}{% endfor %}",
            "<system>Be terse.Be kind.<user>Hi",
        ),
        # Takes it, but vLLM tries it without the tokenizer's tokens and functions.
        ("{{ strftime_now('')}}" + TURNS, "<system>Be terse.Be kind.<user>Hi"),
        ("{% set b = bos_token + '' %}" + TURNS, "<system>Be terse.Be kind.<user>Hi"),
    ],
)
def test_system_messages_inside_a_request_of_the_messages_api(template: str, prompt: str) -> None:
    tokenizer = byte_level_tokenizer(["Hi"], 300)
    tokenizer.chat_template = template
    asked = [Message(role=role, content=content) for role, content in INSIDE]
    form = {"messages_api": {"disabled": False, "own_thinking": False}}
    assert render_text(tokenizer, asked, template_args=form) == prompt
    kept = "<system>Be terse.<user>Hi<system>Be kind."
    if "raise_exception" not in template:  # of chat completions they stay
        assert render_text(tokenizer, asked) == kept


@pytest.mark.parametrize(
    "template, own_thinking, prompt",
    [
        ("{{ reasoning_effort }} {{ enable_thinking }}", False, "none False"),
        ("{{ 'low' if reasoning_effort == 'low' else 'max' }} {{ messages[0].content }}", False, "low Ho"),
        ("{{ raise_exception('') if reasoning_effort == 'none' else enable_thinking }}", False, "True"),
        ("{{ raise_exception('') if reasoning_effort == 'none' else enable_thinking }}", True, "False"),
    ],
)
def test_thinking_that_the_messages_api_disables(template: str, own_thinking: bool, prompt: str) -> None:
    tokenizer = byte_level_tokenizer(["Hi"], 300)
    tokenizer.chat_template = template
    form = {"disabled": True, "own_thinking": own_thinking}
    given = {"reasoning_effort": "none", "enable_thinking": False, "messages_api": form}
    assert render_text(tokenizer, [Message(role="user", content="Ho")], template_args=given) == prompt


def test_a_developers_message_has_the_field_tools() -> None:
    message = Message(role="developer", content="Hi")
    assert shown_messages([message], False, "vllm") == [{"role": "developer", "content": "Hi", "tools": None}]
    tokenizer = byte_level_tokenizer(["Hi"], 300)
    tokenizer.chat_template = "{{ messages | tojson }}"
    assert render_text(tokenizer, [message]) == '[{"role": "system", "content": "Hi"}]'
