"""From tau to speed-ups and back, by closed forms."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftforge.eval.acceptance import Estimate
from draftforge.eval.speedup import Gain, chain_alpha, chain_tau, pooled

parts = st.floats(0.01, 5.0)
taus = st.floats(1.0, 20.0)


@given(st.floats(0.0, 0.99), parts)
def test_break_even_is_where_the_speedup_is_one(fixed: float, rounds: float) -> None:
    gain = Gain(fixed, rounds)
    assert gain.speedup(gain.break_even_tau) == pytest.approx(1.0)


def test_where_the_prompt_alone_costs_more_no_tau_is_enough() -> None:
    assert Gain(1.0, 0.1).break_even_tau == math.inf and Gain(1.2, 0.1).speedup(1e9) < 1


def test_without_a_fixed_part_it_is_tau_over_the_rounds_cost() -> None:
    estimate = Gain(0.0, 1.25).estimate(Estimate(2.5, 2.0, 3.0, 7, error=0.1, freedom=6.0))
    assert tuple(estimate) == pytest.approx((2.0, 1.6, 2.4, 7, "", 0.08, 6.0))
    assert np.allclose(Gain(0.0, 2.0).speedup(np.array([1.0, 4.0])), [0.5, 2.0])


@given(st.floats(0.0, 1.5), parts, st.floats(1.0, 9.0))
def test_the_error_of_a_speedup_is_its_slope_times_taus(fixed: float, rounds: float, tau: float) -> None:
    gain = Gain(fixed, rounds)
    slope = (gain.speedup(tau + 1e-4) - gain.speedup(tau - 1e-4)) / 2e-4
    assert gain.estimate(Estimate(tau, error=0.5)).error == pytest.approx(0.5 * slope, rel=1e-4)


@given(st.lists(st.tuples(st.floats(0.0, 1.5), parts, st.floats(0.01, 9.0)), min_size=1, max_size=5), taus)
def test_speedups_pool_harmonically_by_share_of_time(load: list[tuple[float, float, float]], tau: float) -> None:
    """Work that took plain decoding a share w of its time takes w / speed-up."""
    gains, shares = [Gain(fixed, rounds) for fixed, rounds, _ in load], [share for *_, share in load]
    whole = sum(shares) / sum(share / gain.speedup(tau) for gain, share in zip(gains, shares))
    assert pooled(gains, shares).speedup(tau) == pytest.approx(whole)


@given(st.floats(0.0, 1.0), st.integers(1, 12))
def test_acceptance_and_tau_of_a_chain_are_inverse(alpha: float, K: int) -> None:
    tau = chain_tau(alpha, K)
    assert chain_tau(chain_alpha(tau, K), K) == pytest.approx(tau, abs=1e-9)
    if alpha < 1:
        assert tau == pytest.approx((1 - alpha ** (K + 1)) / (1 - alpha))


def test_some_taus_need_nothing_and_some_are_out_of_reach() -> None:
    assert chain_alpha(0.9, 3) == 0.0 and chain_alpha(4.0, 3) == pytest.approx(1.0)
    assert (
        math.isnan(chain_alpha(4.01, 3))
        and math.isnan(chain_alpha(math.inf, 3))
        and math.isnan(chain_alpha(math.nan, 3))
    )
    assert chain_alpha(1.3, 1) == pytest.approx(0.3)
