"""Domain of a logged request by the recipe's rules and fields: of the mix's lines, and of served responses."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .logs.chat import body_of, decoded
from .settings import LABEL, DomainRule, MixSettings

_REQUESTS = ("request", "request_body", "requestBody", "body")
_BESIDE = ("metadata", "headers", "request_headers", "requestHeaders")
_ROLES = {"system": ("system", "developer"), "user": ("user",), None: ("system", "developer", "user")}


def domain_by_rule(
    rules: Sequence[DomainRule], lookup: Callable[[str], Any], said: Iterable[tuple[str, str]]
) -> str | None:
    """Domain that the first matching rule names. `lookup`: value of a field; `said`: role and text of each message."""
    texts = list(said)
    for rule in rules:
        if re.search(rule.match, _searched_text(rule, lookup, texts)):
            return rule.domain
    return None


def _searched_text(rule: DomainRule, lookup: Callable[[str], Any], said: Sequence[tuple[str, str]]) -> str:
    if rule.field is not None:
        value = lookup(rule.field)
        return value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)
    return "\n".join(text for role, text in said if role in _ROLES[rule.role])


def served_domain(mix: MixSettings, line: Mapping[str, Any]) -> str:
    """Domain of a request that a log tells of beside its response; empty: none is known.

    As in a mix: the first rule that matches, else the only source's `domain`, else a source's `domain_field`. Fields
    are those of the line and of its request, their `metadata`, and headers by their lower-case names.
    """
    # 1) Fields: what stands closest to the line wins.
    request = next((one for name in _REQUESTS if isinstance(one := decoded(line.get(name)), dict)), None)
    inner = {} if request is None else decoded(request.get("body", request))
    body = body_of(inner) if isinstance(inner, dict) else {}
    fields: dict[str, Any] = {}
    for holder in (body, request or {}, line):
        for name in _BESIDE:
            beside = decoded(holder.get(name))
            if isinstance(beside, dict):
                fields |= {str(key).lower() if "eaders" in name else str(key): each for key, each in beside.items()}
    fields |= body | {name: value for name, value in line.items() if value is not None}
    # 2) The rules of the mix, in their order.
    sources = [source for source in mix.sources if hasattr(source, "domain_field")]
    found: str | None = domain_by_rule(mix.domains.rules, fields.get, _said(fields))
    if found is None and len(mix.sources) == 1:
        found = sources[0].domain if sources else None
    named = (fields.get(name) for name in dict.fromkeys(source.domain_field for source in sources))
    domain = next((one for one in (found, *named) if one is not None), None)
    return domain if isinstance(domain, str) and re.fullmatch(LABEL, domain) else ""


def _said(fields: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Role and text of a request's messages; a prompt is the user's."""
    messages, prompt = fields.get("messages"), fields.get("prompt")
    said = [("user", prompt)] if isinstance(prompt, str) else []
    for message in messages if isinstance(messages, list) else []:
        if isinstance(message, dict):
            content = message.get("content")
            parts = content if isinstance(content, list) else [{"text": content}]
            texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
            said.append((str(message.get("role")), "\n".join(texts)))
    return said
