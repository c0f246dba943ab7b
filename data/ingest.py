"""Ingestion: reads every source once, redacts records, keeps each distinct content in a spool on disk, and its labels,
signatures and turn keys in columns.

A content is what the target is shown. Its number is its place in the order of first sight. Of its exact copies, the
one with the smallest key stands for all.
"""

import json
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import progress, storage
from ..specdec.sampling_settings import SamplingSettings
from .concurrency import Traffic
from .conversation import SPLITS, Message, Split
from .dedup import SIGNATURE_LENGTH, Member, TurnIndex, group_key, signature
from .outcomes import SourceCounts
from .records import Record
from .redact import Redactor
from .settings import MixSettings
from .sources import SamplePrompts, read_records
from .split import weighted_choice
from .stratify import LogTable

_IN_MEMORY_BYTES = 32 << 20


class Spool:
    """Temporary file of records, each under the number that `add` returned."""

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

    def add(self, record: Record) -> int:
        """Keep a record. Returns its number."""
        line = json.dumps(_record_to_json(record), ensure_ascii=False).encode()
        with storage.disk_errors(self._beside):
            self._file.seek(self._ends[-1])
            self._file.write(line)
        self._ends.append(self._ends[-1] + len(line))
        return len(self._ends) - 2

    def __getitem__(self, number: int) -> Record:
        """The record that was kept under this number."""
        start, end = self._ends[number], self._ends[number + 1]
        self._file.seek(start)
        return _record_from_json(json.loads(self._file.read(end - start)))


def _record_to_json(record: Record) -> dict[str, Any]:
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    values["messages"] = [message.model_dump(exclude_none=True) for message in record.messages]
    values["sampling"] = record.sampling and record.sampling.model_dump()
    values["template_args"] = record.template_args and dict(record.template_args)
    return values


def _record_from_json(values: dict[str, Any]) -> Record:
    sampling = values["sampling"]
    parsed = {
        "messages": tuple(Message.model_validate(message) for message in values["messages"]),
        "unfollowed": tuple(values["unfollowed"]),
        "sampling": None if sampling is None else SamplingSettings.model_validate(sampling),
    }
    return Record(**{**values, **parsed})


_FIRST_CAPACITY = 1024


class IngestedRecords:
    """Distinct contents of all sources, and the log table of every record that was read."""

    def __init__(self, settings: MixSettings, spool: Spool) -> None:
        self._settings, self._spool = settings, spool
        self._redactor = Redactor(settings.redact)
        # By content: its id's number, then columns by number.
        self._number_of: dict[str, int] = {}
        self._spooled = array("Q")  # number in the spool of the record that stands for it
        self._rows = array("Q")  # row in the log table of that record
        self._groups: list[str | None] = []
        self._signatures = np.empty((_FIRST_CAPACITY, SIGNATURE_LENGTH), dtype=np.uint32)
        self._turns = TurnIndex()
        # By row of the log table: the content's number.
        self._number_at_row = array("Q")
        self._bound: dict[str, Split] = {}
        self.log = LogTable()
        self.traffic = Traffic()
        self.sources: list[SourceCounts] = []
        self.odd_clocks: list[str] = []
        """Dates and places of some records whose clock was wrong."""

    @property
    def redacted(self) -> Mapping[str, int]:
        """Number of redactions, by kind."""
        return self._redactor.counts

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

    def record(self, number: int) -> Record:
        """The record that stands for a content."""
        return self._spool[self._spooled[number]]

    def members(self) -> Iterator[Member]:
        """Yield clustering's view of each content, by number."""
        turns = self._turns.keys()
        for number, id in enumerate(self._number_of):
            yield Member(id, self._groups[number], self._signatures[number], turns[number])

    def add(self, found: Record) -> None:
        """Redact one record, log its labels, and keep its content if it is new or its copy is smaller."""
        # Every record has a row in the log table, copies too.
        record = redacted(found, self._redactor)
        row = self.log.add(record, sampling_of(record, self._settings)[0])
        number = self._number_of.setdefault(record.id, len(self._rows))
        self._number_at_row.append(number)

        # A new content is spooled, and what clustering needs is kept; a copy with a smaller key replaces the record.
        if number == len(self._rows):  # a new content
            self._rows.append(row)
            self._spooled.append(self._spool.add(record))
            self._groups.append(_group_of(record))
            self._sign(number, record)
            self._turns.add(record)
        elif (record.key, record.source) < ((other := self.record(number)).key, other.source):
            self._rows[number], self._spooled[number] = row, self._spool.add(record)
            self._groups[number] = _group_of(record)

        # Where several sources bind a content to a split, the strictest holds.
        only = self._settings.sources[record.source].only
        if only is not None:
            self._bound[record.id] = strictest([only, self._bound.get(record.id, only)])

    def _sign(self, number: int, record: Record) -> None:
        # The array doubles when it is full.
        if number == len(self._signatures):
            self._signatures = np.concatenate([self._signatures, np.empty_like(self._signatures)])
        self._signatures[number] = signature(record.user_text)


def ingest(
    settings: MixSettings, base_dir: Path, sample_prompts: SamplePrompts | None, spool: Spool
) -> IngestedRecords:
    """Read every source of a mix into `spool`. Raises InputError, MissingFileError, RecipeError; see `read_records`."""
    records = IngestedRecords(settings, spool)
    for index, source in enumerate(settings.sources):
        counts = SourceCounts()
        records.sources.append(counts)
        for record in read_records(source, base_dir, index, counts, sample_prompts, records.traffic):
            records.add(record)
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


def redacted(record: Record, redactor: Redactor) -> Record:
    """Redact a record in everything that the target is shown: messages, tool calls, tools, template arguments."""
    messages = tuple(
        message.model_copy(
            update={
                "content": redactor.value(message.content),
                "reasoning": redactor.value(message.reasoning),
                "name": redactor.value(message.name),
                "tool_call_id": redactor.value(message.tool_call_id),
                "tool_calls": redactor.calls(message.tool_calls),
            }
        )
        for message in record.messages
    )
    # Tools and template arguments are JSON values, whose texts are redacted at all depths.
    arguments = None if record.template_args is None else redactor.value(dict(record.template_args))
    return replace(record, messages=messages, tools=redactor.value(record.tools), template_args=arguments)


def sampling_of(record: Record, settings: MixSettings) -> tuple[SamplingSettings | None, int | None]:
    """Sampling settings and token limit of a record: the logged ones, else drawn from `mix.sampling`; None: neither."""
    sampling = record.sampling if settings.logged_sampling else None
    max_new_tokens = record.max_new_tokens if settings.logged_sampling else None
    # The draw depends on the content's id alone; it fills in only what is missing.
    if settings.sampling and (sampling is None or max_new_tokens is None):
        weights = [choice.weight for choice in settings.sampling]
        drawn = weighted_choice(settings.sampling, weights, "sampling", settings.salt, record.id)
        sampling = sampling or drawn.settings
        max_new_tokens = max_new_tokens or drawn.max_new_tokens
    return sampling, max_new_tokens


def strictest(splits: Iterable[Split]) -> Split:
    """The strictest of some splits, holdout before selection before train: data that judges may not train."""
    return max(splits, key=SPLITS.index)


def _group_of(record: Record) -> str | None:
    return None if record.group is None else group_key(record.domain, record.group)
