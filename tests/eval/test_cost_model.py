"""Fitted times: what was put in comes out, and more work never takes less time."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftforge.eval.cost_model import CostSurface, GridPoint

GRID = [
    GridPoint(batch, levels, levels + 1, context)
    for batch, levels, context in itertools.product((1, 2, 4, 8, 16, 32, 64), (0, 2, 5), (256, 512, 1024))
]


def card(where: GridPoint) -> float:
    """Memory-bound up to 128 tokens, then bound by arithmetic; caches are read all along."""
    return 5e-3 + 4e-8 * where.batch * where.context + 3e-5 * max(where.batch * where.tokens - 128, 0)


def test_a_known_surface_is_found_again() -> None:
    seconds = [card(where) for where in GRID]
    surface = CostSurface.fit(GRID, seconds, seconds)
    for where in (*GRID, GridPoint(24, 3, 4, 700), GridPoint(48, 5, 6, 300)):
        assert surface(where) == pytest.approx(card(where), rel=1e-3)
    assert surface.weights["1"] == pytest.approx(5e-3, rel=1e-2) and surface.weights["tokens>128"] > 2.9e-5


def test_noise_is_averaged_not_followed() -> None:
    rng = np.random.default_rng(0)
    noisy = [card(where) * (1 + 0.05 * rng.standard_normal()) for where in GRID]
    surface = CostSurface.fit(GRID, noisy, noisy)
    errors = [abs(surface(where) / card(where) - 1) for where in GRID]
    assert max(errors) < 0.06 and np.median(errors) < 0.025


def test_a_batch_of_one_may_have_kernels_of_its_own() -> None:
    seconds = [1e-3 * where.batch + (4e-3 if where.batch > 1 else 0.0) for where in GRID]
    surface = CostSurface.fit(GRID, seconds, seconds)
    assert surface(GridPoint(1, 0, 1, 256)) == pytest.approx(1e-3, rel=1e-2)
    assert surface(GridPoint(3, 0, 1, 256)) == pytest.approx(7e-3, rel=1e-2)


@given(st.lists(st.floats(1e-4, 1.0), min_size=len(GRID), max_size=len(GRID)))
def test_times_never_fall(seconds: list[float]) -> None:
    """Whatever was measured."""
    surface = CostSurface.fit(GRID, seconds, seconds)
    for name in GridPoint._fields:
        values = [surface(GridPoint(8, 2, 3, 512)._replace(**{name: value})) for value in (1, 2, 8, 33, 512, 900)]
        assert values == sorted(values) and values[0] >= 0
