"""Any number of processes: the same mix to the byte, the same errors, and none of them outlives its use."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_logs import LINES, write_log

from draftforge.data import workers
from draftforge.data.files import Item
from draftforge.data.logs.sglang import SglangReader
from draftforge.data.logs.vllm import VllmReader
from draftforge.data.mix import build_mix, load_manifest
from draftforge.data.prepared_records import Prepared, Preparer, Unit
from draftforge.data.record_outcomes import Outcome, SourceCounts
from draftforge.data.settings import MixSettings
from draftforge.data.sources import units
from draftforge.data.workers import Workers, batched
from draftforge.errors import InputError


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others start with the first lines, are waited for, and take a few lines each time."""
    others_ready = Workers._others_ready

    def wait_for_others(self: Workers) -> bool:
        others_ready(self)
        return bool(self._started) and all(task.result() for task in self._started)

    monkeypatch.setattr(workers, "_ALONE_BATCHES", 0)
    monkeypatch.setattr(workers, "_BATCH_UNITS", 7)
    monkeypatch.setattr(Workers, "_others_ready", wait_for_others)


@pytest.mark.slow
def test_a_mix_of_every_kind_of_log_is_the_same_for_any_number_of_processes(tmp_path: Path) -> None:
    sources = [
        write_log(tmp_path, kind, 90, broken=(4, 50), first=900 * number) | {"skip_invalid": True}
        for number, kind in enumerate(LINES)
    ]
    sources.append({**sources[list(LINES).index("turns")], "limit": 20, "domain": "few"})
    settings = MixSettings.model_validate({"sources": sources, "limit": 150, "may_be_unanswered": ["few", "turns.log"]})
    for processes in (1, 2):
        build_mix(settings, tmp_path, tmp_path / f"mix{processes}", processes=processes)
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / f"mix{n}").iterdir()} for n in (1, 2))
    assert one == two
    manifest = load_manifest(tmp_path / "mix2")
    assert manifest["redacted"]["email"] > 500 and manifest["left_out"]["broken rule"] == 2 * len(sources)


@pytest.mark.slow
def test_errors_and_their_order_are_the_same_for_any_number_of_processes(tmp_path: Path) -> None:
    sources = [write_log(tmp_path, kind, 40, broken=(3, 17)) for kind in LINES]
    settings = MixSettings.model_validate({"sources": sources})

    def cut(index: int) -> Iterator[Unit]:
        yield from units(settings.sources[index], tmp_path, index, SourceCounts())
        raise InputError(f"source {index}: not a complete file")

    def outcomes(given: Workers) -> Iterator[Outcome[Prepared]]:
        for index in range(len(sources)):
            batches = batched(cut(index))
            # What is wrong with a file comes after the lines before it.
            with pytest.raises(InputError, match=f"source {index}: not a complete file"):
                yield from given.map(Preparer.prepared_outcomes, ((index, batch) for batch in batches))

    with Workers(settings, 1) as alone, Workers(settings, 2) as both:
        one, two = list(outcomes(alone)), list(outcomes(both))
    assert sum(outcome.broken is not None for outcome in one) == 2 * len(LINES)
    assert one == two


def test_small_inputs_start_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_ALONE_BATCHES", 10)
    settings = MixSettings.model_validate({"sources": [write_log(tmp_path, "turns", 60)]})
    with Workers(settings, 2) as some:
        batches = batched(units(settings.sources[0], tmp_path, 0, SourceCounts()))
        assert len(list(some.map(Preparer.prepared_outcomes, ((0, batch) for batch in batches)))) == 60
        assert some._pool is None


@pytest.mark.slow
def test_processes_that_read_logs_import_neither_torch_nor_scipy() -> None:
    code = "import sys, draftforge.data.workers; print([m for m in ('torch', 'scipy', 'datasets') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


ENDLESS = """
import itertools, sys
from draftforge.data import workers
from draftforge.data.files import Item
from draftforge.data.logs.sglang import SglangReader
from draftforge.data.logs.vllm import VllmReader
from draftforge.data.files import Item
from draftforge.data.prepared_records import Preparer
from draftforge.data.settings import MixSettings
workers._ALONE_BATCHES = 0
settings = MixSettings.model_validate({"sources": [{"kind": "prompts", "path": "p.txt", "domain": "d"}]})
lines = (Item(None, f"p.txt:{n}", {"prompt": f"question {n}"}) for n in itertools.count())
try:
    with workers.Workers(settings, 2) as both:
        said = False
        for outcome in both.map(Preparer.prepared_outcomes, ((0, batch) for batch in workers.batched(lines))):
            if not said and both._started and all(task.done() for task in both._started):
                said = True
                print(*both._pool._processes, flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.slow
def test_nothing_is_left_of_a_run_that_was_stopped(number: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C reaches all processes of the terminal and only one of them answers; a kill reaches only the first."""
    command = [sys.executable, "-c", ENDLESS]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, start_new_session=True, **pipes) as run:
        assert run.stdout is not None and run.stderr is not None
        processes = [int(word) for word in run.stdout.readline().split()]
        if number == signal.SIGINT:
            os.killpg(run.pid, number)
        else:
            run.kill()
        rest, said = run.stdout.read(), run.stderr.read()  # the pipes close when the last process is gone
    assert len(processes) == 2 and "Traceback" not in said
    assert (rest, run.returncode) == (("interrupted\n", 0) if number == signal.SIGINT else ("", -signal.SIGKILL))
    while any(Path(f"/proc/{process}").exists() for process in processes):
        time.sleep(0.05)


def test_a_batch_has_so_many_bytes_of_lines_of_rows_and_of_joined_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_BATCH_BYTES", 1000)
    vllm, text = VllmReader(None), "a" * 600
    waiting = list(vllm.feed(f"INFO 11-28 10:00:00 Received request 1: prompt: '{text}'.", "", ""))
    row = {"messages": [{"role": "user", "content": text}]}
    for unit in (
        Item(Path("log"), "", text.encode()),
        Item(Path("log"), "", row),
        *SglangReader().feed(text, "", ""),
        *waiting,
        *vllm.finish(),
    ):
        assert [len(batch) for batch in batched([unit] * 4)] == [2, 2]


def test_a_limit_of_cores_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOKY_MAX_CPU_COUNT", "many")
    with pytest.raises(InputError, match="LOKY_MAX_CPU_COUNT 'many': must be a whole number"):
        workers.available_cores()
