"""Promotion gate: non-inferiority of a candidate to the champion, decided from paired holdout figures.

Overall the candidate must be faster, and the lower end of its gain may not lie below minus the margin. Every domain
with enough conversations must be non-inferior in the same sense. Asking it of all of them needs no correction for
their number: the gate passes only where each test passes, so a candidate that is worse by the margin in any domain
gets through with at most the error of that domain's own test, (1 - confidence) / 2 (an intersection-union test:
Berger, Technometrics 24(4), 1982). What more domains cost is power, and the decision says how many conversations
are missing.
"""

import math
from datetime import datetime
from statistics import NormalDist
from typing import Annotated, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

POWER = 0.8
"""Probability that the comparison passes with the number that is named, were the gain truly what it seems."""
FORMAT: Final = 2
"""Format number of stored decisions, raised when a field changes its meaning. Format 1 held numbers as free JSON."""
Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]


class GateSettings(BaseModel):
    """Gate settings: what a candidate must show on the holdout to become the champion."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    min_speedup: float = Field(default=0.0, ge=0)
    """Least expected speed-up over plain decoding; 0 asks for none (on a slow CPU speculation may lose)."""
    non_inferiority_margin: float = Field(default=0.02, ge=0, lt=1)
    """The candidate must be faster, and the lower end of its relative gain may not lie below minus this. 0: it must be
    shown to be faster."""
    domain_margin: float = Field(default=0.05, ge=0, lt=1)
    """Margin of each domain: the lower end of its relative gain may not lie below minus this."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """Least coverage of the intervals that the evidence carries."""
    min_conversations: int = Field(default=20, ge=1)
    """Least number of holdout conversations behind the comparison."""
    min_domain_conversations: int = Field(default=20, ge=1)
    """Domains with fewer conversations are too small to be asked for non-inferiority: they are reported, and refuse
    only where the whole interval lies below the margin."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="null")


class Interval(_Record):
    """A difference, candidate minus champion on the same conversations, and its confidence interval."""

    value: Number
    low: Number
    high: Number

    def over(self, whole: float) -> "Interval":
        """The interval divided by `whole`, such as the champion's speed-up; NaN where `whole` is not above 0."""
        whole = whole if whole > 0 else math.nan
        return Interval(value=self.value / whole, low=self.low / whole, high=self.high / whole)


class Figures(_Record):
    """One draft on the holdout."""

    tau: Number
    """Tokens per round, pooled."""
    speedup: Number
    """Expected speed-up over plain decoding at the recipe's load; 1 is no gain."""


class DomainFigures(_Record):
    """One domain of the holdout."""

    conversations: int = Field(ge=0)
    champion_speedup: Number
    """The champion's expected speed-up on this domain alone, at the same times."""
    difference: Interval
    """Difference of the expected speed-ups on this domain, paired by conversation."""


class Evidence(_Record):
    """Evidence of the gate: all measured figures. Without a champion, `champion` and `difference` are None."""

    candidate: Figures
    conversations: int = Field(ge=0)
    confidence: Number
    """Coverage of the intervals below."""
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


class DomainVerdict(_Record):
    """The gate's verdict on one domain."""

    gain: Interval
    """Gain as a share of the champion's expected speed-up on this domain."""
    judged: bool
    """Whether the domain has enough conversations (gate.min_domain_conversations) to be tested for non-inferiority."""
    passes: bool
    """Judged: the gain's lower end reaches minus gate.domain_margin. Not judged: it is not shown to lose."""
    more_conversations: int | None = None
    """Further conversations that would probably settle it, if the gain stays; None: settled, or no number would."""


class Numbers(_Record):
    """Every number that a decision rests on."""

    evidence: Evidence | None = None
    settings: GateSettings | None = None
    gain: Interval | None = None
    """Gain in expected speed-up, as a share of the champion's."""
    domains: dict[str, DomainVerdict] = {}
    more_conversations: int | None = None
    """Holdout conversations missing for the comparison over all domains; None: none, or no number would help."""


class Decision(_Record):
    """Gate decision: the verdict, its reasons, and every number behind it."""

    promote: bool
    reasons: list[str]
    numbers: Numbers = Numbers()
    compared: str | None = None
    champion_lost: bool = False
    """The champion's files are gone: no rollback should return to it."""


class StoredDecision(Decision):
    """A decision as the registry keeps it, beside the version that it was made about."""

    format: Literal[2] = FORMAT
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
    # 1) Checks that need no champion.
    against = _validity(evidence, settings)
    supporting = [f"expected speed-up over plain decoding is {evidence.candidate.speedup:.2f}"]
    if evidence.lossless is None:
        supporting.append("no self-test: nothing was decoded at T = 0 (score.sampling, score.decode_conversations)")
    if not evidence.candidate.speedup >= settings.min_speedup:
        against.append(
            f"expected speed-up {evidence.candidate.speedup:.2f} is below {settings.min_speedup:g} (gate.min_speedup)"
        )
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
        supporting += _supporting(numbers, evidence, evidence.champion)
    return Decision(
        promote=not against,
        reasons=[*(against or supporting), *lost],
        numbers=numbers,
        compared=evidence.compared,
        champion_lost=bool(lost),
    )


def _numbers(evidence: Evidence, champion: Figures, difference: Interval, settings: GateSettings) -> Numbers:
    """Relative gains over the champion, overall and by domain, and how many conversations are missing."""
    # Overall: conversations missing for gate.min_conversations, or for an interval narrow enough, whichever is more.
    gain = difference.over(champion.speedup)
    floor, missing = -settings.non_inferiority_margin, max(settings.min_conversations - evidence.conversations, 0)
    if not gain.low >= floor:
        narrow = more_conversations(gain.value, gain.low, floor, evidence.conversations, evidence.confidence)
        missing = max(missing, narrow or 0)
    # Each domain is judged alone, against its own champion's speed-up.
    domains = {name: _verdict(domain, evidence, settings) for name, domain in sorted(evidence.domains.items())}
    return Numbers(evidence=evidence, settings=settings, gain=gain, domains=domains, more_conversations=missing or None)


def _verdict(domain: DomainFigures, evidence: Evidence, settings: GateSettings) -> DomainVerdict:
    # A domain with enough conversations must be shown non-inferior. A small one refuses only where it is shown to lose.
    gain, floor = domain.difference.over(domain.champion_speedup), -settings.domain_margin
    judged = domain.conversations >= settings.min_domain_conversations
    passes = gain.low >= floor if judged else not gain.high < floor
    # Conversations missing for a verdict; None (as 0) where even more of them would not change it.
    missing = 0 if judged else settings.min_domain_conversations - domain.conversations
    if not gain.low >= floor:
        narrow = more_conversations(gain.value, gain.low, floor, domain.conversations, evidence.confidence)
        missing = 0 if narrow is None else max(missing, narrow)
    return DomainVerdict(gain=gain, judged=judged, passes=passes, more_conversations=missing or None)


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
    if missing := max(settings.min_conversations - evidence.conversations, 0):
        against.append(
            f"{evidence.conversations} holdout conversations, at least {settings.min_conversations} are needed: "
            f"{missing} more (gate.min_conversations)"
        )
    # The intervals' coverage matters only where intervals are compared.
    comparing = evidence.compared is not None and evidence.champion_lost is None
    if comparing and not evidence.confidence >= settings.confidence:
        against.append(f"intervals cover {evidence.confidence:g}, gate.confidence asks for {settings.confidence:g}")
    return against


def _against_champion(numbers: Numbers, evidence: Evidence, champion: Figures, settings: GateSettings) -> list[str]:
    # Superiority of the point estimate: the candidate must look faster.
    gain, against = numbers.gain, []
    assert gain is not None
    if not gain.value > 0:
        against.append(
            f"not faster: expected speed-up {evidence.candidate.speedup:.2f}, "
            f"champion {evidence.compared} has {champion.speedup:.2f}"
        )
    # Non-inferiority of the interval: its lower end may not lie below minus the margin.
    if math.isnan(gain.low):
        against.append(
            f"may be slower than champion {evidence.compared}: too few conversations for an interval "
            "(gate.non_inferiority_margin)"
        )
    elif not gain.low >= -settings.non_inferiority_margin:
        against.append(
            f"may be slower than champion {evidence.compared}: the gain's interval reaches {_percent(gain.low)}, "
            f"allowed is {_percent(-settings.non_inferiority_margin)} (gate.non_inferiority_margin); "
            f"{_how_many_more(numbers.more_conversations)}"
        )
    return against


def _against_domains(numbers: Numbers, evidence: Evidence, settings: GateSettings) -> list[str]:
    against = []
    # One reason a failed domain. The wording tells a domain that is shown to lose from one that is not settled.
    for name, verdict in numbers.domains.items():
        if verdict.passes:
            continue
        count, allowed = evidence.domains[name].conversations, _percent(-settings.domain_margin)
        if math.isnan(verdict.gain.low):
            against.append(f"{name} may get worse: too few conversations for an interval ({count}; gate.domain_margin)")
            continue
        shown = verdict.gain.high < -settings.domain_margin
        against.append(
            f"{name} {'gets' if shown else 'may get'} worse: {_interval_text(verdict.gain)} on {count} conversations, "
            f"allowed is {allowed} (gate.domain_margin)"
            + ("" if shown else f"; {_how_many_more(verdict.more_conversations)}")
        )
    return against


def _supporting(numbers: Numbers, evidence: Evidence, champion: Figures) -> list[str]:
    """Reasons for the candidate: its gain, and the domains that were too small to judge."""
    assert numbers.gain is not None
    faster = f"faster than champion {evidence.compared} ({champion.speedup:.2f}) by {_interval_text(numbers.gain)}"
    small = [
        f"{name} ({evidence.domains[name].conversations})"
        for name, verdict in numbers.domains.items()
        if not verdict.judged
    ]
    if not small:
        return [faster]
    return [f"too small to judge alone: {', '.join(small)} (gate.min_domain_conversations)", faster]


def more_conversations(value: float, low: float, floor: float, conversations: int, confidence: float) -> int | None:
    """Further conversations needed for power POWER; None where no number helps, or nothing is known.

    `value`, `low`: a difference and the lower end of its interval of `confidence`, measured on `conversations`.
    `floor`: what the lower end must reach. The interval's width is taken to shrink with the root of the number of
    conversations, and clusters to keep their size: n' = n (width / z x (z + z_power) / (value - floor))^2.
    """
    # No number of conversations helps where the estimate itself lies below the floor.
    room, width = value - floor, value - low
    if not (room > 0 and width > 0 and math.isfinite(width) and 0 < confidence < 1) or conversations < 1:
        return None
    # Normal approximation: the half-width that the interval may have, over the one that it has.
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    stretched = width / z * (z + NormalDist().inv_cdf(POWER)) / room
    return max(math.ceil(conversations * stretched**2) - conversations, 0)


def _how_many_more(more: int | None) -> str:
    if more is None:
        return "more conversations would not change that, if the gain is what it seems"
    return f"about {more:,} more holdout conversations would tell"


def _interval_text(gain: Interval) -> str:
    return f"{_percent(gain.value)} [{_percent(gain.low)}, {_percent(gain.high)}]"


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %"
