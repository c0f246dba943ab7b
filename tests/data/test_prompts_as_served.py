"""From a log to the prompts that the target is asked: what production asked, to the letter."""

import json
from typing import Any

import pytest
from byte_level import byte_level_tokenizer

from draftforge.data.chat_template import turn_ids
from draftforge.data.conversation import turns
from draftforge.data.mix import build_mix, load_manifest, load_mix
from draftforge.data.settings import MixSettings

TEMPLATE = """\
{% if tools %}[{{ tools | tojson }}]{% endif %}{% if reasoning_effort is defined %}[{{ reasoning_effort }}]{% endif %}\
{% if documents %}[{{ documents[0].text }}]{% endif %}\
{% if messages[0].role != 'system' %}<system>default{% endif %}\
{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}\
{% for c in m.tool_calls or [] %}!{{ c.function.name }}{% for k, v in c.function.arguments | items %} {{ k }}={{ v }}\
{% endfor %}{% endfor %}{% endfor %}\
{% if add_generation_prompt %}<assistant>\
{% if enable_thinking is defined and not enable_thinking %}(){% endif %}{% endif %}"""
CALL = {"id": "c1", "type": "function", "function": {"name": "pay", "arguments": '{"card": 4111111111111111}'}}
BILLING = "x-anthropic-billing-header: cch=abc"
EMPTY = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": ""}}


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


REQUESTS: dict[str, tuple[dict[str, Any], list[str]]] = {  # request, prompts
    "a reminder after the question": (
        {"messages": [said("system", "Be terse."), said("user", "Q1"), said("system", "One word.")]},
        ["<system>Be terse.<user>Q1<system>One word.<assistant>"],
    ),
    "a thread with one": (
        {"messages": [said("user", "Q2"), said("assistant", "A."), said("user", "And?"), said("developer", "Kindly.")]},
        [
            "<system>default<user>Q2<assistant>",
            "<system>Kindly.<user>Q2<assistant>A.<user>And?<assistant>",
        ],
    ),
    "two messages of the user": (
        {"messages": [said("user", "Q3 document"), said("user", "question")]},
        ["<system>default<user>Q3 document<user>question<assistant>"],
    ),
    "parts": (
        {"messages": [said("system", parts("One.", "Two.")), said("user", parts("Q4", "now"))]},
        ["<system>One.\nTwo.<user>Q4\nnow<assistant>"],
    ),
    "an empty system message": (
        {"messages": [said("system", ""), said("user", "Q5")]},
        ["<system><user>Q5<assistant>"],
    ),
    "effort": (
        {"messages": [said("user", "Q6")], "reasoning_effort": "high"},
        ["[high]<system>default<user>Q6<assistant>"],
    ),
    "no effort": (
        {"messages": [said("user", "Q7")], "reasoning_effort": "none"},
        ["[none]<system>default<user>Q7<assistant>()"],
    ),
    "documents": (
        {"messages": [said("user", "Q8")], "documents": [{"title": "t", "text": "Lamps are blue."}]},
        ["[Lamps are blue.]<system>default<user>Q8<assistant>"],
    ),
    "a prefill": (
        {"messages": [said("user", "Q9"), said("assistant", "Sure: {")], "continue_final_message": True},
        ["<system>default<user>Q9<assistant>Sure: {"],
    ),
    "an answer as part of the prompt": (
        {"messages": [said("user", "Q10"), said("assistant", "Sure.")]},
        ["<system>default<user>Q10<assistant>", "<system>default<user>Q10<assistant>Sure.<assistant>"],
    ),
    "reasoning and a call without arguments": (
        {
            "messages": [
                said("user", "Q11"),
                said("assistant", None, tool_calls=[EMPTY], reasoning_content="the clock"),
                said("tool", parts("noon", "UTC"), tool_call_id="c1"),
            ]
        },
        [
            "<system>default<user>Q11<assistant>",
            "<system>default<user>Q11<assistant>(the clock)!now<tool>noon\nUTC<assistant>",
        ],
    ),
    "personal data in a call": (
        {"messages": [said("user", "Q12"), said("assistant", "", tool_calls=[CALL]), said("tool", "done")]},
        [
            "<system>default<user>Q12<assistant>",
            "<system>default<user>Q12<assistant>!pay card=<card><tool>done<assistant>",
        ],
    ),
    "a flat tool": (
        {"messages": [said("user", "Q13")], "tools": [{"type": "function", "name": "now", "parameters": {}}]},
        [
            '[[{"type": "function", "function": {"name": "now", "description": null, "parameters": {}}}]]'
            "<system>default<user>Q13<assistant>"
        ],
    ),
    "a developer's message behind the system's": (
        {"messages": [said("system", "Be terse."), said("developer", parts("And", "kind.")), said("user", "Q15")]},
        ["<system>Be terse.\n\nAnd\nkind.<user>Q15<assistant>"],
    ),
    "empty parts": (
        {"messages": [said("system", parts("", "")), said("user", parts("", "Q16", ""))]},
        ["<system><user>Q16<assistant>"],
    ),
    "a gateway's billing header": (
        {"messages": [said("system", f"{BILLING}\nBe terse."), said("user", f"{BILLING}\nQ17")]},
        [f"<system>Be terse.<user>{BILLING}\nQ17<assistant>"],
    ),
    "a billing header as a part": (
        {"messages": [said("system", parts(BILLING, "Be terse.")), said("user", "Q18")]},
        ["<system>Be terse.<user>Q18<assistant>"],
    ),
    "template arguments that are not set": (
        {
            "messages": [said("user", "Q19")],
            "chat_template_kwargs": {"enable_thinking": None, "tokenize": None},
            "reasoning_effort": "auto",
        },
        ["<system>default<user>Q19<assistant>"],
    ),
    "a reserved name among the template's arguments": (
        {"messages": [said("user", "Q21")], "chat_template_kwargs": {"messages": [said("user", "Other")]}},
        [],
    ),
    "tools among the template's arguments": (
        {
            "messages": [said("user", "Q20")],
            "tools": [{"type": "function", "function": {"name": "then"}}],
            "chat_template_kwargs": {"tools": [{"name": "now"}]},
        },
        ['[[{"name": "now"}]]<system>default<user>Q20<assistant>'],
    ),
    "a template of its own": ({"messages": [said("user", "Q14")], "chat_template": "{{ messages }}"}, []),
}


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[str]], dict[str, Any]]:
    """The prompts of each request of a log, and the mix's manifest."""
    folder = tmp_path_factory.mktemp("served")
    response = {"choices": [{"index": 0, "message": said("assistant", "Fine."), "finish_reason": "stop"}]}
    lines = [{"request": request, "response": response} for request, _ in REQUESTS.values()]
    lines += [
        {"request": {"messages": [said("user", f"Filler {i} of {i * 7}")]}, "response": response} for i in range(40)
    ]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = {"kind": "openai", "path": "log.jsonl", "domain": "chat", "reserved_template_args": ["tools"]}
    settings = MixSettings.model_validate({"sources": [source]})
    build_mix(settings, folder, folder / "mix")
    tokenizer = byte_level_tokenizer(["Hi there"], 262)
    tokenizer.chat_template = TEMPLATE
    found = {
        one.where: [str(tokenizer.decode(turn_ids(tokenizer, one, turn))) for turn in turns(one)]
        for one in load_mix(folder / "mix")
    }
    return found, load_manifest(folder / "mix")


@pytest.mark.parametrize("name", REQUESTS)
def test_the_target_is_asked_what_production_asked(
    name: str, asked: tuple[dict[str, list[str]], dict[str, Any]]
) -> None:
    line = list(REQUESTS).index(name) + 1
    assert asked[0].get(f"log.jsonl:{line}", []) == REQUESTS[name][1]


def test_what_cannot_be_asked_is_counted(asked: tuple[dict[str, list[str]], dict[str, Any]]) -> None:
    assert (
        asked[1]["left_out"]
        == {
            "chat template of its own": 1,
            "reserved template argument": 1,
        }
        and asked[1]["read"] == len(REQUESTS) + 40
    )
