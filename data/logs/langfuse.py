"""Langfuse's observations: blob-storage exports (JSON, JSONL, CSV, Parquet), exports from its pages, API answers.

Exports write `start_time`, pages and the API `startTime`; structured fields are objects or their JSON text.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from ...errors import InputError
from .chat import Entry, Reason, Timing, answer_of, body_of, count, decoded, labels, refusal, with_answer
from .parsing import number, seconds

_GENERATION = "GENERATION"
_ANSWER_FIELDS = {"role", "content", "tool_calls"}
_PROMPT_COUNTS = ("input", "prompt_tokens", "promptTokens", "input_tokens", "inputTokens", "inputUsage")
_ANSWER_COUNTS = ("output", "completion_tokens", "completionTokens", "output_tokens", "outputTokens", "outputUsage")
_NUMBERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_LIMITS = ("max_tokens", "max_completion_tokens")


def entries(value: dict[str, Any], where: str) -> Iterable[Entry]:
    """Entries of one observation, or of a page of observations; those that are no generation are left out."""
    # 1) A page of the API: each of its observations; spans and events are no requests.
    if isinstance(value.get("data"), list) and "type" not in value:  # a page of the API's list of observations
        for index, item in enumerate(value["data"]):
            if not isinstance(item, dict):
                raise InputError(f"{where}: data[{index}]: is not a JSON object")
            yield from entries(item, f"{where}: data[{index}]")
        return
    if value.get("type") != _GENERATION:
        yield Entry(where, left_out="no chat request")
        return

    # 2) The request: model parameters, and the input, which is a request body or bare messages.
    given = decoded(value.get("input"))
    parameters = _parameters(decoded(_either(value, "model_parameters")))
    request = {**parameters, **(given if isinstance(given, dict) else {"messages": given})}

    # 3) Labels; a session, or else a trace, is a thread.
    line = labels(decoded(value.get("metadata")), value)
    thread = _either(value, "session_id") or _either(value, "trace_id")
    if thread:
        line.setdefault("group", thread)

    # 4) The messages and the answer, where they are text.
    reason = _reason(value, request)
    if reason is None:
        line["request"] = body_of(request)
        messages = request.get("messages")
        line["messages"] = with_answer(messages, _answer(value.get("output"))) if isinstance(messages, list) else None
    yield Entry(where, line, reason, _timing(value))


def _either(value: Mapping[str, Any], name: str) -> Any:
    """Read a field under its name in exports (snake case) or in the API (camel case)."""
    first, *rest = name.split("_")
    return value.get(name, value.get(first + "".join(part.capitalize() for part in rest)))


def _reason(value: Mapping[str, Any], request: Mapping[str, Any]) -> Reason | None:
    if value.get("level") == "ERROR":
        return "failed request"
    messages = request.get("messages")
    if messages in (None, "", [], {}):
        return "raw prompt" if request.get("prompt") else "no text logged"
    if isinstance(messages, str):
        return "raw prompt"
    if not request.get("tools") and decoded(_either(value, "tool_definitions")) not in (None, "", {}, []):
        return "tools without their definitions"
    return refusal(messages)


def _answer(output: Any) -> dict[str, Any] | None:
    """Answer of a generation: a text, a message or a whole response. JSON of any other form is text of the model."""
    value = decoded(output)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, dict) and "choices" in value:
        return answer_of(value)
    if isinstance(value, dict) and value.keys() & _ANSWER_FIELDS and value.get("role", "assistant") == "assistant":
        return answer_of({"choices": [{"message": value}]})
    return answer_of({"choices": [{"message": {"content": output if isinstance(output, str) else None}}]})


def _parameters(given: Any) -> dict[str, Any]:
    """Model parameters, with numbers that were logged as text converted; an infinite limit is dropped."""
    found = dict(given) if isinstance(given, dict) else {}
    for name in (*_NUMBERS, *_LIMITS):
        value = number(found.pop(name, None))
        if value is not None:
            found[name] = int(value) if name == "top_k" or name in _LIMITS else value
    return found


def _timing(value: Mapping[str, Any]) -> Timing:
    # Counts stand in one of three places, under the names of one of several SDK versions.
    usages = [decoded(_either(value, "usage_details")), decoded(value.get("usage")), value]
    prompt_tokens, answer_tokens = (
        next((found for usage in usages for name in names if (found := count(usage, name)) is not None), None)
        for names in (_PROMPT_COUNTS, _ANSWER_COUNTS)
    )
    started, ended = seconds(_either(value, "start_time")), seconds(_either(value, "end_time"))
    return Timing(started, ended, None, prompt_tokens, answer_tokens)
