"""Langfuse's observations: blob-storage exports (JSON, JSONL, CSV, Parquet), exports from its pages, API answers.

Exports write `start_time`, pages and the API `startTime`. Structured fields are objects, their JSON text, that encoded
once more, or what Python prints of them.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ...errors import InputError
from ..read_limits import json_within
from . import anthropic
from .chat import (
    ARGUMENTS_UNKNOWN,
    HISTORY_UNKNOWN,
    PARTS_UNKNOWN,
    TOOLS_UNKNOWN,
    UNSET_AS_ONE,
    Entry,
    Reason,
    Timing,
    as_sent,
    body_of,
    conflicting_request,
    continued,
    count,
    decoded,
    labels,
    read_otherwise,
    settings_beside,
    system_prompt,
    with_answer,
)
from .parsing import number, seconds
from .response import answer_of, is_of_messages_api

_GENERATION = "GENERATION"
_CUT, _MEDIA = "<truncated due to size exceeding limit", "@@@langfuseMedia:"
_NO_MEDIA = "<Upload handling failed for LangfuseMedia"
_TOO_DEEP = ("<dict>", "<list>", "<tuple>")
"""What Langfuse's clients write in place of a text that begins with `data:` and is no file, and of objects and lists
inside twenty others."""
_LONG_NUMBER = re.compile(r"-?\d{16,}")
_MOST_EXACT = 1 << 53
"""Whole numbers from here on Langfuse's client for Python writes as texts."""
_ANSWER_FIELDS = {"role", "content", "tool_calls"}
_ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool", "function")},
    **{"human": "user", "HumanMessage": "user", "ai": "assistant", "AIMessage": "assistant", "model": "assistant"},
    **{"SystemMessage": "system", "ToolMessage": "tool", "FunctionMessage": "function"},
}
"""Roles by their names in OpenAI's and LangChain's messages."""
_EVENT = "event.name"
_OF_TOOLS = {"parameters", "input_schema", "description"}
_LANGCHAINS_OWN = ("thinking", "reasoning_content")
_ASSISTANT = ("assistant", "ai", "model")
_OWN_SCOPE = "langfuse-sdk"
_UNCOUNTED: dict[str, Reason] = {
    HISTORY_UNKNOWN: "earlier messages that the log may lack",
    TOOLS_UNKNOWN: "tools without their definitions",
}
"""Why a generation of Langfuse's own clients that may lack a part is left out where its tokens are not counted."""
_PROMPT_COUNTS = ("input", "prompt_tokens", "promptTokens", "input_tokens", "inputTokens", "inputUsage")
_ANSWER_COUNTS = ("output", "completion_tokens", "completionTokens", "output_tokens", "outputTokens", "outputUsage")
_NUMBERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_LIMITS = ("max_tokens", "max_completion_tokens")
_PENALTIES = {"frequency_penalty", "presence_penalty"}
_OF_RESPONSES = {"max_output_tokens", "reasoning_summary"}
_ITEMS = re.compile(r"reasoning|\w+_call")
"""Types of items in an answer of the Responses API, beside messages."""
_OF_AI_SDK = {"maxRetries", "maxSteps", "toolChoice", "finishReason"}


def entries(value: dict[str, Any], where: str, engine: str | None = None) -> Iterable[Entry]:
    """Entries of one observation, or of a page of observations; those that are no generation are left out."""
    # 1) A page of the API: each of its observations; spans and events are no requests.
    if isinstance(value.get("data"), list) and "type" not in value:  # a page of the API's list of observations
        for index, item in enumerate(value["data"]):
            if not isinstance(item, dict):
                raise InputError(f"{where}: data[{index}]: is not a JSON object")
            yield from entries(item, f"{where}: data[{index}]", engine)
        return
    value = _with_plain_cells(value)
    if str(value.get("type")).upper() != _GENERATION:
        yield Entry(where, left_out="no chat request")
        return

    # 2) The request: model parameters, and the input, which is a request body or bare messages.
    given = decoded(value.get("input"))
    output, told = decoded(value.get("output")), decoded(_either(value, "model_parameters"))
    parameters, continues = _parameters(told), _is_of_responses_api(output, told)
    answered = False if continues else is_of_messages_api(output)
    request, reason, others = _request(given, parameters, engine, answered)
    reason = _refusal(value, given, request) or reason
    metadata = decoded(value.get("metadata"))
    # LangChain's client of the Messages API joins messages of one role, moves the system's and drops names.
    if reason is None and isinstance(metadata, Mapping) and _plain_cell(metadata.get("ls_provider")) == "anthropic":
        reason = "messages in an unread form"
    if continues and reason == "raw prompt":
        reason = "no chat request"

    # 3) What its log may lack, as the number of tokens shows; labels; a session, or else a trace, is a thread.
    timing, answer, unknown = _timing(value), _answer(value.get("output")), None
    if _is_of_another_instrumentation(metadata, told):
        unknown = PARTS_UNKNOWN
    elif continues:
        unknown = HISTORY_UNKNOWN
    elif reason is None and _lacks_tools(request, given, answer):
        unknown = TOOLS_UNKNOWN
    # None of Langfuse's own clients logs an `extra_body`; some hold lists as they were a while after they were sent.
    if reason is None and not timing.prompt_tokens:
        if unknown in _UNCOUNTED:
            reason = _UNCOUNTED[unknown]
        elif unknown is None and _ends_with_an_answer(request, answer):
            reason = "answer at the end of its messages"
    if unknown is None and _may_be_of_own_code(given, value, parameters):
        unknown = PARTS_UNKNOWN
    line = labels(metadata, value) | {unknown or ARGUMENTS_UNKNOWN: True, UNSET_AS_ONE: _unset_as_one(parameters)}
    thread = _either(value, "session_id") or _either(value, "trace_id")
    if thread:
        line.setdefault("group", thread)

    # 4) The messages and the answer, where they are text.
    if reason is None and (mark := _replaced(request["messages"])):
        reason = "text cut by the log" if mark == _CUT else "message part that is not text"
    if reason is None and _are_rewritten(request.get("tools")):
        reason = "text cut by the log"
    if reason is None and settings_beside(request, given, value, parameters):
        reason = "settings beside the request"

    def read(other: dict[str, Any]) -> dict[str, Any]:
        return _request(other, parameters, engine, answered)[0]

    if reason is None and conflicting_request(request, read, value, given, parameters):
        reason = "another request beside it"
    if reason is None:
        request, *others = as_sent([request, *others], answer)
        others += continued([request, *others])
        line |= {"request": request, "messages": with_answer(request["messages"], answer)}
    yield Entry(where, line, reason, timing, others=others)


def _with_plain_cells(value: dict[str, Any]) -> dict[str, Any]:
    """A row of which every cell is JSON, texts in quotes too, as the pages' CSV long was written: as plain cells."""
    if not str(value.get("type")).startswith('"'):
        return value
    return {name: _plain_cell(cell) for name, cell in value.items()}


def _plain_cell(cell: Any) -> Any:
    try:
        return json_within(cell) if isinstance(cell, str) and cell.startswith('"') else cell
    except ValueError:
        return cell


def _either(value: Mapping[str, Any], name: str) -> Any:
    """Read a field under its name in exports (snake case) or in the API (camel case)."""
    first, *rest = name.split("_")
    return value.get(name, value.get(first + "".join(part.capitalize() for part in rest)))


def _refusal(value: Mapping[str, Any], given: Any, request: Mapping[str, Any]) -> Reason | None:
    """Reason why a generation is no chat request that was answered; None: it may be one."""
    # A text is the model's own, even where it reads like an error.
    output = decoded(value.get("output"))
    error = output.get("error") if isinstance(output, dict) else None
    if str(value.get("level")).upper() == "ERROR" or isinstance(error, dict) or _is_error(output):
        return "failed request"
    if given in (None, "", [], {}):
        return "no text logged"
    if isinstance(given, str) and given.startswith(_CUT):
        return "text cut by the log"
    if isinstance(given, str):
        return "messages in an unread form" if given.lstrip()[:1] in ("[", "{") else "raw prompt"
    if isinstance(given, dict) and given.get("prompt") and "messages" not in given:
        return "raw prompt"
    if not request.get("tools") and decoded(_either(value, "tool_definitions")) not in (None, "", {}, []):
        return "tools without their definitions"
    return None


def _is_of_responses_api(output: Any, parameters: Any) -> bool:
    """Whether an answer came from the Responses API, whose requests may continue a response that the server keeps: by
    its items and parts, or by what is set."""
    given = parameters if isinstance(parameters, dict) else {}
    if isinstance(output, dict) and output.get("object") == "response":
        return True
    if _OF_RESPONSES & given.keys():
        return True
    items = [item for item in (output if isinstance(output, list) else [output]) if isinstance(item, dict)]
    parts = [part for item in items for part in _listed(item.get("content")) if isinstance(part, dict)]
    return any(_ITEMS.fullmatch(str(item.get("type"))) for item in items) or any(
        part.get("type") == "output_text" or "annotations" in part for part in parts
    )


def _is_of_another_instrumentation(metadata: Any, parameters: Any) -> bool:
    """Whether another library than Langfuse's own logged a generation. None of them logs all that was sent.

    Langfuse keeps the scope of each span of OpenTelemetry among its metadata, and attributes of those of others; newer
    servers have paths there in the place of objects. Its older exporter for the AI SDK keeps that SDK's settings alone.
    """
    fields = {str(name): decoded(item) for name, item in metadata.items()} if isinstance(metadata, Mapping) else {}
    scope = fields.get("scope")
    name = scope.get("name") if isinstance(scope, Mapping) else fields.get("scope.name")
    kept = {path.partition(".")[0] for path in fields}
    of_a_span = isinstance(scope, Mapping) or "scope.name" in fields or "resourceAttributes" in kept
    own = str(name).startswith(_OWN_SCOPE) and "attributes" not in kept
    # LiteLLM's callback sends through Langfuse's client, and logs no system prompt of a call of `/v1/messages`.
    of_litellm = any(name.startswith("litellm_") for name in fields)
    return (
        (of_a_span and not own)
        or of_litellm
        or (isinstance(parameters, Mapping) and bool(_OF_AI_SDK & parameters.keys()))
    )


def _may_be_of_own_code(given: Any, value: Mapping[str, Any], parameters: Mapping[str, Any]) -> bool:
    """Whether an observation may be what someone's own code handed to Langfuse's client (`@observe`, or a plugin),
    perhaps without the tools: its wrapper for Python logs both penalties, that for JavaScript a body, and LangChain's
    handlers what LangChain says of a model. Without its metadata a body may be anyone's."""
    metadata = decoded(value.get("metadata"))
    body = isinstance(given, Mapping) and "messages" in given and "metadata" in value
    of_langchain = isinstance(metadata, Mapping) and any(str(name).startswith("ls_") for name in metadata)
    return not (body or of_langchain or parameters.keys() >= _PENALTIES)


def _lacks_tools(request: Mapping[str, Any], given: Any, answer: Any) -> bool:
    """Whether a request that names no tools may have had some: its answer calls one, or bare messages (`given`), beside
    which tools have no place, have calls."""
    bare = not (isinstance(given, dict) and "messages" in given)
    said = [answer, *(request["messages"] if bare else ())]
    return not request.get("tools") and any(isinstance(one, Mapping) and bool(one.get("tool_calls")) for one in said)


def _replaced(value: Any) -> str | None:
    """The mark that a client library of Langfuse wrote in place of a text, or inside it in place of a file; None."""
    if isinstance(value, str):
        return _CUT if value.startswith((_CUT, _NO_MEDIA)) else _MEDIA if _MEDIA in value else None
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return next(filter(None, map(_replaced, inner)), None)


def _are_rewritten(tools: Any) -> bool:
    """Whether definitions of tools hold what a client library of Langfuse wrote in place of something else."""
    if isinstance(tools, str):
        number = _LONG_NUMBER.fullmatch(tools) is not None and abs(int(tools)) >= _MOST_EXACT
        return number or tools in _TOO_DEEP or _replaced(tools) is not None
    inner = tools.values() if isinstance(tools, Mapping) else tools if isinstance(tools, list) else ()
    return any(map(_are_rewritten, inner))


def _ends_with_an_answer(request: Mapping[str, Any], answer: Any) -> bool:
    """Whether a request's last message is an assistant's, and not its own answer: a prefill, which an `extra_body` may
    continue, or what was put into the list behind a later request."""
    last = request["messages"][-1]
    return last.get("role") == "assistant" and len(as_sent([request], answer)) == 1


def _is_not_given(tools: Any) -> bool:
    """Whether tools are what Langfuse's client for Python writes of OpenAI's `NOT_GIVEN` and `omit`."""
    return isinstance(tools, Mapping) and tools.keys() <= {"__module__"}


def _is_error(output: Any) -> bool:
    return isinstance(output, dict) and "error" in (output.get("object"), output.get("type"))


def _request(
    given: Any, parameters: dict[str, Any], engine: str | None, answered: bool | None
) -> tuple[dict[str, Any], Reason | None, list[dict[str, Any]]]:
    """The chat-completions request of an input: messages, one of them, or a body that holds them; and what else it may
    be.

    `answered`: whether its output is a response of the Messages API, or else of chat completions; None: neither.
    """
    # 1) The body. What a client's own settings hold was sent as the client sends it; an input may be what was sent.
    parameters = body_of(parameters)
    if "stop_sequences" in parameters:  # LangChain's name
        parameters["stop"] = parameters.pop("stop_sequences")
    body = given if isinstance(given, dict) else {"messages": given}
    if "messages" not in body and "role" in body:
        body = {"messages": [body]}
    body = {name: system_prompt(item) if name == "system" else decoded(item) for name, item in body.items()}
    if _is_not_given(body.get("tools")):
        del body["tools"]
    stands = read_otherwise(body)
    bodies = [body_of(body)] if stands is None else [body_of(body), stands]

    # 2) The whole of each, in the shape of chat completions.
    requests: list[dict[str, Any]] = []
    for one in bodies:
        messages, tools = _messages(one.get("messages"))
        if messages is None:
            return {}, "messages in an unread form", []
        request = parameters | one
        if tools and not request.get("tools"):
            request["tools"] = tools
        # What else each message may have been sent as.
        requests.append(request | {"messages": [_shown(message) for message in messages]})
        for applies, otherwise in _OTHERWISE:
            if any(map(applies, messages)):
                sent = [otherwise(message) if applies(message) else message for message in messages]
                requests.append(request | {"messages": [_shown(message) for message in sent]})
    return anthropic.chat_requests(requests, answered, engine)


def _messages(given: Any) -> tuple[list[dict[str, Any]] | None, list[Any]]:
    """Messages in the shape of chat completions (None: there are none, or some are in another form), and the tools that
    LangChain's handler lists behind them."""
    # A list of one list is what LangChain hands on.
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], list):
        given = given[0]
    items = [decoded(message) for message in given] if isinstance(given, list) else []
    read = [_message(item) for item in items]
    if not read or not all(read):
        return None, []
    # From 5.2 on its handler logs names of results without a type: calls in LangChain's own form tell whose they are.
    own = {"type": "ToolMessage"} if any(map(_has_own_calls, items)) else {}
    found = [message | own if message["role"] == "tool" else message for message in read if message is not None]
    tools = [message["content"] for message in found if _is_tool(message)]
    return [message for message in found if not _is_tool(message)] or None, tools


def _message(given: Any) -> dict[str, Any] | None:
    """A message in the shape of chat completions; None: it is none, or its content is an object and no tool."""
    if not isinstance(given, dict):
        return None
    # LangChain's own forms: a constructor with its arguments, or a type and data.
    kind, path = given.get("type"), given.get("id")
    if kind == "constructor" and isinstance(path, list) and path:
        kind = path[-1]
    inner = next((given[name] for name in ("kwargs", "data") if isinstance(given.get(name), dict)), given)
    role = given.get("role", kind)
    # Its handler for JavaScript writes `human` for the role of a ChatMessage, whatever that is.
    role = _ROLES.get(role, role) if isinstance(role, str) and given.get("role") != "human" else None
    if role not in _ROLES.values():
        return None

    # LangChain's clients send little of `additional_kwargs`: a name, the role of a developer, calls.
    extra = inner["additional_kwargs"] if isinstance(inner.get("additional_kwargs"), dict) else {}
    role = extra.get("__openai_role__", role) if role == "system" else role
    message = {**inner, "role": role, "type": kind, "additional_kwargs": extra}
    if role != "tool" and message.get("name") is None and "name" in extra:
        message["name"] = extra["name"]
    # Events of OpenTelemetry have a call's id under `id`, and the tool's name, which clients do not send.
    if given.get(_EVENT) == "gen_ai.tool.message" and message.get("tool_call_id") is None:
        message |= {"tool_call_id": given.get("id"), "name": None}
    # A content of text is that text, also where it reads like parts: so look results of MCP's tools.
    calls = _calls(inner, extra)
    if calls or message.get("tool_calls") != []:
        message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = calls
    return message if not isinstance(message.get("content"), dict) or _is_tool(message) else None


def _calls(message: Mapping[str, Any], extra: Mapping[str, Any]) -> list[Any]:
    """Tool calls of a message in the shape of chat completions, which attributes of OpenTelemetry hold as text.
    LangChain has those apart whose arguments are no JSON, and sends them behind the others; without either, what the
    API gave it (`extra`)."""
    found = [*_listed(decoded(message.get("tool_calls"))), *_listed(message.get("invalid_tool_calls"))]
    if found:
        return [_call(call) for call in found]
    known = ("id", "type", "function")
    return [
        {name: call[name] for name in known if name in call} if isinstance(call, Mapping) else call
        for call in _listed(extra.get("tool_calls"))
    ]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_tool(message: Mapping[str, Any]) -> bool:
    """Whether a message stands for a tool that could be called: its content is the definition."""
    content = message.get("content")
    if message["role"] != "tool" or message.get("tool_call_id") or not isinstance(content, dict):
        return False
    return isinstance(content.get("function"), dict) or ("name" in content and bool(content.keys() & _OF_TOOLS))


def _has_own_calls(given: Mapping[str, Any]) -> bool:
    """Whether a message has calls as LangChain holds them."""
    calls = [*_listed(given.get("tool_calls")), *_listed(given.get("invalid_tool_calls"))]
    return any(isinstance(call, Mapping) and "args" in call for call in calls)


def _has_own_name(message: Mapping[str, Any]) -> bool:
    """Whether a message of LangChain's is a result of a tool and has its name."""
    return message["role"] == "tool" and message["type"] in ("tool", "ToolMessage") and message.get("name") is not None


def _has_own_texts(message: Mapping[str, Any]) -> bool:
    """Whether a message has no parts but texts as the Responses API calls them, and perhaps bare ones."""
    parts = _listed(message.get("content"))
    return any(map(_is_own_text, parts)) and all(_is_own_text(part) or isinstance(part, str) for part in parts)


def _is_own_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("input_text", "output_text")


def _shown(message: dict[str, Any]) -> dict[str, Any]:
    """A message with texts of the Responses API as the texts that they are shown as."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    return {**message, "content": [{**part, "type": "text"} if _is_own_text(part) else part for part in parts]}


def _unsent_by_langchain(message: Mapping[str, Any]) -> list[Any]:
    """Parts of an assistant's message that LangChain's client for OpenAI's API does not send."""
    parts = _listed(message.get("content")) if message["role"] == "assistant" else []
    return [part for part in parts if isinstance(part, dict) and part.get("type") in _LANGCHAINS_OWN]


def _as_sent_by_langchain(message: dict[str, Any]) -> dict[str, Any]:
    unsent = _unsent_by_langchain(message)
    return {**message, "content": [part for part in message["content"] if part not in unsent] or None}


def _has_several_texts(message: Mapping[str, Any]) -> bool:
    parts = _listed(message.get("content")) if message["role"] == "assistant" else []
    return len(parts) > 1 and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts)


def _with_one_text(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": "".join(part["text"] for part in message["content"])}


def _parts_as_text(message: Mapping[str, Any]) -> list[Any]:
    """Parts of a content that is logged as one text; none of a tool's, whose results are such texts themselves."""
    parts = decoded(message["content"]) if isinstance(message.get("content"), str) and message["role"] != "tool" else []
    some = isinstance(parts, list) and all(isinstance(part, dict) and "type" in part for part in parts)
    return parts if some else []


def _own_thoughts(message: Mapping[str, Any]) -> str | None:
    """Reasoning that LangChain keeps beside an assistant's message; None: it keeps none."""
    extra = message["additional_kwargs"]
    return next((extra[name] for name in ("reasoning_content", "reasoning") if isinstance(extra.get(name), str)), None)


def _has_own_thoughts(message: Mapping[str, Any]) -> bool:
    return message["role"] == "assistant" and bool(_own_thoughts(message))


def _has_broken_calls(message: Mapping[str, Any]) -> bool:
    return bool(_listed(message.get("invalid_tool_calls")))


def _without_broken_calls(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "tool_calls": message["tool_calls"][: -len(message["invalid_tool_calls"])]}


_OTHERWISE: tuple[tuple[Callable[[Mapping[str, Any]], bool], Callable[[dict[str, Any]], dict[str, Any]]], ...] = (
    # The Responses API shows texts of its own types, and vLLM's chat completions none but these.
    (_has_own_texts, lambda message: {**message, "content": []}),
    # LangChain has names of results of tools: its client for Python does not send them, that for JavaScript does.
    (_has_own_name, lambda message: {**message, "name": None}),
    # Its clients for OpenAI's API and DeepSeek's send no reasoning back; others may.
    (_has_own_thoughts, lambda message: {**message, "reasoning_content": _own_thoughts(message)}),
    # Calls whose arguments are no JSON its client for Python sends, too.
    (_has_broken_calls, _without_broken_calls),
    # Of thoughts among an assistant's parts its client for OpenAI's API sends none, and others may.
    (lambda message: bool(_unsent_by_langchain(message)), _as_sent_by_langchain),
    # The AI SDK sends an assistant's texts as one, with nothing between them.
    (_has_several_texts, _with_one_text),
    # Attributes of OpenTelemetry hold a content of parts as text.
    (lambda message: bool(_parts_as_text(message)), lambda message: {**message, "content": _parts_as_text(message)}),
)
"""Which messages may have been sent otherwise than they are read, and as what."""


def _call(call: Any) -> Any:
    """A tool call in the shape of chat completions: of a LangChain one (`args`), or of a flat one, the arguments are an
    object, or a text that is none."""
    name = next((name for name in ("args", "arguments") if isinstance(call, dict) and name in call), None)
    if name is None or "function" in call:
        return call
    arguments = call[name] if isinstance(call[name], str) else json.dumps(call[name])
    function = {"name": call.get("name"), "arguments": arguments}
    return {"id": call.get("id"), "type": "function", "function": function}


def _answer(output: Any) -> dict[str, Any] | None:
    """Answer of a generation: a text, a message or a whole response. JSON of any other form is text of the model."""
    value = decoded(output)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, dict) and "choices" in value:
        return answer_of(value)
    if isinstance(value, dict) and value.keys() & _ANSWER_FIELDS and value.get("role", "assistant") in _ASSISTANT:
        message = _shown(_message({**value, "role": "assistant"}) or {})
        return answer_of({"content": value["content"]} if _has_blocks(value) else {"choices": [{"message": message}]})
    return answer_of({"choices": [{"message": {"content": output if isinstance(output, str) else None}}]})


def _has_blocks(value: Mapping[str, Any]) -> bool:
    return isinstance(value.get("content"), list) and not value.get("tool_calls")


def _parameters(given: Any) -> dict[str, Any]:
    """Model parameters, with numbers and objects that were logged as text converted; an infinite limit is dropped."""
    found = {name: decoded(value) for name, value in given.items()} if isinstance(given, dict) else {}
    if "max_output_tokens" in found:  # of the Responses API
        found["max_completion_tokens"] = found.pop("max_output_tokens")
    # Of the AI SDK's spans Langfuse has names of its own; `system` is the provider, such as `openai.chat`.
    if _OF_AI_SDK & found.keys():
        found.setdefault("max_tokens", found.get("maxTokens"))
        if re.fullmatch(r"[\w.-]+", str(found.get("system", ""))):
            del found["system"]
    for name in (*_NUMBERS, *_LIMITS):
        value = number(found.pop(name, None))
        if value is not None:
            found[name] = int(value) if name == "top_k" or name in _LIMITS else value
    return found


def _unset_as_one(parameters: Mapping[str, Any]) -> tuple[str, ...]:
    """Sampling settings of 1 that Langfuse's client for Python writes whether or not the request had them: it alone
    always writes both penalties, too."""
    wrapped = parameters.keys() >= _PENALTIES
    return tuple(name for name in ("temperature", "top_p") if wrapped and parameters.get(name) == 1)


def _timing(value: Mapping[str, Any]) -> Timing:
    # Counts stand in one of three places, under the names of one of several SDK versions.
    usages = [decoded(_either(value, "usage_details")), decoded(value.get("usage")), value]
    prompt_tokens, answer_tokens = (
        next((found for usage in usages for name in names if (found := count(usage, name)) is not None), None)
        for names in (_PROMPT_COUNTS, _ANSWER_COUNTS)
    )
    # Langfuse takes what came from a cache, and other kinds of tokens, out of `input` and counts them beside it.
    details = usages[0]
    if prompt_tokens is not None and isinstance(details, dict) and details.keys() & {"input", "input_tokens"}:
        apart = [name for name in details if "input" in name and name not in _PROMPT_COUNTS]
        prompt_tokens += sum(count(details, name) or 0 for name in apart)
    started, ended = seconds(_either(value, "start_time")), seconds(_either(value, "end_time"))
    return Timing(started, ended, None, prompt_tokens, answer_tokens)
