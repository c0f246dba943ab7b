"""Counts as serving engines report them, so that a score here may be laid beside an engine's own metrics.

The decoder and replay count in one way (decoder.py, expected_rounds.py). At temperature 0 what a draft gets right along
the target's own text fixes every round of every engine; they differ in where rounds start and in what is clipped:

                 first round after  drafts at most          without a draft  a stop token inside a draft
  draftforge     the first token    min(K, remaining - 1)   a round          accepted; what follows is not
  llamacpp       the first token    min(K, remaining - 1)   no round         accepted only as the draft's last token
  transformers   the prompt         min(K, remaining - 1)   a round          (not derived, see below)
  vllm           the first token    K                       no round         accepted, with all that is right after it

A proposer that has fewer tokens to offer than that (prompt lookup) drafts those, in every engine.
transformers stops a draft at a stop token of the draft's own, right or wrong, which no recorded text tells.

Shapes: T round starts (row t: t tokens of the answer known), K drafted tokens.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from draftforge.errors import InputError
from draftforge.specdec.cuda_graphs import running
from draftforge.specdec.models import CausalModel
from draftforge.specdec.proposers.base import Proposer
from draftforge.specdec.replay.packing import Pack, Text
from draftforge.specdec.replay.target_trace import RecordedAnswer, trace_target
from draftforge.specdec.sampling_settings import SamplingSettings

CountingConvention = Literal["draftforge", "llamacpp", "transformers", "vllm"]


class CountedRounds(NamedTuple):
    """What a draft says along a text, by the number t of tokens known."""

    right_T: Sequence[int]
    """How many of K drafted tokens equal the text, up to the first that does not."""
    offered_T: Sequence[int]
    """How many tokens there are to draft; at most K."""


class EngineRound(NamedTuple):
    """One verified draft, as the engine books it."""

    drafted: int
    accepted: int


class EngineCounts(NamedTuple):
    """Totals of one answer. Position k (from 1) is at index k - 1."""

    rounds: int
    drafted: int
    accepted: int
    accepted_K: tuple[int, ...]

    @classmethod
    def from_rounds(cls, rounds: Sequence[EngineRound], K: int) -> "EngineCounts":
        at_least = tuple(sum(r.accepted >= k for r in rounds) for k in range(1, K + 1))
        return cls(len(rounds), sum(r.drafted for r in rounds), sum(r.accepted for r in rounds), at_least)


def engine_rounds(
    counting: CountingConvention, runs: CountedRounds, K: int, max_new_tokens: int, stopped_after: int | None = None
) -> list[EngineRound]:
    """The rounds of one greedy answer.

    runs: along the target's text, which goes on beyond the answer's end. stopped_after: tokens up to and with the stop
    that ends the answer; None: it ends by length.
    """
    if counting == "transformers" and stopped_after is not None:
        raise InputError("counting transformers: an answer that ends with a stop token cannot be counted")
    end = max_new_tokens if stopped_after is None else min(stopped_after, max_new_tokens)
    rounds: list[EngineRound] = []
    known = 0 if counting == "transformers" else 1
    while known < end:
        limit = K if counting == "vllm" else min(K, max_new_tokens - known - 1)
        drafted = min(limit, runs.offered_T[known])
        accepted = min(runs.right_T[known], drafted)
        emitted = min(accepted + 1, end - known)
        booked = accepted
        if counting == "draftforge":
            booked = min(accepted, emitted)
        elif counting == "llamacpp" and emitted < drafted:
            booked = emitted - 1
        if drafted or counting in ("draftforge", "transformers"):
            rounds.append(EngineRound(drafted, booked))
        known += accepted + 1
    return rounds


def matched_runs(
    target: CausalModel, proposer: Proposer, prompt_ids: list[int], text_ids: list[int], K: int, known: int = 1
) -> CountedRounds:
    """What a draft says along the target's greedy text, for rows known .. len(text_ids) - 1; 0 in rows before.

    Rows nearer to the text's end than K are cut short: the text must go on K tokens beyond the answer that is counted.
    """
    if known < 1 and proposer.needs_hidden_states:
        raise InputError(f"known {known}: a draft that reads the target's states drafts after its first token")
    ids, greedy = prompt_ids + text_ids, SamplingSettings()
    with running(target.device):
        recorded = [RecordedAnswer(prompt_ids, text_ids, len(text_ids))]
        traced = trace_target(target, recorded, greedy, proposer.aux_layers, proposer.needs_hidden_states)
        pack = Pack([Text(ids, len(prompt_ids) + known)], target.device)
        trace = proposer.trace(pack, K, greedy, traced.states)
    right = (trace.rank_RK == 0).long().cumprod(1).sum(1).tolist()
    offered = [K] * len(right) if trace.offered_R is None else trace.offered_R.tolist()
    return CountedRounds([0] * known + right, [0] * known + offered)
