"""The gate: may this candidate become the champion? A pure decision in words and numbers, and the act that follows."""

import json
import math
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from ..errors import RegistryError
from .champions import ROLLED_BACK_TAG, move_champion, set_previous
from .connect import Tracking, mlflow_errors
from .lineage import Version
from .models import CHAMPION, aliases, aliases_lock, same_content
from .settings import GateSettings


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Interval(_Record):
    """A difference, candidate minus champion on the same conversations, and its confidence interval."""

    value: float
    low: float
    high: float


class Figures(_Record):
    """One draft on the holdout."""

    tau: float
    """Tokens per round, pooled."""
    speedup: float
    """Expected speed-up over plain decoding at the recipe's load; 1 is no gain."""


class DomainFigures(_Record):
    """One domain (or sampling setting) of the holdout."""

    conversations: int = Field(ge=0)
    champion_tau: float
    difference: Interval


class Evidence(_Record):
    """What was measured. Without a champion, `champion` and `difference` are None."""

    candidate: Figures
    conversations: int = Field(ge=0)
    confidence: float
    """Coverage of the intervals below."""
    lossless: bool | None
    """Greedy speculative output equals plain greedy output in the self-test; None: it compared nothing."""
    export_reads_back: bool
    holdout_overlap: int = Field(ge=0)
    """Holdout clusters that the candidate or an ancestor was trained on."""
    compared: str | None = None
    """The champion that was measured beside the candidate, `name/number`."""
    champion_lost: str | None = None
    """What is wrong with that champion's files: it can serve nobody, and nothing was compared."""
    champion: Figures | None = None
    difference: Interval | None = None
    """Of the expected speed-ups, paired by conversation."""
    domains: dict[str, DomainFigures] = {}


class Decision(_Record):
    """The verdict, why, and every number that it rests on."""

    promote: bool
    reasons: list[str]
    numbers: dict[str, Any]
    compared: str | None
    champion_lost: bool = False
    """The champion's files are gone: no rollback should return to it."""


def decide(evidence: Evidence, settings: GateSettings) -> Decision:
    """Decide from the evidence alone. Every check is made, so that a refusal lists all that is wrong.

    Conditions are written so that NaN (not measured) refuses.
    """
    against = _validity(evidence, settings)
    supporting = [f"expected speed-up over plain decoding is {evidence.candidate.speedup:.2f}"]
    if evidence.lossless is None:
        supporting.append("no self-test: nothing was decoded at T = 0 (score.sampling, score.decode_conversations)")
    gain: Interval | None = None
    if not evidence.candidate.speedup >= settings.min_speedup:
        against.append(
            f"expected speed-up {evidence.candidate.speedup:.2f} is below {settings.min_speedup:g} (gate.min_speedup)"
        )
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
        gain = relative_gain(evidence.champion, evidence.difference)
        against += _against_champion(evidence, evidence.champion, gain, settings)
        against += _against_domains(evidence, settings)
        supporting.append(
            f"faster than champion {evidence.compared} ({evidence.champion.speedup:.2f}) by {_percent(gain.value)} "
            f"[{_percent(gain.low)}, {_percent(gain.high)}]"
        )
    numbers = {
        "evidence": json.loads(evidence.model_dump_json()),  # NaN becomes null
        "settings": settings.model_dump(),
        "gain": None if gain is None else json.loads(gain.model_dump_json()),
    }
    return Decision(
        promote=not against,
        reasons=[*(against or supporting), *lost],
        numbers=numbers,
        compared=evidence.compared,
        champion_lost=bool(lost),
    )


def relative_gain(champion: Figures, difference: Interval) -> Interval:
    """The difference in expected speed-up as a share of the champion's."""
    if not champion.speedup > 0:
        return Interval(value=float("nan"), low=float("nan"), high=float("nan"))
    return Interval(**{name: bound / champion.speedup for name, bound in difference.model_dump().items()})


def _validity(evidence: Evidence, settings: GateSettings) -> list[str]:
    """What makes any comparison worthless."""
    against = []
    if evidence.lossless is False:
        against.append("the self-test found speculative output that differs from plain decoding: not lossless")
    if not evidence.export_reads_back:
        against.append("the export was not read back equal")
    if evidence.holdout_overlap:
        against.append(f"{evidence.holdout_overlap} holdout clusters were trained on by the candidate or an ancestor")
    if evidence.conversations < settings.min_conversations:
        against.append(
            f"{evidence.conversations} holdout conversations, at least {settings.min_conversations} are needed "
            "(gate.min_conversations)"
        )
    comparing = evidence.compared is not None and evidence.champion_lost is None
    if comparing and not evidence.confidence >= settings.confidence:
        against.append(f"intervals cover {evidence.confidence:g}, gate.confidence asks for {settings.confidence:g}")
    return against


def _against_champion(evidence: Evidence, champion: Figures, gain: Interval, settings: GateSettings) -> list[str]:
    against = []
    if not gain.value > 0:
        against.append(
            f"not faster: expected speed-up {evidence.candidate.speedup:.2f}, "
            f"champion {evidence.compared} has {champion.speedup:.2f}"
        )
    if math.isnan(gain.low):
        against.append(
            f"may be slower than champion {evidence.compared}: too few conversations for an interval "
            "(gate.non_inferiority_margin)"
        )
    elif not gain.low >= -settings.non_inferiority_margin:
        against.append(
            f"may be slower than champion {evidence.compared}: the gain's interval reaches {_percent(gain.low)}, "
            f"allowed is {_percent(-settings.non_inferiority_margin)} (gate.non_inferiority_margin)"
        )
    return against


def _against_domains(evidence: Evidence, settings: GateSettings) -> list[str]:
    """Domains that are shown to lose: the whole interval lies below the margin."""
    against = []
    for name, domain in sorted(evidence.domains.items()):
        floor = -settings.domain_margin * domain.champion_tau
        if domain.conversations >= settings.min_domain_conversations and domain.difference.high < floor:
            against.append(
                f"{name} gets worse: tau {domain.difference.value:+.2f} "
                f"[{domain.difference.low:+.2f}, {domain.difference.high:+.2f}] on {domain.conversations} "
                f"conversations, allowed is {floor:+.2f} (gate.domain_margin)"
            )
    return against


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %"


def promote(tracking: Tracking, decision: Decision, version: Version) -> Decision:
    """Record the decision and, if it says so, make the version champion. Returns the decision as it was carried out.

    RegistryError if the champion is no longer the one that was compared: measure again. Doing it twice changes nothing.
    A draft that was rolled back is not promoted again.
    """
    with aliases_lock(tracking, version.name):
        number = aliases(tracking, version.name).get(CHAMPION)
        if number == version.number:
            return decision.model_copy(update={"promote": True, "reasons": ["is the champion already"]})
        if left := _rolled_back(tracking, version):
            number_left, why = left
            reason = f"version {number_left} was rolled back ({why}); delete its tag {ROLLED_BACK_TAG} to allow it"
            decision = decision.model_copy(update={"promote": False, "reasons": [reason, *decision.reasons]})
        found = None if number is None else f"{version.name}/{number}"
        if decision.promote and decision.compared != found:
            raise RegistryError(
                f"{version.name}: lost a race: the decision compared {decision.compared or 'no champion'}, "
                f"the champion is now {found or 'unset'}; compare with that one again"
            )
        _record(tracking, decision, version)
        if decision.promote:
            if number is not None and not decision.champion_lost:
                set_previous(tracking, version.name, number)
            move_champion(tracking, version.name, number, version.number, "promote", decision.reasons[-1])
    return decision


def _rolled_back(tracking: Tracking, version: Version) -> tuple[int, str] | None:
    """The version by which this draft was rolled back, and why: itself, or an earlier one with the same files."""
    for one in same_content(tracking, version.name, version.lineage.content):
        with mlflow_errors(tracking.uri):
            tags = tracking.client.get_model_version(one.name, str(one.number)).tags or {}
        if ROLLED_BACK_TAG in tags:
            return one.number, str(tags[ROLLED_BACK_TAG])
    return None


def _record(tracking: Tracking, decision: Decision, version: Version) -> None:
    """The full decision as an artifact of the version's run, the gist as tags of the version."""
    now = datetime.now(UTC)
    path = f"decisions/{version.name}-v{version.number}-{now:%Y%m%dT%H%M%S}.json"
    tags = {
        "draftforge.decision": "promote" if decision.promote else "refuse",
        "draftforge.compared": decision.compared or "none",
        "draftforge.reasons": "; ".join(decision.reasons)[:2000],
        "draftforge.decision_record": path,
    }
    record = {"version": version.reference, "at": now.isoformat(timespec="seconds"), **decision.model_dump()}
    with mlflow_errors(tracking.uri):
        tracking.client.log_text(version.run_id, json.dumps(record, indent=2, ensure_ascii=False), path)
        for key, value in tags.items():
            tracking.client.set_model_version_tag(version.name, str(version.number), key, value)
