"""Accept rules: what a caller must know about each, which drafts each may judge, and which one is chosen.

`verify.py` states the rules one round at a time; `verify_batch.py` runs them for a batch. Nothing else decides which
rule judges a draft: `rules_for` does, from the sampling setting, the way of drafting, and the rules that a recipe and
its serving engine prefer.
"""

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple, Protocol

from ..errors import InputError
from .proposers.tree_shape import Drawn
from .sampling_settings import SamplingSettings

RuleName = Literal["greedy", "token", "block", "onehot", "match", "multiround", "recursive", "traversal", "typical"]
ENGINE_RULES: dict[str, RuleName] = {"vllm": "onehot", "sglang": "onehot", "llama.cpp": "onehot"}
"""Accept rule of each serving engine above temperature 0, unless it is asked for another."""

_ENGINES = ("vllm", "sglang", "llama.cpp", "tensorrt-llm", "transformers")
_IID: frozenset[Drawn] = frozenset({"iid"})
_ANY: frozenset[Drawn] = frozenset({"deterministic", "iid", "without_replacement"})


class Drafts(Protocol):
    """Facts that a rule must know about the drafts that it judges. Every proposer gives them."""

    @property
    def drawn(self) -> Drawn: ...  # how siblings are drawn where a rule wants draws; deterministic: always chosen

    @property
    def chain(self) -> bool: ...  # whether every draft is a chain


class Rule(NamedTuple):
    """Accept rule: the facts that a caller must know about it."""

    name: RuleName
    drawn: frozenset[Drawn]
    """Ways of drafting that the rule takes; for a lossless rule, some or all of those for which it is lossless."""
    engines: tuple[str, ...] = ()
    """Engines that verify by this rule, by default or when asked to."""
    trees: bool = False
    """Whether the rule judges trees; else chains only."""
    needs_q: bool = False
    """Whether the rule reads the distributions q that the draft was drawn from."""
    greedy_only: bool = False
    """Whether the rule holds at temperature 0 only."""
    lossless: bool = True
    """Whether the output has the target's distribution."""

    @property
    def draws(self) -> bool:
        """Whether drafts are drawn from q under it, above temperature 0, where the proposer can draw."""
        return self.needs_q or self.name == "match"

    def draws_from(self, drafts: Drafts, sampling: SamplingSettings) -> bool:
        """Whether drafted tokens are drawn from q at that setting; else the likeliest are chosen."""
        return self.draws and drafts.drawn != "deterministic" and not sampling.greedy

    def target_draws(self, levels: int) -> int:
        """Number of tokens that the target draws itself in a round of so many levels, each with a random number."""
        return levels + 1 if self.name == "match" else 1

    def check_drawn(self, drawn: Drawn) -> None:
        """Raise InputError where the rule does not take drafts drawn in that way."""
        if drawn not in self.drawn:
            raise InputError(f"rule: {self.name!r}: takes drafts drawn {' or '.join(sorted(self.drawn))}, not {drawn}")

    @property
    def label(self) -> str:
        """The name as outputs show it: a lossy rule says so."""
        return self.name if self.lossless else f"{self.name} (lossy)"


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        # Accept what equals the target's most likely token.
        Rule("greedy", _ANY, _ENGINES, trees=True, greedy_only=True),
        # Draft sampled from q: accept each token with min(1, p / q).
        Rule("token", _IID, ("vllm", "sglang", "transformers"), needs_q=True),
        # Draft sampled from q: judge the chain as a whole, never accepting less than token.
        Rule("block", _IID, ("vllm",), needs_q=True),
        # Draft takes its most likely tokens: accept each with the target's p.
        Rule("onehot", frozenset({"deterministic"}), ("vllm", "sglang", "llama.cpp"), trees=True),
        # Draw the target's own token after each accepted one: accept the child that equals it.
        Rule("match", _ANY, ("llama.cpp", "transformers"), trees=True),
        # Siblings sampled with replacement, each from its own q: each is tried on what is left of p.
        Rule("multiround", _IID, trees=True, needs_q=True),
        # Siblings sampled without replacement: each is judged by what is left of p and of q.
        Rule("recursive", frozenset({"without_replacement"}), trees=True, needs_q=True),
        # A sampled tree judged from its leaves to the root: on a chain it is block.
        Rule("traversal", frozenset({"iid", "without_replacement"}), trees=True, needs_q=True),
        # Accept what the target finds typical: the output's distribution changes.
        Rule("typical", _ANY, ("tensorrt-llm",), trees=True, lossless=False),
    )
}


def known_rule(name: str) -> Rule:
    """The rule of that name. Raises InputError, which lists those there are."""
    rule = RULES.get(name)
    if rule is None:
        raise InputError(f"rule: {name!r}: must be one of {', '.join(RULES)}")
    return rule


def check_rule(name: str, drafts: Drafts, sampling: SamplingSettings) -> Rule:
    """The rule of that name. Raises InputError where it does not take such drafts at that sampling setting.

    At temperature 0 nothing is drawn and every rule is the greedy one: only trees may then be refused.
    """
    rule = known_rule(name)
    # Above temperature 0 the way of drawing must suit; drafts are chosen where the rule has no use for draws.
    if not sampling.greedy:
        if drafts.drawn == "deterministic" and rule.needs_q:
            raise InputError(f"rule: {name!r}: reads the draft's probabilities; this proposer has none, use onehot")
        rule.check_drawn(drafts.drawn if rule.draws else "deterministic")
    # Shape and temperature.
    if not drafts.chain and not rule.trees:
        raise InputError(f"rule: {name!r}: takes chains, not trees")
    if rule.greedy_only and not sampling.greedy:
        raise InputError(f"rule: {name!r}: is for temperature 0, not {sampling.temperature}")
    return rule


def preferred_rules(
    named: Sequence[RuleName], engine: str | None = None, engine_rule: RuleName | None = None
) -> list[RuleName]:
    """The rules above temperature 0 in order of preference: the serving engine's, then those that a recipe names.

    `engine_rule`: the engine's rule where it is not its usual one.
    """
    # The engine's own rule comes first; duplicates and `greedy`, which needs no naming, are left out.
    first = engine_rule or ENGINE_RULES.get(engine or "")
    return list(dict.fromkeys(rule for rule in (first, *named) if rule is not None and rule != "greedy"))


def rules_for(sampling: SamplingSettings, drafts: Drafts, preferred: Sequence[str]) -> list[str]:
    """The accept rules that judge such drafts, the deciding one first; lossy ones last.

        temperature    drafts                           rules
        0              all                              greedy: every lossless rule is that one there
        above 0        all                              those of `preferred` that take them; where no lossless one does
                       chosen (deterministic)           onehot before them
                       chains drawn from q              token
                       trees drawn from q, iid          multiround
                       trees, without replacement       recursive

    A rule for sampled trees is not used on chains, where it equals a rule for chains.
    """
    if sampling.greedy:
        return ["greedy"]
    # A lossy rule never decides: without a lossless preference the usual rule of such drafts does.
    suited = [name for name in preferred if takes(name, drafts, sampling)]
    lossless = [name for name in suited if RULES[name].lossless]
    return [*(lossless or [_fallback(drafts)]), *(name for name in suited if name not in lossless)]


def choose_rule(sampling: SamplingSettings, drafts: Drafts, preferred: Sequence[str], asked: str | None = None) -> str:
    """The rule that decides: `asked`, or the first of `rules_for`. Raises InputError where `asked` cannot."""
    if asked is None:
        return rules_for(sampling, drafts, preferred)[0]
    check_rule(asked, drafts, sampling)
    return "greedy" if sampling.greedy else asked


def deciding_rule(counted: Collection[str], preferred: Sequence[str]) -> str:
    """Rule that decides among those that a draft was scored by: the one that `rules_for` would put first."""
    # Preferred rules, then the fallbacks; whatever else was counted decides only alone.
    order = ("greedy", *preferred, *_FALLBACKS)
    lossless = [name for name in counted if RULES[name].lossless]
    return next((name for name in order if name in lossless), lossless[0])


def takes(name: str, drafts: Drafts, sampling: SamplingSettings) -> bool:
    """Whether `rules_for` may name that rule for such drafts at that setting."""
    rule = RULES[name]
    if drafts.chain and rule.trees and rule.needs_q:
        return False  # on a chain it equals a rule for chains, which is named instead
    try:
        check_rule(name, drafts, sampling)
    except InputError:
        return False
    return True


_FALLBACKS: tuple[RuleName, ...] = ("multiround", "recursive", "token", "onehot")
"""Fallback rules of `rules_for`; a way of drafting is scored by one of them at most."""


def _fallback(drafts: Drafts) -> RuleName:
    if drafts.drawn == "deterministic":
        return "onehot"
    if drafts.chain:
        return "token"
    return "multiround" if drafts.drawn == "iid" else "recursive"
