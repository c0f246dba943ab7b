"""Chat templates in a process of their own, which the operating system bounds.

A template comes with a model or an adapter, so from strangers. Jinja's sandbox keeps it from reaching anything, but not
from looping for hours, filling the memory, or ending Python itself by a value that is nested too deep. So transformers'
own function renders it in a process that may take some seconds of CPU time for each prompt, and some memory. One that
goes over either is ended, its prompt is refused, and the next prompt gets a new process.

Requests and replies are a line of JSON each. The process starts with the first request, within a second, and ends when
its input does, so that none outlives the process that asks.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError

from ..errors import SlowTemplateError
from ..specdec.target_settings import TemplateLimits

_FULL_RENDERINGS, _USUAL_SECONDS = 3, 0.25
_MOST_CHARACTERS = 1 << 24
_LONGEST_REASON = 1000
_KEPT = ("PATH", "HOME", "LANG", "TZ", "TMPDIR")
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
    limits: TemplateLimits, used: TemplateTime, asked_at: float | None, **shown: Any
) -> tuple[list[str], list[Any]]:
    """What transformers' `render_jinja_template` gives, which is called with `shown`.

    `asked_at`: Unix seconds that the template's clock shows, in UTC; None: now. Raises TemplateError where the template
    fails, or takes more than its limits; SlowTemplateError where all renderings together do.
    """
    reply = _PROCESS.ask(limits, {"render": {"asked_at": asked_at, "shown": shown}})
    used.add(reply.seconds, limits)
    texts, marks = reply.value_or_error()
    return texts, marks


def ask_of(template: str, what: str, **more: Any) -> Any:
    """Ask a function of `template_forms` about a template. Raises TemplateError where it cannot tell."""
    return _PROCESS.ask(TemplateLimits(), {what: {"template": template, **more}}).value_or_error()


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
        self._lock = threading.Lock()
        self._running: subprocess.Popen[bytes] | None = None
        self._owner, self._megabytes = 0, 0
        atexit.register(self.end)

    def ask(self, limits: TemplateLimits, request: dict[str, Any]) -> _Reply:
        """Reply to a request, a function's name and its arguments. Raises ValueError, TypeError for what JSON lacks."""
        line = json.dumps({"seconds": limits.seconds, **request}).encode() + b"\n"
        with self._lock:
            process = self._process(limits.megabytes)
            assert process.stdin is not None and process.stdout is not None
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
                return _Reply(limits.seconds, error=self._death(process, limits))
            found = json.loads(reply)
            if found.pop("full", False):
                self.end()  # what is left of its memory may be too little for the next
                found["error"] = (
                    f"takes more than {limits.megabytes:,} MB; target.template_limits.megabytes allows more"
                )
            return _Reply(**found)

    def _process(self, megabytes: int) -> "subprocess.Popen[bytes]":
        """The process that runs, or a new one."""
        known = self._running
        if known is not None and self._owner == os.getpid():
            if known.poll() is None and self._megabytes == megabytes:
                return known
            self.end()
        # It has no secret of this process's environment, and no module from the current folder.
        kept = {name: value for name, value in os.environ.items() if name in _KEPT or name.startswith(("LC_", "LD_"))}
        path = os.pathsep.join(str(Path(place).absolute()) for place in sys.path if place)
        self._owner, self._megabytes = os.getpid(), megabytes
        self._running = subprocess.Popen(
            [sys.executable, "-P", "-c", _START.format(megabytes=megabytes)],
            env=kept | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        return self._running

    def _death(self, process: "subprocess.Popen[bytes]", limits: TemplateLimits) -> str:
        """Why a process ended without a reply."""
        code = process.wait()
        self.end()
        if code == -signal.SIGPROF:
            return f"takes more than {limits.seconds:g} s; target.template_limits.seconds allows more"
        ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"ends the process that renders it ({ended})"

    def end(self) -> None:
        """End the process, if this process started it."""
        known, self._running = self._running, None
        if known is not None and self._owner == os.getpid():
            known.kill()
            known.wait()
            for pipe in (known.stdin, known.stdout):
                assert pipe is not None
                pipe.close()


_PROCESS = TemplateProcess()


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
    # 1) Replies alone reach the asking process, which alone decides on Ctrl-C.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # 2) What is needed, and no more: torch would take seconds, and what transformers changes of messages is left.
    sys.modules["torch"] = None  # type: ignore[assignment]
    from transformers.utils import chat_template_utils as library

    from . import template_forms

    library._alias_reasoning_fields = lambda messages: messages
    does = {"render": _render} | {
        one.__name__: one
        for one in (template_forms.loops_over_parts, template_forms.arguments, template_forms.wants_system_first)
    }
    _bound_memory(megabytes)
    # 3) Each request has its time; where that is over, or Python itself fails, this process ends.
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request.pop("seconds"))
        begun, reply = time.process_time(), dict[str, Any]()
        try:
            ((name, given),) = request.items()
            reply["value"] = does[name](**given)
        except MemoryError:
            reply["full"] = True
        except Exception as error:
            reply["error"] = " ".join(str(error)[:_LONGEST_REASON].split()) or type(error).__name__
        written = json.dumps(reply | {"seconds": time.process_time() - begun}).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(written + b"\n")
        replies.flush()


def _bound_memory(megabytes: int) -> None:
    """Let this process take so many megabytes more than it has, where the system can bound that."""
    import resource

    pages = Path("/proc/self/statm")
    if pages.is_file():
        has = int(pages.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (has + megabytes * 10**6,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
