"""Anthropic's Messages API, as vLLM's own endpoint (`/v1/messages`, 0.32) turns its requests into chat completions.

Content blocks become text, tool calls, reasoning and messages of tools; `docs/logs.md` has the list of fields. A system
message among the others stays where it is: whether vLLM moves it to the front, and what it makes of thinking that is
switched off, depends on the chat template, and is done where prompts are rendered.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .chat import Reason

_BLOCKS = ("tool_use", "tool_result")
_THOUGHTS = ("thinking", "redacted_thinking")
_OPENAI_ROLES = ("system", "developer", "tool", "function")
_OPENAI_FIELDS = (
    *("max_completion_tokens", "reasoning_effort", "frequency_penalty", "presence_penalty", "response_format"),
    *("n", "seed", "logprobs", "top_logprobs", "stop", "documents", "include_reasoning", "continue_final_message"),
    *("add_generation_prompt", "parallel_tool_calls", "logit_bias", "min_p", "repetition_penalty", "modalities"),
    *("stream_options", "user", "store", "functions", "function_call"),
)
_OPENAI_PARTS = ("name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content", "refusal")
_PASSED_OVER = (
    *("reasoning", "reasoning_effort", "documents", "chat_template", "add_generation_prompt", "response_format"),
    *("continue_final_message", "truncate_prompt_tokens", "add_special_tokens", "session_params"),
    *("prompt_token_ids", "input_ids", "prompt_embeds", "input_embeds", "lora_path", "lora_request", "lora_name"),
    *("max_completion_tokens", "max_new_tokens", "min_p", "repetition_penalty", "min_tokens", "ignore_eos"),
    *("frequency_penalty", "presence_penalty", "logit_bias", "bad_words", "allowed_token_ids", "use_beam_search"),
    *("stop", "stop_token_ids", "stop_regex", "thinking_token_budget", "structured_outputs", "guided_json"),
    *("guided_regex", "guided_choice", "guided_grammar", "regex", "ebnf", "json_schema", "structural_tag", "grammar"),
    *("custom_logit_processor", "logits_processors", "repetition_detection"),
)
"""Fields of chat completions that a request of the Messages API has not: the endpoint passes over them."""
_NOT_SENT_ON = ("system", "stop_sequences", "thinking", "output_config")
BILLING_HEADER = "x-anthropic-billing-header"
"""Begins a line of Claude Code's, another one in each request, which vLLM leaves out of the system's texts."""
MESSAGES_API = "messages_api"
"""Field of a request, and template argument of its conversation, that tells what depends on the template."""


class MessagesForm(dict[str, bool]):
    """What stands under MESSAGES_API. A type of its own: what a request says there itself is not believed."""


_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def is_request(body: Mapping[str, Any], answered: bool | None = None) -> bool:
    """Whether a body has fields that only requests of the Messages API have, or was `answered` as they are."""
    tools, choice, messages = body.get("tools"), body.get("tool_choice"), body.get("messages")
    # Chat completions pass over these fields.
    named = any(body.get(name) is not None for name in ("system", "stop_sequences", "anthropic_version"))
    if (named and answered is not False) or _is_of_their_form(body):
        return True
    if answered is not None:
        return answered
    # Chat completions know parts with thoughts too, and in messages of any role; some servers take `thinking`.
    other = any(body.get(name) is not None for name in _OPENAI_FIELDS)
    other = (
        other or isinstance(choice, str) or any(isinstance(tool.get("function"), Mapping) for tool in _objects(tools))
    )
    # vLLM takes messages of the system among the others in both APIs.
    other = other or any(
        message.get("role") in _OPENAI_ROLES[place > 0 :] or any(name in message for name in _OPENAI_PARTS)
        for place, message in enumerate(_objects(messages))
    )
    set_up = any(isinstance(body.get(name), Mapping) for name in ("thinking", "output_config"))
    thought = any(role == "assistant" and block.get("type") in _THOUGHTS for role, block in _said(body))
    return not other and (set_up or thought)


def chat_requests(
    bodies: Sequence[Mapping[str, Any]], answered: bool | None, engine: str | None, served: bool | None = None
) -> tuple[dict[str, Any], Reason | None, list[dict[str, Any]]]:
    """The chat-completions request that some readings of a body are, the likeliest first; why it has no prompt of text
    alone; and what else it may be.

    `answered`: as for `is_request`; `served`: whether it was the Messages API's, as far as its path tells. Where only
    fields tell it that chat completions pass over (`system`, `thinking`), it may be of either.
    """
    found: list[tuple[dict[str, Any], Reason | None]] = []
    for body in bodies:
        theirs = is_request(body, answered) if served is None else served
        told = served is not None or answered is not None or body.get("anthropic_version") is not None
        told = told or body.get("tools") == []  # which chat completions refuse
        if theirs:
            found.append(request_of(body, engine))
        if not theirs or not (told or _is_of_their_form(body)):
            known = theirs or served is False
            found.append(({name: item for name, item in body.items() if name != "system" or not known}, None))
    # What no server takes was not sent.
    (request, reason), *others = [one for one in found if one[1] != "request that the engine refuses"] or found
    return request, reason, [other for other, why in others if why is None]


def _is_of_their_form(body: Mapping[str, Any]) -> bool:
    """Whether a body has tools, a choice of them or blocks that servers of chat completions refuse."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    if isinstance(choice, Mapping) and choice.get("type") in (*_CHOICES, "tool"):
        return True
    if isinstance(tools, list) and any(isinstance(tool, Mapping) and "input_schema" in tool for tool in tools):
        return True
    blocks = [block for _, block in _said(body)]
    return any(block.get("type") in _BLOCKS or (block.get("type") == "image" and "source" in block) for block in blocks)


def _said(body: Mapping[str, Any]) -> list[tuple[Any, Mapping[str, Any]]]:
    """Roles and content blocks of a body's messages."""
    messages = _objects(body.get("messages"))
    return [(message.get("role"), block) for message in messages for block in _objects(message.get("content"))]


def request_of(body: Mapping[str, Any], engine: str | None = None) -> tuple[dict[str, Any], Reason | None]:
    """The chat-completions request that vLLM makes of a body, and why it has no prompt of text alone; None: it has.

    What breaks the schema stays as it is: `records` names it. SGLang makes another request of it, which depends on the
    template, and so does none here.
    """
    if engine == "sglang":
        return {}, "Messages API of SGLang"
    # 1) The system prompt, then each message.
    messages: list[Any] = []
    system = system_text(body.get("system"))
    if system:
        messages.append({"role": "system", "content": system})
    given = body.get("messages")
    if not isinstance(given, list):
        return {**body}, None
    for message in given:
        reason = _add_message(messages, message)
        if reason is not None:
            return {}, reason

    # 2) The other fields under their names there.
    gone = (*_NOT_SENT_ON, *_PASSED_OVER)
    request = {name: value for name, value in body.items() if name not in gone} | {"messages": messages}
    if body.get("stop_sequences"):
        request["stop"] = body["stop_sequences"]
    if isinstance(output := body.get("output_config"), Mapping):
        request |= {"reasoning_effort": output.get("effort"), "response_format": output.get("format")}
    if isinstance(thinking := body.get("thinking"), Mapping):
        request["thinking_token_budget"] = thinking.get("budget_tokens")
        if thinking.get("type") == "disabled":
            request["reasoning_effort"] = "none"
    if form := _by_template(body):
        request[MESSAGES_API] = form

    # 3) Tools, and which of them must be called.
    if isinstance(body.get("tools"), list):
        request["tools"] = [_tool(tool) for tool in body["tools"]]
    if body.get("tools") == []:  # which a template is shown, and chat completions refuse
        arguments = body.get("chat_template_kwargs") or {}
        request["chat_template_kwargs"] = {"tools": [], **arguments} if isinstance(arguments, Mapping) else arguments
    if isinstance(choice := body.get("tool_choice"), Mapping):
        named = {"type": "function", "function": {"name": choice.get("name")}}
        request["tool_choice"] = _CHOICES.get(str(choice.get("type")), named)
    return request, None


def _by_template(body: Mapping[str, Any]) -> MessagesForm:
    """What of a request's prompt vLLM makes as its chat template wants it; empty: nothing."""
    disabled = isinstance(body.get("thinking"), Mapping) and body["thinking"].get("type") == "disabled"
    arguments = body.get("chat_template_kwargs")
    named = isinstance(arguments, Mapping) and "enable_thinking" in arguments
    inside = any(message.get("role") == "system" for message in _objects(body.get("messages")))
    return MessagesForm(disabled=disabled, own_thinking=named) if disabled or inside else MessagesForm()


def system_text(system: Any) -> str:
    """Text of a system prompt, a string or a list of blocks; empty: there is none."""
    if isinstance(system, str):
        return system
    return "".join(filter(_shown, map(_text, _objects(system))))


def answer_of(blocks: Sequence[Any]) -> dict[str, Any]:
    """Message of an answer's content blocks."""
    calls = [_call(block) for block in _objects(blocks) if block.get("type") == "tool_use"]
    thoughts = [str(block.get("thinking") or "") for block in _objects(blocks) if block.get("type") == "thinking"]
    return {"content": "".join(map(_text, _objects(blocks))), "reasoning": "".join(thoughts), "tool_calls": calls}


def streamed_blocks(chunks: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Content blocks of an answer from the events of its stream; empty: the stream is none of this API."""
    blocks: dict[str, dict[str, Any]] = {}
    for event in chunks:
        index = str(event.get("index"))
        if event.get("type") == "content_block_start" and isinstance(event.get("content_block"), Mapping):
            blocks[index] = {**event["content_block"]}
        delta = event.get("delta")
        if event.get("type") != "content_block_delta" or not isinstance(delta, Mapping) or index not in blocks:
            continue
        # Each kind of block has its kind of piece; the input of a tool call comes as JSON text.
        for name in ("text", "thinking", "partial_json"):
            if isinstance(delta.get(name), str):
                blocks[index][name] = str(blocks[index].get(name) or "") + delta[name]
    return list(blocks.values())


def _objects(values: Any) -> list[Mapping[str, Any]]:
    return [value for value in values if isinstance(value, Mapping)] if isinstance(values, list) else []


def _text(block: Mapping[str, Any]) -> str:
    return block["text"] if block.get("type") == "text" and isinstance(block.get("text"), str) else ""


def _shown(text: str) -> bool:
    """Whether a text of the system's is shown to the model."""
    return bool(text) and not text.startswith(BILLING_HEADER)


def _add_message(messages: list[Any], message: Any) -> Reason | None:
    """Add what becomes of a message: of one with results of tools, a message each before the rest."""
    role, blocks = (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None, None)
    if isinstance(role, str) and role not in ("user", "assistant", "system"):
        return "request that the engine refuses"
    if isinstance(blocks, str):  # fields of chat completions beside it are in no schema of the endpoint's
        if role != "system" or _shown(blocks):
            messages.append({"role": role, "content": blocks})
        return None
    if isinstance(message, Mapping) and isinstance(role, str) and blocks is None:
        return "request that the engine refuses"
    if not isinstance(blocks, list):
        messages.append(message)
        return None
    if role == "system":
        if any(
            isinstance(block, Mapping) and block.get("type") in ("tool_addition", "tool_removal") for block in blocks
        ):
            return "tools inside a message"
        if text := system_text(blocks):
            messages.append({"role": "system", "content": text})
        return None

    # Blocks in their order; thoughts that the API hid are passed over.
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "text" and isinstance(block.get("text"), str):
            parts += [{"type": "text", "text": block["text"]}] if block["text"] else []
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind == "tool_use":
            calls.append(_call(block))
        elif kind == "tool_result" and role == "user":
            result = _result(block)
            if result is None:
                return "message part that is not text"
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": result})
        elif kind == "tool_result":
            parts.append({"type": "text", "text": f"Tool result: {block.get('content') or ''}"})
        elif kind not in ("redacted_thinking", "tool_reference"):
            return "message part that is not text"

    # One text stands alone. A user's message that held results only is gone.
    found: dict[str, Any] = {"role": role, "content": parts[0]["text"] if len(parts) == 1 else parts or None}
    found |= {"reasoning": "".join(thoughts)} if thoughts else {}
    found |= {"tool_calls": calls} if calls else {}
    if role != "user" or parts:
        messages.append(found)
    return None


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    arguments = block.get("partial_json") or json.dumps(block.get("input") or {})
    function = {"name": block.get("name") or "", "arguments": arguments}
    return {"id": block.get("id") or None, "type": "function", "function": function}


def _result(block: Mapping[str, Any]) -> str | None:
    """Text of a tool's result, its parts a line each; None: a part is no text."""
    content = block.get("content")
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    if any(not isinstance(part, Mapping) or part.get("type") != "text" for part in content):
        return None
    return "\n".join(map(_text, content))


def _tool(tool: Any) -> Any:
    """A tool in the shape of chat completions; one that the server runs itself, without a schema, as it is."""
    if not isinstance(tool, Mapping) or not isinstance(tool.get("input_schema"), Mapping):
        return tool
    names = [name for name in ("name", "description", "strict", "defer_loading") if tool.get(name) is not None]
    parameters = {**tool["input_schema"], "type": tool["input_schema"].get("type", "object")}
    return {"type": "function", "function": {name: tool[name] for name in names} | {"parameters": parameters}}
