"""Features of the frozen target, cached or not; its head as a teacher; samples side by side as if alone."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftforge.data.batches import Batch, collate
from draftforge.data.store import Capture
from draftforge.specdec.targets import Target
from draftforge.train.families import build
from draftforge.train.families.initial_draft import store_initial_draft
from draftforge.train.families.target_features import Features, FeatureSource, LiveTeacher
from draftforge.train.losses.linear_head import Head
from draftforge.train.settings import DFlashSettings, Eagle3Settings, EagleSettings, MedusaSettings, Settings

N, H, V = 12, 6, 50


@pytest.mark.parametrize("draft", [5, 20, 50])
def test_what_a_reduced_vocabulary_leaves_out_keeps_its_share(draft: int) -> None:
    torch.manual_seed(0)
    hidden_NH, ids = torch.randn(N, H), torch.arange(draft)
    seen: list[int] = []

    def finish(logits: Tensor) -> Tensor:
        seen.append(logits.numel())
        return 3.0 * torch.tanh(logits / 3.0)

    whole = Head(torch.randn(V, H), None, finish)
    logits_NV = whole.logits(hidden_NH)
    features = Features(hidden_NH[None], hidden_NH, logits_NV.logsumexp(-1), logits_NV.argmax(-1))
    part = draft < V
    teacher = LiveTeacher(whole.only(ids) if part else whole, features, ids if part else None, whole)
    seen.clear()
    found = teacher.at(slice(1, 11), (1.0, 2.0, 0.5))
    for lse_C, temperature in zip(found.lse_TC, (1.0, 2.0, 0.5), strict=True):
        torch.testing.assert_close(lse_C, (logits_NV[1:11] / temperature).logsumexp(-1))
    assert max(seen) <= 10 * draft
    assert teacher.at(slice(0, 0), (1.0, 2.0)).lse_TC.shape == (2, 0)


def test_what_nobody_summarised_is_read_off_the_logits() -> None:
    torch.manual_seed(0)
    head, hidden_NH = Head(torch.randn(V, H)), torch.randn(N, H)
    logits_NV = head.logits(hidden_NH)
    told = Features(hidden_NH[None], hidden_NH, logits_NV.logsumexp(-1), logits_NV.argmax(-1))
    ours, theirs = (
        LiveTeacher(head, features, None).at(slice(2, 9), (1.0, 2.0))
        for features in (told._replace(lse_N=None, best_N=None), told)
    )
    torch.testing.assert_close(ours.lse_TC, theirs.lse_TC)
    assert torch.equal(ours.best_C, theirs.best_C) and torch.equal(ours.logits_CV, theirs.logits_CV)


# In float32: a CPU that multiplies in bfloat16 rounds by the shape of the batch.
PACKED: dict[str, Settings] = {
    "eagle3": Eagle3Settings(draft_tokens=3, features_bytes=0, precision="float32"),
    "eagle": EagleSettings(draft_tokens=3, features_bytes=0, feature_noise=0.0, precision="float32"),
    "medusa": MedusaSettings(draft_tokens=3, features_bytes=0, precision="float32"),
    "dflash": DFlashSettings(draft_tokens=3, layers=2, features_bytes=0, precision="float32"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKED)
def test_packed_samples_train_as_they_do_alone(
    name: str, load_tiny_target: Callable[[], Target], tiny_capture: Capture, tmp_path: Path
) -> None:
    """Whatever stands beside a sample in its row: the same loss, the same gradient."""
    init = store_initial_draft(PACKED[name], 0, tiny_capture, tmp_path, load_tiny_target)
    family = build(PACKED[name], init, load_tiny_target, tiny_capture, torch.device("cpu"))
    torch.manual_seed(0)
    with torch.no_grad():  # heads that all differ
        for parameter in family.trainable().values():
            parameter.add_(0.05 * torch.randn_like(parameter))
    samples = tiny_capture.samples("train")[:6]

    def run(batch: Batch, indexes: list[int]) -> tuple[Tensor, list[Tensor]]:
        loss, sums = family(family.inputs(batch, indexes))
        return sums, list(torch.autograd.grad(loss, list(family.trainable().values())))

    packed = collate(samples, row_tokens=10_000)
    assert packed.documents.packed
    sums, grads = run(packed, list(range(6)))
    alone = [run(collate([sample]), [index]) for index, sample in enumerate(samples)]
    torch.testing.assert_close(sums, sum(one[0] for one in alone), rtol=1e-4, atol=1e-4)
    for index, grad in enumerate(grads):
        torch.testing.assert_close(grad, sum(one[1][index] for one in alone), rtol=1e-3, atol=1e-3)


def test_cached_features_are_those_of_a_fresh_run(target: Target, tiny_capture: Capture) -> None:
    samples = tiny_capture.samples("train")
    layers = (1, 2, 4)
    plain = FeatureSource(target, layers, 0, 1 << 20)
    memory = FeatureSource(target, layers, 1 << 30, 1 << 20)
    for indexes in ([3, 0, 5], [5, 1], [0, 3, 1]):
        batch = collate([samples[index] for index in indexes])
        fresh, found = plain(batch, indexes), memory(batch, indexes)
        for ours, theirs in zip(found[1:], fresh[1:]):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        for row, start, length, _ in batch.spans:
            at = slice(start, start + length)
            torch.testing.assert_close(found.aux_BTA[row, at], fresh.aux_BTA[row, at], atol=1e-4, rtol=1e-4)
    again = FeatureSource(target, layers, 1 << 30, 1 << 20)  # another history, the same numbers bit for bit
    batch = collate([samples[1], samples[0]])
    for ours, theirs in zip(again(batch, [1, 0]), memory(batch, [1, 0])):
        assert ours is not None and theirs is not None and torch.equal(ours, theirs)


def test_the_budget_holds(target: Target, tiny_capture: Capture) -> None:
    samples = tiny_capture.samples("train")
    source = FeatureSource(target, (1, 2, 4), 60_000, 1 << 20)
    for index, sample in enumerate(samples):
        source(collate([sample]), [index])
    kept = sum(x.numel() * x.element_size() for known in source._cache.values() for x in known if x is not None)
    assert 0 < kept <= 60_000 and len(source._cache) < len(samples)
