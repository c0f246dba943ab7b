"""Signals against brute force, and the estimator they make against the expectation it estimates."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftforge.data.teacher_logprobs import FLOOR, Signals, emitted_logp, teacher_signals

torch.set_num_threads(1)


def draw_logits(rows: int, vocab: int, scale: float = 3.0, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def even(count: int) -> Tensor:
    """Midpoints of `count` equal parts of [0, 1): drawing with them hits each token in proportion, within one."""
    return ((torch.arange(count, dtype=torch.float64) + 0.5) / count)[None]


def estimate(signals: Signals, f_V: Tensor) -> Tensor:
    """sum_topk p f + (1 - P_k) / M * sum_m f(s_m), a row."""
    top = (signals.topk_logp_nk.double().exp() * f_V[signals.topk_ids_nk.long()]).sum(-1)
    return top + signals.tail_logmass_n.double().exp() * f_V[signals.tail_ids_nM.long()].mean(-1)


@pytest.mark.parametrize("vocab", [3, 64, 300, 8191])
@pytest.mark.parametrize("top_k", [1, 8, 64])
def test_equals_brute_force(vocab: int, top_k: int) -> None:
    logits = draw_logits(5, vocab)
    tokens = torch.arange(5) % vocab
    signals = teacher_signals(logits, tokens, torch.rand(5, 6, dtype=torch.float64), top_k)
    logp = logits.double().log_softmax(-1)
    k = min(top_k, vocab)
    best = logp.topk(k)
    assert signals.topk_ids_nk.dtype == signals.tail_ids_nM.dtype == torch.int32
    assert torch.equal(signals.topk_ids_nk.long(), best.indices)
    torch.testing.assert_close(signals.topk_logp_nk.double(), best.values, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(signals.logp_n.double(), logp[range(5), tokens], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(emitted_logp(logits, tokens), signals.logp_n, atol=1e-5, rtol=1e-5)
    if k < vocab:
        tail = logp.scatter(1, best.indices, -math.inf)
        torch.testing.assert_close(signals.tail_logmass_n.double(), tail.logsumexp(-1), atol=1e-5, rtol=1e-5)
        drawn = tail.gather(1, signals.tail_ids_nM.long())
        torch.testing.assert_close(signals.tail_logp_nM.double(), drawn, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("vocab", [5, 130, 1000])
def test_tail_draws_follow_the_tail(vocab: int) -> None:
    logits = draw_logits(1, vocab, scale=2.0)
    count = 200_000
    signals = teacher_signals(logits, torch.tensor([0]), even(count), top_k=4)
    tail = logits.double().softmax(-1)[0].scatter(0, signals.topk_ids_nk[0].long(), 0.0)
    hits = torch.bincount(signals.tail_ids_nM[0].long(), minlength=vocab)
    assert (hits - count * tail / tail.sum()).abs().max() <= 1.5


@pytest.mark.parametrize("top_k", [1, 4, 32])
def test_estimator_is_unbiased(top_k: int) -> None:
    rows, vocab = 20_000, 200
    logits = draw_logits(1, vocab, scale=2.0, seed=1)
    f = torch.randn(vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 5
    u = torch.rand(rows, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    signals = teacher_signals(logits.expand(rows, -1), torch.zeros(rows), u, top_k)
    estimates = estimate(signals, f)
    expectation = (logits[0].double().softmax(-1) * f).sum()
    assert estimates.std() > 1e-3
    assert abs(estimates.mean() - expectation) < 4 * estimates.std() / math.sqrt(rows)


@given(vocab=st.integers(1, 150), extra=st.integers(0, 5), seed=st.integers(0, 1000))
@settings(max_examples=50)
def test_estimator_is_exact_where_k_covers_the_vocabulary(vocab: int, extra: int, seed: int) -> None:
    logits = draw_logits(2, vocab, seed=seed)
    signals = teacher_signals(logits, torch.zeros(2), torch.rand(2, 3, dtype=torch.float64), vocab + extra)
    f = torch.randn(vocab, dtype=torch.float64)
    assert signals.topk_ids_nk.shape == (2, vocab)
    assert (signals.tail_logmass_n == FLOOR).all()
    torch.testing.assert_close(estimate(signals, f), logits.double().softmax(-1) @ f, atol=1e-5, rtol=1e-5)


def test_a_tiny_tail_mass_is_exact() -> None:
    logits = torch.full((1, 1001), -300.0)
    logits[0, 17] = 0.0
    signals = teacher_signals(logits, torch.tensor([17]), even(8), top_k=1)
    torch.testing.assert_close(signals.tail_logmass_n, torch.tensor([-300.0 + math.log(1000)]))
    torch.testing.assert_close(signals.tail_logp_nM, torch.full((1, 8), -300.0))
    assert 17 not in signals.tail_ids_nM


@given(
    logits=st.lists(st.one_of(st.floats(-80, 80), st.just(-math.inf)), min_size=2, max_size=200),
    top_k=st.integers(1, 20),
    u=st.lists(st.sampled_from([0.0, 0.3, 0.999, 1 - 2**-53]), min_size=1, max_size=4),
)
@settings(max_examples=200)
def test_never_draws_an_impossible_token_and_is_always_finite(logits: list[float], top_k: int, u: list[float]) -> None:
    logits[0] = 1.0
    row = torch.tensor([logits])
    signals = teacher_signals(row, torch.tensor([0]), torch.tensor([u], dtype=torch.float64), top_k)
    assert all(tensor.isfinite().all() for tensor in signals)
    total = signals.topk_logp_nk.exp().sum() + signals.tail_logmass_n.exp().sum()
    assert total.item() == pytest.approx(1.0, abs=1e-4)
    if signals.tail_logmass_n.item() > FLOOR:
        drawn = signals.tail_ids_nM[0].long()
        assert not set(drawn.tolist()) & set(signals.topk_ids_nk[0].tolist())
        assert row[0, drawn].isfinite().all()


def test_reads_half_precision_logits() -> None:
    logits = draw_logits(2, 500).bfloat16()
    half = teacher_signals(logits, torch.zeros(2), even(4).expand(2, -1), 8)
    full = teacher_signals(logits.float(), torch.zeros(2), even(4).expand(2, -1), 8)
    assert all(torch.equal(a, b) for a, b in zip(half, full, strict=True))
