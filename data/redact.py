"""Redaction of personal data and secrets: each is replaced by a placeholder and counted; its value is kept nowhere.

Patterns find candidates, and libraries decide where they know better: phonenumbers (numbering plans of many countries),
python-stdnum (check digits of cards and bank accounts), detect-secrets (formats of services' tokens).
`tests/data/texts/redaction.txt` measures it on three hundred lines of chat.

Redaction does not understand text: names of people and postal addresses stay. Redacted text passes unchanged.
"""

import ipaddress
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import phonenumbers
from detect_secrets.plugins.discord import DiscordBotTokenDetector
from detect_secrets.plugins.mailchimp import MailchimpDetector
from detect_secrets.plugins.sendgrid import SendGridDetector
from detect_secrets.plugins.slack import SlackDetector
from detect_secrets.plugins.square_oauth import SquareOAuthDetector
from detect_secrets.plugins.telegram_token import TelegramBotTokenDetector
from detect_secrets.plugins.twilio import TwilioKeyDetector
from stdnum import iban, luhn

from .settings import Kind

_COUNTRIES = (
    *("US", "GB", "DE", "FR", "ES", "IT", "NL", "BE", "AT", "CH"),
    *("PL", "SE", "AU", "IN", "BR", "JP", "KR", "CN", "MX"),
)
_REGIONS = (None, *_COUNTRIES)
"""Countries whose numbers are known without their country's code; None: numbers with one."""


class _Rule(NamedTuple):
    """One pattern of a kind of data, and how a match of it is verified."""

    kind: Kind
    pattern: re.Pattern[str]
    """Finds the text to replace: the group `value`, or the whole match."""
    accepted: Callable[[str], int] = len
    """Verifies the found text: returns the length of its beginning to replace; 0: it is left alone."""
    needs: tuple[str, ...] = ()
    """Pre-filter: every text with a match holds one of these in its lower-case form. Empty: no filter."""
    digit: bool = False
    """Pre-filter: every text with a match holds a digit."""


def _card(text: str) -> int:
    return len(text) if luhn.is_valid(re.sub("[ -]", "", text)) else 0


def _iban(text: str) -> int:
    """Length of the longest valid account number that the text begins with; words after it may look like more of it."""
    return next((end for end in range(len(text), 14, -1) if text[end - 1] != " " and iban.is_valid(text[:end])), 0)


def _phone(text: str) -> int:
    # A number that is valid in any of these countries is a phone number.
    for region in _REGIONS:
        try:
            number = phonenumbers.parse(text, region)
        except phonenumbers.NumberParseException:
            continue
        if phonenumbers.is_valid_number(number):
            return len(text)
    return 0


def _ip(text: str) -> int:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return 0
    plausible = address.version == 4 or any(c.isdigit() for c in text)  # `Add::Face` is code, not an address
    return len(text) if plausible else 0


def _pattern(text: str, flags: re.RegexFlag = re.NOFLAG) -> re.Pattern[str]:
    return re.compile(text, re.VERBOSE | flags)


# Keys: private key blocks, tokens of known form, and values that a name such as `password` announces.
_KEY_BLOCK = _pattern(
    r"(?P<value>-----BEGIN\ [A-Z ]*PRIVATE\ KEY-----.*?(?:-----END\ [A-Z ]*PRIVATE\ KEY-----|\Z))", re.DOTALL
)
_KEY_KNOWN = _pattern(
    r"""(?<![\w-])(?P<value>
      (?:sk|pk|rk)[-_](?=[\w-]*\d)[\w-]{16,}     # model and payment services
    | gh[pousr]_\w{20,} | github_pat_\w{20,} | glpat-[\w-]{16,} | hf_\w{16,} | npm_\w{20,} | pypi-[\w-]{16,}
    | xox[abeoprs]-[\w-]{10,} | (?:AKIA|ASIA)[0-9A-Z]{16} | AIza[\w-]{30,}
    | eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*           # signed web tokens
    )(?![\w-])"""
)
_KNOWN_STARTS = (
    *("sk-", "sk_", "pk-", "pk_", "rk-", "rk_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-"),
    *("hf_", "npm_", "pypi-", "xox", "akia", "asia", "aiza", "eyj"),
)
_KEY_MIXED = _pattern(
    r"(?<![\w-])(?P<value>(?=\w{32})(?=\w*[a-z])(?=\w*[A-Z])(?=(?:[A-Za-z_]*\d){3})[A-Za-z0-9_]{32,})(?![\w-])"
)
_KEY_NAMED = _pattern(
    r"""(?: \bbearer\s+ | \bauthorization:\s*(?:basic|token)\s+
    | (?:(?:api|account|access|private|encryption)[ _-]?key|secret|token|passw(?:or)?d|pwd)["']?
      \s*(?:[:=]|\bis\b)\s*["']? )
    (?P<value>(?=[^\s"'<>()]{0,64}\d)[\w+/=.~!@#$%^&*-]{6,})""",
    re.IGNORECASE,
)
_SERVICES = (
    (DiscordBotTokenDetector, "."),
    (MailchimpDetector, "-us"),
    (SendGridDetector, "sg."),
    (SlackDetector, "xox", "hooks.slack"),
    (SquareOAuthDetector, "sq0csp"),
    (TelegramBotTokenDetector, ":"),
    (TwilioKeyDetector, "ac", "sk"),
)
"""Detectors of services' tokens, and what stands in each token."""
# User and password of a URL, then addresses and account numbers.
_URL_LOGIN = _pattern(r"://(?P<value>[^\s/@<>:]{1,100}:[^\s/@<>]{1,200})@")
_EMAIL = _pattern(r"(?<![\w.+-])(?P<value>(?:[\w.+-]|(?<=\w)'(?=\w))+@[\w-]+(?:\.[\w-]+)+)")
_CARD = _pattern(r"(?<![\w.-])(?P<value>[2-6]\d{3}(?:[ -]?\d){9,15})(?![\w-])")
_IBAN = _pattern(r"(?<![\w-])(?P<value>[A-Z]{2}\d{2}(?:\ ?[A-Z0-9]){11,30})(?![A-Za-z0-9])")
# Machines: addresses (not version or section numbers), hosts of URLs, bare host names of common endings.
_IP = _pattern(
    r"""(?<![\w.:])(?<!version\ )(?<!section\ )(?<!chapter\ )(?P<value>
      (?:\d{1,3}\.){3}\d{1,3}(?!\w|\.\d)
    | (?=[\w:]*::|(?:\w+:){7})[0-9A-Fa-f:]{3,39}(?![\w:]|\.\d)
    )""",
    re.IGNORECASE,
)
_URL_HOST = _pattern(
    r"\b[a-z][a-z0-9+.-]{1,20}://(?:[^\s/@]*@)?(?P<value>[\w-]+(?:\.[\w-]+)*)(?![\w.-]*@)", re.IGNORECASE
)
_ENDINGS = ("com", "org", "edu", "gov", "mil", "internal", "local", "lan", "corp", "intranet", "localdomain")
_LONGER_ENDINGS = (
    *("net", "io", "dev", "app", "cloud", "ai", "co"),
    *("us", "uk", "de", "fr", "nl", "eu", "ca", "au", "jp"),
)
"""Endings of hosts that have at least three parts."""
_HOST = _pattern(
    rf"""(?<![\w.@/<-])(?P<value>
      (?:[a-z0-9][a-z0-9-]*\.)+(?:{"|".join(_ENDINGS)})
    | (?:[a-z0-9][a-z0-9-]*\.){{2,}}(?:{"|".join(_LONGER_ENDINGS)})
    )(?![\w(-]|\.\w)""",
    re.IGNORECASE,
)
# Phone numbers: international, with an area code in brackets, North American, French, German and the like.
_PHONE = _pattern(
    r"""(?<![\w.<+/-])(?P<value>
      (?:\+|00\ ?)[1-9]\d{0,2}[ .-]?(?:\(\d{1,4}\)[ .-]?)?\d{1,4}(?:[ .-]?\d{1,4}){1,6}
    | \(\d{2,5}\)\ ?\d{2,4}(?:[ .-]\d{2,4}){1,3}
    | (?:1[ .-])?[2-9]\d{2}[ .-][2-9]\d{2}[ .-]\d{4}
    | 0[1-9](?:[ .]\d{2}){4}
    | 0[1-9]\d{1,3}[ /-]\d{3,8}(?:[ -]\d{1,4}){0,2}
    )(?![\w-])"""
)
_DIGITS = tuple("0123456789")
_SUSPECT = re.compile(r"[0-9@_-]|\.\w|://|(?<!\w)\w{20}")
"""Found in every text in which any rule finds something: plain words and full stops need no rule."""
_MOST_REMEMBERED = 1 << 22  # characters
# Applied in this order: a later rule sees the placeholders of the earlier ones.
_RULES = (
    _Rule("key", _KEY_BLOCK, needs=("-----",)),
    _Rule("key", _URL_LOGIN, needs=("://",)),
    *(_Rule("key", pattern, needs=tuple(needs)) for service, *needs in _SERVICES for pattern in service.denylist),
    _Rule("key", _KEY_NAMED, needs=("bearer", "authorization", "key", "secret", "token", "passw", "pwd"), digit=True),
    _Rule("key", _KEY_KNOWN, needs=_KNOWN_STARTS),
    _Rule("key", _KEY_MIXED, digit=True),
    _Rule("email", _EMAIL, needs=("@",)),
    _Rule("iban", _IBAN, _iban, digit=True),
    _Rule("card", _CARD, _card, digit=True),
    _Rule("ip", _IP, _ip, (".", ":"), digit=True),
    _Rule("host", _URL_HOST, needs=("://",)),
    _Rule("host", _HOST, needs=tuple(f".{ending}" for ending in (*_ENDINGS, *_LONGER_ENDINGS))),
    _Rule("phone", _PHONE, _phone, digit=True),
)


class Redactor:
    """Replaces personal data and secrets in texts and JSON values; `counts` has the number of redactions by kind."""

    def __init__(self, kinds: Collection[Kind]) -> None:
        self._rules = [rule for rule in _RULES if rule.kind in kinds]
        self._without_digit = [rule for rule in self._rules if not rule.digit]
        self.counts: Counter[str] = Counter(dict.fromkeys(kinds, 0))
        self._found: list[Kind] = []  # in the text at hand
        # System prompts, tools and the history of a thread are redacted once; the memory is emptied when it is full.
        self._remembered: dict[str, tuple[str, Sequence[Kind]]] = {}
        self._characters = 0

    def text(self, text: str) -> str:
        """Redact a text."""
        if text not in self._remembered:
            self._characters += len(text)
            if self._characters > _MOST_REMEMBERED:
                self._remembered, self._characters = {}, len(text)
            self._found = []
            self._remembered[text] = self._redacted(text), self._found
        redacted, found = self._remembered[text]
        for kind in found:
            self.counts[kind] += 1
        return redacted

    def _redacted(self, text: str) -> str:
        # Cheap searches spare many texts all patterns, and most texts most of them.
        if _SUSPECT.search(text) is None:
            return text
        small = text.lower()
        rules = self._rules if any(map(small.__contains__, _DIGITS)) else self._without_digit
        for rule in rules:
            if not rule.needs or any(map(small.__contains__, rule.needs)):
                text = rule.pattern.sub(partial(self._replaced, rule), text)
        return text

    def value(self, value: Any) -> Any:
        """Redact every text and number in a JSON value; names of fields stay. A redacted number becomes a text."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            digits = str(value)
            found = self.text(digits)
            return value if found == digits else found
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, dict):
            return {name: self.value(item) for name, item in value.items()}
        return value

    def calls(self, calls: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        """Redact tool calls. Arguments that are JSON text stay JSON: they are decoded, redacted and encoded again."""
        return None if calls is None else [self._call(call) for call in calls]

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, item in call.items():
            if name == "function" and isinstance(item, dict):
                found[name] = self._call(item)
            else:
                found[name] = self._arguments(item) if name == "arguments" else self.value(item)
        return found

    def _arguments(self, arguments: Any) -> Any:
        try:
            decoded = json.loads(arguments) if isinstance(arguments, str) else None
        except (ValueError, RecursionError):
            decoded = None
        if not isinstance(decoded, dict | list):
            return self.value(arguments)
        # Text without anything to redact stays as it was written. Half of a surrogate pair can only stand escaped.
        found = self.value(decoded)
        return arguments if found == decoded else json.dumps(found)

    def _replaced(self, rule: _Rule, match: re.Match[str]) -> str:
        whole = match.group()
        # The named group is what is verified; context around it, such as `password:`, stays.
        start, end = match.span("value" if "value" in rule.pattern.groupindex else 0)
        length = rule.accepted(whole[start - match.start() : end - match.start()])
        if not length:
            return whole
        # Replace only the accepted length.
        self._found.append(rule.kind)
        before = start - match.start()
        return f"{whole[:before]}<{rule.kind}>{whole[before + length :]}"
