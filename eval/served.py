"""What a serving engine counts for itself, as it says it: rounds, drafted and accepted tokens.

| engine | read from | booking |
|---|---|---|
| vLLM | `/metrics`: `vllm:spec_decode_num_*_total` | unclipped |
| llama.cpp | `/metrics`: `llamacpp:spec_decode_num_*_total` | drafts |
| llama.cpp | its responses, JSON with `timings.draft_n`, `draft_n_accepted`, `predicted_n` | rounds |
| SGLang | `/metrics`: `sglang:generation_tokens_total`, `num_requests_total`, `spec_verify_calls_total` | rounds |

SGLang's gauge `sglang:spec_accept_length` is of its last few steps only and has no counts behind it: it is not used.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from prometheus_client.parser import text_string_to_metric_families

from ..errors import InputError

Booking = Literal["rounds", "drafts", "unclipped"]
"""What counts as a round. `rounds`: every pass after the first token, as draftforge does. `drafts`: those with a draft,
an answer's last one clipped to what it still needs. `unclipped`: the same, no draft clipped."""
_NUM = "spec_decode_num_"


@dataclass(frozen=True)
class Counters:
    """Counts since the engine started, or between two looks at it."""

    engine: str
    booking: Booking
    rounds: float
    accepted: float
    drafted: float | None = None
    accepted_at: tuple[float, ...] = ()
    """Rounds that accepted at least 1, 2, ... tokens; empty where the engine does not say."""
    restarted: bool = False
    """A counter went backwards: these are the counts since then."""

    @property
    def tau(self) -> float:
        """Tokens a round, in the engine's booking; NaN without a round."""
        return 1.0 + self.accepted / self.rounds if self.rounds > 0 else math.nan

    def since(self, before: "Counters") -> "Counters":
        """What was counted after `before`; a counter that went backwards began again at 0."""
        self._check(before)
        if (
            self.rounds < before.rounds
            or self.accepted < before.accepted
            or (self.drafted or 0) < (before.drafted or 0)
        ):
            return replace(self, restarted=True)
        return self._combined(before, -1)

    def plus(self, other: "Counters") -> "Counters":
        """Both replicas together."""
        self._check(other)
        return replace(self._combined(other, 1), restarted=self.restarted or other.restarted)

    def _combined(self, other: "Counters", sign: int) -> "Counters":
        known = self.drafted is not None and other.drafted is not None
        depth = max(len(self.accepted_at), len(other.accepted_at))
        pairs = zip(_padded(self.accepted_at, depth), _padded(other.accepted_at, depth))
        return replace(
            self,
            rounds=self.rounds + sign * other.rounds,
            accepted=self.accepted + sign * other.accepted,
            drafted=(self.drafted or 0) + sign * (other.drafted or 0) if known else None,
            accepted_at=tuple(mine + sign * theirs for mine, theirs in pairs),
        )

    def _check(self, other: "Counters") -> None:
        if (self.engine, self.booking) != (other.engine, other.booking):
            raise InputError(
                f"counts of {self.engine} ({self.booking}) and {other.engine} ({other.booking}): "
                "only one engine's can be put together"
            )


def parse(text: str, source: str) -> Counters:
    """Read a scrape or llama.cpp's responses. `source` names it in errors. Raises InputError."""
    if text.lstrip().startswith(("{", "[")):
        return _timings(_responses(text, source), source)
    found = _samples(text, source)
    for engine, prefix, booking in (("vllm", "vllm:", "unclipped"), ("llama.cpp", "llamacpp:", "drafts")):
        if f"{prefix}{_NUM}drafts_total" in found:
            return _by_drafts(found, engine, prefix, booking)  # type: ignore[arg-type]
    if "sglang:spec_verify_calls_total" in found:
        return _sglang(found, source)
    if any(name.startswith("sglang:") for name in found):
        raise InputError(
            f"{source}: SGLang without sglang:spec_verify_calls_total: it has verified no draft yet, or is a version "
            "that does not count them"
        )
    raise InputError(
        f"{source}: holds no counts of speculative decoding; known are vLLM's, SGLang's and llama.cpp's metrics and "
        "llama.cpp's responses with timings"
    )


Found = Mapping[str, Sequence[tuple[Mapping[str, str], float]]]


def _samples(text: str, source: str) -> Found:
    """Samples by name, of every label together."""
    found: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, float(sample.value)))
    except (ValueError, IndexError) as error:
        raise InputError(f"{source}: not Prometheus text ({str(error).splitlines()[0][:120]})") from None
    return found


def _total(found: Found, name: str) -> float:
    return sum(value for _, value in found.get(name, ()))


def _by_drafts(found: Found, engine: str, prefix: str, booking: Booking) -> Counters:
    by_position: dict[int, float] = {}
    for labels, value in found.get(f"{prefix}{_NUM}accepted_tokens_per_pos_total", ()):
        place = int(labels.get("position", 0))
        by_position[place] = by_position.get(place, 0.0) + value
    return Counters(
        engine,
        booking,
        rounds=_total(found, f"{prefix}{_NUM}drafts_total"),
        accepted=_total(found, f"{prefix}{_NUM}accepted_tokens_total"),
        drafted=_total(found, f"{prefix}{_NUM}draft_tokens_total"),
        accepted_at=tuple(by_position.get(place, 0.0) for place in range(max(by_position, default=-1) + 1)),
    )


def _sglang(found: Found, source: str) -> Counters:
    """All three are counted when a request ends. Its first token comes from the prompt, without a round."""
    needed = ("sglang:generation_tokens_total", "sglang:num_requests_total", "sglang:spec_verify_calls_total")
    missing = next((name for name in needed if name not in found), None)
    if missing:
        raise InputError(f"{source}: {missing}: is missing beside sglang:spec_verify_calls_total")
    tokens, requests, rounds = (_total(found, name) for name in needed)
    return Counters("sglang", "rounds", rounds, max(tokens - requests - rounds, 0.0))


def _responses(text: str, source: str) -> Iterator[Mapping[str, Any]]:
    """A response, a list of them, or one a line."""
    try:
        whole = json.loads(text)
        answers = whole if isinstance(whole, list) else [whole]
    except ValueError:
        answers = [_line(line, number, source) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    for number, answer in enumerate(answers, 1):
        timings = answer.get("timings", answer) if isinstance(answer, dict) else None
        if not isinstance(timings, dict) or "predicted_n" not in timings:
            raise InputError(f"{source}: response {number}: has no timings with predicted_n, as llama.cpp's have")
        yield timings


def _line(line: str, number: int, source: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise InputError(f"{source}: line {number}: not valid JSON ({error})") from None


def _timings(responses: Iterator[Mapping[str, Any]], source: str) -> Counters:
    """A response of n tokens, a of them accepted ones of drafts, took n - 1 - a rounds after its first token."""
    rounds = accepted = drafted = 0.0
    for number, timings in enumerate(responses, 1):
        values = [timings.get(name, 0) for name in ("predicted_n", "draft_n", "draft_n_accepted")]
        if not all(isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 for value in values):
            raise InputError(f"{source}: response {number}: predicted_n, draft_n, draft_n_accepted = {values}: counts?")
        tokens, drafts, right = map(float, values)
        rounds, accepted, drafted = rounds + max(tokens - 1 - right, 0.0), accepted + right, drafted + drafts
    return Counters("llama.cpp", "rounds", rounds, accepted, drafted)


def _padded(values: tuple[float, ...], length: int) -> tuple[float, ...]:
    return values + (0.0,) * (length - len(values))
