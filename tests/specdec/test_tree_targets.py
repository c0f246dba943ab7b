"""Every supported family reads a whole tree in one pass as it would each path alone, and greedy trees lose nothing.

Shapes: B rows, N drafted nodes, M = N + 1 entries (row 0: the last token), V vocabulary.
"""

from functools import partial
from typing import NamedTuple

import pytest
import torch
from families import SUPPORTED, tiny
from proposing import SHAPE
from stand_ins import prompts, random_eagle3
from torch import Tensor

from draftforge.specdec.decoder import generate
from draftforge.specdec.kv_cache import KVCache
from draftforge.specdec.models import CausalModel, States
from draftforge.specdec.proposers.base import Drafter, Texts, Trace
from draftforge.specdec.proposers.dynamic_tree import DynamicProposer
from draftforge.specdec.proposers.factory import make_drafter
from draftforge.specdec.proposers.static_tree import StaticProposer
from draftforge.specdec.requests import Request
from draftforge.specdec.sampling_settings import SamplingSettings
from draftforge.specdec.tree import DraftTree, TreeBatch

SHORT, LONG = 3, 13  # prompts: shorter than the window of 5, and past it
PARENTS = (
    (-1, -1, -1, 2, 2, 0, 3, 3, 6, 8, 4, 9),  # a way of six levels, past the window, whose nodes stand far from them
    (-1, 0, 0, 1, 2, 3, 3, 5),
)
PATHS = ((2, 3, 6, 8), (0, 2))  # kept; what follows them is read once more
AFTER = (-1, -1, 1, 0, 2)

assert_close = partial(torch.testing.assert_close, atol=2e-5, rtol=2e-5)


@pytest.fixture(scope="module", params=SUPPORTED)
def model(request: pytest.FixtureRequest) -> CausalModel:
    return CausalModel(tiny(*SUPPORTED[request.param]))


class Pass(NamedTuple):
    """One target pass over a tree a row, and the same trees by token."""

    logits_BMV: Tensor
    trees: list[DraftTree]

    def check(self, model: CausalModel, known: list[list[int]]) -> None:
        """Each row of each tree against a plain pass over the known tokens and the way to the node."""
        for logits_MV, tree, ids in zip(self.logits_BMV, self.trees, known):
            ways = [list[int]()]
            for token, parent in zip(tree.tokens_N, tree.parents_N):
                ways.append([*ways[parent + 1], token])
            for row, way in enumerate(ways):
                plain = model.logits(model.states(torch.tensor([[*ids, *way]])).hidden_BTH)[0, -1]
                assert_close(logits_MV[row], plain)


def read(model: CausalModel, cache: KVCache, last: list[int], trees: list[DraftTree]) -> Pass:
    batch = TreeBatch.of(trees)
    ids_BM = torch.cat([torch.tensor(last)[:, None], batch.tokens_BN], dim=1)
    states = model.states(ids_BM, cache.branch(*batch.below_one_root()))
    return Pass(model.logits(states.hidden_BTH), trees)


def trees_of(parents: tuple[tuple[int, ...], ...], seed: int) -> list[DraftTree]:
    """Siblings differ; the same token may stand elsewhere in the tree."""
    tokens = torch.randperm(61, generator=torch.Generator().manual_seed(seed)).tolist()
    return [DraftTree.of(tokens[row : row + len(one)], one, "deterministic") for row, one in enumerate(parents)]


@torch.inference_mode()
def test_each_node_of_a_ragged_batch_is_read_as_its_path_alone(model: CausalModel) -> None:
    """Two trees of unlike size and depth on rows of unlike length; then again on top of the paths that were kept."""
    ids = torch.randint(0, 61, (2, LONG), generator=torch.Generator().manual_seed(4)).tolist()
    known = [ids[0][:SHORT], ids[1]]
    cache = KVCache(2, 40, torch.device("cpu"))
    rows = torch.tensor([[*row, *[0] * (LONG - len(row))] for row in known])
    model.states(rows, cache.prefill(torch.arange(2), torch.tensor([len(row) - 1 for row in known])))
    trees = trees_of(PARENTS, seed=5)
    read(model, cache, [row[-1] for row in known], trees).check(model, known)

    kept = torch.full((2, 5), -1)
    for row, path in enumerate(PATHS):
        kept[row, : len(path) + 1] = torch.tensor([0, *(node + 1 for node in path)])
        known[row] += [trees[row].tokens_N[node] for node in path]
    cache.keep_path(kept, torch.tensor([len(path) + 1 for path in PATHS]))
    for row, token in enumerate((11, 12)):
        known[row].append(token)
    read(model, cache, [11, 12], trees_of((AFTER, PARENTS[1]), seed=6)).check(model, known)


class Oracle:
    """A drafter that knows the answers: the token to come is its first choice or its second by turns, and at every
    sixth place none; after a wrong token it says anything."""

    aux_layers: tuple[int, ...] = ()
    needs_hidden_states = False
    nested = True
    needs_host_sync = True
    levels: int | None = None
    width = 61

    def __init__(self, texts: list[list[int]]) -> None:
        self._texts = texts

    def reserve(self, slots: int, tokens: int, nodes: int, levels: int) -> None:
        self._known: list[list[int]] = [[] for _ in range(slots)]

    def begin(self, slots_R: Tensor, known: Texts, states: States) -> None:
        for slot, row in zip(slots_R.tolist(), known.rows):
            self._known[slot] = list(row)

    def observe(self, new: Texts, states: States) -> None:
        for known, more in zip(self._known, new.rows):
            known += more

    def move(self, source: int, destination: int) -> None:
        self._known[destination] = self._known[source]

    def open(self, batch: int, chain: bool) -> Tensor:
        self._ways: list[list[list[int]]] = [[[]] for _ in range(batch)]  # of the root and of every node read
        return torch.stack([self._says(known) for known in self._known[:batch]])

    def expand(self, tokens_BF: Tensor, parents_BF: Tensor, depth: int) -> Tensor:
        rows = []
        for known, ways, tokens, parents in zip(self._known, self._ways, tokens_BF.tolist(), parents_BF.tolist()):
            new = [[*ways[parent + 1], token] for token, parent in zip(tokens, parents)]
            ways += new
            rows.append(torch.stack([self._says([*known, *way]) for way in new]))
        return torch.stack(rows)

    def trace(self, *_: object) -> Trace:
        raise NotImplementedError

    def _says(self, ids: list[int]) -> Tensor:
        logits_V = torch.randn(61, generator=torch.Generator().manual_seed(len(ids)))
        right = next((text[len(ids)] for text in self._texts if text[: len(ids)] == ids != text), None)
        if right is not None:
            place = len(ids) % 6
            logits_V[right] = -torch.inf
            logits_V[right] = logits_V.max() + (0.1 if place % 2 else -1e-3) if place else -9.0
        return logits_V


@pytest.mark.slow
def test_greedy_trees_give_plain_greedy_answers(model: CausalModel) -> None:
    """Drafted by one that is often right, static and dynamic; and by a head that reads the target's features."""
    requests = [Request(ids, SamplingSettings(), 0, 12) for ids in prompts(3)]
    plain = dict(generate(model, None, requests, batch_size=2))
    oracle: Drafter = Oracle([[*request.prompt_ids, *plain[n].tokens] for n, request in enumerate(requests)])
    head = make_drafter(random_eagle3(model), model)
    for proposer in (DynamicProposer(oracle, 3, 20), StaticProposer(oracle, SHAPE), StaticProposer(head, SHAPE)):
        done = dict(generate(model, proposer, requests, batch_size=2))
        assert {n: answer.tokens for n, answer in done.items()} == {n: answer.tokens for n, answer in plain.items()}
        accepted = [round_.accepted for answer in done.values() for round_ in answer.rounds]
        assert proposer._drafter is head or (sum(accepted) > 15 and max(accepted) >= 3)
