"""Chat-template rendering: what an engine's server shows its tokenizer's template of a request, and the prompt's ids.

vLLM is followed (0.32 and 0.33) and, where a conversation says so, SGLang:

| | vLLM | SGLang |
|---|---|---|
| parts of a content, where the template takes text | a line each, empty ones left out | a space between |
| where it loops over parts | all contents as parts, tools' results as text | contents as they were sent |
| a developer's message, where the template does not name that role | joins the system's, in front | stays |
| a line `x-anthropic-billing-header` in front of a system's text | left out | stays |
| an assistant's last message that belongs to the prompt | stays | becomes the user's |
| a prefill | the template's text up to its end | put after the opened turn, and tokenized by itself |
| reasoning sent back | `reasoning` and `reasoning_content` | `reasoning_content` alone, no `thinking` |
| a call, printed whole | as it was sent; arguments, then the name | all fields of the schema, null where absent |
| a developer's `tools`, where it has none | none | absent |
| other fields of a text part (`cache_control`), where it loops over parts | stay | dropped |
| `/v1/messages`: a system message among the others, where the template refuses one | joins the first one | no prompt |
| `/v1/messages`: thinking disabled, where the template tells no effort `none` from others | effort `low` | no prompt |
| a content that is an empty list, calls that are one | as if absent | stay |
| of several templates | the one for tools, where there are some | the first |
| a processor's template, other than the tokenizer's | without tools | always |
| tools that the template fails at | refused | shown once more, without their wrapper |
| arguments of a call: none | an empty object | null |
| empty text, no JSON, or JSON that is no object | an empty object | refused, so left out of the mix |

Arguments of tool calls that are text are decoded for the template.

A template that prints the time (`strftime_now`) is told that of the turn's request, in UTC: what its server's clock
showed then, and what every capture shows it.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import Any, NamedTuple

from jinja2 import TemplateError

from ..errors import InputError
from ..specdec.expressions import ids_of
from ..specdec.target_settings import TemplateLimits
from .conversation import OTHER_READINGS, Conversation, Engine, Message, PromptEnd, Turn
from .logs.anthropic import BILLING_HEADER, MESSAGES_API
from .template_process import PROCESS, TemplateTime, ask_of, render_in_process

_REFUSED = (
    *(TemplateError, ArithmeticError, TypeError, ValueError, RecursionError),
    *(MemoryError, SyntaxError, NameError, LookupError, AttributeError, AssertionError),
)
"""Errors of a template that is rendered, or that Python cannot compile."""
_CALL_ORDER = (("arguments", "name"), ("id", "function", "type"))
"""Fields of a call's function and of a call, in the order of vLLM's schema."""
UNKNOWN_TIME = datetime(2024, 7, 26, tzinfo=UTC).timestamp()
"""Time of a conversation of which none is known: the day that Llama's templates name where there is no clock."""
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_MEDIA = ("image", "audio", "video", "vision")
_LOW_EFFORT = ("low_effort", "truncate_history_thinking")  # an argument, and what else is in the templates that know it


class Prompt(NamedTuple):
    """A rendered prompt."""

    text: str
    """What the template made."""
    prefix: str = ""
    """Begin of the answer behind it, where the engine tokenizes that by itself."""

    @property
    def whole(self) -> str:
        return self.text + self.prefix


def turn_ids(tokenizer: Any, conversation: Conversation, turn: Turn, answers: Sequence[str] = ()) -> list[int]:
    """Prompt ids of a turn, given the `answers` of earlier turns where it waits for them. Raises InputError."""
    return ids_of_prompt(tokenizer, turn_prompt(tokenizer, conversation, turn, answers))


def turn_prompt(tokenizer: Any, conversation: Conversation, turn: Turn, answers: Sequence[str] = ()) -> Prompt:
    """Prompt of a turn, of which `ids_of_prompt` gives the ids. Raises InputError."""
    asked_at = conversation.time_of(turn.index)
    return render_prompt(
        tokenizer,
        turn.context(answers),
        conversation.tools,
        conversation.template_args,
        turn.prompt_end,
        conversation.engine,
        UNKNOWN_TIME if asked_at is None else asked_at,
    )


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: list[dict[str, Any]] | None = None,
    template_args: dict[str, Any] | None = None,
    prompt_end: PromptEnd = "opened",
    engine: Engine = "vllm",
) -> list[int]:
    """Render messages to prompt ids with the tokenizer's chat template.

    Raises InputError for a tokenizer without chat template and for messages that its template refuses,
    SlowTemplateError where its prompts together take too long.
    """
    return ids_of_prompt(tokenizer, render_prompt(tokenizer, messages, tools, template_args, prompt_end, engine))


def ids_of_prompt(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Ids of a rendered prompt. Raises InputError for an empty one, and what `ids_of` does."""
    # The template wrote special tokens; of a prefix SGLang takes off the first one alone.
    ids = ids_of(tokenizer, prompt.text, add_special_tokens=False)
    more = ids_of(tokenizer, prompt.prefix) if prompt.prefix else []
    ids += more[1:] if more and more[0] == tokenizer.bos_token_id else more
    if not ids:
        raise InputError(f"{tokenizer.name_or_path}: its chat template makes an empty prompt of the messages")
    return ids


def render_text(tokenizer: Any, messages: Sequence[Message], *more: Any, **settings: Any) -> str:
    """Text of a prompt; takes and raises what `render_prompt` does."""
    return render_prompt(tokenizer, messages, *more, **settings).whole


def render_prompt(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: list[dict[str, Any]] | None = None,
    template_args: dict[str, Any] | None = None,
    prompt_end: PromptEnd = "opened",
    engine: Engine = "vllm",
    asked_at: float | None = None,
) -> Prompt:
    """A prompt, of which `ids_of_prompt` gives the ids; raises what `render` does. `asked_at`: Unix seconds that the
    template's clock shows; None: now."""
    require_chat_template(tokenizer)
    try:
        limits = getattr(tokenizer, "template_limits", TemplateLimits())
        used = tokenizer.__dict__.setdefault("template_time", TemplateTime())
        with _surroundings(partial(render_in_process, limits, used, asked_at)):
            prompt = _prompt(tokenizer, messages, tools, template_args or {}, prompt_end, engine)
        prompt.whole.encode()
        return prompt
    except UnicodeEncodeError:
        raise InputError(f"{tokenizer.name_or_path}: its chat template makes text that is not valid Unicode") from None
    # Errors of the template are errors of the data: its own `raise_exception` too.
    except _REFUSED as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"{tokenizer.name_or_path}: its chat template refuses the messages ({reason})") from None


@contextmanager
def _surroundings(render: Callable[..., Any]) -> Iterator[None]:
    """Let transformers hand what a template is shown to `render`, for one thread at a time.

    What it changes of messages from 5.24 on (fields without a value are gone) it leaves: engines are bound to versions
    before that (vLLM 0.33 to those below 5.21, SGLang 0.5.23 to 5.19).
    """
    from transformers import tokenization_utils_base  # slow to import

    places = [("render_jinja_template", render), ("_normalize_chat_messages", _unchanged)]
    with PROCESS.lock, ExitStack() as stack:
        for name, value in places:
            if hasattr(tokenization_utils_base, name):
                stack.callback(setattr, tokenization_utils_base, name, getattr(tokenization_utils_base, name))
                setattr(tokenization_utils_base, name, value)
        yield


def _unchanged(messages: Any) -> Any:
    return messages


def require_chat_template(tokenizer: Any) -> None:
    """Raise InputError unless the tokenizer has a chat template."""
    if not getattr(tokenizer, "chat_template", None) and not getattr(tokenizer, "processor_template", None):
        raise InputError(f"{tokenizer.name_or_path}: the tokenizer has no chat template; conversations need one")


def chat_template_for(tokenizer: Any, tools: list[dict[str, Any]] | None, engine: Engine = "vllm") -> str:
    """Template that an engine shows messages with these tools: vLLM the processor's, if it is another, where there are
    no tools, else the one of several for tools; SGLang the processor's, or the first."""
    own, template = getattr(tokenizer, "processor_template", None), tokenizer.chat_template
    if own is not None and (tools is None or engine == "sglang"):
        return str(own)
    first = engine == "sglang" and isinstance(template, dict)
    return str(next(iter(template.values())) if first else tokenizer.get_chat_template(None, tools))


def _prompt(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: list[dict[str, Any]] | None,
    template_args: dict[str, Any],
    prompt_end: PromptEnd,
    engine: Engine,
) -> Prompt:
    # 1) Of several templates, the one for these tools (a template argument of that name wins); and the messages as it
    # wants them.
    template_args = dict(template_args)
    template_args.pop(OTHER_READINGS, None)
    form = template_args.pop(MESSAGES_API, None)
    if form is not None:
        messages, template_args = _as_messages_api(tokenizer, messages, template_args, form)
    tools = template_args.pop("tools", tools)
    template = chat_template_for(tokenizer, tools, engine)
    limits: TemplateLimits = getattr(tokenizer, "template_limits", TemplateLimits())
    if len(template) > (longest := limits.characters):
        raise TemplateError(f"it has {len(template):,} characters; target.template_limits allows {longest:,}")
    shown = shown_messages(messages, takes_parts(template, engine), engine)
    if engine == "vllm" and not any(name in template for name in ('"developer"', "'developer'")):
        shown = _with_developer_as_system(shown)

    # 2) How the prompt ends.
    ending, prefix = {"add_generation_prompt": prompt_end != "bare"}, ""
    last = shown[-1]["content"] if shown and shown[-1]["role"] == "assistant" else None
    if engine == "vllm" and prompt_end == "prefill":
        ending = {"add_generation_prompt": False, "continue_final_message": True}
    elif engine == "sglang" and prompt_end == "prefill" and isinstance(last, str):
        shown, prefix = shown[:-1], last
    elif engine == "sglang" and prompt_end == "after_answer" and isinstance(last, str):
        shown = [*shown[:-1], {"role": "user", "content": last}]

    # 3) The template's text. SGLang knows the argument by which Nemotron's templates are told of a low effort, and
    # shows a template that fails the functions alone of the tools.
    low = engine == "sglang" and template_args.get("reasoning_effort") == "low"
    if low and all(name in template for name in _LOW_EFFORT):
        template_args = {_LOW_EFFORT[0]: True} | template_args

    def text(tools: Any) -> str:
        rendered: str = tokenizer.apply_chat_template(
            shown, chat_template=template, tokenize=False, **ending, **template_args, tools=tools
        )
        return rendered

    try:
        return Prompt(text(tools), prefix)
    except _REFUSED:
        if engine != "sglang" or not tools:
            raise
        return Prompt(text([tool["function"] for tool in tools]), prefix)


def _as_messages_api(
    tokenizer: Any, messages: Sequence[Message], template_args: dict[str, Any], form: dict[str, bool]
) -> tuple[Sequence[Message], dict[str, Any]]:
    """Messages and template arguments as vLLM's `/v1/messages` makes them for this tokenizer's templates. `form`: what
    the request asks of it."""
    system = [message for message in messages if message.role == "system"]
    templates = (chat_template_for(tokenizer, None), chat_template_for(tokenizer, []))
    if system and any(map(_wants_system_first, templates)):
        whole = Message(role="system", content="".join(message.text for message in system))
        messages = [whole, *(message for message in messages if message.role != "system")]
    if form["disabled"] and _knows_no_none(tokenizer):
        template_args = template_args | {"reasoning_effort": "low"}
        if not form["own_thinking"]:
            template_args["enable_thinking"] = True
    return messages, template_args


@lru_cache(maxsize=32)
def _wants_system_first(template: str) -> bool:
    """Whether vLLM holds that a template refuses a system message among others; one that fails at them does."""
    try:
        return bool(ask_of(template, "wants_system_first"))
    except TemplateError:
        return True


def _knows_no_none(tokenizer: Any) -> bool:
    """Whether a template refuses the effort `none`, or makes the same prompt of it as of another one."""

    def prompt(effort: str) -> str | None:
        arguments = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        try:
            return _prompt(tokenizer, [Message(role="user", content="Hi")], None, arguments, "opened", "vllm").text
        except _REFUSED:
            return None

    none = prompt("none")
    return none is None or any(prompt(effort) == none for effort in _EFFORTS)


def _with_developer_as_system(shown: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages in which a developer's are the system's; if there are any, all of the system's become one in front."""
    if all(message["role"] != "developer" for message in shown):
        return shown
    found = [
        {name: value for name, value in message.items() if name != "tools"} | {"role": "system"}
        if message["role"] == "developer"
        else message
        for message in shown
    ]
    # A single one that stands there already keeps its parts.
    if all(message["role"] != "system" for message in found[1:]):
        return found
    contents = [message["content"] for message in found if message["role"] == "system"]
    texts = [text if isinstance(text, str) else "\n".join(part["text"] for part in text) for text in contents]
    others = [message for message in found if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *others]


def shown_messages(messages: Sequence[Message], parts: bool, engine: Engine) -> list[dict[str, Any]]:
    """Messages as a server gives them to its template. `parts`: the template loops over the parts of a content."""
    return [_shown(message, parts, engine) for message in messages]


def _shown(message: Message, parts: bool, engine: Engine) -> dict[str, Any]:
    if engine == "sglang":
        return _shown_by_sglang(message, parts)
    # The content: text, or a list of text parts with whatever else they were sent with.
    sent = _sent_parts(message, engine)
    content: Any = "\n".join(text for text, _ in sent if text or parts)
    if parts and message.role != "tool":
        content = [{"type": "text", "text": text, **fields} for text, fields in sent]
    shown: dict[str, Any] = {"role": message.role, "content": content}

    # What only some roles have.
    if message.role == "assistant":
        if message.tool_calls:
            shown["tool_calls"] = calls_with_objects(message.tool_calls, engine)
        if message.reasoning is not None:
            shown |= dict.fromkeys(("reasoning", "reasoning_content"), message.reasoning)
    if message.role == "tool" and message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        shown["name"] = message.name
    if message.role == "developer":
        shown["tools"] = None  # the field is there also without any
    return shown


def _shown_by_sglang(message: Message, parts: bool) -> dict[str, Any]:
    """A message with all fields of SGLang's schema that it has, in their order; those that hold parts come last."""
    in_parts = isinstance(message.content, list)
    content: Any = " ".join(message.content) if isinstance(message.content, list) else message.content
    if parts and isinstance(message.content, list) and message.role != "tool":
        content = [{"type": "text", "text": text} for text in message.content]
    fields = {
        "tool_call_id": message.tool_call_id,
        "name": message.name,
        "reasoning_content": message.reasoning,
        "tool_calls": None if message.tool_calls is None else calls_with_objects(message.tool_calls, "sglang"),
    }
    given = {name: value for name, value in fields.items() if value is not None}
    if parts and in_parts:
        return {"role": message.role, **given, "content": content}
    return {"role": message.role, "content": content, **given}


def without_billing(message: Message, engine: Engine) -> str | list[str]:
    """A message's content without the header that vLLM leaves out of the system's. A part without another line goes."""
    kept = [text for text, _ in _sent_parts(message, engine)]
    return kept[0] if isinstance(message.content, str) and kept else kept


def _sent_parts(message: Message, engine: Engine) -> list[tuple[str, dict[str, Any]]]:
    """Text parts of a message with their other fields, without the billing header where the engine leaves it out."""
    texts = [message.content] if isinstance(message.content, str) else message.content
    sent = list(zip(texts, message.part_fields or [{} for _ in texts]))
    if engine != "vllm" or message.role != "system":
        return sent
    cut = [(text.partition("\n")[2] if text.startswith(BILLING_HEADER) else text, text, more) for text, more in sent]
    return [(rest, more) for rest, text, more in cut if rest or rest == text]


def calls_with_objects(calls: Sequence[dict[str, Any]], engine: Engine = "vllm") -> list[dict[str, Any]]:
    """Tool calls whose arguments are JSON values, their fields as the engine's schema has them: some templates print a
    call as it is. The calls themselves stay as they are."""
    found = []
    for call in calls:
        function = call.get("function")
        if engine == "sglang":
            function = function or {}
            arguments = function.get("arguments")
            arguments = arguments_of_sglang(arguments) if isinstance(arguments, str) else arguments
            inner = {"name": function.get("name"), "arguments": arguments}
            found.append({"id": call.get("id"), "index": call.get("index"), "type": "function", "function": inner})
        elif isinstance(function, dict):
            function = {**function, "arguments": _arguments(function.get("arguments"))}
            found.append(_in_order({**call, "function": _in_order(function, _CALL_ORDER[0])}, _CALL_ORDER[1]))
        else:
            found.append({**call, "arguments": _arguments(call.get("arguments"))})
    return found


def _in_order(value: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value[name] for name in names if name in value} | value


def _arguments(logged: Any) -> Any:
    """Arguments of a tool call as vLLM shows them: the JSON value of a text, and {} for every value that is no object,
    and for a text that is no JSON."""
    if isinstance(logged, str):
        try:
            logged = json.loads(logged)
        except (ValueError, RecursionError):
            return {}
    return logged if isinstance(logged, dict) else {}


def arguments_of_sglang(text: str) -> dict[str, Any]:
    """Arguments of a tool call as SGLang reads their text, by orjson: whole numbers past 64 bits become floats.

    Raises ValueError for what it refuses: no object, no number (NaN, infinite), no Unicode."""
    try:
        value = json.loads(text, parse_int=_orjson_int, parse_float=_orjson_float, parse_constant=_orjson_float)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("no object")
    json.dumps(value, ensure_ascii=False).encode()
    return value


def _orjson_int(digits: str) -> int | float:
    value = int(digits)
    return value if -(1 << 63) <= value < 1 << 64 else float(value)


def _orjson_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError("no finite number")
    return value


@lru_cache(maxsize=32)
def takes_parts(template: str, engine: Engine = "vllm") -> bool:
    """Whether a chat template loops over the parts of a message's content, as the engine finds it out: SGLang takes any
    word for a medium for one."""
    if engine == "sglang" and any(word in template for word in _MEDIA):
        return True
    try:
        return bool(ask_of(template, "loops_over_parts", engine=engine))
    except TemplateError:
        return False
