"""Whatever stands in a recipe, a scrape, a GGUF file, a template or a message: a result or one line, and no hang."""

import copy
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from byte_level import byte_level_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from draftforge.cli import main
from draftforge.data.chat_template import render_text
from draftforge.data.conversation import Message
from draftforge.data.redact import Kind, Redactor
from draftforge.errors import DraftforgeError, FormatError, InputError, RecipeError
from draftforge.eval.engine_metrics import parse
from draftforge.recipe import load_recipe
from draftforge.specdec.formats.detect import read_draft
from draftforge.specdec.formats.gguf.file import read_gguf, write_gguf
from draftforge.specdec.formats.gguf.llama import write_llama
from draftforge.specdec.target_settings import TargetSettings, TemplateLimits
from draftforge.specdec.targets import Target

RECIPES = [yaml.safe_load(path.read_text()) for path in sorted(Path(__file__).parents[1].glob("configs/*.yaml"))]
ODD: st.SearchStrategy[Any] = st.sampled_from(
    [
        *(None, True, -1, 2**63, -(2**80), 10**400, 1.5, float("nan"), float("inf"), "", "/", "~", "\ud800", "\0"),
        *("a" * 300, "models:/", "http://[", "file:///", "1e999", "2020-13-01", "²", "9" * 5_000),
        *([], {}, [[]], {"a": {}}, {1: 2}, {None: 1}),
    ]
)
PIECES = st.sampled_from(
    [
        *("ann@mail.org", "4111 1111 1111 1111", "+49 30 901820", "DE89370400440532013000", "192.168.0.1", "::1"),
        *(
            "https://x.y.com/p?sig=abcdef1",
            "password: ",
            "password='",
            "hunter2",
            "token=",
            "Bearer abc123",
            "cookie: a=b",
        ),
        *(
            "-----BEGIN PGP MESSAGE-----",
            "-----END PGP MESSAGE-----",
            "ghp_" + "a1B2" * 9,
            "<key>",
            "<email>",
            "2.13.0.1",
        ),
        *(
            "\\n",
            "\\u0040",
            "%40",
            "&#64;",
            "\u200b",
            "４",
            "．",
            "é",
            "\n",
            " ",
            "\0",
            "\n\0\n",
            "\\",
            "=",
            "/",
            "@",
            ".",
            "-",
        ),
        *('{"a": "', '"}', "[", "]", "{", "}", ":", ",", '"', "'", "name", "value", "v", "==", "0", "1"),
    ]
)
SCRAPE = b"""# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 5.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 20.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 5.0
"""
RESPONSES = b'{"timings": {"predicted_n": 3, "draft_n": 4, "draft_n_accepted": 2}}\n' * 2
INSERTED = [
    b"\0" * 9,
    b"[ " * 2_000,
    b"{" * 700,
    b'"\\ud800"',
    b"1e999",
    b"-",
    b"9" * 5_000,
    b"NaN",
    b"\xff\xfe",
    b"\n",
    b"=",
    b'"',
]


def one_line(work: Callable[[], Any]) -> None:
    """Do it: it may fail by one line of our own."""
    try:
        work()
    except DraftforgeError as error:
        assert "\n" not in str(error)


@st.composite
def mutated(draw: st.DrawFn, whole: bytes) -> bytes:
    """Bytes of a file with some changed, put in, taken out or doubled."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        change = draw(st.integers(0, 3))
        if change == 0 and data:
            data[at] = draw(st.integers(0, 255))
        elif change == 1:
            data[at:at] = draw(st.sampled_from(INSERTED))
        elif change == 2:
            del data[at : at + draw(st.integers(1, 200))]
        else:
            data[at:at] = data[at // 2 : at // 2 + draw(st.integers(1, 300))]
    return bytes(data)


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if place:
        yield place
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(item, (*place, key))


@given(st.data())
@settings(max_examples=60, derandomize=True, suppress_health_check=list(HealthCheck))
def test_recipes_with_odd_values(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    raw = copy.deepcopy(data.draw(st.sampled_from(RECIPES)))
    *inside, last = data.draw(st.sampled_from(sorted(places(raw), key=str)))
    holder = raw
    for key in inside:
        holder = holder[key]
    holder[last] = data.draw(ODD)
    path = tmp_path_factory.mktemp("odd") / "recipe.yaml"
    path.write_text(yaml.safe_dump(raw))
    key = data.draw(
        st.sampled_from(["name", "mix.limit", "mix.sources.0.path", "mix.sources.²", "drafts.small.steps", "x..y"])
    )
    value = data.draw(
        st.sampled_from(
            [
                "1",
                "[",
                "{",
                "*a",
                "&a",
                "!!x",
                "9" * 5_000,
                "2020-13-01",
                "\0",
                "!!python/name:os.system",
                "0x" + "f" * 4_500,
            ]
        )
    )
    try:
        load_recipe(path, [f"{key}={value}"])
    except DraftforgeError as error:  # a line for each thing that is wrong
        assert all(line.strip() for line in str(error).split("\n"))


@given(st.data())
@settings(max_examples=150, derandomize=True)
def test_scrapes_and_responses(data: st.DataObject) -> None:
    text = data.draw(mutated(data.draw(st.sampled_from([SCRAPE, RESPONSES])))).decode(errors="replace")
    one_line(lambda: parse(text, "served"))


@pytest.mark.parametrize("count", ["1e308", "NaN", "+Inf", "-1", "1e200", str(10**400)])
def test_counts_that_no_engine_has(count: str) -> None:
    """Squares of such counts overflow."""
    for text in (SCRAPE.decode().replace(" 5.0", f" {count}"), RESPONSES.decode().replace("4", count)):
        with pytest.raises(InputError, match=r"^served: "):
            parse(text, "served")


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(
        vocab_size=262, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_llama(LlamaForCausalLM(config), byte_level_tokenizer(["Hi there"], 262), path)
    return path


@given(st.data())
@settings(max_examples=60, derandomize=True, suppress_health_check=list(HealthCheck))
def test_gguf_files(gguf: Path, data: st.DataObject) -> None:
    broken = gguf.with_name("broken.gguf")
    broken.write_bytes(data.draw(mutated(gguf.read_bytes()[:2_000])) + gguf.read_bytes()[2_000:])
    one_line(lambda: read_gguf(broken))
    one_line(lambda: read_draft(broken))


@pytest.mark.parametrize("heads", [0, 989855746])
def test_gguf_files_with_numbers_that_fit_nothing(gguf: Path, heads: int) -> None:
    data, key = gguf.read_bytes(), b"llama.attention.head_count" + struct.pack("<I", 4)
    assert data.count(key) == 1
    broken = gguf.with_name("heads.gguf")
    broken.write_bytes(data.replace(key + struct.pack("<I", 2), key + struct.pack("<I", heads)))
    with pytest.raises(FormatError, match=r"heads\.gguf: "):
        read_draft(broken)


def test_gguf_lists_that_ask_for_more_than_the_file_holds(gguf: Path) -> None:
    """transformers takes a list of one number for that number."""
    content, path = read_gguf(gguf), gguf.with_name("list.gguf")
    write_gguf(path, content._replace(fields=content.fields | {"llama.feed_forward_length": [2**31 - 1]}))
    with pytest.raises(FormatError, match=r"list\.gguf asks for 34,\d+,\d+,\d+ weights or more \(137 GB"):
        Target.load(TargetSettings(model=str(path), device="cpu"))


def test_an_error_has_one_line_of_bounded_length_whatever_it_quotes() -> None:
    assert str(InputError("x: role 'a\n\u2028error: b'")) == "x: role 'a  error: b'"
    assert len(str(FormatError("x" * 10**6))) == 4000 and str(RecipeError("a\nb")) == "a\nb"


NAMES = st.sampled_from(
    [
        "messages",
        "m",
        "ns.x",
        "tools",
        "messages[0].content",
        "nothing",
        "[1, 2]",
        "'ab'",
        "1",
        "0",
        "none",
        "range(9)",
        "10**9",
    ]
)
FILTERS = st.sampled_from(
    [
        *(
            "batch(2)",
            "center(99999999)",
            "default('a')",
            "dictsort",
            "first",
            "float",
            "groupby('role')",
            "int",
            "items",
        ),
        *("join(',')", "length", "list", "map('upper')", "max", "replace('a', 'bb')", "reverse", "round(99)", "sort"),
        *(
            "string",
            "sum(start=[])",
            "tojson(indent=99999999)",
            "unique",
            "wordwrap(3)",
            "selectattr('role')",
            "random",
        ),
    ]
)
OPERATIONS = st.sampled_from(
    ["+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "not in", "and", "is", "is not"]
)
EXPRESSIONS = st.recursive(
    NAMES,
    lambda inner: st.one_of(
        st.builds("({}|{})".format, inner, FILTERS),
        st.builds("({} {} {})".format, inner, OPERATIONS, inner),
        st.builds("[{}, {}]".format, inner, inner),
        st.builds("({}, {})".format, inner, inner),
        st.builds("{{{}: {}}}".format, inner, inner),
        st.builds("({})[{}:{}]".format, inner, inner, inner),
        st.builds(
            "({}).{}".format, inner, st.sampled_from(["split('a')", "items()", "x.y", "__class__", "zfill(99999999)"])
        ),
    ),
    max_leaves=6,
)
STATEMENTS = st.recursive(
    st.builds("{{{{ {} }}}}".format, EXPRESSIONS)
    | st.builds("{{% set ns.x = {} %}}".format, EXPRESSIONS)
    | st.sampled_from(
        ["{% set ns = namespace(x=['a']) %}", "{% set ns.x = [ns.x, ns.x] %}", "{% set ns.x = (ns.x, ns.x) %}"]
    ),
    lambda inner: st.one_of(
        st.builds("{{% for m in {} recursive %}}{}{{{{ loop(m) }}}}{{% endfor %}}".format, EXPRESSIONS, inner),
        st.builds("{{% for m in {} %}}{}{{% endfor %}}".format, EXPRESSIONS, inner),
        st.builds("{{% macro f(m) %}}{}{{{{ f(1) }}}}{{% endmacro %}}{{{{ f({}) }}}}".format, inner, EXPRESSIONS),
        st.builds("{}{}".format, inner, inner),
    ),
    max_leaves=5,
)


@given(STATEMENTS)
@settings(max_examples=60, derandomize=True, suppress_health_check=list(HealthCheck))
def test_templates(template: str) -> None:
    tokenizer = byte_level_tokenizer(["Hi there"], 262)
    tokenizer.chat_template = template
    messages = [
        Message(role="user", content="Hi a"),
        Message(role="assistant", content="Ho"),
        Message(role="user", content="?"),
    ]
    tokenizer.template_limits = limits = TemplateLimits(seconds=0.2, megabytes=100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftforge.data.template_process.TemplateLimits", lambda: limits)  # one process for all
        one_line(lambda: render_text(tokenizer, messages, [{"name": "f"}]))


@given(st.lists(PIECES, max_size=14).map("".join))
@settings(max_examples=100, derandomize=True)
def test_redacted_messages_pass_unchanged(text: str) -> None:
    once = Redactor(get_args(Kind), ["US", "DE"]).text(text)
    assert Redactor(get_args(Kind), ["US", "DE"]).text(once) == once


def test_errors_control_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["recipe", "show", str(tmp_path / "gone\x1b[2J\u202e.yaml")])
    assert ended.value.code == 2
    assert "gone\\x1b[2J\\u202e.yaml" in capsys.readouterr().err
