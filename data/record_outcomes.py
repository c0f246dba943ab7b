"""Outcomes: what became of each line of a source. A record, a reason why it gives none, or a broken rule; and their
counts, which add up to the lines that were read.

`outcomes_of` depends on nothing but its arguments, so lines may be parsed in any process; `SourceCounts` counts their
outcomes in the order of the lines.
"""

import hashlib
import re
from bisect import insort
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeVar, cast

from ..errors import InputError
from .files import Item
from .logs.chat import Entry, JoinedLines, LeftOut, LogReader, Reason, Timing
from .logs.parsing import prompt_digest
from .logs.readers import FORMATS
from .records import DEFAULT_COLUMNS, Record, parse
from .settings import LABEL, DatasetSource, FileSource, Shape, Source, TargetSource

JOINED: Reason = "joined with another line"
_NO_TURN: Reason = "no turn to answer"
_IDLE = ("no chat request", "health check")  # what no decoding engine was busy with
NO_CHAT = ("other log line", JOINED, "logged twice", *_IDLE)
"""Reasons of lines that are no request of their own: no domain misses them."""
MOST_PLACES = 32  # kept of each reason
OVER_LIMIT, COPY, BROKEN = "over its source's limit", "exact copy", "broken rule"
UNFINISHED = "prompt that the target did not finish"


R = TypeVar("R", covariant=True)
S = TypeVar("S")


class Outcome(NamedTuple, Generic[R]):
    """What became of one line, row or request: a record, or why there is none."""

    where: str
    record: R | None = None
    left_out: str | None = None
    """Why it holds no conversation that can be asked."""
    broken: str | None = None
    """The rule that it breaks, behind `where`."""
    domain: str | None = None
    """Domain that the record has or, as far as it can be told, would have."""
    timing: Timing | None = None
    """Times of a request that an engine was busy with."""
    unfollowed: Sequence[str] = ()
    """The record's."""
    served: tuple[bytes, bool] | None = None
    """As in `Entry`."""

    def with_record(self, record: S | None) -> "Outcome[S]":
        """The same outcome with another form of its record."""
        return Outcome(self.where, record, *self[2:])


@dataclass
class SourceCounts:
    """Counts of one source: `read` is the sum of all others."""

    read: int = 0
    skipped: int = 0
    """Lines that break a rule."""
    taken: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    """Lines without a conversation, and records beyond the source's limit, by reason."""
    unfollowed: Counter[str] = field(default_factory=Counter)
    """Records whose answer was shaped by a field of the request that a capture does not follow, by its name."""
    places: dict[str, list[tuple[str, str]]] = field(default_factory=dict, compare=False)
    """For each reason an even sample of the lines: hashes of their places, and the places."""
    domains: dict[str, Counter[str]] = field(default_factory=dict, compare=False)
    """By domain, as far as it can be told, the same for requests that gave no record."""
    unanswered: set[str] = field(default_factory=set, compare=False)
    """Domains and sources that let a conversation without a turn pass."""
    served: dict[bytes, bool] = field(default_factory=dict, compare=False)
    """Hashes of the prompts that the log shows as served, and whether a request with it was answered."""

    def add(self, outcome: Outcome[object], source: Source) -> None:
        """Count what a line became; a record counts as taken until `leave_out` says otherwise.

        Raises InputError for a broken rule that the source does not skip, and for a conversation without a turn unless
        the recipe allows it.
        """
        self.read += 1
        if outcome.unfollowed:
            self.unfollowed.update(outcome.unfollowed)
        if outcome.served is not None:
            digest, answered = outcome.served
            self.served[digest] = answered or self.served.get(digest, False)
        if outcome.record is not None:
            self.taken += 1
            return
        if outcome.left_out is not None:
            self._count(outcome.left_out)
            if outcome.left_out == _NO_TURN:
                self._allow(outcome, source)
        elif isinstance(source, TargetSource) or source.skip_invalid:
            self.skipped += 1
        else:
            raise InputError(outcome.broken)
        reason = outcome.left_out or BROKEN
        self._note_place(reason, outcome.where, outcome.broken)
        if outcome.domain and outcome.left_out not in NO_CHAT:
            self.domains.setdefault(outcome.domain, Counter())[reason] += 1

    def leave_out(self, record: Record, reason: str) -> None:
        """Leave out a record that was counted as taken."""
        self.taken -= 1
        self._count(reason)
        self._note_place(reason, record.where)
        if record.domain:
            self.domains.setdefault(record.domain, Counter())[reason] += 1

    def take_back(self) -> None:
        """Forget a record that was counted as taken."""
        self.read -= 1
        self.taken -= 1

    def _note_place(self, reason: str, where: str, broken: str | None = None) -> None:
        # The places with the smallest hashes stay: an even sample that no order influences.
        if reason == JOINED:
            return
        kept = self.places.setdefault(reason, [])
        insort(
            kept, (hashlib.blake2b(where.encode(errors="surrogateescape"), digest_size=8).hexdigest(), broken or where)
        )
        del kept[MOST_PLACES:]

    def take_back_joined(self) -> None:
        """Forget one line that counts as joined with another: it turned out to stand for itself."""
        self.read -= 1
        self._count(JOINED, -1)

    def _count(self, reason: str, change: int = 1) -> None:
        self.left_out[reason] = self.left_out.get(reason, 0) + change
        if not self.left_out[reason]:
            del self.left_out[reason]

    def _allow(self, outcome: Outcome[object], source: Source) -> None:
        names = {name_of(source), *([outcome.domain] if outcome.domain else [])}
        allowed = names & source.may_be_unanswered
        if not allowed:
            raise InputError(
                f"{outcome.where}: has no turn to answer; {' or '.join(map(repr, sorted(names)))} in "
                "mix.may_be_unanswered leaves it out"
            )
        self.unanswered |= allowed


def name_of(source: Source) -> str:
    """Name of a source for messages and the manifest, as in the recipe."""
    if isinstance(source, FileSource):
        return source.path
    if isinstance(source, DatasetSource):
        return f"{source.name}[{source.split}]"
    return "prompts of the target"


Unit = Item | JoinedLines | Entry | Outcome[Any]
"""A line of a source; a request of a log, joined of several lines, taken apart or not yet; or what became of it."""


def read_item(reader: LogReader, item: Item, server: str) -> Iterator[Entry | JoinedLines | Outcome[Record]]:
    """Yield what a reader makes of one item: a request each, or what else became of it."""
    entries = 0
    try:
        for entry in reader.feed(item.decode(), item.where, server):
            entries += 1
            yield entry
    except LeftOut as request:
        yield Outcome(item.where, left_out=request.reason)
    except InputError as error:
        yield Outcome(item.where, broken=str(error))
    else:
        if not entries:
            yield Outcome(item.where, left_out=JOINED)


def outcomes_of(source: Source, index: int, unit: Unit) -> Iterator[Outcome[Record]]:
    """Yield the outcomes of one line or request: one, or one a request where a line holds a page of several.

    `unit`: an item of the source's files, or what a reader made of one that must see all lines in order.
    """
    if isinstance(unit, Outcome):
        yield unit
    elif isinstance(unit, Entry):
        yield _of_entry(source, index, unit)
    elif not isinstance(unit, Item):
        yield _of_joined(source, index, unit)
    elif isinstance(source, FileSource) and source.kind in FORMATS:
        for part in read_item(FORMATS[source.kind].reader(source), unit, ""):
            yield from outcomes_of(source, index, part)
    else:
        yield _of_line(source, index, unit)


def _of_joined(source: Source, index: int, joined: JoinedLines) -> Outcome[Record]:
    """Outcome of a request that is still to be taken apart."""
    try:
        return _of_entry(source, index, joined.entry())
    except InputError as error:
        return Outcome(joined.where, broken=str(error))


def _of_entry(source: Source, index: int, entry: Entry) -> Outcome[Record]:
    """Outcome of a request of a tool's log."""
    # The line's own field names the replica.
    assert isinstance(source, FileSource)
    replica = entry.line.get(source.replica_field)
    timing = entry.timing if replica is None else entry.timing._replace(replica=str(replica))
    busy = timing if entry.in_flight and entry.left_out not in _IDLE and timing != Timing() else None

    # Requests without a conversation count for the load only.
    if entry.left_out is not None:
        domain = None if entry.left_out in NO_CHAT else _domain_named(source, entry.line)
        return Outcome(entry.where, left_out=entry.left_out, domain=domain, timing=busy, served=entry.served)

    # The record's own times must be dates of this very request, of a known year.
    if not entry.dated:
        timing = timing._replace(started=None, ended=None)
    elif not entry.in_flight:
        timing = timing._replace(ended=None)
    found = _parsed(source, index, entry.line, "messages", entry.where, timing, entry.others)
    found = found._replace(timing=busy, served=entry.served)
    if entry.shown is not None and found.record is not None:
        found = found.with_record(replace(found.record, shown=bytes.fromhex(prompt_digest(entry.shown))))
    if entry.pieces is None or found.record is None:
        return found
    # An engine's own log tells what it took, whoever named it.
    return found.with_record(replace(found.record, pieces=tuple(entry.pieces), server_sampling=()))


def _of_line(source: Source, index: int, item: Item) -> Outcome[Record]:
    """Outcome of a value in one of our own shapes."""
    try:
        line = item.decode()
    except LeftOut as row:
        return Outcome(item.where, left_out=row.reason, domain=_domain_named(source, None))
    except InputError as error:
        return Outcome(item.where, broken=str(error))
    # The column under the shape's own name, beside all others, from which labels may be read.
    shape, column = _shape_of(source)
    if column is not None and isinstance(line, dict):
        line = {**line, DEFAULT_COLUMNS[shape]: line.get(column)}
    found = _parsed(source, index, line, shape, item.where, None)
    if found.record is None:
        return found
    # Lines of any shape may carry times.
    timing = Timing(*(getattr(found.record, name) for name in Timing._fields))
    return found if timing == Timing() else found._replace(timing=timing)


def _shape_of(source: Source) -> tuple[Shape, str | None]:
    """Shape of a source's lines, and the column that holds it (None: the one of the shape's own name)."""
    if isinstance(source, DatasetSource):
        return source.shape, source.column
    if isinstance(source, FileSource):
        return cast(Shape, source.kind), source.column
    return "prompts", None


def _parsed(
    source: Source,
    index: int,
    line: Any,
    shape: Shape,
    where: str,
    timing: Timing | None,
    others: Sequence[Mapping[str, Any]] = (),
) -> Outcome[Record]:
    try:
        record = parse(line, shape, source, where, index, timing, others)
    except LeftOut as request:
        return Outcome(where, left_out=request.reason, domain=_domain_named(source, line))
    except InputError as error:
        return Outcome(where, broken=str(error), domain=_domain_named(source, line))
    return Outcome(where, record, domain=record.domain, unfollowed=record.unfollowed)


def _domain_named(source: Source, line: Any) -> str | None:
    """Domain that the source or the line names; None: neither does, or rules may name another one."""
    if source.domains.rules or source.domain is not None or not isinstance(line, Mapping):
        return None if source.domains.rules else source.domain
    inner = line.get("request")
    named = line.get(source.domain_field) or (inner.get(source.domain_field) if isinstance(inner, Mapping) else None)
    return named if isinstance(named, str) and re.fullmatch(LABEL, named) else None
