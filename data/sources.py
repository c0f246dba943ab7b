"""Sources of a mix, streamed as records: files, logs of engines and proxies, Hugging Face datasets, the target's own
prompts."""

import heapq
import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from .. import fingerprint, progress
from ..errors import InputError, MissingFileError, RecipeError, named
from . import files
from .concurrency import Traffic
from .logs.chat import Entry, LeftOut, Reason, Timing
from .logs.readers import FORMATS, Format
from .records import DEFAULT_COLUMNS, Record, parse
from .settings import DatasetSource, FileKind, FileSource, MixSettings, Shape, Source, TargetSource

SamplePrompts = Callable[[int, int, int], list[str]]
"""`sample_prompts(count, seed, max_tokens)`: user prompts that the target makes up."""
_ROWS_PER_UPDATE = 256
_PROBED_ITEMS = 500
_ENGINE_KINDS: tuple[FileKind, ...] = ("vllm", "sglang")
_KINDS: tuple[FileKind, ...] = (*_ENGINE_KINDS, "litellm", "langfuse", "openai", *get_args(Shape))
"""Kinds from the strictest: lines of the first ones may read as those of later ones, too."""
_JOINED: Reason = "joined with another line"
_IDLE = ("no chat request", "health check")  # what no decoding engine was busy with


@dataclass
class SourceCounts:
    """Line counts of one source, by fate."""

    read: int = 0
    skipped: int = 0
    """Number of lines that break a rule."""
    taken: int = 0
    left_out: dict[Reason, int] = field(default_factory=dict)
    """Number of lines of a tool's log without a conversation, by reason."""

    def leave_out(self, reason: Reason, count: int = 1) -> None:
        """Count lines without a conversation."""
        self.left_out[reason] = self.left_out.get(reason, 0) + count
        if not self.left_out[reason]:
            del self.left_out[reason]


def read(
    source: Source, base_dir: Path, index: int, sample_prompts: SamplePrompts | None = None
) -> tuple[list[Record], SourceCounts]:
    """Read one source: all records of `read_records`, and the counts of its lines."""
    counts = SourceCounts()
    return list(read_records(source, base_dir, index, counts, sample_prompts)), counts


def read_records(
    source: Source,
    base_dir: Path,
    index: int,
    counts: SourceCounts,
    sample_prompts: SamplePrompts | None = None,
    traffic: Traffic | None = None,
) -> Iterator[Record]:
    """Yield the records of one source, at most `limit` of them; memory holds one record, or `limit` if it is set.

    `counts` and `traffic` (times of each request of a log, also of those that the limit leaves out) are filled
    meanwhile. Raises InputError naming file and line, MissingFileError, or RecipeError where prompts of the target are
    asked for and there is no target.
    """
    # One stream of records for each kind of source.
    if isinstance(source, TargetSource):
        found = _from_target(source, index, counts, sample_prompts)
    elif isinstance(source, DatasetSource):
        found = _from_items(source, source.shape, _dataset_rows(source, base_dir), index, counts, traffic)
    else:
        found = _from_files(source, base_dir, index, counts, traffic)
    # A limit takes an even sample by hash; a source that gives nothing is a mistake.
    for record in found if source.limit is None else smallest(found, source.limit):
        counts.taken += 1
        yield record
    if not counts.taken:
        seen = ", ".join(f"{count} {reason}" for reason, count in counts.left_out.items())
        why = f" ({counts.read} read, {counts.skipped} skipped{seen and f'; {seen}'})" if counts.read else ""
        raise InputError(f"mix.sources[{index}]: {name_of(source)}: holds no conversation{why}; at least one is needed")


def check_kinds(sources: Sequence[Source], base_dir: Path) -> None:
    """Raise InputError for a source whose first file reads better as another kind; nothing but its beginning is read.

    A file whose beginning reads badly as every kind passes: what is wrong with it is said when it is read.
    """
    for index, source in enumerate(sources):
        if not isinstance(source, FileSource):
            continue
        # The first file that holds anything. A line of text may always be a prompt, unless it is an engine's own.
        first = next((path for path in files.find(base_dir, source.path) if path.stat().st_size), None)
        if first is None:
            continue
        plain_text = source.kind == "prompts" and files.is_text(first)
        own = SourceCounts() if plain_text else _probe(source, source.kind, first)
        if own.taken and not own.skipped:
            continue
        # Another kind is named if it gives more conversations, and no line breaks its rules.
        for kind in _ENGINE_KINDS if plain_text else _KINDS:
            found = _probe(source, kind, first)
            if found.taken > own.taken and not found.skipped:
                raise InputError(
                    f"mix.sources[{index}].kind {source.kind}: {first} looks like kind {kind}: so read, its first "
                    f"{_PROBED_ITEMS} lines give {found.taken} conversations"
                )


def _probe(source: FileSource, kind: FileKind, path: Path) -> SourceCounts:
    """Counts of the first lines of a file, read as a kind of file."""
    counts = SourceCounts()
    if kind == "prompts" and files.is_text(path):
        return counts
    probe = source.model_copy(update={"kind": kind, "year": None, "domain": "any", "skip_invalid": True})
    items = itertools.islice(_file_items(probe, [path], title=""), _PROBED_ITEMS)
    try:
        for _ in _from_file_items(probe, [path], items, 0, counts, None):
            counts.taken += 1
    except InputError:  # an archive, an array or a table that is none
        counts.skipped += 1
    return counts


def smallest(records: Iterable[Record], limit: int) -> list[Record]:
    """Sample the `limit` distinct records with the smallest hashes: even, in bounded memory, independent of order.

    Of exact copies the latest stays.
    """
    heap: list[tuple[int, str]] = []
    kept: dict[str, Record] = {}
    for record in records:
        # A copy of a kept record may only replace it.
        if record.key in kept:
            kept[record.key] = max(kept[record.key], record, key=lambda copy: copy.started or -math.inf)
            continue
        # A heap of negated hashes: its root is the largest hash kept, the next one to go.
        entry = (-int(record.key, 16), record.key)
        if len(heap) < limit:
            heapq.heappush(heap, entry)
        elif entry > heap[0]:
            del kept[heapq.heapreplace(heap, entry)[1]]
        else:
            continue
        kept[record.key] = record
    return [kept[key] for key in sorted(kept)]


def name_of(source: Source) -> str:
    """Name of a source for messages and the manifest, as in the recipe."""
    if isinstance(source, FileSource):
        return source.path
    if isinstance(source, DatasetSource):
        return f"{source.name}[{source.split}]"
    return "prompts of the target"


def input_digests(settings: MixSettings, base_dir: Path) -> dict[str, str]:
    """Digests of what a mix depends on beside its settings: each source, evaluation set and ancestor, by its key.

    Files and local datasets are hashed. A hub dataset counts by name and revision, prompts of the target by their
    settings: the caller adds the target's fingerprint. Raises MissingFileError.
    """
    digests = {f"sources[{i}]": _input_digest(source, base_dir) for i, source in enumerate(settings.sources)}
    named_files = [(f"contamination[{i}]", name) for i, name in enumerate(settings.contamination)]
    named_files += [(f"ancestors[{i}]", f"{name}/manifest.json") for i, name in enumerate(settings.ancestors)]
    for key, name in named_files:
        with named(f"mix.{key}"):
            digests[key] = fingerprint.of_file(files.require_file(base_dir / name))
    return digests


def _input_digest(source: Source, base_dir: Path) -> str:
    if isinstance(source, FileSource):
        return files.digest(base_dir, source.path)
    if isinstance(source, DatasetSource):
        # A local dataset counts by its files; a hub one by its name, as it may not be at hand.
        folder = base_dir / source.name
        if folder.is_dir():
            names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
            return fingerprint.of_files(folder, names)
        return fingerprint.of_json([source.name, source.config, source.split, source.revision, source.rows])
    return fingerprint.of_json([source.count, source.seed, source.max_tokens])


def _from_files(
    source: FileSource, base_dir: Path, index: int, counts: SourceCounts, traffic: Traffic | None
) -> Iterator[Record]:
    paths = files.find(base_dir, source.path)
    return _from_file_items(source, paths, _file_items(source, paths, f"reading {source.path}"), index, counts, traffic)


def _file_items(source: FileSource, paths: Sequence[Path], title: str) -> Iterator[files.Item]:
    """Yield the lines, JSON values or rows of files, whichever the source's kind consists of."""
    if source.kind == "messages" or source.kind == "sharegpt" or source.kind == "turns" or source.kind == "prompts":
        read = files.prompt_lines if source.kind == "prompts" else files.objects
        return read(paths, title, source.column or DEFAULT_COLUMNS[source.kind])
    return FORMATS[source.kind].items(paths, title)


def _from_file_items(
    source: FileSource,
    paths: Sequence[Path],
    items: Iterable[files.Item],
    index: int,
    counts: SourceCounts,
    traffic: Traffic | None,
) -> Iterator[Record]:
    # Our own shapes are parsed item by item; logs of tools go through the reader of their format.
    if source.kind == "messages" or source.kind == "sharegpt" or source.kind == "turns" or source.kind == "prompts":
        return _from_items(source, source.kind, items, index, counts, traffic)
    return _from_log(source, _entries(source, FORMATS[source.kind], paths, items, counts), index, counts, traffic)


def _from_items(
    source: FileSource | DatasetSource,
    shape: Shape,
    items: Iterable[files.Item],
    index: int,
    counts: SourceCounts,
    traffic: Traffic | None,
) -> Iterator[Record]:
    """Yield the records of values in one of our own shapes, and count values and broken rules."""
    for item in items:
        counts.read += 1
        with _skipping(source, counts):
            # The column under the shape's own name, beside all others, from which labels may be read.
            line = item.decode()
            if source.column is not None and isinstance(line, dict):
                line = {**line, DEFAULT_COLUMNS[shape]: line.get(source.column)}
            record = parse(line, shape, source, item.where, index)
            # Lines of any shape may carry times.
            timing = Timing(record.started, record.ended, record.replica, record.prompt_tokens, record.answer_tokens)
            if traffic is not None and timing != Timing():
                traffic.add(*timing)
            yield record


def _from_log(
    source: FileSource,
    entries: Iterable[Entry],
    index: int,
    counts: SourceCounts,
    traffic: Traffic | None,
) -> Iterator[Record]:
    """Yield the records of a tool's log; count broken rules, and entries without a conversation by reason."""
    for entry in entries:
        # The line's own field names the replica; a date of an unknown year, or of another line's request, is no time.
        replica = entry.line.get(source.replica_field)
        timing = entry.timing if replica is None else entry.timing._replace(replica=str(replica))
        if traffic is not None and entry.in_flight and entry.left_out not in _IDLE and timing != Timing():
            traffic.add(*timing)
        # Requests without a conversation count for the load only.
        if entry.left_out is not None:
            counts.leave_out(entry.left_out)
            continue
        # The record's own times must be dates of this very request.
        if not entry.dated:
            timing = timing._replace(started=None, ended=None)
        elif not entry.in_flight:
            timing = timing._replace(ended=None)
        with _skipping(source, counts):
            yield parse(entry.line, "messages", source, entry.where, index, timing)


def _entries(
    source: FileSource, form: Format, paths: Sequence[Path], items: Iterable[files.Item], counts: SourceCounts
) -> Iterator[Entry]:
    """Yield the entries of a tool's log as its reader makes them; counts hold read = entries + skipped + joined."""
    servers, reader = _servers(paths), form.reader(source)
    for item in items:
        counts.read += 1
        entries = 0
        with _skipping(source, counts):
            # A line gives one entry, none (it is joined with another line), or several (a page).
            for entry in reader.feed(item.decode(), item.where, servers[item.path]):
                counts.read += entries > 0  # a page of several requests
                entries += 1
                yield entry
            if not entries:
                counts.leave_out(_JOINED)
    # Requests that waited for another line: the line counted as joined has an entry of its own after all.
    for entry in reader.finish():
        counts.leave_out(_JOINED, -1)
        yield entry


@contextmanager
def _skipping(source: FileSource | DatasetSource, counts: SourceCounts) -> Iterator[None]:
    """Count what is left out, and go on; an InputError too, as a skipped line, if the source has `skip_invalid`."""
    try:
        yield
    except LeftOut as request:
        counts.leave_out(request.reason)
    except InputError:
        if not source.skip_invalid:
            raise
        counts.skipped += 1


def _servers(paths: Sequence[Path]) -> dict[Path, str]:
    """Name the server that wrote each file: the path of its log below the common folder, without a suffix."""
    root = os.path.commonpath([path.parent for path in paths])
    return {
        path: re.sub(r"\.(log|jsonl?|txt|out)$", "", log.relative_to(root).as_posix()) or log.parent.name
        for path, log in files.whole_logs(paths).items()
    }


def _from_target(
    source: TargetSource, index: int, counts: SourceCounts, sample_prompts: SamplePrompts | None
) -> Iterator[Record]:
    if sample_prompts is None:
        raise RecipeError(f"mix.sources[{index}]: kind 'target' samples from the target, and none is given")
    for i, prompt in enumerate(sample_prompts(source.count, source.seed, source.max_tokens)):
        counts.read += 1
        if prompt.strip():
            yield parse({"prompt": prompt}, "prompts", source, f"prompt {i} of the target", index)
        else:
            counts.skipped += 1


def _dataset_rows(source: DatasetSource, base_dir: Path) -> Iterator[files.Item]:
    # 1) Open it, and see that it has the column.
    with _dataset_errors(source):
        data = _open_dataset(source, base_dir)
    column = source.column or DEFAULT_COLUMNS[source.shape]
    if data.column_names is not None and column not in data.column_names:
        raise InputError(f"{name_of(source)}: has no column {column!r}; it has {', '.join(sorted(data.column_names))}")

    # 2) Rows one by one. Reading may fail at any of them, but the consumer's errors are not the dataset's.
    rows = iter(data)
    title, total = f"reading {name_of(source)}", source.rows or (len(data) if hasattr(data, "__len__") else None)
    with progress.bar(title, total, "rows") as advance:
        for number in itertools.count(1):
            if source.rows is not None and number > source.rows:
                return
            with _dataset_errors(source):
                row = next(rows, None)
            if row is None:
                return

            yield files.Item(base_dir, f"{name_of(source)} row {number}", row, files.without_none)
            if number % _ROWS_PER_UPDATE == 0:
                advance(_ROWS_PER_UPDATE)


def _open_dataset(source: DatasetSource, base_dir: Path) -> Any:
    import datasets  # slow to import, and most mixes need none

    # A folder made by `save_to_disk`: one split, or a dictionary of them.
    folder = base_dir / source.name
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        found = datasets.load_from_disk(str(folder))
        if not isinstance(found, dict):
            return found
        if source.split not in found:
            raise InputError(f"{folder}: has no split {source.split!r}; it has {', '.join(sorted(found))}")
        return found[source.split]
    # A folder of data files, or a name on the hub; a path that does not exist is no hub name.
    if source.name.startswith((".", "/")) and not folder.is_dir():
        raise MissingFileError(f"{folder}: no such folder")
    name = str(folder) if folder.is_dir() else source.name
    return datasets.load_dataset(name, source.config, split=source.split, revision=source.revision, streaming=True)


@contextmanager
def _dataset_errors(source: DatasetSource) -> Iterator[None]:
    """Turn any error of the datasets library (no network, no such name, a broken file) into a one-line InputError."""
    try:
        yield
    except (InputError, MissingFileError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(f"{name_of(source)}: the dataset cannot be read ({reason})") from None
