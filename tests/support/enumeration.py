"""Exact distributions of what accept rules emit, by enumeration.

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
import torch
from torch import Tensor

from draftforge.specdec import verify
from draftforge.specdec.proposers.tree_shape import ROOT, Drawn
from draftforge.specdec.tree import DraftTree

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

    def draw(self, p_V: Tensor) -> int:
        return self.choose([p if p > 0 else None for p in p_V.tolist()])


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

    def draw(self, weights_V: Tensor) -> int:
        """What `categorical` would make of it."""
        low, high = self.interval
        edges = [0.0, *(weights_V.cumsum(-1) / weights_V.sum()).tolist()]
        pieces = [(max(low, left), min(high, right)) for left, right in itertools.pairwise(edges)]
        token = self.oracle.choose([(right - left) / (high - low) if right > left else None for left, right in pieces])
        self.interval = pieces[token]
        return token


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
    """A target p and drafts q: distributions of the next token that depend on all before it, with zeros in both."""

    seed: int
    vocabulary: int = 3
    greedy: bool = False

    def p(self, context: Context) -> Tensor:
        row_V = self._row(0, context)
        return torch.eye(self.vocabulary).double()[row_V.argmax()] if self.greedy else row_V

    def q(self, context: Context, draft: int = 0) -> Tensor:
        """In one context of five the target's own distribution."""
        return self._row(0 if self._random(99, context).random() < 0.2 else 1 + draft, context)

    @cache  # noqa: B019 - worlds are few and small
    def _row(self, which: int, context: Context) -> Tensor:
        random = self._random(which, context)
        row_V = random.dirichlet(np.ones(self.vocabulary)) * (random.random(self.vocabulary) < 0.75)
        row_V[random.integers(self.vocabulary)] += 0.05
        return torch.tensor(row_V / row_V.sum())

    def _random(self, which: int, context: Context) -> np.random.Generator:
        return np.random.default_rng([self.seed, which, len(context), *context])


@dataclass(frozen=True)
class Memoryless(World):
    """The same p and q in every context."""

    p_V: tuple[float, ...] = ()
    q_V: tuple[float, ...] = ()

    def p(self, context: Context) -> Tensor:
        return torch.tensor(self.p_V, dtype=torch.float64)

    def q(self, context: Context, draft: int = 0) -> Tensor:
        return torch.tensor(self.q_V, dtype=torch.float64)


def apply_rule(
    module: ModuleType, rule: str, p_NV: Tensor, q_NV: Tensor, tree: DraftTree, u_N: Any, u_final_D: Any
) -> verify.Verdict:
    """The readable rule of that name, given what it reads."""
    function = getattr(module, f"verify_{rule}")
    u_final = u_final_D[0]
    match rule:
        case "greedy":
            arguments: tuple[Any, ...] = (p_NV, tree)
        case "token" | "block":
            arguments = (p_NV, q_NV, tree.tokens_N, u_N, u_final)
        case "onehot":
            arguments = (p_NV, tree, u_N, u_final)
        case "match":
            arguments = (p_NV, tree, u_final_D)
        case "typical":
            arguments = (p_NV, tree, u_final)
        case _:
            arguments = (p_NV, q_NV, tree, u_N, u_final)
    verdict: verify.Verdict = function(*arguments)
    return verdict


CHAIN = (ROOT, 0, 1)


@dataclass(frozen=True)
class Round:
    """One round of a rule: drafts at most `depth` deep in `context`, verifies, returns the emitted tokens."""

    rule: str
    module: ModuleType
    drawn: Drawn = "iid"
    shape: tuple[int, ...] = CHAIN
    """Parents of the nodes that are drafted, unless they are too deep or q has no token left for them."""
    drafts: int = 1
    """Siblings are drawn from so many drafts in turn."""

    def __call__(self, world: World, context: Context, depth: int, oracle: Oracle, uniforms: Uniforms) -> Context:
        paths, parents, q_rows = self._draft(world, context, depth, oracle)
        p_NV = torch.stack([world.p(context + path) for path in [(), *paths]])
        q_NV = torch.stack(q_rows) if q_rows else p_NV[:0]
        tree = DraftTree.of([path[-1] for path in paths], parents, self.drawn)
        finals = [Uniform(oracle) for _ in range(depth + 1)]
        verdict = apply_rule(self.module, self.rule, p_NV, q_NV, tree, uniforms(len(paths)), finals)
        last = paths[verdict.accepted[-1]] if verdict.accepted else ()
        assert tuple(tree.tokens_N[node] for node in verdict.accepted) == last
        return (*last, verdict.token)

    def _draft(
        self, world: World, context: Context, depth: int, oracle: Oracle
    ) -> tuple[list[Context], list[int], list[Tensor]]:
        """Of every node its path from the root, its parent, and the distribution its draft had for it."""
        paths: list[Context] = []
        parents: list[int] = []
        q_rows: list[Tensor] = []
        drafted = {ROOT: ROOT}  # places in the shape -> nodes
        for place, above in enumerate(self.shape):
            path = paths[drafted[above]] if drafted.get(above, ROOT) != ROOT else ()
            if above not in drafted or len(path) == depth:
                continue
            siblings = [paths[node][-1] for node, parent in enumerate(parents) if parent == drafted[above]]
            q_V = world.q(context + path, len(siblings) % self.drafts)
            token = self._token(q_V, siblings, oracle)
            if token is not None:
                drafted[place] = len(paths)
                paths.append((*path, token))
                parents.append(drafted[above])
                q_rows.append(q_V)
        return paths, parents, q_rows

    def _token(self, q_V: Tensor, siblings: list[int], oracle: Oracle) -> int | None:
        if self.drawn == "iid":
            return oracle.draw(q_V)
        if self.drawn == "deterministic":
            return int(q_V.argsort(descending=True)[len(siblings)]) if len(siblings) < len(q_V) else None
        left_V = q_V.clone()
        left_V[siblings] = 0.0
        return oracle.draw(left_V / left_V.sum()) if left_V.any() else None


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


def round_law(play: Round, world: World, depth: int) -> dict[Context, float]:
    """The exact distribution of what one round emits."""
    law: dict[Context, float] = defaultdict(float)
    for probability, emitted in every_way(
        lambda oracle: play(world, (), depth, oracle, lambda count: [Uniform(oracle) for _ in range(count)])
    ):
        law[emitted] += probability
    return law


def error(play: Round, world: World, length: int, depth: int, reuse: bool = False) -> float:
    """The largest difference to the target's distribution; infinite if what the target never says can be emitted."""
    return _worst(output_law(play, world, length, depth, reuse), world, length)


def round_error(play: Round, world: World, depth: int) -> float:
    """As `error`, of one round, after which the target itself goes on to depth + 1 tokens."""
    return _worst(round_law(play, world, depth), world, depth + 1)


def mean_accepted(play: Round, world: World, depth: int) -> float:
    """Expected number of accepted tokens in one round."""
    return sum(probability * (len(emitted) - 1) for emitted, probability in round_law(play, world, depth).items())


def _worst(law: dict[Context, float], world: World, length: int) -> float:
    worst = 0.0
    for output in itertools.product(range(world.vocabulary), repeat=length):
        p_N = [float(world.p(output[:i])[token]) for i, token in enumerate(output)]
        prefixes = [output[:i] for i in range(1, length + 1)]
        if any(prefix in law and min(p_N[: len(prefix)]) == 0.0 for prefix in prefixes):
            return float("inf")
        emitted = sum(law[prefix] * float(np.prod(p_N[len(prefix) :])) for prefix in prefixes if prefix in law)
        worst = max(worst, abs(emitted - float(np.prod(p_N))))
    return worst
