"""Parsers for the text of engine logs: rendered prompts, Python literals, times.

**Rendered prompts.** Engines log the prompt that their chat template made of a request. `unrender` inverts the template
where nothing has to be guessed: the whole prompt must consist of closed turns of one markup, without other control
tokens inside, and end with the opened turn of the assistant. Rendered again by a template of that markup, the messages
give the same text. What the template itself added (a default system message, tool descriptions, tool results inside a
user turn) stays part of its message.

**Literals.** Engines print requests as Python does: `fields` splits a text at its named parts, `literal` reads one.

**Times.** `seconds` reads unix times of any unit and dates.
"""

import ast
import hashlib
import json
import math
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter, ValidationError

from ..read_limits import json_within

_NO_THINKING = "<think>\n\n</think>\n\n"
_OPEN_THINKING = "<think>\n"
_DATES = re.compile(r"Cutting Knowledge Date: [^\n]{1,40}\nToday Date: ([^\n]{1,40})\n\n")


class Rendered(NamedTuple):
    """Messages and template arguments of a rendered prompt."""

    messages: list[dict[str, str]]
    template_args: dict[str, Any]
    pieces: list[str]
    """The markup before, between and behind the messages' contents: with these it is the prompt."""


class _Markup(NamedTuple):
    """Turn syntax of a family of chat templates."""

    begin: str
    """Text before the first turn; optional, as not every log shows it."""
    turn: re.Pattern[str]
    """One closed turn: role and content."""
    opened: str
    """Text that opens the assistant's answer."""
    control: re.Pattern[str]
    """Pattern of control tokens, none of which may occur in a content."""
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
    roles={"system": "system", "user": "user", "assistant": "assistant"},  # `ipython` turns are not text
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
    """Recover the messages of a rendered prompt; None: its markup is unknown, or it is cut or continues an answer."""
    return next((found for markup in _MARKUPS if (found := _read(prompt, markup)) is not None), None)


def prompt_digest(text: str) -> str:
    """Hash of a rendered prompt (32 hex digits), whether or not it begins with the token that a tokenizer may add."""
    begin = next((markup.begin for markup in _MARKUPS if markup.begin and text.startswith(markup.begin)), "")
    return hashlib.blake2b(text[len(begin) :].encode(errors="surrogatepass"), digest_size=16).hexdigest()


def unread_reason(prompt: str) -> Literal["prompt in an unread markup", "raw prompt"]:
    """Reason why `unrender` cannot read a complete prompt: another markup, or no chat at all."""
    chat = re.search(r"<[|｜][\w ▁]+[|｜]>|<start_of_turn>|\[INST\]", prompt)
    return "raw prompt" if chat is None else "prompt in an unread markup"


def _read(prompt: str, markup: _Markup) -> Rendered | None:
    # 1) Closed turns, one after the other.
    at = len(markup.begin) if prompt.startswith(markup.begin) else 0
    messages, pieces, behind = list[dict[str, str]](), list[str](), 0
    arguments: dict[str, Any] = {}
    while turn := markup.turn.match(prompt, at):
        role = markup.roles.get(turn[1])
        if role is None or markup.control.search(turn[2]):
            return None
        messages.append({"role": role, "content": turn[2]})
        pieces.append(prompt[behind : turn.start(2)])
        at, behind = turn.end(), turn.end(2)
    pieces.append(prompt[behind:])

    # 2) The opened turn of the assistant, and how much thinking the template began there.
    rest = prompt[at:]
    if not rest.startswith(markup.opened):
        return None
    opening = rest.removeprefix(markup.opened)
    if opening == _NO_THINKING:
        arguments["enable_thinking"] = False
    elif opening == _OPEN_THINKING:
        arguments["enable_thinking"] = True  # the default of most templates that open it, and of some it is not
    elif opening:
        return None

    # 3) What the template wrote itself. Empty messages stay: an empty system prompt switches a default one off.
    found = Rendered(messages, arguments, pieces)
    return found if _strip_dates(found, markup) and messages else None


def _strip_dates(found: Rendered, markup: _Markup) -> bool:
    """Move the dates that Llama 3's template puts above the system message into an argument: it would add them again,
    and alone they are no message.

    False: the system message holds what no argument gives back.
    """
    messages, pieces = found.messages, found.pieces
    if markup is not _LLAMA3 or not messages or messages[0]["role"] != "system":
        return True
    dates = _DATES.match(messages[0]["content"])
    if dates:
        found.template_args["date_string"] = dates[1]
        rest = messages[0]["content"][dates.end() :]
        messages[:1] = [{"role": "system", "content": rest}] if rest else []
        pieces[0] += dates[0]
        pieces[:2] = pieces[:2] if rest else ["".join(pieces[:2])]
        return "Environment: ipython" not in rest.split("\n")
    return "Environment: ipython" not in messages[0]["content"].split("\n")


# A string with its escapes; a bracket; a comma. What stands between them belongs to the value it stands in.
_STRINGS = {quote: rf"{quote}(?:[^{quote}\\]|\\.)*+{quote}|{quote}|" for quote in "'\""}
_TOKENS = {
    quotes: re.compile("".join(_STRINGS[quote] for quote in quotes) + r"[(\[{]|[)\]}]|,", re.DOTALL)
    for quotes in ("'\"", "'", '"', "")
}
_NAME = re.compile(r"\s*+([A-Za-z_]\w*+(?: ++\w++)*+)\s*+(?:=|: ?)")
_CUT = re.compile(r"""['"\]] \.\.\. ['"\[]""")


def fields(text: str) -> dict[str, str]:
    """Split a text such as `a=1, b: 'x'` into its named parts; parts without a name are left out.

    Parts end at commas outside all strings and brackets; the text ends at a bracket that closes more than was opened.
    """
    found: dict[str, str] = {}
    depth, start = 0, 0
    # Strings are single tokens, so brackets and commas inside them do not count.
    for token in _tokens(text):
        mark = token[0]
        if mark in ("(", "[", "{"):
            depth += 1
        elif mark in (")", "]", "}"):
            depth -= 1
            if depth < 0:
                _add(found, text[start : token.start()])
                return found
        elif mark == "," and depth == 0:
            _add(found, text[start : token.start()])
            start = token.end()
    _add(found, text[start:])
    return found


def _tokens(text: str) -> Iterator[re.Match[str]]:
    """Strings that are closed, brackets and commas, in time linear in the text."""
    at, quotes = 0, "'\""
    while token := _TOKENS[quotes].search(text, at):
        at = token.end()
        if token[0] in quotes:
            # One that is never closed: behind it the same quotes stand behind backslashes alone, and close nothing.
            quotes = quotes.replace(token[0], "")
        else:
            yield token


def arguments(text: str) -> dict[str, str]:
    """Keyword arguments of a printed call `Name(a=1, b='x')`; empty: it is no call."""
    name, opened, inside = text.partition("(")
    return fields(inside) if opened and name.strip().isidentifier() else {}


# What Python prints otherwise than JSON: texts, names, keys that are numbers, tuples.
_TEXT = r"""'[^'\\]*+(?:\\.[^'\\]*+)*+'|"[^"\\]*+(?:\\.[^"\\]*+)*+\""""
_PRINTED = re.compile(
    rf"""({_TEXT})|(?<![\w.])([A-Za-z_]\w*+)|(?<![\w.])(-?\d++)(?=\s*+:)|[(]|(?:,\s*+)?[)]|['"]""", re.DOTALL
)
_NAMES = {"None": "null", "True": "true", "False": "false"}


def literal(text: str | None) -> Any:
    """Evaluate a printed Python literal as far as JSON has such values, tuples as lists; None: it is none, such as the
    repr of an object or a cut text.

    Python's own parser would take five hundred times the text in memory.
    """
    try:
        return None if text is None else json_within(_PRINTED.sub(_in_json, text.strip()))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def _in_json(token: re.Match[str]) -> str:
    """A part of a printed literal as JSON writes it. Raises SyntaxError or ValueError for what JSON has not."""
    text, name, key = token.groups()
    if text is not None:
        return json.dumps(ast.literal_eval(text) if "\\" in text else text[1:-1])
    if name is not None and name in _NAMES:
        return _NAMES[name]
    if name is not None or token[0] in "'\"":
        raise ValueError("a name, or a text that is not closed")
    return f'"{key}"' if key is not None else "[" if token[0] == "(" else "]"


def is_cut(text: str) -> bool:
    """Whether a log replaced the middle of a text or a list by three dots."""
    return _CUT.search(text) is not None


def _add(found: dict[str, str], part: str) -> None:
    name = _NAME.match(part)
    if name:
        found.setdefault(name[1], part[name.end() :].strip())


_PER_SECOND = ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3))  # nanoseconds, microseconds, milliseconds since 1970
_YEAR_10000 = 253402300800.0
_FLAG = TypeAdapter(bool)
_FRACTION = re.compile(r"(?<=\d)[.,](\d+)")


def seconds(value: Any) -> float | None:
    """Convert a number (seconds to nanoseconds, told apart by size) or a date to unix seconds: one in ISO 8601, or as
    HTTP and web servers write it.

    A date without a zone counts as UTC. None of anything else, and of times before 1970 or after 9999.
    """
    if isinstance(value, datetime):
        found: float | None = (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    else:
        found = number(value)
        if found is not None:
            found = next((found / scale for least, scale in _PER_SECOND if found >= least), found)
        elif isinstance(value, str):
            return _seconds_of_date(value.strip())
    return found if found is not None and 0 <= found < _YEAR_10000 else None


def number(value: Any) -> float | None:
    """Convert a number, or a text that spells one, to a finite float; None: it is neither."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def flag(value: Any) -> Any:
    """Convert what pydantic takes for a flag, as engines do (0, 1, `no`, `true`, …), to a bool; return anything else as
    it is."""
    try:
        return _FLAG.validate_python(value)
    except ValidationError:
        return value


_DAY_FIRST = re.compile(r"\[?(\d\d)/([A-Z][a-z]{2})/(\d{4}):(\d\d:\d\d:\d\d [+-]\d{4})\]?")
_OF_HTTP = re.compile(r"(?:[A-Z][a-z]{2}, )?\d\d? [A-Z][a-z]{2} \d{4} \d\d:\d\d:\d\d (?:GMT|UTC|[+-]\d{4})")


def _seconds_of_date(text: str) -> float | None:
    # As HTTP's headers and nginx's `$time_local` write it.
    text = _DAY_FIRST.sub(r"\1 \2 \3 \4", text)
    if _OF_HTTP.fullmatch(text):
        try:
            return seconds(parsedate_to_datetime(text))
        except ValueError:
            return None
    # Python reads at most six digits of a fraction, and a point before them.
    text = _FRACTION.sub(lambda match: f".{match[1][:6].ljust(6, '0')}", text, count=1)
    try:
        return seconds(datetime.fromisoformat(text.removesuffix(" UTC")))
    except (ValueError, OverflowError):
        return None
