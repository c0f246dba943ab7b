"""Nothing vanishes: what was read is a conversation of the mix, or was left out for a reason that is counted."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest
from made_logs import LINES, write_log

from draftforge.data.conversation import SPLITS, turns
from draftforge.data.mix import build_mix, check_unanswered, load_log, load_manifest, load_mix, summary
from draftforge.data.record_outcomes import Outcome, SourceCounts
from draftforge.data.settings import MixSettings
from draftforge.errors import InputError

Line = dict[str, Any]


def build(folder: Path, sources: list[Line], **changes: Any) -> Path:
    build_mix(MixSettings.model_validate({"sources": sources, **changes}), folder, folder / "mix")
    return folder / "mix"


def talk(i: int, domain: str, *more: Line) -> Line:
    asked = {"role": "user", "content": f"thing{i} of part{i * 7} and word{i * 13} in house{i * 3}"}
    return {"messages": [asked, *more], "domain": domain}


def write(folder: Path, lines: list[Line], name: str = "log.jsonl") -> Line:
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {"kind": "messages", "path": name}


@pytest.mark.parametrize("limit", [None, 50])
@pytest.mark.parametrize("kind", LINES)
def test_what_is_read_is_kept_or_left_out_for_one_reason(tmp_path: Path, kind: str, limit: int | None) -> None:
    source = write_log(tmp_path, kind, 120, broken=(5, 71)) | {"skip_invalid": True, "limit": limit}
    folder = build(tmp_path, [source])
    manifest, mix = load_manifest(folder), load_mix(folder)
    (read,) = manifest["sources"]
    # Lines: counted here from the file; a page of two observations counts as two.
    data = (tmp_path / source["path"]).read_bytes()
    lines = sum(1 for line in data.split(b"\n") if line.strip()) + data.count(b'{"data": [{')
    assert read["read"] == manifest["read"] == lines
    assert read["read"] == read["taken"] + read["skipped"] + sum(read["left_out"].values()) and read["skipped"] == 2
    assert manifest["read"] == len(mix) + sum(manifest["left_out"].values())
    assert manifest["left_out"]["broken rule"] == 2 and manifest["left_out"]["exact copy"] > 0
    assert load_log(folder).num_rows == read["taken"]
    assert all(f"{kind}.log:" in place for found in read["places"].values() for place in found)
    assert set(read["places"]) <= {*read["left_out"], "broken rule"}
    log = load_log(folder).to_pydict()
    kept = {(id, where) for id, where, fate in zip(log["original"], log["where"], log["fate"]) if fate in SPLITS}
    assert {(one.id, one.where) for one in mix} == kept
    if limit is not None:
        assert read["taken"] == limit and read["left_out"]["over its source's limit"] > 0
    asked = Counter(one.split for one in mix for turn in turns(one) if turn.counts)
    assert manifest["turns"] == asked and sum(asked.values()) >= len(mix)
    assert summary(manifest).startswith(
        f"{lines} records read: {len(mix)} conversations with {sum(asked.values())} turns; left out: "
    )


def check_sums(folder: Path, read: int) -> Counter[str]:
    """What was left out of a mix of one source, after a look whether everything sums to what was read."""
    manifest, mix = load_manifest(folder), load_mix(folder)
    (source,) = manifest["sources"]
    assert source["read"] == manifest["read"] == read
    assert read == source["taken"] + source["skipped"] + sum(source["left_out"].values())
    assert read == len(mix) + sum(manifest["left_out"].values())
    return Counter(manifest["left_out"])


@pytest.mark.parametrize("limit", [None, 50])
@pytest.mark.parametrize("rows", [None, 70])
def test_rows_of_a_dataset_sum_to_what_was_read(tmp_path: Path, limit: int | None, rows: int | None) -> None:
    table = [talk(i, "chat") for i in range(64)]
    table[7:7] = [talk(3, "chat"), {"messages": [{"role": "user", "content": 5}], "domain": "chat"}]
    table[9:9] = [{"messages": [{"role": "user"}], "domain": "chat"}]
    table += [talk(i, "chat") for i in range(56, 64)]
    rows_read = [json.dumps(row["messages"]) for row in table]  # as a table of text holds them
    datasets.Dataset.from_dict({"messages": rows_read}).save_to_disk(str(tmp_path / "saved"))
    source: Line = {"kind": "dataset", "name": "saved", "domain": "chat", "limit": limit, "rows": rows}
    left_out = check_sums(build(tmp_path, [{**source, "skip_invalid": True}]), rows or len(table))
    assert left_out["broken rule"] == left_out["messages in an unread form"] == 1
    again = 4 if rows else 9
    over = (rows or len(table)) - 2 - again - (limit or 64)
    copies, over_limit = left_out["exact copy"], left_out["over its source's limit"]
    # Copies of what is over the limit are over it, too.
    assert copies + over_limit == again + over and (copies == again or limit is not None)
    with pytest.raises(InputError, match=r"^saved\[train\] row 9: messages\[0\]: content is a JSON number"):
        build_mix(MixSettings.model_validate({"sources": [source]}), tmp_path, tmp_path / "strict")


@pytest.mark.parametrize("limit", [None, 50])
def test_prompts_of_the_target_sum_to_what_was_asked_for(tmp_path: Path, limit: int | None) -> None:
    prompts = [talk(i, "")["messages"][0]["content"] for i in range(64)]
    prompts[7:7] = [" \n", prompts[3], prompts[3]]
    settings = MixSettings.model_validate({"sources": [{"kind": "target", "count": 70, "limit": limit}]})
    build_mix(settings, tmp_path, tmp_path / "mix", sample_prompts=lambda count, seed, most: prompts)
    left_out = check_sums(tmp_path / "mix", 70)
    assert left_out["broken rule"] == 1 and left_out["prompt that the target did not finish"] == 3
    copies, over_limit = left_out["exact copy"], left_out["over its source's limit"]
    assert (copies, over_limit) == (2, 0) if limit is None else copies + over_limit == 2 + 64 - limit


def test_a_domain_that_nothing_is_asked_of_ends_the_run_unless_the_recipe_names_it(tmp_path: Path) -> None:
    """Its only conversation goes on in another domain, or lies beyond the limit, or is not text."""
    answer, image = {"role": "assistant", "content": "Fine."}, [{"type": "image_url", "image_url": {"url": "x"}}]
    goes_on = talk(99, "long", answer, {"role": "user", "content": "and then?"})
    lines = [talk(i, "chat") for i in range(60)] + [talk(99, "short"), talk(99, "short"), goes_on]
    with pytest.raises(InputError) as caught:
        build(tmp_path, [write(tmp_path, lines)])
    assert str(caught.value) == (
        "mix: no turn is left to answer of 'short' (1 continued by a longer one, 1 exact copy); a domain or source "
        "that may end so must stand in mix.may_be_unanswered"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]
    folder = build(tmp_path, [write(tmp_path, lines)], may_be_unanswered=["short", "other"])
    manifest = load_manifest(folder)
    assert list(manifest["unanswered"]) == ["short"]
    # A mix that is there already is held against the recipe that uses it.
    with pytest.raises(InputError, match="of 'short'"):
        check_unanswered(manifest, MixSettings.model_validate({"sources": [write(tmp_path, lines)]}))

    pictures = [{"request": {"messages": [{"role": "user", "content": image}]}, "domain": "pictures"}] * 3
    seen = [{"request": talk(i, "chat"), "domain": "chat"} for i in range(60)]
    source = write(tmp_path, [*seen, *pictures]) | {"kind": "openai"}
    with pytest.raises(InputError, match=r"of 'pictures' \(3 message part that is not text\); a domain"):
        build_mix(MixSettings.model_validate({"sources": [source]}), tmp_path, tmp_path / "none")


def test_arguments_of_calls_are_redacted_however_deeply_they_are_nested(tmp_path: Path) -> None:
    call = {"id": "c1", "function": {"name": "f", "arguments": '{"a":' * 5_000 + '"ann@mail.org"' + "}" * 5_000}}
    deep = talk(60, "chat", {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": ""})
    source = write(tmp_path, [*(talk(i, "chat") for i in range(59)), deep])
    manifest = load_manifest(build(tmp_path, [source]))
    assert manifest["sources"][0]["taken"] == 60 and manifest["redacted"]["email"] == 1


def test_a_conversation_without_a_turn_is_refused_or_left_out_by_name() -> None:
    outcome = Outcome("log.jsonl:7", left_out="no turn to answer", domain="chat")
    source: Line = {"kind": "messages", "path": "log.jsonl", "skip_invalid": True}
    for allowed, passes in (([], False), (["other"], False), (["chat"], True), (["log.jsonl"], True)):
        settings = MixSettings.model_validate({"sources": [source], "may_be_unanswered": allowed})
        counts = SourceCounts()
        if passes:
            counts.add(outcome, settings.sources[0])
            assert counts.left_out == {"no turn to answer": 1} and counts.unanswered == set(allowed)
        else:
            with pytest.raises(
                InputError, match=r"^log\.jsonl:7: has no turn to answer; 'chat' or 'log\.jsonl' in mix"
            ):
                counts.add(outcome, settings.sources[0])


def test_a_source_that_another_one_holds_whole_ends_the_run_unless_the_recipe_names_it(tmp_path: Path) -> None:
    lines = [talk(i, "chat") for i in range(60)]
    sources = [write(tmp_path, lines), write(tmp_path, lines[:4], "twice.jsonl")]
    with pytest.raises(InputError, match=r"of 'twice\.jsonl' \(4 exact copy\); a domain or source"):
        build(tmp_path, sources)
    (tmp_path / "empty.jsonl").write_text("")
    sources.append({"kind": "messages", "path": "empty.jsonl"})
    with pytest.raises(InputError, match=r"empty\.jsonl: holds no conversation; .*mix\.may_be_unanswered names"):
        build(tmp_path, sources)
    manifest = load_manifest(build(tmp_path, sources, may_be_unanswered=["twice.jsonl", "empty.jsonl"]))
    assert sorted(manifest["unanswered"]) == ["empty.jsonl", "twice.jsonl"]
