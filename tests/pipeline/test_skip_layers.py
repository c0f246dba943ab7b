"""`draftforge skip-layers`, and its file as a draft."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from distilled import cached_stages

from draftforge.cli import main
from draftforge.errors import FormatError, InputError, StaleInputError
from draftforge.eval.layer_skip_search import SkipScorer
from draftforge.pipeline import distill as flow
from draftforge.pipeline.cli_options import GenerateOptions, SkipLayersOptions
from draftforge.pipeline.generate import generate
from draftforge.pipeline.layer_skip import skip_layers
from draftforge.pipeline.workspace import Workspace
from draftforge.recipe import Recipe, load_recipe
from draftforge.specdec.drafts.layer_skip import SkippedDraft, SkippedLayers
from draftforge.specdec.formats.layer_skip import SkipFile, write_skipped
from draftforge.specdec.stored_draft import StoredDraft

SEARCH = SkipLayersOptions(tries=20, conversations=2)


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory: pytest.TempPathFactory, recipe_in: Callable[..., Path]) -> Path:
    return recipe_in(tmp_path_factory.mktemp("skip"))


@pytest.fixture(scope="module")
def recipe(recipe_file: Path) -> Recipe:
    return load_recipe(recipe_file)


@pytest.fixture(scope="module")
def searched(recipe: Recipe, finished_stages: Path) -> Path:
    """The file of all domains together, in the work folder."""
    with cached_stages(finished_stages):
        skip_layers(recipe, SEARCH)
    return recipe.workdir / "skip-layers.json"


def fails(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line with which a command line ends."""
    with pytest.raises(SystemExit) as ended:
        main(list(args))
    assert ended.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(lines) == 1
    return lines[0]


@pytest.mark.slow
def test_a_set_for_all_domains_and_for_each(
    recipe: Recipe, searched: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = sorted(path.name for path in searched.parent.glob("skip-layers*.json"))
    assert files == ["skip-layers-code.json", "skip-layers-support.json", "skip-layers.json"]
    monkeypatch.setattr(SkipScorer, "_replay", None)  # everything is known
    capsys.readouterr()
    before = {name: (searched.parent / name).read_bytes() for name in files}
    skip_layers(recipe, SEARCH)
    assert before == {name: (searched.parent / name).read_bytes() for name in files}
    shown = capsys.readouterr()
    header, *rows = shown.out.splitlines()[1:5]
    assert re.split("  +", header) == [
        "domain", "attention skipped", "MLP skipped", "kept", "K", "tau", "expected speed-up", "sets tried",
    ]  # fmt: skip
    for row, domain, name in zip(rows, ("all domains", "code", "support"), (files[2], *files[:2])):
        raw = json.loads((searched.parent / name).read_text())
        found = raw["found"]
        assert raw["family"] == "skipped" and raw["target_fingerprint"] == Workspace(recipe).target_fingerprint
        figures = f"{found['kept']:.0%} {found['K']} {found['tau']:.2f} {found['speedup']:.2f}x {found['tries']}"
        assert row.startswith(f"{domain} ") and row.split()[-5:] == figures.split()
        assert found["domain"] == domain and found["K"] in (1, 2) and 1 <= found["tau"] <= 3
        gone = len(raw["skipped"]["attention"]) + len(raw["skipped"]["mlp"])
        assert found["kept"] == 1 - gone / 8
    skip_layers(recipe, replace(SEARCH, domain="code", out=tmp_path / "mine.json"))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.json"]


@pytest.mark.slow
def test_more_tries_go_on_from_those_made(
    recipe: Recipe, searched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[SkippedLayers] = []
    inner = SkipScorer._replay

    def spy(self: SkipScorer, skipped: SkippedLayers, samples: Any) -> Any:
        asked.append(skipped)
        return inner(self, skipped, samples)

    monkeypatch.setattr(SkipScorer, "_replay", spy)
    few = replace(SEARCH, domain="code", draft_tokens=1, out=tmp_path / "more.json")
    for tries, fresh in ((3, 3), (3, 0), (6, 3), (2, 0)):
        before = len(asked)
        skip_layers(recipe, replace(few, tries=tries))
        assert len(asked) == before + fresh
    assert len(set(asked)) == 6
    skip_layers(recipe, replace(few, conversations=1, tries=2))
    assert len(asked) == 8  # other answers, other counts


def test_the_file_is_a_draft(recipe: Recipe, searched: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flow.score(recipe, str(searched))
    told = capsys.readouterr()
    assert searched.name in told.out and "nothing says which tokenizer" not in told.err
    for temperature in (0.0, 0.8):
        answers = []
        for draft in ("none", str(searched)):
            options = GenerateOptions(draft=draft, temperature=temperature, draft_tokens=2, max_new_tokens=12)
            generate(recipe, "support order?", options)
            answers.append(capsys.readouterr().out)
        assert "drafted tokens accepted" in answers[1] and "no draft" in answers[0]
        if temperature == 0.0:
            assert answers[0].splitlines()[:-1] == answers[1].splitlines()[:-1]


def test_it_drafts_for_no_other_target(
    recipe: Recipe,
    searched: Path,
    make_tiny_target: Callable[[int], Path],
    recipe_in: Callable[..., Path],
    tmp_path: Path,
) -> None:
    other = load_recipe(recipe_in(tmp_path, target={"model": str(make_tiny_target(5)), "device": "cpu"}))
    with pytest.raises(
        StaleInputError,
        match=r"skip-layers\.json: skips layers of target .{12} and drafts for no other; this one is",
    ):
        StoredDraft.load(searched, Workspace(other).target)
    draft = StoredDraft.load(searched, Workspace(recipe).target)
    assert draft.family == "skipped"


def test_bad_input_is_one_line(
    recipe_file: Path, recipe: Recipe, searched: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verb, taken = ("skip-layers", str(recipe_file)), tmp_path / "taken.json"
    assert "--domain sales: must be a domain of the selection split (code, support)" in fails(
        capsys, *verb, "--domain", "sales"
    )
    assert "--out found.yaml: must end in .json" in fails(capsys, *verb, "--out", "found.yaml")
    assert "nothing can be written in /" in fails(capsys, *verb, "--out", "/proc/nowhere/mine.json")
    taken.write_text('{"my": "notes"}')
    assert "taken.json is a file; must be a folder" in fails(capsys, *verb, "--out", f"{taken}/mine.json")
    assert "taken.json: exists and holds no skipped layers; name another file" in fails(
        capsys, *verb, "--out", str(taken)
    )
    assert taken.read_text() == '{"my": "notes"}'
    score = ("score", str(recipe_file), "--draft", str(taken))
    assert "taken.json: target_fingerprint: Field required" in fails(capsys, *score)
    taken.write_text("{")
    assert "taken.json: not valid JSON" in fails(capsys, *score)
    raw = json.loads(searched.read_text())
    for skipped, said in (
        ({"attention": [9]}, "taken.json: attention of layer 9: the target has 4 layers, 0 the first"),
        ({"mlp": [1, 1]}, "taken.json: skipped: mlp: Value error, [1, 1]: must be layers from 0 on, each named once"),
        ({"heads": [1]}, "taken.json: skipped: heads: Extra inputs are not permitted"),
    ):
        taken.write_text(json.dumps(raw | {"skipped": skipped}))
        assert said in fails(capsys, *score)
    assert "skip-layers.json: names layers of the target; it has no weights to export" in fails(
        capsys, "export", str(recipe_file), str(tmp_path / "out"), "--draft", str(searched)
    )
    assert not (tmp_path / "out").exists()


def test_nothing_is_lost_in_the_file(recipe: Recipe, tmp_path: Path) -> None:
    target = Workspace(recipe).target
    skipped = SkippedLayers(attention=(3, 0), mlp=(1,))
    write_skipped(tmp_path / "a.json", SkipFile(target_fingerprint=target.fingerprint, skipped=skipped))
    draft = StoredDraft.load(tmp_path / "a.json", target)
    assert isinstance(draft.module, SkippedDraft) and draft.module.config == skipped
    with pytest.raises((FormatError, InputError), match=r"must be a draft|is a file"):
        (tmp_path / "a.json").rename(tmp_path / "a.txt")
        StoredDraft.load(tmp_path / "a.txt", target)
