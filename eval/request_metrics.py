"""Acceptance of single requests, from responses that an engine or a gateway logged: in all, and by domain.

| engine | a response tells | counting convention |
|---|---|---|
| vLLM 0.32 | `metrics.speculative_decoding`, of a stream its last chunk | unclipped |
| llama.cpp | `timings`: `draft_n`, `draft_n_accepted`, `predicted_n` | rounds |

vLLM tells it with `--per-request-spec-decode-metrics summary` (or `detailed`), but not of a request with several
answers (`n`), of one that failed or was cut off, and of a stream without usage. Such responses are counted.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

from ..data.logs.chat import RESPONSES
from ..data.logs.response import response_of
from ..errors import InputError
from ..storage import parse_json
from .engine_metrics import MOST_COUNT, Counters, parse

_MOST_LINES, _MOST_BRACKETS, _MOST_POSITIONS = 1_000_000, 4_000_000, 10_000
"""Lines, and lists and objects, of responses that are read; entries of a histogram that is."""
_MOST_DOMAINS, OTHER_DOMAINS = 1_000, "(other domains)"
"""Domains that are told apart, and what all further ones are counted as."""
DomainOf = Callable[[Mapping[str, Any]], str]
"""Domain of a logged request, by what stands in its line; empty: none is known."""


def counters_of(text: str, source: str, domain_of: DomainOf = lambda line: "") -> Counters:
    """Counts of a scrape of an engine's metrics, or of logged responses. Raises InputError naming `source`."""
    if text.lstrip().startswith(("{", "[")):
        return parse_responses(text, source, domain_of)
    return parse(text, source)


def parse_responses(text: str, source: str, domain_of: DomainOf = lambda line: "") -> Counters:
    """Sum of the responses' counts: the text is one response, a list of them, or one a line, each by itself or in the
    line of a log beside its request. Domains after the first 1,000 are counted as OTHER_DOMAINS. Raises InputError
    naming `source`."""
    whole: Counters | None = None
    uncounted = number = 0
    domains: dict[str, Counters] = {}
    for number, line in enumerate(_lines(text, source), 1):
        counted = _counts(line, f"{source}: response {number}")
        if counted is None:
            uncounted += 1
            continue
        name = domain_of(line)
        if name not in domains and len(domains) >= _MOST_DOMAINS:
            name = OTHER_DOMAINS
        domains[name] = domains[name].plus(counted) if name in domains else counted
        whole = counted if whole is None else whole.plus(counted)
    if whole is None:
        raise InputError(
            f"{source}: response {max(number, 1)}: has no timings with predicted_n, as llama.cpp's have, and no "
            "metrics.speculative_decoding, as vLLM's have"
        )
    return replace(whole, uncounted=float(uncounted), domains=domains)


def _lines(text: str, source: str) -> Iterator[Any]:
    # No honest log has so many; what they are parsed into takes far more memory than the text.
    for what, count, most in (
        ("lines", text.count("\n"), _MOST_LINES),
        ("lists and objects", text.count("[") + text.count("{"), _MOST_BRACKETS),
    ):
        if count > most:
            raise InputError(f"{source}: {count:,} {what}; must be {most:,} at most: give a part of the log")
    # Whole JSON first; where that fails, JSON lines.
    try:
        whole = parse_json(text)
        yield from whole if isinstance(whole, list) else [whole]
        return
    except ValueError:
        pass
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield parse_json(line)
            except ValueError as error:
                raise InputError(f"{source}: line {number}: not valid JSON ({error})") from None


def _counts(line: Any, where: str) -> Counters | None:
    """Counts of one response; None: it tells none."""
    if not isinstance(line, dict):
        return None
    # The response beside its request, itself perhaps in an HTTP envelope, or the line; whole or as a stream's chunks.
    response = next((response_of(line[name]) for name in RESPONSES if line.get(name) is not None), line)
    if isinstance(response, dict) and "body" in response:
        response = response_of(response["body"])
    for chunk in reversed(response if isinstance(response, list) else [response]):
        if not isinstance(chunk, dict):
            continue
        metrics = chunk.get("metrics")
        if isinstance(metrics, dict) and metrics.get("speculative_decoding") is not None:
            return _vllm(metrics["speculative_decoding"], where)
        timings = chunk.get("timings", chunk)
        if isinstance(timings, dict) and "predicted_n" in timings:
            return _llama(timings, where)
    return None


def _vllm(found: Any, where: str) -> Counters | None:
    """Counts of a request, as the engine's own counters add them up; None: of more positions than any engine drafts."""
    # The histogram has the number of rounds that accepted exactly 0, 1, … tokens.
    histogram = found.get("acceptance_histogram") if isinstance(found, dict) else None
    if isinstance(histogram, list) and len(histogram) > _MOST_POSITIONS:
        return None
    drafted: Any = found.get("num_draft_tokens") if isinstance(found, dict) else None
    if not isinstance(histogram, list) or not all(map(_is_count, [*histogram, drafted])):
        raise InputError(f"{where}: metrics.speculative_decoding: acceptance_histogram, num_draft_tokens: counts?")
    accepted = sum(j * count for j, count in enumerate(histogram))
    told = [found.get(name) for name in ("num_spec_steps", "num_accepted_draft_tokens")]
    if told != [sum(histogram), accepted] or accepted > drafted:
        raise InputError(
            f"{where}: metrics.speculative_decoding: num_spec_steps, num_accepted_draft_tokens {f'{told}'[:60]} of "
            f"{drafted} drafted: must agree with acceptance_histogram, {sum(histogram)} and {accepted}"
        )
    at_least = [float(count) for count in accumulate(reversed(histogram[1:]))][::-1]
    return Counters(
        "vllm", "unclipped", float(sum(histogram)), float(accepted), float(drafted), tuple(at_least), requests=1.0
    )


def _llama(timings: Mapping[str, Any], where: str) -> Counters:
    """Counts of a response: n tokens, a of them accepted drafts, took n - 1 - a rounds; without drafts, plain ones."""
    values = [timings.get(name, 0) for name in ("predicted_n", "draft_n", "draft_n_accepted")]
    if not all(map(_is_count, values)):
        raise InputError(f"{where}: predicted_n, draft_n, draft_n_accepted = {f'{values}'[:120]}: counts?")
    tokens, drafts, right = map(float, values)
    return Counters("llama.cpp", "rounds", max(tokens - 1 - right, 0.0), right, drafts, requests=1.0)


def _is_count(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < MOST_COUNT
