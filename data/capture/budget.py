"""Budget and progress of a capture: its cost so far and to come, and whether budget and disk have room for more.

Answers still to come count with the mean length of finished answers, or with their limits while there are none. Where
ranks share a capture, each counts its own share, and assumes that the others' are as large.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import storage
from ..conversation import Split
from ..settings import BudgetSettings, CaptureSettings
from ..store import Sample
from .plan import Prompts, ShardPlan, TurnRequest, answer_bytes

_SPARE_BYTES = 1 << 20  # records, the manifest, and what others write meanwhile
_NOTE_SECONDS = 0.5


@dataclass
class _Pending:
    """Sums over answers that are not there yet."""

    count: int = 0
    limits: int = 0
    """Sum of the answers' token limits."""
    prompts: int = 0
    """Sum of the known tokens of their prompts."""

    def add(self, answer: TurnRequest, prompt: int, sign: int = 1) -> None:
        self.count += sign
        self.limits += sign * answer.max_new_tokens
        self.prompts += sign * prompt


class CaptureBudget:
    """Accounts for one run's tokens, bytes and time on top of those of earlier runs (`records`).

    `left`: the shards to answer in this process, which is one of `writers` processes that write into the folder.
    """

    def __init__(
        self,
        folder: Path,
        left: Iterable[ShardPlan],
        records: Iterable[Mapping[str, Any]],
        prompts: Prompts,
        settings: CaptureSettings,
        budget: BudgetSettings | None,
        tick: Callable[..., None] = lambda amount, note="": None,
        clock: Callable[[], float] = time.monotonic,
        writers: int = 1,
    ) -> None:
        self._folder, self._writers, self._prompts, self._settings = folder, writers, prompts, settings
        self._limits = {} if budget is None else budget.limits
        self._tick, self._clock, self._start, self._noted = tick, clock, clock(), 0.0

        # What earlier runs spent.
        earlier = list(records)
        self._answers, self._tokens, self._bytes, self._seconds = (
            sum(record[name] for record in earlier) for name in ("samples", "tokens", "bytes", "seconds")
        )
        self._written = self._earlier_bytes = self._bytes

        # Pending answers, by whether they train: those not finished, of shards not written, of shards begun.
        self._to_come: dict[bool, _Pending] = {True: _Pending(), False: _Pending()}  # by whether they train
        self._unwritten: dict[bool, _Pending] = {True: _Pending(), False: _Pending()}
        for shard in left:
            for sums in (self._to_come, self._unwritten):
                self._count(sums, shard)
        self._begun: dict[bool, _Pending] = {True: _Pending(), False: _Pending()}
        self._emitted = self._emitted_of_ended = 0
        self.ended_by: str | None = None
        """The limit that kept a shard from being begun when nothing else was being answered."""

    def may_open(self, shard: ShardPlan) -> bool:
        """Whether another shard may be begun; if so it counts as begun. Only the train split is ever cut."""
        # Selection and holdout are always answered. `ended_by` is set only where nothing is in flight to wait for.
        if shard.split == "train" and self._limits:
            limit = self._used_up_limit()
            self.ended_by = None if any(sums.count for sums in self._begun.values()) else limit
            if limit is not None:
                return False
        self._count(self._begun, shard)
        return True

    def emitted(self, tokens: int) -> None:
        """Count answer tokens."""
        self._emitted += tokens
        self._tick_progress(0)

    def ended(self, answer: TurnRequest, sample: Sample | None) -> None:
        """Count a complete answer; None: it was left out."""
        # The answer is no longer to come; what it really took goes into the totals.
        for sums in (self._begun, self._to_come):
            sums[answer.conversation.split == "train"].add(answer, self._prompts.known_tokens(answer), -1)
        if sample is not None:
            length = len(sample.answer_ids)
            self._answers += 1
            self._tokens += length
            self._emitted_of_ended += length
            self._bytes += answer_bytes(sample.split, len(sample.prompt_ids), length, self._settings)
        self._tick_progress(1)

    def wrote(self, shard: ShardPlan, size: int) -> None:
        """Count a shard on disk. Raises DiskFullError where what is left would not fit, as far as can be foreseen."""
        # What all writers have yet to write, but no more than the budget allows.
        self._count(self._unwritten, shard, -1)
        self._written += size
        need = self._bytes_of(self._unwritten, self._mean)
        if "gigabytes" in self._limits:
            need = min(need, max(0, int(self._limits["gigabytes"] * 1e9) - self._written))
        self._require_space(self._writers * need, "; what is finished stays, and the same command goes on from it")

    def require_space_for(self, shard: ShardPlan) -> None:
        """Raise DiskFullError unless the disk has room for this shard, should every answer use its limit."""
        first = {True: _Pending(), False: _Pending()}
        self._count(first, shard)
        self._require_space(self._bytes_of(first, mean=None), "")

    def _count(self, sums: dict[bool, _Pending], shard: ShardPlan, sign: int = 1) -> None:
        for answer in shard.answers:
            sums[shard.split == "train"].add(answer, self._prompts.known_tokens(answer), sign)

    @property
    def _mean(self) -> float | None:
        return self._tokens / self._answers if self._answers else None

    def _tokens_of(self, sums: dict[bool, _Pending]) -> float:
        return sum(_expected_tokens(pending, self._mean) for pending in sums.values())

    def _bytes_of(self, sums: dict[bool, _Pending], mean: float | None = None) -> int:
        total = 0
        # Bytes per answer, per prompt token (an int32 id) and per answer token (with signals, if it trains).
        for trains, pending in sums.items():
            split: Split = "train" if trains else "holdout"
            per_token = answer_bytes(split, 0, 1, self._settings) - answer_bytes(split, 0, 0, self._settings)
            fixed = answer_bytes(split, 0, 0, self._settings) * pending.count + 4 * pending.prompts
            total += fixed + int(per_token * _expected_tokens(pending, mean))
        return total

    def _used_up_limit(self) -> str | None:
        """The limit that is used up once all that was begun is answered, if one is."""
        spent = {
            "tokens": self._tokens + self._tokens_of(self._begun),
            "hours": self._hours(),
            "gigabytes": (self._bytes + self._bytes_of(self._begun, self._mean)) / 1e9,
        }
        return next((name for name, limit in self._limits.items() if spent[name] >= limit), None)

    def _hours(self) -> float:
        return float(self._seconds + self._clock() - self._start) / 3600

    def _require_space(self, need: int, rest: str) -> None:
        advice = f"free some, or set capture.budget.gigabytes or a smaller capture.top_k{rest}"
        storage.require_free_space(self._folder, need + _SPARE_BYTES, advice)

    def _tick_progress(self, answers: int) -> None:
        # The note is computed twice a second at most, and for the last answer; otherwise the bar just moves.
        now = self._clock()
        last = answers and not any(sums.count for sums in self._to_come.values())
        if now - self._noted < _NOTE_SECONDS and not last:
            if answers:
                self._tick(answers)
            return
        self._noted = now
        self._tick(answers, self.note())

    def note(self) -> str:
        """The progress line: `12,345 tokens, 900 tok/s, 40 s left, 10.2 MB written, 84.0 GB free`."""
        # Tokens of this run, and their rate.
        rate = self._emitted / max(1e-9, self._clock() - self._start)
        left = self.seconds_left()
        parts = [f"{self._emitted:,} tokens", f"{rate:,.0f} tok/s", *([] if left is None else [_duration(left)])]
        written, free = storage.size_text(self._written), storage.size_text(storage.free_bytes(self._folder))
        return ", ".join([*parts, f"{written} written", f"{free} free"])

    @property
    def share_done(self) -> float:
        """Share of this run's work that is done, as far as can be foreseen; 0 before the first answer has ended."""
        left, taken = self.seconds_left(), self._clock() - self._start
        return 0.0 if left is None else taken / (taken + left)

    @property
    def bytes_of_run(self) -> float:
        """Bytes that all writers of this run write, as far as can be foreseen; 0: a budget may end it before."""
        rest = 0 if self._limits else self._bytes - self._earlier_bytes + self._bytes_of(self._to_come, self._mean)
        return self._writers * rest

    def seconds_left(self) -> float | None:
        """Seconds to the end of the answers, or of the budget if that comes first; None: no answer has ended yet."""
        elapsed = self._clock() - self._start
        if not self._answers or not self._emitted or elapsed <= 0:
            return None
        # Tokens to come, or what the budget leaves of them, at the speed so far.
        partial = self._emitted - self._emitted_of_ended  # of answers that have not ended
        tokens = self._tokens_of(self._to_come) - partial
        if "tokens" in self._limits:
            tokens = min(tokens, self._limits["tokens"] - self._tokens - partial)
        if "gigabytes" in self._limits:
            tokens = min(
                tokens, (self._limits["gigabytes"] * 1e9 - self._bytes) / (self._bytes / self._tokens) - partial
            )
        # At this run's speed, and no longer than the hours that are left.
        seconds = max(0.0, tokens) * elapsed / self._emitted
        if "hours" in self._limits:
            seconds = min(seconds, max(0.0, self._limits["hours"] - self._hours()) * 3600)
        return seconds


def _expected_tokens(pending: _Pending, mean: float | None) -> float:
    """Expected tokens of pending answers: by the `mean` length of finished ones; None: by their limits."""
    return pending.limits if mean is None else min(pending.limits, pending.count * mean)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s left"
    return f"{seconds / 60:.0f} min left" if seconds < 7200 else f"{seconds / 3600:.1f} h left"
