"""The decoder's benchmark script runs anywhere, at small settings."""

import json
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
from trained import Trained

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture
def target(trained_drafts: Trained, tmp_path: Path) -> Path:
    """The trained target, which goes on with what it is told."""
    folder = tmp_path / "target"
    shutil.copytree(trained_drafts.target_folder, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "--draft: give at least one"),
        ("--draft lookup --draft lookup", "--draft lookup: must have a name of its own"),
        ("--draft small=target --draft small=other", "--draft small=other: must have a name of its own"),
        ("--draft plain=target", "--draft plain=target: must have a name of its own"),
        ("--draft small=nowhere", "--draft small=nowhere: no such folder"),
        ("--draft lookup --library-prompts 0", "--library-prompts 0: must be >= 1"),
        ("--draft lookup --library-prompts -2", "--library-prompts -2: must be >= 1"),
        ("--draft lookup --rounds 0", "--rounds 0: must be >= 1"),
        ("--draft lookup --context 0", "--context 0: must be >= 1"),
        ("--draft lookup --context 500", "--context 500: with 32 rounds of 4 drafted tokens it makes 661 tokens"),
        ("--draft lookup --repeats 0", "--repeats 0: must be >= 1"),
        ("--draft lookup --device abacus", "--device: abacus: must be auto, cpu or a device of torch"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(
    tiny_target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str, message: str
) -> None:
    shutil.copytree(tiny_target_folder, tmp_path / "target")
    shutil.copytree(tiny_target_folder, tmp_path / "other")
    words = [word.replace("=", f"={tmp_path}/") for word in given.split()]
    assert refused("target", "out.json", *words, folder=tmp_path, capsys=capsys).startswith(f"error: {message}")


def test_places_that_cannot_be(tiny_target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(tiny_target_folder, tmp_path / "target")
    lookup = ("--draft", "lookup")
    said = refused("nowhere", "out.json", *lookup, folder=tmp_path, capsys=capsys)
    assert said == "error: TARGET nowhere: no such folder"
    said = refused("target", "target", *lookup, folder=tmp_path, capsys=capsys)
    assert said == "error: OUT target: is a folder; must be a file"


def refused(target: str, out: str, *given: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a call that ends before it has read a prompt or a weight; paths in it without the folder."""
    main: Any = runpy.run_path(str(ROOT / "scripts" / "bench_decoder.py"))["main"]
    before = sorted(folder.rglob("*"))
    assert main([str(folder / target), str(folder / out), "--prompts", "never-read.jsonl", *given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sorted(folder.rglob("*")) == before
    return str(line.replace(f"{folder}/", ""))


@pytest.mark.slow
def test_ours_and_theirs(
    trained_drafts: Trained, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {"domain": domain, "turns": [f"Order {i}: {name} bought"]}
        for i, (domain, name) in enumerate([("new", "Maria"), ("new", "Ivan"), ("old", "Greta"), ("old", "Henry")])
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    main: Any = runpy.run_path(str(ROOT / "scripts" / "bench_decoder.py"))["main"]
    drafts = [f"{name}={trained_drafts.draft_folders[name]}" for name in ("small", "eagle3")]
    given = [str(target), str(tmp_path / "out.json"), "--prompts", str(tmp_path / "prompts.jsonl")]
    given += [word for draft in (*drafts, "lookup", f"bad={tmp_path}") for word in ("--draft", draft)]
    settings = "--draft-tokens 3 --batch-size 4 --max-new-tokens 16 --context 40 --library-prompts 2 --rounds 5"
    assert main([*given, *settings.split(), "--repeats", "1", "--device", "cpu"]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    ways = ["small K=3", "eagle3 K=3", "lookup K=3"]
    assert list(found["steps"]) == ["plain", *ways]
    assert found["steps"]["plain"]["over_plain"] == 1.0
    assert all(step["milliseconds"] > 0 and step["rounds"] >= 2 for step in found["steps"].values())
    small = [row for row in found["domains"] if row["draft"] == "small K=3"]
    assert [row["domain"] for row in small] == ["(all)", "new", "old"]
    assert all(row["tau"] > 1.5 for row in small)
    assert small[0]["tau_over_cost"] == pytest.approx(small[0]["tau"] / found["steps"]["small K=3"]["over_plain"])
    theirs = found["transformers"]
    assert list(theirs) == ["generate", "assisted by small"]
    assert theirs["generate"]["tokens"] == theirs["assisted by small"]["tokens"] <= 2 * 16
    assert all(one["prompts"] == 2 for one in theirs.values())
    assert all(one["ours_over_theirs"] == one["ours_per_second"] / one["tokens_per_second"] for one in theirs.values())
    ours = {row["setting"]["method"]: row["tokens"] for row in found["bench"]["rows"] if row["domain"] == "(all)"}
    assert len(set(ours.values())) == 1
    assert list(found["replay_tokens_per_second"]) == ways
    assert [one["method"] for one in found["bench"]["failures"]] == ["bad"]
    shown = capsys.readouterr().out
    titles = ("after 40 tokens", "By domain", "Ours", "Beside transformers", "over decoding at batch 4")
    assert all(title in shown for title in titles)
