"""Latency of a decoding run: time to first token, inter-token latency and round times, from recorded arrival times.

A run is a sequence of moments. At some of them a prompt has been read and its first token is known; at the others a
round ends, and every slot in it gets its tokens at once. Nothing here waits for a device: the moments are those at
which the host knew the tokens.

Definitions. Time to first token: from a request's turn (it has a slot) to its first token; waiting in a queue is not
in it. Inter-token latency: the time between two arrivals of an answer, divided evenly among the tokens of the second
one; each of them counts. Time of a round: from the moment before it to its end. Reading prompts: the
target's time from requests' turns to their first tokens; while it lasts every slot waits.
"""

import math
import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

Interval = tuple[float, float]


class TimedAnswer(BaseModel):
    """One answer of a run. Times are seconds since the run began."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    prompt: int = Field(ge=0)
    """Index of its prompt."""
    tokens: int = Field(ge=1)
    digest: str
    """Digest of its token ids: equal answers have equal digests."""
    begun: float
    arrivals: list[float] = Field(min_length=1)
    """Arrival of the first token, then of each round's tokens."""
    rounds: list[tuple[int, int, int, int]] = []
    """Drafted, accepted, emitted, reached, as `requests.Round`; plain decoding has none."""

    @model_validator(mode="after")
    def _adds_up(self) -> "TimedAnswer":
        # Times must be in order, and the tokens of the arrivals must be all tokens of the answer.
        if any(later < sooner for sooner, later in pairwise([self.begun, *self.arrivals])):
            raise ValueError("arrivals: must follow `begun` and each other in time")
        if len(self.counts) != len(self.arrivals) or sum(self.counts) != self.tokens:
            raise ValueError(f"arrivals: {len(self.arrivals)} of {sum(self.counts)} tokens; tokens are {self.tokens}")
        return self

    @property
    def counts(self) -> list[int]:
        """Number of tokens of each arrival."""
        return [1, *(emitted for _, _, emitted, _ in self.rounds)] if self.rounds else [1] * self.tokens

    @property
    def seconds(self) -> float:
        """Seconds from the request's turn to its last token, in which it held a slot."""
        return self.arrivals[-1] - self.begun

    @property
    def first_token_seconds(self) -> float:
        return self.arrivals[0] - self.begun

    @property
    def token_gaps(self) -> list[float]:
        """Inter-token latency of every token after the first."""
        # The tokens of one arrival share its gap evenly, so that a mean over tokens is the mean time per token.
        gaps: list[float] = []
        for (before, at), count in zip(pairwise(self.arrivals), self.counts[1:]):
            gaps += [(at - before) / count] * count
        return gaps


class Timeline:
    """Timeline of one run: its answers, the prompts' reading times and the rounds."""

    def __init__(self, answers: Sequence[TimedAnswer], seconds: float) -> None:
        self.answers, self.seconds = answers, seconds
        self._prompts = _united((answer.begun, answer.arrivals[0]) for answer in answers)
        self._starts = [start for start, _ in self._prompts]
        self._read = [0.0, *accumulate(end - start for start, end in self._prompts)]

    @property
    def prompt_seconds(self) -> float:
        """Seconds in which the target read prompts."""
        return self._read[-1]

    def _prompt_seconds_until(self, moment: float) -> float:
        # Whole reading intervals before the moment, and the begun one up to it.
        place = bisect_right(self._starts, moment)
        if not place:
            return 0.0
        start, end = self._prompts[place - 1]
        return self._read[place - 1] + min(end, moment) - start

    def decoding_seconds(self, answer: TimedAnswer) -> float:
        """Seconds from an answer's first token to its last, without the time of prompts that were read meanwhile."""
        first, last = answer.arrivals[0], answer.arrivals[-1]
        read = self._prompt_seconds_until(last) - self._prompt_seconds_until(first)
        return max(last - first - read, 0.0)

    def rate(self, prompts: frozenset[int] | None = None) -> float:
        """Throughput of the answers to some prompts, in tokens a second, as if every slot in use held such an answer.

        None: all answers, over wall time. The time for reading prompts is included. NaN where there is no such answer.
        """
        # Tokens per slot second, times the slots in use on average.
        chosen = self._of(prompts)
        held, all_held = sum(one.seconds for one in chosen), sum(one.seconds for one in self.answers)
        return over(sum(one.tokens for one in chosen), held) * over(all_held, self.seconds)

    def decoding_rate(self, prompts: frozenset[int] | None = None) -> float:
        """Decoding throughput, in tokens a second: first tokens and the time for reading prompts are left out."""
        # Both the slots' time and the run's are taken without the reading of prompts.
        chosen = self._of(prompts)
        held, all_held = sum(self._decoding[id(one)] for one in chosen), sum(self._decoding.values())
        tokens = sum(one.tokens - 1 for one in chosen)
        return over(tokens, held) * over(all_held, self.seconds - self.prompt_seconds)

    @cached_property
    def _decoding(self) -> dict[int, float]:
        return {id(one): self.decoding_seconds(one) for one in self.answers}

    @property
    def slots(self) -> float:
        """Mean number of slots in use."""
        return over(sum(one.seconds for one in self.answers), self.seconds)

    def _of(self, prompts: frozenset[int] | None) -> list[TimedAnswer]:
        return [one for one in self.answers if prompts is None or one.prompt in prompts]

    @cached_property
    def _rounds(self) -> dict[float, int]:
        """Slots of each round, by the moment at which it ended, in order."""
        return dict(sorted(Counter(at for one in self.answers for at in one.arrivals[1:]).items()))

    def round_seconds(self) -> list[float]:
        """Seconds of each of the fullest rounds of the run, those with as many slots as any round had.

        A round that follows a prompt counts only where no other does: the draft reads the prompt in it.
        """
        # A round lasts from the moment before it to its own end.
        fullest = max(self._rounds.values(), default=0)
        moments = sorted({*self._rounds, *(one.arrivals[0] for one in self.answers)})
        full = [(before, after) for before, after in pairwise(moments) if self._rounds.get(after) == fullest]
        steady = [(before, after) for before, after in full if before in self._rounds]
        return [after - before for before, after in steady or full]


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """The 50th and the 95th percentile, interpolated; NaN without values."""
    if not values:
        return math.nan, math.nan
    middle, high = np.percentile(np.asarray(values, dtype=np.float64), [50, 95])
    return float(middle), float(high)


def _united(intervals: Iterable[Interval]) -> list[Interval]:
    """Union of intervals as intervals that do not touch, in order: prompts of one pass share their time."""
    united: list[Interval] = []
    for start, end in sorted(intervals):
        if united and start <= united[-1][1]:
            united[-1] = united[-1][0], max(end, united[-1][1])
        else:
            united.append((start, end))
    return united


def median(values: Iterable[float]) -> float:
    """Median of the values that are not NaN; NaN without any."""
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else math.nan


def mean(values: Sequence[float]) -> float:
    """Mean of the values; NaN without any.

    For round times it is used in place of the median: where another process takes turns with a run, every kind of round
    loses the same share of its mean time, while a median would show that for long rounds alone.
    """
    return statistics.fmean(values) if values else math.nan


def over(above: float, below: float) -> float:
    """Ratio above / below; NaN where `below` is not above 0."""
    return above / below if below > 0 else math.nan
