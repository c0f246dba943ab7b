"""Ingestion: reads every source once, redacts records, keeps each distinct content in a spool on disk, and its labels,
signatures and turn keys in columns.

A content is what the target is shown. Its number is its place in the order of first sight. Of its exact copies, the
one with the smallest key stands for all, and of equal ones the latest.
"""

import math
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import progress, storage
from .concurrency import Traffic
from .conversation import SPLITS, Split
from .dedup import SIGNATURE_LENGTH, Member, TurnIndex, TurnKeys
from .logged_prompts import LoggedPromptIndex
from .prepared_records import Prepared, Preparer, columns, restored
from .record_outcomes import SourceCounts, Unit
from .settings import MixSettings, Source
from .sources import SamplePrompts, SmallestSample, counted, require_some, units
from .stratify import LogTable
from .workers import Workers, batched

_IN_MEMORY_BYTES = 32 << 20


class Spool:
    """Temporary file of lines, each under the number that `add` returned."""

    def __init__(self, beside: Path) -> None:
        """A small spool stays in memory; a larger one lies on the file system of `beside`."""
        beside.mkdir(parents=True, exist_ok=True)
        self._beside = beside
        self._file = tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES, dir=str(beside))  # noqa: SIM115  closed by __exit__
        self._ends = array("Q", [0])

    def __enter__(self) -> "Spool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._ends) - 1

    def add(self, line: bytes) -> int:
        """Keep a line. Returns its number."""
        with storage.disk_errors(self._beside):
            self._file.seek(self._ends[-1])
            self._file.write(line)
        self._ends.append(self._ends[-1] + len(line))
        return len(self._ends) - 2

    def __getitem__(self, number: int) -> bytes:
        """The line that was kept under this number."""
        start, end = self._ends[number], self._ends[number + 1]
        self._file.seek(start)
        return self._file.read(end - start)


_FIRST_CAPACITY = 1024


class IngestedRecords:
    """Distinct contents of all sources, and the log table of every record that was read."""

    def __init__(self, settings: MixSettings, spool: Spool) -> None:
        self._settings, self._spool = settings, spool
        self.redacted: Counter[str] = Counter(dict.fromkeys(settings.redact, 0))
        """Number of redactions, by kind."""
        # By content: its id's number, then columns by number.
        self._number_of: dict[str, int] = {}
        self._spooled = array("Q")  # number in the spool of the record that stands for it
        self._rows = array("Q")  # row in the log table of that record
        self._order: list[tuple[str, int, float]] = []  # its key, source and age
        self._groups: list[str | None] = []
        self._signatures = np.empty((_FIRST_CAPACITY, SIGNATURE_LENGTH), dtype=np.uint32)
        self._turns = TurnIndex()
        # By row of the log table: the content's number.
        self._number_at_row = array("Q")
        self._logged = LoggedPromptIndex()
        self._bound: dict[str, Split] = {}
        self.log = LogTable()
        self.traffic = Traffic()
        self.sources: list[SourceCounts] = []
        self.odd_clocks: list[str] = []
        """Dates and places of some records whose clock was wrong."""

    @property
    def ids(self) -> list[str]:
        """Ids of the distinct contents, by number."""
        return list(self._number_of)

    @property
    def rows(self) -> NDArray[np.int64]:
        """Row of the log table that stands for each content, by number."""
        return np.array(self._rows, dtype=np.int64)

    @property
    def number_at_row(self) -> NDArray[np.int64]:
        """Content number of each row of the log table."""
        return np.array(self._number_at_row, dtype=np.int64)

    @property
    def bound(self) -> dict[str, Split]:
        """Splits that sources prescribe for some contents (`only`), by id."""
        return self._bound

    def continued(self) -> dict[str, str]:
        """Map each conversation that others continue to the longest that does; by ids."""
        return self._turns.continued(self.ids)

    def row(self, number: int) -> dict[str, Any]:
        """Columns of the record that stands for a content."""
        return columns(self._spool[self._spooled[number]])

    def user_text(self, number: int) -> str:
        """What the user says in a content."""
        return restored(self._spool[self._spooled[number]]).user_text

    def logged_prompts(self, asked: Sequence[TurnKeys]) -> Iterator[list[dict[str, Any]]]:
        """Yield what the log tells of the prompts of these conversations' turns; see `LoggedPromptIndex.prompts`."""
        return self._logged.prompts(asked, self.log, self.served())

    def served(self) -> dict[int, str]:
        """The key of the prompts that each source's log shows as served; see `LoggedPromptIndex.served`."""
        return self._logged.served([counts.served for counts in self.sources])

    def members(self) -> Iterator[Member]:
        """Yield clustering's view of each content, by number."""
        turns = self._turns.keys()
        for number, id in enumerate(self._number_of):
            yield Member(id, self._groups[number], self._signatures[number], turns[number])

    def add(self, found: Prepared) -> None:
        """Log one record's labels, and keep its content if it is new or its copy is smaller."""
        # Every record has a row in the log table, copies too.
        if found.redacted:
            self.redacted.update(found.redacted)
        row = self.log.add(found.row)
        number = self._number_of.setdefault(found.id, len(self._rows))
        self._number_at_row.append(number)
        self._logged.add(found.traces)

        # A new content is spooled, and what clustering needs is kept; a copy with a smaller key replaces the record.
        started = found.row.started
        order = (found.key, found.source, math.inf if started is None else -started)
        if number == len(self._rows):  # a new content
            self._rows.append(row)
            self._order.append(order)
            self._spooled.append(self._spool.add(found.stored))
            self._groups.append(found.group)
            self._sign(number, found.signature)
            self._turns.add(found.turn_keys)
        elif order < self._order[number]:
            self._rows[number], self._spooled[number] = row, self._spool.add(found.stored)
            self._order[number], self._groups[number] = order, found.group

        # Where several sources bind a content to a split, the strictest holds.
        only = self._settings.sources[found.source].only
        if only is not None:
            self._bound[found.id] = strictest([only, self._bound.get(found.id, only)])

    def _sign(self, number: int, signature: bytes) -> None:
        # The array doubles when it is full.
        if number == len(self._signatures):
            self._signatures = np.concatenate([self._signatures, np.empty_like(self._signatures)])
        self._signatures[number] = np.frombuffer(signature, dtype="<u4")


def ingest(
    settings: MixSettings, base_dir: Path, sample_prompts: SamplePrompts | None, spool: Spool, workers: Workers
) -> IngestedRecords:
    """Read every source of a mix into `spool`. Raises InputError, MissingFileError, RecipeError; see `read_records`."""
    records = IngestedRecords(settings, spool)
    for index, source in enumerate(settings.sources):
        counts = SourceCounts()
        records.sources.append(counts)
        batches = batched(units(source, base_dir, index, counts, sample_prompts))
        for prepared in _prepared(source, batches, index, counts, records.traffic, workers):
            records.add(prepared)
        require_some(source, index, counts)
    # A clock that ran wrong says nothing of when a record was asked.
    records.odd_clocks = [
        f"{day} at {where.removeprefix(f'{base_dir}/')}" for day, where in records.log.distrust_clocks()
    ]
    if records.odd_clocks:
        progress.say(
            f"{records.log.odd_clocks} of {len(records.log)} records have a time far from all others, and count as "
            f"records without one: {', '.join(records.odd_clocks)}"
        )
    return records


def strictest(splits: Iterable[Split]) -> Split:
    """The strictest of some splits, holdout before selection before train: data that judges may not train."""
    return max(splits, key=SPLITS.index)


def _prepared(
    source: Source, batches: Iterator[list[Unit]], index: int, counts: SourceCounts, traffic: Traffic, workers: Workers
) -> Iterator[Prepared]:
    """Yield the prepared records of a source, at most `limit` of them; counts and traffic are filled."""
    if source.limit is None:
        outcomes = workers.map(Preparer.prepared_outcomes, ((index, batch) for batch in batches))
        yield from counted(outcomes, source, counts, traffic)
        return
    # A key above the largest one that a full sample holds is dropped where it is found.
    sample = SmallestSample(source.limit, counts.leave_out)
    below = workers.map(Preparer.outcomes_below, ((index, batch, sample.limit_key) for batch in batches))
    for record in counted(below, source, counts, traffic):
        sample.add(record)
    for outcome in workers.map(Preparer.prepared_records, ((some,) for some in batched(sample.records()))):
        if outcome.record is not None:
            yield outcome.record
        else:
            counts.take_back()
            counts.add(outcome, source)
