"""Masking of secrets in what is shown or kept: errors, reports, recipes, MLflow, and what an operator's command prints.

A name that says secret (`password`, `api_key`, `--token`, `Cookie:`), an address or a `--user` with a password, a key
of known form, and the values of secret variables of this process's environment: each value becomes `***`. It is no
redaction of people's text (`data/redact.py` is): it knows what commands, addresses and settings hold.
"""

import os
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from .key_forms import KEY

MASK = "***"
_SHORTEST_VARIABLE = 8  # shorter values of the environment are words that stand anywhere
_WORKING_FOLDER = "PWD"  # every shell sets it; no password
# `eos_token` and its like are ids of a tokenizer.
_NAME = (
    r"(?![\w-]*?(?:bos|eos|pad|unk|mask|stop)[_-]token\b)(?:[\w-]{1,60}?[_-])?(?:(?:pg)?pass(?:word|wd|phrase)|pwd"
    r"|secret|token|(?:api|access|private|secret|account)[_-]?key|credentials?|signature|sig|authorization|cookie2?)"
    r"(?![\w-])"
)
_STARTS = r"(?<![\w-])"
# To the end of the quotes that stand before it, or a word.
_QUOTED = r"(?<=\")[^\"\n]{1,512}(?=\")|(?<=')[^'\n]{1,512}(?=')"
_VALUE = rf"(?:{_QUOTED}|[^\s&\"',;)}}\]]+)"
_SECRET_NAME = re.compile(_NAME, re.IGNORECASE)
_SECRET_HEADER = re.compile(rf"({_NAME}\s{{0,8}}:\s{{0,8}}).+", re.IGNORECASE | re.DOTALL)
_LOGIN_FLAGS = ("-u", "-U", "--user", "--proxy-user")
_IDS = r"\d{1,10}:\d{1,10}"  # user and group of a container
_NO_PYTHON = r"(?<!python\s)(?<!python3\s)(?<!python3\.\d\d\s)"  # whose -u takes no value
_PYTHON = re.compile(r"(?:.*/)?python[\d.]*")
# A password may hold a slash or an @, so the last @ counts, and be any length. A path made of an address has one slash.
_ADDRESS, _LOGIN = r"(?:(?<=\w\w:)/|//)[^\s\"']+", re.compile(r"(//|^/)(?:[^/@:]*:.*|[^/]*)@")


def _without_login(address: re.Match[str]) -> str:
    """An address without user and password. What stands behind the last @ is not looked at: this takes linear time."""
    before, at, behind = address[0].rpartition("@")
    return _LOGIN.sub(rf"\1{MASK}@", before + at) + behind


_RULES: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    (_ADDRESS, _without_login),
    # Headers: to the end of their quotes; without quotes a scheme of several values, and cookies, to that of the line.
    (
        r"((?P<quote>[\"'])(?:proxy-)?(?:authorization|(?:set-)?cookie2?)\s{0,8}:\s{0,8})"
        r"(?:(?!(?P=quote))[^\r\n]){1,4096}(?=(?P=quote))",
        rf"\1{MASK}",
    ),
    (r"\b(authorization\s{0,8}:\s{0,8})(?:digest|hawk|oauth|aws4-[\w-]{1,20})\s[^\r\n]+", rf"\1{MASK}"),
    (r"\b(cookie2?\s{0,8}:\s{0,8})[\w.-]{1,128}=[^\r\n]+", rf"\1{MASK}"),
    (r"\b(authorization[\"']?\s{0,8}[:=]\s{0,8}[\"']?(?:(?:bearer|basic|token)\s+)?)[^\s\"',]+", rf"\1{MASK}"),
    (
        rf"({_STARTS}(?:-H|--header)[\s=]{{0,8}}(?P<quote>[\"'])?{_NAME}\s{{0,8}}:\s{{0,8}})"
        r"(?:(?(quote)(?!(?P=quote))[^\r\n]|[^\s\"'])){1,4096}",
        rf"\1{MASK}",
    ),
    # What curl takes: --user name:password, -b name=value.
    (
        rf"({_NO_PYTHON}{_STARTS}(?:{'|'.join(_LOGIN_FLAGS)})[\s=]{{0,8}}[\"']?)(?!{_IDS}(?![^\s\"']))(?:(?<=\")[^\"\n:]{{0,128}}:[^\"\n]{{1,512}}"
        rf"|(?<=')[^'\n:]{{0,128}}:[^'\n]{{1,512}}|[^\s:\"'=/]{{1,128}}:(?!//)[^\s\"']+)",
        rf"\1{MASK}",
    ),
    (rf"({_STARTS}-b[\s=]{{1,8}}[\"']?)(?=[\w.-]{{1,128}}=)(?:{_QUOTED}|[^\s\"']+)", rf"\1{MASK}"),
    (r"\b((?:bearer|basic)\s+)(?=[^\s\"']{0,256}[\d=])[\w+/=.~-]{8,}", rf"\1{MASK}"),
    # name=value, --name value, "name": "value"; and name: value where the value has a digit, as errors begin so.
    (rf"({_STARTS}-{{0,2}}{_NAME}[\"']?\s{{0,8}}=\s{{0,8}}[\"']?){_VALUE}", rf"\1{MASK}"),
    (rf"({_STARTS}-{{1,2}}{_NAME}\s{{1,8}}[\"']?){_VALUE}", rf"\1{MASK}"),
    (rf"({_STARTS}{_NAME}[\"']\s{{0,8}}:\s{{0,8}}[\"']){_VALUE}", rf"\1{MASK}"),
    (rf"(?<![.\w-])({_NAME}\s{{0,8}}:\s{{1,8}})(?=\S{{0,256}}\d){_VALUE}", rf"\1{MASK}"),
    # Keys that their form gives away.
    (r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----[\w\s+/=:,.\\-]*", MASK),
    (
        r"(?<![\w-])(?:(?:sk|rk)[-_](?=[\w-]{0,256}\d)[\w-]{16,}|gh[pousr]_\w{20,}|github_pat_\w{20,}"
        r"|glpat-[\w-]{16,}|hf_[a-z0-9]{16,}|xox[abeoprs]-[\w-]{10,}|(?:AKIA|ASIA)[0-9A-Z]{16}|AIza[\w-]{30,}"
        r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)",
        MASK,
    ),
]
_PATTERNS = [(re.compile(pattern, re.IGNORECASE), instead) for pattern, instead in _RULES]
_PATTERNS.append((re.compile(rf"{KEY}(?![\w-])", re.ASCII), MASK))


def masked(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Text with every secret in it as `***`: by its name, by its form, or as the value of a secret variable."""
    # Values of the environment first, the longest first: one may hold another.
    named = [environment[name] for name in environment if name != _WORKING_FOLDER and _is_secret(name)]
    secrets = {form for value in named for form in _forms(value)}
    for value in sorted(secrets, key=len, reverse=True):
        if len(value) >= _SHORTEST_VARIABLE:
            text = text.replace(value, MASK)
    for pattern, instead in _PATTERNS:
        text = pattern.sub(instead, text)
    return text


def _forms(value: str) -> set[str]:
    """A value as errors quote it: whole, without the newline of the file that it came from, and as Python writes it."""
    return {form for one in (value, value.strip()) for form in (one, repr(one)[1:-1])}


def holds_key(text: str) -> bool:
    """Whether a text holds a key that its form gives away, whatever names stand beside it."""
    return any(pattern.search(text) for pattern, _ in _PATTERNS[-3:])


def masked_value(value: Any) -> Any:
    """JSON-able value with every text in it masked; so is what a secret key names, and what follows a secret flag."""
    if isinstance(value, Mapping):
        return {
            key: MASK if isinstance(inner, str) and inner and _is_secret(key) else masked_value(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_masked_behind(*three) for three in zip(("", "", *value), ("", *value), value)]
    return masked(value) if isinstance(value, str) else value


def _masked_behind(program: Any, flag: Any, value: Any) -> Any:
    """Element of a command, masked for the flag before it, too: `--password hunter2` is two elements.

    `program`: what stands before the flag.
    """
    if isinstance(flag, str) and flag[:1] == "-" and isinstance(value, str):
        takes_login = flag in _LOGIN_FLAGS and not _PYTHON.fullmatch(str(program))
        login = takes_login and ":" in value and not re.fullmatch(_IDS, value)
        cookie = flag == "-b" and "=" in value
        if login or cookie or _is_secret(flag.lstrip("-")):
            return MASK
        if flag in ("-H", "--header"):
            value = _SECRET_HEADER.sub(rf"\1{MASK}", value)
    return masked_value(value)


@lru_cache(maxsize=4096)
def _is_secret(name: object) -> bool:
    """Whether a name of a setting, a flag or a variable says that its value is secret; remembered, as every line that
    is shown asks for all variables."""
    return _SECRET_NAME.fullmatch(str(name)) is not None
