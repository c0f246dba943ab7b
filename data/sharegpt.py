"""ShareGPT conversations: lists of objects with `from` and `value`, and the calls of tools inside of them; what may
stand beside these, and beside an Alpaca row's prompt."""

import re
from collections.abc import Sequence
from typing import Any

from ..errors import InputError
from .conversation import ROLES, Engine, Message
from .logs.chat import LeftOut, decoded
from .served_request import Lookup, json_type, quoted
from .settings import Shape

SHAREGPT_ROLES: dict[str, str] = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    **dict(zip(ROLES, ROLES)),
}
_MEDIA = ("images", "videos", "audios", "image", "video", "audio")
"""Fields that hold what a text has marks for (`<image>`), beside a conversation or a message; of lines that may be
requests, the first three alone."""
_BESIDE = (
    "tool_calls",
    "tool_call_id",
    "function_call",
    "reasoning",
    "reasoning_content",
    "thinking",
    "content",
    "name",
    "tools",
)
_ROWS = frozenset(("prompt", "messages", "conversations", "turns", "request"))
"""Fields of a row that is a line of JSON."""
_MESSAGES = re.compile(r"""\s*\[\s*\{\s*['"](?:role|content|from|value)['"]\s*:.*\}\s*\]\s*\Z""", re.DOTALL)
"""A list of messages as JSON, Python or NumPy writes it."""
_ASKED_TOGETHER = ("instruction", "input", "query", "context", "history")
"""Fields that rows of Alpaca (an instruction and its input), Dolly and LLaMA-Factory ask together."""


def refuse_media(lookup: Lookup, shape: Shape, where: str) -> None:
    """Raise LeftOut for a conversation with images, videos or audio beside it."""
    names, kinds = (_MEDIA[:3], (list, dict)) if shape == "messages" else (_MEDIA, (list, dict, str))
    messages = decoded(lookup("messages")) if shape == "messages" else None
    held = any((media := decoded(lookup(name))) and isinstance(media, kinds) for name in names)
    if held or any(
        isinstance(message, dict) and any(message.get(name) for name in names)
        for message in (messages if isinstance(messages, list) else ())
    ):
        raise LeftOut(where, "message part that is not text")


def refuse_what_stands_beside(asked: Any, lookup: Lookup, where: str) -> None:
    """Raise LeftOut for a line with another part of its prompt than what is `asked`, or whose prompt is the text of
    messages or of a whole row, as tables hold the first and files of JSON with another name the second."""
    row = decoded(asked) if isinstance(asked, str) else None
    if (isinstance(row, dict) and _ROWS.intersection(row)) or (row is not None and _MESSAGES.match(asked)):
        raise LeftOut(where, "messages in an unread form")
    if any(lookup(name) not in (None, "", [], "[]", asked) for name in _ASKED_TOGETHER):
        raise LeftOut(where, "messages in an unread form")


def sharegpt_messages(items: Sequence[Any], engine: Engine, where: str) -> list[Message]:
    """Messages of a ShareGPT conversation as its engine takes them. Raises InputError."""
    messages: list[Message] = []
    for i, raw in enumerate(items):
        item = f"{where}: conversations[{i}]"
        if not isinstance(raw, dict):
            raise InputError(f"{item}: is a JSON {json_type(raw)}; must be an object with from and value")
        # What stands beside the text would be lost of the prompt.
        if any(raw.get(name) for name in _BESIDE):
            raise LeftOut(item, "messages in an unread form")
        if any(raw.get(name) for name in _MEDIA):
            raise LeftOut(item, "message part that is not text")
        # Roles have other names than in the OpenAI style.
        role = SHAREGPT_ROLES.get(raw["from"]) if isinstance(raw.get("from"), str) else None
        if role is None:
            names = ", ".join(sorted(SHAREGPT_ROLES))
            raise InputError(f"{item}: unknown role {quoted(raw.get('from'))}; must be one of {names}")
        if raw["from"] == "function_call":
            content: list[str] | str = "" if engine == "sglang" else []
            messages.append(Message(role=role, content=content, tool_calls=_calls(raw.get("value"), item)))
            continue
        if not isinstance(raw.get("value"), str):
            raise InputError(f"{item}: value is a JSON {json_type(raw.get('value'))}; must be text")
        messages.append(Message(role=role, content=raw["value"]))
    return messages


def _calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls of a ShareGPT message: an object with name and arguments or `parameters` (Llama's models write these),
    or one of OpenAI's, or a list of such, as they are or in JSON."""
    found = decoded(value)
    calls = [
        call["function"] if isinstance(call, dict) and isinstance(call.get("function"), dict) else call
        for call in (found if isinstance(found, list) else [found])
    ]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise InputError(f"{where}: value of a function_call must be JSON with a name and arguments")
    functions = [
        {"name": call["name"], "arguments": call.get("arguments", call.get("parameters", {}))} for call in calls
    ]
    return [{"type": "function", "function": function} for function in functions]
