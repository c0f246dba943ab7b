"""Processes of tests, forked from a server that has imported what they need: commands to kill, ranks of a launch."""

import importlib
import importlib.util
import json
import multiprocessing
import os
import re
import runpy
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

import pytest

from draftforge.distributed import free_port

_looking = Lock()
"""The server tells an exit code once. Starting a process also looks at all others, those of other threads too: of two
that look at once, one would read nothing and take the code for 255."""


class Ended(NamedTuple):
    """How one process ended."""

    code: int | None
    """None: it had not, and was killed."""
    said: str


@cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        patch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")  # this and the next the command line sets before its imports
        patch.setenv("TQDM_DISABLE", "1")
        forkserver.ensure_running()
    return context


def start(
    function: Callable[..., object],
    arguments: Sequence[Any],
    log: Path,
    environment: Mapping[str, object] | None = None,
) -> BaseProcess:
    """Begin `function(*arguments)` in a process of its own, which prints to a log."""
    place = {name: str(value) for name, value in (environment or {}).items()}
    process = _server().Process(target=_run, args=(function, list(arguments), place, str(log)))
    with _looking:
        process.start()
    return process


def run(
    function: Callable[..., object],
    arguments: Sequence[Any],
    log: Path,
    seconds: float = 300,
    environment: Mapping[str, object] | None = None,
) -> Ended:
    """Call a function in a process of its own; how that ended."""
    (code,) = _codes([start(function, arguments, log, environment)], seconds)
    return Ended(code, log.read_text())


def run_ranks(
    function: Callable[..., object],
    arguments: Sequence[Any],
    folder: Path,
    world: int,
    seconds: float,
    until_failure: bool = False,
    leaving: int = 0,
    absent: Sequence[int] = (),
    environment: Mapping[str, object] | None = None,
) -> list[Ended]:
    """Call a function on each rank of one launch that is not `absent`; how each ended.

    `leaving`: as many may still run in the end, and are killed; `until_failure`: all, as soon as one has failed.
    """
    shared = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    logs = {rank: folder / f"{rank}.log" for rank in range(world) if rank not in absent}
    processes = [
        start(function, arguments, log, {**shared, **(environment or {}), "RANK": rank, "LOCAL_RANK": rank})
        for rank, log in logs.items()
    ]
    codes = _codes(processes, seconds, until_failure, leaving)
    return [Ended(code, log.read_text()) for code, log in zip(codes, logs.values(), strict=True)]


def _codes(
    processes: list[BaseProcess], seconds: float, until_failure: bool = False, leaving: int = 0
) -> list[int | None]:
    """Exit codes once all but `leaving` have ended, one has failed, or time is up; what still runs is killed."""
    running, deadline = list(processes), time.monotonic() + seconds
    try:
        while len(running) > leaving and time.monotonic() < deadline:
            if until_failure and any(_code(process) for process in processes):
                break
            wait([process.sentinel for process in running], timeout=min(1, max(0, deadline - time.monotonic())))
            running = [process for process in running if _code(process) is None]
        return [_code(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _code(process: BaseProcess) -> int | None:
    with _looking:
        return process.exitcode


def command_line(*arguments: str) -> None:
    """`draftforge ARGUMENTS`."""
    from draftforge.cli import main

    main(list(arguments))


def killed_at(where: str, *arguments: str) -> None:
    """`draftforge ARGUMENTS`, killed by SIGKILL just before a file or folder whose path matches would get its name, or
    where a function of ours is called: `where` is a regular expression, or module:function."""

    def die(*_: Any, **__: Any) -> NoReturn:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def mortal(whole: Callable[[Path, Any], Any]) -> Callable[[Path, Any], Any]:
        return lambda path, to: die() if re.search(where, str(to)) else whole(path, to)

    if re.fullmatch(r"[\w.]+:\w+", where):
        module, _, function = where.partition(":")
        setattr(importlib.import_module(module), function, die)
    else:
        Path.rename, Path.replace = mortal(Path.rename), mortal(Path.replace)  # type: ignore[assignment, method-assign]
    command_line(*arguments)


def python(*arguments: str) -> None:
    """`python -m MODULE ARGUMENTS`, or `python SCRIPT ARGUMENTS`."""
    module, *rest = arguments[1:] if arguments[0] == "-m" else arguments
    sys.argv = [module, *rest]
    run = runpy.run_path if module.endswith(".py") else runpy.run_module
    run(module, run_name="__main__")


def as_command(module: str, function: str, *arguments: Any) -> None:
    """Call a function of a test's file; what it raises ends the process as it ends the command line."""
    from draftforge.errors import DraftforgeError
    from draftforge.pipeline import cli_exit

    try:
        getattr(_load(module), function)(*arguments)
    except DraftforgeError as error:
        cli_exit.fail(error, str(error), error.exit_code)


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
