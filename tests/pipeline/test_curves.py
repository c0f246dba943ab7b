"""Curves in MLflow after trainings that were killed at random moments, and after a server that was killed and started
again: every step once, as `metrics.jsonl` has it."""

import json
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from forked import as_command, command_line, run
from mlflow.tracking import MlflowClient
from mlflow_server import mlflow_server

from draftforge.cli import main
from draftforge.distributed import free_port
from draftforge.pipeline.workspace import Workspace
from draftforge.recipe import load_recipe
from draftforge.registry import tracking as module
from draftforge.train import checkpoints
from draftforge.train.throughput import MetricLog

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 12
SMALL = {
    "family": "small",
    "layers": 2,
    "steps": STEPS,
    "warmup_steps": 1,
    "tokens_per_step": 256,
    "score_every": 6,
    "save_every": 2,
}
SCORE = {"draft_tokens": [2], "decode_conversations": 2, "costs": {"prompts": 2, "rounds": 6, "warmup_rounds": 0}}


def check_curves(recipe: Path) -> None:
    """Every figure of every step is in MLflow, once, and the loss is the one on disk."""
    tracking = Workspace(load_recipe(recipe)).tracking
    (last,) = tracking.client.search_runs([tracking.experiment_id])  # all attempts are one run
    assert last.info.status == "FINISHED"
    (log,) = (recipe.parent / "work").glob("train-small-*/metrics.jsonl")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, STEPS + 1)]
    for key in lines[0].keys() - {"step", "time"}:
        history = tracking.client.get_metric_history(last.info.run_id, f"train/small/{key}")
        assert Counter(point.step for point in history) == Counter(range(1, STEPS + 1)), key
    losses = tracking.client.get_metric_history(last.info.run_id, "train/small/loss")
    assert {point.step: point.value for point in losses} == {line["step"]: line["loss"] for line in lines}


def killed_after(events: int, *arguments: str) -> None:
    """`draftforge ARGUMENTS`, killed by SIGKILL before or after one of: a line of figures is written, metrics are sent,
    a checkpoint is saved. Metrics are sent every fifth step, so that checkpoints are ahead of what was sent."""
    left, logged = count(events, -1), count(1)

    def mortal(place: Any, name: str) -> None:
        whole = getattr(place, name)

        def call(*given: Any, **named: Any) -> Any:
            if "tags" in named or "params" in named:  # of the run, before the training
                return whole(*given, **named)
            die()
            result = whole(*given, **named)
            die()
            return result

        setattr(place, name, call)

    def die() -> None:
        if next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def every_fifth(self: module.TrackedRun) -> None:
        if next(logged) % 5 == 0:
            self._try_send()

    module.TrackedRun.send_when_due = every_fifth  # type: ignore[method-assign]
    mortal(MetricLog, "log")
    mortal(MlflowClient, "log_batch")
    mortal(checkpoints, "save")
    command_line(*arguments)


def test_sigkill_at_random_moments(write_recipe: Callable[..., Path], tmp_path: Path) -> None:
    recipe = write_recipe(drafts={"small": SMALL}, score=SCORE)
    moments, kills = random.Random(19), 0
    while True:
        events = moments.randint(3, 18)
        ended = run(as_command, [__file__, "killed_after", events, "distill", str(recipe)], tmp_path / "killed.log")
        if ended.code != -signal.SIGKILL:
            break
        kills += 1
    assert ended.code == 0 and kills >= 3, (kills, ended.said[-2000:])
    check_curves(recipe)


def test_a_server_that_dies_during_the_training(
    write_recipe: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Training and scoring go on; the promotion cannot, and the next command sends what is missing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(module, "_SEND_SECONDS", 0.0)
    server, port, whole = ExitStack(), free_port(), MetricLog.log
    store, place = f"sqlite:///{tmp_path / 'server.db'}", tmp_path / "server"
    place.mkdir()

    def log(self: MetricLog, step: int, values: dict[str, float]) -> None:
        whole(self, step, values)
        if step == 3:
            server.close()

    with server:
        url = server.enter_context(mlflow_server(store, place, port))
        registry = {"tracking_uri": url, "connect_seconds": 60}
        recipe = write_recipe(drafts={"small": SMALL}, score=SCORE, registry=registry)
        with monkeypatch.context() as patch:
            patch.setattr(MetricLog, "log", log)
            with pytest.raises(SystemExit) as ended:
                main(["distill", str(recipe)])
        said = capfd.readouterr().err.splitlines()
        assert ended.value.code == 3 and said[-1].startswith(f"error: {url}: ")
        (gone,) = [line for line in said if "MLflow does not answer" in line]
        assert gone.startswith(f"{url}: MLflow does not answer (connection refused); the work goes on")
        assert said[-2].endswith(
            f" values of metrics were not sent to MLflow; `draftforge distill {recipe}` sends them and goes on"
        )
        assert any(line.startswith(f"step {STEPS}/{STEPS}") for line in said)  # trained to the end, and scored
        assert [*(tmp_path / "work").glob("score-*/scores.json")]

        server.enter_context(mlflow_server(store, place, port))
        with pytest.raises(SystemExit) as ended:
            main(["distill", str(recipe)])
        said = capfd.readouterr().err.splitlines()
        assert ended.value.code == 0 and any(line.startswith("train small: done") for line in said)
        (hint,) = [line for line in said if line.startswith("distilled in ")]
        assert f"to look at it: {url}/#/experiments/" in hint
        check_curves(recipe)
