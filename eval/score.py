"""Scoring of one draft on recorded answers: replay on all of them, real decoding on a part, and the two compared.

Replay is exact only for answers of this very target at the sampling setting they were recorded at; so every sample is
scored at its own setting. At temperature 0 every accept rule is the greedy one, and is scored once, under that name.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import pyarrow as pa
import torch

from .. import fingerprint
from ..data.store import Sample
from ..errors import InputError, ReplayMismatchError
from ..progress import Advance, bar, say
from ..specdec.accept_rules import rules_for
from ..specdec.cuda_graphs import running
from ..specdec.decoder import Generation, Request, generate
from ..specdec.models import CausalModel
from ..specdec.proposers.base import Proposer, Trace
from ..specdec.proposers.tree_settings import MeasuredTree, StaticTree
from ..specdec.proposers.tree_shape import TreeShape
from ..specdec.replay.expected_rounds import RoundCounts, count_rounds
from ..specdec.replay.packing import Pack
from ..specdec.replay.replay import Counted, rank_accuracies, replayable_rules
from ..specdec.sampling_settings import SamplingSettings
from ..specdec.targets import Target
from .counts import CountRow, Method, context_bucket, to_table
from .draft_configs import DraftConfig, ProposerSpec
from .settings import ScoreSettings
from .target_pass_cache import TargetPassCache, replay_samples


class Identity(NamedTuple):
    """Name and training step of the draft that counts are of."""

    name: str
    step: int


@dataclass(frozen=True)
class Consistency:
    """Consistency of replay with decoding at temperature 0."""

    compared: int = 0
    """Number of answers (turn x K or tree) that were both replayed and decoded."""
    ties: int = 0
    """Number of answers that diverge where the target's two tokens tie; their counts are not compared."""
    diverged: tuple[str, ...] = ()
    """Answers that diverge although the target prefers one token clearly: decoding that is not lossless."""
    miscounted: tuple[str, ...] = ()
    """Equal answers whose counts differ: below float32 the draft's own ties flip between passes of unlike shape."""

    @property
    def mismatches(self) -> tuple[str, ...]:
        """All answers that differ, one line each."""
        return self.diverged + self.miscounted

    @property
    def lossless(self) -> bool | None:
        """Whether every decoded answer is the target's own, but for ties; None where none was decoded at T = 0."""
        return not self.diverged if self.compared or self.ties or self.diverged else None


@dataclass(frozen=True)
class Score:
    """Result of scoring a draft: its counts table, and how replay agrees with decoding."""

    counts: pa.Table
    consistency: Consistency


def score_draft(
    target: Target,
    specs: Sequence[ProposerSpec],
    samples: Sequence[Sample],
    settings: ScoreSettings,
    identity: Identity,
    traces: TargetPassCache | None = None,
    checked: Collection[str] | None = None,
    only: Method | None = None,
) -> Score:
    """Score one draft, in each way of drafting, on the samples of a scored split.

    Rules that cannot be replayed are decoded on all samples. `traces` is shared by the checkpoints that are scored on
    the same samples. `checked`: conversations whose decoding checks their replays; None: as many of the samples' as
    `settings.decode_conversations`. `only`: count by replay or by decoding alone. Raises InputError for samples that
    may not be scored, and in float32 ReplayMismatchError where more answers differ than `mismatch_limit` allows.
    """
    # 1) what is replayed and what is decoded of each way of drafting
    samples = scored_samples(samples, settings)
    traces = traces or TargetPassCache(target, settings.trace_bytes, settings.replay_tokens)
    if checked is None:
        checked = stratified_conversations(samples, settings.decode_conversations)
    shares = [_Share.of(spec, samples, settings, checked).only(only, checked) for spec in specs]
    replayed: list[_Answer] = []
    decoded: list[_Answer] = []
    # 2) count
    title = f"score {identity.name} step {identity.step}"
    with bar(title, sum(share.answers for share in shares), "answers") as advance:
        for share in shares:
            replayed += _replay(share, traces, settings, advance)
            decoded += _decode(target, share, settings, advance)
    # 3) compare what was counted both ways
    consistency = _compare(target, replayed, decoded, settings)
    _report_mismatches(target, consistency, settings, title)
    counted = decoded if only == "decode" else [*replayed, *decoded]
    return Score(to_table(_row(identity, answer) for answer in counted), consistency)


def stratified_conversations(samples: Iterable[Sample], count: int) -> set[str]:
    """Stratified sample of `count` conversations, taken in turn from each domain in the order of a hash.

    Other conversations that come or go change it little, since no random state is shared.
    """
    # Conversations by domain.
    by_domain: dict[str, set[str]] = {}
    for sample in samples:
        by_domain.setdefault(sample.domain, set()).add(sample.conversation)
    # Sorted by place within the domain first: the n-th of every domain comes before any (n + 1)-th.
    ranked = [
        (place, domain, name)
        for domain, names in by_domain.items()
        for place, name in enumerate(sorted(names, key=lambda name: fingerprint.of_bytes(name.encode())))
    ]
    return {name for _, _, name in sorted(ranked)[:count]}


class _Answer(NamedTuple):
    """Counts of one answer under one rule at one config."""

    sample: Sample
    rule: str
    config: DraftConfig
    counts: RoundCounts
    tokens: list[int] | None = None  # of a decoded answer


class _Decoding(NamedTuple):
    """Samples to decode under one rule, at each of some depths."""

    rule: str
    samples: list[Sample]
    depths: Sequence[int]


@dataclass(frozen=True)
class _Share:
    """Share of the work for one way of drafting: samples to replay, and groups of samples to decode."""

    spec: ProposerSpec
    replayed: list[Sample]
    decoded: list[_Decoding]

    @classmethod
    def of(
        cls, spec: ProposerSpec, samples: Sequence[Sample], settings: ScoreSettings, checked: Collection[str]
    ) -> "_Share":
        """Replay all that can be, and decode its greedy answers in `checked` conversations at the settings' depths;
        decode all of the rest."""
        proposer = spec.proposer
        some = [depth for depth in settings.decode_draft_tokens if depth in spec.depths] or spec.depths[-1:]
        replayed: list[Sample] = []
        groups: dict[str, tuple[list[Sample], Sequence[int]]] = {}
        # Each (sample, rule): replay it where replay is exact; decode it where it is not, or as a check.
        for sample in samples:
            exact = replayable_rules(proposer, sample.sampling, settings.sampled_rules)
            if exact:
                replayed.append(sample)
            for rule in rules_for(sample.sampling, proposer, settings.sampled_rules):
                if rule not in exact or is_checked(sample, checked):
                    depths = some if rule in exact else spec.depths
                    groups.setdefault(rule, ([], depths))[0].append(sample)
        return cls(spec, replayed, [_Decoding(rule, *group) for rule, group in groups.items()])

    def only(self, method: Method | None, checked: Collection[str]) -> "_Share":
        """What one method counts; to decode, the replays that it is compared with too."""
        if method == "replay":
            return replace(self, decoded=[])
        if method == "decode":
            return replace(self, replayed=[sample for sample in self.replayed if is_checked(sample, checked)])
        return self

    @property
    def answers(self) -> int:
        return len(self.replayed) + sum(len(group.samples) * len(group.depths) for group in self.decoded)


def is_checked(sample: Sample, checked: Collection[str]) -> bool:
    """Whether decoding checks a sample's replay: above temperature 0 a decoded answer need not be the recorded one."""
    return sample.sampling.greedy and sample.conversation in checked


def scored_samples(samples: Sequence[Sample], settings: ScoreSettings) -> list[Sample]:
    """Samples to score. Raises InputError for an empty list, or for samples of the train split."""
    # Scores on training data would flatter every draft.
    trained = next((sample for sample in samples if sample.split == "train"), None)
    if trained is not None:
        raise InputError(f"sample {trained.id}: split train; drafts are scored on selection or holdout only")
    if settings.max_conversations:
        kept = stratified_conversations(samples, settings.max_conversations)
        samples = [sample for sample in samples if sample.conversation in kept]
    if not samples:
        raise InputError("no samples to score: the split is empty; give the mix more conversations")
    return list(samples)


def _replay(share: _Share, traces: TargetPassCache, settings: ScoreSettings, advance: Advance) -> list[_Answer]:
    # Packs come in any order: collect by index, then list in the order of the samples.
    spec, samples, done = share.spec, share.replayed, dict[int, list[Counted]]()
    for index, counted in replay_samples(spec.proposer, traces, samples, spec.depths, settings):
        done[index] = counted
        advance(note="replay")
    return [
        _Answer(sample, rule, DraftConfig(depth, spec.tree), counts)
        for index, sample in enumerate(samples)
        for rule, depth, counts in done[index]
    ]


def _decode(target: Target, share: _Share, settings: ScoreSettings, advance: Advance) -> list[_Answer]:
    """Decoded answers of a share, in the order of its samples, whichever finishes first."""
    # Each rule and depth is a decoding run of its own.
    spec, answers = share.spec, list[_Answer]()
    for rule, samples, depths in share.decoded:
        requests = [_request(target, sample, settings) for sample in samples]
        for depth in depths:
            done: dict[int, Generation] = {}
            for index, generation in generate(target, spec.proposer, requests, rule, depth, settings.batch_size):
                done[index] = generation
                advance(note="decode")
            # Requests finish in any order: list their answers in the order of the samples.
            for index, sample in enumerate(samples):
                counts = count_rounds(done[index].rounds, depth)
                answers.append(_Answer(sample, rule, DraftConfig(depth, spec.tree), counts, done[index].tokens))
    return answers


def _request(target: Target, sample: Sample, settings: ScoreSettings) -> Request:
    seed = int(fingerprint.of_json([settings.seed, sample.id])[:15], 16)
    return Request(sample.prompt_ids, sample.sampling, seed, sample.max_new_tokens, target.stop_ids)


def _row(identity: Identity, answer: _Answer) -> CountRow:
    # Everything that figures are grouped by, and the counts; a decoded answer is told by its tokens.
    sample = answer.sample
    return CountRow(
        draft=identity.name,
        step=identity.step,
        conversation=sample.conversation,
        turn=sample.turn,
        cluster=sample.cluster,
        domain=sample.domain,
        split=sample.split,
        context_bucket=context_bucket(len(sample.prompt_ids)),
        setting=sample.sampling.key,
        rule=answer.rule,
        draft_tokens=answer.config.levels,
        tree=answer.config.tree,
        method="replay" if answer.tokens is None else "decode",
        counts=answer.counts,
    )


def _compare(
    target: Target, replayed: Sequence[_Answer], decoded: Sequence[_Answer], settings: ScoreSettings
) -> Consistency:
    """Consistency check at temperature 0: decoded answers and counts against recorded answers and replayed counts."""
    # Above temperature 0 are only answers that no replay tells.
    expected = {
        (answer.sample.id, answer.config): answer.counts for answer in replayed if answer.sample.sampling.greedy
    }
    tolerance = settings.tie_logits if target.dtype == torch.float32 else settings.tie_logits_half
    compared = ties = 0
    diverged: list[str] = []
    miscounted: list[str] = []
    # Three outcomes of an answer that both have: equal tokens (counts must agree), a tie, or a real divergence.
    for answer in decoded:
        counts = expected.get((answer.sample.id, answer.config))
        if counts is None or answer.tokens is None or not answer.sample.sampling.greedy:
            continue
        compared += 1
        where = f"{answer.sample.id}, {answer.config}"
        at = _first_difference(answer.tokens, answer.sample.answer_ids)
        if at is None:
            if answer.counts != counts:
                miscounted.append(f"{where}: decoded {_brief(answer.counts)}; replayed {_brief(counts)}")
        elif _tie(target, answer.sample, answer.tokens, at, tolerance):
            ties += 1
        else:
            diverged.append(f"{where}: the decoded answer leaves the recorded one at token {at}")
    return Consistency(compared, ties, tuple(diverged), tuple(miscounted))


def _report_mismatches(target: Target, consistency: Consistency, settings: ScoreSettings, title: str) -> None:
    """Say where replay and decoding differ; raise ReplayMismatchError where arithmetic cannot be the reason."""
    # In half precision ties flip between passes of other shapes: that is said and not an error.
    differ = len(consistency.mismatches)
    if not differ:
        return
    line = f"{title}: replay and decoding differ on {differ} of {consistency.compared} answers; first: "
    line += consistency.mismatches[0]
    if target.dtype == torch.float32 and differ > settings.mismatch_limit:
        raise ReplayMismatchError(f"{line} (score.mismatch_limit is {settings.mismatch_limit})")
    say(line)


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    if one == other:
        return None
    return next((place for place, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def _tie(target: Target, sample: Sample, decoded: Sequence[int], at: int, tolerance: float) -> bool:
    """Whether the target hardly prefers one of the two tokens at which the answers diverge."""
    # An answer that merely ends earlier is no tie.
    recorded = sample.answer_ids
    if at >= min(len(recorded), len(decoded)):
        return False
    # The target's logits at the first token that differs.
    ids = torch.tensor([sample.prompt_ids + recorded[:at]], device=target.device)
    with running(target.device):
        logits_V = target.logits(target.states(ids).hidden_BTH[0, -1]).float()
    return abs(float(logits_V[recorded[at]] - logits_V[decoded[at]])) < tolerance


def _brief(counts: RoundCounts) -> str:
    return f"{counts.rounds:g} rounds, {counts.accepted:g} of {counts.drafted:g} accepted"


def measured_tree(target: CausalModel, proposer: Proposer, samples: Sequence[Sample], tree: MeasuredTree) -> StaticTree:
    """Static tree whose shape maximises expected acceptance, from how often each rank of a draft is right.

    `samples` are answers of the train split, so that the answers which pick a draft do not also shape its tree. Raises
    InputError where there are none of two tokens or more.
    """

    # Nothing is remembered of the target's passes: each is used once.
    def traces() -> Iterator[tuple[Pack, Trace]]:
        for traced in TargetPassCache(target, 0).traces(samples, proposer):
            yield traced.pack, proposer.trace(traced.pack, tree.levels, traced.sampling, traced.states)

    # Accuracy by depth and rank gives each node's chance of acceptance; the tree takes the best nodes.
    with running(target.device):
        shape = TreeShape.of_accuracies(rank_accuracies(traces(), tree.ranks), tree.nodes)
    if not shape.choices:
        raise InputError("measured tree: no answers of two tokens or more in the train split to measure it on")
    return StaticTree(kind="static", choices=[list(choice) for choice in shape.choices])


_MOST_NATS = 700.0  # mean -log q whose exp is still a number
_AS_TRAINED = SamplingSettings(temperature=1.0)


def perplexity(proposer: Proposer, samples: Sequence[Sample], traces: TargetPassCache) -> float | None:
    """Perplexity of the answers under a draft: exp of the mean -log q at depth 1, temperature 1; None where no number.

    Tokens outside a reduced draft vocabulary have q = 0 and are left out, which flatters such a draft.
    """
    # Mean -log q over the tokens that the draft can emit at all.
    total, count = 0.0, 0
    for traced in traces.traces(samples, proposer):
        with running(traced.pack.ids_BT.device):
            q_R = proposer.trace(traced.pack, 1, _AS_TRAINED, traced.states).q_RK[:, 0].double().cpu()
        inside_R = q_R > 0
        total -= float(q_R[inside_R].log().sum())
        count += int(inside_R.sum())
    # exp would overflow for a draft that is all but never right.
    known = count > 0 and total / count < _MOST_NATS
    return math.exp(total / count) if known else None
