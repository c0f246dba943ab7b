"""The registry of accept rules: what a caller must know about each, and which drafts each may judge.

`verify.py` states the rules one round at a time; `verify_batch.py` runs them for a batch.
"""

from typing import NamedTuple

from ..errors import InputError
from .sampling import SamplingSettings
from .tree import Drawn

_ANY: frozenset[Drawn] = frozenset({"deterministic", "iid", "without_replacement"})


class Rule(NamedTuple):
    """What a caller must know about an accept rule."""

    name: str
    lossless: bool
    """Whether the output has the target's distribution."""
    drawn: frozenset[Drawn]
    """The ways of drafting that it takes: for a lossless rule, some or all of those for which it is lossless."""
    trees: bool
    """Whether it walks trees; else chains only."""
    needs_q: bool
    """Whether it reads the distributions that the draft was drawn from."""
    greedy_only: bool
    """Whether it holds at temperature 0 only."""
    description: str
    engines: tuple[str, ...]
    """Engines that verify this way, by default or when asked to."""

    @property
    def draws(self) -> bool:
        """Whether drafts are drawn from q under it, above temperature 0, where the proposer can draw."""
        return self.needs_q or self.name == "match"

    def finals(self, levels: int) -> int:
        """How many tokens of its own the target draws in a round of so many levels, each with a number."""
        return levels + 1 if self.name == "match" else 1

    @property
    def label(self) -> str:
        """The name as outputs show it: a lossy rule says so."""
        return self.name if self.lossless else f"{self.name} (lossy)"


RULES = {
    rule.name: rule
    for rule in (
        Rule(
            name="greedy",
            lossless=True,
            drawn=_ANY,
            trees=True,
            needs_q=False,
            greedy_only=True,
            description="accept what equals the target's most likely token",
            engines=("vllm", "sglang", "llama.cpp", "tensorrt-llm", "transformers"),
        ),
        Rule(
            name="token",
            lossless=True,
            drawn=frozenset({"iid"}),
            trees=False,
            needs_q=True,
            greedy_only=False,
            description="draft sampled from q; accept each token with min(1, p/q)",
            engines=("vllm", "sglang", "transformers"),
        ),
        Rule(
            name="block",
            lossless=True,
            drawn=frozenset({"iid"}),
            trees=False,
            needs_q=True,
            greedy_only=False,
            description="draft sampled from q; judge the chain as a whole, never accepting less than token",
            engines=("vllm",),
        ),
        Rule(
            name="onehot",
            lossless=True,
            drawn=frozenset({"deterministic"}),
            trees=True,
            needs_q=False,
            greedy_only=False,
            description="draft takes its most likely tokens; accept each with the target's p",
            engines=("vllm", "sglang", "llama.cpp"),
        ),
        Rule(
            name="match",
            lossless=True,
            drawn=_ANY,
            trees=True,
            needs_q=False,
            greedy_only=False,
            description="draw the target's own token after each accepted one; accept the child that equals it",
            engines=("llama.cpp", "transformers"),
        ),
        Rule(
            name="multiround",
            lossless=True,
            drawn=frozenset({"iid"}),
            trees=True,
            needs_q=True,
            greedy_only=False,
            description="siblings sampled with replacement, each from its own q; each is tried on what is left of p",
            engines=(),
        ),
        Rule(
            name="recursive",
            lossless=True,
            drawn=frozenset({"without_replacement"}),
            trees=True,
            needs_q=True,
            greedy_only=False,
            description="siblings sampled without replacement; each judged by what is left of p and of q",
            engines=(),
        ),
        Rule(
            name="traversal",
            lossless=True,
            drawn=frozenset({"iid", "without_replacement"}),
            trees=True,
            needs_q=True,
            greedy_only=False,
            description="a sampled tree judged from its leaves to the root; on a chain it is block",
            engines=(),
        ),
        Rule(
            name="typical",
            lossless=False,
            drawn=_ANY,
            trees=True,
            needs_q=False,
            greedy_only=False,
            description="accept what the target finds typical; the output's distribution changes",
            engines=("tensorrt-llm",),
        ),
    )
}


def known_rule(name: str) -> Rule:
    """The rule of that name, or InputError listing those there are."""
    rule = RULES.get(name)
    if rule is None:
        raise InputError(f"rule: {name!r}: must be one of {', '.join(RULES)}")
    return rule


def check_rule(name: str, drawn: Drawn, sampling: SamplingSettings | None = None, trees: bool = False) -> Rule:
    """The rule of that name, or InputError where it does not take such a draft (`trees`: one that may branch)."""
    rule = known_rule(name)
    if drawn not in rule.drawn:
        raise InputError(f"rule: {name!r}: takes drafts drawn {' or '.join(sorted(rule.drawn))}, not {drawn}")
    if trees and not rule.trees:
        raise InputError(f"rule: {name!r}: takes chains, not trees")
    if rule.greedy_only and sampling is not None and not sampling.greedy:
        raise InputError(f"rule: {name!r}: is for temperature 0, not {sampling.temperature}")
    return rule
