"""Back from a rendered prompt to its messages, where nothing has to be guessed.

Engines log what their chat template made of a request. A prompt is taken apart only if all of it is made of one
markup's turns: each opened and closed, no other control token inside, the last one the opened turn of the assistant.
Rendered again by a template of that markup, the messages give the same text: what the template itself added (a default
system message, tool descriptions, tool results inside a user turn) stays part of the message it stands in.
"""

import re
from typing import Any, NamedTuple

_NO_THINKING = "<think>\n\n</think>\n\n"
_OPEN_THINKING = "<think>\n"
_DATES = re.compile(r"Cutting Knowledge Date: [^\n]{1,40}\nToday Date: ([^\n]{1,40})\n\n")


class Rendered(NamedTuple):
    """What a prompt was rendered from."""

    messages: list[dict[str, str]]
    template_args: dict[str, Any]


class _Markup(NamedTuple):
    begin: str
    """Text before the first turn, if the tokenizer prints it."""
    turn: re.Pattern[str]
    """One closed turn: role and content."""
    opened: str
    """What opens the assistant's answer."""
    control: re.Pattern[str]
    """Control tokens, none of which may be left in a content."""
    roles: dict[str, str]


_CHATML = _Markup(
    begin="",
    turn=re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n?", re.DOTALL),
    opened="<|im_start|>assistant\n",
    control=re.compile(r"<\|[\w-]+\|>"),
    roles={"system": "system", "user": "user", "assistant": "assistant", "tool": "tool"},
)
_LLAMA3 = _Markup(
    begin="<|begin_of_text|>",
    turn=re.compile(r"<\|start_header_id\|>(\w+)<\|end_header_id\|>\n\n(.*?)<\|eot_id\|>", re.DOTALL),
    opened="<|start_header_id|>assistant<|end_header_id|>\n\n",
    control=re.compile(r"<\|[\w-]+\|>"),
    roles={
        "system": "system",
        "user": "user",
        "assistant": "assistant",
    },  # `ipython` turns and their calls are not text
)
_GEMMA = _Markup(
    begin="<bos>",
    turn=re.compile(r"<start_of_turn>(\w+)\n(.*?)<end_of_turn>\n", re.DOTALL),
    opened="<start_of_turn>model\n",
    control=re.compile(r"<(?:start_of_turn|end_of_turn|start_of_image|bos|eos)>"),
    roles={"user": "user", "model": "assistant"},
)
_MARKUPS = (_CHATML, _LLAMA3, _GEMMA)


def unrender(prompt: str) -> Rendered | None:
    """The messages of a rendered prompt; None where it is of no known markup, cut, or goes on with an answer."""
    return next((found for markup in _MARKUPS if (found := _read(prompt, markup)) is not None), None)


def is_chat(prompt: str) -> bool:
    """Whether a prompt holds the turns of a chat at all, in any markup with control tokens."""
    return re.search(r"<[|｜][\w ▁]+[|｜]>|<start_of_turn>|\[INST\]", prompt) is not None


def _read(prompt: str, markup: _Markup) -> Rendered | None:
    at = len(markup.begin) if prompt.startswith(markup.begin) else 0
    messages: list[dict[str, str]] = []
    arguments: dict[str, Any] = {}
    while turn := markup.turn.match(prompt, at):
        role = markup.roles.get(turn[1])
        if role is None or markup.control.search(turn[2]):
            return None
        messages.append({"role": role, "content": turn[2]})
        at = turn.end()
    rest = prompt[at:]
    if not rest.startswith(markup.opened):
        return None
    opening = rest.removeprefix(markup.opened)
    if opening == _NO_THINKING:
        arguments["enable_thinking"] = False
    elif opening not in ("", _OPEN_THINKING):
        return None
    if not _dated(messages, markup, arguments) or not any(message["role"] == "user" for message in messages):
        return None
    return Rendered([message for message in messages if message["content"].strip()], arguments)


def _dated(messages: list[dict[str, str]], markup: _Markup, arguments: dict[str, Any]) -> bool:
    """Llama's template writes dates above the system message and would write them again: they become an argument."""
    if markup is not _LLAMA3 or not messages or messages[0]["role"] != "system":
        return True
    dates = _DATES.match(messages[0]["content"])
    if dates:
        messages[0] = {"role": "system", "content": messages[0]["content"][dates.end() :]}
        arguments["date_string"] = dates[1]
    return "Environment: ipython" not in messages[0]["content"].splitlines()
