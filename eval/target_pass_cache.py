"""Cache of the target's passes over packs of recorded answers, and replay of drafts along them."""

from collections.abc import Iterator, Sequence

from ..data.batches import buckets
from ..data.store import Sample
from ..specdec.models import CausalModel
from ..specdec.proposers.base import Proposer
from ..specdec.replay.replay import Counted, replay, replayable_rules
from ..specdec.replay.target_trace import TargetTrace, trace_target
from ..specdec.sampling_settings import SamplingSettings
from .settings import ScoreSettings

_PASS_TOKENS = {"cuda": 16384, "cpu": 2048}
"""Tokens of one pass where the settings name none. A GPU takes as long for a few as for thousands; on a CPU larger
passes only add padding."""


class TargetPassCache:
    """Cache of the target's passes over recorded answers, for the next checkpoint, up to a budget of bytes.

    `pass_tokens`: tokens of a pass, padding included; 0: the device's default.
    """

    def __init__(self, target: CausalModel, budget_bytes: int, pass_tokens: int = 0) -> None:
        self._target, self._left = target, budget_bytes
        self._tokens = pass_tokens or _PASS_TOKENS.get(target.device.type, _PASS_TOKENS["cpu"])
        self._known: dict[tuple[tuple[str, ...], tuple[int, ...], bool], TargetTrace] = {}

    def packs(self, samples: Sequence[Sample]) -> list[list[int]]:
        """Packs of sample indexes, each for one pass: samples of one sampling setting and of about one length."""
        # One setting a pass, since it warps the distributions; lengths in a pack are close, so little is padded.
        members: dict[SamplingSettings, list[int]] = {}
        for index, sample in enumerate(samples):
            members.setdefault(sample.sampling, []).append(index)
        found: list[list[int]] = []
        for indexes in members.values():
            lengths = [len(samples[index].prompt_ids) + len(samples[index].answer_ids) for index in indexes]
            found += [[indexes[place] for place in group] for group in buckets(lengths, self._tokens)]
        return found

    def trace(self, pack: Sequence[Sample], proposer: Proposer) -> TargetTrace:
        """Trace of the target along the answers of a pack, with the states that the proposer reads."""
        # Checkpoints of one family read the same layers, so they share the trace.
        key = tuple(sample.id for sample in pack), proposer.aux_layers, proposer.needs_hidden_states
        traced = self._known.get(key)
        if traced is None:
            traced = trace_target(self._target, pack, pack[0].sampling, *key[1:])
            # Once the budget is spent, further packs are passed through the target again each time.
            if traced.nbytes <= self._left:
                self._left -= traced.nbytes
                self._known[key] = traced
        return traced

    def traces(self, samples: Sequence[Sample], proposer: Proposer) -> Iterator[TargetTrace]:
        """Traces of all samples, pack by pack."""
        for pack in self.packs(samples):
            yield self.trace([samples[index] for index in pack], proposer)


def replay_samples(
    proposer: Proposer,
    cache: TargetPassCache,
    samples: Sequence[Sample],
    depths: Sequence[int],
    settings: ScoreSettings,
) -> Iterator[tuple[int, list[Counted]]]:
    """Replayed counts: each sample's index and its counts under every scored rule that replay is exact for.

    Samples come pack by pack, not in their own order.
    """
    for pack in cache.packs(samples):
        traced = cache.trace([samples[index] for index in pack], proposer)
        rules = replayable_rules(proposer, traced.sampling, settings.sampled_rules)
        yield from zip(pack, replay(proposer, traced, rules, depths))
