"""Rendered prompts taken apart: what a template renders again gives the same text, and everything unsure is left."""

import tracemalloc

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftforge.data.logs.parsing import arguments, fields, is_cut, literal, seconds, unrender

TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if enable_thinking == false %}<think>\n\n</think>\n\n{% endif %}",
    "llama3": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
    "Today Date: {{ date_string or '26 Jul 2024' }}\n\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}"
    "<|eot_id|>"
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>{% endfor %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "gemma": "<bos>{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content }}<end_of_turn>\n{% endfor %}<start_of_turn>model\n",
}
TEXT = st.text(min_size=1, max_size=30).filter(lambda text: text.strip() == text and "<" not in text)


def rendered(template: str, messages: list[dict[str, str]], **arguments: object) -> str:
    text: str = jinja2.Template(TEMPLATES[template], keep_trailing_newline=True).render(messages=messages, **arguments)
    return text


@pytest.mark.slow
@given(st.sampled_from(sorted(TEMPLATES)), st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3), st.booleans(), TEXT)
def test_messages_come_back(template: str, pairs: list[tuple[str, str]], has_system: bool, system: str) -> None:
    talk = [message for user, said in pairs for message in (("user", user), ("assistant", said))][:-1]
    if has_system and template != "gemma":
        talk.insert(0, ("system", system))
    messages = [{"role": role, "content": content} for role, content in talk]
    found = unrender(rendered(template, messages))
    assert found is not None and found.messages == messages
    assert rendered(template, found.messages, **found.template_args) == rendered(template, messages)
    contents = [message["content"] for message in found.messages]
    assert "".join(text for pair in zip(found.pieces, [*contents, ""]) for text in pair) == rendered(template, messages)


@given(st.sampled_from(sorted(TEMPLATES)), TEXT, st.data())
def test_no_cut_prompt_is_taken_for_a_whole_one(template: str, user: str, data: st.DataObject) -> None:
    prompt = rendered(template, [{"role": "user", "content": user}])
    assert unrender(prompt[: data.draw(st.integers(0, len(prompt) - 1))]) is None


def test_thinking_switched_off_is_an_argument() -> None:
    prompt = rendered("chatml", [{"role": "user", "content": "Hi"}], enable_thinking=False)
    found = unrender(prompt)
    assert found is not None and found.template_args == {"enable_thinking": False}
    assert rendered("chatml", found.messages, **found.template_args) == prompt


@pytest.mark.parametrize(
    "prompt",
    [
        "Once upon a time",
        "",
        "<|im_start|>assistant\n",
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nSure,",
        "<|im_start|>user\nHi<|vision_start|><|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>critic\nHi<|im_end|>\n<|im_start|>assistant\n",
        "Before <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\nHi<|im_end|>\n",
        "<bos><start_of_turn>user\nHi<start_of_image><end_of_turn>\n<start_of_turn>model\n",
        "<|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\nx<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜>",
        "[INST] Hi [/INST]",
    ],
)
def test_unsure_prompts_are_left(prompt: str) -> None:
    assert unrender(prompt) is None


@given(
    st.dictionaries(
        st.from_regex(r"[a-z_]{1,8}", fullmatch=True),
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers()
            | st.floats(allow_nan=False, allow_infinity=False)
            | st.text(max_size=12),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
            max_leaves=6,
        ),
    )
)
def test_printed_values_come_back(values: dict[str, object]) -> None:
    equals = ", ".join(f"{name}={value!r}" for name, value in values.items())
    colons = ", ".join(f"{name}: {value!r}" for name, value in values.items())
    for parts in (fields(equals), fields(colons), arguments(f"Name({equals})")):
        assert {name: literal(part) for name, part in parts.items()} == values


@pytest.mark.parametrize(
    "text", ["b'x'", "{1}", "1j", "...", "0xff", "'a' 'b'", "nan", "(1", "'a", "1+1", "[" * 200 + "]" * 200, "f('x')"]
)
def test_what_json_has_not_is_no_literal(text: str) -> None:
    assert literal(text) is None and literal(f"{{'a': {text}}}") is None


def test_tuples_and_keys_that_are_numbers_are_read_as_json_has_them() -> None:
    assert literal("{'a': (1, (), ('x',)), 7: -1.5e-05, -2: {}}") == {"a": [1, [], ["x"]], "7": -1.5e-05, "-2": {}}


def test_printed_values_take_little_memory() -> None:
    """Python's own parser takes 470 times such a text."""
    text = f"[{'{0:0},' * 20_000}0]"
    tracemalloc.start()
    try:
        assert literal(text) is not None
        assert tracemalloc.get_traced_memory()[1] < 100 * len(text)
    finally:
        tracemalloc.stop()


def test_objects_between_values_are_passed_over() -> None:
    parts = arguments("Req(a=<X at 0x1>, b=[1, (2, 3)], c=Inner(d='),', e=None), f='x'), out={'g': 1}")
    assert parts == {"a": "<X at 0x1>", "b": "[1, (2, 3)]", "c": "Inner(d='),', e=None)", "f": "'x'"}
    assert literal(parts["a"]) is None
    assert is_cut("'aa' ... 'bb'") and is_cut("[1, 2] ... [8, 9]") and not is_cut("'well ... no'")


@pytest.mark.parametrize(
    "value, expected",
    [
        (1795860000, 1795860000.0),
        (1795860000.5, 1795860000.5),
        ("1795860000.5", 1795860000.5),
        (1795860000500, 1795860000.5),
        (1795860000500000, 1795860000.5),
        (1795860000500000000, 1795860000.5),
        ("2026-11-28T10:00:00Z", 1795860000.0),
        ("2026-11-28T11:00:00+01:00", 1795860000.0),
        ("2026-11-28 10:00:00", 1795860000.0),
        ("2026-11-28 10:00:00,500", 1795860000.5),
        ("2026-11-28T10:00:00.500000000Z", 1795860000.5),
        ("2026-11-28 10:00:00.500000 UTC", 1795860000.5),
        ("28/Nov/2026:11:00:00 +0100", 1795860000.0),
        ("[28/Nov/2026:10:00:00 +0000]", 1795860000.0),
        ("Sat, 28 Nov 2026 10:00:00 GMT", 1795860000.0),
        ("28/Nev/2026:11:00:00 +0100", None),
        ("11/28/2026 10:00:00", None),
        ("11-28 10:00:00", None),
        ("soon", None),
        ("nan", None),
        (True, None),
        (None, None),
        ([], None),
    ],
)
def test_times(value: object, expected: float | None) -> None:
    assert seconds(value) == expected
