"""Redaction rules: a pattern for each kind of personal data and secret, and how what it finds is verified.

Each pattern takes time linear in the text: every repetition is bounded, or cannot be entered again at a place inside of
what it has passed (possessive quantifiers, and lookbehinds at the start). Verification takes microseconds.
"""

import re
import socket
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import NamedTuple

import phonenumbers
from detect_secrets.plugins.discord import DiscordBotTokenDetector
from detect_secrets.plugins.mailchimp import MailchimpDetector
from detect_secrets.plugins.sendgrid import SendGridDetector
from detect_secrets.plugins.slack import SlackDetector
from detect_secrets.plugins.square_oauth import SquareOAuthDetector
from detect_secrets.plugins.telegram_token import TelegramBotTokenDetector
from detect_secrets.plugins.twilio import TwilioKeyDetector
from stdnum import numdb

from .settings import Kind

Span = tuple[int, int]
"""Begin and end within the text that a pattern found."""


class Rule(NamedTuple):
    """One pattern of a kind of data, and how a match of it is verified."""

    kind: Kind
    pattern: re.Pattern[str]
    """Finds the text to replace: the group `value`, or the whole match."""
    accepted: Callable[[str, str, int], Span | None] | None = None
    """Verifies what was found, given the whole text and where it begins: the part to replace; None: none of it."""
    needs: tuple[str, ...] = ()
    """Pre-filter: every text with a match holds one of these in its lower-case form. Empty: no filter."""
    digit: bool = False
    """Pre-filter: every text with a match holds a digit."""


def _pattern(text: str, flags: re.RegexFlag = re.NOFLAG) -> re.Pattern[str]:
    return re.compile(text, re.VERBOSE | flags)


# Keys: blocks of private keys and PGP, tokens of known form, and values that a name such as `password` announces.
_KEY_BLOCK = _pattern(
    r"""(?P<value>-{4,5}\ ?BEGIN\ (?:[A-Z0-9 ]{0,40}PRIVATE\ KEY(?:\ BLOCK)?
      | PGP\ (?:PUBLIC\ KEY\ BLOCK|MESSAGE|SIGNATURE))\ ?-{4,5}
      [^\0]*?(?:-{4,5}\ ?END\ [A-Z0-9 ]{1,60}-{4,5}|(?=\n\0)|\Z))"""
)
_KEY_KNOWN = _pattern(
    r"""(?<![\w-])(?P<value>
      (?:sk|pk|rk)[-_](?=[\w-]*\d)[\w-]{16,}     # model and payment services
    | gh[pousr]_\w{20,} | github_pat_\w{20,} | glpat-[\w-]{16,} | hf_\w{16,} | npm_\w{20,} | pypi-[\w-]{16,}
    | xox[abeoprs]-[\w-]{10,} | (?:AKIA|ASIA)[0-9A-Z]{16} | AIza[\w-]{30,} | ya29\.[\w-]{20,}
    | eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*           # signed web tokens
    )(?![\w-])"""
)
_KNOWN_STARTS = (
    *("sk-", "sk_", "pk-", "pk_", "rk-", "rk_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-"),
    *("hf_", "npm_", "pypi-", "xox", "akia", "asia", "aiza", "ya29.", "eyj"),
)
_KEY_MIXED = _pattern(
    r"(?<![\w-])(?P<value>(?=\w{32})(?=\w*[a-z])(?=\w*[A-Z])(?=(?:[A-Za-z_]*\d){3})[A-Za-z0-9_]{32,})(?![\w-])"
)
_WORDS = re.compile(r"[A-Z]?[a-z]{3,}")


def _mixed(found: str, text: str, start: int) -> Span | None:
    """A name in CamelCase or snake_case consists of words; a random key hardly holds any."""
    return None if 2 * sum(map(len, _WORDS.findall(found))) > len(found) else (0, len(found))


_KEYS = r"(?:api|account|access|private|encryption|secret|signing|auth|client|master|storage)[ _-]?key"
_PASSWORDS = "passw(?:or)?d|passphrase|passcode|passwort|pwd|contraseña|senha|密码|パスワード|비밀번호"
_NEEDED_NAMES = (
    *("bearer", "authorization", "key", "secret", "token"),
    *("passw", "passphrase", "passcode", "pwd", "contraseña", "senha", "密码", "パスワード", "비밀번호"),
)
_ONLY_NUMBERS = r"[\d.,_:/-]++[kKmM]?+(?![\w+/=~!@\#$%^&*])"
_KEY_NAMED = _pattern(
    rf"""(?: \bbearer\s+ | \bauthorization["']?:\s*["']?(?:basic|token|digest|apikey)\s+
    | (?:{_KEYS}|secret|token(?!["']?\s*+(?:[:=]|\bis\b)\s*+["']?+{_ONLY_NUMBERS})|{_PASSWORDS})["']?
      \s*(?:[:=]|\bis\b)\s*["']? )
    (?P<value>(?=[^\s"'<>()]{{0,64}}\d)[\w+/=.~!@\#$%^&*-]{{6,}})""",
    re.IGNORECASE,
)
NO_SECRET = (
    r"\W{0,64}|string|str|text|password|null|none|true|false|yes|no|required|optional|redacted|<\w{1,32}>"
    r"|[$%{][^\"']{0,128}|[01]"
)
"""Words that stand where a password would, flags and variables."""
_PASSWORD_QUOTED = _pattern(
    rf"""(?:{_PASSWORDS})["']?\s*[:=]\s*(?P<quote>["'])(?!(?:{NO_SECRET})["'])(?P<value>[^"'<>\r\n]{{4,128}})(?P=quote)""",
    re.IGNORECASE,
)
_COOKIE = _pattern(
    r"""\bcookie2?["']?\s*[:=]\s*["']?(?P<value>[\w!\#$%&*+.^`|~-]{1,64}=[^\s"'<>][^\r\n"'<>]*)
    | (?<!\w)--?(?:cookie|b)[ =]["']?(?P<sent>[\w.-]{1,64}=[^\s"'<>][^\r\n"'<>]*)""",
    re.IGNORECASE,
)
_SIGNED = _pattern(
    r"""(?<![a-z])(?:x-(?:amz|goog)-(?:signature|credential|security-token)|signature
    | (?<=[?&;])(?:sig|sign|token|auth|jwt|hmac|password|passwd|pwd|api_?key|googleaccessid|awsaccesskeyid|key-pair-id
      | (?:access|id|refresh|sas)_token|client_secret|(?:code|key|policy)(?==[^&\s]{16})))
    =(?P<value>[^\s&\#"'<>,;]{6,})""",
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
PASSWORD_NAME = re.compile(rf"(?:{_PASSWORDS}|secret|authorization|cookie|private[ _-]?key)$", re.IGNORECASE)
"""Names of fields whose values are secret whatever they look like."""
KEY_NAME = re.compile(rf"(?:{_KEYS}|token|credentials?)$", re.IGNORECASE)
"""Names of fields whose values are secret where they look like a key."""
KEY_LIKE = re.compile(r"(?=.{0,64}\d)(?=.{0,64}[A-Za-z])\S{6,}")

# User and password of a URL, then addresses and account numbers.
_URL_LOGIN = _pattern(r"://(?P<value>[^\s/@<>:]{1,100}:[^\s/@<>]{1,200})@")
_EMAIL = _pattern(
    r"(?<![\w.+-])(?<!\w')(?P<value>(?:[\w.+-]|(?<=\w)'(?=\w))++@"
    r"(?!v?\d++(?:\.\d++)++(?!\.?[A-Za-z]))[\w-]++(?:\.[\w-]++)++)"  # no version, as in `lodash@4.17.21`
)
# Cards begin as issuers' numbers do, so not with a year. Dots part them only in the groups that are printed on them.
_CARD = _pattern(
    r"""(?<![\w.-])(?P<value>(?=2(?:2[2-9]|[3-6]|7[012])|3[04-9]|[4-6])
      (?: \d{4}(?:[ -]{0,2}\d){9,15} | \d{4}(?:\ ?\.\ ?\d{4}){3} | \d{4}\ ?\.\ ?\d{6}\ ?\.\ ?\d{5} ))(?![\w-])"""
)
_CARD_DIGITS = range(13, 20)
_NUMBER = re.compile(r"\d+")
_DOUBLED = bytes.maketrans(b"0123456789", bytes((48, 50, 52, 54, 56, 49, 51, 53, 55, 57)))


def luhn(digits: str) -> bool:
    """Whether the check digit of a number is right (ISO/IEC 7812-1)."""
    raw = digits.encode()
    return (sum(raw[-1::-2]) + sum(raw[-2::-2].translate(_DOUBLED)) - 48 * len(raw)) % 10 == 0


def _card(found: str, text: str, start: int) -> Span | None:
    """The number, without groups before or after it that are none of its own."""
    groups = _NUMBER.findall(found)
    sizes = [len(group) for group in groups]
    whole = len(groups)
    for first, last in ((0, whole), *((i, whole) for i in range(1, whole)), *((0, i) for i in range(whole - 1, 0, -1))):
        if sum(sizes[first:last]) in _CARD_DIGITS and luhn("".join(groups[first:last])):
            spans = [group.span() for group in _NUMBER.finditer(found)]
            return spans[first][0], spans[last - 1][1]
    return None


_SEPARATORS = re.compile("[ .-]")
_LETTERS = {ord("A") + i: str(10 + i) for i in range(26)}
_IBAN = _pattern(r"(?<![\w-])(?P<value>[A-Z]{2}\d{2}(?:[ .-]?[A-Z0-9]){11,30})(?![A-Za-z0-9])")


@cache
def _iban_length(country: str) -> int:
    """Length of a country's account numbers; 0: it has none."""
    known = numdb.get("iban").info(country)[0][1].get("bban")
    return 4 + sum(int(size) for size in re.findall(r"(\d+)!", known)) if known else 0


def _iban(found: str, text: str, start: int) -> Span | None:
    """The account number that the text begins with; words after it may look like more of it."""
    size, marks = _iban_length(found[:2]), _SEPARATORS.sub("", found)
    if not 0 < size <= len(marks) or int((marks[4:size] + marks[:4]).translate(_LETTERS)) % 97 != 1:
        return None
    return 0, [place for place, mark in enumerate(found, start=1) if mark.isalnum()][size - 1]


# Machines: addresses (not version or section numbers), hosts of URLs, bare host names of common endings.
_IP = _pattern(
    r"""(?<![\w.:])(?P<value>
      (?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?!\w|\.\d)
    | (?=[\w:]{0,39}::|(?:\w{1,4}:){7})[0-9A-Fa-f:]{3,39}(?![\w:]|\.\d)
    )""",
    re.IGNORECASE,
)
_VERSIONED = frozenset(("version", "versions", "v", "ver", "release", "build", "section", "chapter"))
_ADDRESSED = frozenset(
    (
        *("ip", "ips", "ipv4", "host", "ping", "ssh", "dns", "server", "address", "addr", "client", "peer"),
        *("gateway", "nameserver", "at", "is"),
    )
)
_BEFORE = 24
_PRIVATE = re.compile(r"(?:10|127|169\.254|192\.168|172\.(?:1[6-9]|2\d|3[01]))\.")


def _ip(found: str, text: str, start: int) -> Span | None:
    whole = (0, len(found))
    if ":" in found:
        try:
            socket.inet_pton(socket.AF_INET6, found)
        except OSError:
            return None
        return whole if any(mark.isdigit() for mark in found) else None  # `Add::Face` is code, not an address
    # A version of four parts looks like an address. Public addresses of small numbers are rare, and versions of large
    # ones stand behind a name or a word for them.
    before = text[max(0, start - _BEFORE) : start]
    word = (before.rstrip(" \t:=\"'([").rsplit(None, 1) or [""])[-1].lower().strip("\"'(")
    if word in _VERSIONED or before.endswith(("==", ">=", "<=", "~=")) or (before[-1:] == "/" != before[-2:-1]):
        return None
    plain = _PRIVATE.match(found) or max(map(int, found.split("."))) >= 100
    return whole if plain or word in _ADDRESSED or before.endswith(("/", "@")) else None


_URL_HOST = _pattern(
    r"(?<=[a-z0-9+.-]{2})://(?:[^\s/@]*+@)?(?P<value>[\w-]++(?:\.[\w-]++)*+)(?![.-]*+@)", re.IGNORECASE
)
_ENDINGS = ("com", "org", "edu", "gov", "mil", "internal", "local", "lan", "corp", "intranet", "localdomain")
_LONGER_ENDINGS = (
    *("net", "io", "dev", "app", "cloud", "ai", "co"),
    *("us", "uk", "de", "fr", "nl", "eu", "ca", "au", "jp"),
)
"""Endings of hosts that have at least three parts."""
_HOST = _pattern(
    rf"""(?<![\w.@/<-])(?P<value>
      (?:[^\W_](?:[^\W_]|-)*+\.)+(?:{"|".join(_ENDINGS)})
    | (?:[^\W_](?:[^\W_]|-)*+\.){{2,}}(?:{"|".join(_LONGER_ENDINGS)})
    )(?![\w(-]|\.\w)""",
    re.IGNORECASE,
)

# Phone numbers: international, with an area code in brackets, North American, French, German and the like.
_PHONE_ABROAD = _pattern(
    r"(?<![.<+/-])(?P<value>(?:(?<![^\W\d])\+|(?<!\w)00(?=[ 1-9]))[ ]?[1-9](?:[ .()/-]{0,2}\d){6,16}+)(?![\w-])"
)
_PHONE_SHAPES = _pattern(
    r"""(?<![\w.<+/-])(?P<value>
      \(\d{2,5}\)\ ?\d{2,5}(?:[ .-]\d{2,4}){1,3}
    | (?:1[ .-])?[2-9]\d{2}[ .-][2-9]\d{2}[ .-]\d{4}
    | 0[1-9](?:[ .-]\d{2}){4}
    | 0[1-9]\d{1,3}[ /-]\d{3,8}(?:[ -]\d{1,4}){0,2}
    )(?![\w-])"""
)
_PHONE_ANY = _pattern(
    r"""(?<![\w.<+/:-])(?!(?:19|20)\d\d[./-]?[01]\d[./-]?[0-3]\d(?!\d{3}))(?![0-3]?\d[./-][01]?\d[./-](?:19|20)?\d\d\b)
    (?P<value>\(?\d(?:[ ()/-]{0,2}\d){6,13}+)(?![\w-]|[.:]\d)"""
)
_SHAPED_COUNTRIES = (
    *("US", "GB", "DE", "FR", "ES", "IT", "NL", "BE", "AT", "CH"),
    *("PL", "SE", "AU", "IN", "BR", "JP", "KR", "CN", "MX"),
)
_BARE = frozenset({"BR", "IN", "CN"})
"""Countries with a trunk prefix that people leave out."""
_LINES = (
    *("fixed_line", "mobile", "toll_free", "premium_rate", "shared_cost", "personal_number"),
    *("voip", "pager", "uan", "voicemail"),
)


class _Plans(NamedTuple):
    """Patterns of the national numbers of some countries."""

    whole: re.Pattern[str]
    """Numbers without a trunk prefix, of countries that are dialled so."""
    trunk: dict[str, re.Pattern[str]]
    """By trunk prefix, the numbers behind it."""


def _plan(every: Iterable[phonenumbers.PhoneMetadata | None]) -> re.Pattern[str]:
    """Pattern of the valid national numbers of some regions, as phonenumbers has them."""
    found = []
    for metadata in filter(None, every):
        described = (getattr(metadata, name) for name in ("general_desc", *_LINES))
        general, *lines = (one.national_number_pattern if one else None for one in described)
        found.append(rf"(?=(?:{general})\Z)(?:{'|'.join(filter(None, lines))})")
    return re.compile("|".join(found) or r"(?!)")


@cache
def _abroad_plan(code: int) -> re.Pattern[str] | None:
    """Pattern of the national numbers under a calling code; None: there is no such code."""
    regions = phonenumbers.COUNTRY_CODE_TO_REGION_CODE.get(code)
    if regions == ("001",):
        return _plan([phonenumbers.PhoneMetadata.metadata_for_nongeo_region(code)])
    return _plan(map(phonenumbers.PhoneMetadata.metadata_for_region, regions)) if regions else None


def _abroad(digits: str) -> bool:
    """Whether digits that begin with a calling code are a valid number; `(0)` may stand behind the code."""
    digits = digits.removeprefix("00")
    for size in (1, 2, 3):
        plan = _abroad_plan(int(digits[:size]))
        if plan is not None:
            rest = digits[size:]
            return plan.fullmatch(rest) is not None or (rest[:1] == "0" and plan.fullmatch(rest[1:]) is not None)
    return False


@cache
def _plans(countries: tuple[str, ...]) -> _Plans:
    every = {country: phonenumbers.PhoneMetadata.metadata_for_region(country) for country in countries}
    prefixes = {country: metadata.national_prefix for country, metadata in every.items() if metadata}
    whole = (every[country] for country, prefix in prefixes.items() if prefix in (None, "1") or country in _BARE)
    trunk = {
        prefix: _plan(every[country] for country in prefixes if prefixes[country] == prefix)
        for prefix in set(filter(None, prefixes.values()))
    }
    return _Plans(_plan(whole), trunk)


def _national(plans: _Plans, digits: str) -> bool:
    """Whether digits are a number of some countries as it is dialled inside of them."""
    behind = ((plan, digits[len(prefix) :]) for prefix, plan in plans.trunk.items() if digits.startswith(prefix))
    return plans.whole.fullmatch(digits) is not None or any(plan.fullmatch(rest) for plan, rest in behind)


def _phone(valid: Callable[[str], bool], found: str, text: str, start: int) -> Span | None:
    """The number that the text begins with; up to two groups of digits behind it may be none of its own."""
    if valid("".join(_NUMBER.findall(found))):
        return 0, len(found)
    for group in list(_NUMBER.finditer(found))[-2:-4:-1]:
        if valid("".join(_NUMBER.findall(found, 0, group.end()))):
            return 0, group.end()
    return None


def rules(kinds: Sequence[Kind], countries: Sequence[str] = ()) -> list[Rule]:
    """Rules of some kinds, in the order in which they apply: a later one does not see what earlier ones found.

    `countries`: those whose phone numbers are found in any grouping without a calling code.
    """
    phones = [
        Rule("phone", _PHONE_ABROAD, partial(_phone, _abroad), digit=True),
        Rule("phone", _PHONE_SHAPES, partial(_phone, partial(_national, _plans(_SHAPED_COUNTRIES))), digit=True),
    ]
    if countries:
        phones.append(
            Rule("phone", _PHONE_ANY, partial(_phone, partial(_national, _plans(tuple(countries)))), digit=True)
        )
    return [rule for rule in (*_RULES, *phones) if rule.kind in kinds]


_RULES = (
    Rule("key", _KEY_BLOCK, needs=("----",)),
    Rule("key", _URL_LOGIN, needs=("://",)),
    *(Rule("key", pattern, needs=tuple(needs)) for service, *needs in _SERVICES for pattern in service.denylist),
    Rule("key", _SIGNED, needs=("signature=", "x-amz-", "x-goog-", "?", "&", ";")),
    Rule("key", _COOKIE, needs=("cookie", "-b")),
    Rule("key", _PASSWORD_QUOTED, needs=_NEEDED_NAMES),
    Rule("key", _KEY_NAMED, needs=_NEEDED_NAMES, digit=True),
    Rule("key", _KEY_KNOWN, needs=_KNOWN_STARTS),
    Rule("key", _KEY_MIXED, _mixed, digit=True),
    Rule("email", _EMAIL, needs=("@",)),
    Rule("iban", _IBAN, _iban, digit=True),
    Rule("card", _CARD, _card, digit=True),
    Rule("ip", _IP, _ip, (".", ":"), digit=True),
    Rule("host", _URL_HOST, needs=("://",)),
    Rule("host", _HOST, needs=tuple(f".{ending}" for ending in (*_ENDINGS, *_LONGER_ENDINGS))),
)
