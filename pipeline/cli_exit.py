"""Run of a command to its end: errors become one line on standard error and an exit code. Nothing heavy is imported."""

import gc
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from typer import Typer

from ..errors import (
    COMMAND,
    DraftforgeError,
    InputError,
    MissingFileError,
    RecipeError,
    StoppedError,
    one_line,
    spelt_out,
)
from ..masking import masked

RENAMED = {"--helped-by": "--cascade", "--fail-on-parting": "--fail-on-mismatch"}
"""Old flags, which are refused with the new one named."""
_ENDS_AT_ONCE: list[bool] = []
"""Holds something once a verb is done that leaves nothing for the end of the process to do."""


def run(app: Typer, args: list[str] | None, name: str = "draftforge") -> NoReturn:
    """Run the verb of a command line, or a script of that name, and exit; `args` None: those of the process."""
    quiet_libraries()
    given = sys.argv[1:] if args is None else args
    COMMAND.set((name, *given))
    try:
        for argument in given:
            if argument.encode(errors="ignore").decode() != argument:
                raise InputError(f"argument {argument!r}: must be UTF-8 text")  # no request and no JSON could hold it
        with sigterm_unwinds():
            code = app(args=args, prog_name=name, standalone_mode=False)
    except (DraftforgeError, StoppedError) as error:
        fail(error, str(error), error.exit_code)
    except KeyboardInterrupt as error:
        fail(error, "interrupted", 130)
    except Exception as error:
        fail(error, *describe_error(error))
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        # Of a library in Rust, which gives up at an expression of a tokenizer.
        fail(error, f"a tokenizer's library gives up: {one_line(error)}", 2)
    if args is None and _ENDS_AT_ONCE and not code:  # not where a caller in Python goes on
        sys.stdout.flush()
        os._exit(0)
    if code == 130:  # the parser's own way of passing on Ctrl-C
        print("error: interrupted", file=sys.stderr)
    leave(code if isinstance(code, int) else 0)


@contextmanager
def sigterm_unwinds() -> Iterator[None]:
    """SIGTERM ends the work like an error does: what is half-written goes, locks open, the run is closed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> NoReturn:
        raise StoppedError("stopped by SIGTERM; the same command goes on from what is finished")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def uncollected() -> Iterator[None]:
    """Suspend the garbage collector, for a verb that imports much and writes nothing: what is imported stays.

    The process then ends without taking apart what MLflow has imported, which takes a while.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        _ENDS_AT_ONCE.append(True)
    finally:
        if was_enabled:
            gc.enable()


def quiet_libraries() -> None:
    """Standard output is for results, and a log without a terminal is no place for other libraries' bars."""
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno > logging.WARNING)  # it prints to stdout
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # of a lost connection our error says it, without its stack
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # what it warns of in tables, loading.py checks
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # each of its retries is a line
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")


def describe_error(error: Exception) -> tuple[str, int]:
    """One line and an exit code for an error outside `errors.py`: wrong usage, the operating system, the unexpected."""
    from ..storage import is_disk_full

    usage = getattr(error, "format_message", None)  # the parser's errors
    if usage is not None:
        message, flag = " ".join(str(usage()).split()), getattr(error, "option_name", "")
        if flag in RENAMED:
            message = f"{flag}: the option's name is {RENAMED[flag]}"
        command = getattr(getattr(error, "ctx", None), "command_path", "draftforge")
        return message and f"{message.rstrip('.')}; see `{command} --help`", 2  # nothing after a help page
    if is_disk_full(error):
        where = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
        return f"{where}no space left on the device ({' '.join(str(error).split())[:200]})", 3
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror.lower()}", 2
    message = " ".join(str(error).split())
    if isinstance(error, RuntimeError) and message.startswith("Symlink loop"):  # of pathlib; no OSError before 3.13
        return f"{message.partition(' from ')[2]}: is a link that leads to itself", 2
    what = f"{type(error).__name__}: {message[:300]}" if message else type(error).__name__
    if type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError):
        return f"{what} (out of memory: lower batch sizes, sequence length or batch tokens in the recipe)", 1
    return f"{what} (unexpected; DRAFTFORGE_DEBUG=1 or `draftforge --debug …` shows where)", 1


def fail(error: BaseException, message: str, code: int) -> NoReturn:
    debugging = os.environ.get("DRAFTFORGE_DEBUG") not in (None, "", "0")
    rank, ranks = os.environ.get("RANK", "0"), sys.modules.get(f"{__name__.partition('.')[0]}.distributed")
    # Before the ranks have met, all of a host fail alike at a recipe or an option: the first of them says it for all.
    same = isinstance(error, RecipeError | MissingFileError) or hasattr(error, "format_message")
    met = ranks is not None and ranks.ranks_met().store is not None
    if message and not debugging and not (same and not met and os.environ.get("LOCAL_RANK", "0") != "0"):
        # What a file or a server holds may stand in it, but controls no terminal.
        plain = spelt_out(message, kept="\n")
        print(masked(f"error{'' if rank == '0' else f' (rank {rank})'}: {plain}"), file=sys.stderr, flush=True)
    if ranks is not None:
        ranks.report_failure(error)
    if debugging:  # what other libraries' errors quote is as secret, and controls as little
        shown = masked("".join(traceback.format_exception(error)))
        print(spelt_out(shown, kept="\n"), end="", file=sys.stderr, flush=True)
    leave(code)


def leave(code: int) -> NoReturn:
    """Exit; under torchrun, which ends with 1 whatever its ranks end with, the first rank says the code."""
    if code and "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK") == "0":
        print(f"exit code {code}; torchrun ends with 1 whatever it is", file=sys.stderr, flush=True)
    sys.exit(code)
