"""Carrying a decision out: its record beside the version, the gist as tags, and the alias moved where it says so."""

import json
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from ..errors import RegistryError
from .artifacts import download
from .champions import ROLLED_BACK_TAG, move_champion, set_previous
from .connect import Tracking, mlflow_errors
from .lineage import Version
from .models import CHAMPION, aliases, same_content
from .records import FORMAT, Decision, StoredDecision
from .turns import moving

DECISION_TAG = "draftforge.decision"
COMPARED_TAG = "draftforge.compared"
REASONS_TAG = "draftforge.reasons"
RECORD_TAG = "draftforge.decision_record"
TAU_TAG, SPEEDUP_TAG = "draftforge.tau", "draftforge.speedup"
ALREADY = "is the champion already"
_FOLDER = "decisions"


def promote(tracking: Tracking, decision: Decision, version: Version) -> Decision:
    """Record the decision and, if it says so, make the version champion. Returns the decision as it was carried out.

    RegistryError if the champion is no longer the one that was compared: measure again. Doing it twice changes nothing.
    A draft that was rolled back is not promoted again.
    """
    with moving(tracking, version.name):
        number = aliases(tracking, version.name).get(CHAMPION)
        if number == version.number:
            return decision.model_copy(update={"promote": True, "reasons": [ALREADY]})
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
    path = f"{_FOLDER}/{version.name}-v{version.number}-{now:%Y%m%dT%H%M%S.%f}.json"
    tags = {
        DECISION_TAG: "promote" if decision.promote else "refuse",
        COMPARED_TAG: decision.compared or "none",
        REASONS_TAG: "; ".join(decision.reasons)[:2000],
        RECORD_TAG: path,
    }
    if decision.numbers.evidence is not None:
        figures = decision.numbers.evidence.candidate
        tags |= {TAU_TAG: f"{figures.tau:.4f}", SPEEDUP_TAG: f"{figures.speedup:.4f}"}
    record = StoredDecision(version=version.reference, at=now, **vars(decision))
    with mlflow_errors(tracking.uri):
        tracking.client.log_text(version.run_id, record.dump(), path)
        for key, value in tags.items():
            tracking.client.set_model_version_tag(version.name, str(version.number), key, value)


def decisions(tracking: Tracking, version: Version) -> list[StoredDecision]:
    """Every decision that was made about a version, oldest first.

    RegistryError for a record that another format of draftforge wrote, or that is damaged.
    """
    start = f"{_FOLDER}/{version.name}-v{version.number}-"
    with mlflow_errors(tracking.uri):
        root = str(tracking.client.get_run(version.run_id).info.artifact_uri)
        names = sorted(one.path for one in tracking.client.list_artifacts(version.run_id, _FOLDER))
    mine = [name for name in names if name.startswith(start)]
    with tempfile.TemporaryDirectory() as folder:
        download(tracking, root, dict.fromkeys(mine, 0), Path(folder))
        return [_stored(name, (Path(folder) / name).read_bytes()) for name in mine]


def last_decision(tracking: Tracking, version: Version) -> StoredDecision | None:
    """The newest decision about a version; None where there is none, or none that can be read."""
    try:
        found = decisions(tracking, version)
    except RegistryError:
        return None
    return found[-1] if found else None


def _stored(name: str, data: bytes) -> StoredDecision:
    try:
        found = json.loads(data)
        known = found.get("format", 1) if isinstance(found, dict) else None
        if known != FORMAT:
            raise RegistryError(f"{name}: is a decision of format {known}; this draftforge reads format {FORMAT}")
        return StoredDecision.model_validate(found)
    except ValidationError as error:
        problem = error.errors()[0]
        raise RegistryError(f"{name}: {'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None
    except ValueError as error:
        raise RegistryError(f"{name}: not valid JSON ({error})") from None
