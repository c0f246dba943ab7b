"""The operator's command: what it is told, when it runs, and what its failure does and does not do."""

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import loads
import pytest

from draftforge.cli import main
from draftforge.errors import HookError, InputError
from draftforge.eval.cost_table import CostKey, CostTable
from draftforge.pipeline import draft_scorer, promotion
from draftforge.pipeline.promotion import HOOK_TAG, REFUSED, check_command, follow_champion, run_command
from draftforge.pipeline.workspace import Workspace
from draftforge.recipe import PromotionSettings, load_recipe
from draftforge.registry import champion_alias
from draftforge.registry.champion_alias import HISTORY_TAG, MOVE_TAG, promote
from draftforge.registry.gate import Decision
from draftforge.registry.lineage import Lineage, Version
from draftforge.registry.tracking import start_run
from draftforge.registry.versions import CANDIDATE, CHAMPION, PREVIOUS, aliases, register_version, targets
from draftforge.storage import read_object

WriteRecipe = Callable[..., Path]
TOLD = ("EVENT", "VERSION", "URI", "TARGET", "DECISION", "DRAFT")
SCRIPT = """\
import json, os, pathlib, sys
names = sys.argv[2].split(",")
told = {name: os.environ["DRAFTFORGE_" + name] for name in names} | {"argv": sys.argv[3:]}
told["uri"] = os.environ["MLFLOW_TRACKING_URI"]
told["config"] = (pathlib.Path(told["DRAFT"]) / "config.json").read_text()
with open(sys.argv[1], "a") as log:
    log.write(json.dumps(told) + "\\n")
"""
Open = Callable[[list[str]], Workspace]


@pytest.fixture
def opened(write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch) -> Open:
    """The workspace of a recipe with this command."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    def open_with(command: list[str]) -> Workspace:
        return Workspace(load_recipe(write_recipe(promotion={"command": command, "timeout_seconds": 30})))

    return open_with


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log.jsonl"


def noting(tmp_path: Path, log: Path) -> list[str]:
    """A command that writes down what it is told."""
    script = tmp_path / "deploy.py"
    script.write_text(SCRIPT)
    return [sys.executable, str(script), str(log), ",".join(TOLD), "a b; $(touch x)"]


def lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def crowned(space: Workspace, folder: Path, word: str) -> Version:
    """A draft that has just become champion."""
    draft = folder / word
    draft.mkdir(exist_ok=True)
    (draft / "config.json").write_text(word)
    digest = "1" * 64
    lineage = Lineage(
        target_fingerprint=space.target_fingerprint,
        target_name="tiny",
        tokenizer_digest=digest,
        mix_fingerprint=digest,
        capture_fingerprint=digest,
        counts_digest=digest,
        recipe_fingerprint=digest,
        family="small",
        step=1,
    )
    with start_run(space.tracking, word) as run:
        version = register_version(space.tracking, run.id, draft, lineage, ["c"])
    now = aliases(space.tracking, version.name).get(CHAMPION)
    compared = f"{version.name}/{now}" if now else None
    promote(space.tracking, Decision(promote=True, reasons=["better"], compared=compared), version)
    return version


def tag(space: Workspace, version: Version) -> str:
    return str(space.tracking.client.get_model_version(version.name, str(version.number)).tags.get(HOOK_TAG, ""))


def test_a_promotion_that_was_killed_behind_the_alias_is_finished_by_the_next_verb(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`promote` finds its draft to be the champion, and `retrain` a fresh one: neither has anything to move."""
    space = opened([])
    follow_champion(space)  # no draft is registered yet

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(champion_alias, "_finish", killed)
        crowned(space, tmp_path, "one")
    name = targets(space.tracking)[0].name
    assert aliases(space.tracking, name) == {CHAMPION: 1, CANDIDATE: 1}
    follow_champion(space)
    assert aliases(space.tracking, name) == {CHAMPION: 1}
    model = space.tracking.client.get_registered_model(name)
    assert MOVE_TAG not in model.tags and json.loads(model.tags[HISTORY_TAG])[-1]["to"] == 1


def test_the_command_is_told_what_happened(opened: Open, tmp_path: Path, log: Path) -> None:
    space = opened(noting(tmp_path, log))
    one = crowned(space, tmp_path, "one")
    follow_champion(space)
    (told,) = lines(log)
    assert (told["EVENT"], told["VERSION"], told["URI"]) == ("promote", one.reference, one.uri)
    assert told["TARGET"] == space.target_fingerprint and told["config"] == "one" and told["uri"] == space.tracking.uri
    assert told["argv"] == ["a b; $(touch x)"]  # one argument: no shell has seen it
    record = read_object(Path(told["DECISION"]))
    assert record["decision"]["reasons"] == ["better"] and record["move"]["to"] == 1 and record["event"] == "promote"
    assert tag(space, one).endswith(": done")

    follow_champion(space)
    assert len(lines(log)) == 1

    two = crowned(space, tmp_path, "two")
    follow_champion(space)
    back = champion_alias.rollback(space.tracking, space.target_fingerprint)
    follow_champion(space)
    follow_champion(space)
    assert [(one["EVENT"], one["VERSION"]) for one in lines(log)[1:]] == [
        ("promote", two.reference),
        ("rollback", one.reference),
    ]
    assert tag(space, back).startswith("rollback") and "done" in tag(space, back)


def test_a_failure_undoes_nothing_and_is_caught_up(
    opened: Open, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEPLOY_TOKEN", "very-secret-word")
    words = "print(os.environ['DEPLOY_TOKEN']); print('no //user:secret@host today')"
    failing = [sys.executable, "-c", f"import os; {words}; raise SystemExit(3)"]
    space = opened(failing)
    one = crowned(space, tmp_path, "one")
    with pytest.raises(HookError, match=rf"exit code 3: no //\*\*\*@host today \({one.reference} stays champion\)"):
        follow_champion(space)
    assert aliases(space.tracking, one.name)[CHAMPION] == 1 and "exit code 3" in tag(space, one)
    (kept,) = space.tracking.client.list_artifacts(one.run_id, "hooks")
    path = space.tracking.client.download_artifacts(one.run_id, kept.path, str(tmp_path))
    assert "secret" not in Path(path).read_text() and "today" in Path(path).read_text()

    mended = space.with_recipe(
        space.recipe.model_copy(update={"promotion": PromotionSettings(command=noting(tmp_path, log))})
    )
    follow_champion(mended)
    assert len(lines(log)) == 1 and tag(space, one).endswith(": done")


def test_without_a_command_nothing_runs(opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    space = opened([])
    monkeypatch.setattr(promotion, "run_command", lambda *args: pytest.fail("ran"))
    follow_champion(space)


@pytest.mark.parametrize(
    ("command", "problem", "output"),
    [
        (["-c", "print('hello')"], "", "hello\n"),
        (["-c", "import os; os.write(2, b'\\xff!'); os.kill(os.getpid(), 9)"], "killed by SIGKILL", "\ufffd!"),
        (["-c", "raise SystemExit(7)"], "exit code 7", ""),
    ],
)
def test_ends_of_commands(command: list[str], problem: str, output: str) -> None:
    settings = PromotionSettings(command=[sys.executable, *command])
    assert run_command(settings, {}) == (output, problem)


def test_a_program_that_is_not_there() -> None:
    ended = run_command(PromotionSettings(command=["./no-such-program"]), {})
    assert ended.problem.startswith("cannot be started") and "no-such-program" in ended.problem


@pytest.mark.slow
def test_what_takes_too_long_is_killed_with_all_that_it_started() -> None:
    settings = PromotionSettings(command=["sh", "-c", "sleep 600 & echo $!; sleep 600"], timeout_seconds=1)
    ended = run_command(settings, {})
    assert ended.problem == "not done after 1 s (promotion.timeout_seconds)"
    started = Path(f"/proc/{int(ended.output)}/stat")
    for _ in range(500):
        if not started.exists() or " Z " in started.read_text():  # gone, or waiting to be reaped
            return
        time.sleep(0.02)
    pytest.fail("what the command started still runs")


@pytest.mark.slow
def test_the_rollback_verb_exits_with_the_hooks_code(
    opened: Open, tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space = opened([sys.executable, "-c", "raise SystemExit(1)"])
    for word in ("one", "two"):
        version = crowned(space, tmp_path, word)
    with pytest.raises(SystemExit) as ended:
        main(["rollback", str(tmp_path / "tiny.yaml")])
    assert ended.value.code == 6 and aliases(space.tracking, version.name) == {CHAMPION: 1}
    said = capsys.readouterr().err
    assert "champion again" in said and "exit code 1: it said nothing" in said
    with pytest.raises(SystemExit) as ended:
        main(["rollback", str(tmp_path / "tiny.yaml"), "--undo", "--why", "it was the network"])
    assert ended.value.code == 6 and aliases(space.tracking, version.name) == {CHAMPION: 2, PREVIOUS: 1}
    moves = champion_alias.history(space.tracking, version.name)
    assert [(move["event"], move["why"]) for move in moves[-2:]] == [
        ("rollback", "asked for on the command line"),
        ("undo", "it was the network"),
    ]


def test_a_program_that_is_not_there_is_found_out_beforehand(tmp_path: Path) -> None:
    check_command(PromotionSettings())
    check_command(PromotionSettings(command=[sys.executable, "-c", "pass"]))
    (tmp_path / "not-executable").write_text("#!/bin/sh")
    for name in ("./nowhere", str(tmp_path / "not-executable")):
        with pytest.raises(InputError, match=rf"promotion\.command {re.escape(name)}: no such program"):
            check_command(PromotionSettings(command=[name]))


def dear(key: CostKey, *args: object) -> CostTable:
    """Times of rounds that take twice as long as a plain one."""
    return loads.batch_one_table(key, 0.01, dict.fromkeys(key.plans, (0.01, 0.01, 0.0)))


@pytest.mark.slow
@pytest.mark.usefixtures("stage_cache")
def test_a_draft_that_is_not_worth_serving_stays_a_candidate(
    write_recipe: WriteRecipe,
    tmp_path: Path,
    log: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A draft whose rounds cost twice a plain one: refused with both figures, until a choice lets it through."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(draft_scorer, "measure_costs", dear)
    command = {"command": noting(tmp_path, log)}
    path = write_recipe(gate={"min_clusters": 2}, promotion=command)
    drafts = {"small": load_recipe(path).resolved()["drafts"]["small"]}
    path = write_recipe(gate={"min_clusters": 2}, promotion=command, drafts=drafts)

    def run(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main([*arguments])
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out + printed.err

    code, said = run("distill", str(path))
    space = Workspace(load_recipe(path))
    (model,) = (entry.name for entry in targets(space.tracking))
    assert code == REFUSED and aliases(space.tracking, model) == {CANDIDATE: 1}
    assert f"{model}/1: not promoted\n  not shown to beat plain decoding: expected speed-up 0." in said
    assert "not shown to beat prompt lookup: 0." in said and "prompt lookup at K = " in said
    assert "by choice: `draftforge promote RECIPE gate.min_speedup=0`" in said
    for words in (["export", str(path), str(tmp_path / "out")], ["generate", str(path), "hello"]):
        refused, why = run(*words)
        assert refused == 2 and "no champion: the gate refused version 1 (candidate); `--draft small` takes" in why
    place = ["--target", model[-12:], "--workdir", str(tmp_path / "work")]
    code_of_fetch, fetched = run("fetch", str(tmp_path / "got"), *place, "--alias", "candidate")
    assert code_of_fetch == 0 and "the gate: refused: not shown to beat plain decoding" in fetched
    assert not lines(log)
    (page,) = (tmp_path / "work").glob("score-*/report.html")
    assert 'class="decision unproven"' in page.read_text()

    code, said = run("promote", str(path), "gate.min_speedup=0")
    choice = "gate.min_speedup = 0: is not shown to beat plain decoding and prompt lookup"
    assert code == 0 and f"{model}/1: promoted to champion\n  {choice}" in said
    assert aliases(space.tracking, model) == {CHAMPION: 1} and len(lines(log)) == 1
    assert 'class="decision by-choice"' in page.read_text()
    (entry,) = json.loads(run("registry", str(path), "--json")[1])["targets"]
    assert entry["versions"][0]["by_choice"] == choice

    # The setting is raised again: the champion, which no retraining has replaced, does not meet it.
    with monkeypatch.context() as patch:
        patch.setattr(draft_scorer.Scorer, "counts", None)  # its figures are known
        code, said = run("promote", str(path))
    unmet = "is the champion already and does not meet today's gate"
    assert code == REFUSED and f"{model}/1: {unmet}\n  not shown to beat plain decoding: expected speed-up 0." in said
    assert "`draftforge retrain` trains a draft from it, which must meet the gate\n" in said
    assert aliases(space.tracking, model) == {CHAMPION: 1} and len(lines(log)) == 1
    assert f"{model}/1 stays the champion: it does not meet today&#39;s gate" in page.read_text()
    (entry,) = json.loads(run("registry", str(path), "--json")[1])["targets"]
    assert entry["versions"][0]["decision"] == "refuse" and len(entry["versions"]) == 1
    said = run("retrain", str(path), "--dry-run")[1]
    assert f"{model}/1 does not meet today's gate: not shown to beat plain" in said and f"warm, from {model}/1" in said
    code, said = run("promote", str(path), "gate.min_speedup=0")
    assert code == 0 and f"{model}/1: is the champion already\n  {choice}" in said
    assert 'class="decision by-choice"' in page.read_text()

    # A run that was killed after the promotion and before its record: it is measured again.
    (page.parent / promotion.PROMOTION_FILE).unlink()
    assert run("promote", str(path), "gate.min_speedup=0")[0] == 0
    assert [row["draft"] for row in read_object(page.parent / promotion.PROMOTION_FILE)["holdout"]["rows"]]
