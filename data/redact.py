"""Personal data and secrets out of text: each is replaced by a placeholder and counted, its value kept nowhere.

Patterns, not understanding: names of people and postal addresses stay. Redacted text passes unchanged.
"""

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Literal, NamedTuple

Kind = Literal["key", "email", "card", "ip", "host", "phone"]


class _Rule(NamedTuple):
    kind: Kind
    pattern: re.Pattern[str]
    """What is replaced: the group `value`."""
    accepts: Callable[[str], bool] = bool


def luhn(text: str) -> bool:
    """Whether the digits in a text pass the check sum of payment cards."""
    digits = [int(c) for c in reversed(text) if c.isdigit()]
    doubled = (d * 2 - 9 if d > 4 else d * 2 for d in digits[1::2])
    return (sum(digits[::2]) + sum(doubled)) % 10 == 0


def _is_ip(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return address.version == 4 or any(c.isdigit() for c in text)  # `Add::Face` is code, not an address


def _pattern(text: str, flags: re.RegexFlag = re.NOFLAG) -> re.Pattern[str]:
    return re.compile(text, re.VERBOSE | flags)


_KEY_BLOCK = _pattern(
    r"(?P<value>-----BEGIN\ [A-Z ]*PRIVATE\ KEY-----.*?(?:-----END\ [A-Z ]*PRIVATE\ KEY-----|\Z))", re.DOTALL
)
_KEY_KNOWN = _pattern(
    r"""(?<![\w-])(?P<value>
      (?:sk|pk|rk)[-_](?=[\w-]*\d)[\w-]{16,}     # model and payment services
    | gh[pousr]_\w{20,} | github_pat_\w{20,} | glpat-[\w-]{16,} | hf_\w{16,} | npm_\w{20,} | pypi-[\w-]{16,}
    | xox[abeoprs]-[\w-]{10,} | (?:AKIA|ASIA)[0-9A-Z]{16} | AIza[\w-]{30,}
    | eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*           # signed web tokens
    | (?=\w*[a-z])(?=\w*[A-Z])(?=(?:[A-Za-z_]*\d){3})[A-Za-z0-9_]{32,}
    )(?![\w-])"""
)
_KEY_NAMED = _pattern(
    r"""(?: \bbearer\s+ | \bauthorization:\s*(?:basic|token)\s+
    | (?:api[_-]?key|secret|token|passw(?:or)?d|pwd)["']?\s*(?:[:=]|\bis\b)\s*["']? )
    (?P<value>(?=[^\s"'<>()]{0,64}\d)[\w+/=.~!@#$%^&*-]{6,})""",
    re.IGNORECASE,
)
_URL_LOGIN = _pattern(r"://(?P<value>[^\s/@<>:]{1,100}:[^\s/@<>]{1,200})@")
_EMAIL = _pattern(r"(?<![\w.+-])(?P<value>[\w.+-]+@[\w-]+(?:\.[\w-]+)+)")
_CARD = _pattern(r"(?<![\w.-])(?P<value>[2-6]\d{3}(?:[ -]?\d){9,15})(?![\w-])")
_IP = _pattern(
    r"""(?<![\w.:])(?P<value>
      (?:\d{1,3}\.){3}\d{1,3}
    | (?=[\w:]*::|(?:\w+:){7})[0-9A-Fa-f:]{3,39}
    )(?![\w:]|\.\d)"""
)
_URL_HOST = _pattern(
    r"\b(?:https?|wss?|ftp|ssh|git)://(?:[^\s/@]*@)?(?P<value>[\w-]+(?:\.[\w-]+)*)(?![\w.-]*@)", re.IGNORECASE
)
_HOST = _pattern(
    r"""(?<![\w.@/<-])(?P<value>
      (?:[a-z0-9][a-z0-9-]*\.)+(?:com|org|edu|gov|mil|internal|local|lan|corp|intranet|localdomain)
    | (?:[a-z0-9][a-z0-9-]*\.){2,}(?:net|io|dev|app|cloud|ai|co|us|uk|de|fr|nl|eu|ca|au|jp)
    )(?![\w(-]|\.\w)""",
    re.IGNORECASE,
)
_PHONE = _pattern(
    r"""(?<![\w.<+-])(?P<value>
      (?:\+|00)\d{1,3}[ .-]?(?:\(\d{1,4}\)[ .-]?)?\d{1,4}(?:[ .-]?\d{2,4}){2,4}
    | \(\d{3}\)\ ?\d{3}[ .-]\d{4}
    | (?:1[ .-])?[2-9]\d{2}[ .-][2-9]\d{2}[ .-]\d{4}
    | 0\d{2,4}[ /-]\d{3,4}[ -]?\d{3,4}
    )(?![\w-])"""
)
_RULES = (
    _Rule("key", _KEY_BLOCK),
    _Rule("key", _URL_LOGIN),
    _Rule("key", _KEY_KNOWN),
    _Rule("key", _KEY_NAMED),
    _Rule("email", _EMAIL),
    _Rule("card", _CARD, luhn),
    _Rule("ip", _IP, _is_ip),
    _Rule("host", _URL_HOST),
    _Rule("host", _HOST),
    _Rule("phone", _PHONE),
)


class Redactor:
    """Replaces what it finds in texts and JSON values; `counts` says how often, by kind."""

    def __init__(self, kinds: Collection[Kind]) -> None:
        self._rules = [rule for rule in _RULES if rule.kind in kinds]
        self.counts: Counter[str] = Counter(dict.fromkeys(kinds, 0))

    def text(self, text: str) -> str:
        """The text with placeholders."""
        for rule in self._rules:
            text = rule.pattern.sub(partial(self._replaced, rule), text)
        return text

    def value(self, value: Any) -> Any:
        """A JSON value with every text in it redacted; names of fields stay."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, dict):
            return {name: self.value(item) for name, item in value.items()}
        return value

    def _replaced(self, rule: _Rule, match: re.Match[str]) -> str:
        whole, value = match.group(), match.group("value")
        if not rule.accepts(value):
            return whole
        self.counts[rule.kind] += 1
        start = match.start("value") - match.start()
        return f"{whole[:start]}<{rule.kind}>{whole[start + len(value) :]}"
