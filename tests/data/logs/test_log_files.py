"""Packed files, folders, patterns, arrays and tables: read one item at a time, with the place in every error."""

import bz2
import gzip
import json
import lzma
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from log_reading import SAMPLES, read_log

from draftforge.data import files
from draftforge.errors import InputError, MissingFileError


def zstd(data: bytes) -> bytes:
    packed: bytes = pa.compress(data, codec="zstd", asbytes=True)
    return packed


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstd,
}
NAMES = {"gz": "gzip", "bz2": "bzip2", "xz": "xz", "zst": "zstd"}
LINES = [json.dumps({"turns": [f"question {i}"]}).encode() + b"\n" for i in range(600)]


@pytest.mark.parametrize("suffix", PACKERS)
def test_packed_files_read_as_plain_ones(tmp_path: Path, suffix: str) -> None:
    pack = PACKERS[suffix]
    (tmp_path / "log.jsonl").write_bytes(b"".join(LINES))
    (tmp_path / f"log.jsonl.{suffix}").write_bytes(pack(b"".join(LINES)))
    (tmp_path / f"parts.jsonl.{suffix}").write_bytes(pack(b"".join(LINES[:200])) + pack(b"".join(LINES[200:])))
    plain, packed, parts = (
        read_log(tmp_path / name, "turns").records
        for name in ("log.jsonl", f"log.jsonl.{suffix}", f"parts.jsonl.{suffix}")
    )
    assert plain == packed == parts and len(plain) == 600


@pytest.mark.parametrize("suffix", PACKERS)
def test_packed_files_that_are_cut_name_file_and_line(tmp_path: Path, suffix: str) -> None:
    whole = PACKERS[suffix](b"".join(LINES))
    path = tmp_path / f"log.jsonl.{suffix}"
    for size in (len(whole) - 3, len(whole) // 2, 20, 4):
        path.write_bytes(whole[:size])
        with pytest.raises(InputError, match=rf"log\.jsonl\.{suffix}:\d+: not a complete {NAMES[suffix]} file"):
            read_log(path, "turns", skip_invalid=True)
    path.write_bytes(LINES[0])
    with pytest.raises(InputError, match=rf":1: not a complete {NAMES[suffix]} file"):
        read_log(path, "turns")


def test_folders_and_patterns_are_read_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/1.txt", "a.txt", "c.log", ".hidden.txt", ".git/x.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    folder = read_log(tmp_path, "prompts").talks
    assert [talk[0][1] for talk in folder] == ["a.txt", "b/1.txt", "b/2.txt", "c.log"]
    pattern = read_log(tmp_path / "b" / "*.txt", "prompts").talks
    assert [talk[0][1] for talk in pattern] == ["b/1.txt", "b/2.txt"]
    assert len(read_log(tmp_path / "**" / "*.txt", "prompts").talks) == 3
    with pytest.raises(MissingFileError, match=r"none-\*\.txt: no file matches"):
        read_log(tmp_path / "none-*.txt", "prompts")
    (tmp_path / "odd[1].txt").write_text("a name with brackets")
    assert len(read_log(tmp_path / "odd[1].txt", "prompts").records) == 1


def test_digests_are_of_contents_and_names_below_the_folder(tmp_path: Path) -> None:
    for root in ("x", "y"):
        (tmp_path / root / "in").mkdir(parents=True)
        (tmp_path / root / "in" / "a.txt").write_text("a")
        (tmp_path / root / "in" / "b.txt").write_text("b")
    assert files.digest(tmp_path, "x/in") == files.digest(tmp_path, "y/in") == files.digest(tmp_path / "x", "in")
    assert files.digest(tmp_path, "x/in/*.txt") == files.digest(tmp_path, "y/in/[ab].txt")
    before = files.digest(tmp_path, "x/in")
    (tmp_path / "x" / "in" / "b.txt").rename(tmp_path / "x" / "in" / "c.txt")
    assert files.digest(tmp_path, "x/in") != before


def test_arrays_and_values_over_many_lines(tmp_path: Path) -> None:
    read = read_log(SAMPLES / "sharegpt.json", "sharegpt")
    assert read.talks == [
        [("user", "Hi"), ("assistant", "Hello.")],
        [("system", "Be brief."), ("user", "One?"), ("assistant", "Two."), ("user", "Three?"), ("assistant", "Four.")],
    ]
    values = [{"turns": [text]} for text in ("a", "ü", "[", "}\n")]
    shapes = {
        "array.json": json.dumps(values),
        "array.jsonl": "\n\n " + json.dumps(values, ensure_ascii=False, indent=2),
        "bom.json": "\ufeff" + json.dumps(values),
        "spread.json": "\n".join(json.dumps(value, indent=2) for value in values),
        "lines.json": "\n".join(json.dumps(value) for value in values),
    }
    for name, text in shapes.items():
        (tmp_path / name).write_text(text)
        assert [talk[0][1] for talk in read_log(tmp_path / name, "turns").talks] == ["a", "ü", "[", "}\n"], name


def test_an_array_that_breaks_names_the_item_and_quotes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    path.write_text('[{"turns": ["a"]}, {"turns": ["my secret" "x"]}]')
    with pytest.raises(InputError, match=r"log\.json: item 2: not valid JSON \(parse error") as caught:
        read_log(path, "turns")
    assert "secret" not in str(caught.value) and "\n" not in str(caught.value)
    path.write_text('[{"turns": ["a"]}, {"turns": []}, {"turns": ["b"]}]')
    with pytest.raises(InputError, match=r"log\.json: item 2: turns is empty"):
        read_log(path, "turns")
    assert read_log(path, "turns", skip_invalid=True).counts.skipped == 1


@pytest.mark.parametrize(
    "content, rule",
    [
        ("type,input\nGENERATION\n", r":2: has not as many values"),
        ("type,input\nGENERATION,a,b\n", r":2: has not as many values"),
        ('type,input\nSPAN,x\nGENERATION,"a', r":3: not valid CSV"),
        ("type,input\nSPAN,\udcff\n", r":\d: not valid UTF-8"),
    ],
)
def test_tables_that_break(tmp_path: Path, content: str, rule: str) -> None:
    path = tmp_path / "o.csv"
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(InputError, match=rf"o\.csv{rule}") as caught:
        read_log(path, "langfuse")
    assert "\n" not in str(caught.value)
    (tmp_path / "o.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(InputError, match=r"o\.parquet: row 1: not a complete Parquet file"):
        read_log(tmp_path / "o.parquet", "langfuse")


@pytest.mark.parametrize("name", ["lines.jsonl", "array.json", "packed.jsonl.zst", "packed.json.gz"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, name: str) -> None:
    """Ten times the lines, the same peak: in an array of one line, too."""

    def peak(count: int) -> int:
        values = [json.dumps({"turns": [f"{i} " + "x" * 500]}) for i in range(count)]
        data = (f"[{', '.join(values)}]" if ".json." in name + "." else "\n".join(values)).encode()
        suffix = name.rpartition(".")[2]
        path = tmp_path / name
        path.write_bytes(PACKERS[suffix](data) if suffix in PACKERS else data)
        del data, values
        tracemalloc.start()
        found = sum(1 for item in files.objects([path], "reading") if item.decode())
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert found == count
        return most

    peak(10)
    assert peak(4000) < 1.5 * peak(400) + 100_000
