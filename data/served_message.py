"""One message of a request, as the engine that was asked takes it: its role, and the texts of its content."""

from collections.abc import Mapping
from typing import Any

from ..errors import InputError
from .conversation import Engine, Message
from .logs.anthropic import BILLING_HEADER
from .logs.chat import LeftOut
from .served_request import json_type, message_of_sglang, validated

_TEXT_PARTS = dict.fromkeys(("text", "input_text", "output_text"), "text") | {
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Types of a content's parts that vLLM shows as text, and where it stands in them. SGLang takes the first alone."""
_SGLANG_THOUGHTS = ("thinking", "reasoning")
_NO_TEXT = ("type", "id", "name", "uuid")
"""Fields of a part whose texts are none of the message's."""
_PART_FIELDS = frozenset(
    (
        *("type", "text", "refusal", "thinking", "closed", "name", "uuid", "data", "prompt_cache_breakpoint"),
        *("file", "image_url", "image_pil", "image_embeds", "input_audio", "audio_url", "audio_embeds"),
        *("video_url", "video_embeds", "prompt_embeds"),
    )
)
"""Fields of a part that vLLM knows, of which a template is shown type and text alone; it is shown all others."""


def message_as_taken(raw: Any, engine: Engine, where: str) -> Message:
    """Read a message as an engine takes it. Raises InputError starting with `where`, LeftOut for what it refuses or
    may show in another form."""
    if not isinstance(raw, dict):
        raise InputError(f"{where}: is a JSON {json_type(raw)}; must be an object with role and content")
    role = raw.get("role")
    if not isinstance(role, str) or not role:
        found = "is missing" if role is None else "is empty" if role == "" else f"is a JSON {json_type(role)}"
        raise InputError(f"{where}: role {found}; must be text")
    # Text under another name than engines know would be asked as an empty message.
    if any(raw.get(name) for name in ("parts", "text")) and not raw.get("content"):
        raise LeftOut(where, "messages in an unread form")
    # vLLM hands any role to the template.
    if engine == "sglang":
        raw = message_of_sglang(raw, where)
        role = raw["role"]
    # Without any, a template is shown none; an empty list is none to SGLang alone.
    if role == "developer" and (raw.get("tools") if engine == "sglang" else raw.get("tools") is not None):
        raise LeftOut(where, "tools inside a message")
    # vLLM hands DeepSeek's `task` to the template, which no message of ours holds.
    if engine == "vllm" and raw.get("task") is not None:
        raise LeftOut(where, "messages in an unread form")
    # A user's message has a content, and others something.
    said = ("content", "tool_calls", "reasoning", "reasoning_content")
    if raw.get("content") is None if role == "user" else not any(name in raw for name in said):
        raise LeftOut(where, "messages in an unread form")
    # vLLM takes reasoning under either name, SGLang under one.
    names = ("reasoning", "reasoning_content") if engine == "vllm" else ("reasoning_content",)
    reasoning = next((raw[name] for name in names if raw.get(name) is not None), None)
    content, part_fields = _content(raw.get("content"), role, engine, where)
    calls = raw.get("tool_calls")
    fields = {
        "role": role,
        "content": content,
        "part_fields": part_fields if any(part_fields) else None,
        "reasoning": reasoning if role == "assistant" else None,
        "name": raw.get("name"),
        "tool_call_id": raw.get("tool_call_id"),
        "tool_calls": calls if engine == "sglang" else calls or None,
    }
    return validated(Message, fields, where)


def _content(content: Any, role: str, engine: Engine, where: str) -> tuple[str | list[str], list[dict[str, Any]]]:
    """Text of a message's content, or its text parts where there are several; SGLang tells one part from a text. And
    other fields of each part that a template may be shown. Raises LeftOut for other parts."""
    if content is None or isinstance(content, str):
        return [] if content is None else content, []
    if not isinstance(content, list):
        raise InputError(f"{where}: content is a JSON {json_type(content)}; must be text or a list of text parts")
    # Parts that are not text (images, audio) cannot be left out without changing the question.
    if engine == "vllm" and content and not any(isinstance(part, dict) and _is_typed(part) for part in content):
        raise LeftOut(where, "messages in an unread form")
    parts, others = list[str](), list[dict[str, Any]]()
    for part in content:
        fields = part if isinstance(part, dict) else {"type": "text", "text": part}
        kind = str(fields.get("type"))
        text = fields.get(_TEXT_PARTS.get(kind, ""))
        if engine == "sglang" and kind in _SGLANG_THOUGHTS:
            # It takes thoughts of the assistant, and shows them to no template.
            if role != "assistant" or [type(fields.get(name)) for name in ("thinking", "text")].count(str) != 1:
                raise LeftOut(where, "request that the engine refuses")
            continue
        if engine == "sglang" and kind in _TEXT_PARTS and (kind != "text" or part is not fields or text is None):
            raise LeftOut(where, "request that the engine refuses")
        if kind in _TEXT_PARTS and text is None:  # engines pass over it, or show `None` where no schema knows its type
            named = any(isinstance(value, str) and value for name, value in fields.items() if name not in _NO_TEXT)
            if named or kind in ("input_text", "output_text"):  # `named`: a log has its text under another name
                raise LeftOut(where, "messages in an unread form")
            continue
        if not isinstance(text, str):
            raise LeftOut(where, "message part that is not text")
        # vLLM leaves the header of Claude Code out of parts of type text alone.
        if engine == "vllm" and role == "system" and kind != "text" and text.startswith(BILLING_HEADER):
            raise LeftOut(where, "messages in an unread form")
        parts.append(text)
        others.append({name: value for name, value in fields.items() if name not in _PART_FIELDS})
    if engine == "sglang":
        return parts, []
    return (parts[0] if len(parts) == 1 else parts), others


def _is_typed(part: Mapping[str, Any]) -> bool:
    """Whether a part is of a type in vLLM's schema: a content without any such part is shown as if it was empty."""
    kind = str(part.get("type"))
    return kind not in ("None", "input_text", "output_text") and part.get(_TEXT_PARTS.get(kind, "type")) is not None
