"""What a capture finds out about its prompts before anything is answered."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from draftforge.data.capture.capture import capture_conversations
from draftforge.data.conversation import Conversation, LoggedPrompt, Message
from draftforge.data.logs.parsing import prompt_digest
from draftforge.data.settings import CaptureSettings
from draftforge.data.store import Capture
from draftforge.errors import InputError
from draftforge.specdec.sampling_settings import SamplingSettings
from draftforge.specdec.targets import Target

SETTINGS = CaptureSettings(max_new_tokens=2, batch_size=4, top_k=4, tail_samples=1)
STRICT = """\
{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}\
{% endif %}{{ m.role + ': ' + m.content }}{% endfor %}"""


@pytest.fixture
def template(target: Target) -> Iterator[Callable[[str], None]]:
    """Sets the target's chat template for a test."""
    own = target.tokenizer.chat_template
    yield lambda text: setattr(target.tokenizer, "chat_template", text)
    target.tokenizer.chat_template = own


def talk(id: str, *roles: str, **more: Any) -> Conversation:
    messages = [Message(role=role, content=f"{role} {i}") for i, role in enumerate(roles)]
    more = {"domain": "d", "split": "train", "where": f"log.jsonl:{id}", **more}
    return Conversation(id=id, messages=messages, cluster=id, **more)


def run(target: Target, mix: list[Conversation], folder: Path, **more: Any) -> Capture:
    capture_conversations(target, mix, SETTINGS, [SamplingSettings()], folder, **more)
    return Capture.open(folder)


def test_what_the_template_refuses_is_named_by_file_and_line(
    target: Target, tmp_path: Path, template: Callable[[str], None]
) -> None:
    template(STRICT)
    with pytest.raises(InputError, match=r"^log.jsonl:7, turn 0: .*\(must alternate\); `skip_invalid` of its source"):
        run(target, [talk("1", "user"), talk("7", "system", "user")], tmp_path / "capture")
    assert not (tmp_path / "capture").exists()


def test_what_the_template_refuses_may_be_skipped_and_is_counted(
    target: Target, tmp_path: Path, template: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    template(STRICT)
    refused = [talk("7", "system", "user", skip_invalid=True), talk("8", "user", "user", skip_invalid=True)]
    later = talk("9", "user", "assistant", "user", "user", skip_invalid=True)  # its first turn can be asked
    found = run(target, [talk("1", "user"), *refused, later], tmp_path / "capture")
    assert [(s.conversation, s.turn) for s in sorted(found.samples("train"), key=lambda s: s.id)] == [
        ("1", 0),
        ("9", 0),
    ]
    skipped = {one["id"]: one["reason"] for one in found.manifest["skipped"]}
    assert set(skipped) == {"7/0/t0", "8/0/t0", "9/1/t0"}
    assert all("must alternate" in reason for reason in skipped.values())
    assert "turns left out: 3, 3 as " in capsys.readouterr().err


def test_a_prompt_that_is_rendered_otherwise_than_it_was_logged_is_left_out(
    target: Target, tmp_path: Path, template: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the source allows: the engine's log says what was asked."""
    template("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    logged = "<user>user 0<assistant>assistant 1<user>user 2"
    same, other = (
        talk(id, "user", "assistant", "user", logged_prompts=[LoggedPrompt(turn=1, digests=[prompt_digest(text)])])
        for id, text in (("1", logged), ("2", logged + "\n"))
    )
    found = run(target, [same, other], tmp_path / "capture", may_be_unanswered=())
    assert {(s.conversation, s.turn) for s in found.samples("train")} == {("1", 0), ("1", 1)}
    reason = "its chat template makes another prompt of the messages than the logged one"
    skipped = {one["id"]: one["reason"] for one in found.manifest["skipped"]}
    assert skipped == {"2/0/t0": reason, "2/1/t0": reason}
    assert f"turns left out: 2, 2 as {reason}" in capsys.readouterr().err
    with pytest.raises(InputError, match="or makes other prompts than the logged ones"):
        run(target, [other], tmp_path / "other", may_be_unanswered=())


def test_a_domain_that_nothing_can_be_asked_of_ends_the_run(
    target: Target, tmp_path: Path, template: Callable[[str], None]
) -> None:
    template(STRICT)
    mix = [talk("1", "user"), talk("7", "system", "user", skip_invalid=True, domain="lost")]
    with pytest.raises(InputError, match=r"^capture: no turn of 'lost' can be asked"):
        run(target, mix, tmp_path / "capture", may_be_unanswered=())
    assert not (tmp_path / "capture").exists()
    assert run(target, mix, tmp_path / "capture", may_be_unanswered=["lost"]).samples("train")


def test_ids_past_the_embedding_rows_are_refused_before_any_answer(
    target: Target, tmp_path: Path, template: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(target), "embedding_rows", 300)
    rows = 300
    assert max(target.tokenizer.get_vocab().values()) == rows - 1
    target.check_ids([0, rows - 1])
    with pytest.raises(InputError, match=rf"has token {rows} \(.*\), the embeddings have {rows} rows"):
        target.check_ids([0, rows])
    # Also those that only a later turn, which waits for an answer, would ask for.
    last = max(target.tokenizer.get_vocab(), key=target.tokenizer.get_vocab().get)
    monkeypatch.setattr(type(target), "embedding_rows", rows - 1)
    asked = talk("3", "user", "user", turn_by_turn=True)
    asked = asked.model_copy(
        update={"messages": [Message(role="user", content="Hi"), Message(role="user", content=last)]}
    )
    with pytest.raises(InputError, match=rf"^log.jsonl:3, turn 1: .*has token {rows - 1} "):
        run(target, [talk("1", "user"), asked], tmp_path / "capture")
    assert not (tmp_path / "capture").exists()
