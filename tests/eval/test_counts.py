"""The counts table: schema, files, filters."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forked import run
from limited import under_limits

from draftforge.errors import CorruptDataError, InputError, MissingFileError
from draftforge.eval import counts
from draftforge.specdec.replay.expected_rounds import RoundCounts

ROW = counts.CountRow(
    draft="small",
    step=20,
    conversation="c1",
    turn=0,
    cluster="k1",
    domain="support",
    split="selection",
    context_bucket=counts.context_bucket(40),
    setting="t0",
    rule="greedy",
    draft_tokens=2,
    tree="",
    method="replay",
    counts=RoundCounts(3.0, 7.0, 6.0, 4.0, (3.0, 2.5), (2.5, 1.5)),
)


def test_a_table_survives_the_disk(tmp_path: Path) -> None:
    table = counts.to_table([ROW, replace(ROW, step=40, counts=RoundCounts(0.0, 0.0, 0.0, 0.0, (0, 0), (0, 0)))])
    counts.write(table, tmp_path / "score" / "counts.parquet")
    read = counts.read(tmp_path / "score" / "counts.parquet")
    assert read.equals(table) and read.schema.equals(counts.COUNTS_SCHEMA)
    assert read["reached"].to_pylist() == [[3.0, 2.5], [0.0, 0.0]]
    assert [path.name for path in (tmp_path / "score").iterdir()] == ["counts.parquet"]


def test_an_empty_table_has_the_schema(tmp_path: Path) -> None:
    counts.write(counts.concat([]), tmp_path / "counts.parquet")
    assert len(counts.read(tmp_path / "counts.parquet")) == 0
    assert list(counts.groups(counts.to_table([]), "draft")) == []


def test_positions_must_match_the_drafted_tokens() -> None:
    with pytest.raises(InputError, match="counts of c1: 2 reached and 2 accepted positions for draft_tokens = 3"):
        counts.to_table([replace(ROW, draft_tokens=3)])


def test_bad_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "counts.parquet"
    with pytest.raises(MissingFileError, match=r"counts\.parquet: no such file"):
        counts.read(path)
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(CorruptDataError, match=r"counts\.parquet: not a readable parquet file"):
        counts.read(path)
    table = counts.to_table([ROW])
    pq.write_table(table.drop_columns(["rounds"]), path)
    with pytest.raises(CorruptDataError, match="column rounds is missing"):
        counts.read(path)
    pq.write_table(table.set_column(1, "step", pa.array(["20"])), path)
    with pytest.raises(CorruptDataError, match="column step is string, must be int64"):
        counts.read(path)
    pq.write_table(table.append_column("perplexity", pa.array([1.0])), path)
    with pytest.raises(CorruptDataError, match="unknown columns perplexity"):
        counts.read(path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "counts.parquet"
    counts.write(counts.to_table([ROW]), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CorruptDataError, match="not a readable parquet file"):
        counts.read(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, None) for name in ("context_bucket", "drafted", "step", "accepted_at")),
        *(("reached", [1.0]), ("rounds", float("inf")), ("rule", ""), ("method", "x")),
    ],
)
def test_odd_values_are_not_read(name: str, value: Any, tmp_path: Path) -> None:
    table = pa.Table.from_pylist([ROW.record(), ROW.record() | {name: value}], schema=counts.COUNTS_SCHEMA)
    pq.write_table(table, tmp_path / "counts.parquet")
    with pytest.raises(CorruptDataError, match=r"counts\.parquet: .*; not the counts of a score"):
        counts.read(tmp_path / "counts.parquet")


def test_filters_and_groups() -> None:
    rows = [replace(ROW, step=step, domain=domain) for step in (20, 40) for domain in ("support", "code", "chat")]
    table = counts.to_table(rows)
    assert len(counts.where(table, step=40)) == 3
    assert len(counts.where(table, step=[20, 40], domain=("code", "chat"))) == 4
    assert len(counts.where(table, domain="none")) == 0
    assert counts.values(table, "domain") == ["chat", "code", "support"]
    keys = [key for key, part in counts.groups(table, "domain", "step") if len(part) == 1]
    assert keys == sorted((row.domain, row.step) for row in rows)
    assert counts.concat([table, table])["step"].to_pylist() == [row.step for row in rows] * 2


def test_context_buckets_sort_by_size() -> None:
    labels = [counts.context_bucket(tokens) for tokens in (1, 128, 129, 1024, 4096, 4097, 30000, 10**6)]
    assert labels == ["00128", "00128", "00512", "01024", "04096", "08192", "32768", "32768+"]
    assert labels == sorted(labels)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("cluster", None), ("rounds", None), ("rounds", float("nan")), ("tokens", -1.0), ("accepted", 1e300)),
        *(("draft_tokens", value) for value in (None, 0, -2, 65, 10**12)),
        *(("reached", value) for value in (None, [1.0], [None, 1.0], [1.0] * 3, [float("inf"), 1.0])),
        *(("rule", "x"), ("method", "x"), ("tree", "other")),
    ],
)
def test_counts_that_others_may_write_are_checked(name: str, value: Any, tmp_path: Path) -> None:
    rows = [ROW.record(), replace(ROW, cluster="k2").record()]
    path = tmp_path / "counts.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema=counts.COUNTS_SCHEMA), path)
    assert counts.read_kept(path).to_pylist() == rows
    pq.write_table(pa.Table.from_pylist([rows[0] | {name: value}, rows[1]], schema=counts.COUNTS_SCHEMA), path)
    with pytest.raises(CorruptDataError, match="not the counts of a"):
        counts.read_kept(path)


def test_texts_of_counts_are_utf8_and_domains_few(tmp_path: Path) -> None:
    """A page is drawn of each domain, and text that cannot be read would be an error wherever it is looked at."""
    path, table = tmp_path / "counts.parquet", counts.to_table([ROW])
    for name in ("draft", "domain", "cluster", "tree"):
        odd = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"]).buffers())
        pq.write_table(table.set_column(table.column_names.index(name), name, odd), path)
        with pytest.raises(CorruptDataError, match="not the counts of a"):
            counts.read_kept(path)
    many, at = table.take(pa.array([0] * 10_001)), table.column_names.index("domain")
    pq.write_table(many.set_column(at, "domain", pa.array([f"d{i}" for i in range(10_001)])), path)
    with pytest.raises(CorruptDataError, match="10,001 domains; not the counts of a promotion"):
        counts.read_kept(path)


def test_a_small_table_takes_no_gigabytes(tmp_path: Path) -> None:
    path, many = tmp_path / "counts.parquet", pa.array([0] * 500_000)
    with pq.ParquetWriter(path, counts.COUNTS_SCHEMA, compression="zstd") as writer:
        batch = counts.to_table([replace(ROW, counts=RoundCounts(1.0, 1.0, 1.0, 1.0, (0, 0), (0, 0)))]).take(many)
        for _ in range(20):
            writer.write_table(batch)
    assert path.stat().st_size < 3_000_000
    ended = run(under_limits, (2000, 60, "draftforge.eval.counts", "read_kept", path), tmp_path / "log")
    assert ended.code == 2 and "counts.parquet: " in ended.said
