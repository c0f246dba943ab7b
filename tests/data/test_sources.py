"""Files, packed files, datasets and the target's prompts: read line by line, with the line's number in every error."""

import gzip
import json
import random
import re
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter

from draftforge.data.file_search import digest, find
from draftforge.data.record_outcomes import SourceCounts
from draftforge.data.records import Record
from draftforge.data.settings import MixSettings, Source
from draftforge.data.sources import SamplePrompts, input_digests, read, smallest
from draftforge.errors import DraftforgeError, InputError, MissingFileError, RecipeError

SOURCE: TypeAdapter[Source] = TypeAdapter(Source)


def reading(
    base: Path, sample_prompts: SamplePrompts | None = None, **source: Any
) -> tuple[list[Record], SourceCounts]:
    return read(SOURCE.validate_python({"domain": "d", **source}), base, 0, sample_prompts)


def texts(records: list[Record]) -> list[str]:
    return [record.user_text for record in records]


def test_plain_prompts_and_jsonl_prompts(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(b"\xef\xbb\xbfone\r\n\n two \nthree")
    (tmp_path / "p.jsonl").write_text('{"prompt": "one\\nline"}\n\n{"prompt": "two"}\n')
    records, counts = reading(tmp_path, kind="prompts", path="p.txt")
    assert texts(records) == ["one", " two ", "three"] and counts == SourceCounts(3, 0, 3)
    assert texts(reading(tmp_path, kind="prompts", path="p.jsonl")[0]) == ["one\nline", "two"]


@pytest.mark.parametrize("name", ["p{}.1", "p{}-20261130", "p{}.2026-11-30", "p-2026-11-30{}", "p.1{}", "P{}.1.gz"])
def test_parts_of_a_rotated_file_are_read_as_its_name_says(tmp_path: Path, name: str) -> None:
    """A part that ended in its number was read as text, and each line of JSON was asked as it stands."""
    contents = {
        ".jsonl": '{"prompt": "one"}\n',
        ".json": '{"prompt":\n"one"}\n',
        ".csv": "prompt\none\n",
        ".txt": "one\n",
    }
    for ending, content in contents.items():
        part = name.format(ending)
        (tmp_path / part).write_bytes(gzip.compress(content.encode()) if part.endswith("gz") else content.encode())
        assert texts(reading(tmp_path, kind="prompts", path=part)[0]) == ["one"]


GOOD = b'{"turns": ["a"]}\n'


@pytest.mark.parametrize(
    "name, content, rule",
    [
        ("log.jsonl", GOOD + b'{"turns": [\n', ":2: not valid JSON (Expecting value at column"),
        ("log.jsonl", b"[" + GOOD + b",", "log.jsonl: item 2: not valid JSON (the array is not closed)"),
        ("log.jsonl", b"[" + GOOD + b"]x", "log.jsonl: item 2: not valid JSON (Expecting value at column 1)"),
        ("log.jsonl", GOOD + b"\n\n3\n", ":4: is a JSON number; must be an object"),
        ("log.jsonl", GOOD + b"\xff\n", ":2: not valid UTF-8 (byte 1 of the line)"),
        ("log.jsonl", b'{"a": ' * 100_000, ":1: not valid JSON (nested deeper than 100 levels)"),
        ("log.jsonl", b"[" * 100_000, "log.jsonl: item 1: not valid JSON (the file ends inside it)"),
        (
            "log.jsonl",
            b"[" * 100_000 + b"]" * 100_000,
            "log.jsonl: item 1: not valid JSON (nested deeper than 100 levels)",
        ),
        ("log.jsonl", b"[" + GOOD + GOOD + b"]", "log.jsonl: item 2: not valid JSON (a comma is missing)"),
        ("log.jsonl", b"[" + GOOD + b",]", "log.jsonl: item 2: not valid JSON (Expecting value at column 1)"),
        ("log.jsonl", b"\n\n", "mix.sources[0]: log.jsonl: holds no conversation"),
    ],
)
def test_broken_files_name_the_line(tmp_path: Path, name: str, content: bytes, rule: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as caught:
        reading(tmp_path, kind="turns", path=name)
    assert rule in str(caught.value) and name in str(caught.value) and "\n" not in str(caught.value)


def test_a_vllm_log_without_prompts_names_the_cure(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text(
        "INFO 11-30 10:00:00 [logger.py:46] Received request chatcmpl-1: prompt: None, params: SamplingParams(n=1), "
        "prompt_token_ids: None, prompt_embeds shape: None, lora_request: None.\n"
    )
    with pytest.raises(InputError, match=r"1 no text logged\); `VLLM_LOGGING_LEVEL=DEBUG vllm serve .*-log-requests`"):
        reading(tmp_path, kind="vllm", path="server.log", year=2026)


def test_an_error_quotes_nothing_of_the_line(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"turns": ["my card is 4111 1111 1111 1111"}\n')
    with pytest.raises(InputError) as caught:
        reading(tmp_path, kind="turns", path="log.jsonl")
    assert "4111" not in str(caught.value)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"gone\.jsonl: no such file"):
        reading(tmp_path, kind="turns", path="gone.jsonl")
    with pytest.raises(MissingFileError, match="the folder holds no file"):
        reading(tmp_path, kind="turns", path=".")


def test_invalid_lines_can_be_skipped_and_are_counted(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_bytes(GOOD + b"{\n" + b'{"turns": []}\n' + b'{"turns": ["b"]}\n')
    records, counts = reading(tmp_path, kind="turns", path="log.jsonl", skip_invalid=True)
    assert texts(records) == ["a", "b"] and counts == SourceCounts(read=4, skipped=2, taken=2)


def test_limit_is_an_even_sample_free_of_order_and_copies(tmp_path: Path) -> None:
    lines = [json.dumps({"turns": [f"question {i}"]}) + "\n" for i in range(200)]
    chosen = []
    for seed in range(3):
        shuffled = random.Random(seed).sample(lines, 200)
        (tmp_path / "log.jsonl").write_text("".join(shuffled + shuffled[:50]))
        records, counts = reading(tmp_path, kind="turns", path="log.jsonl", limit=40)
        assert (counts.read, counts.taken, sum(counts.left_out.values())) == (250, 40, 210)
        assert 0 < counts.left_out["exact copy"] <= 50
        chosen.append(texts(records))
    assert chosen[0] == chosen[1] == chosen[2] and len(set(chosen[0])) == 40
    halves = [int(text.split()[1]) < 100 for text in chosen[0]]
    assert 10 <= sum(halves) <= 30


def test_a_larger_limit_keeps_what_a_smaller_one_kept(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("\n".join(f"prompt {i}" for i in range(100)))
    records, _ = reading(tmp_path, kind="prompts", path="p.txt")
    small, large = (set(texts(smallest(records, limit))) for limit in (10, 30))
    assert small < large


def test_of_exact_copies_under_a_limit_the_latest_stays(tmp_path: Path) -> None:
    lines = [
        json.dumps({"turns": ["a"], **asked}) + "\n" for asked in ({"started": 5}, {"started": 9}, {}, {"started": 7})
    ]
    for order in (lines, lines[::-1]):
        (tmp_path / "log.jsonl").write_text("".join(order))
        (record,) = reading(tmp_path, kind="turns", path="log.jsonl", limit=3)[0]
        assert record.started == 9


def test_saved_dataset(tmp_path: Path) -> None:
    rows = {
        "talk": [[{"role": "user", "content": f"question {i}"}] for i in range(6)],
        "topic": ["math", "code"] * 3,
        "temperature": [0.5, None] * 3,
    }
    saved = datasets.DatasetDict({"test": datasets.Dataset.from_dict(rows)})
    saved.save_to_disk(tmp_path / "saved")
    source: dict[str, Any] = {"kind": "dataset", "name": "saved", "split": "test", "column": "talk", "domain": None}
    records, counts = reading(tmp_path, **source, domain_field="topic", rows=5)
    assert texts(records) == [f"question {i}" for i in range(5)] and counts.read == 5
    assert [record.domain for record in records][:2] == ["math", "code"]
    assert [record.sampling is None for record in records][:2] == [False, True]
    for change, rule in (
        ({"split": "train"}, "has no split 'train'; it has test"),
        ({"column": "chat"}, r"saved\[test\]: has no column 'chat'; it has talk, temperature, topic"),
        ({"domain_field": "subject"}, r"saved\[test\] row 1: has no subject"),
    ):
        with pytest.raises(InputError, match=rule):
            reading(tmp_path, **{**source, **change})


def test_dataset_folder_of_data_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "files").mkdir()
    # What is a text in one row and parts in another the library keeps as JSON, that of texts in quotes.
    said: list[Any] = ["one", [{"type": "text", "text": "two"}], "{3}"]
    lines = [json.dumps({"messages": [{"role": "user", "content": content}]}) + "\n" for content in said]
    (tmp_path / "files" / "train.jsonl").write_text("".join(lines))
    records, _ = reading(tmp_path, kind="dataset", name="files", shape="messages")
    assert texts(records) == ["one", "two", "{3}"] and not capsys.readouterr().err.count("none of its splits")
    # Files of other splits are another source's; those of none are named.
    for name in ("test.jsonl", "data.jsonl", "sub/x.csv", "sub/notes.md", "dataset_info.json", ".hidden.jsonl"):
        (tmp_path / "files" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "files" / name).write_text("{}")
    reading(tmp_path, kind="dataset", name="files", shape="messages")
    line = "files: 2 files are in none of its splits, and are not read: data.jsonl, sub/x.csv\n"
    assert line in capsys.readouterr().err


def test_dataset_that_is_nowhere(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="no such folder"):
        reading(tmp_path, kind="dataset", name="./gone")
    with pytest.raises(InputError, match=r"^nobody/nothing\[train\]: the dataset cannot be read \(") as caught:
        reading(tmp_path, kind="dataset", name="nobody/nothing")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("card", "name"),
    [
        ("data_files: ROOT/secret.jsonl", "ROOT/secret.jsonl"),
        ("data_files: ../secret.jsonl", "../secret.jsonl"),
        ("data_files: link.jsonl", "link.jsonl"),
        ("data_files: http://127.0.0.1:9/secret.jsonl", "http://127.0.0.1:9/secret.jsonl"),
        ("data_files: 'text://secret.jsonl::file://ROOT/secret.jsonl'", "text://secret.jsonl::"),
        ("data_files: own.jsonl, data_dir: ..", "own.jsonl"),
    ],
)
def test_the_card_of_a_dataset_names_files_of_its_own_alone(tmp_path: Path, card: str, name: str) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    (tmp_path / "secret.jsonl").write_text('{"prompt": "secret"}\n')
    (folder / "own.jsonl").write_text('{"prompt": "own"}\n')
    (folder / "link.jsonl").symlink_to("../secret.jsonl")
    root = str(tmp_path)
    (folder / "README.md").write_text(f"---\nconfigs:\n- {{config_name: x, {card.replace('ROOT', root)}}}\n---\n")
    shown = re.escape(name.replace("ROOT", root)[:100])  # as it is shortened
    with pytest.raises(InputError, match=f"its data file .*{shown}.* is none of its own"):
        reading(tmp_path, kind="dataset", name="files", shape="prompts")


@pytest.mark.parametrize("name", ["train.parquet", "train.arrow"])
def test_a_dataset_that_unpacks_to_gigabytes_is_refused(tmp_path: Path, name: str) -> None:
    (folder := tmp_path / "files").mkdir()
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 1500, pa.int32()), pa.array(["x" * 1_000_000]))
    table = pa.table({"prompt": texts})
    if name.endswith(".parquet"):
        pq.write_table(table, folder / name, compression="zstd", store_schema=False)
    else:
        with pa.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(table)
    with pytest.raises(InputError, match=r"files\[train\]: files: takes more than 1\.02 GB of memory to unpack"):
        reading(tmp_path, kind="dataset", name="files", shape="prompts")


@pytest.mark.parametrize("name", ["csv", "../files", "http://host/x", "hf://a/b", "a/b/c", "a/..", "a/b@c", "-a/b"])
def test_names_that_are_no_hub_ids_are_not_looked_up(tmp_path: Path, name: str) -> None:
    with pytest.raises(MissingFileError, match=r"no such folder, and not a hub id \(owner/name\)"):
        reading(tmp_path, kind="dataset", name=name)


@pytest.mark.parametrize("revision", ["../../x", "a/../../b", "/etc", "a b", "", "a//b", "x" * 300])
def test_revisions_that_are_none_are_not_looked_up(tmp_path: Path, revision: str) -> None:
    with pytest.raises(InputError, match=r"must be a branch, a tag or a commit"):
        reading(tmp_path, kind="dataset", name="owner/name", revision=revision)


def test_a_folder_below_the_current_one_is_no_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here" / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(InputError, match=r"owner/name: is a folder below the current one, not below the recipe's"):
        reading(tmp_path, kind="dataset", name="owner/name")


def test_a_saved_dataset_reads_its_own_files_as_they_are_stored(tmp_path: Path) -> None:
    stored = datasets.Features({"bytes": datasets.Value("binary"), "path": datasets.Value("string")})
    features = datasets.Features({"prompt": datasets.Value("string"), "picture": stored})
    rows = {"prompt": ["one"], "picture": [{"path": "/gone", "bytes": None}]}
    datasets.Dataset.from_dict(rows, features=features).with_format("numpy").save_to_disk(str(tmp_path / "saved"))
    info = tmp_path / "saved" / "dataset_info.json"
    known = json.loads(info.read_text())
    info.write_text(json.dumps(known | {"features": known["features"] | {"picture": {"_type": "Image"}}}))
    assert texts(reading(tmp_path, kind="dataset", name="saved", shape="prompts")[0]) == ["one"]
    state = tmp_path / "saved" / "state.json"
    (tmp_path / "saved" / "data-00000-of-00001.arrow").rename(tmp_path / "out.arrow")
    state.write_text(state.read_text().replace("data-00000-of-00001.arrow", "../out.arrow"))
    with pytest.raises(InputError, match=r"\.\./out\.arrow: must stay inside"):
        reading(tmp_path, kind="dataset", name="saved", shape="prompts")


def test_prompts_of_the_target(tmp_path: Path) -> None:
    asked: list[tuple[int, int, int]] = []

    def sample_prompts(count: int, seed: int, max_tokens: int) -> list[str]:
        asked.append((count, seed, max_tokens))
        return ["a question", " ", "another"]

    records, counts = reading(tmp_path, sample_prompts, kind="target", count=3, seed=5, max_tokens=9)
    assert texts(records) == ["a question", "another"] and asked == [(3, 5, 9)] and counts.skipped == 1
    with pytest.raises(RecipeError, match=r"mix.sources\[0\]: kind 'target' samples from the target"):
        reading(tmp_path, kind="target", count=3)


def test_input_digests_follow_content(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("one")
    sources = [{"kind": "prompts", "path": "p.txt", "domain": "d"}, {"kind": "target", "count": 3}]
    settings = MixSettings.model_validate({"sources": sources})
    before = input_digests(settings, tmp_path)
    assert set(before) == {"sources[0]", "sources[1]"} and before == input_digests(settings, tmp_path)
    (tmp_path / "p.txt").write_text("two")
    after = input_digests(settings, tmp_path)
    assert after["sources[0]"] != before["sources[0]"] and after["sources[1]"] == before["sources[1]"]
    (tmp_path / "p.txt").unlink()
    with pytest.raises(DraftforgeError, match=r"p\.txt"):
        input_digests(settings, tmp_path)


def test_input_digests_follow_how_a_file_is_read_by_its_name(tmp_path: Path) -> None:
    """The same bytes are lines, JSON, a table or a packed file; that a log is rotated changes nothing."""
    names = ["p.txt", "p.jsonl", "p.json", "p.csv", "p.tsv", "p.parquet", "p.txt.gz", "p.jsonl.gz", "p.jsonl.zst"]
    rotated = ["p.log", "p.log.1", "other.txt", "P"]
    for name in (*names, *rotated, "P.JSONL", "p.jsonl.1"):
        (tmp_path / name).write_text('{"prompt": "one"}')

    def key_of(name: str, of: str) -> str:
        source = {"kind": "prompts", "path": name if of == "sources" else "p.txt", "domain": "d"}
        sets = [name] if of == "contamination" else []
        settings = MixSettings.model_validate({"sources": [source], "contamination": sets})
        return input_digests(settings, tmp_path)[f"{of}[0]"]

    for of in ("sources", "contamination"):
        assert len({key_of(name, of) for name in names}) == len(names)
        assert {key_of(name, of) for name in rotated} == {key_of("p.txt", of)}
        assert key_of("P.JSONL", of) == key_of("p.jsonl.1", of) == key_of("p.jsonl", of)


@pytest.mark.parametrize("path", ["logs", "logs/*.jsonl", "logs/**/*.jsonl"])
def test_links_out_of_a_log_folder_are_followed_only_if_the_recipe_says_so(tmp_path: Path, path: str) -> None:
    (tmp_path / "logs/old").mkdir(parents=True)
    for name in ("outside.jsonl", "logs/old/a.jsonl"):
        (tmp_path / name).write_text("{}\n")
    # A link that stays in the folder, and a source that is itself a link, are read.
    (tmp_path / "logs/b.jsonl").symlink_to(tmp_path / "logs/old/a.jsonl")
    assert tmp_path / "logs/b.jsonl" in find(tmp_path, path)
    (tmp_path / "named.jsonl").symlink_to(tmp_path / "outside.jsonl")
    assert find(tmp_path, "named.jsonl") == [tmp_path / "named.jsonl"]
    # One that leads out, to a file or by a folder, is refused.
    (tmp_path / "logs/c.jsonl").symlink_to(tmp_path / "outside.jsonl")
    with pytest.raises(InputError, match=r"c\.jsonl: is a link out of .*logs; follow_links"):
        find(tmp_path, path)
    with pytest.raises(InputError, match="follow_links"):
        digest(tmp_path, path)
    assert tmp_path / "logs/c.jsonl" in find(tmp_path, path, follow_links=True)
