"""Redaction rules: a pattern for each kind of personal data and secret, and how what it finds is verified.

Each pattern takes time linear in the text: every repetition is bounded, or cannot be entered again at a place inside of
what it has passed (possessive quantifiers, and lookbehinds at the start). It begins with the class of its first
character, by which `re` passes over places quickly, and what must stand before follows in a lookbehind over that
character. Verification takes microseconds.
"""

import re
import socket
import string
from base64 import b64decode
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import accumulate
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

from ..key_forms import KEY, KEY_STARTS, any_of
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
    small: bool = False
    """Whether the pattern reads the text in lower case."""


def _pattern(text: str, flags: re.RegexFlag = re.NOFLAG) -> re.Pattern[str]:
    return re.compile(text, re.VERBOSE | flags)


def _ascii_pattern(text: str) -> re.Pattern[str]:
    """Pattern of numbers and keys, beside which a letter of another alphabet may stand: Chinese has no spaces."""
    return _pattern(text, re.ASCII)


# Keys: blocks of private keys and PGP, tokens of known form, and values that a name such as `password` announces.
_KEY_BLOCK = _pattern(
    r"""(?P<value>-{4,5}\ ?BEGIN\ (?:[A-Z0-9 ]{0,40}PRIVATE\ KEY(?:\ BLOCK)?
      | PGP\ (?:PUBLIC\ KEY\ BLOCK|MESSAGE|SIGNATURE))\ ?-{4,5}
      [^\0]*?(?:-{4,5}\ ?END\ [A-Z0-9 ]{1,60}-{4,5}|(?=\n?\0)|\Z))"""
)
_KEY_KNOWN = re.compile(rf"(?P<value>{KEY})(?![\w-])", re.ASCII)
_KEY_MIXED = _ascii_pattern(
    r"(?<![\w-])(?P<value>(?=\w{32})(?=\w*[a-z])(?=\w*[A-Z])(?=(?:[A-Za-z_]*\d){3})[A-Za-z0-9_]{32,})(?![\w-])"
)
_WORDS = re.compile(r"[A-Z]?[a-z]{3,}")


def _mixed(found: str, text: str, start: int) -> Span | None:
    """A name in CamelCase or snake_case consists of words; a random key hardly holds any."""
    return None if 2 * sum(map(len, _WORDS.findall(found))) > len(found) else (0, len(found))


_KEY_WORDS = (
    *("api", "account", "access", "private", "encryption", "secret", "signing", "auth", "client", "master", "storage"),
)
_KEYS = rf"(?:{'|'.join(_KEY_WORDS)})[ _-]?key"
_PASSWORD_WORDS = (
    *("passw(?:or)?d", "passphrase", "passcode", "passwort", "pwd", "contraseña", "senha", "密码", "パスワード"),
    "비밀번호",
)
_PASSWORDS = "|".join(_PASSWORD_WORDS)
_NEEDED_NAMES = (
    *("bearer", "authorization", "key", "secret", "token"),
    *("passw", "passphrase", "passcode", "pwd", "contraseña", "senha", "密码", "パスワード", "비밀번호"),
)
_ONLY_NUMBERS = r"[\d.,_:/-]++[kKmM]?+\*{0,2}+(?![\w+/=~!@\#$%^&*])"
_MARKS = r"""["'`*\u2018-\u201e]{0,3}+"""  # quotes, and those of Markdown
_SET = rf"{_MARKS}\s*(?:[:=]|\bis\b)(?:\*\*)?\s*{_MARKS}"
_KEY_NAMED = _pattern(
    any_of(
        r"b(?<!\w.)earer\s+",
        r"""a(?<!\w.)uthorization["']?:\s*["']?(?:basic|token|digest|apikey)\s+""",
        *(rf"{word}[ _-]?key{_SET}" for word in _KEY_WORDS),
        rf"""token(?!{_MARKS}\s*+(?:[:=]|\bis\b)(?:\*\*)?\s*+{_MARKS}{_ONLY_NUMBERS}){_SET}""",
        *(rf"{word}{_SET}" for word in ("secret", *_PASSWORD_WORDS)),
    )
    + r"""(?P<value>(?=[^\s"'<>()]{0,64}\d)[\w+/=.~!@\#$%^&*-]{6,})"""
)
_BASIC_LOGIN = _ascii_pattern(
    r"""[Aa](?<!\w.)(?i:uthorization["']?:\s*["']?basic\s+)(?P<value>[A-Za-z0-9+/]{6,256}+={0,2})"""
)


def _login(found: str, text: str, start: int) -> Span | None:
    """A value that ends as base64 does, or stands for a text with a colon, as `user:password`; no word does."""
    try:
        login = b64decode(found + "=" * (-len(found) % 4)).decode()
    except ValueError:
        login = ""
    return (0, len(found)) if found.endswith("=") or (":" in login and login.isprintable()) else None


NO_SECRET = (
    r"\W{0,64}|string|str|text|password|null|none|true|false|yes|no|required|optional|redacted|<\w{1,32}>"
    r"|[$%{][^\"']{0,128}|[01]"
)
"""Words that stand where a password would, flags and variables."""
_PASSWORD_QUOTED = _pattern(
    rf"""(?:{any_of(*_PASSWORD_WORDS)})["']?\s*[:=]\s*(?P<quote>["'])(?!(?:{NO_SECRET})["'])
      (?P<value>[^"'<>\r\n]{{4,128}})(?P=quote)"""
)
_COOKIE = _pattern(
    any_of(
        r"""cookie2?["']?\s*[:=]\s*["']?(?P<value>[\w!\#$%&*+.^`|~-]{1,64}=[^\s"'<>][^\r\n"'<>]*)""",
        r"""--?(?:cookie|b)[ =]["']?(?P<sent>[\w.-]{1,64}=[^\s"'<>][^\r\n"'<>]*)""",
        before=r"(?<!\w)",
    )
)
_SIGNED = _pattern(
    r"""[xs?&;](?:
      (?<=(?<![a-z])x)-(?:amz|goog)-(?:signature|credential|security-token) | (?<=(?<![a-z])s)ignature
    | (?<=[?&;])(?:sig|sign|token|auth|jwt|hmac|password|passwd|pwd|api_?key|googleaccessid|awsaccesskeyid
      |key-pair-id|(?:access|id|refresh|sas)_token|client_secret|(?:code|key|policy)(?==[^&\s]{16})))
    =(?P<value>[^\s&\#"'<>,;]{6,})"""
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
_URL_LOGIN = _pattern(r"://(?P<value>[^\s/@<>:]{0,100}:[^\s/<>]{1,200})@")
_EMAIL = _pattern(
    r"(?P<value>[\w.+-](?<![\w.+-].)(?<!\w'.)(?:[\w.+-]|(?<=\w)'(?=\w))*+@"
    r"(?!v?\d++(?:\.\d++)++(?!\.?[A-Za-z]))[\w-]++(?:\.[\w-]++)++)"  # no version, as in `lodash@4.17.21`
)
# Cards begin as issuers' numbers do, so not with a year. Dots part them only in the groups that are printed on them.
_CARD = _ascii_pattern(
    r"""(?P<value>[2-6](?<=(?<![\w.-])(?=2(?:2[2-9]|[3-6]|7[012])|3[04-9]|[4-6]).)\d{3}
      (?: (?:[ -]{0,2}\d){9,15} | (?:\ ?\.\ ?\d{4}){3} | \ ?\.\ ?\d{6}\ ?\.\ ?\d{5} ))(?![\w-])"""
)
_CARD_DIGITS = range(13, 20)
_NUMBER = re.compile(r"\d+")
_PLAIN, _DOUBLED = bytes(range(10)), bytes((0, 2, 4, 6, 8, 1, 3, 5, 7, 9))
_FROM_DIGITS = [bytes.maketrans(b"0123456789", values) for values in (_PLAIN, _DOUBLED)]


def luhn(digits: str) -> bool:
    """Whether the check digit of a number is right (ISO/IEC 7812-1)."""
    return _luhn_sums(digits)(0, len(digits))


def _luhn_sums(digits: str) -> Callable[[int, int], bool]:
    """Function that tells, of any part of some digits, whether it has the right check digit."""
    plain, doubled = (digits.encode().translate(table) for table in _FROM_DIGITS)
    # Every other digit is doubled, counted from a part's end: running sums for ends at even places, and at odd ones.
    sums = []
    for first, second in ((doubled, plain), (plain, doubled)):
        values = bytearray(first)
        values[1::2] = second[1::2]
        sums.append([0, *accumulate(values)])
    return lambda first, last: (sums[last % 2][last] - sums[last % 2][first]) % 10 == 0


def _card(found: str, text: str, start: int) -> Span | None:
    """The number, without groups before or after it that are none of its own."""
    groups = list(_NUMBER.finditer(found))
    numbers = [group[0] for group in groups]
    valid = _luhn_sums("".join(numbers))
    ends = list(accumulate(map(len, numbers), initial=0))
    whole = len(groups)
    for first, last in ((0, whole), *((i, whole) for i in range(1, whole)), *((0, i) for i in range(whole - 1, 0, -1))):
        if ends[last] - ends[first] in _CARD_DIGITS and valid(ends[first], ends[last]):
            return groups[first].start(), groups[last - 1].end()
    return None


_SEPARATORS = re.compile("[ .-]")
_LETTERS = {ord("A") + i: str(10 + i) for i in range(26)}
_IBAN = _ascii_pattern(r"(?P<value>[A-Z](?<![\w-].)[A-Z]\d{2}(?:[ .-]?[A-Z0-9]){11,30})(?![A-Za-z0-9])")


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
_IP = _ascii_pattern(
    r"""[0-9A-Fa-f:](?<=(?<![\w.])(?=(?P<value>
      (?<!\d:)(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?!\w|\.\d)
    | (?<!:)(?=[\w:]{0,39}::|(?:\w{1,4}:){7})[0-9A-Fa-f:]{3,39}(?![\w:]|\.\d)
    )).)"""
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
        return whole if _NUMBER.search(found) else None  # `Add::Face` is code, not an address
    # A version of four parts looks like an address. Public addresses of small numbers are rare, and versions of large
    # ones stand behind a name or a word for them.
    before = text[max(0, start - _BEFORE) : start]
    word = (before.rstrip(" \t:=\"'([").rsplit(None, 1) or [""])[-1].lower().strip("\"'(")
    if word in _VERSIONED or before.endswith(("==", ">=", "<=", "~=")) or (before[-1:] == "/" != before[-2:-1]):
        return None
    plain = _PRIVATE.match(found) or max(map(int, found.split("."))) >= 100
    return whole if plain or word in _ADDRESSED or before.endswith(("/", "@")) else None


_URL_HOST = _pattern(r":(?<=[a-z0-9+.-]{2}.)//(?:[^\s/@]*+@)?(?P<value>[\w-]++(?:\.[\w-]++)*+)(?![.-]*+@)")
_ENDINGS = ("com", "org", "edu", "gov", "mil", "internal", "local", "lan", "corp", "intranet", "localdomain")
_LONGER_ENDINGS = (
    *("net", "io", "dev", "app", "cloud", "ai", "co"),
    *("us", "uk", "de", "fr", "nl", "eu", "ca", "au", "jp"),
)
"""Endings of hosts that have at least three parts."""
_HOST = _pattern(
    rf"""(?P<value>[^\W_](?<![\w.@/<-].)(?:[^\W_]|-)*+\.(?:
      (?:[^\W_](?:[^\W_]|-)*+\.)*(?:{"|".join(_ENDINGS)})
    | (?:[^\W_](?:[^\W_]|-)*+\.)+(?:{"|".join(_LONGER_ENDINGS)})
    ))(?![\w(-]|\.\w)"""
)

_STANDARDS = frozenset(("json-schema.org", "www.w3.org"))
"""Hosts in the names of formats, which schemas of tools and markup hold."""


def _host(found: str, text: str, start: int) -> Span | None:
    return None if found in _STANDARDS else (0, len(found))


# Phone numbers: international, with an area code in brackets, North American, French, German and the like.
_PHONE_ABROAD = _ascii_pattern(
    r"""(?P<value>[+0](?<=(?<![.<+/-])(?:(?<![^\W\d])\+|(?<!\w)0(?=0[ 1-9])))(?:(?<=0)0)?
      [ ]?[1-9](?:[ .()/-]{0,2}\d){6,16}+)(?![\w-])"""
)
_PHONE_SHAPES = _ascii_pattern(
    r"""(?P<value>[(\d](?<![\w.<+/-].)(?:
      (?<=\()\d{2,5}\)\ ?\d{2,5}(?:[ .-]\d{2,4}){1,3}
    | (?:(?<=1)[ .-][2-9]|(?<=[2-9]))\d{2}[ .-][2-9]\d{2}[ .-]\d{4}
    | (?<=0)[1-9](?:[ .-]\d{2}){4}
    | (?<=0)[1-9]\d{1,3}[ /-]\d{3,8}(?:[ -]\d{1,4}){0,2}
    ))(?![\w-])"""
)
_PHONE_ANY = _ascii_pattern(
    r"""(?P<value>[(\d](?<=(?<![\w.<+/:-])(?!(?:19|20)\d\d[./-]?[01]\d[./-]?[0-3]\d(?!\d{3}))
      (?![0-3]?\d[./-][01]?\d[./-](?:19|20)?\d\d\b).)
      (?:(?<=\()\d|(?<=\d))(?:[ ()/-]{0,2}\d){6,13}+)(?![\w-]|[.:]\d)"""
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


class _NumberPlan(NamedTuple):
    """Valid numbers of one length, as phonenumbers has them."""

    lines: re.Pattern[str]
    """Numbers of all kinds of lines; quick to tell that there is none."""
    regions: re.Pattern[str]
    """The same, where the region of the line has such numbers at all."""

    def has(self, digits: str) -> bool:
        return self.lines.fullmatch(digits) is not None and self.regions.fullmatch(digits) is not None


def _number_plan(prefixed: Iterable[tuple[str, phonenumbers.PhoneMetadata | None]], length: int) -> _NumberPlan | None:
    """Plan of some regions' national numbers, each behind a prefix, of so many digits in all; None: there are none."""
    lines_of: dict[tuple[str, str], dict[str, None]] = {}
    for prefix, metadata in prefixed:
        general, *lines = (getattr(metadata, name, None) for name in ("general_desc", *_LINES))
        if general and (size := length - len(prefix)) in general.possible_length:
            known = [line for line in lines if line and size in (line.possible_length or (size,))]
            patterns = filter(None, (line.national_number_pattern for line in known))
            lines_of.setdefault((prefix, general.national_number_pattern), {}).update(dict.fromkeys(patterns))
    found = [(prefix, general, "|".join(lines)) for (prefix, general), lines in lines_of.items() if lines]
    if not found:
        return None
    return _NumberPlan(
        re.compile("|".join({rf"{prefix}(?:{lines})": None for prefix, _, lines in found})),
        re.compile("|".join(rf"{prefix}(?=(?:{general})\Z)(?:{lines})" for prefix, general, lines in found)),
    )


_REGIONS = {str(code): regions for code, regions in phonenumbers.COUNTRY_CODE_TO_REGION_CODE.items()}
_METADATA = phonenumbers.PhoneMetadata


@cache
def _abroad_plan(code: str, length: int) -> _NumberPlan | None:
    """Plan of the national numbers under a calling code."""
    regions = _REGIONS[code]
    if regions == ("001",):
        return _number_plan([("", _METADATA.metadata_for_nongeo_region(int(code)))], length)
    return _number_plan((("", _METADATA.metadata_for_region(region)) for region in regions), length)


def _abroad(digits: str) -> bool:
    """Whether digits that begin with a calling code are a valid number; `(0)` may stand behind the code."""
    digits = digits.removeprefix("00")
    for size in (1, 2, 3):
        if (code := digits[:size]) in _REGIONS:
            for rest in (digits[size:], digits[size + 1 :] if digits[size : size + 1] == "0" else ""):
                if (plan := _abroad_plan(code, len(rest))) and plan.has(rest):
                    return True
            break
    return False


@cache
def _national(countries: tuple[str, ...]) -> Callable[[str], bool]:
    """Function that tells whether digits are a valid number as it is dialled inside of one of some countries."""
    every = {country: metadata for country in countries if (metadata := _METADATA.metadata_for_region(country))}
    # Without a trunk prefix, in countries that are dialled so; and with each.
    bare = [
        ("", metadata)
        for country, metadata in every.items()
        if metadata.national_prefix in (None, "1") or country in _BARE
    ]
    behind = [(metadata.national_prefix, metadata) for metadata in every.values() if metadata.national_prefix]
    plan_of = cache(partial(_number_plan, [*bare, *behind]))
    return lambda digits: (plan := plan_of(len(digits))) is not None and plan.has(digits)


_PHONE_MARKS = "+ .()/-"


def _phone(valid: Callable[[str], bool], found: str, text: str, start: int) -> Span | None:
    """The number that the text begins with; up to two groups of digits behind it may be none of its own."""
    for _ in range(3):
        if valid(found.encode().translate(None, _PHONE_MARKS.encode()).decode()):
            return 0, len(found)
        found = found.rstrip(string.digits).rstrip(_PHONE_MARKS)
    return None


def rules(kinds: Sequence[Kind], countries: Sequence[str] = ()) -> list[Rule]:
    """Rules of some kinds, in the order in which they apply: a later one does not see what earlier ones found.

    `countries`: those whose phone numbers are found in any grouping without a calling code.
    """
    phones = [
        Rule("phone", _PHONE_ABROAD, partial(_phone, _abroad), digit=True),
        Rule("phone", _PHONE_SHAPES, partial(_phone, _national(_SHAPED_COUNTRIES)), digit=True),
    ]
    if countries:
        phones.append(Rule("phone", _PHONE_ANY, partial(_phone, _national(tuple(countries))), digit=True))
    return [rule for rule in (*_RULES, *phones) if rule.kind in kinds]


_RULES = (
    Rule("key", _KEY_BLOCK, needs=("----",)),
    Rule("key", _URL_LOGIN, needs=("://",)),
    *(Rule("key", pattern, needs=tuple(needs)) for service, *needs in _SERVICES for pattern in service.denylist),
    Rule("key", _SIGNED, needs=("signature=", "x-amz-", "x-goog-", "?", "&", ";"), small=True),
    Rule("key", _COOKIE, needs=("cookie", "-b"), small=True),
    Rule("key", _PASSWORD_QUOTED, needs=_NEEDED_NAMES, small=True),
    Rule("key", _BASIC_LOGIN, _login, needs=("basic",)),
    Rule("key", _KEY_NAMED, needs=_NEEDED_NAMES, digit=True, small=True),
    Rule("key", _KEY_KNOWN, needs=KEY_STARTS),
    Rule("key", _KEY_MIXED, _mixed, digit=True),
    Rule("email", _EMAIL, needs=("@",)),
    Rule("iban", _IBAN, _iban, digit=True),
    Rule("card", _CARD, _card, digit=True),
    Rule("ip", _IP, _ip, (".", ":"), digit=True),
    Rule("host", _URL_HOST, _host, needs=("://",), small=True),
    Rule("host", _HOST, _host, needs=tuple(f".{ending}" for ending in (*_ENDINGS, *_LONGER_ENDINGS)), small=True),
)
