"""Python values as log lines print them: `name=value, name: value, …`, read without running anything."""

import ast
import re
from typing import Any

# A string with its escapes; a bracket; a comma. What stands between them belongs to the value it stands in.
_TOKENS = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[(\[{]|[)\]}]|,""", re.DOTALL)
_NAME = re.compile(r"\s*([A-Za-z_][\w ]*?)\s*(?:=|: ?)")
_CUT = re.compile(r"""['"\]] \.\.\. ['"\[]""")


def fields(text: str) -> dict[str, str]:
    """The named parts of a text, split at the commas outside all strings and brackets, up to a bracket that closes
    more than was opened. Parts without a name are left out."""
    found: dict[str, str] = {}
    depth, start = 0, 0
    for token in _TOKENS.finditer(text):
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


def arguments(text: str) -> dict[str, str]:
    """The keyword arguments of `Name(a=1, b='x')`; empty where it is no call."""
    name, opened, inside = text.partition("(")
    return fields(inside) if opened and name.strip().isidentifier() else {}


def literal(text: str | None) -> Any:
    """The value that a part prints. Raises ValueError where it is no plain literal, as of an object or a cut text."""
    if text is None:
        return None
    try:
        return ast.literal_eval(text.strip())
    except (SyntaxError, TypeError, MemoryError, RecursionError):
        raise ValueError("not a plain Python literal") from None


def is_cut(text: str) -> bool:
    """Whether a log replaced the middle of a text or a list by three dots."""
    return _CUT.search(text) is not None


def _add(found: dict[str, str], part: str) -> None:
    name = _NAME.match(part)
    if name:
        found.setdefault(name[1], part[name.end() :].strip())
