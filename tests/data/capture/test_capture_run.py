"""A capture of a tiny target: what is stored, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import draftforge.data.capture.capture as capturing
from draftforge import storage
from draftforge.data.capture.capture import capture, capture_conversations
from draftforge.data.capture.plan import plan_shards
from draftforge.data.chat_template import render
from draftforge.data.conversation import Conversation, Message, Split
from draftforge.data.settings import CaptureSettings
from draftforge.data.store import Capture, Sample
from draftforge.errors import ContextLengthError, InputError, LockedError, OwnershipError, StaleInputError
from draftforge.specdec.sampling_settings import SamplingSettings
from draftforge.specdec.target_settings import TargetSettings
from draftforge.specdec.targets import Target

SETTINGS = CaptureSettings(max_new_tokens=12, batch_size=4, top_k=8, tail_samples=4, store_dtype="float32")
SCORED = [SamplingSettings(), SamplingSettings(temperature=0.7, top_p=0.9)]
Capturing = Callable[..., Capture]


def talk(id: str, *texts: str, split: Split = "train", **fields: Any) -> Conversation:
    """Texts of a user; one that begins with `>` is the assistant's."""
    messages = [
        Message(role="assistant" if text.startswith(">") else "user", content=text.removeprefix(">")) for text in texts
    ]
    fields = {"domain": "d", "turn_by_turn": all(message.role == "user" for message in messages), **fields}
    return Conversation(id=id, messages=messages, cluster=id, split=split, **fields)


MIX = [
    talk("plain", "How do I reset my password?", domain="support"),
    talk("warm", "Write a function.", sampling=SamplingSettings(temperature=1.0), max_new_tokens=5),
    talk("dialogue", "What is the capital?", "And of the other country?", "Thanks"),
    talk("logged", "Hello", ">Hi there", "Where is my order?", tools=[{"name": "find"}]),
    talk("seen", "The order has shipped.", split="selection"),
    talk("held", "What is a city?", "Is it large?", split="holdout"),
]


@pytest.fixture(scope="module")
def target(tiny_target_folder: Path) -> Target:
    return Target.load(TargetSettings(model=str(tiny_target_folder)))


@pytest.fixture(scope="module")
def found(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Capture:
    """A capture of MIX, to be read only."""
    folder = tmp_path_factory.mktemp("found") / "capture"
    capture_conversations(target, MIX, SETTINGS, SCORED, folder)
    return Capture.open(folder)


@pytest.fixture
def run(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Capturing:
    """`run(mix, settings, scored, target, name)`: capture a list of conversations and open the result."""

    def start(
        mix: list[Conversation] = MIX,
        settings: CaptureSettings = SETTINGS,
        scored: list[SamplingSettings] = SCORED,
        other_target: Any = None,
        name: str = "capture",
    ) -> Capture:
        monkeypatch.setattr(capturing, "load_mix", lambda folder: mix)
        capture(other_target or target, Path("mix"), settings, scored, tmp_path / name)
        return Capture.open(tmp_path / name)

    return start


def logp_of(target: Target, sample: Sample) -> torch.Tensor:
    """log p [n, V] at each answer token, by one teacher-forced pass."""
    with torch.no_grad():
        states = target.states(torch.tensor([sample.prompt_ids + sample.answer_ids]))
        logits = target.logits(states.hidden_BTH)[0, len(sample.prompt_ids) - 1 : -1]
    return logits.double().log_softmax(-1)


def test_each_turn_is_answered_once_per_setting(found: Capture) -> None:
    train = {sample.id: sample for sample in found.samples("train")}
    assert sorted(train) == sorted(
        ["plain/0/t0", "warm/0/t1", "dialogue/0/t0", "dialogue/1/t0", "dialogue/2/t0", "logged/0/t0", "logged/1/t0"]
    )
    assert [sample.id for sample in found.samples("selection")] == ["seen/0/t0", "seen/0/t0.7-p0.9"]
    assert len(found.samples("holdout")) == 4
    assert train["warm/0/t1"].max_new_tokens == 5
    assert all(len(sample.answer_ids) <= sample.max_new_tokens for sample in train.values())


def test_what_counts_elsewhere_is_not_asked_or_does_not_count(run: Capturing, found: Capture) -> None:
    """Drafts see the same answers of the other turns, with the same signals, as if all counted."""
    left_out = {"dialogue": [0], "logged": [0], "held": [0]}
    gone_from: dict[Split, set[str]] = {"train": {"dialogue/0", "logged/0"}, "selection": set(), "holdout": {"held/0"}}
    fewer = [one.model_copy(update={"asked_elsewhere": left_out.get(one.id, [])}) for one in MIX]
    part = run(fewer, name="fewer")
    for split, gone in gone_from.items():
        kept = {sample.id: sample for sample in found.samples(split) if sample.id.rpartition("/")[0] not in gone}
        assert {sample.id: sample for sample in part.samples(split)} == kept
        for sample in kept.values():
            torch.testing.assert_close(part.logp(sample), found.logp(sample), atol=1e-4, rtol=1e-4)
    answers, fewer_answers = (sum(shard["samples"] for shard in one.manifest["shards"]) for one in (found, part))
    assert fewer_answers == answers - 1  # later turns of the others wait for theirs
    assert "asked_elsewhere" not in MIX[0].model_dump()  # an empty one is no part of a mix's digest


def test_signals_are_those_of_a_teacher_forced_pass(found: Capture, target: Target) -> None:
    for sample in found.samples("train"):
        logp = logp_of(target, sample)
        signals = found.signals(sample)
        if sample.sampling.greedy:
            assert logp.argmax(-1).tolist() == sample.answer_ids
        best = logp.topk(8)
        torch.testing.assert_close(signals.topk_logp_nk.double(), best.values, atol=1e-4, rtol=1e-4)
        own = logp.gather(1, torch.tensor(sample.answer_ids)[:, None])[:, 0]
        torch.testing.assert_close(signals.logp_n.double(), own, atol=1e-4, rtol=1e-4)
        drawn = logp.gather(1, signals.tail_ids_nM.long())
        torch.testing.assert_close(signals.tail_logp_nM.double(), drawn, atol=1e-4, rtol=1e-4)
        total = signals.topk_logp_nk.exp().sum(-1) + signals.tail_logmass_n.exp()
        torch.testing.assert_close(total, torch.ones_like(total), atol=1e-4, rtol=0)
    for sample in found.samples("holdout"):
        own = logp_of(target, sample).gather(1, torch.tensor(sample.answer_ids)[:, None])[:, 0]
        torch.testing.assert_close(found.logp(sample).double(), own, atol=1e-4, rtol=1e-4)


def test_a_later_turn_sees_the_generated_answers_or_the_logged_context(found: Capture, target: Target) -> None:
    samples = {sample.id: sample for sample in found.samples("train")}
    answers = [
        target.tokenizer.decode(samples[f"dialogue/{turn}/t0"].answer_ids, skip_special_tokens=True) for turn in (0, 1)
    ]
    context = talk(
        "", "What is the capital?", f">{answers[0]}", "And of the other country?", f">{answers[1]}", "Thanks"
    )
    assert samples["dialogue/2/t0"].prompt_ids == render(target.tokenizer, context.messages)
    logged = MIX[3]
    assert samples["logged/1/t0"].prompt_ids == render(target.tokenizer, logged.messages, logged.tools)


def test_every_answer_of_a_logged_thread_is_drawn_again_in_its_logged_context(run: Capturing, target: Target) -> None:
    thread = talk("thread", "Hello", ">Hi there", "Where is my order?", ">On its way", "Thanks", ">You are welcome")
    samples = {sample.id: sample for sample in run([thread, *MIX[4:]]).samples("train")}
    assert sorted(samples) == ["thread/0/t0", "thread/1/t0", "thread/2/t0"]
    for turn in range(3):
        context = render(target.tokenizer, thread.messages[: 2 * turn + 1])
        assert samples[f"thread/{turn}/t0"].prompt_ids == context and samples[f"thread/{turn}/t0"].answer_ids


def test_the_order_in_which_train_is_answered_is_the_mixs_own_whatever_its_order(run: Capturing) -> None:
    """Selection and holdout come first, so that a budget cuts the train split; conversations of that by a hash."""
    settings = SETTINGS.model_copy(update={"shard_samples": 3})
    one = run(settings=settings)
    splits = [record["split"] for record in one.manifest["shards"]]
    assert splits == ["selection"] + ["holdout"] * 2 + ["train"] * (len(splits) - 3)
    other = run(MIX[::-1], settings, name="other")
    assert [s.id for s in other.samples("train")] == [s.id for s in one.samples("train")]
    domains = [conversation.domain for conversation in answered_first(60)]
    assert 10 < domains[:30].count("a") < 20


def answered_first(count: int) -> list[Conversation]:
    mix = [talk(f"c{i}", "Hello", domain="ab"[i >= count // 2]) for i in range(count)]
    return [answer.conversation for shard in plan_shards(mix, SETTINGS, []) for answer in shard.answers]


def test_batch_and_order_do_not_change_the_draws(run: Capturing, found: Capture) -> None:
    other = run(MIX[::-1], SETTINGS.model_copy(update={"batch_size": 1})).samples("train")
    assert sorted(other, key=lambda s: s.id) == sorted(found.samples("train"), key=lambda s: s.id)


def test_the_manifest_counts_and_names_its_inputs(found: Capture, target: Target) -> None:
    manifest = found.manifest
    train = found.samples("train")
    assert manifest["complete"] is True
    assert manifest["splits"]["train"]["tokens"] == sum(len(sample.answer_ids) for sample in train)
    assert manifest["splits"]["train"]["domains"]["support"]["samples"] == 1
    assert manifest["tokens"] == sum(split["tokens"] for split in manifest["splits"].values())
    assert manifest["tokens_per_second"] > 0
    assert set(manifest["versions"]) >= {"draftforge", "torch", "transformers"}
    assert found.target_fingerprint == target.fingerprint
    assert found.tokenizer_digest == target.tokenizer_digest
    assert found.vocab_size == target.vocab_size
    assert found.stop_ids == target.stop_ids
    assert found.special_ids >= {0, 1, 2}
    found.check_target(target)


def test_a_prompt_longer_than_the_context_is_refused_or_skipped(run: Capturing, tmp_path: Path) -> None:
    mix = [*MIX, talk("endless", "word " * 600), talk("endless-dialogue", "word " * 600, "more")]
    with pytest.raises(ContextLengthError, match=r"conversation endless\S*, turn 0: the prompt has \d+ tokens"):
        run(mix)
    assert not (tmp_path / "capture").exists()
    found = run(mix, SETTINGS.model_copy(update={"too_long": "skip"}))
    assert len(found.samples("train")) == 7
    skipped = sorted(entry["id"] for entry in found.manifest["skipped"])
    assert skipped == ["endless-dialogue/0/t0", "endless-dialogue/1/t0", "endless/0/t0"]


def test_an_answer_is_clipped_to_the_room_left(run: Capturing, target: Target) -> None:
    mix = [talk("long", "é" * 240)]
    prompt = len(render(target.tokenizer, mix[0].messages))
    room = target.max_positions - prompt
    assert 0 < room < 60
    (sample,) = run(mix, SETTINGS.model_copy(update={"max_new_tokens": 60})).samples("train")
    assert sample.max_new_tokens == room
    assert len(sample.answer_ids) <= room


def test_a_target_without_chat_template_is_refused(
    run: Capturing, target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(target.tokenizer, "chat_template", None)
    with pytest.raises(InputError, match="no chat template"):
        run()
    assert not list(tmp_path.iterdir())


def test_a_folder_begun_with_other_inputs_is_refused_by_name(
    run: Capturing, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    (tmp_path / "capture" / "manifest.json").unlink()
    for attribute, value, named in [
        ("fingerprint", "f" * 64, "another target"),
        ("tokenizer_digest", "f" * 64, "another tokenizer"),
    ]:
        with monkeypatch.context() as patch, pytest.raises(StaleInputError, match=named):
            patch.setattr(target, attribute, value)
            run()
    with monkeypatch.context() as patch, pytest.raises(StaleInputError, match="another template"):
        patch.setattr(target.tokenizer, "chat_template", f"{target.tokenizer.chat_template} ")
        patch.setattr(target, "fingerprint", "f" * 64)
        run()
    with pytest.raises(StaleInputError, match="another mix"):
        run(MIX[1:])
    with pytest.raises(StaleInputError, match=r"another setting max_new_tokens \(12, now 13\)"):
        run(settings=SETTINGS.model_copy(update={"max_new_tokens": 13}))
    with pytest.raises(StaleInputError, match="another setting scored"):
        run(scored=SCORED[:1])
    run(settings=SETTINGS.model_copy(update={"batch_size": 2}))


def test_a_folder_that_is_no_capture_is_left_alone(run: Capturing, tmp_path: Path) -> None:
    (tmp_path / "capture").mkdir()
    (tmp_path / "capture" / "thesis.txt").write_text("precious")
    with pytest.raises(OwnershipError, match=r"thesis\.txt"):
        run()
    assert [path.name for path in (tmp_path / "capture").iterdir()] == ["thesis.txt"]


def test_two_captures_into_one_folder_do_not_meet(run: Capturing, tmp_path: Path) -> None:
    with storage.lock(tmp_path / "capture" / ".lock"), pytest.raises(LockedError):
        run()


def test_a_mix_that_cannot_be_planned_is_refused(run: Capturing) -> None:
    with pytest.raises(InputError, match="mix: 0 conversations"):
        run([])
    with pytest.raises(InputError, match="conversation ids of the mix: plain occurs more than once"):
        run([MIX[0], MIX[0]])
    with pytest.raises(InputError, match="scored sampling settings: t0 occurs more than once"):
        run(scored=[SCORED[0], SCORED[0]])


def test_logits_that_are_not_finite_stop_the_capture(
    run: Capturing, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = target.logits
    monkeypatch.setattr(target, "logits", lambda hidden: logits(hidden) * float("nan"))
    with pytest.raises(InputError, match="logits are not finite"):
        run(MIX[:1], scored=[])
