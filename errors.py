"""Every error a user can meet, in one tree.

Each class also inherits the standard type it refines, so callers may catch either. The message is one line: what
(field or file), the value, the rule. The command line prints it and exits with `exit_code`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from .masking import masked

if TYPE_CHECKING:
    from pydantic import ValidationError

COMMAND: ContextVar[tuple[str, ...]] = ContextVar("command", default=())
"""The command that this process runs, for lines that say how to go on; empty: it was not started by a command line."""


_LONGEST, _MOST_CLEANED = 4000, 32_000  # characters of a line, and of another library's that secrets are taken out of


class DraftforgeError(Exception):
    """Root of the tree. Raised as it is only by tests."""

    exit_code = 2
    many_lines = False

    def __init__(self, message: object = "") -> None:
        # What a message quotes of strangers' files may have lines of its own, which would read as lines of ours.
        lines = str(message).splitlines()
        lines = lines if self.many_lines else [" ".join(lines)]
        super().__init__("\n".join(line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…" for line in lines))


class RecipeError(DraftforgeError, ValueError):
    """Recipe fields that are unknown, missing or out of range, a line each."""

    many_lines = True


class InputError(DraftforgeError, ValueError):
    """Input data (a log line, a prompt, an adapter) breaks a rule."""


class MissingFileError(DraftforgeError, FileNotFoundError):
    """A file or folder that the user named does not exist."""


class SlowTemplateError(DraftforgeError, TimeoutError):
    """A target's chat template takes too long for all prompts together."""


class TemplateProcessError(DraftforgeError, ChildProcessError):
    """The process that renders chat templates does not start."""

    exit_code = 3


class CorruptDataError(DraftforgeError, ValueError):
    """A stored file does not match its recorded digest, shape or format."""


class StaleInputError(DraftforgeError, ValueError):
    """A stored artifact was made from another target, tokenizer, template or setting."""


class TokenizerMismatchError(DraftforgeError, ValueError):
    """A draft and a target do not share a tokenizer."""


class ContextLengthError(DraftforgeError, ValueError):
    """A prompt plus its answer does not fit the model's context."""


class FormatError(DraftforgeError, ValueError):
    """A checkpoint folder is incomplete or its tensors have the wrong names, shapes, dtypes or values."""


class TrainingDivergedError(DraftforgeError, ArithmeticError):
    """A loss or gradient is not finite; raised before the optimizer step."""

    exit_code = 3


class LostRankError(DraftforgeError, ConnectionError):
    """Another process of this launch died, failed or hangs."""

    exit_code = 3


class DeviceMemoryError(DraftforgeError, MemoryError):
    """A training step does not fit into the device's memory."""

    exit_code = 3


class ReplayMismatchError(DraftforgeError, AssertionError):
    """In float32, replay and decoding counted differently at temperature 0."""

    exit_code = 3


class TrackingError(DraftforgeError, ConnectionError):
    """The MLflow server cannot be reached or refused the request."""

    exit_code = 3


class EngineError(DraftforgeError, ConnectionError):
    """A serving engine cannot be reached, or gives no usable answer."""

    exit_code = 3


class ServedError(DraftforgeError, ConnectionError):
    """A serving engine's counters cannot be read."""

    exit_code = 3


class AcceptanceMismatchError(DraftforgeError, ArithmeticError):
    """Served acceptance is not the expected one, and the caller asked for an error then."""

    exit_code = 3


class HubError(MissingFileError, ConnectionError):
    """A model is not here, and the model hub cannot be asked for it, or which revision of it is the newest."""

    exit_code = 3


class RegistryError(DraftforgeError, LookupError):
    """The model registry holds no such model, version or alias."""


class LostFilesError(RegistryError):
    """A registered version's files are gone from the store, or are not those that were recorded."""


class HookError(DraftforgeError, RuntimeError):
    """The operator's command after a promotion or rollback failed. What it followed stands."""

    exit_code = 6


class DiskFullError(DraftforgeError, OSError):
    """Not enough free space for what is about to be written."""

    exit_code = 3


class LockedError(DraftforgeError, TimeoutError):
    """Another process holds the lock."""

    exit_code = 4


class StoppedError(BaseException):
    """SIGTERM: like KeyboardInterrupt, nothing but the way out may catch it."""

    exit_code = 143


class OwnershipError(DraftforgeError, PermissionError):
    """An output folder belongs to another recipe, or was not made by draftforge."""


@contextmanager
def named(field: str) -> Iterator[None]:
    """Errors about what a field of the recipe names begin with the field."""
    try:
        yield
    except DraftforgeError as error:
        raise type(error)(f"{field}: {error}") from error


def refused_value(error: "ValidationError", before: str = "") -> InputError:
    """Error about the first value that settings refuse: field, value and rule. `before` stands before the field."""
    problem = error.errors()[0]
    field, rule = ".".join(map(str, problem["loc"])), problem["msg"].removeprefix("Value error, ")
    # A rule over several fields names them and their values itself.
    shown = f"{field} = {masked(repr(problem['input']))[:80]}: " if field else ""
    return InputError(f"{before}{shown}{rule[:1].lower()}{rule[1:]}")


def spelt_out(text: str, kept: str = "") -> str:
    """Text with every character that is not printable as Python writes it, but those that are `kept`: what a file or a
    server holds controls no terminal, and ends no line."""
    return "".join(mark if mark.isprintable() or mark in kept else repr(mark)[1:-1] for mark in text)


def one_line(error: BaseException, limit: int = 300, clean: Callable[[str], str] = str) -> str:
    """The first line of what another library's error says, or its name where it says nothing.

    `clean` takes secrets out before the line is cut: half an address may no longer look like one.
    """
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    # What a server sent may stand in it, of which a megabyte takes seconds to clean; no word of it is cut in half.
    if len(line) > _MOST_CLEANED:
        line = line[:_MOST_CLEANED].rpartition(" ")[0] or type(error).__name__
    line = clean(line)
    return line if len(line) <= limit else line[: limit - 1] + "…"
