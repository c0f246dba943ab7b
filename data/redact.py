"""Redaction of personal data and secrets: each is replaced by a placeholder and counted; its value is kept nowhere.

`redaction_rules` finds it. Here texts are brought to the form that the rules read, and back: JSON is decoded and its
values are redacted, each in its place; escapes (`\\n`, `\\u0040`, `%40`) and digits, spaces and signs of other scripts
are read as what they stand for. `tests/data/texts/redaction.txt` measures it on three hundred lines of chat.

Redaction does not understand text: names of people and postal addresses stay. Redacted text passes unchanged.
"""

import json
import re
import unicodedata
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, groupby
from json.encoder import encode_basestring, encode_basestring_ascii
from typing import Any

from .redaction_rules import KEY_LIKE, KEY_NAME, NO_SECRET, PASSWORD_NAME, Rule, Span, rules
from .settings import Kind

_DIGITS = tuple("0123456789")
_SUSPECT = re.compile(r"[0-9@_=-]|\.\w|://|(?<!\w)\w{20}|:\s*[\"']|[Bb](?i:asic)\s")
"""Found in every text in which any rule finds something: plain words and full stops need no rule."""
_MOST_REMEMBERED = 1 << 22  # characters
_LONGEST_NAME = 64
_SHORTEST, _SHORTEST_NUMBER = 3, 7  # such as ::1; numbers of phones
_ESCAPE = re.compile(
    r"""(?<!\\)\\++(?:u(?P<u>[0-9a-fA-F]{4})|x(?P<x>[0-9a-fA-F]{2})|(?P<one>[nrtbf"'/]))
    | %(?P<percent>[2-7][0-9A-Fa-f]) | &\#(?:(?P<number>\d{2,3})|[xX](?P<hex>[0-9a-fA-F]{2}));
    # Characters without a width, and marks on the letter before them.
    | [\u00ad\u034f\u0300-\u036f\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2069\u20e3\ufe00-\ufe0f\ufeff]+
    """,
    re.VERBOSE,
)
_ONE = {"n": "\n", "r": "\r", "t": "\t", "b": " ", "f": " "}
_JSON = re.compile(r'("(?:[^"\\]++|\\.)*+")(\s*+:)?|(-?\d[\d.eE+-]*+)', re.DOTALL)
_APART = "\n\0\n"
_BEGINS = frozenset('{[" \t\r\n')
_PAIR_NAMES = frozenset(("name", "key", "field", "label"))
"""Fields that name what stands in the field `value` beside them."""


def _folded_characters() -> dict[int, str]:
    """ASCII characters that others stand for: full-width ones, digits of other scripts, spaces, dashes, full stops."""
    found = dict.fromkeys((160, 12288, *range(8192, 8203), 8239, 8287), " ")
    found |= dict.fromkeys((*range(0x2010, 0x2016), 0x2212, 0xFE63), "-")
    found |= dict.fromkeys((0x2024, 0x3002, 0xFF61), ".")
    found |= {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
    others = (*range(0x660, 0x1_0000), *range(0x1_D7CE, 0x1_D800))
    return found | {code: str(unicodedata.decimal(chr(code))) for code in others if chr(code).isdecimal()}


_FOLDED_CHARACTERS = _folded_characters()


class _Folded:
    """A text as the rules read it, and where each place of it stands in the text as it is."""

    def __init__(self, text: str) -> None:
        pieces, self._starts, self._places = list[str](), [0], [0]
        done = length = 0
        for escape in _ESCAPE.finditer(text):
            stands_for = _unescaped(escape)
            # A piece without escapes, then the escape: each begins a new pair of places.
            pieces += (text[done : escape.start()], stands_for)
            length += escape.start() - done
            self._starts += (length, length + len(stands_for))
            self._places += (escape.start(), escape.end())
            length, done = length + len(stands_for), escape.end()
        pieces.append(text[done:])
        joined = "".join(pieces)
        self.text = joined if joined.isascii() else joined.translate(_FOLDED_CHARACTERS)

    def place(self, at: int) -> int:
        """Place in the text of the character `at`; of an escape its begin."""
        piece = bisect_right(self._starts, at) - 1
        return self._places[piece] + (0 if piece % 2 else at - self._starts[piece])

    def end(self, at: int) -> int:
        """Place in the text behind the character before `at`; of an escape its end."""
        piece = bisect_right(self._starts, at - 1) - 1
        return self._places[piece + 1] if piece % 2 else self._places[piece] + at - self._starts[piece]


def _unescaped(escape: re.Match[str]) -> str:
    """The character that an escape stands for; none for characters without a width."""
    for name, base in (("u", 16), ("x", 16), ("percent", 16), ("hex", 16), ("number", 10)):
        if escape[name] is not None:
            return chr(int(escape[name], base))
    return "" if escape["one"] is None else _ONE.get(escape["one"], escape["one"])


class Redactor:
    """Replaces personal data and secrets in texts and JSON values; `counts` has the number of redactions by kind."""

    def __init__(self, kinds: Collection[Kind], phone_countries: Sequence[str] = ()) -> None:
        self._rules = rules(tuple(kinds), phone_countries)
        self._without_digit = [rule for rule in self._rules if not rule.digit]
        self._by_name = "key" in kinds
        self.counts: Counter[str] = Counter(dict.fromkeys(kinds, 0))
        # System prompts, tools and the history of a thread are redacted once; the memory is emptied when it is full.
        self._remembered: dict[str, tuple[str, Sequence[Kind]]] = {}
        self._characters = 0

    def text(self, text: str) -> str:
        """Redact a text. In one that is JSON every value is, and all else stays as it was written."""
        redacted, found = self._redacted(text)
        if found:
            self.counts.update(found)
        return redacted

    def value(self, value: Any) -> Any:
        """Redact every text, number and name of a field in a JSON value. A redacted number becomes a text."""
        if isinstance(value, str):
            return self.text(value)
        if not value:
            return value
        written = json.dumps([value])
        redacted = self.text(written)
        return value if redacted == written else json.loads(redacted)[0]

    def _redacted(self, text: str) -> tuple[str, Sequence[Kind]]:
        """Redact a text, and list the kinds of what was found."""
        if text not in self._remembered:
            self._characters += len(text)
            if self._characters > _MOST_REMEMBERED:
                self._remembered, self._characters = {}, len(text)
            self._remembered[text] = self._json(text) if _is_json(text) else self._plain(text)
        return self._remembered[text]

    def _plain(self, text: str) -> tuple[str, Sequence[Kind]]:
        """Redact a text that is no JSON."""
        spans = self._spans(text)
        return _replaced(text, spans), [kind for *_, kind in spans]

    def _json(self, text: str) -> tuple[str, Sequence[Kind]]:
        """Redact the values and names of a JSON text, each where it stands."""
        # 1) What is secret by its name, and all other values at once, apart by what no rule passes over.
        leaves = list[str]()
        tree = self._tree(text, leaves)
        spans = self._spans(_APART.join(leaves))
        starts = list(accumulate((len(leaf) + len(_APART) for leaf in leaves), initial=0))
        # 2) Each span in the value that it lies in.
        inside = groupby(spans, lambda span: bisect_right(starts, span[0]) - 1)
        changed = {leaf: _replaced(leaves[leaf], found, starts[leaf]) for leaf, found in inside}
        # 3) What is changed, written as it was.
        written, secrets = _written(text, tree, changed)
        by_name: list[Kind] = ["key"] * secrets
        return written, by_name + [kind for *_, kind in spans]

    def _tree(self, text: str, leaves: list[str]) -> "_Tree":
        """Tokens of a JSON text that may be redacted, JSON inside of texts too; values to look at go to `leaves`."""
        tree: _Tree = {}
        name, pair, naming = "", "", None
        for i, (quoted, colon, number) in enumerate(_JSON.findall(text)):
            # 1) Most tokens are too short for anything.
            if naming is None and not colon and (len(quoted) < _SHORTEST + 2 and len(number) < _SHORTEST_NUMBER):
                continue
            value = number or (json.loads(quoted) if "\\" in quoted else quoted[1:-1])
            # 2) A name counts for the values up to the next one.
            if colon:
                name, pair = (pair, "") if value == "value" and pair else (value, pair)
                naming = _naming(name[-_LONGEST_NAME:]) if self._by_name else None
            elif name in _PAIR_NAMES and quoted and _naming(value[-_LONGEST_NAME:]):
                pair = value
            # 3) A value is secret by its name, JSON again, or a text for the rules.
            if naming is not None and not colon and _is_secret(value, naming):
                tree[i] = None
            elif quoted and value[:1] in _BEGINS and _is_json(value):
                tree[i] = value, self._tree(value, leaves)
            elif len(value) >= _SHORTEST:
                tree[i] = len(leaves)
                leaves.append(value)
        return tree

    def _spans(self, text: str) -> list["_Found"]:
        """Find what the rules find in a text that is no JSON, in its order."""
        # 1) The text as rules read it. Cheap searches spare many texts all patterns, and most texts most of them.
        simple = text.isascii() and not any(mark in text for mark in "\\%&")
        folded = None if simple else _Folded(text)
        read = folded.text if folded else text
        if _SUSPECT.search(read) is None:
            return []
        small = read.replace("\u0130", "i").lower()  # of no other character is the small one longer
        chosen = self._rules if any(map(small.__contains__, _DIGITS)) else self._without_digit
        # 2) What each rule finds is masked, so that places stay and no later rule sees it.
        spans = list[_Found]()
        for rule in chosen:
            if not rule.needs or any(map(small.__contains__, rule.needs)):
                new = _found(rule, small if rule.small else read)
                read, small = _masked(read, new), _masked(small, new)
                spans += ((start, end, rule.kind) for start, end in new)
        # 3) Places in the text as it is.
        if folded:
            spans = [(folded.place(start), folded.end(end), kind) for start, end, kind in spans]
        return sorted(spans)


_Found = tuple[int, int, Kind]
"""Begin, end and kind of what is redacted."""
_Tree = dict[int, "int | tuple[str, _Tree] | None"]
"""By the number of a JSON text's token: its value's number, JSON inside of it, or None for a secret by its name."""


def _replaced(text: str, spans: Iterable[_Found], begin: int = 0) -> str:
    """The text with placeholders where the spans stand, which count from `begin` before it."""
    pieces, done = list[str](), 0
    for start, end, kind in spans:
        pieces += (text[done : start - begin], f"<{kind}>")
        done = end - begin
    return "".join((*pieces, text[done:])) if pieces else text


def _written(text: str, tree: _Tree, changed: Mapping[int, str]) -> tuple[str, int]:
    """The JSON text with changed values, and how many of them are secret by their name."""
    # 1) New values by token.
    new, secrets = dict[int, str](), 0
    for i, place in tree.items():
        if place is None:
            new[i] = "<key>"
            secrets += 1
        elif isinstance(place, tuple):
            inner, found = _written(*place, changed)
            secrets += found
            if inner is not place[0]:
                new[i] = inner
        elif place in changed:
            new[i] = changed[place]
    if not new:
        return text, 0
    # 2) Each where it stands.
    pieces, done = list[str](), 0
    for i, token in enumerate(_JSON.finditer(text)):
        if i in new:
            quote = encode_basestring_ascii if not token[1] or token[1].isascii() else encode_basestring
            pieces += (text[done : token.start()], quote(new[i]), token[2] or "")
            done = token.end()
    return "".join((*pieces, text[done:])), secrets


def _is_secret(value: str, naming: re.Pattern[str]) -> bool:
    """Whether a value is secret by the name of its field."""
    if naming is PASSWORD_NAME:
        return re.fullmatch(NO_SECRET, value, re.IGNORECASE) is None
    return KEY_LIKE.fullmatch(value) is not None


@lru_cache(maxsize=4096)
def _naming(name: str) -> re.Pattern[str] | None:
    """Which names of secrets a field's name is one of."""
    return next((names for names in (PASSWORD_NAME, KEY_NAME) if names.search(name)), None)


def _is_json(text: str) -> bool:
    """Whether a text is a JSON object, array or string."""
    if text.lstrip()[:1] not in ("{", "[", '"'):
        return False
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _found(rule: Rule, text: str) -> list[Span]:
    """Places of what a rule finds and accepts."""
    # A named group is what is verified; context around it, such as `password:`, stays.
    places = [match.span(match.lastgroup or 0) for match in rule.pattern.finditer(text)]
    if rule.accepted is None:
        return places
    found = list[Span]()
    for start, end in places:
        if part := rule.accepted(text[start:end], text, start):
            found.append((start + part[0], start + part[1]))
    return found


def _masked(text: str, spans: Sequence[Span]) -> str:
    """The text with some places made unreadable: no rule finds anything there, or beyond them."""
    pieces, done = list[str](), 0
    for start, end in spans:
        pieces += (text[done:start], "<" * (end - start - 1), ">")
        done = end
    return "".join((*pieces, text[done:])) if spans else text
