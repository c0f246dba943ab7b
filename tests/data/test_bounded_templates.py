"""Templates that would loop for hours or fill the memory are refused, and all others render as transformers does it."""

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from byte_level import byte_level_tokenizer
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from draftforge.data import bounded_templates
from draftforge.data.bounded_templates import LIMITS, BoundedEnvironment
from draftforge.data.chat_template import render_text
from draftforge.data.conversation import Message
from draftforge.errors import InputError, SlowTemplateError
from draftforge.specdec.target_settings import TargetSettings, TemplateLimits
from draftforge.specdec.targets import load_target_tokenizer

ASK = [Message(role="user", content="Hi"), Message(role="assistant", content="Ho"), Message(role="user", content="?")]
DOUBLED = "{% set ns = namespace(x=['a']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
GIVEN = "{% set ns = namespace(x=1) %}{% macro m() %}{% set ns.x = varargs %}{% endmacro %}"
DOUBLED_GIVEN = GIVEN + "{% for i in range(60) %}{{ m(ns.x, ns.x) }}{% endfor %}"
DEEP_GIVEN = GIVEN + "{% for i in range(15000) %}{{ m(ns.x) }}{% endfor %}"
BIG, LOOP, ENTRIES = (
    "{% set big = [0] * 200000 %}",
    "{% for i in range(99999) %}",
    ",".join(f"'{i}': 0" for i in range(5462)),
)
# ruff: noqa: E501  (a template a line)
HOSTILE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that pass over all": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "text in loops": "{% for a in range(99999) %}" + "x" * 10_000 + "{% endfor %}",
    "a macro that calls itself twice": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "a macro that calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a recursive loop": "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "product": "{{ 'a' * 10**10 }}",
    "product of a list": "{{ ([messages] * 10**9) | length }}",
    "product of numbers": "{% set ns = namespace(x=9) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "power": "{{ 9 ** 9999999 }}",
    "sum of texts": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "joined texts": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "a doubled list, shown": DOUBLED + "{{ ns.x }}",
    "a doubled list, as JSON": DOUBLED + "{{ ns.x | tojson }}",
    "a doubled list, as text": DOUBLED + "{{ (ns.x ~ 'b') | length }}",
    "a doubled list, compared": DOUBLED + "{% set y = ns.x %}" + DOUBLED + "{{ ns.x == y }}",
    "a doubled list, searched": DOUBLED + "{% set y = ns.x %}" + DOUBLED + "{{ y in [ns.x] }}",
    "a doubled tuple as a key": DOUBLED.replace("[ns.x, ns.x]", "(ns.x, ns.x)").replace("['a']", "'a'")
    + "{{ {ns.x: 1} }}",
    "width": "{{ 'a'.ljust(10**10) }}",
    "width behind digits": "{{ ('1' * 1000000 ~ '%10000000000d') % 1 }}",
    "precision of a format": "{{ '%1.10000000000f' % 1 }}",
    "width of a filter": "{{ 'a' | center(10**10) }}",
    "width of a format": "{{ '%10000000000d' % 1 }}",
    "width of a formatted field": "{{ '{:10000000000}'.format(1) }}",
    "computed width": "{{ '{:{}}'.format(1, 10**10) }}",
    "starred width": "{{ '%*d' % (10**10, 1) }}",
    "format filter": "{{ '%10000000000d' | format(1) }}",
    "fields of a format": "{{ ('%s' * 100000) % ((messages | string) * 1000) }}",
    "indent": "{{ messages | tojson(indent=10**9) }}",
    "replace": "{{ ('a' * 1000000).replace('a', 'b' * 1000000) | length }}",
    "replace filter": "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) | length }}",
    "join": "{{ (['a'] * 1000000) | join('b' * 1000000) | length }}",
    "join method": "{{ ('b' * 1000000).join(['a'] * 1000000) | length }}",
    "tabs": "{{ ('\\t' * 100000).expandtabs(1000000) | length }}",
    "zeros": "{{ '1'.zfill(10**10) }}",
    "precision": "{{ 1.5 | round(10**9, 'ceil') }}",
    "batches": "{{ [1] | batch(10**9, 'x') | list | length }}",
    "slices": "{{ [1] | slice(10**9) | list | length }}",
    "slices of a text in a loop": "{% set x = 'a' * 9000000 %}{% for i in range(99999) %}{% set y = x[1:] %}{% endfor %}",
    "searches of a text in a loop": "{% set x = 'a' * 9000000 %}{% for i in range(99999) %}{% if 'b' in x %}{% endif %}{% endfor %}",
    "translate": "{{ 'a'.translate({97: 'b' * 1000000}) }}",
    "filler": "{{ lipsum(n=100000) }}",
    "division": "{{ 1 / 0 }}",
    "modulo": "{{ 1 % 0 }}",
    "nesting of blocks": "{% if a %}" * 300 + "{% endif %}" * 300,
    "nesting of brackets": "{{ " + "(" * 3000 + ")" * 3000 + " }}",
    "nesting of lists": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "a chain of sums": "{{ " + "+".join("1" * 15000) + " }}",
    "size": "x" * (TemplateLimits().characters + 1),
    "a doubled list, by the filter of texts": DOUBLED + "{{ ns.x | string | length }}",
    "a doubled list, marked safe": DOUBLED + "{{ ns.x | safe | length }}",
    "a doubled list in a namespace, shown": DOUBLED + "{{ ns }}",
    "a doubled list, counted": DOUBLED + "{% set y = ns.x %}" + DOUBLED + "{{ [y].count(ns.x) }}",
    "bytes of a number": "{{ (1).to_bytes(11000000000, 'big') | length }}",
    "bytes": "{{ 'a'.encode().replace('a'.encode(), 'b'.encode()) }}",
    "method of a class": "{{ {}.fromkeys(range(9)) }}",
    "width of a named field": "{{ ('%(a)9000000000d' % {'a': 1}) | length }}",
    "width of an oddly named field": "{{ ('%((%)b)9000000000d' % {'(%)b': 1}) | length }}",
    "width behind a bracket": "{{ '{0[}]:9999999999}'.format({'}': 1}) | length }}",
    "computed width behind a bracket": "{{ '{0[}]:{1}}'.format({'}': 1}, 9999999999) | length }}",
    "a huge number": "{% set h = ('f' * 400000) | int(0, 16) %}{% for i in range(99999) %}{% set x = -h %}{% endfor %}",
    "a huge number, written": "{% set h = 0x" + "f" * 90_000 + " %}",
    "searches backwards": "{{ ('a' * 400000).rfind('ab' ~ 'a' * 200000) }}",
    "characters to strip": "{{ ('a' * 400000).strip('b' * 400000 ~ 'a') }}",
    "numbers whose hashes are equal": "{{ range(0, 99999 * (2 ** 61 - 1), 2 ** 61 - 1) | unique | list | length }}",
    "keys whose hashes are equal": "{{ {" + ",".join(f"{i * (2**61 - 1)}:1" for i in range(99)) + "} }}",
    "ranges as lists": "{% for i in range(99999) %}{% set x = range(99999) | list %}{% endfor %}",
    "ranges that are taken one by one": "{% for i in range(99999) %}{% set x = range(99999) | select | list %}{% endfor %}",
    "searches of a range": "{% for i in range(99999) %}{% set x = 'a' in range(99999) %}{% endfor %}",
    "texts as lists": "{% set s = 'a' * 900000 %}{% for i in range(99999) %}{% set x = s | list %}{% endfor %}",
    "a long body": "{% for i in range(99999) %}{% set x = [" + ",".join(["i.x"] * 2_000) + "] %}{% endfor %}",
    "blocks that show others twice": "".join(
        f"{{% block b{i} %}}{{{{ self.b{i + 1}() }}}}{{{{ self.b{i + 1}() }}}}{{% endblock %}}" for i in range(40)
    ),
    "format of a time": "{{ strftime_now('%9999d' * 100000) | length }}",
    "indent of what is deep": "{% set ns = namespace(x=[1] * 9000) %}{% for i in range(90) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x | tojson(indent=99) }}",
    "lines of one long word": "{{ ('a' * 900000) | wordwrap(1) }}",
    "sum of lists": "{{ ([[1]] * 300000) | sum(start=[]) | length }}",
    "join of what is taken one by one": "{{ range(99999) | select | join('b' * 100000) }}",
    "replace by name": "{{ ('a' * 100000) | replace(new='b' * 100000, old='a') }}",
    "attributes of attributes": "{% set ns = namespace() %}{% set ns.a = ns %}{{ [ns] * 99999 | map(attribute='"
    + ".".join("a" * 4000)
    + "') | list }}",
    "steps given back": "{{ (-99999999999) | _tick }}{{ (-99999999999) | tick }}",
    "steps given back by name": "{{ [-99999999999] | map(' tick') | list }}",
    "no number of steps": "{{ ['nan' | float] | map(' tick') | list }}",
    "width behind zeros": "{{ ('%0000000009000000000d' % 1) | length }}",
    "precision behind zeros": "{{ ('%.0000000009000000000f' % 1.5) | length }}",
    "width of a field behind zeros": "{{ '{:>00000000009000000000}'.format(1) | length }}",
    "width of thousands of digits": "{{ '{:>" + "0" * 5000 + "9}'.format(1) }}",
    "a text that is divided": "{{ '%9000000000d' is even }}",
    "texts that are divided": "{{ ['%9000000000d'] | select('divisibleby', 3) | list }}",
    "a text that is rounded": "{{ 'a' | round(11, 'ceil') }}",
    "a doubled list, compared in a chain": DOUBLED + "{% set y = ns.x %}" + DOUBLED + "{{ ns.x == y == 1 }}",
    "a doubled tuple of arguments as a key": DOUBLED_GIVEN + "{{ {ns.x: 1} }}",
    "a doubled tuple of arguments, looked up": DOUBLED_GIVEN + "{{ {}[ns.x] }}",
    "a doubled tuple of arguments, got": DOUBLED_GIVEN + "{{ {}.get(ns.x) }}",
    "a doubled tuple of arguments as a filter": DOUBLED_GIVEN + "{{ ns.x is filter }}",
    "a doubled tuple of arguments as a test": DOUBLED_GIVEN + "{{ [1] | select(ns.x) | list }}",
    "a deep tuple, searched": DEEP_GIVEN + "{{ ns.x in {} }}",
    "a deep tuple, told apart": DEEP_GIVEN + "{{ [ns.x] | unique | list | length }}",
    "a deep tuple in a dict": DEEP_GIVEN + "{{ dict([[ns.x, 1]]) | length }}",
    "keys of a dict whose hashes are equal": "{{ dict(range(0, 99999 * (2 ** 61 - 1), 2 ** 61 - 1) | batch(2)) | length }}",
    "keys of a namespace whose hashes are equal": "{% set ns = namespace(range(0, 99999 * (2 ** 61 - 1), 2 ** 61 - 1) | batch(2)) %}",
    "keys whose hashes are equal, without values": "{{ dict.fromkeys(range(0, 99999 * (2 ** 61 - 1), 2 ** 61 - 1)) | length }}",
    "a deep tuple in a tuple that `dict` takes for a key": DEEP_GIVEN + "{{ dict.fromkeys([ns.x]) | length }}",
    "reads of what is not taken": BIG + LOOP + "{% set y = [] | map('default', big) %}{% endfor %}",
    "a list, no time": BIG + LOOP + "{% set y = big * 0 %}{% endfor %}",
    "a format of nothing": BIG + LOOP + "{% set y = '' % big %}{% endfor %}",
    "a loop that passes over all, slowly": LOOP.replace(
        " %}", " if [" + ",".join(["messages"] * 5000) + "] is string %}"
    )
    + "{% endfor %}",
    "copies of a dict": "{% set d = {"
    + ENTRIES
    + "} %}{% set ns = namespace(x=0) %}"
    + LOOP
    + "{% set ns.x = [ns.x, d.copy()] %}{% endfor %}",
    "lists in a list in a loop": "{% set ns = namespace(x=0) %}"
    + LOOP
    + "{% set ns.x = [ns.x, ["
    + "[]," * 5000
    + "]] %}{% endfor %}",
    "attribute": "{{ messages.__class__.__mro__ }}",
    "index": "{{ {}['a'].b }}{{ [][3].c }}",
}
_SCRIPT = """
import json, resource, sys
from byte_level import byte_level_tokenizer
from draftforge.data.chat_template import render_text
from draftforge.data.conversation import Message
from draftforge.errors import InputError
from draftforge.specdec.target_settings import TemplateLimits
tokenizer = byte_level_tokenizer(["Hi there"], 262)
tokenizer.template_limits = TemplateLimits(steps=1 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))
messages = [Message.model_validate(one) for one in json.loads(sys.argv[1])]
for name, template in json.load(sys.stdin).items():
    tokenizer.chat_template = template
    try:
        render_text(tokenizer, messages)
        print(name, "rendered")
    except InputError as error:
        print(name, "|", error)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_hostile_templates_are_one_line_each() -> None:
    """In a process of 4 GiB: any of them takes hours or more memory than there is, where it is not bounded."""
    here = Path(__file__)
    environment = {"PYTHONPATH": ":".join(path for path in (*sys.path, str(here.parents[1] / "support")) if path)}
    shown = json.dumps([message.model_dump(exclude_none=True) for message in ASK])
    found = subprocess.run(
        [sys.executable, "-c", _SCRIPT, shown],
        input=json.dumps(HOSTILE),
        env=environment | {"PATH": "/usr/bin:/bin", "HOME": "/nowhere"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    lines = dict(line.split(" | ", 1) for line in found.stdout.splitlines() if " | " in line)
    assert lines.keys() == HOSTILE.keys(), found.stdout
    assert all("its chat template refuses the messages (" in line for line in lines.values())


USUAL = """\
{%- macro shown(content, n=1) -%}{{ content | trim }}{{ '!' * n }}{%- endmacro -%}
{%- set ns = namespace(texts=[], last=-1, all='') -%}
{%- for m in messages if m.role in ('user', 'assistant') -%}
{%- if loop.first and m['role'] == 'user' %}<first>{% endif -%}
{%- set ns.texts = ns.texts + [m.content] -%}{%- set ns.all = ns.all ~ m.role[0] ~ loop.index -%}
{%- if m.content is string and 'o' in m.content and not (m.name is defined) -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{{ shown(m.content, n=loop.index % 2) }}{{ m.content.split('i')[-1].lstrip('\\n') }}{{ m.content[1:] }}|
{%- else -%}none{%- endfor -%}
{% for k, v in {'b': 1, 'a': (1, 2)} | dictsort %}{{ k }}={{ v }};{% endfor %}
{% for m in messages[::-1] %}{% if loop.index0 > 1 %}{% break %}{% endif %}{{ loop.revindex }}{% endfor %}
{% filter upper %}{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(', ') }}{% endfilter %}
{% set block %}{{ messages[-1].content }}{% endset %}{{ block }}{{ ns.last }}{{ ns.all }}{{ ns.texts | length }}
{{ '%s of %3d' % ('a', 7) }} {{ '{}-{:>4}'.format(1, 'x') }} {{ ('a' if messages else 'b') | indent(2, true) }}
{{ messages | tojson }} {{ [1, 2.5, none, true, undefined] }} {{ 7 // 2 }} {{ 2 ** 10 }} {{ 1 < 2 <= 2 != 3 }} {{ nothing }}
{{ messages | map('length') | sum }} {{ 'a,b' | replace(',', ';') }} {{ ['x', 'y'] | join('-') }} {{ '<' | e }} {{ 5 | round(1) }}
{% macro twice() %}{{ caller(1) }}{{ caller(2) }}{% endmacro %}{% call(n) twice() %}{{ n }}{% endcall %}{{ 'b' in {'b': 1} }} {{ messages | first | length }} {{ range(3) | list }}"""


def test_usual_templates_render_as_in_jinjas_own_sandbox() -> None:
    talk = [{"role": "user", "content": " Hi o"}, {"role": "assistant", "content": "Ho"}] * 3
    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "extensions": ["jinja2.ext.loopcontrols"]}
    for template, messages in ((USUAL, talk), ("{% for m in messages %}{% else %}none{% endfor %}", [])):
        expected = ImmutableSandboxedEnvironment(**options).from_string(template).render(messages=messages)
        assert BoundedEnvironment(**options).from_string(template).render(messages=messages) == expected


def test_steps_are_counted_alike_each_time_and_grow_with_what_is_given() -> None:
    outside = LIMITS.set(TemplateLimits(steps=2_000))
    template = BoundedEnvironment().from_string("{% for i in range(n) %}{% endfor %}")
    for _ in range(3):
        assert template.render({"n": 60}) == ""
        with pytest.raises(SecurityError, match=r"takes more than .* steps; target\.template_limits allows more"):
            template.render({"n": 600})
    assert template.render({"n": 600, "messages": ["a" * 1_000]}) == ""
    LIMITS.reset(outside)


def test_the_limits_of_a_target_hold_for_its_template(tiny_target_folder: Path) -> None:
    limits = TemplateLimits(steps=1, steps_each=0)
    tokenizer = load_target_tokenizer(TargetSettings(model=str(tiny_target_folder), template_limits=limits))
    with pytest.raises(InputError, match=r"takes more than 1 steps; target\.template_limits allows more"):
        render_text(tokenizer, ASK)
    tokenizer.template_limits = TemplateLimits(characters=1)
    with pytest.raises(InputError, match=r"characters; target\.template_limits allows 1\)"):
        render_text(tokenizer, ASK)


def test_a_template_of_many_messages_has_steps_to_spare() -> None:
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


@pytest.mark.parametrize(
    ("piece", "limit", "what"),
    [
        ("{{ a }}", "_MOST_NODES", "expressions"),
        ("{% if a %}{% endif %}", "_MOST_SCOPES", "conditions, loops and macros"),
    ],
)
def test_a_template_that_is_too_large_to_compile_ends_the_run(
    piece: str, limit: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A megabyte of them took gigabytes, or minutes, for each prompt anew."""
    monkeypatch.setattr(bounded_templates, limit, 20)
    tokenizer = byte_level_tokenizer(["Hi there"], 262)
    tokenizer.chat_template = piece * 21
    with pytest.raises(
        SlowTemplateError, match=rf"^target\.model: its chat template has [\d,]+ {what}; must have 20 at"
    ):
        render_text(tokenizer, ASK)


def test_a_template_that_takes_many_steps_each_time_ends_the_run() -> None:
    """A log of ten thousand conversations would take days, and would be left out whole."""
    tokenizer = byte_level_tokenizer(["Hi there"], 262)
    tokenizer.chat_template = "{% for i in range(60) %}{% endfor %}"
    tokenizer.template_limits = TemplateLimits(steps=2_500, steps_each=0)
    rendered = 0
    with pytest.raises(SlowTemplateError, match=r"steps for its prompts together; target\.template_limits allows more"):
        for _ in range(1_000):
            render_text(tokenizer, ASK)
            rendered += 1
    assert 64 < rendered < 128
    # One that fails at its limit counts, too; a target that is loaded anew begins anew.
    del tokenizer.template_step_budget
    tokenizer.chat_template = "{% for i in range(1_500) %}{% endfor %}"
    for _ in range(64):
        with pytest.raises(InputError, match="refuses the messages"):
            render_text(tokenizer, ASK)
    with pytest.raises(SlowTemplateError):
        for _ in range(9):
            with suppress(InputError):
                render_text(tokenizer, ASK)
    # So does one that is refused once it has looked at as much.
    del tokenizer.template_step_budget
    tokenizer.chat_template = "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}"
    with pytest.raises(SlowTemplateError):
        for _ in range(99):
            with suppress(InputError):
                render_text(tokenizer, ASK)
    # What is refused before it is done takes nothing.
    del tokenizer.template_step_budget
    tokenizer.chat_template = "{{ 'a' * 10**9 }}"
    for _ in range(99):
        with pytest.raises(InputError, match="refuses the messages"):
            render_text(tokenizer, ASK)


def test_a_copy_takes_steps_by_the_memory_of_its_items() -> None:
    """With a quarter of a step for each, a template filled five gigabytes."""
    environment = BoundedEnvironment()
    value = {"d": {str(i): 0 for i in range(1_000)}, "s": "a" * 1_000, "l": [0] * 1_000}
    for copied in ("d.copy()", "d.items() | list", "s | list", "l + l", "l[:]", "l | reverse"):
        environment.from_string("{% set x = " + copied + " %}").render(value)
        assert environment.taken >= 4_000, copied
    environment.from_string("{% set x = s[1:] + s %}").render(value)
    assert environment.taken < 1_000


def test_a_template_that_cannot_be_compiled_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte takes seconds to read, and each of a log's conversations asked anew."""
    tokenizer = byte_level_tokenizer(["Hi there"], 262)
    tokenizer.chat_template = "{{ 'broken, and read once'"
    said = []
    for _ in range(2):
        with pytest.raises(InputError) as found:
            render_text(tokenizer, ASK)
        said.append(str(found.value))
        monkeypatch.setattr(BoundedEnvironment, "_parse", lambda *args: pytest.fail("was read again"))
    assert said[0] == said[1] and "unexpected" in said[0]
