"""Counts table, the score's artifact: rounds and tokens per turn, sampling setting, rule and K or tree.

Every acceptance figure is derived from these rows.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, get_args

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..data.read_limits import USUAL, TooLargeError, memory_within
from ..errors import CorruptDataError, InputError, MissingFileError, one_line
from ..specdec.accept_rules import RULES
from ..specdec.proposers.tree_settings import MOST_LEVELS
from ..specdec.replay.expected_rounds import RoundCounts
from ..storage import write_bytes

Method = Literal["replay", "decode"]
COUNTS_SCHEMA = pa.schema(
    [
        ("draft", pa.string()),
        ("step", pa.int64()),
        ("conversation", pa.string()),
        ("turn", pa.int64()),
        ("cluster", pa.string()),
        ("domain", pa.string()),
        ("split", pa.string()),
        ("context_bucket", pa.string()),
        ("setting", pa.string()),
        ("rule", pa.string()),
        ("draft_tokens", pa.int64()),
        ("tree", pa.string()),
        ("method", pa.string()),
        ("rounds", pa.float64()),
        ("tokens", pa.float64()),
        ("drafted", pa.float64()),
        ("accepted", pa.float64()),
        ("reached", pa.list_(pa.float64())),
        ("accepted_at", pa.list_(pa.float64())),
    ]
)
_MOST_KEPT_ROWS, _MOST_KEPT_DOMAINS, _MOST_COUNT = 1_000_000, 10_000, 1e15
"""Rows, domains and numbers in them that no promotion's counts have."""
# Upper ends of the buckets of prompt lengths.
_BUCKET_TOKENS = (128, 512, 1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True)
class CountRow:
    """One row of the table. `reached` and `accepted_at` have one entry a level of what is drafted.

    `tree`: its name, `draft_tokens` levels deep; empty: a chain of `draft_tokens`.
    """

    draft: str
    step: int
    conversation: str
    turn: int
    cluster: str
    domain: str
    split: str
    context_bucket: str
    setting: str
    rule: str
    draft_tokens: int
    tree: str
    method: Method
    counts: RoundCounts

    def record(self) -> dict[str, Any]:
        """Row as a mapping of the schema's columns. Raises InputError for position counts of another length than K."""
        # Position lists must have one entry a level: readers stack them into columns.
        record = {name: value for name, value in vars(self).items() if name != "counts"}
        counts = self.counts
        if len(counts.reached_K) != self.draft_tokens or len(counts.accepted_K) != self.draft_tokens:
            raise InputError(
                f"counts of {self.conversation}: {len(counts.reached_K)} reached and {len(counts.accepted_K)} accepted "
                f"positions for draft_tokens = {self.draft_tokens}; one entry a position is needed"
            )
        record |= {"rounds": counts.rounds, "tokens": counts.tokens, "drafted": counts.drafted}
        return record | {
            "accepted": counts.accepted,
            "reached": list(counts.reached_K),
            "accepted_at": list(counts.accepted_K),
        }


def context_bucket(prompt_tokens: int) -> str:
    """Bucket label of a prompt length; labels sort by size. "00128" holds prompts of up to 128 tokens."""
    for top in _BUCKET_TOKENS:
        if prompt_tokens <= top:
            return f"{top:05d}"
    return f"{_BUCKET_TOKENS[-1]:05d}+"


def bucket_label(bucket: str) -> str:
    """A bucket of prompt lengths in words: "up to 128", "over 32,768"."""
    tokens = int(bucket.removesuffix("+"))
    return f"over {tokens:,}" if bucket.endswith("+") else f"up to {tokens:,}"


def to_table(rows: Iterable[CountRow]) -> pa.Table:
    """Table of the rows; it has the schema even without rows."""
    return pa.Table.from_pylist([row.record() for row in rows], schema=COUNTS_SCHEMA)


def concat(tables: Sequence[pa.Table]) -> pa.Table:
    """All rows in one table, in order."""
    return pa.concat_tables(list(tables)) if tables else to_table([])


def write(table: pa.Table, path: Path) -> None:
    """Write a counts table as parquet, atomically. Raises CorruptDataError for another schema."""
    _check(table.schema, path)
    buffer = BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    write_bytes(path, buffer.getvalue())


def read(path: Path) -> pa.Table:
    """Read what `write` wrote. Raises MissingFileError, or CorruptDataError naming the file and the column."""
    # A missing file and a damaged one are told apart, and nothing is read of a pipe, which may never end.
    if path.exists() and not path.is_file():
        raise CorruptDataError(f"{path}: must be a regular file")
    try:
        with path.open("rb") as file:
            table = pq.read_table(file)
    except FileNotFoundError:
        raise MissingFileError(f"{path}: no such file") from None
    except (pa.ArrowException, OSError) as error:
        raise CorruptDataError(f"{path}: not a readable parquet file ({str(error).splitlines()[0]})") from None
    _check(table.schema, path)
    for problem in _odd_values(table):
        raise CorruptDataError(f"{path}: {problem}; not the counts of a score")
    return table


def read_kept(path: Path) -> pa.Table:
    """Read counts that lay where others may write, of one K or tree: within limits of memory, and each value checked.

    Raises as `read` does.
    """
    # A table of a megabyte may unpack to any size.
    try:
        with memory_within(path, USUAL):
            table = read(path)
    except TooLargeError as error:
        raise CorruptDataError(str(error)) from None
    for problem in _problems(table):
        raise CorruptDataError(f"{path}: {problem}; not the counts of a promotion")
    return table


def _odd_values(table: pa.Table) -> Iterator[str]:
    """What is wrong with values of counts, as far as what computes with them relies on it: each is there, a text is
    UTF-8, a count is one, lists have an entry a level, and rule and method are known."""
    try:
        table.validate(full=True)
    except pa.ArrowInvalid as error:
        yield one_line(error)
    for name in table.column_names:
        column = table[name].combine_chunks()
        flat = column.flatten() if pa.types.is_list(column.type) else column
        if column.null_count or flat.null_count:
            yield f"column {name}: values are missing"
            return
        if pa.types.is_floating(flat.type) and not ((flat := flat.to_numpy()) >= 0).all() & (flat < _MOST_COUNT).all():
            yield f"column {name}: a count that is none"
    lengths = [pc.list_value_length(table[name]).to_numpy() for name in ("reached", "accepted_at")]
    if any((one != table["draft_tokens"].to_numpy()).any() for one in lengths):
        yield "lists of another length than draft_tokens"
    known = {"rule": {*RULES}, "method": {*get_args(Method)}}
    if any(not {*pc.unique(table[name]).to_pylist()} <= names for name, names in known.items()):
        yield "a rule or method that is not known"


def _problems(table: pa.Table) -> Iterator[str]:
    """What no counts of one K or tree have: too many rows or domains, or another K or tree."""
    if len(table) > _MOST_KEPT_ROWS:
        yield f"{len(table):,} rows"
    if (domains := pc.count_distinct(table["domain"]).as_py()) > _MOST_KEPT_DOMAINS:
        yield f"{domains:,} domains"
    if not len(table):
        return
    depths = values(table, "draft_tokens")
    if len(depths) > 1 or len(values(table, "tree")) > 1 or not 1 <= depths[0] <= MOST_LEVELS:
        yield f"draft_tokens {depths[:8]}"


def where(table: pa.Table, **equals: str | int | Sequence[str] | Sequence[int]) -> pa.Table:
    """Rows whose columns equal the values; a list or tuple means "any of"."""
    # Each condition filters what the last one left; values take the column's own type.
    for column, value in equals.items():
        wanted = [value] if isinstance(value, str | int) else list(value)
        table = table.filter(pc.is_in(table[column], pa.array(wanted, COUNTS_SCHEMA.field(column).type)))
    return table


def values(table: pa.Table, column: str) -> list[Any]:
    """Distinct values of a column, sorted."""
    return sorted(set(table[column].to_pylist()))


def groups(table: pa.Table, *columns: str) -> Iterator[tuple[tuple[Any, ...], pa.Table]]:
    """Sub-tables by the columns' values, in sorted order of the keys."""
    # Row numbers by key, in one pass over the table.
    keys = list(zip(*(table[column].to_pylist() for column in columns)))
    rows: dict[tuple[Any, ...], list[int]] = {}
    for index, key in enumerate(keys):
        rows.setdefault(key, []).append(index)
    for key in sorted(rows):
        yield key, table.take(pa.array(rows[key], pa.int64()))


def _check(schema: pa.Schema, path: Path) -> None:
    # Every column is there and has its type; no others are.
    for field in COUNTS_SCHEMA:
        index = schema.get_field_index(field.name)
        if index < 0:
            raise CorruptDataError(f"{path}: column {field.name} is missing; a counts table has one")
        if not schema.field(index).type.equals(field.type):
            raise CorruptDataError(f"{path}: column {field.name} is {schema.field(index).type}, must be {field.type}")
    if len(schema) != len(COUNTS_SCHEMA):
        extra = sorted(set(schema.names) - set(COUNTS_SCHEMA.names))
        raise CorruptDataError(f"{path}: unknown columns {', '.join(extra)}; a counts table has {len(COUNTS_SCHEMA)}")
