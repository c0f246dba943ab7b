"""`draftforge bench`: a recipe's drafts, folders and training-free methods on prompts of one's own."""

import html
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import heads
import pytest
from distilled import cached_stages
from drafted import add_idle_layer

from draftforge import cli
from draftforge.errors import DraftforgeError, InputError, LockedError, MissingFileError, OwnershipError
from draftforge.eval.bench import run
from draftforge.eval.bench.run import EVERY, Report
from draftforge.pipeline import distill as flow
from draftforge.pipeline.bench import find_methods, run_bench
from draftforge.pipeline.cli_options import BenchOptions
from draftforge.pipeline.workspace import Workspace
from draftforge.recipe import Recipe, load_recipe
from draftforge.specdec.drafts.eagle import EagleConfig, EagleDraft
from draftforge.specdec.formats import write_draft
from draftforge.specdec.proposers.tree_settings import StaticTree
from draftforge.specdec.serving_plan import ServingPlan, write_plan
from draftforge.storage import lock

TREES = {"wide": {"kind": "static", "widths": [2, 1]}, "best": {"kind": "measured", "nodes": 4, "levels": 2}}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Ten prompts of two domains."""
    lines = [{"domain": domain, "turns": [f"{domain} question {i}?"]} for domain in ("math", "code") for i in range(5)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, recipe_in: Callable[..., Path], finished_stages: Path) -> Recipe:
    """A recipe of which one draft is trained."""
    path = recipe_in(tmp_path_factory.mktemp("bench"), score={"draft_tokens": [1, 2], "trees": TREES})
    recipe = load_recipe(path)
    with cached_stages(finished_stages):
        flow.train(recipe, "small")
    return recipe


@pytest.fixture
def recipe(write_recipe: Callable[..., Path]) -> Recipe:
    return load_recipe(write_recipe())


@pytest.fixture
def asked(prompts: Path) -> Callable[..., BenchOptions]:
    """Settings of a benchmark of seconds; what is named replaces them."""

    def make(**options: Any) -> BenchOptions:
        small = {"draft_tokens": [2], "batch_sizes": [1], "max_new_tokens": 6, "max_prompts": 4, "repeats": 1}
        return BenchOptions(**{"prompts": [prompts], "drafts": ["lookup"], **small, **options})

    return make


def head_of(target: Any, folder: Path, **sizes: int) -> str:
    """A random EAGLE head, of the target's size but for `sizes`."""
    shape = {**heads.LAYER, "hidden_size": target.hidden_size, "vocab_size": target.vocab_size, **sizes}
    folder.mkdir()
    write_draft(EagleDraft(EagleConfig(**shape), False), folder, "vllm")
    return str(folder)


def ran(report: Report) -> list[str]:
    return list(dict.fromkeys(row.setting.label for row in report.rows))


@pytest.mark.slow
def test_all_that_a_recipe_has(
    trained: Recipe, asked: Callable[..., BenchOptions], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Defaults: its drafts with chains and trees, and lookup; an untrained one is a line with a reason."""
    settings = asked(drafts=(), batch_sizes=[1, 3], draft_tokens=[2, 4], repeats=2)
    report = run_bench(Workspace(trained), settings)
    small = [f"small {way}" for way in ("K=2", "K=4", "tree wide", "tree best")]
    assert ran(report) == ["plain", *small, "lookup K=2", "lookup K=4"]
    assert [(one.method, one.batch_size) for one in report.failures] == [("eagle3", None)]
    assert "no checkpoint yet" in report.failures[0].reason
    assert {row.domain for row in report.rows} == {EVERY, "code", "math"}
    assert len(report.rows) == 7 * 2 * 3
    assert all(row.equal_answers == 1.0 for row in report.rows)
    assert all(row.speedup.low <= row.speedup.value <= row.speedup.high for row in report.rows)
    about = report.surroundings
    assert (about.dtype, about.repeats, about.prompts) == ("float32", 2, {"code": 2, "math": 2})
    assert about.drafts["small"].endswith("00004") and about.drafts["lookup"] == ""
    folder = next(trained.workdir.glob("bench-*"))
    assert Report.model_validate_json((folder / "bench.json").read_text()).words == report.words
    page = (folder / "bench.html").read_text()
    assert page.startswith("<!doctype html>") and "has no checkpoint yet" in page and "default-src 'none'" in page
    assert all(html.escape(sentence) in page for sentence in report.words)
    shown = capsys.readouterr().out
    assert "not run: --draft eagle3: has no checkpoint yet" in shown
    assert "small tree best: " in shown and (folder / "bench.txt").read_text().strip() in shown


@pytest.mark.slow
def test_small_drafts_are_also_measured_helped(trained: Recipe, asked: Callable[..., BenchOptions]) -> None:
    space = Workspace(trained)
    head = head_of(space.target, trained.workdir / "head")
    report = run_bench(space, asked(drafts=["small", head], cascade="lookup", trees=["wide"]))
    ways = ["plain", "small K=2", "small tree wide", "small helped by lookup K=2", "head K=2", "head tree wide"]
    assert ran(report) == ways and not report.failures
    rounds = {row.setting.label: row.rounds for row in report.rows if row.domain == EVERY}
    assert rounds["small helped by lookup K=2"] == rounds["small K=2"]  # it drafts the same, in fewer passes
    assert all(row.equal_answers == 1.0 for row in report.rows)
    with pytest.raises(InputError, match=r"--cascade nobody: must be"):
        run_bench(space, asked(cascade="nobody"))


def test_a_plan_says_what_is_measured_unless_k_or_a_tree_is_asked_for(
    write_recipe: Callable[..., Path], asked: Callable[..., BenchOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = load_recipe(write_recipe(score={"draft_tokens": [1, 2], "trees": {"wide": TREES["wide"]}}))
    space = Workspace(recipe)
    drafts = [head_of(space.target, recipe.workdir / name) for name in ("planned", "bare")]
    tree = StaticTree(kind="static", widths=[2, 1])
    write_plan(Path(drafts[0]), ServingPlan(draft_tokens=2, tree_name="own", tree=tree, chain_tokens=3))

    def labels(**options: Any) -> list[str]:
        found = find_methods(space, asked(drafts=[*drafts, "lookup"], **options), 20)
        return [entry.setting.label for method in found.methods[1:] for entry in method.entries]

    ways = [*(f"bare {way}" for way in ("K=2", "K=4", "K=8", "tree wide")), *(f"lookup K={K}" for K in (2, 4, 8))]
    assert labels(draft_tokens=None) == ["planned tree own", *ways]
    assert "planned: tree own, as its plan says" in capsys.readouterr().err
    both = labels(draft_tokens=[3], trees=["wide"])
    assert both == [*(f"{name} {way}" for name in ("planned", "bare") for way in ("K=3", "tree wide")), "lookup K=3"]
    assert "planned: K as asked (--draft-tokens), not the tree own of its plan alone" in capsys.readouterr().err


@pytest.mark.slow
def test_a_helper_counts_by_its_files(
    recipe: Recipe,
    asked: Callable[..., BenchOptions],
    make_tiny_target: Callable[[int], Path],
    tiny_target_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wherever it is named from; with other weights it is another benchmark."""
    monkeypatch.chdir(tmp_path)
    add_idle_layer(tiny_target_folder, Path("draft"))
    shutil.copytree(tiny_target_folder, "helper")
    for helper in ("helper", "./helper", str(tmp_path / "helper")):
        report = run_bench(Workspace(recipe), asked(drafts=["draft"], cascade=helper, out=tmp_path / "out"))
        assert ran(report) == ["plain", "draft K=2", "draft helped by helper K=2"]
    shutil.copytree(make_tiny_target(1), "helper", dirs_exist_ok=True)
    with pytest.raises(OwnershipError, match="a benchmark of other arguments, drafts"):
        run_bench(Workspace(recipe), asked(drafts=["draft"], cascade="helper", out=tmp_path / "out"))


@pytest.mark.slow
def test_a_helper_that_helps_none_is_refused(
    recipe: Recipe, asked: Callable[..., BenchOptions], tiny_target_folder: Path, tmp_path: Path
) -> None:
    add_idle_layer(tiny_target_folder, tmp_path / "longer")
    longer, small = str(tmp_path / "longer"), str(tiny_target_folder)
    with pytest.raises(InputError, match=r"^--cascade lookup: no small draft here that it could help$"):
        run_bench(Workspace(recipe), asked(cascade="lookup", out=tmp_path / "out"))
    with pytest.raises(InputError, match=f"--cascade {longer}: .*to draft for longer it must have fewer than its"):
        run_bench(Workspace(recipe), asked(drafts=[longer], cascade=longer, out=tmp_path / "out"))
    report = run_bench(Workspace(recipe), asked(drafts=[longer, small], cascade=small, out=tmp_path / "out"))
    name = tiny_target_folder.name
    assert ran(report) == ["plain", "longer K=2", f"longer helped by {name} K=2", f"{name} K=2"]
    assert [one.method for one in report.failures] == [f"{name} helped by {name}"]


def test_one_folder_by_several_paths_runs_once(
    recipe: Recipe, asked: Callable[..., BenchOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    head_of(Workspace(recipe).target, tmp_path / "head")
    report = run_bench(
        Workspace(recipe), asked(drafts=["head", "head/", "./head", str(Path("head").resolve())], out=Path("o"))
    )
    assert ran(report) == ["plain", "head K=2"]


def test_one_that_does_not_fit_is_a_line_and_the_others_run(
    recipe: Recipe, asked: Callable[..., BenchOptions], tmp_path: Path
) -> None:
    space = Workspace(recipe)
    good = head_of(space.target, tmp_path / "good")
    other = head_of(space.target, tmp_path / "other", hidden_size=64)
    short = head_of(space.target, tmp_path / "short", max_position_embeddings=16)
    report = run_bench(space, asked(drafts=["lookup", good, other, short], out=tmp_path / "out"))
    assert ran(report) == ["plain", "lookup K=2", "good K=2"]
    reasons = {one.method: one.reason for one in report.failures}
    assert "hidden_size 64: must be 128" in reasons["other"]
    assert "max_position_embeddings 16" in reasons["short"]


def test_a_rule_that_does_not_take_a_method(recipe: Recipe, asked: Callable[..., BenchOptions], tmp_path: Path) -> None:
    space = Workspace(recipe)
    good = head_of(space.target, tmp_path / "good")
    report = run_bench(space, asked(drafts=["lookup", good], temperature=0.7, rule="token", out=tmp_path / "out"))
    assert ran(report) == ["plain", "good K=2"]
    assert [(one.method, one.plan) for one in report.failures] == [("lookup", "2")]
    assert {row.setting.rule for row in report.rows if not row.setting.plain} == {"token"}
    assert all(row.equal_answers != row.equal_answers for row in report.rows)  # not known: answers are drawn
    with pytest.raises(InputError, match="no method can run: lookup: rule: 'token'"):
        run_bench(space, asked(temperature=0.7, rule="token", out=tmp_path / "none"))
    run_bench(space, asked(temperature=0.7, out=tmp_path / "none"))  # nothing was begun there


def test_the_folder_where_one_is(
    recipe: Recipe, asked: Callable[..., BenchOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run_bench(Workspace(recipe), asked(out=Path()))
    assert Path("bench.json").is_file()


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Methods that were really run, in order."""
    made: list[str] = []
    real = run.run_once

    def listening(*given: Any) -> Any:
        made.append(given[1].setting.label)
        return real(*given)

    monkeypatch.setattr(run, "run_once", listening)
    yield made


@pytest.mark.slow
def test_the_same_arguments_go_on_where_they_stopped(
    recipe: Recipe, asked: Callable[..., BenchOptions], tmp_path: Path, runs: list[str]
) -> None:
    space, out = Workspace(recipe), tmp_path / "out"
    first = run_bench(space, asked(out=out))
    assert runs == ["plain", "lookup K=2"]
    assert run_bench(space, asked(out=out)).rows == first.rows and len(runs) == 2
    next((out / "runs").iterdir()).unlink()
    run_bench(space, asked(out=out))
    assert len(runs) == 3
    for changed in ({"max_new_tokens": 7}, {"seed": 1}, {"draft_tokens": [3]}, {"max_prompts": 3}, {"repeats": 2}):
        with pytest.raises(OwnershipError, match="other arguments"):
            run_bench(space, asked(**changed, out=out))
    assert len(runs) == 3
    run_bench(space, asked(out=out, fresh=True))
    assert len(runs) == 5
    run_bench(space, asked(draft_tokens=[3], out=out, fresh=True))
    assert runs[5:] == ["plain", "lookup K=3"]


def test_another_draft_of_the_same_name_is_another_benchmark(
    recipe: Recipe, asked: Callable[..., BenchOptions], tmp_path: Path
) -> None:
    space, out = Workspace(recipe), tmp_path / "out"
    head = head_of(space.target, tmp_path / "head")
    run_bench(space, asked(drafts=[head], out=out))
    weights = Path(head) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\0")
    with pytest.raises(OwnershipError, match="drafts"):
        run_bench(space, asked(drafts=[head], out=out))


def test_folders_that_are_not_for_it(recipe: Recipe, asked: Callable[..., BenchOptions], tmp_path: Path) -> None:
    space = Workspace(recipe)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(OwnershipError, match="holds no benchmark"):
        run_bench(space, asked(out=tmp_path / "full", fresh=True))
    with pytest.raises(OwnershipError, match="is a file"):
        run_bench(space, asked(out=tmp_path / "full" / "thesis.tex"))
    with lock(tmp_path / ".busy.lock"), pytest.raises(LockedError):
        run_bench(space, asked(out=tmp_path / "busy"))


def test_names(recipe: Recipe, asked: Callable[..., BenchOptions], tmp_path: Path) -> None:
    """Two folders of one name, and one that is called like a baseline, keep apart."""
    space = Workspace(recipe)
    for parent in ("a", "b"):
        (tmp_path / parent).mkdir()
    one, two = (head_of(space.target, tmp_path / parent / "head") for parent in ("a", "b"))
    taken = head_of(space.target, tmp_path / "lookup")
    report = run_bench(space, asked(drafts=[one, two, taken, "lookup"], out=tmp_path / "out"))
    assert ran(report) == ["plain", f"{one} K=2", f"{two} K=2", "lookup (given) K=2", "lookup K=2"]


@pytest.mark.slow
def test_the_champion_where_there_is_none(recipe: Recipe, asked: Callable[..., BenchOptions], tmp_path: Path) -> None:
    report = run_bench(Workspace(recipe), asked(drafts=["champion", "lookup"], out=tmp_path / "out"))
    assert ran(report) == ["plain", "lookup K=2"]
    assert [one.method for one in report.failures] == ["champion"] and "no champion" in report.failures[0].reason


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"drafts": ["nothing"]},
            InputError,
            "--draft nothing: must be a draft folder or one of small, eagle3, lookup",
        ),
        ({"drafts": ["none"]}, InputError, "--draft none: plain decoding is always measured"),
        ({"trees": ["oak"]}, InputError, "--tree oak: must be in score.trees, which is empty"),
        ({"max_new_tokens": 500}, InputError, "--prompts: all 4 are too long: with 500 new tokens"),
        ({"prompts": [Path("nowhere.jsonl")]}, MissingFileError, "nowhere.jsonl"),
        ({"prompts": []}, InputError, "--prompts: give at least one file"),
        ({"draft_tokens": [2, 65]}, InputError, "--draft-tokens 65: every one must be >= 1 and <= 64"),
        ({"draft_tokens": []}, InputError, "--draft-tokens"),
        ({"batch_sizes": [0]}, InputError, "--batch-size 0"),
        ({"batch_sizes": [65537]}, InputError, "--batch-size 65537: every one must be >= 1 and <= 65536"),
        ({"max_new_tokens": 1}, InputError, "--max-new-tokens 1: must be >= 2"),
        ({"repeats": 0}, InputError, "--repeats 0"),
        ({"max_prompts": 0}, InputError, "--max-prompts 0"),
        ({"rule": "nice"}, InputError, "'nice': must be one of greedy"),
    ],
)
def test_bad_arguments(
    recipe: Recipe,
    asked: Callable[..., BenchOptions],
    options: dict[str, Any],
    error: type[DraftforgeError],
    message: str,
    tmp_path: Path,
) -> None:
    with pytest.raises(error) as raised:
        run_bench(Workspace(recipe), asked(**options, out=tmp_path / "out"))
    assert message in str(raised.value) and "\n" not in str(raised.value)
    assert not (tmp_path / "out" / "runs").exists()


def test_prompts_that_are_too_long_are_left_out(
    recipe: Recipe, asked: Callable[..., BenchOptions], prompts: Path, tmp_path: Path
) -> None:
    with prompts.open("a") as stream:
        stream.write("\n" + json.dumps({"domain": "math", "turns": ["very " * 400]}))
    report = run_bench(Workspace(recipe), asked(max_prompts=None, out=tmp_path / "out"))
    assert report.surroundings.prompts_left_out == 1
    assert report.surroundings.prompts == {"code": 5, "math": 5}


def test_on_the_command_line(
    write_recipe: Callable[..., Path], prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (
        f"bench {write_recipe()} --prompts {prompts} --draft lookup -k 2 -b 1,2 -n 6 --repeats 1 --out {tmp_path / 'o'}"
    )
    with pytest.raises(SystemExit) as ended:
        cli.main(given.split())
    assert not ended.value.code
    shown = capsys.readouterr()
    assert "Speed\nbatch" in shown.out and "lookup K=2: " in shown.out and "bench.json" in shown.err
    prompts.write_text('{"domain": "d"}\n')
    with pytest.raises(SystemExit) as ended:
        cli.main(given.split())
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("prompts.jsonl:1: turns is missing; must be a list of at least one\n")
