"""Ranks of a launch as processes of this machine, forked from a server that has imported what they need."""

import importlib
import importlib.util
import json
import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from ports import free_port

_IMPORTED = [
    "torch",
    "transformers",
    "deepspeed",
    "draftforge.cli",
    "draftforge.train.loop",
    "draftforge.pipeline.distill",
]


class Ended(NamedTuple):
    """How one rank ended."""

    code: int | None
    """None: it had not, and was killed."""
    said: str


@cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    with pytest.MonkeyPatch.context() as patch:  # what the command line sets before it imports them
        patch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")
        patch.setenv("TQDM_DISABLE", "1")
        forkserver.ensure_running()
    return context


def start_ranks(
    function: Callable[..., object],
    arguments: Sequence[Any],
    logs: Sequence[Path],
    absent: Sequence[int] = (),
    environment: Mapping[str, object] | None = None,
) -> list[multiprocessing.process.BaseProcess]:
    """Begin `function(*arguments)` on as many ranks as there are logs, but for those that are `absent`."""
    world = {"WORLD_SIZE": len(logs), "LOCAL_WORLD_SIZE": len(logs), "MASTER_ADDR": "127.0.0.1"}
    shared = {**world, "MASTER_PORT": free_port(), **(environment or {})}
    started: list[multiprocessing.process.BaseProcess] = []
    for rank, log in enumerate(logs):
        if rank in absent:
            continue
        place = {name: str(value) for name, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}
        process = _server().Process(target=_run, args=(function, list(arguments), place, str(log)))
        process.start()
        started.append(process)
    return started


def run_ranks(
    function: Callable[..., object],
    arguments: Sequence[Any],
    folder: Path,
    world: int,
    seconds: float,
    until_failure: bool = False,
    leaving: int = 0,
    **options: Any,
) -> list[Ended]:
    """Run a function on each rank of one launch, for so many seconds at most, or until one fails; how they ended.

    `leaving`: as many may still run in the end.
    """
    logs = [folder / f"{rank}.log" for rank in range(world)]
    processes = start_ranks(function, arguments, logs, **options)
    deadline = time.monotonic() + seconds
    try:
        while sum(process.exitcode is None for process in processes) > leaving and time.monotonic() < deadline:
            if until_failure and any(process.exitcode for process in processes):
                break
            time.sleep(0.02)
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    present = [log for rank, log in enumerate(logs) if rank not in options.get("absent", ())]
    return [Ended(code, log.read_text()) for code, log in zip(codes, present, strict=True)]


def command_line(*arguments: str) -> None:
    """`draftforge ARGUMENTS`."""
    from draftforge.cli import main

    main(list(arguments))


def command_or_script(*arguments: str) -> None:
    """What torchrun runs: `-m draftforge.cli ARGUMENTS`, or a script's path and its arguments."""
    if arguments[0] == "-m":
        command_line(*arguments[2:])
    else:
        sys.argv = list(arguments)
        runpy.run_path(arguments[0], run_name="__main__")


def as_command(module: str, function: str, *arguments: Any) -> None:
    """Call a function of a test's file; what it raises ends the process as it ends the command line."""
    from draftforge import cli
    from draftforge.errors import DraftforgeError

    try:
        getattr(_load(module), function)(*arguments)
    except DraftforgeError as error:
        cli._fail(error, str(error), error.exit_code)


def returning(result: str, module: str, function: str, *arguments: Any) -> None:
    """Call a function of a module or of a test's file among ranks that have met, and leave its result as JSON."""
    from draftforge.distributed import ranks

    mine = ranks()
    value = getattr(_load(module), function)(*arguments)
    Path(result, f"{mine.rank}.json").write_text(json.dumps(value))
    mine.barrier("the end")


def _load(name: str) -> ModuleType:
    if not name.endswith(".py"):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(Path(name).stem, name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _run(function: Callable[..., object], arguments: list[Any], place: Mapping[str, str], log: str) -> None:
    os.environ.update(place)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    function(*arguments)
