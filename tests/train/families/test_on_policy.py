"""On-policy distillation: whose answers a batch holds, who judges them, and what a step of them weighs."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from draftforge.data.batches import Batch, BatchPlan, TokenizedSample, collate
from draftforge.data.split import seed_of
from draftforge.data.store import Capture, Sample
from draftforge.errors import DeviceMemoryError, InputError
from draftforge.specdec.continuous_batching import PlainDecoder
from draftforge.specdec.decoder import generate
from draftforge.specdec.drafts.small import SmallDraft
from draftforge.specdec.models import CausalModel
from draftforge.specdec.requests import Request
from draftforge.specdec.sampling_settings import SamplingSettings
from draftforge.specdec.target_settings import TargetSettings
from draftforge.specdec.targets import Target
from draftforge.train.families import build, on_policy
from draftforge.train.families.initial_weights import prune
from draftforge.train.families.on_policy import Exchange, exchanges_of
from draftforge.train.families.small import SmallFamily
from draftforge.train.loop import train
from draftforge.train.losses.linear_head import COUNT, LossSettings
from draftforge.train.losses.objectives import FullDistribution
from draftforge.train.settings import LoraSettings, OnPolicySettings, SmallSettings

STEP = 5


@pytest.fixture
def target(load_tiny_target: Callable[[], Target]) -> Target:
    return load_tiny_target()


def family_of(target: Target, own: dict[str, Any] | None = None, **update: Any) -> SmallFamily:
    settings = SmallSettings(layers=2, on_policy=OnPolicySettings(**(own or {"share": 1.0})), **update)
    draft = SmallDraft(prune(target, [0, 3])).to(target.device)
    family = SmallFamily(draft, settings, LossSettings({"kl": 1.0}), target)
    family.step = STEP
    return family


def batch_of(samples: Sequence[TokenizedSample], row_tokens: int = 0) -> Batch:
    return collate(samples, None, row_tokens)


def drawn(
    family: SmallFamily, samples: Sequence[Sample], indexes: Sequence[int] | None = None, row_tokens: int = 0
) -> list[Exchange]:
    indexes = range(len(samples)) if indexes is None else indexes
    batch = batch_of(samples, row_tokens).to(family.draft.lm.device)
    return exchanges_of(family.inputs(batch, indexes).batch)


def plainly(
    model: CausalModel,
    samples: Sequence[Sample],
    indexes: Sequence[int],
    stop_ids: frozenset[int],
    temperature: float = 1.0,
) -> list[list[int]]:
    """Answers by the speculative decoder without a proposer."""
    sampling = SamplingSettings(temperature=temperature)
    seeds = [seed_of(index, f"on policy/{STEP}") for index in indexes]
    requests = [
        Request(sample.prompt_ids, sampling, seed, len(sample.answer_ids), stop_ids)
        for sample, seed in zip(samples, seeds, strict=True)
    ]
    with torch.no_grad():
        found = dict(generate(model, None, requests))
    return [found[number].tokens for number in range(len(requests))]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_answers_are_what_the_draft_says(temperature: float, tiny_capture: Capture, target: Target) -> None:
    samples, indexes = tiny_capture.samples("train")[:5], [7, 3, 0, 8, 4]
    family = family_of(target, {"share": 1.0, "temperature": temperature})
    own = drawn(family, samples, indexes)
    assert [exchange.prompt_ids for exchange in own] == [sample.prompt_ids for sample in samples]
    expected = plainly(family.draft.lm, samples, indexes, target.stop_ids, temperature)
    assert [exchange.answer_ids for exchange in own] == expected
    assert all(exchange.answer_ids != sample.answer_ids for exchange, sample in zip(own, samples))
    assert drawn(family, samples, indexes) == own
    family.step += 1
    assert (drawn(family, samples, indexes) == own) == (temperature == 0.0)


def test_the_target_judges_the_drafts_tokens(tiny_capture: Capture, target: Target) -> None:
    """Its numbers are those of a plain pass over each own answer; the loss is their kl, summed."""
    samples, family = tiny_capture.samples("train")[:4], family_of(target, row_tokens=60)
    inputs = family.inputs(batch_of(samples, 60), range(4))
    assert inputs.features is not None and inputs.batch.documents.packed
    loss, sums = family(inputs)
    expected, lse = 0.0, []
    exchanges = exchanges_of(inputs.batch)
    for prompt_ids, answer_ids in exchanges:
        ids, rows = torch.tensor([prompt_ids + answer_ids]), slice(len(prompt_ids) - 1, -1)
        with torch.no_grad():
            logits = target.logits(target.states(ids).hidden_BTH)[0, rows]
            logq = family.draft.logits(family.draft(ids))[0, rows].log_softmax(-1)
        logp = logits.log_softmax(-1)
        lse.append(logits.logsumexp(-1))
        expected += float((logp.exp() * (logp - logq)).sum())
    taught = family.rows(inputs).teacher.at(slice(None), [1.0])
    assert isinstance(taught, FullDistribution)
    torch.testing.assert_close(taught.lse_TC[0], torch.cat(lse), atol=1e-4, rtol=1e-4)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-4)
    assert int(sums[0, COUNT]) == sum(len(exchange.answer_ids) for exchange in exchanges)


def test_about_a_share_of_the_samples_whoever_stands_beside_them(tiny_capture: Capture, target: Target) -> None:
    samples, family = tiny_capture.samples("train"), family_of(target, {"share": 0.5})
    together = drawn(family, samples, row_tokens=100)
    recorded = [Exchange(sample.prompt_ids, sample.answer_ids) for sample in samples]
    kept = [mine == theirs for mine, theirs in zip(together, recorded)]
    assert 0 < sum(kept) < len(kept)
    halves = drawn(family, samples[:3]), drawn(family, samples[3:], range(3, len(samples)))
    assert halves[0] + halves[1] == together
    assert family._own_answers is not None
    own = [sum(family._own_answers._chosen(index, step) for step in range(50)) for index in range(50)]
    assert sum(own) / 2500 == pytest.approx(0.5, abs=0.03)
    assert min(own) > 0 and max(own) < 50  # everyone's turn comes


def test_a_batch_is_packed_as_the_plan_packs(tiny_capture: Capture, target: Target) -> None:
    samples, family = tiny_capture.samples("train"), family_of(target, row_tokens=1000)
    batch = family.inputs(batch_of(samples, 1000), range(len(samples))).batch
    assert len(batch.ids_BT) == 1
    assert len(batch_of(exchanges_of(batch)).ids_BT) > 1
    assert batch.signals is None and batch.documents.packed
    nothing = collate([])
    assert family.inputs(nothing, []).batch is nothing


def test_a_stop_token_ends_an_own_answer(tiny_capture: Capture, target: Target) -> None:
    samples = tiny_capture.samples("train")[:4]
    target.stop_ids = frozenset()
    endless = [exchange.answer_ids for exchange in drawn(family_of(target), samples)]
    assert [len(answer) for answer in endless] == [len(sample.answer_ids) for sample in samples]
    stop = max(endless, key=len)[2]
    target.stop_ids = frozenset({stop})
    ended = [exchange.answer_ids for exchange in drawn(family_of(target), samples)]
    assert ended == [answer[: answer.index(stop) + 1] if stop in answer else answer for answer in endless]
    assert ended != endless
    target.stop_ids = frozenset()
    capped = drawn(family_of(target, {"share": 1.0, "max_new_tokens": 2}), samples)
    assert [exchange.answer_ids for exchange in capped] == [answer[:2] for answer in endless]


def test_the_draft_as_it_is_now_answers_and_is_left_as_it_was(
    tiny_capture: Capture, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters included; a decoder is made once and follows the weights."""
    made: list[tuple[int, int, int]] = []

    def making(lm: CausalModel, slots: int, capacity: int, budget: int) -> PlainDecoder:
        assert not lm.model.training
        made.append((slots, capacity, budget))
        return PlainDecoder(lm, slots, capacity, budget)

    monkeypatch.setattr(on_policy, "PlainDecoder", making)
    samples = tiny_capture.samples("train")[:3]
    family = family_of(target, activation_checkpointing=True, lora=LoraSettings(rank=4))
    before = drawn(family, samples)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in family.trainable().values():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    inputs = family.inputs(batch_of(samples), range(3))
    after = [exchange.answer_ids for exchange in exchanges_of(inputs.batch)]
    assert after == plainly(family.export().lm, samples, range(3), target.stop_ids)
    assert after != [exchange.answer_ids for exchange in before]
    assert len(made) == 1 and made[0][0] == 4 and made[0][1] == made[0][2] >= max(p.length for p in inputs.batch.spans)
    assert all(
        layer.training for layer in family.draft.model.get_decoder().layers
    )  # or no activations would be recomputed
    family(inputs)[0].backward()
    gradients = [parameter.grad for parameter in family.trainable().values()]
    assert all(gradient is not None and not gradient.is_inference() for gradient in gradients)
    drawn(family, tiny_capture.samples("train")[:9])
    assert len(made) == 2


def test_a_step_is_divided_by_the_recorded_tokens(
    tiny_capture: Capture, load_tiny_target: Any, tmp_path: Path, recorder: Any
) -> None:
    settings = SmallSettings(
        layers=2,
        steps=1,
        warmup_steps=0,
        tokens_per_step=240,
        precision="float32",
        engine="torch",
        accumulation=2,
        on_policy=OnPolicySettings(share=1.0, max_new_tokens=3),
    )
    train(settings, 0, tiny_capture, tmp_path / "t", load_tiny_target, recorder)
    samples = tiny_capture.samples("train")
    step = next(BatchPlan(samples, 240, seed=0).steps())
    family = build(settings, tmp_path / "t" / "init", load_tiny_target, tiny_capture, torch.device("cpu"))
    inputs = family.inputs(batch_of([samples[index] for index in step.samples]), step.samples)
    loss = family(inputs)[0]
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in family.parameters() if p.grad is not None])
    assert inputs.batch.supervised < step.supervised
    assert recorder.losses[1] == pytest.approx(float(loss.detach()) / step.supervised, rel=1e-4)
    assert recorder.rows[0][1]["gradient_norm"] == pytest.approx(float(norm) / step.supervised, rel=1e-4)


def test_no_room_to_sample_names_the_setting(
    tiny_capture: Capture, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(*args: object) -> PlainDecoder:
        raise InputError("batch_size 2: 0.1 GB are free")

    monkeypatch.setattr(on_policy, "PlainDecoder", refusing)
    with pytest.raises(
        DeviceMemoryError, match=r"draft\.on_policy: no room to sample .*0\.1 GB.*lower tokens_per_step"
    ):
        drawn(family_of(target), tiny_capture.samples("train")[:2])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_captured_passes_follow_the_weights(tiny_capture: Capture, tiny_target_folder: Path) -> None:
    target = Target.load(TargetSettings(model=str(tiny_target_folder), device="cuda", dtype="float32"))
    samples, family = tiny_capture.samples("train")[:5], family_of(target)
    before = drawn(family, samples)
    with torch.no_grad():
        for parameter in family.draft.parameters():
            parameter.mul_(1.1)
    after = [exchange.answer_ids for exchange in drawn(family, samples)]
    assert after == plainly(family.draft.lm, samples, range(5), target.stop_ids)
    assert after != [exchange.answer_ids for exchange in before]
    family(family.inputs(batch_of(samples).to("cuda"), range(5)))[0].backward()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"on_policy": {"share": 0.0}}, "greater than 0"),
        ({"on_policy": {"share": 1.5}}, "less than or equal to 1"),
        ({"on_policy": {"temperature": -1.0}}, "greater than or equal to 0"),
        ({"on_policy": {"max_new_tokens": 0}}, "greater than or equal to 1"),
        ({"on_policy": {}, "zero_stage": 3}, "zero_stage 3: splits weights, which on_policy needs whole; set 2"),
    ],
)
def test_settings_that_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SmallSettings.model_validate({"layers": 2, **fields})


def test_it_needs_the_target_and_is_another_training() -> None:
    plain, own = SmallSettings(layers=2), SmallSettings(layers=2, on_policy=OnPolicySettings())
    assert SmallFamily.needs_target(own) and not SmallFamily.needs_target(plain)
    assert "on_policy" not in plain.identity()  # trained before there was such a setting
    assert own.identity()["on_policy"] == {"share": 0.5, "temperature": 1.0, "max_new_tokens": None}
