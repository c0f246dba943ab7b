"""`draftforge generate` with a system prompt and several turns: the ids are those that the target's template makes of
the same messages, whoever gives them."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftforge import api
from draftforge.cli import main
from draftforge.pipeline import generate

SYSTEM = {"role": "system", "content": "Be short."}
USER = {"role": "user", "content": "Where is my order?"}
ANSWER = {"role": "assistant", "content": "Which one?"}
AGAIN = {"role": "user", "content": "Number 7."}
Asks = Callable[..., list[int]]


@pytest.fixture(scope="module")
def target(tiny_target_folder: Path) -> api.Target:
    return api.Target.from_pretrained(str(tiny_target_folder), device="cpu")


@pytest.fixture
def asks(write_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, target: api.Target) -> Asks:
    """The ids that a command line asks the target; nothing is decoded."""
    recipe, seen = write_recipe(), []

    class SeenError(Exception):
        pass

    def look(_: object, ids: list[int], __: object) -> None:
        seen.append(ids)
        raise SeenError

    monkeypatch.setattr(generate, "_answer_ids", look)

    def asked(*words: object) -> list[int]:
        with pytest.raises(SystemExit):
            main(["generate", str(recipe), *map(str, words), "--draft", "none"])
        return seen.pop()

    return asked


def reference(target: api.Target, chat: list[dict[str, Any]], **more: Any) -> list[int]:
    made = target.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False, **more)
    return [int(one) for one in made]


def test_a_system_prompt_and_turns_are_asked_as_the_template_shows_them(
    asks: Asks, target: api.Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "chat.json"
    file.write_text(json.dumps([USER, ANSWER, AGAIN]))
    assert asks(USER["content"]) == reference(target, [USER])
    assert asks(USER["content"], "--system", SYSTEM["content"]) == reference(target, [SYSTEM, USER])
    assert asks("--messages", file) == reference(target, [USER, ANSWER, AGAIN])
    with_system = reference(target, [SYSTEM, USER, ANSWER, AGAIN])
    assert asks("seed=3", "--messages", file, "--system", SYSTEM["content"]) == with_system  # an override, no prompt
    asked = json.dumps({"messages": [SYSTEM, USER, ANSWER, AGAIN]})
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(asked.encode())))
    assert asks("--messages", "-") == with_system
    # Parts of a content are joined as a logged request's are.
    parts = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    file.write_text(json.dumps(parts))
    assert asks("--messages", file) == reference(target, [{"role": "user", "content": "one\ntwo"}])


def test_a_request_shapes_the_prompt_and_what_does_not_is_named(
    asks: Asks, target: api.Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "request.json"
    file.write_text(json.dumps({"model": "m", "messages": [USER], "temperature": 0.5}))
    assert asks("--messages", file) == reference(target, [USER])
    said = f"--messages {file}: not followed: model, temperature; sampling and length are those of the options"
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_verb_and_python_give_the_same_answer(
    write_recipe: Callable[..., Path], target: api.Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "chat.json").write_text(json.dumps([SYSTEM, USER, ANSWER, AGAIN]))
    options = ["--messages", str(tmp_path / "chat.json"), "--draft", "none", "-n", "8"]
    with pytest.raises(SystemExit) as ended:
        main(["generate", str(write_recipe()), *options])
    assert not ended.value.code
    printed = capsys.readouterr().out
    user: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": USER["content"]}]}
    answer = target.generate([SYSTEM, user, ANSWER, AGAIN], max_new_tokens=8)
    shown = answer.text.replace("\x1b", r"\x1b")  # an untrained model's text controls no terminal either
    assert printed.startswith(shown) and "8 tokens in" in printed
