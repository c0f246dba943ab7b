"""Diagnosis of a draft: its acceptance along recorded answers, and the changes of its reading that restore it.

All readings are replayed along one pass of the target, whose layers are captured once. A change restores where the
interval of its gain in tau, paired by answer, lies above 0 and the gain is no trifle; of changes that restore alike
the first in the order of likelihood is taken, then the search goes on from it, as faults may come together.

Shapes: A answers, B answers of a pack, T tokens of the longest, R round starts, H hidden size.
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
from ..specdec.replay.expected_rounds import RoundCounts
from ..specdec.replay.replay import rank_accuracies, replay
from ..specdec.replay.target_trace import RecordedAnswer, TargetTrace, trace_target
from ..specdec.sampling_settings import SamplingSettings
from .acceptance import Estimate, estimate, ratio

GREEDY = SamplingSettings()
CONFIDENCE, SEARCH_CONFIDENCE = 0.95, 0.999
"""Of figures that are shown, and of gains: a hundred changes are tried, so one in a thousand may come by chance."""
LEAST_GAIN, LIKELY_GAIN, CLEAR_GAIN, LIKELY = 0.015, 0.03, 0.08, 5
"""Least gain in tau, as a share of it: of a draft that is below its record; of any other one, by the first LIKELY
hypotheses and by the others; the last also of each fault but the first, as any change may gain a few percent."""
_TIE = 0.005  # of tau: changes that restore as much as the best
_FAR = (1.5, 2.0)
"""Least factor on accepted tokens a round, of a draft below its family's floor: to above the floor, and below it."""
_STATE_BYTES = 2 << 30
_PASS_TOKENS = 2048
_SCREENED, _SCREENED_TOKENS, _SCREENED_LEVELS, _CONFIRMED = 12, 24, 2, 4
"""Answers, tokens of each, and levels on which every change is tried, and changes that are then tried on all."""
_MOST_FAULTS = 4
_RANKS = 10


class Acceptance(NamedTuple):
    """Acceptance of a reading: counts of each answer, and figures of all."""

    counts: list[RoundCounts]
    tau: Estimate
    first: Estimate
    """Share of rounds whose first drafted token is accepted."""

    @property
    def sums(self) -> NDArray[np.float64]:
        """Tokens and rounds [A, 2] of each answer."""
        return np.array([[one.tokens, one.rounds] for one in self.counts], dtype=np.float64).reshape(-1, 2)

    @property
    def alphas(self) -> list[float]:
        """Conditional acceptance by position; 0 where none is reached."""
        reached, accepted = (
            np.sum([getattr(one, name) for one in self.counts], 0) for name in ("reached_K", "accepted_K")
        )
        return [float(right / of) if of else 0.0 for right, of in zip(accepted, reached)]


def acceptance_of(counts: Sequence[RoundCounts], K: int) -> Acceptance:
    """Figures of counts, an answer a cluster."""
    columns = [(one.tokens, one.rounds, one.accepted_K[0], one.reached_K[0]) for one in counts]
    tokens, rounds, accepted, reached = np.array(columns, np.float64).T
    return Acceptance(
        list(counts),
        ratio(tokens, rounds, CONFIDENCE, "rounds", (1.0, 1.0 + K)),
        ratio(accepted, reached, CONFIDENCE, "rounds that draft", (0.0, 1.0)),
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
        self.screen = ReplayBench(target, parts, min(K, _SCREENED_LEVELS), self.layers) if small else self

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
        for indexes, traced in self._packs:
            proposer = make_proposer(reading.draft, self.target)
            found = replay(proposer, traced._replace(states=self._states(traced, reading)), ["greedy"], [self.K])
            counts |= {index: one[0].counts for index, one in zip(indexes, found)}
        return acceptance_of([counts[index] for index in sorted(counts)], self.K)

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
    """Gain in tau, paired by answer."""


@dataclass
class Search:
    """Search of changes that restore a draft."""

    bench: ReplayBench
    scene: Scene
    wanted: float | None
    """tau at which the search ends; None: it goes on while anything gains."""
    deadline: float = float("inf")
    tried: dict[str, list[tuple[str, float]]] = field(default_factory=dict)
    """By hypothesis: changes that were tried on the draft as it is, and their tau on some answers."""
    cut_short: bool = False
    floor: float = 0.0
    """Acceptance of the first token that is expected of the family."""
    careful: bool = True
    """Nothing says that the draft is at fault: only what gains much counts."""

    def run(self, reading: Reading, now: Acceptance, advance: Advance) -> list[Tried]:
        """Changes that restore, each on top of those before it."""
        found: list[Tried] = []
        while len(found) < _MOST_FAULTS and not self._done(now):
            best = self._best(reading, now, advance, bool(found))
            low = now.first.value < self.floor or self.wanted is not None
            if best is None and not found and low and not self.cut_short:
                best = self._best(reading, now, advance, False, LAST_RESORTS)
            if best is None:
                break
            found.append(best)
            reading, now = best.reading, best.acceptance
        return found

    def _done(self, now: Acceptance) -> bool:
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
        screened: list[tuple[float, int, str, str, Reading]] = []
        some = self.bench.screen.measure(reading).tau.value
        for order, hypothesis in enumerate(hypotheses):
            for change in hypothesis.of(reading, self.scene):
                if time.monotonic() > self.deadline:
                    self.cut_short = True
                    break
                if not self.bench.readable(change.reading):
                    continue
                tau = self._screen(change.reading)
                advance(1, note=hypothesis.name)
                if tau is None:
                    continue
                if not again:
                    self.tried.setdefault(hypothesis.name, []).append((change.what, tau))
                screened.append((tau, order, hypothesis.name, change.what, change.reading))
        # 2) The best of them on all answers: their gains with intervals.
        better = sorted((one for one in screened if one[0] > some), key=lambda one: (-one[0], one[1]))[:_CONFIRMED]
        restoring = []
        for _, order, name, what, changed in better:
            acceptance = self.bench.measure(changed)
            gain = paired_gain(acceptance, now)
            if gain.low > 0 and self.restores(acceptance, now, again, order < LIKELY):
                restoring.append(Tried(name, what, changed, order, acceptance, gain))
        if not restoring:
            return None
        # 3) The likeliest of those that restore as much as the best.
        top = max(one.acceptance.tau.value for one in restoring)
        alike = [one for one in restoring if one.acceptance.tau.value >= top * (1 - _TIE)]
        return min(alike, key=lambda one: (one.order, -one.acceptance.tau.value))

    def restores(self, after: Acceptance, now: Acceptance, again: bool, likely: bool = False) -> bool:
        """Whether a gain beyond chance is a restoration, and not what any change may gain in a weak draft."""
        careful = LIKELY_GAIN if likely and not again else CLEAR_GAIN
        least = careful if self.careful or again else LEAST_GAIN
        if after.tau.value < (1 + least) * now.tau.value:
            return False
        # A draft of which too little is accepted must come far, or to where it is expected.
        if now.first.value >= self.floor or (self.wanted is not None and after.tau.value >= self.wanted):
            return True
        factor = (after.tau.value - 1) / max(now.tau.value - 1, 1e-9)
        return factor >= (_FAR[0] if after.first.value >= self.floor else _FAR[1])

    def _screen(self, reading: Reading) -> float | None:
        try:
            return self.bench.screen.measure(reading).tau.value
        except (RuntimeError, ValueError, IndexError):
            return None  # a change whose shapes do not fit this draft


def paired_gain(after: Acceptance, before: Acceptance) -> Estimate:
    """Gain in tau, paired by answer."""
    sums_A4 = np.concatenate([after.sums, before.sums], 1)

    def difference(sums_B4: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(sums_B4[:, 0] / sums_B4[:, 1] - sums_B4[:, 2] / sums_B4[:, 3])

    return estimate(difference, sums_A4, sums_A4[:, 1] + sums_A4[:, 3], SEARCH_CONFIDENCE)


def on_device(reading: Reading, target: CausalModel) -> Reading:
    """The reading with its draft on the target's device, in its precision."""
    reading.draft.to(*device_of(target)).eval().requires_grad_(False)
    return reading
