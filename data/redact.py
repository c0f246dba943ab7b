"""Personal data and secrets out of text: each is replaced by a placeholder and counted, its value kept nowhere.

A pattern finds what looks like one; where a library knows better, it decides: phonenumbers (numbering plans of many
countries), python-stdnum (check digits of cards and bank accounts), and the formats of services' tokens that
detect-secrets keeps. `tests/data/texts/redaction.txt` has three hundred lines of chat that measure it.

Not understanding: names of people and postal addresses stay. Redacted text passes unchanged.
"""

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Literal, NamedTuple

import phonenumbers
from detect_secrets.plugins.discord import DiscordBotTokenDetector
from detect_secrets.plugins.mailchimp import MailchimpDetector
from detect_secrets.plugins.sendgrid import SendGridDetector
from detect_secrets.plugins.slack import SlackDetector
from detect_secrets.plugins.square_oauth import SquareOAuthDetector
from detect_secrets.plugins.telegram_token import TelegramBotTokenDetector
from detect_secrets.plugins.twilio import TwilioKeyDetector
from stdnum import iban, luhn

Kind = Literal["key", "email", "card", "iban", "ip", "host", "phone"]
_COUNTRIES = (
    *("US", "GB", "DE", "FR", "ES", "IT", "NL", "BE", "AT", "CH"),
    *("PL", "SE", "AU", "IN", "BR", "JP", "KR", "CN", "MX"),
)
_REGIONS = (None, *_COUNTRIES)
"""Countries whose numbers are known without their country's code; None: numbers with one."""


class _Rule(NamedTuple):
    kind: Kind
    pattern: re.Pattern[str]
    """Finds the text to replace: the group `value`, or the whole match."""
    accepted: Callable[[str], int] = len
    """Length of the part of it that is replaced; 0: none is."""
    needs: tuple[str, ...] = ()
    """One of these stands in every text with a match, small letters for any: looking for them is much faster."""


def _card(text: str) -> int:
    return len(text) if luhn.is_valid(re.sub("[ -]", "", text)) else 0


def _iban(text: str) -> int:
    """An account may be followed by words that look like more of it."""
    return next((end for end in range(len(text), 14, -1) if text[end - 1] != " " and iban.is_valid(text[:end])), 0)


def _phone(text: str) -> int:
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


_KEY_BLOCK = _pattern(
    r"(?P<value>-----BEGIN\ [A-Z ]*PRIVATE\ KEY-----.*?(?:-----END\ [A-Z ]*PRIVATE\ KEY-----|\Z))", re.DOTALL
)
_KEY_KNOWN = _pattern(
    r"""(?<![\w-])(?P<value>
      (?:sk|pk|rk)[-_](?=[\w-]*\d)[\w-]{16,}     # model and payment services
    | gh[pousr]_\w{20,} | github_pat_\w{20,} | glpat-[\w-]{16,} | hf_\w{16,} | npm_\w{20,} | pypi-[\w-]{16,}
    | xox[abeoprs]-[\w-]{10,} | (?:AKIA|ASIA)[0-9A-Z]{16} | AIza[\w-]{30,}
    | eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*           # signed web tokens
    | (?=\w{32})(?=\w*[a-z])(?=\w*[A-Z])(?=(?:[A-Za-z_]*\d){3})[A-Za-z0-9_]{32,}
    )(?![\w-])"""
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
_URL_LOGIN = _pattern(r"://(?P<value>[^\s/@<>:]{1,100}:[^\s/@<>]{1,200})@")
_EMAIL = _pattern(r"(?<![\w.+-])(?P<value>(?:[\w.+-]|(?<=\w)'(?=\w))+@[\w-]+(?:\.[\w-]+)+)")
_CARD = _pattern(r"(?<![\w.-])(?P<value>[2-6]\d{3}(?:[ -]?\d){9,15})(?![\w-])")
_IBAN = _pattern(r"(?<![\w-])(?P<value>[A-Z]{2}\d{2}(?:\ ?[A-Z0-9]){11,30})(?![A-Za-z0-9])")
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
_HOST = _pattern(
    r"""(?<![\w.@/<-])(?P<value>
      (?:[a-z0-9][a-z0-9-]*\.)+(?:com|org|edu|gov|mil|internal|local|lan|corp|intranet|localdomain)
    | (?:[a-z0-9][a-z0-9-]*\.){2,}(?:net|io|dev|app|cloud|ai|co|us|uk|de|fr|nl|eu|ca|au|jp)
    )(?![\w(-]|\.\w)""",
    re.IGNORECASE,
)
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
_RULES = (
    _Rule("key", _KEY_BLOCK, needs=("-----",)),
    _Rule("key", _URL_LOGIN, needs=("://",)),
    *(_Rule("key", pattern, needs=tuple(needs)) for service, *needs in _SERVICES for pattern in service.denylist),
    _Rule("key", _KEY_NAMED, needs=("bearer", "authorization", "key", "secret", "token", "passw", "pwd")),
    _Rule("key", _KEY_KNOWN),
    _Rule("email", _EMAIL, needs=("@",)),
    _Rule("iban", _IBAN, _iban, _DIGITS),
    _Rule("card", _CARD, _card, _DIGITS),
    _Rule("ip", _IP, _ip, (".", ":")),
    _Rule("host", _URL_HOST, needs=("://",)),
    _Rule("host", _HOST, needs=(".",)),
    _Rule("phone", _PHONE, _phone, _DIGITS),
)


class Redactor:
    """Replaces what it finds in texts and JSON values; `counts` says how often, by kind."""

    def __init__(self, kinds: Collection[Kind]) -> None:
        self._rules = [rule for rule in _RULES if rule.kind in kinds]
        self.counts: Counter[str] = Counter(dict.fromkeys(kinds, 0))

    def text(self, text: str) -> str:
        """The text with placeholders."""
        small = text.lower()
        for rule in self._rules:
            if rule.needs and not any(part in small for part in rule.needs):
                continue
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
        whole = match.group()
        start, end = match.span("value" if "value" in rule.pattern.groupindex else 0)
        length = rule.accepted(whole[start - match.start() : end - match.start()])
        if not length:
            return whole
        self.counts[rule.kind] += 1
        before = start - match.start()
        return f"{whole[:before]}<{rule.kind}>{whole[before + length :]}"
