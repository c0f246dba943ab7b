"""Readers: files, Hugging Face datasets and the target's own prompts, one record at a time."""

import gzip
import heapq
import itertools
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from .. import fingerprint, progress
from ..errors import InputError, MissingFileError, RecipeError
from .records import DEFAULT_COLUMNS, Record, parse
from .settings import DatasetSource, DomainSettings, FileSource, MixSettings, Source, TargetSource

SamplePrompts = Callable[[int, int, int], list[str]]
"""`sample_prompts(count, seed, max_tokens)`: user prompts that the target makes up."""
_JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
_LINES_PER_UPDATE = 256
_MEGABYTE = 1e6


@dataclass
class SourceCounts:
    """What one source gave."""

    read: int = 0
    skipped: int = 0
    taken: int = 0


class _Reading:
    """Turns decoded lines of one source into records, counting them and those that break a rule."""

    def __init__(
        self,
        source: FileSource | DatasetSource,
        shape: Any,
        index: int,
        counts: SourceCounts,
        domains: DomainSettings | None,
    ) -> None:
        self._source, self._shape, self._index, self._counts = source, shape, index, counts
        self._domains = domains

    def records(self, lines: Iterable[tuple[str, Callable[[], Any]]]) -> Iterator[Record]:
        for where, decode in lines:
            self._counts.read += 1
            try:
                yield parse(decode(), self._shape, self._source, where, self._index, self._domains)
            except InputError:
                if not self._source.skip_invalid:
                    raise
                self._counts.skipped += 1


def read(
    source: Source,
    base_dir: Path,
    index: int,
    sample_prompts: SamplePrompts | None = None,
    domains: DomainSettings | None = None,
) -> tuple[list[Record], SourceCounts]:
    """The records of one source, at most `limit` of them, and how many lines were read, skipped and taken.

    Raises InputError naming file and line, MissingFileError, or RecipeError where prompts of the target are asked for
    and there is no target.
    """
    counts = SourceCounts()
    if isinstance(source, TargetSource):
        found = _from_target(source, index, counts, sample_prompts)
    elif isinstance(source, FileSource):
        path = base_dir / source.path
        found = _Reading(source, source.kind, index, counts, domains).records(
            _file_lines(path, source.kind == "prompts")
        )
    else:
        found = _Reading(source, source.shape, index, counts, domains).records(_dataset_rows(source, base_dir))
    records = list(found) if source.limit is None else smallest(found, source.limit)
    counts.taken = len(records)
    if not records:
        raise InputError(f"mix.sources[{index}]: {name_of(source)}: holds no conversation; at least one is needed")
    return records, counts


def smallest(records: Iterable[Record], limit: int) -> list[Record]:
    """The `limit` distinct records with the smallest hashes: an even sample in bounded memory, free of order."""
    heap: list[tuple[int, str]] = []
    kept: dict[str, Record] = {}
    for record in records:
        if record.key in kept:
            continue
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
    """The source as the recipe names it."""
    if isinstance(source, FileSource):
        return source.path
    if isinstance(source, DatasetSource):
        return f"{source.name}[{source.split}]"
    return "prompts of the target"


def input_digests(settings: MixSettings, base_dir: Path) -> dict[str, str]:
    """What a mix depends on beside its settings: a digest of each source, evaluation set and ancestor, by its place.

    Files and local datasets are hashed. A hub dataset counts by name and revision, prompts of the target by their
    settings: the caller adds the target's fingerprint. Raises MissingFileError.
    """
    digests = {f"sources[{i}]": _input_digest(source, base_dir) for i, source in enumerate(settings.sources)}
    for i, name in enumerate(settings.contamination):
        digests[f"contamination[{i}]"] = fingerprint.of_file(require_file(base_dir / name))
    for i, name in enumerate(settings.ancestors):
        digests[f"ancestors[{i}]"] = fingerprint.of_file(require_file(base_dir / name / "manifest.json"))
    return digests


def _input_digest(source: Source, base_dir: Path) -> str:
    if isinstance(source, FileSource):
        return fingerprint.of_file(require_file(base_dir / source.path))
    if isinstance(source, DatasetSource):
        folder = base_dir / source.name
        if folder.is_dir():
            names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
            return fingerprint.of_files(folder, names)
        return fingerprint.of_json([source.name, source.config, source.split, source.revision, source.rows])
    return fingerprint.of_json([source.count, source.seed, source.max_tokens])


def require_file(path: Path) -> Path:
    """The path, if it is a file. Raises MissingFileError, or InputError for a folder."""
    if path.is_dir():
        raise InputError(f"{path}: is a folder; must be a file")
    if not path.is_file():
        raise MissingFileError(f"{path}: no such file")
    return path


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


def _file_lines(path: Path, prompts: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(`file:line`, how to decode it) of each line that is not blank."""
    unpacked = path.name.removesuffix(".gz")
    decode = _plain_prompt if prompts and not unpacked.endswith(_JSON_SUFFIXES) else _json
    for number, line in _raw_lines(path):
        if line.strip():
            where = f"{path}:{number}"
            yield where, lambda line=line, where=where: decode(line, where)  # type: ignore[misc]


def _raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    size = require_file(path).stat().st_size
    number = 0
    with path.open("rb") as raw, progress.bar(f"reading {path.name}", size / _MEGABYTE, "MB") as advance:
        packed: IO[bytes] = gzip.open(raw) if path.name.endswith(".gz") else raw  # type: ignore[assignment]  # noqa: SIM115
        done = 0
        try:
            for number, line in enumerate(packed, start=1):
                yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if number % _LINES_PER_UPDATE == 0:
                    position = raw.tell()
                    advance((position - done) / _MEGABYTE)
                    done = position
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise InputError(f"{path}:{number + 1}: not a complete gzip file ({error})") from None
        advance((size - done) / _MEGABYTE)


def first_line(path: Path) -> Any:
    """The first line of a file, decoded; None of an empty one. Text that is not JSON is {"prompt": text}."""
    for _, decode in _file_lines(path, prompts=True):
        return decode()
    return None


def _plain_prompt(line: bytes, where: str) -> dict[str, str]:
    return {"prompt": _utf8(line, where).rstrip("\r\n")}


def _json(line: bytes, where: str) -> Any:
    text = _utf8(line, where)
    try:
        return json.loads(text)
    except RecursionError:
        raise InputError(f"{where}: nested too deeply for JSON") from None
    except ValueError as error:
        reason = getattr(error, "msg", str(error))
        column = getattr(error, "colno", None)
        hint = "; a JSON array must be split into one object a line" if text.lstrip()[:1] == "[" else ""
        spot = f" at column {column}" if column else ""
        raise InputError(f"{where}: not valid JSON ({reason}{spot}); must be one object a line{hint}") from None


def _utf8(line: bytes, where: str) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not valid UTF-8 (byte {error.start + 1} of the line)") from None


def _dataset_rows(source: DatasetSource, base_dir: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    with _dataset_errors(source):
        data = _open_dataset(source, base_dir)
    column = source.column or DEFAULT_COLUMNS[source.shape]
    if data.column_names is not None and column not in data.column_names:
        raise InputError(f"{name_of(source)}: has no column {column!r}; it has {', '.join(sorted(data.column_names))}")
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
            line = {**_without_none(row), DEFAULT_COLUMNS[source.shape]: _without_none(row.get(column))}
            yield f"{name_of(source)} row {number}", lambda line=line: line  # type: ignore[misc]
            if number % _LINES_PER_UPDATE == 0:
                advance(_LINES_PER_UPDATE)


def _open_dataset(source: DatasetSource, base_dir: Path) -> Any:
    import datasets  # slow to import, and most mixes need none

    folder = base_dir / source.name
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        found = datasets.load_from_disk(str(folder))
        if not isinstance(found, dict):
            return found
        if source.split not in found:
            raise InputError(f"{folder}: has no split {source.split!r}; it has {', '.join(sorted(found))}")
        return found[source.split]
    if source.name.startswith((".", "/")) and not folder.is_dir():
        raise MissingFileError(f"{folder}: no such folder")
    name = str(folder) if folder.is_dir() else source.name
    return datasets.load_dataset(name, source.config, split=source.split, revision=source.revision, streaming=True)


@contextmanager
def _dataset_errors(source: DatasetSource) -> Iterator[None]:
    """Whatever the datasets library meets (no network, no such name, a broken file) as one line."""
    try:
        yield
    except (InputError, MissingFileError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(f"{name_of(source)}: the dataset cannot be read ({reason})") from None


def _without_none(value: Any) -> Any:
    """Arrow gives every struct all fields; those that a row lacks come as None."""
    if isinstance(value, dict):
        return {name: _without_none(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value
