"""The accept rules of a batch decide what the readable ones decide, and never wait for the device.

Shapes: B slots, N drafted nodes, M = N + 1, D levels, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from enumeration import apply_rule
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftforge.errors import InputError
from draftforge.specdec import verify
from draftforge.specdec.accept_rules import RULES
from draftforge.specdec.proposers.tree_shape import ROOT, Drawn
from draftforge.specdec.tree import DraftTree, TreeBatch
from draftforge.specdec.verify_batch import verify_batch, verify_greedy_chains

WAYS: list[tuple[str, Drawn]] = [(name, drawn) for name, rule in RULES.items() for drawn in sorted(rule.drawn)]


def random_tree(random: np.random.Generator, nodes: int, vocabulary: int, drawn: Drawn, chain: bool) -> DraftTree:
    """Any shape and order that a tree may have, some of its nodes riders, siblings' tokens distinct unless iid."""
    parents: list[int] = []
    tokens: list[int] = []
    depths: list[int] = []
    candidates: list[bool] = []
    riders = random.random() < 0.3
    for node in range(nodes):
        parent = node - 1 if chain else int(random.integers(ROOT, node))
        taken = [tokens[other] for other in range(node) if parents[other] == parent]
        free = [token for token in range(vocabulary) if drawn == "iid" or token not in taken]
        candidate = bool(free) and (parent == ROOT or candidates[parent]) and not (riders and random.random() < 0.3)
        parents.append(parent)
        tokens.append(int(random.choice(free if candidate else range(vocabulary))))
        depths.append(0 if parent == ROOT else depths[parent] + 1)
        candidates.append(candidate)
    return DraftTree(tuple(tokens), tuple(parents), tuple(depths), tuple(candidates), drawn)


def random_rows(random: np.random.Generator, rows: int, vocabulary: int) -> Tensor:
    """Distributions [rows, V] in fp32, some sharp, some flat, with zeros."""
    rows_NV = random.dirichlet(np.full(vocabulary, random.choice([0.3, 1.0, 5.0])), rows)
    rows_NV *= random.random(rows_NV.shape) < random.choice([0.6, 1.0])
    rows_NV[np.arange(rows), random.integers(vocabulary, size=rows)] += 0.05
    return torch.tensor(rows_NV / rows_NV.sum(-1, keepdims=True), dtype=torch.float32)


class Slot:
    """One slot's round: a tree, p, q and numbers."""

    def __init__(self, random: np.random.Generator, nodes: int, vocabulary: int, drawn: Drawn, chain: bool) -> None:
        self.tree = random_tree(random, nodes, vocabulary, drawn, chain)
        self.p_MV = random_rows(random, nodes + 1, vocabulary)
        of_parent_MV = random_rows(random, nodes + 1, vocabulary)
        if drawn == "iid":  # each child may come from a draft of its own
            self.q_NV = random_rows(random, nodes, vocabulary)
        else:
            self.q_NV = of_parent_MV[torch.tensor(self.tree.parents_N, dtype=torch.long) + 1]
        for node, parent in enumerate(self.tree.parents_N):
            if random.random() < 0.2:  # a draft that equals its target
                self.q_NV[node] = self.p_MV[parent + 1]
        self.u_N = torch.tensor(random.random(nodes) * random.choice([0.3, 1.0], nodes), dtype=torch.float64)
        self.u_N[torch.tensor(random.random(nodes) < 0.1)] = 0.0
        self.u_final_D = torch.tensor(random.random(nodes + 1), dtype=torch.float64)


def stacked(slots: list[Slot], filler: float) -> tuple[Tensor, Tensor, TreeBatch, Tensor, Tensor]:
    """The slots side by side; what pads the shorter ones must not matter."""
    tree = TreeBatch.of([slot.tree for slot in slots])
    nodes = tree.tokens_BN.shape[1]

    def padded(tensors: list[Tensor], rows: int) -> Tensor:
        return torch.stack([torch.cat([x, x.new_full((rows - len(x), *x.shape[1:]), filler)]) for x in tensors])

    return (
        padded([slot.p_MV for slot in slots], nodes + 1),
        padded([slot.q_NV for slot in slots], nodes),
        tree,
        padded([slot.u_N for slot in slots], nodes),
        padded([slot.u_final_D for slot in slots], nodes + 1)[:, : tree.depth + 1],
    )


def reference(rule: str, slot: Slot) -> verify.Verdict:
    tree, p_MV, q_NV, u_N = slot.tree, slot.p_MV, slot.q_NV, slot.u_N
    if not RULES[rule].trees:
        drafted = [*tree.candidate_N, False].index(False)  # a chain ends where a rider stands
        tree = DraftTree.chain(tree.tokens_N[:drafted], tree.drawn)
        p_MV, q_NV, u_N = p_MV[: drafted + 1], q_NV[:drafted], u_N[:drafted]
    u_final_D = slot.u_final_D.tolist()
    return apply_rule(verify, rule, p_MV, q_NV, tree, u_N, u_final_D)


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "drawn"), WAYS)
@settings(max_examples=100)
@given(
    seed=st.integers(0, 10**9),
    nodes_B=st.lists(st.integers(0, 7), min_size=1, max_size=4),
    vocabulary=st.integers(2, 5),
    filler=st.sampled_from([0.0, 0.5, float("nan")]),
    alike=st.booleans(),
)
def test_decides_what_the_readable_rule_decides(
    rule: str, drawn: Drawn, seed: int, nodes_B: list[int], vocabulary: int, filler: float, alike: bool
) -> None:
    random = np.random.default_rng(seed)
    slots = [Slot(random, nodes, vocabulary, drawn, chain=not RULES[rule].trees) for nodes in nodes_B]
    if alike:  # so that what the target would say is often drafted
        for slot in slots:
            slot.p_MV[:] = slot.p_MV.mean(0)
    p_BMV, q_BNV, tree, u_BN, u_final_BD = stacked(slots, filler)
    verdict = verify_batch(rule, p_BMV, q_BNV if RULES[rule].needs_q else None, tree, u_BN, u_final_BD)
    assert verdict.path_BD.shape == (len(slots), tree.depth)
    for b, slot in enumerate(slots):
        expected = reference(rule, slot)
        accepted = expected.accepted
        assert verdict.length_B[b] == len(accepted)
        assert verdict.path_BD[b].tolist() == accepted + [-1] * (tree.depth - len(accepted))
        assert verdict.token_B[b] == expected.token


def example(rule: str, nodes_B: list[int], vocabulary: int, seed: int = 0) -> tuple[Any, ...]:
    """Arguments of `verify_batch`."""
    drawn: Drawn = min(RULES[rule].drawn)
    random = np.random.default_rng(seed)
    slots = [Slot(random, nodes, vocabulary, drawn, chain=not RULES[rule].trees) for nodes in nodes_B]
    p_BMV, q_BNV, tree, u_BN, u_final_BD = stacked(slots, 0.0)
    return rule, p_BMV, q_BNV if RULES[rule].needs_q else None, tree, u_BN, u_final_BD


def everywhere(change: Callable[[Tensor], Tensor], argument: Any) -> Any:
    if isinstance(argument, TreeBatch):
        return TreeBatch(*(everywhere(change, column) for column in argument))
    return change(argument) if isinstance(argument, Tensor) else argument


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("nodes_B", [[3, 0, 6], [0, 0]])
def test_never_waits_for_the_device(rule: str, nodes_B: list[int]) -> None:
    """A tensor on the meta device has no values: reading one raises."""
    arguments = example(rule, nodes_B, vocabulary=5)
    verdict = verify_batch(*(everywhere(lambda tensor: tensor.to("meta"), argument) for argument in arguments))
    assert [x.device.type for x in verdict] == ["meta"] * 3
    assert [x.dtype for x in verdict] == [torch.long] * 3
    assert [x.shape for x in verdict] == [x.shape for x in verify_batch(*arguments)]


class LargestDoubles(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the size of the largest float64 tensor that any operation makes."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype == torch.float64:
            self.numbers = max(self.numbers, result.numel())
        return result


@pytest.mark.parametrize("rule", RULES)
def test_rows_become_float64_one_slice_at_a_time(rule: str) -> None:
    arguments = example(rule, [6, 4], vocabulary=50)
    with LargestDoubles() as largest:  # type: ignore[no-untyped-call]
        verify_batch(*arguments)
    assert 2 * 6 <= largest.numbers <= 2 * 50 or rule == "greedy"


@pytest.mark.parametrize("rule", RULES)
def test_inputs_are_left_as_they_were(rule: str) -> None:
    arguments = example(rule, [6, 4], vocabulary=5)
    copies = [everywhere(torch.clone, argument) for argument in arguments]
    verify_batch(*arguments)
    for argument, copy in zip(arguments, copies):
        for left, right in zip(argument, copy) if isinstance(argument, TreeBatch) else [(argument, copy)]:
            assert torch.equal(left, right) if isinstance(left, Tensor) else left == right


@pytest.mark.parametrize("rule", RULES)
def test_a_slot_does_not_depend_on_the_others(rule: str) -> None:
    together = verify_batch(*example(rule, [5, 5, 5], vocabulary=4, seed=3))
    name, p_BMV, q_BNV, tree, u_BN, u_final_BD = example(rule, [5, 5, 5], vocabulary=4, seed=3)
    for b in range(3):
        one = slice(b, b + 1)
        alone_tree = TreeBatch(tree.tokens_BN[one], tree.parents_BN[one], tree.candidate_BN[one], *tree[3:])
        q_BNV_alone = None if q_BNV is None else q_BNV[one]
        alone = verify_batch(name, p_BMV[one], q_BNV_alone, alone_tree, u_BN[one], u_final_BD[one])
        assert all(torch.equal(x[0], y[b]) for x, y in zip(alone, together))


@pytest.mark.parametrize(
    ("tokens", "parents", "q_N", "u_N", "node"),
    [
        ([0, 1, 0, 1, 0], [ROOT, ROOT, 0, 0, 1], [1.0, 0.0, 1.0, 0.0, 0.9], [0.2, 0.0, 0.9, 0.9, 0.9], 1),
        ([0, 1, 0, 0], [ROOT, ROOT, 0, 1], [0.5, 0.5, 1.0, 1.0], [0.2, 0.2, 0.9, 0.9], 0),
    ],
    ids=["only after its last child", "in the order of a climb"],
)
def test_traversal_asks_each_node(
    tokens: list[int], parents: list[int], q_N: list[float], u_N: list[float], node: int
) -> None:
    """Node 0 would accept after its first child (.2 < 1/3) and no longer does after its second: node 1 ends it.

    Then, of two siblings that accept when their child is rejected, the first does, and its p has lost that child.
    """
    tree = DraftTree.of(tokens, parents, "iid")
    p_MV = torch.tensor([[0.5, 0.5, 0.0]]).repeat(len(tokens) + 1, 1)
    q_NV, u = torch.tensor([[q, 1 - q, 0.0] for q in q_N]), torch.tensor(u_N, dtype=torch.float64)
    assert verify.verify_traversal(p_MV, q_NV, tree, u, 0.0) == ([node], 1)
    verdict = verify_batch("traversal", p_MV[None], q_NV[None], TreeBatch.of([tree]), u[None], torch.zeros(1, 3))
    assert [x.tolist() for x in verdict] == [[1], [[node, -1]], [1]]


def test_greedy_takes_logits() -> None:
    tree = TreeBatch.of([DraftTree.of([1, 0, 2, 1], [ROOT, ROOT, 1, 1], "deterministic")])
    logits = torch.zeros(1, 5, 3, dtype=torch.bfloat16)
    logits[0, 0, 0] = logits[0, 2, 1] = logits[0, 4, 2] = 7.0
    length_B, path_BD, token_B = verify_batch("greedy", logits, None, tree, torch.zeros(1, 4), torch.zeros(1, 3))
    assert (length_B.tolist(), path_BD.tolist(), token_B.tolist()) == ([2], [[1, 3]], [2])


def test_refuses_what_a_rule_does_not_take() -> None:
    rule, p_BMV, q_BNV, tree, u_BN, u_final_BD = example("recursive", [3], vocabulary=4)
    with pytest.raises(InputError, match="rule: 'multiround': takes drafts drawn iid, not without_replacement"):
        verify_batch("multiround", p_BMV, q_BNV, tree, u_BN, u_final_BD)
    with pytest.raises(ValueError, match="p: 3 rows: must be 4 for this draft"):
        verify_batch(rule, p_BMV[:, 1:], q_BNV, tree, u_BN, u_final_BD)
    with pytest.raises(ValueError, match="q: None rows: must be 3 for rule 'recursive'"):
        verify_batch(rule, p_BMV, None, tree, u_BN, u_final_BD)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("rule", RULES)
def test_a_gpu_decides_what_a_cpu_decides_without_a_wait(rule: str) -> None:
    arguments = example(rule, [6, 0, 7, 3], vocabulary=1000)
    there = [everywhere(Tensor.cuda, argument) for argument in arguments]
    verify_batch(*there)  # the first call may load kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        verdict = verify_batch(*there)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(x.cpu(), y) for x, y in zip(verdict, verify_batch(*arguments)))


@settings(max_examples=60)
@given(seed=st.integers(0, 10**9), nodes=st.integers(0, 5))
def test_greedy_chains_are_decided_at_once(seed: int, nodes: int) -> None:
    random = np.random.default_rng(seed)
    p_BMV = torch.stack([random_rows(random, nodes + 1, 3) for _ in range(4)])
    tokens_BN = torch.tensor(random.integers(3, size=(4, nodes)), dtype=torch.long).view(4, nodes)
    tree = TreeBatch.chains(tokens_BN, torch.tensor(random.integers(nodes + 1, size=4)), "deterministic")
    nothing = torch.zeros(4, 0)
    found = verify_greedy_chains(p_BMV.argmax(-1), tree)
    expected = verify_batch("greedy", p_BMV, None, tree, nothing, nothing)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
