"""Packed files, folders, patterns, arrays and tables: read one item at a time, with the place in every error."""

import bz2
import gc
import gzip
import json
import lzma
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from log_reading import SAMPLES, read_log, write_lines
from pydantic import ValidationError

from draftforge.data import file_search, files
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
        read_log(tmp_path / name, "turns").talks
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
    assert [talk[0][1] for talk in read_log(tmp_path / "[ab]*", "prompts").talks] == ["a.txt", "b/1.txt", "b/2.txt"]
    assert len(read_log(tmp_path / "**", "prompts").talks) == 4
    with pytest.raises(MissingFileError, match=r"none-\*\.txt: no file matches"):
        read_log(tmp_path / "none-*.txt", "prompts")
    (tmp_path / "odd[1].txt").write_text("a name with brackets")
    assert len(read_log(tmp_path / "odd[1].txt", "prompts").records) == 1


def test_links_to_folders_are_read_once_or_refused(tmp_path: Path) -> None:
    folder, outside = tmp_path / "logs", tmp_path / "disk"
    for name in ("logs/a.txt", "logs/2026/b.txt", "logs/.old/c.txt", "disk/d.txt", "disk/deep/e.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (folder / "latest").symlink_to(folder / "2026")
    (folder / "old").symlink_to(".old")
    assert sorted(path.name for path in file_search.find(tmp_path, "logs")) == ["a.txt", "b.txt", "c.txt"]
    (folder / "linked").symlink_to(outside)
    (folder / "2026" / "again").symlink_to(outside / "deep")
    (outside / "back").symlink_to(folder)
    with pytest.raises(InputError, match=r"logs/linked: is a link out of .*logs; follow_links of its source reads it"):
        file_search.find(tmp_path, "logs")
    found = file_search.find(tmp_path, "logs", follow_links=True)
    assert sorted(path.name for path in found) == ["a.txt", "b.txt", "c.txt", "d.txt", "e.txt"]


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.scandir", refused)
    with pytest.raises(InputError, match=r"cannot be read \(Permission denied\)"):
        file_search.find(tmp_path.parent, tmp_path.name)


@pytest.mark.parametrize("pattern", ["*/*.txt", "**/*.txt", "*/d*/x.txt", "b/*.txt", "**"])
def test_a_folder_on_the_way_of_a_pattern_that_cannot_be_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    for name in ("a/x.txt", "a/deep/x.txt", "b/x.txt", "b/deep/x.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert file_search.find(tmp_path, pattern)
    listed = os.scandir

    def some(path: Any = ".") -> Any:
        if Path(path) == tmp_path / "b":
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr("os.scandir", some)
    with pytest.raises(InputError, match=r"/b: cannot be read \(Permission denied\)"):
        file_search.find(tmp_path, pattern)
    assert len(file_search.find(tmp_path, "b/deep/*.txt")) == 1  # nothing has to be listed there


@pytest.mark.parametrize("name", ["logs", "logs/*.txt", "logs/**", "*/lost.txt", "*/*/x.txt"])
def test_a_link_to_nothing_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "logs" / "a").mkdir(parents=True)
    for kept in ("logs/kept.txt", "logs/a/x.txt"):
        (tmp_path / kept).touch()
    (tmp_path / "logs" / "lost.txt").symlink_to("gone")
    for follow_links in (False, True):
        with pytest.raises(InputError, match=r"lost\.txt: is a link to nothing"):
            file_search.find(tmp_path, name, follow_links)


@pytest.mark.parametrize("rotation", ["renamed", "copied and cut", "moved away"])
def test_a_log_that_is_rotated_while_it_is_read_is_an_error(tmp_path: Path, rotation: str) -> None:
    old, log = tmp_path / "log.1", tmp_path / "log"
    for path in (old, log):
        path.write_bytes(b"".join(LINES))
    found = files.objects(file_search.find(tmp_path, "."), "")
    next(found)
    with log.open("ab") as more:  # what is written meanwhile does no harm
        more.write(LINES[0])
    if rotation == "copied and cut":
        old.write_bytes(log.read_bytes())
        log.write_bytes(b"")
    else:
        old.rename(tmp_path / "log.2")
        log.rename(old)
    if rotation == "renamed":
        log.write_bytes(LINES[0])
    with pytest.raises((InputError, MissingFileError), match=r"log: (was replaced or cut|no such file)"):
        list(found)


def test_a_log_that_grows_while_it_is_read_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(LINES[0])
    found = files.objects([log], "")
    next(found)
    with log.open("ab") as more:
        more.write(LINES[1])
    assert len(list(found)) <= 1


ROTATED = [
    "logs/a-20261129.log.gz",
    "logs/a-2026-11-30T09-00-00.5.log",
    "logs/a-2026-11-30T10-00-00.5.log",
    "logs/a.log",
    "logs/b.log-20261130-1796000000.xz",
    "logs/b.log-20261130-1796009999.xz",
    "logs/b.log.12",
    "logs/b.log.9.gz",
    "logs/b.log.1",
    "logs/b.log",
    "logs/c.2.log",
    "logs/c.1.log",
    "logs/c.log",
    "logs/d.1.jsonl",
    "logs/d.2.jsonl",
    "logs/v1.2",
    "logs/v1.3",
    "other/0.log.20261130-101010.gz",
    "other/0.log",
    "s3/2026/11/30/23/z.log",
    "s3/2026/12/01/00/z.log.1",
    "s3/2026/12/01/00/z.log",
    "t/dt=2026-11-30/z.log",
    "t/dt=2026-12-01/z.log",
]


def test_files_of_a_rotated_log_are_read_in_the_order_of_time(tmp_path: Path) -> None:
    for name in sorted(ROTATED):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    for pattern in (".", "**/*"):
        found = file_search.find(tmp_path, pattern)
        assert [path.relative_to(tmp_path).as_posix() for path in found] == ROTATED
    whole = {path.relative_to(tmp_path).as_posix() for path in file_search.whole_logs(found).values()}
    assert whole == {
        *(f"logs/{name}" for name in ("a.log", "b.log", "c.log", "d.1.jsonl", "d.2.jsonl", "v1.2", "v1.3")),
        "other/0.log",
        "s3/z.log",
        "t/z.log",
    }
    days = ["2026-11-30.log", "2026-12-01.log", "2026-12-01.1.log"]
    assert file_search.whole_logs([tmp_path / day for day in days]) == {
        tmp_path / day: tmp_path / ".log" for day in days
    }


def test_digests_are_of_contents_and_names_below_the_folder(tmp_path: Path) -> None:
    for root in ("x", "y"):
        (tmp_path / root / "in").mkdir(parents=True)
        (tmp_path / root / "in" / "a.txt").write_text("a")
        (tmp_path / root / "in" / "b.txt").write_text("b")
    assert (
        file_search.digest(tmp_path, "x/in")
        == file_search.digest(tmp_path, "y/in")
        == file_search.digest(tmp_path / "x", "in")
    )
    assert file_search.digest(tmp_path, "x/in/*.txt") == file_search.digest(tmp_path, "y/in/[ab].txt")
    before = file_search.digest(tmp_path, "x/in")
    (tmp_path / "x" / "in" / "b.txt").rename(tmp_path / "x" / "in" / "c.txt")
    assert file_search.digest(tmp_path, "x/in") != before


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
    with pytest.raises(InputError, match=r"log\.json: item 2: not valid JSON \(Expecting ',' delimiter") as caught:
        read_log(path, "turns")
    assert "secret" not in str(caught.value) and "\n" not in str(caught.value)
    path.write_text('[{"turns": ["a"]}, {"turns": []}, {"turns": ["b"]}]')
    with pytest.raises(InputError, match=r"log\.json: item 2: turns is empty"):
        read_log(path, "turns")
    assert read_log(path, "turns", skip_invalid=True).counts.skipped == 1


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats()
    | st.text(alphabet='a"\\[]{},\u2028\x85\x0b\0 :', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(JSON, max_size=5), st.integers(1, 7), st.sampled_from([None, 1]), st.booleans())
@pytest.mark.slow
def test_arrays_are_read_as_lines_are(
    tmp_path: Path, values: list[object], piece: int, indent: int | None, ascii_only: bool
) -> None:
    """One parser: the same values however they are laid out, wherever the pieces that are read end."""
    texts = [json.dumps(value, ensure_ascii=ascii_only) for value in values]
    (tmp_path / "lines.jsonl").write_text("".join(text + "\n" for text in texts if text[0] != "["))
    (tmp_path / "array.json").write_text(json.dumps(values, ensure_ascii=ascii_only, indent=indent))
    (tmp_path / "spread.json").write_text(" \n" + "\n ".join(text for text in texts if text[0] != "["))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_PIECE_BYTES", piece)
        lines, array, spread = (
            [repr(item.decode()) for item in files.objects([tmp_path / name], "reading")]
            for name in ("lines.jsonl", "array.json", "spread.json")
        )
    assert array == [repr(json.loads(text)) for text in texts]
    assert lines == spread == [repr(json.loads(text)) for text in texts if text[0] != "["]


def test_large_numbers_and_equal_keys_are_the_same_in_arrays_and_lines(tmp_path: Path) -> None:
    text = '{"trace": 11529215046068469760, "big": 1e400, "odd": NaN, "turns": ["no"], "turns": ["yes"]}'
    write_lines(tmp_path / "lines.jsonl", text, text)
    write_lines(tmp_path / "array.json", f"[{text},", f"{text}]")
    for name in ("lines.jsonl", "array.json"):
        item = next(files.objects([tmp_path / name], "reading")).decode()
        assert item["trace"] == 11529215046068469760 and isinstance(item["trace"], int) and item["turns"] == ["yes"]
        assert item["big"] == float("inf") and item["odd"] != item["odd"]


def test_nul_bytes_in_front_of_a_line_are_passed_over(tmp_path: Path) -> None:
    """What copytruncate leaves; inside a line they are no padding."""
    log = tmp_path / "log.jsonl"
    with log.open("wb") as stream:
        stream.truncate(3_000_000)
        stream.seek(3_000_000)
        stream.write(b'{"turns": ["a"]}\n\0\0\0\n\0{"turns": ["b"]}\n{"turns"\0: ["c"]}\n\0\0')
    read = read_log(log, "turns", skip_invalid=True)
    assert [record.user_text for record in read.records] == ["a", "b"]
    assert [record.where for record in read.records] == [f"{log}:1", f"{log}:3"] and read.counts.skipped == 1


def test_lines_end_at_line_feeds_alone(tmp_path: Path) -> None:
    odd = "one\u2028two\x85three\x0bfour\x1cfive"
    for name, text in (
        ("p.txt", f"{odd}\r\nsix\n"),
        ("p.jsonl", "".join(json.dumps({"prompt": text}, ensure_ascii=False) + "\n" for text in (odd, "six"))),
        ("p.csv", f'prompt\n"{odd}"\n"six"\n'),
        ("p.tsv", f"act\tprompt\r\nx\t{odd}\r\nx\tsix\r\n"),
    ):
        (tmp_path / name).write_text(text, newline="")
        assert [record.user_text for record in read_log(tmp_path / name, "prompts").records] == [odd, "six"], name


@pytest.mark.parametrize("name", ["p.csv", "p.CSV.gz", "p.parquet"])
def test_prompts_of_a_table_are_a_named_column(tmp_path: Path, name: str) -> None:
    rows = [{"act": "Poet", "prompt": 'Write of "rivers",\nand end.', "other": "Hm"}]
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / name)
    else:
        table = b'act,prompt,other\nPoet,"Write of ""rivers"",\nand end.",Hm\n'
        (tmp_path / name).write_bytes(gzip.compress(table) if name.endswith(".gz") else table)
    assert read_log(tmp_path / name, "prompts").records[0].user_text == rows[0]["prompt"]
    assert (
        read_log(tmp_path / name, "prompts", column="other", domain_field="act", domain=None).records[0].domain
        == "Poet"
    )
    with pytest.raises(InputError, match=rf"{name}: has no column 'text'; it has act, other, prompt"):
        read_log(tmp_path / name, "prompts", column="text", skip_invalid=True)
    with pytest.raises(InputError, match=rf"{name}: has no column 'conversations'"):
        read_log(tmp_path / name, "sharegpt")


def test_an_empty_cell_is_no_value(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    path.write_text("prompt,reasoning_effort,temperature,started\nHi,,,\nHo,high,0.5,5\n")
    plain, other = sorted(read_log(path, "prompts").records, key=lambda record: record.user_text)
    assert (plain.template_args, plain.sampling, plain.started) == ({}, None, None)
    high = {"reasoning_effort": "high", "enable_thinking": True}
    assert (other.template_args, other.started) == (high, 5)


def test_a_column_that_a_source_names(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": None}]
    pq.write_table(pa.Table.from_pylist([{"chat": messages[:1]}]), tmp_path / "m.parquet")
    write_lines(tmp_path / "m.jsonl", json.dumps({"chat": messages[:1]}))
    for name in ("m.parquet", "m.jsonl"):
        assert read_log(tmp_path / name, "messages", column="chat").talks == [[("user", "Hi")]]
    write_lines(tmp_path / "p.txt", "Hi")
    with pytest.raises(InputError, match=r"p\.txt: is read line by line; only JSON and tables have a column 'chat'"):
        read_log(tmp_path / "p.txt", "prompts", column="chat")
    with pytest.raises(ValidationError, match="column 'x' is set for kind openai; a tool's log has fields of its own"):
        read_log(tmp_path / "p.txt", "openai", column="x")


@pytest.mark.parametrize(
    "content, rule",
    [
        ("type,input\nGENERATION\n", r":2: has not as many values"),
        ("type,input\nGENERATION,a,b\n", r":2: has not as many values"),
        ("type,input\nGENERATION,\\N\n", r":2: has \\N for no value"),
        ("type,input,input\nGENERATION,a,b\n", r": has several columns 'input'"),
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


SCHEMA = {"type": "object", "properties": {"b": {"type": "string", "default": None}, "a": {"type": "string"}}}
HI = [{"type": "text", "text": "Hi"}]
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": {"b": "x", "a": "y"}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]},
        {"tools": [{"name": "look", "input_schema": SCHEMA}]},
        {"messages": [{"role": "assistant", "content": HI, "tool_calls": [CALL]}, {"role": "user", "content": HI}]},
        {
            "messages": [
                {"role": "user", "content": [*HI, {"type": "tool_use", "id": "c", "name": "f", "input": {"b": 1}}]}
            ]
        },
        {"documents": [{"title": "b", "text": "a"}]},
        {"chat_template_kwargs": {"user": {"b": "x", "a": "y"}}},
    ],
)
def test_objects_in_columns_of_a_table_have_lost_their_order(tmp_path: Path, fields: dict[str, Any]) -> None:
    """All rows of a column have its fields in one order, and null where one was absent."""
    plain: dict[str, Any] = {"messages": [{"role": "user", "content": HI}], "parameters": {"top_p": 1.0}}
    texts = [{name: json.dumps(value) for name, value in row.items()} for row in (plain | fields, plain)]
    for name, rows in (("columns", [plain | fields, plain]), ("texts", texts)):
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
    for kind in ("openai", "messages"):
        assert read_log(tmp_path / "columns.parquet", kind).counts.left_out == {"objects in columns of a table": 1}
        assert "objects in columns of a table" not in read_log(tmp_path / "texts.parquet", kind).counts.left_out


@pytest.mark.parametrize(
    "value, kept",
    [
        *[("false", False), ("True ", False), ("5", False), ("0.5", False), ('["a"]', False), ('{"a": 1}', False)],
        *[("none", True), ("high", True), ("2024-07-26", True), ("26 Jul 2024", True), ("[Be nice] and brief", True)],
    ],
)
def test_template_arguments_in_a_map_of_texts_have_lost_their_types(tmp_path: Path, value: str, kept: bool) -> None:
    """Spark writes objects as maps, of one type: a flag `false` becomes a text, which a template takes for true."""
    schema = pa.schema([("messages", pa.string()), ("chat_template_kwargs", pa.map_(pa.string(), pa.string()))])
    rows = [
        {"messages": '[{"role": "user", "content": "Hi"}]', "chat_template_kwargs": [("thinking", one)]}
        for one in (value, "on")
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema), tmp_path / "map.parquet")
    found = read_log(tmp_path / "map.parquet", "messages")
    assert found.counts.left_out == ({} if kept else {"objects in columns of a table": 1})
    assert found.counts.taken == 1 + kept


def test_columns_of_json_hold_values(tmp_path: Path) -> None:
    """Their order and nulls are as they were, so that a template may be shown them."""
    tool = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
    contents = pa.StructArray.from_arrays(
        [pa.array(["user"] * 3), pa.array(['"Hi"', json.dumps(HI), "nil"], pa.json_())], names=["role", "content"]
    )
    table = {
        "messages": pa.ListArray.from_arrays([0, 1, 2, 3], contents),
        "tools": pa.array([json.dumps([tool]), None, None], pa.json_()),
    }
    pq.write_table(pa.table(table), tmp_path / "o.parquet")
    read = read_log(tmp_path / "o.parquet", "openai", skip_invalid=True)
    assert [talk[0][1] for talk in read.talks] == ["Hi", "Hi"] and read.counts.skipped == 1
    assert json.dumps(SCHEMA) in json.dumps(read.records[0].tools)
    with pytest.raises(InputError, match=r"o\.parquet: row 3: a column of JSON holds text that is none"):
        read_log(tmp_path / "o.parquet", "messages")


def test_maps_of_a_table_are_objects(tmp_path: Path) -> None:
    texts, numbers = pa.map_(pa.string(), pa.string()), pa.map_(pa.string(), pa.int64())
    table = {
        "type": ["GENERATION"] * 2,
        "input": [json.dumps([{"role": "user", "content": "Hi"}])] * 2,
        "usage_details": pa.array([[("input", 12), ("output", 5)], None], numbers),
        "model_parameters": pa.array([[("temperature", "0.5")], []], texts),
        "metadata": pa.array([[], [("system_prompt", "Be brief.")]], texts),
    }
    pq.write_table(pa.table(table), tmp_path / "o.parquet")
    read = read_log(tmp_path / "o.parquet", "langfuse")
    (record,) = read.records
    assert (record.prompt_tokens, record.sampling and record.sampling.temperature) == (12, 0.5)
    assert read.counts.left_out == {"settings beside the request": 1}


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
        gc.collect()
        tracemalloc.start()
        # Without a title: the line that tells of progress after two seconds loads a library of 1 MB.
        found = sum(1 for item in files.objects([path], "") if item.decode())
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert found == count
        return most

    peak(10)
    assert peak(4000) < 1.5 * peak(400) + 500_000  # the lines are 2 MB
