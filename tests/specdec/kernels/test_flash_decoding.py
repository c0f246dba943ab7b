"""The decoding kernel against the dense path, in Triton's interpreter where there is no GPU."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from draftforge.specdec.kernels.attention import attention
from draftforge.specdec.kernels.flash_decoding import attend_cached
from draftforge.specdec.kv_cache import KVCache
from draftforge.specdec.tree import tree_mask

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAST = [0, 3, 64, 127, 150]  # 150 + 1 keys: more than two blocks, and no multiple of one


@pytest.fixture(autouse=True)
def few_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer programs, for the interpreter takes its time for each."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr("draftforge.specdec.kernels.flash_decoding._PARTS", 2)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def attend_new(query: Tensor, keys: Tensor, values: Tensor, past_B: Tensor, entries: int, *rest: Any) -> Tensor:
    """Attention over a cache whose last entries are not there yet but come as new keys and values."""
    batch, new = query.shape[0], query.shape[2]
    rows_B1 = torch.arange(batch, device=DEVICE)[:, None]
    at_BN = past_B[:, None] + torch.arange(entries - new, entries, device=DEVICE)
    without = [x.clone() for x in (keys, values)]
    key, value = (x[rows_B1, :, at_BN].transpose(1, 2) for x in without)
    for cached in without:
        cached[rows_B1, :, at_BN] = 1e4
    output = attend_cached(query, key, value, without[0], without[1], past_B, *rest)
    assert all(torch.equal(written, full) for written, full in zip(without, (keys, values)))
    return output


def windowed(visible_BNL: Tensor, position_BN: Tensor, key_BL: Tensor, window: int | None) -> Tensor:
    return visible_BNL if window is None else visible_BNL & (position_BN[..., None] - key_BL[:, None] < window)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "groups", "size", "window", "softcap", "new"),
    [
        (9, 3, 64, None, None, 1),
        (4, 4, 80, 5, None, 1),
        (8, 1, 16, 100, 2.0, 3),
        (4, 4, 80, None, 3.0, 3),
        (8, 1, 16, 5, None, 30),
        (2, 2, 80, 100, 2.0, 30),
    ],
)
def test_equals_the_dense_path(
    heads: int, groups: int, size: int, window: int | None, softcap: float | None, new: int
) -> None:
    query, capacity = draw(len(PAST), heads, new, size), 201
    keys, values = draw(len(PAST) + 2, groups, capacity, size), draw(len(PAST) + 2, groups, capacity, size) + 1
    past_B = torch.tensor(PAST, device=DEVICE)
    scaling = 0.3 if softcap else None
    position_BN = past_B[:, None] + torch.arange(new, device=DEVICE)
    key_BL = torch.arange(capacity, device=DEVICE).expand(len(PAST), -1)
    visible_BNL = windowed(key_BL[:, None] <= position_BN[..., None], position_BN, key_BL, window)
    expected = attention(query, keys[: len(PAST)], values[: len(PAST)], visible_BNL[:, None], scaling, softcap)
    found = attend_new(query, keys, values, past_B, new, scaling, window, softcap)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 6])
def test_a_tree_sees_its_ancestors(window: int | None) -> None:
    """Six entries, of which the last four ask: 0 and 1 are siblings, 2 and 3 follow 0, 4 follows 1, 5 follows 3."""
    parents, new, past = [-1, -1, 0, 0, 1, 3], 4, [2, 70]
    visible, depth = torch.eye(6, dtype=torch.bool), torch.zeros(6, dtype=torch.long)
    for entry, parent in enumerate(parents):
        if parent >= 0:
            visible[entry] |= visible[parent]
            depth[entry] = depth[parent] + 1
    visible_BNF = visible[-new:].expand(2, -1, -1).to(DEVICE)
    depth_BF = depth.expand(2, -1).to(DEVICE)
    cache = KVCache(2, 90, DEVICE)
    cache.lengths_S[:] = torch.tensor(past)
    with patch("draftforge.specdec.kv_cache.reads_lengths", return_value=False):
        step = cache.branch(depth_BF, visible_BNF)
    assert step.visible_BNL is not None and step.key_positions_BL is not None and step.positions_BN is not None
    query, keys, values = draw(2, 6, new, 32), draw(2, 2, 90, 32), draw(2, 2, 90, 32) + 1
    seen = windowed(step.visible_BNL, step.positions_BN, step.key_positions_BL, window)
    length = seen.shape[-1]
    expected = attention(query, keys[:, :, :length], values[:, :, :length], seen[:, None], None)
    past_B = torch.tensor(past, device=DEVICE)
    found = attend_new(query, keys, values, past_B, 6, None, window, None, visible_BNF, depth_BF)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("entries", "new"), [(70, 70), (70, 20), (9, 9)])
@pytest.mark.parametrize("window", [None, 66])
def test_trees_of_several_blocks(entries: int, new: int, window: int | None) -> None:
    """Entries of which the cache has some, more than a block of them, and programs of more rows than the fewest."""
    draw_parent = torch.Generator().manual_seed(entries)
    parents = [int(torch.randint(-1, entry, (1,), generator=draw_parent)) for entry in range(entries)]
    past_B = torch.tensor([0, 5, 130], device=DEVICE)
    depth_BF, visible_BNF = tree_mask(torch.tensor([parents] * 3, device=DEVICE), entries, new)
    query, keys, values = draw(3, 3, new, 32), draw(3, 1, 210, 32), draw(3, 1, 210, 32) + 1
    cache = KVCache(3, 210, DEVICE)
    cache.lengths_S[:] = past_B
    with patch("draftforge.specdec.kv_cache.reads_lengths", return_value=False):
        step = cache.branch(depth_BF, visible_BNF)
    assert step.visible_BNL is not None and step.key_positions_BL is not None and step.positions_BN is not None
    seen = windowed(step.visible_BNL, step.positions_BN, step.key_positions_BL, window)
    length = seen.shape[-1]
    expected = attention(query, keys[:, :, :length], values[:, :, :length], seen[:, None], None)
    for programs in (256, 1):
        with patch("draftforge.specdec.kernels.flash_decoding._PROGRAMS", programs):
            found = attend_new(query, keys, values, past_B, entries, None, window, None, visible_BNF, depth_BF)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_half_precision_rounds_once() -> None:
    query, keys, values = (draw(2, 4, 1, 64), draw(2, 2, 70, 64), draw(2, 2, 70, 64))
    past_B = torch.tensor([69, 10], device=DEVICE)
    full = attend_new(query, keys, values, past_B, 1)
    half = attend_new(query.half(), keys.half(), values.half(), past_B, 1)
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.float(), full, atol=5e-3, rtol=5e-3)


def test_what_does_not_fit_is_not_written() -> None:
    """Padding past a slot's last place must not reach the next head's first one."""
    query, fresh, past_B = draw(1, 2, 3, 16), draw(1, 2, 3, 16), torch.tensor([4], device=DEVICE)
    keys, values = draw(1, 2, 5, 16), draw(1, 2, 5, 16)
    before = keys.clone()
    attend_cached(query, fresh, fresh, keys, values, past_B)
    assert torch.equal(keys[:, :, :4], before[:, :, :4]) and torch.equal(keys[:, :, 4], fresh[:, :, 0])


@pytest.mark.parametrize("window", [None, 100])
def test_a_query_attends_alike_alone_and_in_a_chain(window: int | None) -> None:
    """To the bit: what a draft adds to a pass must not turn near ties of plain decoding round."""
    chain, past, size = 5, [3, 126, 150], 16
    query, keys, values = draw(3, 6, chain, size), draw(3, 2, 201, size), draw(3, 2, 201, size) + 1
    past_B = torch.tensor(past, device=DEVICE)
    together = attend_new(query, keys, values, past_B, chain, None, window)
    for n in range(chain):
        alone = attend_new(query[:, :, n : n + 1], keys, values, past_B + n, 1, None, window)
        assert torch.equal(alone, together[:, :, n : n + 1])
