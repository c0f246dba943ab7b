"""Fields of a request beside its messages: those that reach the chat template, as the engine passes them there, and
those that keep its prompt from being made again.

vLLM (0.32 and 0.33) is followed, and SGLang (0.5.23) for its own log or where the source says so. `docs/logs.md` has
the whole list of fields.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ..errors import InputError
from ..specdec.sampling_settings import API_DEFAULTS, SamplingSettings
from .chat_template import arguments_of_sglang
from .conversation import OTHER_READINGS, Engine, Message, PromptEnd
from .logs.anthropic import MESSAGES_API, MessagesForm
from .logs.chat import MOST_TOKENS, LeftOut, Reason, decoded
from .logs.parsing import flag, number
from .settings import RESERVED_ARGS

M = TypeVar("M", bound=BaseModel)
Lookup = Callable[[str], Any]
"""Looks up a field by name in the line, then in its `request` object; None: neither has it."""

SAMPLING_FIELDS = tuple(SamplingSettings.model_fields)
LIMIT_FIELDS = ("max_completion_tokens", "max_tokens", "max_new_tokens")  # engines know the last one in no body
_SGLANG_MOST_PENALTY = 2.0
_TOKENS: dict[Engine, tuple[str, ...]] = {
    "vllm": ("prompt_token_ids", "input_ids", "prompt_embeds", "input_embeds"),
    "sglang": ("input_ids", "input_embeds"),
}
_ADAPTERS: dict[Engine, tuple[str, ...]] = {
    "vllm": ("lora_path", "lora_request", "lora_name"),
    "sglang": ("lora_path",),
}
_SET_BY_ENGINE = ("add_generation_prompt", "continue_final_message")
_OURS_OR_THE_ENGINES = (*_SET_BY_ENGINE, MESSAGES_API, OTHER_READINGS)
_REFUSED_BY_SGLANG = ("tools", *_SET_BY_ENGINE)
_EFFORTS = (
    "none",
    "minimal",
    "low",
    "medium",
    "high",
    "xhigh",
    "ultra",
    "max",
)  # SGLang takes numbers from 0 to 0.99, too
_YES = ("1", "true", "yes", "y", "on")
_SGLANG_ROLES = ("system", "developer", "assistant", "tool", "function", "latest_reminder", "root")
"""Roles that SGLang takes in letters of any size, beside `user`."""
_SGLANG_FIELDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("tool_call_id", "name", "reasoning_content"), str),
    "tool_calls": list,
}
"""Fields of a message beside role and content that SGLang shows a template, and their types."""
_CALL_FIELDS: dict[str, type | tuple[type, ...]] = {"id": str, "index": int, "type": str, "function": dict}
_SCHEMA_TYPES = ("null", "boolean", "object", "array", "number", "string", "integer")
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = (
    *("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
_MOST_EFFORT = 0.99
_UNSET = (None, "auto")  # values of template arguments that vLLM leaves out
_UNFOLLOWED = (
    *("frequency_penalty", "presence_penalty", "logit_bias", "bad_words", "allowed_token_ids", "use_beam_search"),
    *("stop", "stop_token_ids", "stop_regex", "min_tokens", "min_new_tokens", "ignore_eos", "thinking_token_budget"),
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("regex", "ebnf", "json_schema", "structural_tag", "grammar"),
    *("custom_logit_processor", "logits_processors", "watermarking", "watermark", "repetition_detection"),
)

_NUMBERS = frozenset(
    (
        *(*SAMPLING_FIELDS, *LIMIT_FIELDS, "prompt_tokens", "answer_tokens", "truncate_prompt_tokens"),
        *("frequency_penalty", "presence_penalty", "min_tokens", "thinking_token_budget"),
    )
)
_OF_PROMPT = ("add_special_tokens", "add_generation_prompt", "continue_final_message")
_FLAGS = frozenset((*_OF_PROMPT, "ignore_eos", "use_beam_search", "watermarking"))
_OBJECTS = frozenset(
    (
        *("request", "extra_body", "chat_template_kwargs", "documents", "reasoning", "reasoning_effort"),
        *("response_format", "tool_choice", "logit_bias", "session_params", "kv_transfer_params"),
    )
)


def from_table(line: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, those of a request as values where a table holds them as text, and flags as engines take them."""
    found = {name: _field_of_table(name, value) if isinstance(value, str) else value for name, value in line.items()}
    for name in _FLAGS.intersection(found):
        value = found[name]
        found[name] = flag(value.strip() if isinstance(value, str) else value)
    return found


def _field_of_table(name: str, text: str) -> Any:
    if name in _OBJECTS:
        return decoded(text)
    found = number(text) if name in _NUMBERS else None
    if found is None:
        return text
    return int(found) if found.is_integer() else found


def refuse_what_cannot_be_made_again(
    lookup: Lookup, request: Mapping[str, Any], logged_prompt_tokens: int | None, engine: Engine, where: str
) -> None:
    """Raise LeftOut for a request whose prompt the target's own template does not make."""
    arguments = lookup("chat_template_kwargs")
    own = isinstance(arguments, dict) and bool(arguments.get("chat_template"))
    # SGLang names an adapter behind the model, and passes over fields that are vLLM's.
    adapted, vllm = engine == "sglang" and ":" in str(request.get("model", "")), engine == "vllm"
    reasons: dict[Reason, bool] = {
        "chat template of its own": own or (vllm and bool(lookup("chat_template"))),
        "prompt given as tokens": any(request.get(name) is not None for name in _TOKENS[engine]),
        "prompt cut to a number of tokens": vllm and _cut(lookup("truncate_prompt_tokens"), logged_prompt_tokens),
        "special tokens added to the prompt": vllm and request.get("add_special_tokens") is True,
        "answered by an adapter": adapted or any(request.get(name) for name in _ADAPTERS[engine]),
        "prompt continued from another request": bool(request.get("session_params")),
        "request that the engine refuses": vllm and any(lookup(name) not in (None, True, False) for name in _OF_PROMPT),
    }
    for reason, applies in reasons.items():
        if applies:
            raise LeftOut(where, reason)


def _cut(limit: Any, logged: int | None) -> bool:
    """Whether a limit may have cut the prompt; -1 cuts at the context, past which no prompt is asked anyway."""
    return limit is not None and limit != -1 and not (isinstance(limit, int) and logged is not None and logged < limit)


def prompt_of(
    raw: Sequence[Any], lookup: Lookup, request: Mapping[str, Any], engine: Engine, where: str
) -> tuple[int, PromptEnd]:
    """Number of messages that are kept, and how the last prompt ends. A logged answer stays behind an opened turn only.

    `raw`: the line's messages, the logged answer among them; `request`: the body, whose own messages tell whether the
    assistant's last message is an answer or part of the prompt. Raises InputError for a request without messages,
    LeftOut for one with others than the line.
    """
    # 1) The prompt: without the answer, which the request's own messages lack.
    asked = decoded(request.get("messages"))
    if asked == []:
        raise InputError(f"{where}: messages is empty; must be a list of at least one")
    known = isinstance(asked, list)
    if isinstance(asked, list) and raw[: len(asked)] != asked:
        raise LeftOut(where, "another request beside it")
    answered = known and _answers_at_end(raw) > _answers_at_end(asked if isinstance(asked, list) else [])
    size = len(raw) - answered
    after_answer = size > 0 and _is_answer(raw[size - 1])

    # 2) What the request says of its end. SGLang knows nothing but a prefill, and that of the assistant only.
    if lookup("continue_final_message") is True and (after_answer or engine == "vllm"):
        return size, "prefill"
    if lookup("add_generation_prompt") is False and engine == "vllm":
        return size, "bare"
    return (size, "after_answer") if known and after_answer else (len(raw), "opened")


def _answers_at_end(messages: Sequence[Any]) -> int:
    return next((i for i, message in enumerate(reversed(messages)) if not _is_answer(message)), len(messages))


def _is_answer(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def lacks_call_ids(messages: Sequence[Message], prompt_end: PromptEnd) -> bool:
    """Whether a prompt has calls without an id: vLLM refuses them, and its Messages API names them by its clock."""
    answers = "assistant" if prompt_end == "opened" else None
    last = max((i for i, message in enumerate(messages) if message.role != answers), default=-1)
    calls = (call for message in messages[: last + 1] for call in message.tool_calls or ())
    return any(not isinstance(call.get("id"), str) for call in calls)


def template_args(lookup: Lookup, engine: Engine, where: str, reserved: Collection[str] = ()) -> dict[str, Any]:
    """Arguments that the chat template gets of a request: `chat_template_kwargs`, `documents`, `reasoning_effort`, and
    what the engine makes of the latter.

    `reserved`: names with a place of their own that the source lets its requests set. Raises LeftOut for others.
    """
    given = lookup("chat_template_kwargs") or {}
    if not isinstance(given, dict):
        raise InputError(f"{where}: chat_template_kwargs is not an object")
    # vLLM passes over a name without a value, and sets some by itself. The reader of Anthropic's API says by an empty
    # list of tools that the request has one.
    allowed = set(reserved) - set(_REFUSED_BY_SGLANG if engine == "sglang" else ())
    there = {name for name, value in given.items() if engine == "sglang" or value not in _UNSET}
    told = {"tools"} if given.get("tools") == [] and engine == "vllm" else set()
    if (there & RESERVED_ARGS) - allowed - told:
        raise LeftOut(where, "reserved template argument")
    found = {name: value for name, value in given.items() if name not in _OURS_OR_THE_ENGINES}
    documents, effort = lookup("documents"), lookup("reasoning_effort")
    if engine == "sglang":
        own = {name: value for name, value in found.items() if name != "reasoning_effort" or value is not None}
        return _reasoning_of_sglang(lookup("reasoning"), effort, where) | own
    if documents is not None:
        if not isinstance(documents, list) or not all(isinstance(document, dict) for document in documents):
            raise InputError(f"{where}: documents is not a list of objects")
        found["documents"] = documents
    # Any effort but none switches thinking on, where the request does not say so itself.
    if effort is not None:
        found.setdefault("enable_thinking", effort != "none")
        found["reasoning_effort"] = effort
    if isinstance(form := lookup(MESSAGES_API), MessagesForm):
        found[MESSAGES_API] = dict(form)
    return {name: value for name, value in found.items() if value not in _UNSET}


def _reasoning_of_sglang(reasoning: Any, effort: Any, where: str) -> dict[str, Any]:
    """Template arguments that SGLang makes of `reasoning` and `reasoning_effort`. Raises LeftOut for others."""
    thinking: bool | None = None
    if isinstance(reasoning, dict):
        named = reasoning.get("effort") if reasoning.get("effort") is not None else reasoning.get("reasoning_effort")
        effort = named if named is not None else effort
        enabled = reasoning.get("enabled") if reasoning.get("enabled") is not None else reasoning.get("enable")
        thinking = True if (enabled.strip().lower() in _YES if isinstance(enabled, str) else enabled) else None
    if effort is None:
        return {} if thinking is None else {"thinking": thinking, "enable_thinking": thinking}
    if effort not in _EFFORTS:
        share = None if isinstance(effort, bool) else number(effort)
        if share is None or not 0 <= share <= _MOST_EFFORT:
            raise LeftOut(where, "request that the engine refuses")
        effort = share
    return {"thinking": effort != "none", "enable_thinking": effort != "none", "reasoning_effort": effort}


def message_of_sglang(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of a message that SGLang's schema has; null is absent, a content of null is empty. Raises LeftOut for
    one that it refuses, and for fields that a template might be shown and that no message here holds."""
    # 1) A user's message has a role and a content, and other fields are dropped.
    role = str(raw["role"])
    if role == "user":
        return {"role": role, "content": raw.get("content")}
    role = role.lower()
    found = {name: raw[name] for name in _SGLANG_FIELDS if raw.get(name) is not None}
    if role not in _SGLANG_ROLES or not _of_types(found, _SGLANG_FIELDS):
        raise LeftOut(where, "request that the engine refuses")
    if raw.get("tools") is not None:
        raise LeftOut(where, "tools inside a message")
    theirs = any(name in found for name in ("tool_calls", "reasoning_content")) and role != "assistant"
    if theirs or any(raw.get(name) is not None for name in ("phase", "prefix")):
        raise LeftOut(where, "messages in an unread form")

    # 2) Calls of the assistant.
    if not all(map(_sglang_takes, found.get("tool_calls", ()))):
        raise LeftOut(where, "request that the engine refuses")
    content = raw.get("content")
    return {"role": role, "content": "" if content is None else content, **found}


def _of_types(fields: Mapping[str, Any], types: Mapping[str, type | tuple[type, ...]]) -> bool:
    return all(fields.get(name) is None or isinstance(fields[name], types[name]) for name in types)


def _sglang_takes(call: Any) -> bool:
    """Whether SGLang takes a call of the history: its arguments are an object, the JSON text of one, or absent."""
    function = call.get("function") if isinstance(call, dict) else None
    if (
        not isinstance(function, dict)
        or not _of_types(call, _CALL_FIELDS)
        or call.get("type", "function") != "function"
    ):
        return False
    if not _of_types(function, {"name": str, "arguments": (str, dict)}):
        return False
    try:
        return not isinstance(function.get("arguments"), str) or bool([arguments_of_sglang(function["arguments"])])
    except ValueError:
        return False


def shown_tools(lookup: Lookup, engine: Engine, where: str) -> list[dict[str, Any]] | None:
    """Tools as the engine shows them to the template: in OpenAI's shape; vLLM puts fields in the order of its schema,
    SGLang leaves them in that of the request.

    Tools in Anthropic's shape (`input_schema`) and flat ones are brought to it. Raises LeftOut for other kinds.
    """
    tools, choice = decoded(lookup("tools")), lookup("tool_choice")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InputError(f"{where}: tools is not a list of objects")
    functions = [_function(tool, engine, f"{where}: tools[{i}]") for i, tool in enumerate(tools)]
    # A tool whose definition is to be loaded later may say so beside its function; then both say so.
    deferred = [flag(tool.get("defer_loading")) if isinstance(tool.get("function"), dict) else None for tool in tools]
    for function, defer in zip(functions, deferred):
        if defer is not None and function.get("defer_loading") is None:
            function["defer_loading"] = defer
    # vLLM shows tools whatever the choice is; SGLang none, or only the named one.
    if engine == "vllm":
        return [_tool_of_vllm(*each) for each in zip(functions, deferred)]
    if any(_is_rewritten(function.get("parameters")) for function in functions):
        raise LeftOut(where, "tools that the engine rewrites")
    kinds = [tool.get("type", "function") if isinstance(tool.get("function"), dict) else "function" for tool in tools]
    name = choice["function"].get("name") if _names_a_function(choice) else None
    named = [each for each in zip(functions, deferred, kinds) if name in (None, each[0]["name"])]
    return [_tool_of_sglang(*each) for each in named] or None if choice != "none" else None


def _function(tool: dict[str, Any], engine: Engine, where: str) -> dict[str, Any]:
    """The function that a tool is, with `name`, and `description`, `parameters` and `strict` where given."""
    function, wrapped = dict(tool), isinstance(tool.get("function"), dict)
    if wrapped:
        function = dict(tool["function"])
    elif "input_schema" in tool:
        function = {**tool, "parameters": tool["input_schema"]}
    # Tools that a server runs itself have types of their own, and no definition that a template could show. SGLang
    # takes a function whatever its type.
    kinds = (None, "function", "custom") if "input_schema" in tool else (None, "function")
    if tool.get("type") not in kinds and (engine == "vllm" or not wrapped):
        raise LeftOut(where, "tools that are not functions")
    if not isinstance(function.get("name"), str):
        raise InputError(f"{where}: has no name")
    return function | {name: flag(function[name]) for name in ("strict", "defer_loading") if name in function}


def _tool_of_vllm(function: Mapping[str, Any], deferred: Any) -> dict[str, Any]:
    shown = {name: function.get(name) for name in ("name", "description", "parameters")}
    shown |= {name: function[name] for name in ("strict", "defer_loading") if function.get(name) is not None}
    beside = {} if deferred is None else {"defer_loading": deferred}
    return {"type": "function", "function": shown, **beside}


def _tool_of_sglang(function: Mapping[str, Any], deferred: Any, kind: str) -> dict[str, Any]:
    fields = ("description", "name", "parameters", "strict", "defer_loading")
    # Fields in the order of the request, then the schema's others; what was said beside the function is one of these.
    order = [name for name in function if name in fields]
    if deferred is not None and deferred == function["defer_loading"] and order[-1] == "defer_loading":
        order.pop()
    order += fields
    shown = {name: function.get(name) for name in order if name in fields[:3] or function.get(name) is not None}
    return {"type": kind, "function": shown, "defer_loading": deferred}


def _is_rewritten(schema: Any) -> bool:
    """Whether SGLang would write another type into a schema of parameters (`varchar`: a string), or a type once that a
    list names twice."""
    if isinstance(schema, list):
        return any(map(_is_rewritten, schema))
    if not isinstance(schema, dict):
        return False
    kinds = schema["type"] if isinstance(schema.get("type"), list) else [schema.get("type")]
    unknown = any(isinstance(kind, str) and kind not in _SCHEMA_TYPES for kind in kinds)
    if unknown or any(kind in kinds[:place] for place, kind in enumerate(kinds)):
        return True
    inner = [schema[name].values() for name in _SCHEMAS_BY_NAME if isinstance(schema.get(name), dict)]
    inner += [schema[name] for name in _SCHEMA_LISTS if isinstance(schema.get(name), list)]
    return any(map(_is_rewritten, (*itertools.chain(*inner), *(schema.get(name) for name in _SCHEMAS))))


def _names_a_function(choice: Any) -> bool:
    return isinstance(choice, dict) and isinstance(choice.get("function"), dict)


def unfollowed(request: Mapping[str, Any]) -> Iterator[str]:
    """Names of the request's fields that shape its answer and that a capture does not follow.

    None of them changes the prompt. Answers are drawn without penalties, biases and grammars, and go on past stop
    strings, up to the token limit.
    """
    yield from (name for name in _UNFOLLOWED if request.get(name))
    form = request.get("response_format")
    if isinstance(form, dict) and form.get("type") not in (None, "text"):
        yield "response_format"
    choice = request.get("tool_choice")
    if choice == "required" or _names_a_function(choice):
        yield "tool_choice"


def draws_of(
    lookup: Lookup, engine: Engine, logged: bool, where: str
) -> tuple[SamplingSettings | None, Collection[str], int | None]:
    """How the answer was drawn: its settings (None: none are named), the names of those that the request names, and the
    most tokens (None: no limit).

    `logged`: the request stands in a log. Raises InputError, and LeftOut for what SGLang refuses after it logged it.
    """
    try:
        sampling, given = _sampling(lookup, where)
        limit = _max_new_tokens(lookup, engine, where)
        if engine == "sglang" and logged and not _sglang_draws(sampling, limit, lookup):
            raise LeftOut(where, "request that the engine refuses")
        return sampling, given, limit
    except InputError as error:
        if engine != "sglang" or not logged or isinstance(error, LeftOut):
            raise
        raise LeftOut(where, "request that the engine refuses") from None


def _sampling(lookup: Lookup, where: str) -> tuple[SamplingSettings | None, Collection[str]]:
    """Logged sampling settings (None: none are logged), and the names of those that are. Without a temperature, others
    were served at 1, the API's default, unless the model has one of its own."""
    given = {name: lookup(name) for name in SAMPLING_FIELDS if lookup(name) is not None}
    top_k = given.get("top_k")
    if top_k == -1 or (isinstance(top_k, int) and top_k > MOST_TOKENS):  # "off", and more than any vocabulary has
        given["top_k"] = 0
    return validated(SamplingSettings, {**API_DEFAULTS, **given}, where) if given else None, given


def _sglang_draws(sampling: SamplingSettings | None, limit: int | None, lookup: Lookup) -> bool:
    """Whether SGLang takes valid settings: of several grammars one at most, and none beside a forced call."""
    form, choice, least = lookup("response_format"), lookup("tool_choice"), number(lookup("min_tokens"))
    in_form = isinstance(form, dict) and form.get("type") in ("json_schema", "json_object", "structural_tag")
    grammars = sum((in_form, bool(lookup("regex")), bool(lookup("ebnf"))))
    forced = choice == "required" or _names_a_function(choice)
    if grammars > (0 if forced else 1) or (least is not None and limit is not None and least > limit):
        return False
    if sampling is None:
        return True
    return sampling.repetition_penalty <= _SGLANG_MOST_PENALTY and (lookup("top_k") != 0 or sampling.greedy)


def _max_new_tokens(lookup: Lookup, engine: Engine, where: str) -> int | None:
    for name in LIMIT_FIELDS:
        limit = lookup(name)
        if limit is None or (engine == "sglang" and name == "max_completion_tokens" and limit == 0):
            continue
        if engine == "sglang" and limit == 0 and not isinstance(limit, bool):
            raise LeftOut(where, "no token asked for")
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise InputError(f"{where}: {name} {quoted(limit)}; must be a whole number of at least 1")
        return min(limit, MOST_TOKENS)
    return None


def validated(model: type[M], values: dict[str, Any], where: str) -> M:
    """Values as a model; raises InputError that starts with `where` and names the first field that breaks a rule."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{where}: {field}: {first['msg'][:1].lower()}{first['msg'][1:]}") from None


def json_type(value: Any) -> str:
    """Name of a value's type in JSON, for a message."""
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null" if value is None else type(value).__name__)


def quoted(value: Any) -> str:
    """A value for a message, cut to 40 characters."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
