"""Templates that would loop for hours, fill the memory or end Python are refused; all others render."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from byte_level import byte_level_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError

from draftforge.data.chat_template import _surroundings, render_text, takes_parts
from draftforge.data.conversation import Message
from draftforge.data.template_process import PROCESS, TemplateProcess, TemplateTime, _Reply, ask_of, render_in_process
from draftforge.errors import InputError, SlowTemplateError, TemplateProcessError
from draftforge.specdec.target_settings import TargetSettings, TemplateLimits
from draftforge.specdec.targets import load_target_tokenizer

ASK = [Message(role="user", content="Hi"), Message(role="assistant", content="Ho"), Message(role="user", content="?")]
LIMITS = TemplateLimits(seconds=0.5, megabytes=200)
LOOP = "{% for i in range(99999) %}"
HOSTILE = {
    "seconds": [
        LOOP + LOOP + "{% endfor %}{% endfor %}",
        LOOP + LOOP.replace(" %}", " if false %}") + "{% endfor %}{% endfor %}",
        "{{ range(0, 99999 * (2 ** 61 - 1), 2 ** 61 - 1) | unique | list | length }}",
    ],
    "megabytes": [
        "{{ 'a' * 10**9 }}",
        "{{ '{:>0000000002000000000}'.format(1) }}",
        "{% set ns = namespace(x=0) %}" + LOOP + "{% set ns.x = [ns.x, [0] * 9999] %}{% endfor %}",
    ],
    "recursion": ["{{ " + "(" * 3000 + ")" * 3000 + " }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"],
    "must make 16777216 at most": ["{{ 'a' * 17000000 }}"],
    "unexpected": ["{{ broken"],
    "division": ["{{ 1 / 0 }}"],
}


@pytest.mark.slow
@pytest.mark.parametrize(("said", "template"), [(said, one) for said, some in HOSTILE.items() for one in some])
def test_hostile_templates_are_one_line_each(said: str, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftforge.data.template_process.TemplateLimits", lambda: LIMITS)  # no process for others
    tokenizer = byte_level_tokenizer(["Hi there"], 262)
    tokenizer.chat_template, tokenizer.template_limits = template, LIMITS
    with pytest.raises(InputError, match=r"its chat template refuses the messages \(") as found:
        render_text(tokenizer, ASK)
    assert said in str(found.value).replace(",", "") and len(str(found.value)) < 400
    # The next prompt is another template's, and is made.
    tokenizer.chat_template = "{{ messages | length }}"
    assert render_text(tokenizer, ASK) == "3"


TEXTS = st.text(st.characters(exclude_categories=[]), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
@settings(max_examples=60, derandomize=True, deadline=None)
def test_a_template_is_shown_what_is_given(value: object) -> None:
    template = "{{ messages[0].content }}|{{ add_generation_prompt }}"
    shown = {"conversations": [[{"role": "user", "content": value}]], "chat_template": template}
    texts, _ = render_in_process(TemplateLimits(), TemplateTime(), None, **shown, add_generation_prompt=True)
    assert texts == [f"{value}|True"]


def test_the_clock_of_a_template_shows_the_time_of_its_request() -> None:
    shown = {"conversations": [[]], "chat_template": "{{ strftime_now('%Y-%m-%d %H:%M') }}"}
    for asked_at, said in ((0.0, "1970-01-01 00:00"), (1e9, "2001-09-09 01:46")):
        assert render_in_process(TemplateLimits(), TemplateTime(), asked_at, **shown)[0] == [said]
    year = int(render_in_process(TemplateLimits(), TemplateTime(), None, **shown)[0][0][:4])
    assert year >= 2025


def test_a_template_of_many_messages_has_time_to_spare() -> None:
    """A thread of 4,000 messages and a hundred tools, looked through for each message as templates do it."""
    tokenizer = byte_level_tokenizer(["Hi there"], 262)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if loop.index0 == messages | length - 1 and tools is not none %}{{ tools | tojson }}"
        "{% endif %}{% set before = messages[loop.index0 - 1] %}{% if loop.index0 and before.role == m.role %}"
        "{{ raise_exception('x') }}{% endif %}{{ m.role ~ ': ' ~ m.content | trim + '\n' }}{% endfor %}"
    )
    roles = ("user", "assistant")
    messages = [Message(role=roles[i % 2], content=f"It was said {i} times. " * 5) for i in range(4_001)]
    tools = [{"type": "function", "function": {"name": f"f{i}", "description": "x" * 500}} for i in range(100)]
    text = render_text(tokenizer, messages, tools)
    assert text.count("\n") == 4_001 and text.count('"function"') == 200


def test_the_limits_of_a_target_hold_for_its_template(tiny_target_folder: Path) -> None:
    limits = TemplateLimits(characters=1)
    tokenizer = load_target_tokenizer(TargetSettings(model=str(tiny_target_folder), template_limits=limits))
    with pytest.raises(InputError, match=r"characters; target\.template_limits allows 1\)"):
        render_text(tokenizer, ASK)


def test_a_template_that_takes_long_each_time_ends_the_run() -> None:
    """A log of ten thousand conversations would take days, and would be left out whole."""
    used = TemplateTime()
    for seconds in (*[LIMITS.seconds] * 3, *[0.2] * 1_000):
        used.add(seconds, LIMITS)
    with pytest.raises(SlowTemplateError, match=r"for 1,\d{3} prompts; target\.template_limits\.seconds allows more"):
        for _ in range(3_000):
            used.add(LIMITS.seconds, LIMITS)


def test_templates_that_nobody_can_read_in_time_take_no_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftforge.data.template_process.TemplateLimits", lambda: LIMITS)
    macros = "{% macro a(b) %}{% for c in b %}{% endfor %}{% endmacro %}" * 2_000 + "{{ a(d) }}" * 20_000
    assert not takes_parts(macros)
    assert ask_of("{{ a }}{% set b = 1 %}{{ b }}", "arguments") == ["a"]


def test_a_fork_asks_a_process_of_its_own() -> None:
    def sum_of(number: int) -> str:
        shown = {"conversations": [[]], "chat_template": "{{ " + str(number) + " + 1 }}"}
        return render_in_process(TemplateLimits(), TemplateTime(), None, **shown)[0][0]

    assert sum_of(1) == "2"
    child = os.fork()
    if child == 0:
        os._exit(0 if [sum_of(number) for number in range(9)] == [str(number + 1) for number in range(9)] else 1)
    assert [sum_of(number) for number in range(9)] == [str(number + 1) for number in range(9)]
    assert os.waitpid(child, 0)[1] == 0


def test_nothing_outlives_a_process_that_is_killed() -> None:
    """Neither while it waits, nor in the middle of a template that does not end."""
    path = os.pathsep.join(place for place in sys.path if place)
    for template in ("a", LOOP + LOOP + "{% endfor %}{% endfor %}"):
        asking = subprocess.Popen(
            [sys.executable, "-c", _ASKING, template],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert asking.stdout is not None
        renders = Path(f"/proc/{int(asking.stdout.readline())}")
        asking.kill()
        asking.communicate()
        while renders.exists():  # its own limit, and that of the test, end this
            time.sleep(0.02)


_ASKING = """
import sys
from draftforge.data import template_process as process
from draftforge.specdec.target_settings import TemplateLimits
process.ask_of("a", "arguments")
print(process.PROCESS._running.pid, flush=True)
limits, shown = TemplateLimits(seconds=0.5), {"conversations": [[]], "chat_template": sys.argv[1]}
process.render_in_process(limits, process.TemplateTime(), None, **shown)
sys.stdin.read()
"""


def test_a_template_that_ends_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that are nested hundreds of thousands deep do, where they are hashed."""
    asked = TemplateProcess()
    assert asked.ask(LIMITS, {"arguments": {"template": "{{ a }}"}}).value == ["a"]
    running: Any = asked._running
    dying = SimpleNamespace(write=lambda _: running.send_signal(signal.SIGSEGV), flush=int, close=int)
    monkeypatch.setattr(running, "stdin", dying)
    with pytest.raises(TemplateError, match=r"^ends the process that renders it \(SIGSEGV\)$"):
        asked.ask(LIMITS, {"arguments": {"template": "{{ b }}"}}).value_or_error()
    assert asked.ask(LIMITS, {"arguments": {"template": "{{ c }}"}}).value == ["c"]
    asked.end()


def test_an_interrupted_request_leaves_no_reply_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = TemplateProcess()
    assert asked.ask(LIMITS, {"arguments": {"template": "{{ a }}"}}).value == ["a"]
    first = asked._running
    assert first is not None

    def interrupt() -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(first, "stdout", SimpleNamespace(readline=interrupt, close=lambda: None))
    with pytest.raises(KeyboardInterrupt):
        asked.ask(LIMITS, {"arguments": {"template": "{{ b }}"}})
    assert first.poll() is not None
    assert asked.ask(LIMITS, {"arguments": {"template": "{{ c }}"}}).value == ["c"]
    asked.end()


def test_a_prompt_that_lacks_memory_in_a_used_process_gets_a_new_one() -> None:
    """What templates before it left there, or a request too large to be read, must not decide on another prompt."""
    asked, limits = TemplateProcess(), TemplateLimits(megabytes=60)

    def reply_to(template: str, content: str = "") -> _Reply:
        shown = {"conversations": [[{"content": content}]], "chat_template": template}
        return asked.ask(limits, {"render": {"asked_at": None, "shown": shown}})

    assert reply_to("a").value == [["a"], []]
    first = asked._running
    assert first is not None
    # Half of its memory is taken by what was rendered before.
    resource.prlimit(first.pid, resource.RLIMIT_AS, (20 << 20, 20 << 20))
    assert reply_to("{{ ('a' * 20000000) | length }}").value == [["20000000"], []]
    assert asked._running is not first
    with pytest.raises(TemplateError, match=r"^takes more than 60 MB; target\.template_limits\.megabytes allows more$"):
        reply_to("a", "a" * 50_000_000).value_or_error()
    asked.end()


def test_a_template_that_ends_each_process_has_the_time_of_its_start() -> None:
    """It ends the run, then: a start takes longer than what each prompt may take on average."""
    asked, shown = TemplateProcess(), {"conversations": [[]], "chat_template": "{{ 'a' * 10**9 }}"}
    reply = asked.ask(TemplateLimits(megabytes=60), {"render": {"asked_at": None, "shown": shown}})
    assert reply.error is not None and reply.seconds > 0.1


def test_a_lower_limit_of_the_system_holds_instead() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30));"
        "from draftforge.data.template_process import ask_of; print(ask_of('{{ a }}', 'arguments'))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(place for place in sys.path if place)}
    assert subprocess.check_output([sys.executable, "-c", code], env=env, text=True) == "['a']\n"


def test_halves_of_a_character_stay_halves() -> None:
    """An engine refuses such a prompt, too."""
    template = "{{ messages[0].content }}" + r"{{ '\ude00' }}"
    shown = {"conversations": [[{"content": "\ud83d"}]], "chat_template": template}
    assert render_in_process(TemplateLimits(), TemplateTime(), None, **shown)[0] == ["\ud83d\ude00"]


def test_template_arguments_have_any_names() -> None:
    shown = {"conversations": [[]], "chat_template": "{{ limits }}{{ used }}{{ asked_at }}"}
    texts, _ = render_in_process(TemplateLimits(), TemplateTime(), None, **shown, limits=1, used=2, asked_at=3)
    assert texts == ["123"]


def test_a_process_that_does_not_start_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no conversation is left out for it."""
    asked = TemplateProcess()
    for start, said in (("import nothing_such", "No module named 'nothing_such'"), ("exit(5)", "exit code 5")):
        monkeypatch.setattr("draftforge.data.template_process._START", start)
        with pytest.raises(TemplateProcessError, match=f"^the process that renders .* does not start: .*{said}$"):
            asked.ask(LIMITS, {})
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(TemplateProcessError, match=r"does not start: No such file or directory$"):
        asked.ask(LIMITS, {})


def test_the_time_is_bounded_where_profilers_are_held_off() -> None:
    asked, before = TemplateProcess(), signal.signal(signal.SIGPROF, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPROF})
    try:
        asked.ask(LIMITS, {"arguments": {"template": ""}})
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
        signal.signal(signal.SIGPROF, before)
    assert asked._running is not None
    status = Path(f"/proc/{asked._running.pid}/status").read_text()
    held = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigBlk", "SigIgn"))]
    assert not any(mask >> (signal.SIGPROF - 1) & 1 for mask in held)
    asked.end()


def test_a_fork_in_the_middle_of_a_request_asks_by_itself() -> None:
    """Nobody would let go of the lock there."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with PROCESS.lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if PROCESS.lock.acquire(blocking=False) else 1)
    done.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_transformers_is_changed_by_one_thread_at_a_time() -> None:
    """Else one would put back what another had put there, and a template would be rendered in this process."""
    from transformers import tokenization_utils_base as library

    before, entered, leave = library.render_jinja_template, threading.Event(), threading.Event()

    def other() -> None:
        with _surroundings(str):
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with _surroundings(repr):
        thread.start()
        assert not entered.wait(0.1)
    leave.set()
    thread.join()
    assert library.render_jinja_template is before
