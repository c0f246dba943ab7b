"""Many shards answered as one stream: the same answers and signals that `generate` gives, shard by shard."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import draftforge.data.capture.capture as capturing
import draftforge.data.capture.manifest as capture_folder
import draftforge.data.capture.scheduler as answering
import draftforge.specdec.continuous_batching as plain
from draftforge.data.capture.budget import CaptureBudget
from draftforge.data.capture.plan import Prompts, ShardPlan, plan_shards
from draftforge.data.capture.scheduler import ShardAnswers, answer_shards
from draftforge.data.conversation import SPLITS, Conversation, Message
from draftforge.data.settings import CaptureSettings
from draftforge.data.split import seed_of
from draftforge.data.store import Capture, Sample
from draftforge.data.teacher_logprobs import Signals, teacher_signals
from draftforge.specdec.cuda_graphs import Shapes
from draftforge.specdec.decoder import generate
from draftforge.specdec.requests import Request
from draftforge.specdec.sampling import Purpose, uniforms
from draftforge.specdec.sampling_settings import SamplingSettings
from draftforge.specdec.target_settings import TargetSettings
from draftforge.specdec.targets import Target

SETTINGS = CaptureSettings(
    max_new_tokens=12, batch_size=4, top_k=8, tail_samples=4, store_dtype="float32", shard_samples=3
)
SCORED = [SamplingSettings(), SamplingSettings(temperature=0.7, top_p=0.9)]
ASKED = [None, SamplingSettings(temperature=1.0), SamplingSettings(temperature=0.8, repetition_penalty=1.2)]
MIX = [
    Conversation(
        id=f"c{i}",
        domain="d",
        messages=[Message(role="user", content="Where is my order? " * (1 + i % 3))] * (1 + (i % 5 == 0) * 2),
        turn_by_turn=True,
        cluster=f"c{i}",
        split=("train", "train", "selection", "holdout")[i % 4],
        sampling=ASKED[i % 3],
        max_new_tokens=(None, 3)[i % 7 == 6],
    )
    for i in range(15)
]


@pytest.fixture(scope="module")
def target(tiny_target_folder: Path) -> Target:
    return Target.load(TargetSettings(model=str(tiny_target_folder)))


@pytest.fixture
def fixed_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of few sizes, as on a GPU."""

    shapes = lambda slots, capacity, graphed: Shapes(slots, capacity, fixed=True)  # noqa: E731
    monkeypatch.setattr("draftforge.specdec.cuda_graphs._FEWEST", 2)
    monkeypatch.setattr(answering, "PlainDecoder", partial(plain.PlainDecoder, shapes=shapes))


def run(target: Target, settings: CaptureSettings = SETTINGS) -> Iterator[tuple[ShardPlan, ShardAnswers]]:
    shards = plan_shards(MIX, settings, SCORED)
    prompts = Prompts(target, shards, settings)
    return answer_shards(target, shards, prompts, settings, CaptureBudget(Path(), shards, [], prompts, settings, None))


Reference = dict[str, tuple[list[int], Signals]]


@pytest.fixture(scope="module")
def reference(target: Target) -> Reference:
    """Answer and signals of every sample by its id: the same requests through `generate`, one signal at a time."""
    samples = [sample for _, answers in run(target) for sample in answers.samples]
    requests = [
        Request(s.prompt_ids, s.sampling, seed_of(SETTINGS.seed, s.id), s.max_new_tokens, target.stop_ids)
        for s in samples
    ]
    answers = dict(generate(target, None, requests, batch_size=3))
    return {s.id: (answers[i].tokens, _signals(target, s, answers[i].tokens)) for i, s in enumerate(samples)}


@torch.no_grad()
def _signals(target: Target, sample: Sample, answer: list[int]) -> Signals:
    ids_1T = torch.tensor([[*sample.prompt_ids, *answer[:-1]]])
    logits_NV = target.logits(target.states(ids_1T).hidden_BTH[0, len(sample.prompt_ids) - 1 :])
    seed_N = torch.full((len(answer),), seed_of(SETTINGS.seed, f"{sample.id}/tail"))
    u_NM = uniforms(seed_N, torch.arange(len(answer)), Purpose.FINAL, SETTINGS.tail_samples)
    return teacher_signals(logits_NV, torch.tensor(answer), u_NM, SETTINGS.top_k)


def check(expected: Reference, found: list[tuple[ShardPlan, ShardAnswers]]) -> None:
    samples = [sample for _, answers in found for sample in answers.samples]
    assert len(samples) == sum(len(shard.answers) for shard in plan_shards(MIX, SETTINGS, SCORED)) == len(expected)
    for shard, answers in found:
        assert [sample.id for sample in answers.samples] == [answer.id for answer in shard.answers]
        assert [sample.answer_ids for sample in answers.samples] == [expected[s.id][0] for s in answers.samples]
        for name in Signals._fields if shard.split == "train" else ("logp_n",):
            signals = torch.cat([getattr(expected[sample.id][1], name) for sample in answers.samples])
            torch.testing.assert_close(answers.columns[name], signals, atol=1e-4, rtol=1e-4)
        assert set(answers.columns) == ({*Signals._fields} if shard.split == "train" else {"logp_n"})


@pytest.mark.slow
def test_answers_and_signals_are_those_of_generate(target: Target, reference: Reference) -> None:
    check(reference, list(run(target)))


def test_they_are_with_few_sizes_of_passes(target: Target, reference: Reference, fixed_shapes: None) -> None:
    check(reference, list(run(target)))


def test_later_shards_are_begun_before_earlier_ones_are_complete(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    decode = plain.PlainDecoder._decode

    def watched(self: plain.PlainDecoder) -> None:
        sizes.append(self._active)
        decode(self)

    monkeypatch.setattr(plain.PlainDecoder, "_decode", watched)
    shards = list(run(target))
    tokens = sum(len(sample.answer_ids) - 1 for _, answers in shards for sample in answers.samples)
    assert len(shards) > 6
    assert sum(sizes) == tokens
    assert len(sizes) < 1.5 * tokens / SETTINGS.batch_size  # slots are full nearly always


@pytest.mark.slow
def test_a_turn_that_outgrows_the_slots_gets_larger_ones(
    target: Target, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first turns' prompts are known at the start; those of later ones are estimated, where memory allows."""

    def capacities(memory: int) -> list[int]:
        found: list[int] = []

        def fitting(target: Target, token_bytes: int, slots: int, least: int, wanted: int) -> int:
            found.append(max(least, min(wanted, memory)))
            return found[-1]

        monkeypatch.setattr(plain, "fitting_capacity", fitting)
        check(reference, list(run(target)))
        return found

    little, much = capacities(0), capacities(10**6)
    assert len(little) > 1 and little == sorted(little)
    assert len(much) < len(little) and little[0] < much[0] <= target.max_positions


def test_a_stopped_stream_resumes_to_the_same_capture(
    target: Target, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, left = capture_folder.write_shard, iter(range(3))

    def stop(*args: object) -> Path:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return write(*args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(capture_folder, "write_shard", stop)
        capturing.capture_conversations(target, MIX, SETTINGS, SCORED, tmp_path)
    assert len(list((tmp_path / "shards").glob("*.json"))) == 3
    capturing.capture_conversations(target, MIX, SETTINGS, SCORED, tmp_path)
    resumed = Capture.open(tmp_path)
    samples = [sample for split in SPLITS for sample in resumed.samples(split)]
    assert {sample.id: sample.answer_ids for sample in samples} == {id: tokens for id, (tokens, _) in reference.items()}
    for sample in samples:
        torch.testing.assert_close(resumed.logp(sample), reference[sample.id][1].logp_n, atol=1e-4, rtol=1e-4)
