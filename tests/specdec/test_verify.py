"""Losslessness of every accept rule, by exact enumeration, and the wrong rules that this enumeration catches.

A uniform is not a number here but an interval of what it may still be. `u < h` splits it, and both sides are followed
with their probabilities; so is every outcome of a categorical draw. The sum over all ways that the rounds can go is the
exact distribution of the output, for any rule that only compares its uniforms - right or wrong.

Mutants are the real `verify.py` with one edit. Each must fail the very check that the rules pass.
"""

import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftforge.errors import InputError
from draftforge.specdec import verify
from draftforge.specdec.sampling import SamplingSettings
from draftforge.specdec.tree import ROOT, DraftTree
from draftforge.specdec.verify import RULES, check_rule, verify_block, verify_greedy, verify_onehot, verify_token

T = TypeVar("T")
Context = tuple[int, ...]
Interval = tuple[float, float]
Known = tuple[tuple[int, Interval], ...]  # what is known of the uniforms of later positions


class Oracle:
    """Makes the choices of one run: those of a script first, then always the first possible one."""

    def __init__(self, script: list[int]) -> None:
        self.script = script
        self.made: list[tuple[int, list[int]]] = []  # (choice, those that are left to try)
        self.probability = 1.0

    def choose(self, weights: Sequence[float | None]) -> int:
        """One of the options. None: impossible. 0.0: possible, but of measure zero (`u == 0`)."""
        possible = [option for option, weight in enumerate(weights) if weight is not None]
        made = len(self.made)
        choice = self.script[made] if made < len(self.script) else possible[0]
        self.made.append((choice, possible[possible.index(choice) + 1 :]))
        self.probability *= weights[choice] or 0.0
        return choice

    def draw(self, p_V: torch.Tensor) -> int:
        return self.choose([float(p) if p > 0 else None for p in p_V])


def every_way(run: Callable[[Oracle], T]) -> Iterator[tuple[float, T]]:
    """Every possible result of `run` with its probability, once for each way of reaching it."""
    script: list[int] | None = []
    while script is not None:
        oracle = Oracle(script)
        result = run(oracle)
        yield oracle.probability, result
        script = None
        for depth, (_, untried) in reversed(list(enumerate(oracle.made))):
            if untried:
                script = [choice for choice, _ in oracle.made[:depth]] + [untried[0]]
                break


@dataclass
class Uniform:
    """A number that is uniform on what is still known of it: [low, high)."""

    oracle: Oracle
    interval: Interval = (0.0, 1.0)

    def __lt__(self, threshold: float) -> bool:
        return self._below(threshold, reaches=float(threshold) > self.interval[0])

    def __le__(self, threshold: float) -> bool:
        return self._below(threshold, reaches=float(threshold) >= self.interval[0])

    def _below(self, threshold: float, reaches: bool) -> bool:
        low, high = self.interval
        cut = min(max(float(threshold), low), high)
        below = (cut - low) / (high - low) if high > low else float(reaches)
        weights = [below if reaches else None, 1.0 - below if cut < high else None]
        is_below = self.oracle.choose(weights) == 0
        self.interval = (low, cut) if is_below else (cut, high)
        return is_below

    def draw(self, weights_V: torch.Tensor) -> int:
        """What `categorical` would make of it."""
        low, high = self.interval
        edges = [0.0, *(weights_V.cumsum(-1) / weights_V.sum()).tolist()]
        pieces = [(max(low, left), min(high, right)) for left, right in itertools.pairwise(edges)]
        return self.oracle.choose([(right - left) / (high - low) if right > left else None for left, right in pieces])


Uniforms = Callable[[int], list[Uniform]]  # the uniforms of a round's nodes, given their number


def load(old: str = "", new: str = "") -> ModuleType:
    """`verify.py` for `Uniform`s, with one edit."""
    source = inspect.getsource(verify)
    assert old in source, f"the mutant's text is gone: {old}"
    module = ModuleType(verify.__name__)
    module.__package__ = verify.__package__
    exec(compile(source.replace(old, new), verify.__file__, "exec"), vars(module))
    vars(module)["categorical"] = lambda weights_V, u: u.draw(weights_V)
    return module


@dataclass(frozen=True)
class World:
    """A target p and a draft q: distributions of the next token that depend on all before it, with zeros in both."""

    seed: int
    vocabulary: int = 3
    greedy: bool = False

    def p(self, context: Context) -> torch.Tensor:
        row_V = self._row(0, context)
        return torch.eye(self.vocabulary).double()[row_V.argmax()] if self.greedy else row_V

    def q(self, context: Context) -> torch.Tensor:
        """In one context of five the target's own distribution."""
        return self._row(0 if self._random(2, context).random() < 0.2 else 1, context)

    @cache  # noqa: B019 - worlds are few and small
    def _row(self, which: int, context: Context) -> torch.Tensor:
        random = self._random(which, context)
        row_V = random.dirichlet(np.ones(self.vocabulary)) * (random.random(self.vocabulary) < 0.75)
        row_V[random.integers(self.vocabulary)] += 0.05
        return torch.tensor(row_V / row_V.sum())

    def _random(self, which: int, context: Context) -> np.random.Generator:
        return np.random.default_rng([self.seed, which, len(context), *context])


class PaperWorld(World):
    """The example of block verification's paper: two tokens, no memory."""

    def p(self, context: Context) -> torch.Tensor:
        return torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)

    def q(self, context: Context) -> torch.Tensor:
        return torch.tensor([2 / 3, 1 / 3], dtype=torch.float64)


@dataclass(frozen=True)
class Round:
    """One round of a rule: drafts at most `depth` deep in `context`, verifies, returns the emitted tokens."""

    rule: str
    module: ModuleType
    width: int = 0
    """0: a chain drawn from q; else a tree of q's best tokens, so many at the root and fewer below the less likely."""

    def __call__(self, world: World, context: Context, depth: int, oracle: Oracle, uniforms: Uniforms) -> Context:
        paths = self._tree(world, context, depth) if self.width else self._chain(world, context, depth, oracle)
        tokens = [path[-1] for path in paths]
        p_NV = torch.stack([world.p(context + path) for path in [(), *paths]])
        if self.width:
            parents = [paths.index(path[:-1]) if path[:-1] else ROOT for path in paths]
            draft: list[Any] = [DraftTree.of(tokens, parents, "deterministic")]
        else:
            draft = [torch.stack([world.q(context + path) for path in [(), *paths]])[:-1], tokens]
        numbers = [] if self.rule == "greedy" else [uniforms(len(paths)), Uniform(oracle)]
        verdict = getattr(self.module, f"verify_{self.rule}")(p_NV, *draft, *numbers)
        last = paths[verdict.accepted[-1]] if verdict.accepted else ()
        assert tuple(tokens[node] for node in verdict.accepted) == last
        return (*last, verdict.token)

    def _chain(self, world: World, context: Context, depth: int, oracle: Oracle) -> list[Context]:
        path: Context = ()
        for _ in range(depth):
            path = (*path, oracle.draw(world.q(context + path)))
        return [path[: i + 1] for i in range(depth)]

    def _tree(self, world: World, context: Context, depth: int, path: Context = (), narrower: int = 0) -> list[Context]:
        """Paths from the root to each node below `path`, depth first."""
        if len(path) == depth:
            return []
        paths: list[Context] = []
        best = world.q(context + path).argsort(descending=True)
        for rank, token in enumerate(best[: max(1, self.width - narrower)].tolist()):
            child = (*path, token)
            paths += [child, *self._tree(world, context, depth, child, narrower + rank)]
        return paths


def output_law(play: Round, world: World, length: int, depth: int, reuse: bool = False) -> dict[Context, float]:
    """The exact distribution of the first `length` tokens, over as many rounds as they take.

    A token of measure zero that can be emitted all the same is there with probability 0. `reuse`: a number belongs to a
    position of the output, so that the next round meets those that this one has already looked at.
    """

    def one_round(context: Context, known: dict[int, Interval], oracle: Oracle) -> tuple[Context, Known]:
        looked_at: list[Uniform] = []

        def uniforms(count: int) -> list[Uniform]:
            positions = range(len(context), len(context) + count)
            looked_at.extend(Uniform(oracle, known.get(position, (0.0, 1.0))) for position in positions)
            return looked_at

        after = context + play(world, context, min(depth, length - len(context) - 1), oracle, uniforms)
        seen = [(position, u.interval) for position, u in enumerate(looked_at, start=len(context))]
        return after, tuple(seen[len(after) - len(context) :]) if reuse else ()

    starts: list[dict[tuple[Context, Known], float]] = [defaultdict(float) for _ in range(length + 1)]
    starts[0][(), ()] = 1.0
    for emitted in range(length):
        for (context, known), mass in starts[emitted].items():
            for probability, state in every_way(partial(one_round, context, dict(known))):
                starts[len(state[0])][state] += mass * probability
    law: dict[Context, float] = defaultdict(float)
    for (context, _), mass in starts[length].items():
        law[context] += mass
    return law


def error(play: Round, world: World, length: int, depth: int, reuse: bool = False) -> float:
    """The largest difference to the target's distribution; infinite if what the target never says can be emitted."""
    law = output_law(play, world, length, depth, reuse)
    worst = 0.0
    for output in itertools.product(range(world.vocabulary), repeat=length):
        target = float(np.prod([float(world.p(output[:i])[token]) for i, token in enumerate(output)]))
        if target == 0.0 and output in law:
            return float("inf")
        worst = max(worst, abs(law.get(output, 0.0) - target))
    return worst


def mean_accepted(play: Round, world: World, depth: int) -> float:
    """Expected number of accepted tokens in one round."""

    def run(oracle: Oracle) -> int:
        return len(play(world, (), depth, oracle, lambda count: [Uniform(oracle) for _ in range(count)])) - 1

    return sum(probability * accepted for probability, accepted in every_way(run))


REAL = load()
TOKEN, BLOCK = Round("token", REAL), Round("block", REAL)
LOSSLESS = [TOKEN, BLOCK, Round("onehot", REAL, width=1), Round("onehot", REAL, width=2)]
GREEDY = [Round("greedy", REAL, width=1), Round("greedy", REAL, width=2)]
# world, length of the output, depth of the draft
GAMES = [*((World(seed), 5, 3) for seed in range(6)), *((World(seed, vocabulary=4), 4, 3) for seed in range(6, 12))]


def label(play: Round) -> str:
    return f"{play.rule}-{play.width}"


@pytest.mark.parametrize("play", LOSSLESS, ids=label)
@pytest.mark.parametrize(("world", "length", "depth"), GAMES)
def test_output_has_the_targets_distribution(play: Round, world: World, length: int, depth: int) -> None:
    assert error(play, world, length, depth) < 1e-10


@pytest.mark.parametrize("play", GREEDY + LOSSLESS, ids=label)
@pytest.mark.parametrize(("world", "length", "depth"), GAMES)
def test_at_temperature_zero_output_is_the_targets_best_tokens(
    play: Round, world: World, length: int, depth: int
) -> None:
    assert error(play, World(world.seed, world.vocabulary, greedy=True), length, depth) < 1e-10


RESIDUAL = "(weight * p_NV[row] - q_KV[row])"
MUTANTS = {
    "accepts at u = h": [
        ("token", "u_K[length] < min", "u_K[length] <= min"),
        ("block", "u_K[i - 1] < threshold", "u_K[i - 1] <= threshold"),
        ("onehot", "u_N[child] < float", "u_N[child] <= float"),
    ],
    "residual of p": [(rule, RESIDUAL, "p_NV[row]") for rule in ("token", "block")],
    "residual of q - p": [(rule, RESIDUAL, "(q_KV[row] - weight * p_NV[row])") for rule in ("token", "block")],
    "residual of a q that does not sum to one": [
        (rule, RESIDUAL, "(weight * p_NV[row] - q_KV[row] / 2)") for rule in ("token", "block")
    ],
    "bonus from q": [
        (rule, "        return p_NV[row]", "        return q_KV[-1] if row else p_NV[row]")
        for rule in ("token", "block")
    ],
    "accepts with q / p": [
        (rule, "float(p_NV[row, token]) / q if q > 0.0", "q / p if (p := float(p_NV[row, token])) > 0.0")
        for rule in ("token", "block")
    ],
    "block stops at the first failure": [
        ("block", "length, rest_V = i, residual_V", "length, rest_V = i, residual_V\n        else:\n            break")
    ],
    "block's residual without its weight": [("block", RESIDUAL, "(p_NV[row] - q_KV[row])")],
    "block's weight not capped": [("block", "tokens_K), 1.0)", "tokens_K), 1e9)")],
    "block's last threshold like the others": [("block", "if i < drafted else weight", "")],
    "block's residual of the longest draft": [("block", "_draw(rest_V,", "_draw(residual_V if drafted else rest_V,")],
    "onehot keeps the rejected child": [("onehot", "rest_V[token] = 0.0", "pass")],
    "onehot does not renormalise": [("onehot", "rest_V[token] / rest_V.sum()", "rest_V[token]")],
}


@pytest.mark.parametrize(
    ("rule", "old", "new"),
    [pytest.param(*edit, id=f"{edit[0]}: {name}") for name, edits in MUTANTS.items() for edit in edits],
)
def test_enumeration_kills_the_mutant(rule: str, old: str, new: str) -> None:
    mutant = Round(rule, load(old, new), width=2 if rule == "onehot" else 0)
    assert any(error(mutant, *game) > 1e-3 for game in GAMES)


def test_enumeration_kills_uniforms_reused_in_the_next_round() -> None:
    assert any(error(BLOCK, *game, reuse=True) > 1e-3 for game in GAMES)


def test_papers_example() -> None:
    world = PaperWorld(seed=0, vocabulary=2)
    assert mean_accepted(TOKEN, world, depth=2) == pytest.approx(10 / 9)
    assert mean_accepted(BLOCK, world, depth=2) == pytest.approx(11 / 9)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6), vocabulary=st.integers(2, 3), depth=st.integers(1, 3))
def test_block_accepts_at_least_as_much_as_token(seed: int, vocabulary: int, depth: int) -> None:
    world = World(seed, vocabulary)
    assert mean_accepted(BLOCK, world, depth) >= mean_accepted(TOKEN, world, depth) - 1e-12


class TestEdges:
    P = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]])

    def test_greedy_takes_logits_and_follows_the_tree(self) -> None:
        tree = DraftTree.of([1, 0, 2, 1], [ROOT, ROOT, 1, 1], "deterministic")
        logits = torch.zeros(5, 3)
        logits[0, 0] = logits[2, 1] = logits[4, 2] = 7.0
        assert verify_greedy(logits, tree) == ([1, 3], 2)

    @pytest.mark.parametrize("verify_chain", [verify_token, verify_block])
    def test_a_draft_equal_to_the_target_is_always_accepted(self, verify_chain: Callable[..., verify.Verdict]) -> None:
        u_K = torch.full((2,), 1.0 - 2.0**-53, dtype=torch.float64)
        assert verify_chain(self.P, self.P[:2], [2, 0], u_K, 0.0) == ([0, 1], 0)

    @pytest.mark.parametrize("verify_chain", [verify_token, verify_block])
    def test_a_token_that_q_cannot_draw_is_rejected(self, verify_chain: Callable[..., verify.Verdict]) -> None:
        q_KV = torch.tensor([[0.0, 1.0, 0.0]])
        assert verify_chain(self.P[:2], q_KV, [0], [0.0], 0.0) == ([], 0)

    def test_riders_are_never_accepted(self) -> None:
        tree = DraftTree((0, 1), (ROOT, ROOT), (0, 0), (False, True), "deterministic")
        assert verify_greedy(self.P, tree) == ([], 0)
        assert verify_onehot(self.P, tree, [0.0, 0.9], 0.0) == ([], 0)

    def test_rejects_a_target_with_too_few_rows(self) -> None:
        with pytest.raises(ValueError, match="p: 3 rows: must be 4"):
            verify_greedy(self.P, DraftTree.chain([0, 0, 0], "deterministic"))
        with pytest.raises(ValueError, match="q: 2 rows: must be 1"):
            verify_token(self.P[:2], self.P[:2], [0], [0.0], 0.0)

    def test_inputs_are_left_as_they_were(self) -> None:
        p_NV = self.P.double()
        before = p_NV.clone()
        verify_onehot(p_NV, DraftTree.of([0, 1], [ROOT, ROOT], "deterministic"), [0.9, 0.9], 0.5)
        assert torch.equal(p_NV, before)


class TestRegistry:
    def test_every_rule_has_its_function(self) -> None:
        assert all(callable(getattr(verify, f"verify_{name}")) for name in RULES)
        assert all(name == rule.name and rule.lossless for name, rule in RULES.items())

    def test_a_rule_refuses_drafts_that_it_would_distort(self) -> None:
        assert check_rule("token", "iid").needs_q
        assert not check_rule("onehot", "deterministic").needs_q
        with pytest.raises(InputError, match="rule: 'block': takes drafts drawn iid, not deterministic"):
            check_rule("block", "deterministic")
        with pytest.raises(InputError, match="rule: 'onehot': takes drafts drawn deterministic, not iid"):
            check_rule("onehot", "iid")

    def test_greedy_is_for_temperature_zero(self) -> None:
        assert check_rule("greedy", "iid", SamplingSettings()).greedy_only
        with pytest.raises(InputError, match=r"rule: 'greedy': is for temperature 0, not 0\.8"):
            check_rule("greedy", "iid", SamplingSettings(temperature=0.8))

    def test_an_unknown_rule_is_named_with_the_known_ones(self) -> None:
        with pytest.raises(InputError, match="rule: 'blocks': must be one of greedy, token, block, onehot"):
            check_rule("blocks", "iid")
