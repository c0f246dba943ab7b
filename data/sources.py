"""Sources of a mix, streamed as records: files, logs of engines and proxies, Hugging Face datasets, the target's own
prompts."""

import heapq
import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, get_args

import pyarrow as pa

from .. import fingerprint, progress
from ..errors import DraftforgeError, InputError, RecipeError, named
from ..storage import check_hub_name, inside, read_object
from . import file_search, files
from .concurrency import Traffic
from .logs.chat import Entry, JoinedLines, LogReader
from .logs.readers import FORMATS
from .read_limits import Limits, memory_within
from .record_outcomes import COPY, OVER_LIMIT, UNFINISHED, Outcome, SourceCounts, Unit, name_of, outcomes_of, read_item
from .records import DEFAULT_COLUMNS, Record
from .settings import DatasetSource, FileKind, FileSource, MixSettings, Shape, Source, TargetSource

SamplePrompts = Callable[[int, int, int], list[str]]
"""`sample_prompts(count, seed, max_tokens)`: user prompts that the target makes up."""
LeaveOut = Callable[[Record, str], None]
"""`leave_out(record, reason)`: told of each record that does not stay."""
R = TypeVar("R")
_ROWS_PER_UPDATE = 256
_MOST_NAMED = 5  # files that no split has, in a message
_PROBED_ITEMS, _MOST_PROBED = 500, 200_000
"""Lines at the beginning of a file that tell its kind, and those of a server's start that may stand before them."""
_LOG_LINE = re.compile(r".{0,100}?\d\d:\d\d:\d\d|.{0,60}?\b(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b")
"""Beginning of a line that a server logs: it has a time or a level."""
_LOG_PROMPTS = "`VLLM_LOGGING_LEVEL=DEBUG vllm serve MODEL --enable-log-requests` logs prompts"
_ENGINE_KINDS: tuple[FileKind, ...] = ("vllm", "sglang")
_KINDS: tuple[FileKind, ...] = (*_ENGINE_KINDS, "litellm", "langfuse", "openai", *get_args(Shape))
"""Kinds from the strictest: lines of the first ones may read as those of later ones, too."""


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
    outcomes = (
        outcome
        for unit in units(source, base_dir, index, counts, sample_prompts)
        for outcome in outcomes_of(source, index, unit)
    )
    found = counted(outcomes, source, counts, traffic)
    yield from found if source.limit is None else smallest(found, source.limit, counts.leave_out)
    require_some(source, index, counts)


def counted(
    outcomes: Iterable[Outcome[R]], source: Source, counts: SourceCounts, traffic: Traffic | None
) -> Iterator[R]:
    """Yield the records of some outcomes; counts and traffic are filled. Raises InputError; see `SourceCounts.add`."""
    for outcome in outcomes:
        if traffic is not None and outcome.timing is not None:
            traffic.add(*outcome.timing)
        counts.add(outcome, source)
        if outcome.record is not None:
            yield outcome.record


def require_some(source: Source, index: int, counts: SourceCounts) -> None:
    """Raise InputError for a source that gave nothing, which is a mistake unless the recipe names it."""
    if counts.taken:
        return
    if name_of(source) not in source.may_be_unanswered:
        seen = ", ".join(f"{count} {reason}" for reason, count in counts.left_out.items())
        why = f" ({counts.read} read, {counts.skipped} skipped{seen and f'; {seen}'})" if counts.read else ""
        if source.kind == "vllm" and "no text logged" in counts.left_out:
            why += f"; {_LOG_PROMPTS}"
        raise InputError(
            f"mix.sources[{index}]: {name_of(source)}: holds no conversation{why}; at least one is needed, unless "
            "mix.may_be_unanswered names the source"
        )
    counts.unanswered.add(name_of(source))


def check_kinds(sources: Sequence[Source], base_dir: Path) -> None:
    """Raise InputError for a source whose first file reads better as another kind; nothing but its beginning is read.

    A file whose beginning reads badly as every kind passes: what is wrong with it is said when it is read.
    """
    for index, source in enumerate(sources):
        if not isinstance(source, FileSource):
            continue
        # The first file that holds anything. A line of text may always be a prompt, unless it is an engine's own.
        first = next(
            (path for path in file_search.find(base_dir, source.path, source.follow_links) if path.stat().st_size), None
        )
        if first is None:
            continue
        plain_text = source.kind == "prompts" and files.is_text(first)
        own = SourceCounts() if plain_text else _probes(source, first, [source.kind])[source.kind]
        if own.taken and not own.skipped:
            continue
        # Another kind is named if it gives more conversations, and no line breaks its rules.
        for kind, found in _probes(source, first, _ENGINE_KINDS if plain_text else _KINDS).items():
            if found.taken > own.taken and not found.skipped:
                raise InputError(
                    f"mix.sources[{index}].kind {source.kind}: {first} looks like kind {kind}: so read, its beginning "
                    f"gives {found.taken} conversations"
                )


def detect_kind(base_dir: Path, path: str) -> tuple[FileKind, bool]:
    """Kind of the first file that a path names (a file, a folder or a pattern), and whether its lines name domains.

    The kind is the one of which the first lines give most conversations, of equal ones the strictest. Raises
    MissingFileError, or InputError where no kind gives any.
    """
    first = next((one for one in file_search.find(base_dir, path) if one.stat().st_size), None)
    if first is None:
        raise InputError(f"{path}: is empty; must be a log")
    source = FileSource.model_validate({"kind": "prompts", "path": path})
    found = _probes(source, first, _KINDS)
    best = max(found, key=lambda kind: found[kind].taken - found[kind].skipped)
    # Requests read as conversations too, and the reverse: a conversation has its messages, and no model, at the top.
    if best in ("openai", "messages") and found["openai"].taken and found["messages"].taken:
        line = next(files.objects([first], "")).decode()
        best = "messages" if isinstance(line, dict) and "messages" in line and "model" not in line else "openai"
    if found[best].taken <= found[best].skipped:
        # Any line may be a prompt, unless a server logged it: only the name can say so.
        is_log = _is_log(first)
        if ".txt" in first.suffixes and not is_log:
            return "prompts", False
        tried = "; ".join(f"{kind}: {seen(counts)}" for kind, counts in found.items())
        hint = "if each line is a prompt, name the file .txt"
        if is_log:
            hint = f"it looks like a server's log, without a request whose prompt is logged; {_LOG_PROMPTS}"
        raise InputError(f"{first}: no kind of log gives conversations of its first lines ({tried}); {hint}")
    return best, bool(found[best].taken) and _probes(source, first, [best], None)[best].taken == found[best].taken


def seen(counts: SourceCounts) -> str:
    """Say how many lines of a source were read, and how many of them gave no conversation, by reason."""
    reasons = [f"{count} {reason}" for reason, count in counts.left_out.items()]
    return ", ".join([f"{counts.read} read", *([f"{counts.skipped} broken"] if counts.skipped else []), *reasons])


def _probes(
    source: FileSource, path: Path, kinds: Sequence[FileKind], domain: str | None = "any"
) -> dict[FileKind, SourceCounts]:
    """Counts of the first lines of a file, read as each kind. `domain`: None for those that its lines name."""
    found = {kind: _probe(source, kind, path, domain, _PROBED_ITEMS) for kind in kinds}
    # Hundreds of lines of an engine's start may stand before its first request.
    if not any(counts.taken for counts in found.values()) and _is_log(path):
        found |= {kind: _probe(source, kind, path, domain, _MOST_PROBED) for kind in kinds if kind in _ENGINE_KINDS}
    return found


def _is_log(path: Path) -> bool:
    """Whether most of a file's first lines begin as those that servers log."""
    try:
        lines = [item.decode() for item in itertools.islice(files.text_lines([path], ""), _PROBED_ITEMS)]
    except InputError:  # no text
        return False
    return 2 * sum(_LOG_LINE.match(line) is not None for line in lines) > len(lines)


def _probe(source: FileSource, kind: FileKind, path: Path, domain: str | None, most: int) -> SourceCounts:
    """Counts of at most `most` lines of a file, read as one kind; other lines of a log beside 500 do not count."""
    counts = SourceCounts()
    if kind == "prompts" and files.is_text(path):
        return counts
    probe = source.model_copy(update={"kind": kind, "year": None, "domain": domain, "skip_invalid": True})
    items = itertools.takewhile(
        lambda item: counts.read - counts.left_out.get("other log line", 0) < _PROBED_ITEMS,
        itertools.islice(_file_items(probe, [path], title=""), most),
    )
    try:
        for unit in _file_units(probe, [path], items, counts):
            for outcome in outcomes_of(probe, 0, unit):
                counts.add(outcome, probe)
    except InputError:  # an archive, an array or a table that is none
        counts.skipped += 1
    return counts


class SmallestSample:
    """The `limit` distinct records with the smallest keys: an even sample, in bounded memory, independent of order."""

    def __init__(self, limit: int, leave_out: LeaveOut) -> None:
        """`leave_out` is told the reason for each record that does not stay."""
        self._limit, self._leave_out = limit, leave_out
        self._heap: list[tuple[int, str]] = []  # of negated keys: its root is the largest one kept, the next to go
        self._kept: dict[str, Record] = {}
        self._copies: Counter[str] = Counter()

    @property
    def limit_key(self) -> str | None:
        """Key above which no record enters any more; None: there is room."""
        return self._heap[0][1] if len(self._heap) == self._limit else None

    def add(self, record: Record) -> None:
        """Consider one record."""
        # A copy of a kept record may only replace it: of exact copies the latest stays.
        key = record.key
        if key in self._kept:
            self._kept[key] = max(self._kept[key], record, key=lambda copy: copy.started or -math.inf)
            self._copies[key] += 1
            return
        # Another one enters, or takes the place of the largest, which goes with its copies.
        entry = (-int(key, 16), key)
        if len(self._heap) < self._limit:
            heapq.heappush(self._heap, entry)
        elif entry > self._heap[0]:
            gone = self._kept.pop(heapq.heapreplace(self._heap, entry)[1])
            for _ in range(1 + self._copies.pop(gone.key, 0)):
                self._leave_out(gone, OVER_LIMIT)
        else:
            self._leave_out(record, OVER_LIMIT)
            return
        self._kept[key] = record

    def records(self) -> list[Record]:
        """The sample, by key; the copies of what is in it are left out now."""
        for key in self._copies.elements():
            self._leave_out(self._kept[key], COPY)
        self._copies.clear()
        return [self._kept[key] for key in sorted(self._kept)]


def smallest(records: Iterable[Record], limit: int, leave_out: LeaveOut = lambda record, reason: None) -> list[Record]:
    """A sample of records; see `SmallestSample`."""
    sample = SmallestSample(limit, leave_out)
    for record in records:
        sample.add(record)
    return sample.records()


def units(
    source: Source,
    base_dir: Path,
    index: int,
    counts: SourceCounts,
    sample_prompts: SamplePrompts | None = None,
) -> Iterator[Unit]:
    """Yield what `outcomes_of` takes, in order: a source's lines, or the requests that a log's reader joins of them."""
    if isinstance(source, TargetSource):
        return _target_prompts(source, base_dir, index, sample_prompts)
    if isinstance(source, DatasetSource):
        return _dataset_rows(source, base_dir)
    paths = file_search.find(base_dir, source.path, source.follow_links)
    return _file_units(source, paths, _file_items(source, paths, f"reading {source.path}"), counts)


def _file_items(source: FileSource, paths: Sequence[Path], title: str) -> Iterator[files.Item]:
    """Yield the lines, JSON values or rows of files, whichever the source's kind consists of."""
    if source.kind == "messages" or source.kind == "sharegpt" or source.kind == "turns" or source.kind == "prompts":
        read = files.prompt_lines if source.kind == "prompts" else files.objects
        return read(paths, title, _limits(source), source.column or DEFAULT_COLUMNS[source.kind])
    return FORMATS[source.kind].items(paths, title, _limits(source))


def _limits(source: FileSource | DatasetSource) -> Limits:
    limits = source.read_limits
    return Limits(int(limits.line_megabytes * 1e6), int(limits.unpacked_gigabytes * 1e9))


def _file_units(
    source: FileSource, paths: Sequence[Path], items: Iterator[files.Item], counts: SourceCounts
) -> Iterator[Unit]:
    # Our own shapes, and logs whose lines are complete in themselves, are parsed item by item.
    if source.kind in FORMATS and (form := FORMATS[source.kind]).joins:
        return _joined(form.reader(source), items, _servers(paths), counts)
    return items


def _joined(
    reader: LogReader, items: Iterable[files.Item], servers: Mapping[Path, str], counts: SourceCounts
) -> Iterator[Entry | JoinedLines | Outcome[Record]]:
    """Yield what a reader that joins lines makes of them."""
    for item in items:
        yield from read_item(reader, item, servers[item.path])
    # Requests that waited for another line: the line counted as joined has an entry of its own after all.
    for entry in reader.finish():
        counts.take_back_joined()
        yield entry


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
            file_search.require_file(base_dir / name)
            digests[key] = file_search.digest(base_dir, name)
    return digests


def _input_digest(source: Source, base_dir: Path) -> str:
    if isinstance(source, FileSource):
        return file_search.digest(base_dir, source.path, source.follow_links)
    if isinstance(source, DatasetSource):
        # A local dataset counts by its files; a hub one by its name, as it may not be at hand.
        folder = base_dir / source.name
        if folder.is_dir():
            names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
            return fingerprint.of_files(folder, names)
        return fingerprint.of_json([source.name, source.config, source.split, source.revision, source.rows])
    return fingerprint.of_json([source.count, source.seed, source.max_tokens])


def _servers(paths: Sequence[Path]) -> dict[Path, str]:
    """Name the server that wrote each file: the path of its log below the common folder, without a suffix."""
    logs = file_search.whole_logs(paths)
    root = os.path.commonpath([log.parent for log in logs.values()])
    return {
        path: re.sub(r"\.(log|jsonl?|txt|out)$", "", log.relative_to(root).as_posix()) or log.parent.name
        for path, log in logs.items()
    }


def _target_prompts(
    source: TargetSource, base_dir: Path, index: int, sample_prompts: SamplePrompts | None
) -> Iterator[files.Item | Outcome[Record]]:
    if sample_prompts is None:
        raise RecipeError(f"mix.sources[{index}]: kind 'target' samples from the target, and none is given")
    prompts = sample_prompts(source.count, source.seed, source.max_tokens)
    for i in range(max(source.count, len(prompts))):
        where = f"prompt {i} of the target"
        if i >= len(prompts):
            yield Outcome(where, left_out=UNFINISHED, domain=source.domain)
        elif prompts[i].strip():
            yield files.Item(base_dir, where, {"prompt": prompts[i]})
        else:
            yield Outcome(where, broken=f"{where}: is blank", domain=source.domain)


def _dataset_rows(source: DatasetSource, base_dir: Path) -> Iterator[files.Item]:
    # 1) Open it, and see that it has the column.
    where, limits = Path(source.name), _limits(source)
    with _dataset_errors(source), memory_within(where, limits):
        data, rows_known = _open_dataset(source, base_dir)
        read = files.row_decoder(pa.schema([]) if data.features is None else data.features.arrow_schema)
    column = source.column or DEFAULT_COLUMNS[source.shape]
    if data.column_names is not None and column not in data.column_names:
        raise InputError(f"{name_of(source)}: has no column {column!r}; it has {', '.join(sorted(data.column_names))}")

    # 2) Rows one by one. Reading may fail at any of them, but the consumer's errors are not the dataset's.
    rows = iter(data)
    with progress.bar(f"reading {name_of(source)}", source.rows or rows_known, "rows") as advance:
        for number in itertools.count(1):
            if source.rows is not None and number > source.rows:
                return
            with _dataset_errors(source), memory_within(where, limits):
                row = next(rows, None)
            if row is None:
                return

            yield files.Item(base_dir, f"{name_of(source)} row {number}", row, read)
            if number % _ROWS_PER_UPDATE == 0:
                advance(_ROWS_PER_UPDATE)


def _open_dataset(source: DatasetSource, base_dir: Path) -> tuple[Any, int | None]:
    """A dataset's rows, and their number where it is known. Raises InputError for one that reaches out of its place."""
    import datasets  # slow to import, and most mixes need none

    # 1) A folder made by `save_to_disk`: one split, or a folder each.
    folder = base_dir / source.name
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        saved = datasets.load_from_disk(str(_saved_split(folder, source.split))).with_format(None)
        return _plain(saved.to_iterable_dataset()), len(saved)
    # 2) A folder of data files, or a name on the hub.
    if not folder.is_dir():
        check_hub_name(source.name, source.revision, "name")
        if Path(source.name).exists():
            raise InputError(f"{source.name}: is a folder below the current one, not below the recipe's")
    name = str(folder) if folder.is_dir() else source.name
    with _own_files(folder.resolve() if folder.is_dir() else f"hf://datasets/{name}@"):
        builder = datasets.load_dataset_builder(name, source.config, revision=source.revision)
    kinds = {kind.__name__ for kind in type(builder).__mro__}
    if not kinds & _READ_AS:
        raise InputError(f"its files are read as {type(builder).__name__}; must be JSON, CSV, Parquet, Arrow or text")
    if folder.is_dir() and len(builder.builder_configs) == 1:
        _say_what_is_in_no_split(folder, builder)
    return _plain(builder.as_streaming_dataset(split=source.split)), None


def _say_what_is_in_no_split(folder: Path, builder: Any) -> None:
    """Name the data files of a folder that the datasets library passes over: of another format than most of them, or
    with names that are of no split, beside some that are."""
    listed = {Path(file).resolve() for split in (builder.config.data_files or {}).values() for file in map(str, split)}
    rest = [
        path.relative_to(folder).as_posix()
        for path in sorted(folder.rglob("*"))
        if files.has_data(path.relative_to(folder)) and path.is_file() and path.resolve() not in listed
    ]
    if rest:
        some = f"{', '.join(rest[:_MOST_NAMED])}{', …' if len(rest) > _MOST_NAMED else ''}"
        progress.say(f"{folder}: {len(rest)} files are in none of its splits, and are not read: {some}")


_READ_AS = {"Json", "Csv", "Parquet", "Arrow", "Text"}


def _plain(rows: Any) -> Any:
    """Rows with pictures and sounds as they are stored, and JSON too: a row may name any file as its picture."""
    return rows if rows.features is None else rows.decode(False)


def _saved_split(folder: Path, split: str) -> Path:
    """Folder of a saved dataset's split, with no file of another place."""
    place = folder
    if (folder / "dataset_dict.json").is_file():
        splits = read_object(folder / "dataset_dict.json").get("splits")
        if not isinstance(splits, list) or split not in splits:
            raise InputError(f"{folder}: has no split {split!r}; it has {', '.join(map(str, splits or []))}")
        place = inside(folder, split)
    for file in read_object(place / "state.json").get("_data_files") or []:
        inside(place, str(file["filename"]))
    return place


@contextmanager
def _own_files(root: Path | str) -> Iterator[None]:
    """Inside, the datasets library finds files below `root` alone, a folder or an address.

    The card of a dataset names its data files: any file of this machine, or any address, for all that the library says.
    """
    from datasets import data_files

    resolve = data_files.resolve_pattern

    def is_own(path: str) -> bool:
        if isinstance(root, str):
            return path.startswith(root) and "::" not in path and ".." not in path.split("/")
        return "://" not in path and Path(path).resolve().is_relative_to(root)

    def own(pattern: str, base_path: str, *args: Any, **kwargs: Any) -> list[str]:
        alone = is_own(pattern if pattern.startswith("/") or "://" in pattern else f"{base_path}/{pattern}")
        found: list[str] = resolve(pattern, base_path, *args, **kwargs) if alone and "::" not in pattern else [pattern]
        odd = [path for path in found if not is_own(path)]
        if odd or not alone:
            raise InputError(f"its data file {(odd or found)[0][:100]} is none of its own")
        return found

    data_files.resolve_pattern = own
    try:
        yield
    finally:
        data_files.resolve_pattern = resolve


@contextmanager
def _dataset_errors(source: DatasetSource) -> Iterator[None]:
    """Turn any error of the datasets library (no network, no such name, a broken file) into a one-line InputError."""
    try:
        yield
    except DraftforgeError as error:
        raise type(error)(f"{name_of(source)}: {error}") from None
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(f"{name_of(source)}: the dataset cannot be read ({reason})") from None
