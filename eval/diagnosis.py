"""Diagnosis of a draft: its acceptance along recorded answers, and the changes of its reading that restore it.

All readings are replayed along one pass of the target, whose layers are captured once. Two readings are compared at
every token of the answers, as if a round started there: the rounds of decoding soon start at other tokens for one than
for the other, and what lies between them is chance. A change restores where it is accepted more there with
significance, corrected for the number of changes that were tried, and tau gains no trifle. Of changes that restore
alike the first in the order of likelihood is taken; then the search goes on from it, as faults may come together.

Shapes: A answers, B answers of a pack, T tokens of the longest, R tokens at which a round may start, K drafted
tokens, H hidden size.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..data.batches import buckets
from ..progress import Advance
from ..specdec.cuda_graphs import running
from ..specdec.diagnosis.hypotheses import HYPOTHESES, LAST_RESORTS, Hypothesis
from ..specdec.diagnosis.reading import Reading, Scene
from ..specdec.models import CausalModel, States
from ..specdec.proposers.factory import make_proposer
from ..specdec.proposers.other_device import device_of
from ..specdec.replay.expected_rounds import RoundCounts, survival_chosen, walk_expected
from ..specdec.replay.replay import rank_accuracies
from ..specdec.replay.target_trace import RecordedAnswer, TargetTrace, trace_target
from ..specdec.sampling_settings import SamplingSettings
from .acceptance import Estimate, ratio

GREEDY = SamplingSettings()
CONFIDENCE = 0.95  # of figures that are shown
FALSE_ALARM = 0.01
"""Chance that any of all changes that are tried on a healthy draft seems to be better (Bonferroni)."""
LEAST_GAIN, CLEAR_GAIN, FURTHER_GAIN, LIKELY = 0.01, 0.04, 0.08, 4
"""Least gain in tau, as a share of it: by the first LIKELY hypotheses, and by any of a draft that is below its record;
by the others, and of a second fault by the likely ones; of a second fault by the others. Some changes do make a healthy
draft a little better."""
_TIE = 0.005  # of tau: changes that restore as much as the best
_FAR = (1.5, 2.0)
"""Least factor on accepted tokens a round, of a draft below its family's floor: to above the floor, and from half of it
on."""
_STATE_BYTES = 2 << 30
_PASS_TOKENS = 2048
_SCREENED, _SCREENED_TOKENS, _CONFIRMED = 12, 24, 4
"""Answers and tokens of each on which every change is tried, and changes that are then tried on all."""
_LEVELS = 2
"""Drafted tokens of a round by which changes are compared: a draft that drafts further than it was trained to is better
there by many a wrong change."""
_MOST_FAULTS, _NEAREST = 4, 6
_RANKS = 10


class Acceptance(NamedTuple):
    """Acceptance of a reading: counts of each answer, and figures of all."""

    counts: list[RoundCounts]
    tau: Estimate
    first: Estimate
    """Share of rounds whose first drafted token is accepted."""
    runs: list[NDArray[np.int64]]
    """Of each answer: drafted tokens [R] that would be accepted, for every token at which a round may start."""

    @property
    def alphas(self) -> list[float]:
        """Conditional acceptance by position; 0 where none is reached."""
        reached, accepted = (
            np.sum([getattr(one, name) for one in self.counts], 0) for name in ("reached_K", "accepted_K")
        )
        return [float(right / of) if of else 0.0 for right, of in zip(accepted, reached)]


def acceptance_of(counts: Sequence[RoundCounts], runs: Sequence[NDArray[np.int64]], K: int) -> Acceptance:
    """Figures of counts, an answer a cluster."""
    columns = [(one.tokens, one.rounds, one.accepted_K[0], one.reached_K[0]) for one in counts]
    tokens, rounds, accepted, reached = np.array(columns, np.float64).T
    return Acceptance(
        list(counts),
        ratio(tokens, rounds, CONFIDENCE, "rounds", (1.0, 1.0 + K)),
        ratio(accepted, reached, CONFIDENCE, "rounds that draft", (0.0, 1.0)),
        list(runs),
    )


class ReplayBench:
    """Recorded answers with the target's states along them, on which readings of a draft are replayed."""

    def __init__(self, target: CausalModel, answers: Sequence[RecordedAnswer], K: int, layers: Sequence[int]) -> None:
        """`layers`: target layers to capture where all of them would take too much memory."""
        self.target, self.answers, self.K = target, list(answers), K
        # One pass of the target a pack, with all layers where they fit.
        tokens = sum(len(one.prompt_ids) + len(one.answer_ids) for one in answers)
        every = range(1, target.num_layers + 1)
        cost = tokens * target.hidden_size * (torch.finfo(target.dtype).bits // 8)
        self.layers = list(every) if cost * len(every) <= _STATE_BYTES else sorted({*layers} & {*every})
        self._packs: list[tuple[list[int], TargetTrace]] = []
        # A small bench, of parts of some answers, on which every change can be tried.
        step = max(1, len(answers) // _SCREENED)
        parts = [
            RecordedAnswer(one.prompt_ids, one.answer_ids[:_SCREENED_TOKENS], one.max_new_tokens)
            for one in self.answers[::step][:_SCREENED]
        ]
        small = len(parts) < len(answers) or any(len(one.answer_ids) > _SCREENED_TOKENS for one in answers)
        self.screen = ReplayBench(target, parts, min(K, _LEVELS), self.layers) if small else self

    def capture(self, advance: Advance) -> None:
        """Run the target over all answers, a pack at a time."""
        lengths = [len(one.prompt_ids) + len(one.answer_ids) for one in self.answers]
        for indexes in buckets(lengths, _PASS_TOKENS):
            pack = [self.answers[index] for index in indexes]
            self._packs.append((list(indexes), trace_target(self.target, pack, GREEDY, self.layers, True)))
            advance(len(indexes))
        if self.screen is not self:
            self.screen.capture(lambda *_: None)

    def agreement(self) -> float:
        """Share of the answers' tokens that are the target's own first choice."""
        right = total = 0
        for _, traced in self._packs:
            assert traced.states is not None
            with running(self.target.device):
                hidden_RH = traced.pack.pick(traced.states.hidden_BTH, -1)
                parts = torch.split(hidden_RH, 1024)
                best_R = torch.cat([self.target.logits(part).argmax(-1) for part in parts])
                next_R, inside_R = traced.pack.next_tokens(0)
            right += int((best_R == next_R)[inside_R].sum())
            total += int(inside_R.sum())
        return right / total if total else 1.0

    def readable(self, reading: Reading) -> bool:
        """Whether all layers that a reading wants were captured."""
        return {*reading.draft.target_layers} <= {*self.layers}

    def measure(self, reading: Reading) -> Acceptance:
        """Acceptance of a reading on all answers."""
        counts: dict[int, RoundCounts] = {}
        runs: dict[int, NDArray[np.int64]] = {}
        proposer = make_proposer(reading.draft, self.target)
        for indexes, traced in self._packs:
            with running(self.target.device):
                trace = proposer.trace(traced.pack, self.K, GREEDY, self._states(traced, reading))
                right_RK = (trace.rank_RK == 0).cpu().numpy()
            # A round is accepted up to the first token that is not the answer's.
            run_R = np.logical_and.accumulate(right_RK, axis=1).sum(1)
            lengths, limits = zip(*((len(one.answer_ids), one.max_new_tokens) for one in traced.answers))
            walked = walk_expected(survival_chosen(run_R, self.K), self.K, lengths, limits)
            parts = np.split(run_R, np.cumsum([max(length - 1, 0) for length in lengths])[:-1])
            counts |= dict(zip(indexes, walked))
            runs |= dict(zip(indexes, parts))
        order = sorted(counts)
        return acceptance_of([counts[index] for index in order], [runs[index] for index in order], self.K)

    def ranks(self, reading: Reading) -> list[float]:
        """Share of first drafted tokens of which the answer's is the draft's choice of each rank."""
        proposer = make_proposer(reading.draft, self.target)
        with running(self.target.device):
            traces = [
                (traced.pack, proposer.trace(traced.pack, 1, GREEDY, self._states(traced, reading)))
                for _, traced in self._packs
            ]
            return rank_accuracies(traces, _RANKS)[0]

    def _states(self, traced: TargetTrace, reading: Reading) -> States:
        """The target's states as a reading has them."""
        assert traced.states is not None and traced.states.aux_BTA is not None
        size, hidden = self.target.hidden_size, traced.states.hidden_BTH

        def layer(number: int) -> Tensor:
            at = self.layers.index(number)
            return traced.states.aux_BTA[..., at * size : (at + 1) * size]  # type: ignore[index,union-attr]

        wanted = reading.draft.target_layers
        aux = torch.cat([layer(number) for number in wanted], -1) if wanted else None
        if reading.before_norm:
            hidden = layer(self.target.num_layers)
        if reading.shift:
            hidden, aux = (None if one is None else one.roll(-reading.shift, 1) for one in (hidden, aux))  # type: ignore[assignment]
        return States(hidden, aux)


class Tried(NamedTuple):
    """A changed reading on all answers."""

    hypothesis: str
    what: str
    reading: Reading
    order: int
    acceptance: Acceptance
    gain: Estimate
    """Gain in accepted tokens, of the first ones of a round, paired by the token that it starts at."""


class Screened(NamedTuple):
    """A changed reading on some answers."""

    hypothesis: str
    what: str
    reading: Reading
    order: int
    tau: float
    gain: float
    """As that of `Tried`."""


@dataclass
class Search:
    """Search of changes that restore a draft."""

    bench: ReplayBench
    scene: Scene
    wanted: float | None
    """tau at which the search for further faults ends; None: it goes on while anything gains."""
    deadline: float = float("inf")
    tried: list[Screened] = field(default_factory=list)
    """Changes that were tried on the draft as it is."""
    changes: int = 0
    """Number of changes that were tried, on whatever reading."""
    cut_short: bool = False
    floor: float = 0.0
    """Acceptance of the first token that is expected of the family."""
    careful: bool = True
    """Nothing says that the draft is at fault: what is unlikely must gain more."""

    def run(self, reading: Reading, now: Acceptance, advance: Advance) -> list[Tried]:
        """Changes that restore, each on top of those before it."""
        found: list[Tried] = []
        while len(found) < _MOST_FAULTS and not (found and self._reached(now)):
            best = self._best(reading, now, advance, bool(found))
            low = now.first.value < self.floor or not (self.wanted is None or self._reached(now))
            if best is None and not found and low and not self.cut_short:
                best = self._best(reading, now, advance, False, LAST_RESORTS)
            if best is None:
                break
            found.append(best)
            reading, now = best.reading, best.acceptance
        return found

    def _reached(self, now: Acceptance) -> bool:
        return self.wanted is not None and now.tau.value >= self.wanted

    def _best(
        self,
        reading: Reading,
        now: Acceptance,
        advance: Advance,
        again: bool,
        hypotheses: Sequence[Hypothesis] = HYPOTHESES,
    ) -> Tried | None:
        """The change that restores most; of those that restore as much, the likeliest. None: none restores."""
        # 1) All changes on some answers.
        screened = self._screen(reading, advance, hypotheses)
        self.changes += len(screened)
        if not again:
            self.tried += screened
        # 2) The best of them on all answers: their gains with intervals.
        better = sorted((one for one in screened if one.gain > 0), key=lambda one: (-one.gain, one.order))[:_CONFIRMED]
        restoring = []
        for name, what, changed, order, *_ in better:
            acceptance = self.bench.measure(changed)
            gains = paired_gain(acceptance, now, 1 - 2 * FALSE_ALARM / self.changes)
            likely = order < LIKELY
            least = LEAST_GAIN if likely or not self.careful else CLEAR_GAIN
            least = (CLEAR_GAIN if likely else FURTHER_GAIN) if again else least
            if gains.low > 0 and self.restores(acceptance, now, least):
                restoring.append(Tried(name, what, changed, order, acceptance, gains))
        if not restoring:
            return None
        # 3) The likeliest of those that restore as much as the best.
        top = max(one.acceptance.tau.value for one in restoring)
        alike = [one for one in restoring if one.acceptance.tau.value >= top * (1 - _TIE)]
        return min(alike, key=lambda one: (one.order, -one.acceptance.tau.value))

    def _screen(self, reading: Reading, advance: Advance, hypotheses: Sequence[Hypothesis]) -> list[Screened]:
        """All changes of a reading on some answers, until the deadline."""
        screened, some = list[Screened](), self.bench.screen.measure(reading)
        for order, hypothesis in enumerate(hypotheses):
            for change in hypothesis.of(reading, self.scene):
                if time.monotonic() > self.deadline:
                    self.cut_short = True
                    break
                if not self.bench.readable(change.reading):
                    continue
                advance(1, note=hypothesis.name)
                try:
                    found = self.bench.screen.measure(change.reading)
                except (RuntimeError, ValueError, IndexError):
                    continue  # a change whose shapes do not fit this draft
                gain = paired_gain(found, some, CONFIDENCE).value
                screened.append(Screened(hypothesis.name, change.what, change.reading, order, found.tau.value, gain))
        return screened

    def restores(self, after: Acceptance, now: Acceptance, least: float) -> bool:
        """Whether a gain beyond chance is a restoration, and not what any change may gain in a weak draft.

        `least`: gain in tau, as a share of it.
        """
        if after.tau.value < (1 + least) * now.tau.value:
            return False
        # A draft of which too little is accepted must come far, or to where it is expected.
        if now.first.value >= self.floor or (self.wanted is not None and after.tau.value >= self.wanted):
            return True
        factor = (after.tau.value - 1) / max(now.tau.value - 1, 1e-9)
        if after.first.value >= self.floor:
            return factor >= _FAR[0]
        # Of a draft that has nothing accepted, twice as much is nothing either.
        return factor >= _FAR[1] and after.first.value >= self.floor / 2

    def serving(self, served: Estimate, reading: Reading, now: Acceptance) -> list[tuple[Screened, float]]:
        """Changes of the draft as it is that give a served tau, with their own tau on all answers."""
        # Some answers, of fewer levels, have another tau: what they keep of the draft's own is looked for.
        some, share = self.bench.screen.measure(reading).tau.value, (served.value - 1) / max(now.tau.value - 1, 1e-9)
        near = sorted(self.tried, key=lambda one: abs(one.tau - 1 - share * (some - 1)))[:_NEAREST]
        found = [(one, self.bench.measure(one.reading).tau.value) for one in near]
        return [(one, tau) for one, tau in found if served.low <= tau <= served.high]


def paired_gain(after: Acceptance, before: Acceptance, confidence: float) -> Estimate:
    """Gain in accepted tokens, of the first `_LEVELS` of a round, paired by the token that it starts at.

    An answer is a cluster.
    """
    mine, theirs = ([np.minimum(run_R, _LEVELS) for run_R in one.runs] for one in (after, before))
    gained_A = np.array([float((new_R - old_R).sum()) for new_R, old_R in zip(mine, theirs, strict=True)])
    return ratio(gained_A, np.array([float(len(run_R)) for run_R in mine]), confidence, "tokens")


def on_device(reading: Reading, target: CausalModel) -> Reading:
    """The reading with its draft on the target's device, in its precision."""
    reading.draft.to(*device_of(target)).eval().requires_grad_(False)
    return reading
