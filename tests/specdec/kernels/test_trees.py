"""The kernels of a round's trees against plain operations, in Triton's interpreter where there is no GPU."""

import pytest
import torch
import torch.nn.functional as F
from hopper import check_kernels_compile
from torch import Tensor

pytest.importorskip("triton")

from draftforge.specdec.kernels import trees
from draftforge.specdec.kernels.top_tokens import put_top_tokens, top_tokens
from draftforge.specdec.kv_cache import KVCache
from draftforge.specdec.proposers.base import Ask
from draftforge.specdec.proposers.dynamic_tree import _Pool
from draftforge.specdec.proposers.logits import Offers
from draftforge.specdec.proposers.static_tree import _fixed_nodes
from draftforge.specdec.proposers.tree_shape import TreeShape
from draftforge.specdec.sampling_settings import SamplingSettings
from draftforge.specdec.tree import TreeBatch, tree_mask
from draftforge.specdec.verify_batch import settle_greedy

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernels are compared with runs as on a CPU."""
    proposers = [f"proposers.{name}" for name in ("dynamic_tree", "logits", "static_tree")]
    for module in ("kv_cache", "tree", "verify_batch", *proposers):
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


def test_entries_of_a_pass() -> None:
    """A draft's next level behind what it has read, and the target's pass, which begins with the last token."""
    parents_BF, past_B = random_parents(20, 3), torch.tensor([4, 0, 9], device=DEVICE)
    for known in (0, 13):
        *found, positions_BN, parents = trees.branch(parents_BF[:, known:], 20, past_B, parents_BF[:, :known])
        expected = tree_mask(parents_BF, 20, 20 - known)
        assert all(map(torch.equal, found, expected)) and torch.equal(parents, parents_BF)
        assert torch.equal(positions_BN, past_B[:2, None] + expected[0][:, known:])
    tree = TreeBatch(parents_BF, parents_BF.T.contiguous().T, parents_BF > 0, 20, "iid")
    *found, positions_BN, _ = trees.branch(tree.parents_BN, 21, past_B, None)
    assert all(map(torch.equal, found, tree.below_one_root()))
    assert torch.equal(positions_BN, past_B[:2, None] + found[0])


@pytest.mark.parametrize(("top_k", "nodes", "levels"), [(8, 24, 4), (3, 30, 4), (3, 5, 1), (1, 3, 3), (9, 100, 3)])
def test_dynamic_trees(top_k: int, nodes: int, levels: int) -> None:
    """Of coarse scores, which tie; some are -inf, and slots end at other levels, one before the first."""
    draw = torch.Generator().manual_seed(top_k)
    limits_B = torch.tensor([levels, 0, levels - 1, 1], device=DEVICE)
    ask = Ask(limits_B, levels, [SamplingSettings()] * 4, None, None)
    expected, found = _Pool(ask, top_k, levels), _Pool(ask, top_k, levels)
    found._on_kernels = True
    for level in range(levels):
        logits_BFV = torch.randn(4, top_k if level else 1, 12, generator=draw).round().to(DEVICE)
        logits_BFV[:, :, 3:5], logits_BFV[2, 0, 1:] = float("-inf"), float("-inf")
        for pool in (expected, found):
            pool.offer(logits_BFV)
        if level + 1 < levels:
            assert all(map(torch.equal, found.advance(), expected.advance()))
            assert torch.equal(found._above_BF, expected._above_BF)  # type: ignore[arg-type]
    most = min(nodes, top_k + top_k * top_k * (levels - 1))
    assert all(map(torch.equal, found.best(most, levels)[:3], expected.best(most, levels)[:3]))


@pytest.mark.parametrize("shape", [TreeShape.chain(4), TreeShape.branching([3, 2, 1]), TreeShape([[0], [2], [2, 1]])])
def test_static_trees(shape: TreeShape) -> None:
    """Some scores are not finite: nothing below those is a candidate."""
    draw = torch.Generator().manual_seed(len(shape))
    offers = Offers(4, 40, DEVICE)
    offers.tokens_BC.copy_(torch.randint(0, 99, (4, 40), generator=draw))
    offers.scores_BC.copy_(torch.randn(4, 40, generator=draw))
    offers.scores_BC[1, ::3], offers.scores_BC[2, ::7] = float("-inf"), float("nan")
    places_N = torch.randperm(40, generator=draw)[: len(shape)].to(DEVICE)
    limits_B, parents_N = torch.tensor([9, 9, 2, 0], device=DEVICE), torch.tensor(shape.parents, device=DEVICE)
    expected = _fixed_nodes(offers, places_N, shape, limits_B)
    found = trees.fixed_nodes(offers.scores_BC, offers.tokens_BC, places_N, parents_N, limits_B, shape.depth)
    assert all(map(torch.equal, found, expected))
    assert expected[1].any() and not expected[1].all()


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
    [
        (5, 1, torch.float32),
        (5, 5, torch.bfloat16),
        (5, 5, torch.float32),
        (700, 8, torch.float16),
        (2050, 9, torch.bfloat16),
        (5000, 10, torch.bfloat16),
    ],
)
def test_top_tokens(vocab: int, ranks: int, dtype: torch.dtype) -> None:
    """Ties by the lower token, among them zeros of both signs and -inf; rows that others lie between."""
    logits = torch.randn(2, 4, vocab, generator=torch.Generator().manual_seed(vocab)).mul(3).round().to(DEVICE, dtype)
    logits[0, 0], logits[0, 0, 2:5] = float("-inf"), torch.tensor([-1.0, -0.0, 0.0], dtype=dtype)
    logits = logits[:, ::2]
    best, tokens = top_tokens(logits, ranks)
    expected = logits.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(tokens, expected.indices[..., :ranks])
    assert torch.equal(best, expected.values[..., :ranks]) and best.dtype == dtype
    logp, same = top_tokens(logits, ranks, normalised=True)
    assert torch.equal(same, tokens)
    torch.testing.assert_close(logp, logits.float().log_softmax(-1).gather(-1, tokens))


def test_top_tokens_are_put_where_they_stay() -> None:
    """Behind what is there, with what is above added, to the bit."""
    draw = torch.Generator().manual_seed(0)
    logits_BFV, above_BF = (
        torch.randn(2, 3, 70, generator=draw).to(DEVICE),
        torch.randn(2, 3, generator=draw).to(DEVICE),
    )
    scores_BC, tokens_BC = torch.zeros(2, 20, device=DEVICE), torch.zeros(2, 20, dtype=torch.long, device=DEVICE)
    put_top_tokens(logits_BFV, 4, scores_BC[:, 5:17], tokens_BC[:, 5:17], True, above_BF)
    best_BFR, tokens_BFR = top_tokens(logits_BFV, 4, normalised=True)
    assert torch.equal(scores_BC, F.pad((best_BFR + above_BF[..., None]).flatten(1), (5, 3)))
    assert torch.equal(tokens_BC, F.pad(tokens_BFR.flatten(1), (5, 3)))


@pytest.mark.slow
def test_kernels_compile_for_hopper() -> None:
    check_kernels_compile(COMPILE)


COMPILE = """
from draftforge.specdec.kernels import pointwise, top_tokens, trees

# Types of arguments; all others are int32, or constants.
BF16, FP32, LONG, INT8 = "*bf16", "*fp32", "*i64", "*i8"
TOP = {"logits": BF16, "keys": LONG, "sums": FP32, "above": FP32, "best_values": FP32, "best_tokens": LONG}
POOL = {"scores": FP32, "tokens": LONG, "read": LONG, "to_tokens": LONG, "to_candidates": INT8, "limits": LONG}
LEVEL = {**POOL, "best": FP32, "chosen": LONG, "parents": LONG}
TREE = {**POOL, "to_parents": LONG, "places": LONG, "parents": LONG}
MASK = {**dict.fromkeys(["known", "parents", "past", "depth", "positions", "all_parents"], LONG), "visible": INT8}
VERDICT = dict.fromkeys(["best", "tokens", "parents", "read", "path", "counts", "last"], LONG)
VERDICT |= {"candidates": INT8, "live": INT8}
PATH = {"addresses": LONG, "like": BF16, "lengths": LONG, "path": LONG}
ROWS = {"x": BF16, "index": LONG, "output": BF16}
ANGLES = {"positions": LONG, "frequency": FP32, "cos": FP32, "sin": FP32, "stretch": "fp32"}
CASES = [
    (top_tokens._best_of_blocks, TOP, dict(RANKS=8, BLOCK=2048, SUMS=True)),
    (top_tokens._best_of_blocks, {**TOP, "logits": FP32}, dict(RANKS=1, BLOCK=2048, SUMS=False)),
    (top_tokens._best_of_rows, TOP, dict(RANKS=8, KEYS=256, BLOCKS=32, SUMS=True, ABOVE=True)),
    (trees._next_frontier, LEVEL, dict(K=8, PLACES=64)),
    (trees._best_nodes, TREE, dict(N=59, K=10, PLACES=512)),
    (trees._fixed_nodes, TREE, dict(N=21, NODES=32)),
    (trees._mask, MASK, dict(F=25, ROOTED=True, PAST=True, ROWS=16, ENTRIES=32)),
    (trees._mask, MASK, dict(F=24, ROOTED=False, PAST=True, ROWS=16, ENTRIES=32)),
    (trees._greedy_verdict, VERDICT, dict(N=24, D=4, NODES=32)),
    (trees._keep_path, PATH, dict(E=5, D=64, ENTRIES=8, SIZE=64)),
    (pointwise._take_rows, ROWS, dict(WIDTH=1024)),
    (pointwise._angles, ANGLES, dict(PAIRS=32)),
]
for case in CASES:
    compiled(*case)
"""
