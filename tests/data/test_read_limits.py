"""Hostile files: small ones that unpack to gigabytes, lines without end, deep JSON and tables that repeat one text."""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forked import run
from limited import under_limits

from draftforge.data import files, read_limits
from draftforge.data.read_limits import Limits, json_within
from draftforge.data.settings import MixSettings
from draftforge.data.sources import read
from draftforge.errors import InputError
from draftforge.storage import MOST_DEPTH, parse_json

SMALL = Limits(line_bytes=100_000, unpacked_bytes=1_000_000)
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
}


def outcomes(path: Path, limits: Limits = SMALL, **options: Any) -> list[Any]:
    """What each item of a file is: its value, or the error that it raises."""
    found: list[Any] = []
    for item in files.objects([path], "", limits, **options):
        try:
            found.append(item.decode())
        except InputError as error:
            assert "\n" not in str(error)
            found.append(str(error))
    return found


def test_a_line_that_is_too_long_is_one_error_and_the_next_one_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    long = json.dumps({"a": "x" * 200_000})
    path.write_text(f'{{"a": 1}}\n{long}\n{{"a": 2}}\n{long}')
    first, second, third, fourth = outcomes(path)
    assert (first, third) == ({"a": 1}, {"a": 2})
    assert second == f"{path}:2: has 200 kB, more than read_limits.line_megabytes allows"
    assert fourth.startswith(f"{path}:4: has 200 kB")
    exact = json.dumps({"a": "x" * (SMALL.line_bytes - 9)})
    path.write_text(exact)
    assert len(exact) == SMALL.line_bytes and outcomes(path) == [json.loads(exact)]
    for text in (files.text_lines, files.prompt_lines):
        path.with_suffix(".txt").write_text(f"one\n{long}\ntwo")
        items = list(text([path.with_suffix(".txt")], "", SMALL))
        assert [len(item.raw) if isinstance(item.raw, bytes) else item.raw for item in items] == [4, len(long) + 1, 3]


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.slow
def test_what_unpacks_to_too_much_ends_there(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x.jsonl{suffix}"
    line = json.dumps({"a": "x" * 90_000}).encode() + b"\n"
    path.write_bytes(PACKERS[suffix](line * 8))
    assert len(outcomes(path)) == 8
    path.write_bytes(PACKERS[suffix](line * 2000))
    *read, last = outcomes(path)
    assert len(read) in (10, 11) and all(isinstance(one, dict) for one in read)
    assert last == (
        f"{path}: unpacks to more than read_limits.unpacked_gigabytes allows; the rest of the file is not read"
    )


@pytest.mark.parametrize("text", ['[{{"a": 1}}, {{"a": "{long}"}}, {{"a": 2}}]', '[{{"a": 1}}, {long}'])
def test_a_value_of_an_array_that_is_too_long_ends_the_file(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.json"
    path.write_text(text.format(long="1" * 400_000))
    first, last = outcomes(path)
    assert first == {"a": 1}
    assert last.startswith(f"{path}: item 2: is larger than read_limits.line_megabytes allows; the rest")
    assert len(list(files.objects([path], "reading", SMALL))) == 2
    assert f"{last}\n" in capsys.readouterr().err  # a source may skip what is invalid


def test_a_row_of_a_table_that_is_too_long_ends_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    for text in (f"a,b\n1,2\n3,{'x' * 200_000}\n", 'a,b\n1,2\n3,"' + "x\n" * 100_000 + '"\n'):
        path.write_text(text)
        first, last = outcomes(path)
        assert first == {"a": "1", "b": "2"}
        assert "more than read_limits.line_megabytes allows; the rest of the file is not read" in last


def test_a_parquet_file_is_read_by_what_it_says_and_row_by_row(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    long = "x" * 60_000
    chats = [[{"role": "user", "content": "hi"}], [{"role": "user", "content": long}] * 4, [], None]
    pq.write_table(pa.table({"messages": chats, "n": [1, 2, 3, 4], "t": ["a", None, "c", "d"]}), path)
    first, second, third, fourth = outcomes(path)
    assert first == {"messages": chats[0], "n": 1, "t": "a"}
    assert second.startswith(f"{path}: row 2: has 240 kB")
    assert (third, fourth) == ({"messages": [], "n": 3, "t": "c"}, {"n": 4, "t": "d"})
    assert outcomes(path, SMALL._replace(line_bytes=10**6))[1] == {"messages": chats[1], "n": 2}
    for table in ({"n": list(range(200_000))}, {"n": [None] * 20_000}):
        pq.write_table(pa.table(table), path)
        (only,) = outcomes(path)
        assert only.startswith(f"{path}: {len(table['n'])} rows, ")
        assert only.endswith("more than read_limits.unpacked_gigabytes allows; the rest of the file is not read")


def test_a_text_that_all_rows_of_a_table_repeat_counts_with_each(tmp_path: Path) -> None:
    path, size = tmp_path / "x.parquet", SMALL.unpacked_bytes // 600
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 2000, pa.int32()), pa.array(["x" * size]))
    for table in ({"a": texts}, {"a": pa.ListArray.from_arrays(pa.array(range(2001), pa.int32()), texts)}):
        pq.write_table(pa.table(table), path)
        *read, last = outcomes(path)
        assert 0 < len(read) <= 600 and last == (
            f"{path}: unpacks to more than read_limits.unpacked_gigabytes allows; the rest of the file is not read"
        )


def test_a_parquet_row_whose_text_is_none_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    offsets, data = pa.py_buffer(np.array([0, 1, 2, 3], np.int32)), pa.py_buffer(b"a\xffc")
    for values in (pa.StringArray.from_buffers(3, offsets, data), pa.array([["b"]] * 3)):
        pq.write_table(pa.table({"a": values}), path, use_dictionary=False)
        wrong = f"{path}: row 2: holds text that is not valid UTF-8"
        assert outcomes(path) == ([{"a": "a"}, wrong, {"a": "c"}] if values.type == pa.string() else [{"a": ["b"]}] * 3)
    path.write_bytes(path.read_bytes().replace(b"\x01a", b"\x01\xff"))
    with pytest.raises(InputError, match=r"row 1: not a complete Parquet file"):
        outcomes(path)


def test_json_is_read_to_a_depth(tmp_path: Path) -> None:
    def nested(depth: int) -> str:
        return '{"a":' * (depth // 2) + "[" * (depth - depth // 2) + "]" * (depth - depth // 2) + "}" * (depth // 2)

    assert parse_json(nested(MOST_DEPTH)) and parse_json("[" + "[]," * 500 + "[]]")
    path = tmp_path / "x.jsonl"
    for depth in (MOST_DEPTH + 1, 600, 20_000):
        path.write_text(nested(depth))
        said = f"not valid JSON (nested deeper than {MOST_DEPTH} levels); must be one object a line"
        assert outcomes(path) == [f"{path}:1: {said}"]


def test_json_of_a_line_has_so_many_objects_and_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_limits, "MOST_CONTAINERS", 3)
    for text in ("[{}, []]", '["[[[[", {}, "\\"{{{{"]'):
        assert json_within(text) == json.loads(text)
    with pytest.raises(ValueError, match="has more than 3 objects and lists"):
        json_within('[{}, [], ["a"]]')


def test_what_is_over_a_limit_is_counted_where_the_source_skips_it(tmp_path: Path) -> None:
    good = json.dumps({"messages": [{"role": "user", "content": "hello there"}]})
    (tmp_path / "x.jsonl").write_text(f"{good}\n{json.dumps({'messages': 'x' * 5000})}\n")
    (tmp_path / "y.jsonl.gz").write_bytes(gzip.compress(f"{good}\n".encode() * 2000))
    limits = {"line_megabytes": 0.001, "unpacked_gigabytes": 0.0001}
    for path, reason in (("x.jsonl", "line_megabytes"), ("y.jsonl.gz", "unpacked_gigabytes")):
        source = {"kind": "messages", "path": path, "domain": "d"}
        (strict,) = MixSettings.model_validate({"sources": [source], "read_limits": limits}).sources
        with pytest.raises(InputError, match=reason):
            read(strict, tmp_path, 0)
        (lenient,) = MixSettings.model_validate(
            {"sources": [source | {"skip_invalid": True}], "read_limits": limits}
        ).sources
        records, counts = read(lenient, tmp_path, 0)
        assert records and counts.skipped == 1 and reason in counts.places["broken rule"][0][1]


@pytest.mark.slow
def test_bombs_are_read_within_little_memory(tmp_path: Path) -> None:
    many = gzip.compress(b"x" * 40_000_000) * 3
    (tmp_path / "nul.jsonl.gz").write_bytes(gzip.compress(bytes(40_000_000)) * 3)
    (tmp_path / "line.jsonl.gz").write_bytes(gzip.compress(b'{"a": "') + many)
    (tmp_path / "array.json.gz").write_bytes(gzip.compress(b'[{"a": "') + many)
    (tmp_path / "rows.csv.gz").write_bytes(gzip.compress(b'a\n"') + gzip.compress(b"x\n" * 10_000_000) * 3)
    repeated = pa.DictionaryArray.from_arrays(pa.array([0] * 500, pa.int32()), pa.array(["x" * 900_000]))
    pq.write_table(pa.table({"a": repeated}), tmp_path / "repeat.parquet", store_schema=False)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 5_000_000
    ended = run(under_limits, [90, 120, __file__, "_bombs", str(tmp_path)], tmp_path / "log")
    assert ended.code == 0, ended.said


def test_lists_that_repeat_a_text_are_not_unpacked_into_memory(tmp_path: Path) -> None:
    """A file of a kilobyte, whose first rows are gigabytes."""
    count = 2 * files._NESTED_ROWS * 100
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array(["x" * 500_000]))
    lists = pa.ListArray.from_arrays(pa.array(range(0, count + 1, 100), pa.int32()), texts)
    pq.write_table(pa.table({"turns": lists}), tmp_path / "lists.parquet", compression="zstd", store_schema=False)
    assert (tmp_path / "lists.parquet").stat().st_size < 5_000
    ended = run(under_limits, [1000, 60, __file__, "_lists", str(tmp_path)], tmp_path / "log")
    assert ended.code == 0, ended.said


def _lists(folder: str) -> None:
    (found,) = outcomes(Path(folder, "lists.parquet"), Limits(line_bytes=4_000_000))
    assert "takes more than 268 MB of memory to unpack, 16 times what read_limits.line_megabytes allows" in found


def _bombs(folder: str) -> None:
    limits = Limits(line_bytes=4_000_000)
    for name, values in (
        ("nul.jsonl.gz", 0),
        ("line.jsonl.gz", 1),
        ("array.json.gz", 1),
        ("rows.csv.gz", 1),
    ):
        found = outcomes(Path(folder, name), limits)
        assert len(found) == values and all("read_limits" in one for one in found), (name, str(found)[:300])
    rows = [len(item.decode()["a"]) for item in files.objects([Path(folder, "repeat.parquet")], "", limits)]
    assert rows == [900_000] * 500
