"""Accept rules: which drafted tokens of one round survive, and which token ends it. The readable reference.

Every function is pure. p is the target's distribution, q the draft's, both after the same sampling processors and with
float64 inside. u are uniforms in [0, 1) that serve this round alone; a token is accepted iff u < h, its threshold.

Shapes: N drafted nodes, K drafted tokens of a chain, V vocabulary. Row 0 of p stands after the last emitted token, row
i+1 after node i. Row i of q is the distribution that node i was drawn from.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..errors import InputError
from .sampling import SamplingSettings, categorical
from .tree import ROOT, DraftTree, Drawn

Numbers = Sequence[float] | Tensor


class Verdict(NamedTuple):
    """What one round emits."""

    accepted: list[int]
    """Indexes of the accepted nodes, root to leaf."""
    token: int
    """The correction or bonus that follows them."""


def verify_greedy(p_NV: Tensor, tree: DraftTree) -> Verdict:
    """Accept what equals the target's best token. `p` has N+1 rows and may be logits."""
    _check_rows("p", p_NV, len(tree) + 1)
    best_N: list[int] = p_NV.argmax(-1).tolist()
    accepted: list[int] = []
    node = ROOT
    while matching := [child for child in tree.children(node) if tree.tokens_N[child] == best_N[node + 1]]:
        node = matching[0]
        accepted.append(node)
    return Verdict(accepted, best_N[node + 1])


def verify_token(p_NV: Tensor, q_KV: Tensor, tokens_K: Sequence[int], u_K: Numbers, u_final: float) -> Verdict:
    """Token verification (Leviathan et al., Chen et al. 2023) of a chain drawn from q. `p` has K+1 rows."""
    drafted = len(tokens_K)
    p_NV, q_KV = _distributions("p", p_NV, drafted + 1), _distributions("q", q_KV, drafted)
    length = 0
    # Accept x_i with probability min(1, p(x_i) / q(x_i)); stop at the first rejection.
    while length < drafted and u_K[length] < min(1.0, _ratio(p_NV, q_KV, length, tokens_K)):
        length += 1
    # Rejected: emit from norm(max(p - q, 0)). All accepted: a bonus from p.
    rest_V = _residual(1.0, p_NV, q_KV, length)
    return Verdict(list(range(length)), _draw(rest_V, p_NV[length], u_final))


def verify_block(p_NV: Tensor, q_KV: Tensor, tokens_K: Sequence[int], u_K: Numbers, u_final: float) -> Verdict:
    """Block verification (Sun et al., ICLR 2025) of a chain drawn from q. `p` has K+1 rows.

    Accepts at least as many tokens on average as token verification: a likely token makes up for an unlikely one.
    """
    drafted = len(tokens_K)
    p_NV, q_KV = _distributions("p", p_NV, drafted + 1), _distributions("q", q_KV, drafted)
    weight = 1.0  # P_0 = 1
    length, rest_V = 0, _residual(weight, p_NV, q_KV, 0)
    for i in range(1, drafted + 1):
        # P_i = min(P_{i-1} p(x_i) / q(x_i), 1), p and q being those that x_i was judged by and drawn from.
        weight = min(weight * _ratio(p_NV, q_KV, i - 1, tokens_K), 1.0)
        # Z_i = sum_x max(P_i p(x) - q(x), 0), p and q being those of the token after x_i.
        residual_V = _residual(weight, p_NV, q_KV, i)
        # h_i = Z_i / (Z_i + 1 - P_i) for i < K; h_K = P_K.
        threshold = _share(float(residual_V.sum()), 1.0 - weight) if i < drafted else weight
        # Accept up to the *last* i with u_i < h_i: a failure does not end the search.
        if u_K[i - 1] < threshold:
            length, rest_V = i, residual_V
    # Emit from norm(max(P_i p - q, 0)), or after all K a bonus from p.
    return Verdict(list(range(length)), _draw(rest_V, p_NV[length], u_final))


def verify_onehot(p_NV: Tensor, tree: DraftTree, u_N: Numbers, u_final: float) -> Verdict:
    """Verification of children that were chosen, not drawn, in a chain or a tree. `p` has N+1 rows."""
    p_NV = _distributions("p", p_NV, len(tree) + 1)
    accepted: list[int] = []
    rest_V, children = p_NV[0], tree.children(ROOT)
    while children:
        child = children.pop(0)
        token = tree.tokens_N[child]
        # Accept child x with probability p(x), and go on below it ...
        if u_N[child] < float(rest_V[token] / rest_V.sum()):
            accepted.append(child)
            rest_V, children = p_NV[child + 1], tree.children(child)
        # ... else p(x) <- 0, renormalised (by the sum above), for its next sibling.
        else:
            rest_V[token] = 0.0
    # No child left: emit from the rest.
    return Verdict(accepted, _draw(rest_V, rest_V, u_final))


class Rule(NamedTuple):
    """What a caller must know about an accept rule."""

    name: str
    lossless: bool
    """Whether the output has the target's distribution."""
    drawn: frozenset[Drawn]
    """The ways of drafting for which that holds."""
    needs_q: bool
    """Whether it reads the distributions that the draft was drawn from."""
    greedy_only: bool
    """Whether it holds at temperature 0 only."""
    description: str
    trees: bool = False
    draws: bool = False
    engines: tuple[str, ...] = ()
    """Engines that verify this way, by default or when asked to."""


RULES = {
    rule.name: rule
    for rule in (
        Rule(
            name="greedy",
            trees=True,
            lossless=True,
            drawn=frozenset({"deterministic", "iid", "without_replacement"}),
            needs_q=False,
            greedy_only=True,
            description="accept what equals the target's most likely token",
            engines=("vllm", "sglang", "llama.cpp", "tensorrt-llm", "transformers"),
        ),
        Rule(
            name="token",
            draws=True,
            lossless=True,
            drawn=frozenset({"iid"}),
            needs_q=True,
            greedy_only=False,
            description="draft sampled from q; accept each token with min(1, p/q)",
            engines=("vllm", "sglang", "transformers"),
        ),
        Rule(
            name="block",
            draws=True,
            lossless=True,
            drawn=frozenset({"iid"}),
            needs_q=True,
            greedy_only=False,
            description="draft sampled from q; judge the chain as a whole, never accepting less than token",
            engines=("vllm",),
        ),
        Rule(
            name="onehot",
            trees=True,
            lossless=True,
            drawn=frozenset({"deterministic"}),
            needs_q=False,
            greedy_only=False,
            description="draft takes its most likely tokens; accept each with the target's p",
            engines=("vllm", "sglang", "llama.cpp"),
        ),
    )
}


def check_rule(name: str, drawn: Drawn, sampling: SamplingSettings | None = None) -> Rule:
    """The rule of that name, or InputError where it would not be lossless for such a draft (and sampling)."""
    rule = RULES.get(name)
    if rule is None:
        raise InputError(f"rule: {name!r}: must be one of {', '.join(RULES)}")
    if drawn not in rule.drawn:
        raise InputError(f"rule: {name!r}: takes drafts drawn {' or '.join(sorted(rule.drawn))}, not {drawn}")
    if rule.greedy_only and sampling is not None and not sampling.greedy:
        raise InputError(f"rule: {name!r}: is for temperature 0, not {sampling.temperature}")
    return rule


def _check_rows(name: str, rows: Tensor, count: int) -> None:
    if rows.shape[0] != count:
        raise ValueError(f"{name}: {rows.shape[0]} rows: must be {count} for this draft")


def _distributions(name: str, rows_NV: Tensor, count: int) -> Tensor:
    """A float64 copy whose rows sum to one, as the draws from them assume; fp32 rows are off by 1e-7."""
    _check_rows(name, rows_NV, count)
    rows_NV = rows_NV.double()
    return rows_NV / rows_NV.sum(-1, keepdim=True)


def _ratio(p_NV: Tensor, q_KV: Tensor, row: int, tokens_K: Sequence[int]) -> float:
    """p(x) / q(x) of a drafted token. q never draws a token of q(x) = 0; a caller who names one sees it rejected."""
    token = tokens_K[row]
    q = float(q_KV[row, token])
    return float(p_NV[row, token]) / q if q > 0.0 else 0.0


def _residual(weight: float, p_NV: Tensor, q_KV: Tensor, row: int) -> Tensor:
    """max(P p - q, 0) [V] of a row that has a q; p itself of the last row, which has none."""
    if row == len(q_KV):
        return p_NV[row]
    return (weight * p_NV[row] - q_KV[row]).clamp(min=0.0)


def _share(part: float, rest: float) -> float:
    """part / (part + rest), and 1, its limit as `rest` vanishes first, where both are 0."""
    return part / (part + rest) if rest > 0.0 else 1.0


def _draw(weights_V: Tensor, target_V: Tensor, u: float) -> int:
    """Draw from norm(weights); from the target where they have no mass, as when p = q rejects by a rounding."""
    return int(categorical(weights_V if float(weights_V.sum()) > 0.0 else target_V, u))
