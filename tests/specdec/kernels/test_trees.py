"""The kernels of a round's trees against plain operations, in Triton's interpreter where there is no GPU."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from draftforge.specdec.kernels import trees
from draftforge.specdec.kernels.top_tokens import top_tokens
from draftforge.specdec.kv_cache import KVCache
from draftforge.specdec.tree import TreeBatch, tree_mask
from draftforge.specdec.verify_batch import settle_greedy

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernels are compared with runs as on a CPU."""
    for module in ("kv_cache", "tree", "verify_batch"):
        monkeypatch.setattr(f"draftforge.specdec.{module}.runs_triton", lambda device: False)


def random_parents(nodes: int, seed: int) -> Tensor:
    """Parents [2, N] of trees whose nodes stand below any earlier one, or below the root."""
    draw = torch.Generator().manual_seed(seed)
    rows = [[int(torch.randint(-1, node, (1,), generator=draw)) for node in range(nodes)] for _ in range(2)]
    return torch.tensor(rows, dtype=torch.long).view(2, nodes).to(DEVICE)


@pytest.mark.parametrize(("nodes", "new"), [(1, 1), (5, 2), (20, 20), (40, 7)])
def test_masks_and_depths(nodes: int, new: int) -> None:
    parents_BF = random_parents(nodes, nodes)
    expected = tree_mask(parents_BF, nodes, new)
    found = trees.mask(parents_BF, nodes, new)
    assert all(map(torch.equal, found, expected))
    assert found[1].dtype == torch.bool
    shared = parents_BF[:1].expand(3, -1)  # static trees have one row for all
    assert all(map(torch.equal, trees.mask(shared, nodes, new), tree_mask(shared, nodes, new)))


@pytest.mark.parametrize("seed", range(12))
def test_greedy_verdicts(seed: int) -> None:
    """Few tokens, so that many nodes match; siblings of one token, riders and an empty slot among them."""
    draw = torch.Generator().manual_seed(seed)
    nodes = seed if seed < 2 else 9
    parents_BN = random_parents(nodes, seed)
    tokens_BN = torch.randint(0, 2, (2, nodes), generator=draw).to(DEVICE)
    candidate_BN = (torch.rand(2, nodes, generator=draw) < 0.9).to(DEVICE)
    best_BM = torch.randint(0, 2, (2, nodes + 1), generator=draw).to(DEVICE)
    live_B = torch.tensor([True, seed % 2 == 0], device=DEVICE)
    levels = int(tree_mask(parents_BN, nodes)[0].amax()) + 1 if nodes else 0
    tree = TreeBatch(tokens_BN, parents_BN, candidate_BN, levels, "iid")
    expected = settle_greedy(best_BM, tree, live_B, chain=False)
    read_BX, path_BE, counts_B, last_B = trees.greedy_verdict(best_BM, *tree[:3], live_B, levels)
    assert torch.equal(path_BE, expected.path_BE)
    assert torch.equal(counts_B, expected.counts_B) and torch.equal(last_B, expected.last_B)
    for found, meant in zip(read_BX.tolist(), expected.read_BX.tolist(), strict=True):
        assert found[: 4 + found[0]] == meant[: 4 + meant[0]]  # what follows is not emitted


def test_paths_move_to_the_front() -> None:
    """Of all layers; places overlap, and one path is empty but for its first entry."""
    cache, size = KVCache(3, 12, DEVICE), (3, 2, 4, 5)
    cache.lengths_S[:] = torch.tensor([3, 0, 6])
    draw = torch.Generator().manual_seed(0)
    for layer in range(3):
        cache.layer(layer, torch.zeros(size, device=DEVICE), torch.zeros(size, device=DEVICE))
    layers = [*cache._keys.values(), *cache._values.values()]
    for one in layers:
        one.copy_(torch.randn(one.shape, generator=draw))
    path_BE = torch.tensor([[0, 2, 3, 5], [0, -1, -1, -1]], device=DEVICE)
    found = [one.clone() for one in layers]
    addresses = torch.tensor([one.data_ptr() for one in found], device=DEVICE)
    trees.keep_path(found, addresses, cache.lengths_S, path_BE)
    cache.keep_path(path_BE, torch.tensor([4, 1], device=DEVICE))
    assert all(map(torch.equal, found, layers))
    assert cache.lengths_S.tolist() == [7, 1, 6]


@pytest.mark.parametrize(
    ("vocab", "ranks", "dtype"),
    [(5, 1, torch.float32), (5, 5, torch.float32), (700, 8, torch.bfloat16), (5000, 10, torch.bfloat16)],
)
def test_top_tokens(vocab: int, ranks: int, dtype: torch.dtype) -> None:
    """Ties by the lower token, among them zeros of both signs and -inf; rows that others lie between."""
    logits = torch.randn(2, 4, vocab, generator=torch.Generator().manual_seed(vocab)).mul(3).round().to(DEVICE, dtype)
    logits[0, 0], logits[0, 0, 2:5] = float("-inf"), torch.tensor([-1.0, -0.0, 0.0], dtype=dtype)
    logits = logits[:, ::2]
    best, tokens = top_tokens(logits, ranks)
    expected = logits.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(tokens, expected.indices[..., :ranks])
    assert torch.equal(best, expected.values[..., :ranks].float())
    logp, same = top_tokens(logits, ranks, normalised=True)
    assert torch.equal(same, tokens)
    torch.testing.assert_close(logp, logits.float().log_softmax(-1).gather(-1, tokens))
