"""Promotion gate: is a candidate worth serving, and better than the champion? Decided from paired holdout figures.

**Worth serving.** At the recipe's load the candidate must be shown to beat plain decoding, and prompt lookup, which
takes no training. Shown: the lower end of the interval of its expected speed-up, less the share by which fitted times
may be off, lies above gate.min_speedup (1); and the lower end of the paired difference of expected speed-ups, candidate
minus prompt lookup, lies above that share of the candidate's. So a draft that is no faster than plain decoding, or no
faster than prompt lookup, gets through with at most the error of one test, (1 - confidence) / 2. A gate.min_speedup
below 1 asks for neither, and every output says so.

**Better than the champion.** Overall the candidate must be shown to be faster: the lower end of its gain may not lie
below 0. So a draft that is as fast as the champion replaces it with at most the error of one test. A margin,
gate.non_inferiority_margin, is a choice: with it the candidate must only look faster and be shown not to be slower by
the margin, and the more clusters there are, the closer an equal draft comes to replacing its equal half of the time.

**Non-inferior by domain.** In every domain with enough conversation clusters the lower end of the gain may not lie
below minus gate.domain_margin. Asking it of all of them needs no correction for their number: the gate passes only
where each test passes, so a candidate that is worse by the margin in any domain gets through with at most the error of
that domain's own test (an intersection-union test: Berger, Technometrics 24(4), 1982). What more domains cost is power,
and the decision says how many clusters are missing.

**Better than its start.** The heir of a retraining must be shown to be faster, on this target, than the champion that
its training started from: the lower end of the paired difference must lie above 0.

Clusters count, not conversations: near-duplicates accept alike, and all intervals are of clusters
(`eval.acceptance.estimate`).
"""

import math
from bisect import bisect_left
from datetime import datetime
from typing import Annotated, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from ..eval.acceptance import Estimate, student, too_few_clusters
from ..eval.settings import FEWEST_CLUSTERS
from .settings import GateSettings

POWER = 0.8
"""Probability that the comparison passes with the number that is named, were the gain truly what it seems."""
FORMAT: Final = 3
"""Format number of stored decisions, raised when a field changes its meaning. Format 2 counted conversations."""
_MOST_CLUSTERS = 1_000_000  # that a refusal asks for
LEAST_GAIN = 1e-4
"""Share by which a draft must be faster than another to be called so: expected counts have rounding errors, which an
interval would show."""
Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="null")


class Interval(_Record):
    """A figure or a difference, candidate minus another on the same conversations, with its confidence interval."""

    value: Number
    low: Number
    high: Number
    clusters: int = Field(ge=0)
    error: Number
    """Standard error of the value."""
    freedom: Number
    """Degrees of freedom of that error."""

    @classmethod
    def of(cls, estimate: Estimate) -> "Interval":
        names = ("value", "low", "high", "clusters", "error", "freedom")
        return cls(**{name: getattr(estimate, name) for name in names})

    @property
    def ends(self) -> tuple[float, float] | None:
        """Lower and upper end; None where there is no interval."""
        return (self.low, self.high) if math.isfinite(self.low) and math.isfinite(self.high) else None

    def over(self, whole: float) -> "Interval":
        """The interval divided by `whole`, such as the champion's speed-up; NaN where `whole` is not above 0."""
        whole = whole if whole > 0 else math.nan
        divided = {name: getattr(self, name) / whole for name in ("value", "low", "high", "error")}
        return self.model_copy(update=divided)


class Figures(_Record):
    """One draft on the holdout."""

    tau: Number
    """Tokens per round, pooled."""
    speedup: Interval
    """Expected speed-up over plain decoding at the recipe's load; 1 is no gain."""


class Baseline(_Record):
    """Prompt lookup, or the start of a retraining, on the holdout, at what is best for it on the selection split."""

    name: str
    """"prompt lookup", or the version, `name/number`."""
    draft_tokens: int = Field(ge=1)
    """K, or the levels of the tree."""
    speedup: Interval
    difference: Interval
    """Candidate's expected speed-up minus this one's, paired by conversation."""


class DomainFigures(_Record):
    """One domain of the holdout."""

    conversations: int = Field(ge=0)
    champion_speedup: Number
    """The champion's expected speed-up on this domain alone, at the same times."""
    difference: Interval
    """Difference of the expected speed-ups on this domain, paired by conversation."""


class DomainResult(_Record):
    """The candidate on one domain of the holdout."""

    tau: Number
    speedup: Number
    """Expected speed-up of that tau at the times of the whole."""


class Evidence(_Record):
    """Evidence of the gate: all measured figures. Without a champion, `champion` and `difference` are None."""

    candidate: Figures
    candidate_domains: dict[str, DomainResult] = {}
    conversations: int = Field(ge=0)
    clusters: int = Field(ge=0)
    """Clusters of near-duplicates that the conversations are of."""
    confidence: Number
    """Coverage of the intervals."""
    fit_error: Number = 0.0
    """Share by which expected speed-ups may be off, as fitted times are; 0: times are measured as they are used."""
    lookup: Baseline | None = None
    """Prompt lookup; None: it was not measured."""
    start: Baseline | None = None
    """The champion that the candidate's retraining started from; None: it is no heir."""
    lossless: bool | None
    """Greedy speculative output equals plain greedy output in the self-test; None: it compared nothing."""
    export_reads_back: bool
    holdout_overlap: int = Field(ge=0)
    """Holdout clusters that the candidate or an ancestor was trained on."""
    compared: str | None = None
    """The champion that was measured beside the candidate, `name/number`."""
    champion_lost: str | None = None
    """Fault of the champion's files, which were lost or damaged, so that nothing was compared; None: they are sound."""
    champion: Figures | None = None
    difference: Interval | None = None
    """Difference of the expected speed-ups, paired by conversation."""
    domains: dict[str, DomainFigures] = {}

    @property
    def lookup_pays(self) -> bool:
        """Whether prompt lookup is shown to beat plain decoding, less the error of fitted times."""
        return self.lookup is not None and self.lookup.speedup.low * (1 - self.fit_error) > 1


class DomainVerdict(_Record):
    """The gate's verdict on one domain."""

    gain: Interval
    """Gain as a share of the champion's expected speed-up on this domain."""
    judged: bool
    """Whether the domain has enough clusters (gate.min_domain_clusters) to be tested for non-inferiority."""
    passes: bool
    """Judged: the gain's lower end reaches minus gate.domain_margin. Not judged: it is not shown to lose."""
    more_clusters: int | None = None
    """Further clusters that would probably settle it, if the gain stays; None: settled, or no number would."""


class Numbers(_Record):
    """Every number that a decision rests on."""

    evidence: Evidence | None = None
    settings: GateSettings | None = None
    gain: Interval | None = None
    """Gain in expected speed-up, as a share of the champion's."""
    domains: dict[str, DomainVerdict] = {}
    more_clusters: int | None = None
    """Holdout clusters missing for the comparison over all domains; None: none, or no number would help."""


class Decision(_Record):
    """Gate decision: the verdict, its reasons, and every number behind it."""

    promote: bool
    reasons: list[str]
    worth_serving: bool | None = None
    """Whether it is shown to beat plain decoding and prompt lookup; None: nothing was measured."""
    beats_start: bool | None = None
    """Whether it is shown to beat what its retraining started from; None: it is no heir."""
    numbers: Numbers = Numbers()
    compared: str | None = None
    champion_lost: bool = False
    """The champion's files are gone: no rollback should return to it."""

    @property
    def by_choice(self) -> str:
        """Words on a gate.min_speedup below 1, which asks no draft to be worth serving; empty where it asks that."""
        settings = self.numbers.settings
        if settings is None or settings.min_speedup >= 1:
            return ""
        shown = "is" if self.worth_serving else "is not"
        return f"gate.min_speedup = {settings.min_speedup:g}: {shown} shown to beat plain decoding and prompt lookup"

    @property
    def outcome(self) -> str:
        """Words on what was decided, for whoever is handed the draft: promoted, promoted by choice, or why not."""
        if self.promote:
            return f"promoted by choice: {self.by_choice}" if self.by_choice else "promoted"
        return f"refused: {'; '.join(self.reasons)}"

    @property
    def choice(self) -> str:
        """Settings by which a refused candidate would be promoted, such as "gate.min_speedup=0"; empty: none do, as
        what is lacking is no choice."""
        evidence, settings = self.numbers.evidence, self.numbers.settings
        if self.promote or evidence is None or settings is None or decide(evidence, settings).promote:
            return ""
        clusters = {"min_clusters": max(evidence.clusters, 1)} if evidence.clusters < settings.min_clusters else {}
        for changes in (clusters, {"min_speedup": 0}, {"min_speedup": 0, **clusters}):
            if changes and decide(evidence, settings.model_copy(update=changes)).promote:
                return " ".join(f"gate.{name}={value}" for name, value in changes.items())
        return ""


class StoredDecision(Decision):
    """A decision as the registry keeps it, beside the version that it was made about."""

    format: Literal[3] = FORMAT
    version: str
    """`name/number`."""
    at: datetime

    def dump(self) -> str:
        """JSON text of the decision; NaN becomes null."""
        return self.model_dump_json(indent=2) + "\n"


def decide(evidence: Evidence, settings: GateSettings) -> Decision:
    """Decide from the evidence alone. Every check is made, so that a refusal lists all that is wrong.

    Conditions are written so that NaN (not measured) refuses.
    """
    # 1) Checks that need no champion: the evidence, and whether the candidate is worth serving.
    against = _validity(evidence, settings)
    supporting = []
    if evidence.lossless is None:
        supporting.append("no self-test: nothing was decoded at T = 0 (score.sampling, score.decode_conversations)")
    unproven = _against_plain(evidence, max(settings.min_speedup, 1.0)) + _against_lookup(evidence)
    against += unproven if settings.min_speedup >= 1 else _against_plain(evidence, settings.min_speedup)
    supporting += unproven or _worth_serving(evidence)
    # An heir must be shown to beat its start.
    start = evidence.start
    no_better = [] if start is None else _against_start(evidence, start)
    against += no_better
    if start is not None:
        gained = _signed(start.difference)
        supporting.append(f"better than its start, {start.name} as it is ({times_text(start.speedup)}), by {gained}")
    # 2) The comparison, where there is something to compare with.
    numbers = Numbers(evidence=evidence, settings=settings)
    lost = []
    if evidence.compared is None:
        supporting.append("first champion for this target: there is none to compare with")
    elif evidence.champion_lost is not None:
        lost = [
            f"champion {evidence.compared}: its files are gone or damaged ({evidence.champion_lost}): "
            "nothing to compare with"
        ]
    elif evidence.champion is None or evidence.difference is None:
        against.append(f"champion {evidence.compared} was not measured on the holdout")
    else:
        numbers = _numbers(evidence, evidence.champion, evidence.difference, settings)
        against += _against_champion(numbers, evidence, evidence.champion, settings)
        against += _against_domains(numbers, evidence, settings)
        supporting += _supporting(numbers, evidence, evidence.champion, settings)
    # 3) A lower gate.min_speedup than 1 is said first.
    decision = Decision(
        promote=not against,
        reasons=[*(against or supporting), *lost],
        worth_serving=not unproven,
        beats_start=None if start is None else not no_better,
        numbers=numbers,
        compared=evidence.compared,
        champion_lost=bool(lost),
    )
    return decision.model_copy(update={"reasons": [*filter(None, [decision.by_choice]), *decision.reasons]})


def decide_alone(evidence: Evidence, settings: GateSettings) -> Decision:
    """Decide about a champion by itself: whether it meets these settings, whatever it was compared with."""
    compared = ("start", "compared", "champion_lost", "champion", "difference", "domains")
    return decide(Evidence.model_validate(evidence.model_dump(exclude={*compared})), settings)


def _numbers(evidence: Evidence, champion: Figures, difference: Interval, settings: GateSettings) -> Numbers:
    """Relative gains over the champion, overall and by domain, and how many clusters are missing."""
    # Overall: clusters missing for gate.min_clusters, or for an interval narrow enough, whichever is more.
    gain = difference.over(champion.speedup.value)
    floor, missing = -settings.non_inferiority_margin, max(settings.min_clusters - evidence.clusters, 0)
    if not gain.low >= floor:
        missing = max(missing, more_clusters(gain, floor, evidence.confidence) or 0)
    # Each domain is judged alone, against its own champion's speed-up.
    domains = {name: _verdict(domain, evidence, settings) for name, domain in sorted(evidence.domains.items())}
    return Numbers(evidence=evidence, settings=settings, gain=gain, domains=domains, more_clusters=missing or None)


def _verdict(domain: DomainFigures, evidence: Evidence, settings: GateSettings) -> DomainVerdict:
    # A domain with enough clusters must be shown non-inferior. A small one refuses only where it is shown to lose.
    gain, floor = domain.difference.over(domain.champion_speedup), -settings.domain_margin
    judged = gain.clusters >= settings.min_domain_clusters
    passes = gain.low >= floor if judged else not gain.high < floor
    # Clusters missing for a verdict; None (as 0) where even more of them would not change it.
    missing = max(settings.min_domain_clusters, FEWEST_CLUSTERS) - gain.clusters
    if gain.clusters >= FEWEST_CLUSTERS and not gain.low >= floor:
        narrow = more_clusters(gain, floor, evidence.confidence)
        missing = 0 if narrow is None else max(missing, narrow)
    return DomainVerdict(gain=gain, judged=judged, passes=passes, more_clusters=max(missing, 0) or None)


def _validity(evidence: Evidence, settings: GateSettings) -> list[str]:
    """Reasons that refuse before any comparison: not lossless, a bad export, leaked holdout, too little evidence."""
    # Each check gives one reason, so that a refusal names everything that must be mended.
    against = []
    if evidence.lossless is False:
        against.append("the self-test found speculative output that differs from plain decoding: not lossless")
    if not evidence.export_reads_back:
        against.append("the export was not read back equal")
    if evidence.holdout_overlap:
        against.append(f"{evidence.holdout_overlap} holdout clusters were trained on by the candidate or an ancestor")
    if evidence.clusters < settings.min_clusters:
        against.append(
            f"{too_few_clusters(evidence.clusters, settings.min_clusters)} ({evidence.conversations} holdout "
            f"conversations are {evidence.clusters} clusters of near-duplicates; gate.min_clusters = "
            f"{settings.min_clusters})"
        )
    # The intervals' coverage matters only where an interval decides.
    comparing = evidence.compared is not None and evidence.champion_lost is None
    if (comparing or settings.min_speedup > 0) and not evidence.confidence >= settings.confidence:
        against.append(f"intervals cover {evidence.confidence:g}, gate.confidence asks for {settings.confidence:g}")
    return against


def _against_plain(evidence: Evidence, least: float) -> list[str]:
    """Reason against a candidate that is not shown to be more than `least` times as fast as plain decoding."""
    # 1) A known speed-up is always asked for; its interval where anything is.
    speedup, kept = evidence.candidate.speedup, 1 - evidence.fit_error
    if not speedup.value >= 0:
        return ["expected speed-up over plain decoding is not known"]
    if least == 0 or speedup.low * kept > least:
        return []
    # 2) The figure, what it falls short of, and how many clusters would tell.
    lead = "beat plain decoding" if least == 1 else f"be {least:g} times as fast as plain decoding"
    less = f", less {evidence.fit_error:.0%} for the error of fitted times" if evidence.fit_error else ""
    more = more_clusters(speedup, least / kept, evidence.confidence)
    return [
        f"not shown to {lead}: expected speed-up {times_text(speedup)}, whose lower end{less} must lie above {least:g} "
        f"(gate.min_speedup); {_how_many_more(more)}"
    ]


def _against_lookup(evidence: Evidence) -> list[str]:
    """Reason against a candidate that is not shown to beat prompt lookup; it says to serve that where that pays."""
    # 1) The paired difference, less the error of fitted times.
    lookup, speedup = evidence.lookup, evidence.candidate.speedup
    if lookup is None:
        return ["prompt lookup was not measured"]
    floor = evidence.fit_error * speedup.value
    if lookup.difference.low > floor:
        return []
    # 2) Both figures, what they fall short of, and what to serve instead.
    above = f"{floor:.2f}, the error of fitted times" if floor else "0"
    more = _how_many_more(more_clusters(lookup.difference, floor, evidence.confidence))
    instead = f"serve prompt lookup at K = {lookup.draft_tokens} instead, which takes no training"
    instead = instead if evidence.lookup_pays else more
    return [
        f"not shown to beat prompt lookup: {times_text(speedup)}, prompt lookup at K = {lookup.draft_tokens} "
        f"{times_text(lookup.speedup)}, a difference of {_signed(lookup.difference)}, whose lower end must lie above "
        f"{above}; {instead}"
    ]


def _against_start(evidence: Evidence, start: Baseline) -> list[str]:
    """Reason against an heir that is not shown to beat what its retraining started from."""
    floor = LEAST_GAIN * start.speedup.value
    if start.difference.low > floor:
        return []
    more = _how_many_more(more_clusters(start.difference, floor, evidence.confidence))
    figures = f"{times_text(evidence.candidate.speedup)} against {times_text(start.speedup)}"
    return [
        f"not shown to be better than its start, {start.name} as it is: {figures}, a difference of "
        f"{_signed(start.difference)}, whose lower end must lie above 0 by more than a rounding error; {more}"
    ]


def _worth_serving(evidence: Evidence) -> list[str]:
    """Reasons for a candidate that is worth serving: its speed-up, and its lead over prompt lookup."""
    lookup = evidence.lookup
    assert lookup is not None
    return [
        f"worth serving: expected speed-up over plain decoding {times_text(evidence.candidate.speedup)}, prompt lookup "
        f"at K = {lookup.draft_tokens} {times_text(lookup.speedup)}, a difference of {_signed(lookup.difference)}"
    ]


def _against_champion(numbers: Numbers, evidence: Evidence, champion: Figures, settings: GateSettings) -> list[str]:
    # Superiority of the point estimate: the candidate must look faster.
    gain, against = numbers.gain, []
    assert gain is not None
    if not gain.value > LEAST_GAIN:
        against.append(
            f"not faster: expected speed-up {evidence.candidate.speedup.value:.2f}, "
            f"champion {evidence.compared} has {champion.speedup.value:.2f}"
        )
    # Superiority or, with a margin, non-inferiority of the interval: its lower end may not lie below minus the margin.
    if math.isnan(gain.low):
        against.append(
            f"may be slower than champion {evidence.compared}: {_no_interval(gain)} (gate.non_inferiority_margin)"
        )
    elif not gain.low >= -settings.non_inferiority_margin:
        against.append(
            f"may be slower than champion {evidence.compared}: the gain's interval reaches {_percent(gain.low)}, "
            f"allowed is {_percent(0 - settings.non_inferiority_margin)} (gate.non_inferiority_margin); "
            f"{_how_many_more(numbers.more_clusters)}"
        )
    return against


def _against_domains(numbers: Numbers, evidence: Evidence, settings: GateSettings) -> list[str]:
    against = []
    # One reason a failed domain. The wording tells a domain that is shown to lose from one that is not settled.
    for name, verdict in numbers.domains.items():
        if verdict.passes:
            continue
        allowed = _percent(-settings.domain_margin)
        if math.isnan(verdict.gain.low):
            against.append(f"{name} may get worse: {_no_interval(verdict.gain)} (gate.domain_margin)")
            continue
        shown = verdict.gain.high < -settings.domain_margin
        against.append(
            f"{name} {'gets' if shown else 'may get'} worse: {_interval_text(verdict.gain)} on {verdict.gain.clusters} "
            f"clusters, allowed is {allowed} (gate.domain_margin)"
            + ("" if shown else f"; {_how_many_more(verdict.more_clusters)}")
        )
    return against


def _supporting(numbers: Numbers, evidence: Evidence, champion: Figures, settings: GateSettings) -> list[str]:
    """Reasons for the candidate: its gain, and the domains that were too small to judge."""
    assert numbers.gain is not None
    faster = (
        f"faster than champion {evidence.compared} ({champion.speedup.value:.2f}) by {_interval_text(numbers.gain)}"
    )
    small = [
        f"{name} ({verdict.gain.clusters}, {settings.min_domain_clusters - verdict.gain.clusters} more needed)"
        for name, verdict in numbers.domains.items()
        if not verdict.judged
    ]
    if not small:
        return [faster]
    return [f"domains with too few clusters to tell alone: {', '.join(small)} (gate.min_domain_clusters)", faster]


def more_clusters(gain: Interval, floor: float, confidence: float) -> int | None:
    """Further clusters needed for power POWER; None where no number helps, or nothing is known.

    With n clusters of the sizes that `gain` was measured on, G of them, its error is e sqrt(G / n) and has freedom x
    n / G degrees of freedom. Asked is the least n at which the lower end of an interval of `confidence` reaches `floor`
    with probability POWER, if the gain stays: (t at (1 + confidence) / 2 + t at POWER) x error <= gain - floor.
    """
    # No number of clusters helps where the estimate itself lies below the floor.
    room = gain.value - floor
    if not (room > 0 and gain.error > 0 and math.isfinite(gain.error) and 0 < confidence < 1):
        return None

    def enough(clusters: int) -> bool:
        freedom = gain.freedom * clusters / gain.clusters
        quantiles = student((1 + confidence) / 2, freedom) + student(POWER, freedom)
        return quantiles * gain.error * math.sqrt(gain.clusters / clusters) <= room

    # The condition holds from some number on: bisect for it.
    needed = bisect_left(range(_MOST_CLUSTERS), True, lo=gain.clusters, key=enough)
    return needed - gain.clusters if needed < _MOST_CLUSTERS else None


def _how_many_more(more: int | None) -> str:
    if more is None:
        return "more conversations would not change that, if the gain is what it seems"
    return f"about {more:,} more clusters of holdout conversations would tell"


def _no_interval(gain: Interval) -> str:
    few = gain.clusters < FEWEST_CLUSTERS
    return too_few_clusters(gain.clusters) if few else "no interval"


def times_text(speedup: Interval) -> str:
    """A speed-up in words, such as "1.06x [0.97, 1.17]"."""
    if math.isnan(speedup.low):
        return f"{speedup.value:.2f}x ({_no_interval(speedup)})"
    return f"{speedup.value:.2f}x [{speedup.low:.2f}, {speedup.high:.2f}]"


def _signed(difference: Interval) -> str:
    if math.isnan(difference.low):
        return f"{difference.value:+.2f} ({_no_interval(difference)})"
    return f"{difference.value:+.2f} [{difference.low:+.2f}, {difference.high:+.2f}]"


def _interval_text(gain: Interval) -> str:
    return f"{_percent(gain.value)} [{_percent(gain.low)}, {_percent(gain.high)}]"


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %"
