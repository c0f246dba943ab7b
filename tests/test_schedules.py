"""The shipped schedules: each is what its own tool takes, and calls a command that exists."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml
from apscheduler.triggers.cron import CronTrigger

from draftforge import cli

SCHEDULES = Path(__file__).resolve().parent.parent / "scripts" / "schedules"
SERVICE, TIMER = "draftforge-retrain.service", "draftforge-retrain.timer"


def load(name: str) -> Any:
    return yaml.safe_load((SCHEDULES / name).read_text())


def unit(name: str) -> dict[str, list[str]]:
    """`Section.Key` -> values."""
    found: dict[str, list[str]] = {}
    section = ""
    for line in (SCHEDULES / name).read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            key, equals, value = line.partition("=")
            assert equals, line
            found.setdefault(f"{section}.{key}", []).append(value)
    return found


def cron_line() -> tuple[str, str]:
    """Times and command of the one line that is a job."""
    lines = [line for line in (SCHEDULES / "crontab").read_text().splitlines() if re.match(r"[\d*]", line)]
    assert len(lines) == 1
    *times, command = lines[0].split(maxsplit=5)
    return " ".join(times), command


def commands() -> Iterator[tuple[str, list[str]]]:
    """The words after `draftforge` of every schedule's command."""
    yield SERVICE, shlex.split(unit(SERVICE)["Service.ExecStart"][0])[1:]
    yield "crontab", shlex.split(cron_line()[1].partition("&&")[2].partition(">>")[0])[1:]
    (container,) = load("cronjob.yaml")["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    yield "cronjob.yaml", container["command"][1:]
    script = load("github-workflow.yaml")["jobs"]["retrain"]["steps"][-1]["run"]
    (line,) = [line for line in script.splitlines() if "draftforge retrain" in line]
    yield "github-workflow.yaml", shlex.split(line.partition("||")[0])[1:]


@pytest.mark.parametrize(("name", "words"), commands(), ids=[name for name, _ in commands()])
def test_the_command_exists(name: str, words: list[str]) -> None:
    verb = typer.main.get_command(cli.app).commands[words[0]]  # type: ignore[attr-defined]
    options = [word for word in words[1:] if not word.startswith("$")]
    context = verb.make_context(words[0], list(options))
    assert words[0] == "retrain" and context.params["recipe"].suffix == ".yaml"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    service = (SCHEDULES / SERVICE).read_text()
    program = unit(SERVICE)["Service.ExecStart"][0].split()[0]
    (tmp_path / SERVICE).write_text(service.replace(program, sys.executable))  # it must exist to be accepted
    shutil.copy(SCHEDULES / TIMER, tmp_path)
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / SERVICE), str(tmp_path / TIMER)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    said = [line for line in done.stderr.splitlines() if "draftforge-retrain" in line]
    assert not said and done.returncode == 0, done.stderr
    (tmp_path / SERVICE).write_text(
        service.replace("SuccessExitStatus", "SucessExitStatus").replace(program, sys.executable)
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "SucessExitStatus" in done.stderr  # it would have been said


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_reads_the_time() -> None:
    command = ["systemd-analyze", "calendar", unit(TIMER)["Timer.OnCalendar"][0]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_units_say_what_a_long_job_needs() -> None:
    service, timer = unit(SERVICE), unit(TIMER)
    assert service["Service.Type"] == ["oneshot"] and service["Service.TimeoutStartSec"] == ["infinity"]
    assert int(service["Service.TimeoutStopSec"][0]) > 60 and service["Service.SuccessExitStatus"] == ["5"]
    assert timer["Timer.Persistent"] == ["true"] and timer["Install.WantedBy"] == ["timers.target"]


def test_cron_takes_the_line(tmp_path: Path) -> None:
    times, command = cron_line()
    CronTrigger.from_crontab(times)
    assert "%" not in command  # which cron reads as a line break
    assert subprocess.run(["sh", "-n", "-c", command]).returncode == 0
    for code, mailed in ((0, ""), (3, "draftforge retrain: exit code 3")):
        bin_folder = tmp_path / str(code) / ".venv" / "bin"
        bin_folder.mkdir(parents=True)
        program = bin_folder / "draftforge"
        program.write_text(f"#!/bin/sh\necho noise\nexit {code}\n")
        program.chmod(0o755)
        here = command.replace("/var/lib/draftforge", str(tmp_path / str(code))).replace(
            "/var/log/draftforge", str(tmp_path)
        )
        printed = subprocess.run(["sh", "-c", here], capture_output=True, text=True).stdout
        assert printed.startswith(mailed) and bool(printed) == bool(mailed)


def test_kubernetes_takes_the_cron_job() -> None:
    manifest = load("cronjob.yaml")
    for version in ("1.36", "1.37"):
        kubernetes_validate.validate(manifest, version, strict=True)
    CronTrigger.from_crontab(manifest["spec"]["schedule"])
    assert manifest["spec"]["concurrencyPolicy"] == "Forbid"
    job = manifest["spec"]["jobTemplate"]["spec"]
    assert job["backoffLimit"] == 0 and job["template"]["spec"]["restartPolicy"] == "Never"
    pod = job["template"]["spec"]
    mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    manifest["spec"]["concurencyPolicy"] = manifest["spec"].pop("concurrencyPolicy")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, "1.37", strict=True)


@pytest.mark.slow
def test_github_takes_the_workflow(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    source = SCHEDULES / "github-workflow.yaml"
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
    broken = tmp_path / "broken.yaml"
    broken.write_text(source.read_text().replace("runs-on", "run-on"))
    assert subprocess.run([*command, str(broken)], capture_output=True, timeout=60).returncode == 1
    workflow = load("github-workflow.yaml")
    assert workflow["concurrency"]["cancel-in-progress"] is False and workflow["permissions"] == {"contents": "read"}
    CronTrigger.from_crontab(workflow[True]["schedule"][0]["cron"])  # YAML reads the key `on` as true


@pytest.mark.parametrize(("code", "wanted"), [(0, 0), (5, 0), (3, 3)])
def test_the_workflow_warns_of_a_refusal_and_fails_on_a_failure(code: int, wanted: int, tmp_path: Path) -> None:
    script = load("github-workflow.yaml")["jobs"]["retrain"]["steps"][-1]["run"]
    program = tmp_path / "draftforge"
    program.write_text(f'#!/bin/sh\necho "$@"\nexit {code}\n')
    program.chmod(0o755)
    script = script.replace("/var/lib/draftforge/.venv/bin/draftforge", str(program))
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", script], capture_output=True, text=True, env={"OPTIONS": "--dry-run"}
    )
    assert done.returncode == wanted and ("::warning::" in done.stdout) == (code == 5)
    assert "retrain recipe.yaml workdir=/var/lib/draftforge/run --dry-run" in done.stdout
