"""Rounds of several decoders that take turns, so that all see the same machine.

What else runs on a machine can make every round three times as long for seconds at a time. Plain decoding and every K
or tree therefore decode by turns, round by round, and what counts is a round's time over that of the plain round beside
it.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..progress import say
from ..specdec.decoder import decode_rounds
from ..specdec.models import CausalModel
from ..specdec.proposers.base import Proposer
from ..specdec.requests import Request, RoundSeconds, RoundTimer, Run
from ..specdec.sampling import SamplingSettings
from .plans import Drafting, Plan, rules_for
from .settings import ScoreSettings

_FEWEST_ROUNDS = 5


class Mode(NamedTuple):
    """One of the decoders that take turns."""

    plan: Plan
    proposer: Proposer | None
    rule: str
    nodes: int
    """Of a full draft."""

    @classmethod
    def of(cls, plan: Plan, drafting: Drafting, settings: ScoreSettings) -> "Mode":
        proposer = drafting.make()
        return cls(plan, proposer, deciding_rule(drafting, settings), proposer.most_nodes(plan.levels))


PLAIN_MODE = Mode(Plan(0), None, "greedy", 0)


class Parts(NamedTuple):
    """Seconds of a typical round."""

    draft: float
    verify: float
    rest: float
    rounds: int
    """Behind the times."""


def deciding_rule(drafting: Drafting, settings: ScoreSettings) -> str:
    """The rule under which rounds are timed: that of the first sampling setting."""
    return rules_for(settings.sampling[0], drafting.proposer, settings)[0]


def most_tokens(rounds: int, levels: int) -> int:
    """Tokens of an answer that lasts so many rounds, none of them with its draft clipped."""
    return 1 + rounds * (levels + 1)


def by_turns(
    target: CausalModel,
    modes: Sequence[Mode],
    prompts: Sequence[list[int]],
    sampling: SamplingSettings,
    rounds: int,
) -> dict[Plan, list[RoundSeconds]]:
    """Every mode decodes the prompts, all of them at once; they take turns after each round."""
    timers = {mode.plan: RoundTimer(target.device) for mode in modes}
    turns = [decode_rounds(_run(target, mode, prompts, sampling, rounds, timers[mode.plan])) for mode in modes]
    for _ in range(rounds + 1):  # the first turn reads the prompts
        for turn in turns:
            next(turn)
    return {plan: timer.rounds for plan, timer in timers.items()}


def _run(
    target: CausalModel,
    mode: Mode,
    prompts: Sequence[list[int]],
    sampling: SamplingSettings,
    rounds: int,
    timer: RoundTimer,
) -> Run:
    longest, levels = most_tokens(rounds, mode.plan.levels), max(mode.plan.levels, 1)
    requests = [Request(prompt, sampling, seed, longest) for seed, prompt in enumerate(prompts)]
    return Run(target, mode.proposer, requests, mode.rule, levels, batch_size=len(prompts), timer=timer)


def plain_seconds(plain: Sequence[RoundSeconds]) -> float:
    """Of a plain round: the lower quartile, which is of rounds that nothing else slowed down."""
    return lower_quartile([one.total for one in plain])


def typical(mode: Mode, rounds: Sequence[RoundSeconds], plain: Sequence[RoundSeconds], where: str = "") -> Parts:
    """Times of rounds with a full draft, each as a share of the plain round beside it.

    A proposer that seldom drafts that many is timed on what it does draft.
    """
    pairs, seconds = list(zip(rounds, plain)), plain_seconds(plain)
    full = [(one, beside) for one, beside in pairs if one.drafted == mode.nodes]
    if len(full) < min(_FEWEST_ROUNDS, len(pairs)):
        say(
            f"times of {mode.plan}{where}: only {len(full)} full rounds; taken from all {len(pairs)} that were not "
            "warm-up"
        )
        full = pairs

    def middle(part: Callable[[RoundSeconds], float]) -> float:
        return seconds * statistics.median(part(one) / beside.total for one, beside in full)

    draft, verify = middle(lambda one: one.draft), middle(lambda one: one.verify)
    return Parts(draft, verify, middle(lambda one: one.rest), len(full))


def lower_quartile(values: Sequence[float]) -> float:
    """Interpolated; of one value, itself."""
    return statistics.quantiles(values, n=4, method="inclusive")[0] if len(values) > 1 else values[0]
