"""Concurrency of a log: how many requests are in flight at once, and a proposal for the recipe's `score.load`.

The distribution is over busy time (at least one request in flight), as this is what decoding steps see. Requests also
wait in queues before and inside an engine, so the requests at a replica are an upper bound of its decoding batch.

Shapes: R requests of one replica, E = 2R events.
"""

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InputError
from ..storage import utf8
from .redact import Redactor
from .settings import MixSettings

UNNAMED = "unnamed"
"""The replica of requests whose log names none."""
_NOT_COUNTED = -1
_LEAST_SHARE, _MOST_SIZES = 0.05, 5
_ENGINES = {"vllm", "sglang"}  # kinds of sources that an engine writes itself
_ROUNDING = 1e-9
_LONGEST_SECONDS = 86400.0


class Traffic:
    """Times, replicas and token counts of requests, in columns: 28 bytes for each request."""

    def __init__(self) -> None:
        self.started, self.ended = array("d"), array("d")
        self.replica, self.prompt_tokens, self.answer_tokens = array("i"), array("i"), array("i")
        self.names: dict[str, int] = {}
        self.untimed = 0
        """Number of requests without a start or an end; their token counts are used all the same."""

    def add(
        self,
        started: float | None,
        ended: float | None,
        replica: str | None = None,
        prompt_tokens: int | None = None,
        answer_tokens: int | None = None,
    ) -> None:
        """Add one request. Times are seconds of any clock that all requests share."""
        self.untimed += started is None or ended is None
        self.started.append(math.nan if started is None else started)
        self.ended.append(math.nan if ended is None else ended)
        self.replica.append(self.names.setdefault(utf8(replica or UNNAMED), len(self.names)))
        self.prompt_tokens.append(_NOT_COUNTED if prompt_tokens is None else prompt_tokens)
        self.answer_tokens.append(_NOT_COUNTED if answer_tokens is None else answer_tokens)

    def __len__(self) -> int:
        return len(self.started)


@dataclass(frozen=True)
class Level:
    """Requests in flight at one replica, or at all of them weighted by their busy time."""

    seconds: tuple[float, ...]
    """Time with 0, 1, 2, … requests in flight; the first is 0, as idle time is left out."""

    @property
    def busy_seconds(self) -> float:
        """Time with at least one request in flight."""
        return math.fsum(self.seconds)

    @property
    def mean(self) -> float:
        """Mean number of requests in flight, over the busy time."""
        return math.fsum(level * time for level, time in enumerate(self.seconds)) / self.busy_seconds

    @property
    def most(self) -> int:
        return len(self.seconds) - 1

    def quantile(self, share: float) -> int:
        """The fewest requests such that no more are in flight during this share of the busy time."""
        below = np.cumsum(self.seconds)
        return int(np.searchsorted(below, share * below[-1] * (1 - _ROUNDING)))

    @property
    def p50(self) -> int:
        return self.quantile(0.5)

    @property
    def p95(self) -> int:
        return self.quantile(0.95)


@dataclass(frozen=True)
class Concurrency:
    """The load of a log."""

    requests: int
    """Number of requests that the levels count: those with a start and a later end."""
    untimed: int
    zero_length: int
    """Number of requests that started and ended at the same time: never run, or logged in whole seconds."""
    skewed: int
    """Number of requests that ended before they started, or a day later: two clocks."""
    replicas: dict[str, Level]
    pooled: Level | None
    """None: no request has a length."""
    prompt_tokens: float | None
    """Median prompt tokens; None: the log counts none."""
    answer_tokens: float | None

    def yaml(self, engine: str | None) -> str:
        """The recipe's `score.load` of this log; `engine`: whose it is, where that is known.

        Raises InputError where no request has a start and a later end.
        """
        if self.pooled is None:
            raise InputError(
                f"logs: 0 requests with a start and a later end ({self.untimed} untimed, {self.zero_length} of no "
                f"length, {self.skewed} of two clocks); batch sizes need at least one"
            )
        return proposed_load(self.pooled, self.prompt_tokens, self.answer_tokens, engine)


def measure_concurrency(traffic: Traffic) -> Concurrency:
    """Levels of each replica and of all, and median tokens. Requests of no length and of two clocks are left out."""
    # Only requests with a start and a later end have a level; NaN and reversed times drop out by their length.
    start_R, end_R = np.frombuffer(traffic.started), np.frombuffer(traffic.ended)
    replica_R = np.frombuffer(traffic.replica, dtype=np.int32)
    length_R = end_R - start_R
    usable_R = (length_R > 0) & (length_R < _LONGEST_SECONDS)  # false of NaN
    # Replicas by name, those alone that have usable requests.
    levels = {}
    for name, number in sorted(traffic.names.items()):
        own_R = usable_R & (replica_R == number)
        if own_R.any():
            levels[name] = level_of(start_R[own_R], end_R[own_R])
    return Concurrency(
        requests=int(usable_R.sum()),
        untimed=traffic.untimed,
        zero_length=int((length_R == 0).sum()),
        skewed=int(((length_R < 0) | (length_R >= _LONGEST_SECONDS)).sum()),
        replicas=levels,
        pooled=pool(levels),
        prompt_tokens=_median(traffic.prompt_tokens),
        answer_tokens=_median(traffic.answer_tokens),
    )


def level_of(start_R: npt.NDArray[np.float64], end_R: npt.NDArray[np.float64]) -> Level:
    """Time with each number of requests in flight, from their starts and later ends."""
    # Every start adds a request and every end takes one away; between two events the count stands still.
    time_E = np.concatenate([start_R, end_R])
    change_E = np.repeat(np.array([1, -1], dtype=np.int32), len(start_R))
    order_E = np.argsort(time_E, kind="stable")
    running_E = np.cumsum(change_E[order_E])
    lasting_E = np.diff(time_E[order_E])
    # Between events of one time the count may dip or peak, for no time at all.
    shown_E = (lasting_E > 0) & (running_E[:-1] > 0)
    return Level(tuple(np.bincount(running_E[:-1][shown_E], weights=lasting_E[shown_E]).tolist()))


def pool(levels: Mapping[str, Level]) -> Level | None:
    """The levels of all replicas, each weighted by its busy time."""
    if not levels:
        return None
    seconds = np.zeros(1 + max(level.most for level in levels.values()))
    for level in levels.values():
        seconds[: 1 + level.most] += level.seconds
    return Level(tuple(seconds.tolist()))


def batch_shares(level: Level) -> dict[int, float]:
    """A few powers of two that stand for the levels, each with its share of the busy time in whole percent.

    Each level counts for the power that is nearest by ratio; powers with less than 5 % and, beyond five, the rarest go
    to their neighbour.
    """
    # The time at each level goes to the nearest power of two.
    seconds: dict[int, float] = {}
    for requests, time in enumerate(level.seconds[1:], start=1):
        if time > 0:
            size = 1 << round(math.log2(requests))
            seconds[size] = seconds.get(size, 0.0) + time
    # The rarest power goes to its neighbour until all that are left have a share worth naming.
    total = math.fsum(seconds.values())
    while len(seconds) > 1:
        rarest = min(seconds, key=lambda size: (seconds[size], size))
        if seconds[rarest] >= _LEAST_SHARE * total and len(seconds) <= _MOST_SIZES:
            break
        time = seconds.pop(rarest)
        near = min(seconds, key=lambda size: (abs(math.log2(size / rarest)), -size))
        seconds[near] += time
    return _percent({size: time / total for size, time in sorted(seconds.items())})


def proposed_load(
    level: Level, prompt_tokens: float | None, answer_tokens: float | None, engine: str | None = None
) -> str:
    """The recipe's section `score.load`, as YAML: batch sizes with their shares, the context half way through a median
    answer, and that answer's tokens. An engine that is not known is left to the reader."""
    # Batch sizes, and the engine where the log tells.
    sizes = ", ".join(f"{size}: {share:.2f}" for size, share in batch_shares(level).items())
    serves = f"engine: {engine}" if engine else "# engine: the log does not tell; vllm, sglang or llama.cpp, by hand"
    lines = ["score:", "  load:", f"    {serves}", f"    batch_sizes: {{{sizes}}}"]
    # The context of a median request half way through its answer.
    if prompt_tokens is None or answer_tokens is None:
        lines.append("    # context_tokens and answer_tokens: the log counts no tokens; set them by hand")
    else:
        answer = max(2, round(answer_tokens))
        context = max(1, round(prompt_tokens)) + answer // 2
        lines += [f"    context_tokens: {max(2, context)}", f"    answer_tokens: {answer}"]
    return "\n".join(lines) + "\n"


def _median(counts: "array[int]") -> float | None:
    count_R = np.frombuffer(counts, dtype=np.int32)
    counted_R = count_R[count_R != _NOT_COUNTED]
    return float(np.median(counted_R)) if len(counted_R) else None


def _percent(shares: Mapping[int, float]) -> dict[int, float]:
    """Shares in whole percent that add up to 100: those that lost most by rounding down get what is left."""
    whole = {size: math.floor(100 * share) for size, share in shares.items()}
    left = 100 - sum(whole.values())
    for size in sorted(shares, key=lambda size: (whole[size] - 100 * shares[size], size))[:left]:
        whole[size] += 1
    return {size: percent / 100 for size, percent in whole.items()}


def concurrency_record(traffic: Traffic, settings: MixSettings) -> dict[str, Any] | None:
    """Load of a log for the manifest, with the proposed `score.load`; None: no request has a start and a later end."""
    found = measure_concurrency(traffic)
    if found.pooled is None:
        return None
    redactor = Redactor(settings.redact, settings.phone_countries)  # replicas go by addresses

    def figures(level: Level) -> dict[str, Any]:
        return {
            "p50": level.p50,
            "p95": level.p95,
            "most": level.most,
            "mean": level.mean,
            "busy_seconds": level.busy_seconds,
        }

    # A redacted name gets a number, as several replicas may look alike then.
    replicas = {
        name if redactor.text(name) == name else f"{redactor.text(name)} {number}": figures(level)
        for number, (name, level) in enumerate(found.replicas.items(), start=1)
    }
    counts = {name: getattr(found, name) for name in ("requests", "untimed", "zero_length", "skewed")}
    # Counts of requests, levels of each replica and of all, and the proposed section as YAML.
    return {**counts, "replicas": replicas, "all": figures(found.pooled), "load": found.yaml(engine_of(settings))}


def engine_of(settings: MixSettings) -> str | None:
    """The engine whose own logs the sources are; None: no engine's, or several ones'."""
    found = {source.kind for source in settings.sources} & _ENGINES
    return found.pop() if len(found) == 1 else None
