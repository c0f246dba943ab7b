"""Chat templates in a process of their own, which the operating system bounds.

A template comes with a model or an adapter, so from strangers. Jinja's sandbox keeps it from reaching anything, but not
from looping for hours, filling the memory, or ending Python itself by a value that is nested too deep. So transformers'
own function renders it in a process that may take some seconds of CPU time for each prompt, and some memory. One that
goes over either is ended, its prompt is refused, and the next prompt gets a new process.

Requests and replies are a line of JSON each. The process starts with the first request, within a second, and ends when
its input does, so that none outlives the process that asks. What a prompt is does not depend on those before it: one
that finds too little memory in a process that rendered others is rendered by a new one.
"""

import atexit
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError

from ..errors import SlowTemplateError, TemplateProcessError
from ..specdec.target_settings import TemplateLimits

_FULL_RENDERINGS, _USUAL_SECONDS = 3, 0.25
_MOST_CHARACTERS = 1 << 24
_LONGEST_REASON = 1000
_KEPT = ("PATH", "HOME", "LANG", "TZ", "TMPDIR")
_NO_MEMORY = 77  # exit code, of none of Python's own
_READY = b"ready\n"
_NOT_STARTED = "the process that renders chat templates does not start"
_START = "import draftforge.data.template_process as process; process.serve({megabytes})"


@dataclass
class TemplateTime:
    """CPU seconds that all renderings for one tokenizer took: a log of a slow template's prompts would take days."""

    seconds: float = 0.0
    prompts: int = 0

    def add(self, seconds: float, limits: TemplateLimits) -> None:
        """Count a rendering. Raises SlowTemplateError where all together take far longer than real templates do."""
        self.seconds, self.prompts = self.seconds + seconds, self.prompts + 1
        if self.seconds > _FULL_RENDERINGS * limits.seconds + _USUAL_SECONDS * self.prompts:
            raise SlowTemplateError(
                f"target.model: its chat template took {self.seconds:.0f} s for {self.prompts:,} prompts; "
                "target.template_limits.seconds allows more"
            )


def render_in_process(
    limits: TemplateLimits, used: TemplateTime, asked_at: float | None, /, **shown: Any
) -> tuple[list[str], list[Any]]:
    """What transformers' `render_jinja_template` gives, which is called with `shown`.

    `asked_at`: Unix seconds that the template's clock shows, in UTC; None: now. Raises TemplateError where the template
    fails, or takes more than its limits; SlowTemplateError where all renderings together do.
    """
    reply = PROCESS.ask(limits, {"render": {"asked_at": asked_at, "shown": shown}})
    used.add(reply.seconds, limits)
    texts, marks = reply.value_or_error()
    return texts, marks


def ask_of(template: str, what: str, **more: Any) -> Any:
    """Ask a function of `template_forms` about a template. Raises TemplateError where it cannot tell."""
    return PROCESS.ask(TemplateLimits(), {what: {"template": template, **more}}).value_or_error()


class _Reply(NamedTuple):
    """What the process answered, or why it did not."""

    seconds: float
    value: Any = None
    error: str | None = None

    def value_or_error(self) -> Any:
        if self.error is not None:
            raise TemplateError(self.error)
        return self.value


class TemplateProcess:
    """The process, asked by one thread at a time. A fork of this process has one of its own."""

    def __init__(self) -> None:
        self._forget()
        atexit.register(self.end)
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Begin without a process. A fork leaves its parent's alone, of which another thread may hold the lock."""
        self.lock = threading.RLock()
        self._running: subprocess.Popen[bytes] | None = None
        self._megabytes = 0

    def ask(self, limits: TemplateLimits, request: dict[str, Any]) -> _Reply:
        """Reply to a request, a function's name and its arguments. Raises ValueError, TypeError for what JSON lacks,
        TemplateProcessError where the process does not start."""
        line = _line_of({"seconds": limits.seconds, **request})
        with self.lock:
            begun = time.monotonic()  # a template that ends each process costs its start, too
            while True:
                rendered_others = self._is_running(limits.megabytes)
                if not rendered_others:
                    self._start(limits.megabytes)
                reply = self._reply_to(line)
                if reply.endswith(b"\n"):
                    return _Reply(**json.loads(reply))
                code = self.end()
                if not (rendered_others and code == _NO_MEMORY):
                    return _Reply(min(time.monotonic() - begun, limits.seconds), error=_death(code, limits))

    def _is_running(self, megabytes: int) -> bool:
        """Whether the process runs and is bounded so."""
        return self._running is not None and self._running.poll() is None and self._megabytes == megabytes

    def _start(self, megabytes: int) -> None:
        """Start a process, in place of one that may run."""
        self.end()
        # It has no secret of this process's environment, and no module from the current folder.
        kept = {name: value for name, value in os.environ.items() if name in _KEPT or name.startswith(("LC_", "LD_"))}
        path = os.pathsep.join(str(Path(place).absolute()) for place in sys.path if place)
        try:
            self._running = process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START.format(megabytes=megabytes)],
                env=kept | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except OSError as error:
            raise TemplateProcessError(f"{_NOT_STARTED}: {error.strerror or error}") from None
        self._megabytes = megabytes
        assert process.stdout is not None and process.stderr is not None
        try:
            if process.stdout.readline() == _READY:
                return
            said = process.stderr.read().decode(errors="replace").split("\n")
            process.wait()
        except BaseException:
            self.end()
            raise
        reason = next((line for line in reversed(said) if line.strip()), "")[:_LONGEST_REASON]
        ending = _ending(self.end())
        raise TemplateProcessError(f"{_NOT_STARTED}: {reason or ending}")

    def _reply_to(self, line: bytes) -> bytes:
        """The process's reply; without its end where the process ended."""
        process = self._running
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
            reply = process.stdout.readline()
        except BrokenPipeError:
            reply = b""
        except BaseException:  # such as Ctrl-C: the reply to this would be taken for that to the next
            self.end()
            raise
        if not reply.endswith(b"\n"):
            process.wait()  # how it ended is what is said
        return reply

    def end(self) -> int:
        """End the process; its exit code, 0 where there was none."""
        known, self._running = self._running, None
        if known is None:
            return 0
        known.kill()
        code = known.wait()
        for pipe in (known.stdin, known.stdout, known.stderr):
            assert pipe is not None
            with suppress(BrokenPipeError):  # of what it was not told any more
                pipe.close()
        return code


def _line_of(value: dict[str, Any]) -> bytes:
    """A line of JSON. Each half of a pair of surrogates stays one, which as an escape would become a character."""
    return json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass") + b"\n"


def _death(code: int, limits: TemplateLimits) -> str:
    """Why the process ended without a reply."""
    if code == -signal.SIGPROF:
        return f"takes more than {limits.seconds:g} s; target.template_limits.seconds allows more"
    if code == _NO_MEMORY:
        return f"takes more than {limits.megabytes:,} MB; target.template_limits.megabytes allows more"
    return f"ends the process that renders it ({_ending(code)})"


def _ending(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


PROCESS = TemplateProcess()


# --- in the process ---


class _Clock:
    """Stands for `datetime` where templates ask for the time."""

    def __init__(self, time: float) -> None:
        self._time = time

    def now(self) -> datetime:
        return datetime.fromtimestamp(self._time, UTC)


def _render(asked_at: float | None, shown: dict[str, Any]) -> Any:
    """Prompts as transformers renders them, which takes the clock from its module alone."""
    from transformers.utils import chat_template_utils as library

    library.datetime = datetime if asked_at is None else _Clock(asked_at)
    texts, marks = library.render_jinja_template(**shown)
    if (made := sum(map(len, texts))) > _MOST_CHARACTERS:
        raise TemplateError(f"makes {made:,} characters; must make {_MOST_CHARACTERS:,} at most")
    return texts, marks


def serve(megabytes: int) -> None:
    """Answer requests until there are no more. `megabytes`: memory that they may take, all together."""
    # 1) Replies alone reach the asking process, which alone decides on Ctrl-C. Its profiler's timer is not this one's.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    # 2) What is needed, and no more: torch would take seconds, as would transformers' list of all its models, which its
    # packages make. What transformers changes of messages is left.
    sys.modules["torch"] = None  # type: ignore[assignment]
    for name in ("transformers", "transformers.utils"):
        _without_its_init(name)
    from transformers.utils import chat_template_utils as library

    from . import template_forms

    library._alias_reasoning_fields = lambda messages: messages
    does = {"render": _render} | {
        one.__name__: one
        for one in (template_forms.loops_over_parts, template_forms.arguments, template_forms.wants_system_first)
    }
    _bound_memory(megabytes)
    # 3) From here on nothing is said but replies.
    replies.write(_READY)
    replies.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        for line in sys.stdin.buffer:
            replies.write(_reply(does, line))
            replies.flush()
    except MemoryError:
        os._exit(_NO_MEMORY)  # what is left may be too little for the next, too


def _without_its_init(package: str) -> None:
    """Let modules of a package be imported without what its `__init__.py` imports."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    sys.modules[package] = importlib.util.module_from_spec(spec)


def _reply(does: dict[str, Callable[..., Any]], line: bytes) -> bytes:
    """Reply to a request. Where its time is over, or Python itself fails, this process ends. Raises MemoryError."""
    begun, reply, request = time.process_time(), dict[str, Any](), json.loads(line)
    signal.setitimer(signal.ITIMER_PROF, request.pop("seconds"))
    try:
        ((name, given),) = request.items()
        reply["value"] = does[name](**given)
    except MemoryError:
        raise
    except Exception as error:
        reply["error"] = " ".join(str(error)[:_LONGEST_REASON].split()) or type(error).__name__
    written = _line_of(reply | {"seconds": time.process_time() - begun})
    signal.setitimer(signal.ITIMER_PROF, 0)
    return written


def _bound_memory(megabytes: int) -> None:
    """Let this process take so many megabytes more than it has, where the system can bound that, and lets it."""
    import resource

    pages = Path("/proc/self/statm")
    if pages.is_file():
        has = int(pages.read_text().split()[0]) * resource.getpagesize()
        _, allowed = resource.getrlimit(resource.RLIMIT_AS)
        most = has + megabytes * 10**6
        most = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
