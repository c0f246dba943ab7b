"""Whole mixes: same input, same bytes; what was trained on never comes back as holdout; nothing half-written."""

import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftforge import fingerprint, storage
from draftforge.data.mix import (
    CONVERSATIONS,
    FORMAT,
    LOG,
    MEMBERS,
    ORIGINS,
    build_mix,
    load_manifest,
    load_members,
    load_mix,
)
from draftforge.data.settings import MixSettings
from draftforge.errors import CorruptDataError, DraftforgeError, InputError, MissingFileError
from draftforge.specdec.sampling_settings import SamplingSettings

WORDS = [f"word{i}" for i in range(300)]
Line = dict[str, Any]


def line(i: int, domain: str = "chat", **more: Any) -> Line:
    return {"turns": [" ".join(random.Random(i).choices(WORDS, k=20))], "domain": domain, **more}


def build(base: Path, lines: list[Line], name: str = "mix", earlier: list[Path] | None = None, **changes: Any) -> Path:
    (base / "log.jsonl").write_text("".join(json.dumps(item) + "\n" for item in lines))
    settings = {"sources": [{"kind": "turns", "path": "log.jsonl"}], **changes}
    build_mix(MixSettings.model_validate(settings), base, base / name, ancestors=earlier or [])
    return base / name


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def splits(folder: Path) -> dict[str, str]:
    return {conversation.messages[-1].text: conversation.split for conversation in load_mix(folder)}


def test_same_input_same_bytes_and_order_changes_no_conversation(tmp_path: Path) -> None:
    lines = [line(i, "ab"[i % 2]) for i in range(60)]
    first, again = build(tmp_path, lines, "first"), build(tmp_path, lines, "again")
    assert files(first) == files(again)
    assert set(files(first)) == {CONVERSATIONS, ORIGINS, MEMBERS, LOG, "manifest.json"}
    shuffled = build(tmp_path, random.Random(0).sample(lines, 60), "shuffled")
    assert (first / CONVERSATIONS).read_bytes() == (shuffled / CONVERSATIONS).read_bytes()


def test_every_conversation_names_the_line_that_it_was_read_from(tmp_path: Path) -> None:
    lines = [line(i) for i in range(60)]
    mix = load_mix(build(tmp_path, [*lines, lines[3]]))
    place_of = {item["turns"][0]: f"log.jsonl:{number}" for number, item in enumerate(lines, start=1)}
    assert {c.messages[0].content: c.where for c in mix} == place_of
    assert all("where" not in c.model_dump() for c in mix)  # a capture of the same conversations stays


def test_every_conversation_knows_when_it_was_asked(tmp_path: Path) -> None:
    """A copy: its latest time; without a time, or with a wrong clock: the newest of the mix; without any: none."""
    start = 1_795_860_000.0
    lines = [line(i, started=start + i) for i in range(60)]
    lines += [line(3, started=start + 86400), line(3, started=start), line(60), line(61, started=5.0)]
    for shown in (lines, random.Random(0).sample(lines, len(lines))):
        mix = load_mix(build(tmp_path, shown, f"mix-{shown is lines}"))
        times = {c.messages[0].content: c.asked_at for c in mix}
        newest = start + 86400
        wanted = {line(i)["turns"][0]: newest if i in (3, 60, 61) else start + i for i in range(62)}
        assert times == wanted
    assert {c.asked_at for c in load_mix(build(tmp_path, [line(i) for i in range(60)], "timeless"))} == {None}


def test_adding_records_moves_none(tmp_path: Path) -> None:
    before = splits(build(tmp_path, [line(i) for i in range(60)], "before"))
    after = splits(build(tmp_path, [line(i) for i in range(40, 160)], "after"))
    common = before.keys() & after.keys()
    assert len(common) == 20 and all(before[text] == after[text] for text in common)


def test_manifest_tells_what_became_of_every_line(tmp_path: Path) -> None:
    lines = [line(i, "ab"[i % 4 == 0]) for i in range(80)]
    edited = {**lines[5], "turns": [lines[5]["turns"][0].upper() + "!"]}
    secret = {"turns": ["mail joe@acme.org about the unusual offer of yesterday"], "domain": "a"}
    folder = build(tmp_path, [*lines, lines[3], edited, secret], weights={"domain": {"a": 1, "b": 1}})
    manifest, mix = load_manifest(folder), load_mix(folder)
    left_out = manifest["left_out"]
    assert manifest["sources"][0]["read"] == 83 and manifest["redacted"]["email"] == 1
    assert left_out["exact copy"] == 1 and left_out["near-copy"] == 1
    assert len(mix) + sum(left_out.values()) == 83
    assert Counter(c.domain for c in mix) == {"a": 20, "b": 20}
    told = {split: Counter(domains) for split, domains in manifest["conversations"].items()}
    assert told == {s: Counter(c.domain for c in mix if c.split == s) for s in told}
    assert all(b"joe@" not in content for content in files(folder).values())
    assert str(tmp_path) not in json.dumps(manifest)


def test_source_weights_rule_the_shares(tmp_path: Path) -> None:
    for name, start in (("x", 0), ("y", 100)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps(line(start + i)) for i in range(60)))
    sources = [{"kind": "turns", "path": f"{n}.jsonl", "domain": n, "weight": w} for n, w in (("x", 3), ("y", 1))]
    build_mix(MixSettings.model_validate({"sources": sources}), tmp_path, tmp_path / "mix")
    assert Counter(c.domain for c in load_mix(tmp_path / "mix")) == {"x": 60, "y": 20}


def test_what_one_source_judges_on_no_other_trains_on(tmp_path: Path) -> None:
    """`only`: the whole file, and whatever resembles it elsewhere, copies included."""
    train, bench = [line(i) for i in range(60)], [line(100 + i) for i in range(8)]
    near = {"turns": [bench[1]["turns"][0] + " word1"], "domain": "chat"}
    for name, lines in (("train", [*train, bench[0], near]), ("bench", bench)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps(item) for item in lines))
    sources = [{"kind": "turns", "path": "train.jsonl"}, {"kind": "turns", "path": "bench.jsonl", "only": "holdout"}]
    settings = MixSettings.model_validate({"sources": sources})
    build_mix(settings, tmp_path, tmp_path / "mix")
    found = splits(tmp_path / "mix")
    benched = {item["turns"][0] for item in [*bench, near]}
    assert {text for text, split in found.items() if text in benched and split != "holdout"} == set()
    assert sum(text in benched for text in found) == len(bench)  # the near-copy counts once
    assert {found[item["turns"][0]] for item in train} == {"train", "selection", "holdout"}
    # An ancestor that trained on it cannot be undone: there it stays.
    old = MixSettings.model_validate({"sources": [{**sources[0], "only": "train"}, sources[1]], "salt": "x"})
    build_mix(MixSettings.model_validate({"sources": [sources[0]]}), tmp_path, tmp_path / "first")
    build_mix(old, tmp_path, tmp_path / "heir", ancestors=[tmp_path / "first"])
    assert splits(tmp_path / "heir")[bench[0]["turns"][0]] == splits(tmp_path / "first")[bench[0]["turns"][0]]


def test_sampling_comes_from_the_log_or_is_drawn(tmp_path: Path) -> None:
    lines = [line(i) | ({"temperature": 0.3, "max_tokens": 7} if i % 2 else {}) for i in range(200)]
    choices = [{"weight": 3, "temperature": 0}, {"weight": 1, "temperature": 0.8, "max_new_tokens": 32}]
    mix = load_mix(build(tmp_path, lines, sampling=choices))
    logged = SamplingSettings(temperature=0.3)
    drawn = Counter((c.sampling, c.max_new_tokens) for c in mix)
    assert drawn[logged, 7] == 100
    assert drawn[SamplingSettings(), None] == pytest.approx(75, abs=20)
    assert drawn[SamplingSettings(temperature=0.8), 32] == 100 - drawn[SamplingSettings(), None]
    ignored = load_mix(build(tmp_path, lines, logged_sampling=False))
    assert {(c.sampling, c.max_new_tokens) for c in ignored} == {(None, None)}


def grown(lines: list[Line]) -> list[Line]:
    """A later log: near-copies and group mates of every earlier line, and new lines."""
    copies = [{**item, "turns": [item["turns"][0] + " now"]} for item in lines]
    mates = [line(1000 + i, group=item["group"]) for i, item in enumerate(lines)]
    return [*copies, *mates, *(line(2000 + i) for i in range(60))]


@pytest.mark.slow
def test_no_ancestor_s_training_data_enters_a_later_holdout(tmp_path: Path) -> None:
    lines = [line(i, group=f"g{i}") for i in range(60)]
    first = build(tmp_path, lines, "first")
    second = build(tmp_path, grown(lines), "second", [first], salt="another")
    # The third generation knows the first only through the second.
    third = build(tmp_path, [*lines, *grown(lines)], "third", [second], salt="a third")
    trained = {item["group"] for item in lines if splits(first)[item["turns"][0]] == "train"}
    group_of = {item["turns"][0]: item.get("group") for item in [*lines, *grown(lines)]}
    for folder in (second, third):
        later = splits(folder)
        assert set(later.values()) == {"train", "selection", "holdout"}
        assert all(later[text] == "train" for text in later if group_of[text] in trained)
    assert len(load_members([third])) > len(load_mix(third))


def test_ancestors_of_the_recipe_count_too(tmp_path: Path) -> None:
    lines = [line(i) for i in range(60)]
    first = build(tmp_path, lines, "first")
    assert splits(build(tmp_path, lines, "stranger", salt="another")) != splits(first)
    heir = build(tmp_path, lines, "heir", salt="another", ancestors=["first"])
    assert splits(heir) == splits(first)
    assert load_manifest(heir)["ancestors"] == [load_manifest(first)["files"][CONVERSATIONS]]


@pytest.mark.parametrize(
    "lines, changes, rule",
    [
        ([line(0)], {}, "is empty: 1 conversations in 1 clusters"),
        (
            [line(i) for i in range(60)],
            {"weights": {"domain": {"code": 1}}},
            "mix.weights.domain: 'chat' has no weight; weights name code",
        ),
        (
            [line(i) for i in range(60)],
            {"weights": {"domain": {"chat": 1, "x": 1}}},
            "mix.weights.domain.x: weight 1.0, but no",
        ),
        ([{"turns": []}], {}, "log.jsonl:1: turns is empty"),
        ([line(i) for i in range(60)], {"ancestors": ["gone"]}, "gone"),
    ],
)
def test_refusals_leave_nothing_behind(tmp_path: Path, lines: list[Line], changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(DraftforgeError) as caught:
        build(tmp_path, lines, **changes)
    assert rule in str(caught.value) and "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]


def test_a_mix_needs_its_target_for_target_prompts(tmp_path: Path) -> None:
    settings = MixSettings.model_validate({"sources": [{"kind": "target", "count": 40}]})
    with pytest.raises(DraftforgeError, match="none is given"):
        build_mix(settings, tmp_path, tmp_path / "mix")
    build_mix(settings, tmp_path, tmp_path / "mix", lambda count, *_: [line(i)["turns"][0] for i in range(count)])
    assert {c.domain for c in load_mix(tmp_path / "mix")} == {"self"}


def test_damaged_and_missing_mixes_are_refused(tmp_path: Path) -> None:
    folder = build(tmp_path, [line(i) for i in range(60)])
    data = (folder / CONVERSATIONS).read_bytes()
    (folder / CONVERSATIONS).write_bytes(data[:-1])
    with pytest.raises(CorruptDataError, match=r"conversations\.parquet: its content does not match the digest"):
        load_mix(folder)
    (folder / CONVERSATIONS).unlink()
    with pytest.raises(MissingFileError, match=r"conversations\.parquet: no such file"):
        load_mix(folder)
    for text, rule in (
        ("{}", "is not a mix manifest"),
        ('{"format": 2, "files": {}}', f"is of format 2; must be {FORMAT}"),
    ):
        (folder / "manifest.json").write_text(text)
        with pytest.raises(CorruptDataError, match=rule):
            load_mix(folder)
    with pytest.raises(MissingFileError, match="no such mix folder"):
        load_mix(tmp_path / "gone")


def test_tools_and_template_arguments_survive_the_round_trip(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "clock", "description": "ask 10.0.0.1"}}]
    mix = load_mix(build(tmp_path, [line(i, tools=tools, chat_template_kwargs={"day": "é"}) for i in range(60)]))
    clock = {"name": "clock", "description": "ask <ip>", "parameters": None}
    assert all(c.tools == [{"type": "function", "function": clock}] for c in mix)
    assert all(c.template_args == {"day": "é"} for c in mix)
    assert [c.id for c in mix] == sorted({c.id for c in mix})


def test_nothing_found_is_stored_anywhere(tmp_path: Path) -> None:
    """System prompts, tools, their calls and answers, template arguments: no file holds the address."""
    mail = "joe.secret@acme.org"
    function = {"name": "send", "arguments": json.dumps({"to": mail})}
    messages: list[Line] = [
        {"role": "system", "content": f"You write for {mail}."},
        {"role": "user", "content": "unusual words", "name": mail},
        {"role": "assistant", "content": f"to {mail}", "tool_calls": [{"id": mail, "function": function}]},
        {"role": "tool", "content": f"sent to {mail}", "tool_call_id": mail},
    ]
    more = {"tools": [{"function": {"name": "send", "description": mail}}], "chat_template_kwargs": {"who": [mail]}}
    lines = [
        {"messages": [{**messages[0]}, {**messages[1], "content": line(i)["turns"][0]}, *messages[2:]]}
        for i in range(60)
    ]
    (tmp_path / "log.jsonl").write_text(
        "".join(json.dumps({**one, **more, "domain": "d", "group": mail}) + "\n" for one in lines)
    )
    settings = MixSettings.model_validate({"sources": [{"kind": "messages", "path": "log.jsonl"}], "ancestors": []})
    with pytest.raises(InputError):  # one group is one cluster, so one split
        build_mix(settings, tmp_path, tmp_path / "mix")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.jsonl"]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps({**one, **more, "domain": "d"}) + "\n" for one in lines))
    build_mix(settings, tmp_path, tmp_path / "mix")
    mix = load_mix(tmp_path / "mix")
    assert mail not in repr(mix) and repr(mix).count("<email>") == 9 * len(mix)
    assert load_manifest(tmp_path / "mix")["redacted"]["email"] == 9 * 60
    for path in (tmp_path / "mix").glob("*.parquet"):
        assert mail not in repr(pq.read_table(path).to_pylist())


def test_unicode_prompts_count_as_input_errors_not_crashes(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"turns": ["\\ud800"], "domain": "d"}\n')
    settings = MixSettings.model_validate({"sources": [{"kind": "turns", "path": "log.jsonl"}]})
    with pytest.raises(InputError, match=r"log\.jsonl:1: holds text that is not valid Unicode"):
        build_mix(settings, tmp_path, tmp_path / "mix")


def test_a_file_whose_name_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / os.fsdecode(b"\xff.jsonl")).write_text('{"turns": ["a"], "domain": "d"}\n')
    for path in ("logs", "logs/*.jsonl"):
        settings = MixSettings.model_validate({"sources": [{"kind": "turns", "path": path}]})
        with pytest.raises(InputError, match=r"udcff\.jsonl: has a name that is not valid UTF-8; rename it$"):
            build_mix(settings, tmp_path, tmp_path / "mix")


HALF = "\ud83d"


@pytest.mark.parametrize(
    ("content", "more"),
    [
        ({"content": "a"}, {"tools": [{"type": "function", "function": {"name": "f", "description": HALF}}]}),
        ({"content": "a"}, {"chat_template_kwargs": {"a": HALF}}),
        ({"tool_calls": [{"id": "1", "type": "function", "function": {"name": HALF, "arguments": "{}"}}]}, {}),
        ({"content": "a", "role": HALF}, {}),
        ({"content": "a", "role": [HALF]}, {}),
        ({"content": [{"type": HALF}]}, {}),
        ({"content": "a"}, {"replica": HALF, "started": 1.0, "ended": 2.0, "tools": [HALF]}),
    ],
)
def test_half_a_character_in_a_request_ends_no_mix(
    content: dict[str, Any], more: dict[str, Any], tmp_path: Path
) -> None:
    said = {"role": "user", "content": "a"}
    lines = [{"messages": [{"role": "user", "content": f"{i} of {i**3}"}], "domain": "d"} for i in range(60)]
    broken = {"messages": [said, {"role": "assistant", **content}, said], "domain": "d", **more}
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (*lines, broken)))
    source = {"kind": "messages", "path": "log.jsonl", "skip_invalid": True}
    build_mix(MixSettings.model_validate({"sources": [source]}), tmp_path, tmp_path / "mix")
    (counts,) = load_manifest(tmp_path / "mix")["sources"]
    assert counts["read"] == 61 and counts["taken"] == 60


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"contamination": ["none.jsonl"]}, r"^mix\.contamination\[0\]: .*none\.jsonl: no such file$"),
        ({"contamination": ["log.jsonl", "."]}, r"^mix\.contamination\[1\]: .*: is a folder; must be a file$"),
        ({"contamination": ["broken.jsonl"]}, r"^mix\.contamination\[0\]: .*broken\.jsonl"),
        ({"contamination": ["partly.jsonl"]}, r"^mix\.contamination\[0\]: .*: 2 read, 1 messages in an unread .*:2: "),
        ({"ancestors": ["none"]}, r"^mix\.ancestors\[0\]: .*none/manifest\.json: no such file$"),
        ({"ancestors": ["old", "spoilt"]}, r"^mix\.ancestors\[1\]: .*members\.parquet: its content does not match"),
    ],
)
def test_what_a_field_names_is_refused_by_the_fields_name(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    lines = [line(i) for i in range(60)]
    for name in ("old", "spoilt"):
        build(tmp_path, lines, name)
    (tmp_path / "spoilt" / MEMBERS).write_bytes(b"no table")
    (tmp_path / "broken.jsonl").write_text('{"messages": [{"role": "nobody"}]}\n')
    (tmp_path / "partly.jsonl").write_text('{"prompt": "a"}\n{"prompt": "of what?", "context": "b"}\n')
    with pytest.raises(DraftforgeError, match=says):
        build(tmp_path, lines, **changes)
    assert not (tmp_path / "mix").exists()


@pytest.mark.parametrize("column", ["id", "cluster", "split", "signature", "turn_keys"])
def test_members_of_an_ancestor_are_what_a_mix_writes(column: str, tmp_path: Path) -> None:
    """The ancestor may be another's, whose digests agree."""
    lines = [line(i) for i in range(60)]
    old = build(tmp_path, lines, "old")
    table, manifest = pq.read_table(old / MEMBERS), load_manifest(old)
    at, kind = table.column_names.index(column), table.schema.field(column)
    odd = [table.drop_columns(column), table.set_column(at, kind, pa.nulls(len(table), kind.type))]
    odd.append(table.set_column(at, column, pa.array([7] * len(table))))
    if kind.type == pa.string():
        texts = pa.Array.from_buffers(kind.type, len(table), pa.array([b"\xff"] * len(table)).buffers())
        odd.append(table.set_column(at, kind, texts))
    for one in odd:
        pq.write_table(one, old / MEMBERS)
        files = manifest["files"] | {MEMBERS: fingerprint.of_file(old / MEMBERS)}
        storage.write_json(old / "manifest.json", manifest | {"files": files})
        with pytest.raises(CorruptDataError, match=r"members\.parquet: "):
            build(tmp_path, lines, "heir", ancestors=["old"])
