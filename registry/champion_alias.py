"""Promotion and rollback: the gate's decision is recorded beside the version, then the champion's alias moves.

On one host a file lock lets one promotion or rollback work at a time. Between hosts the aliases are re-read before and
after each move; what another host moved in between is a lost race, reported as RegistryError. docs/registry.md names
the window that stays open.
"""

import json
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from ..errors import RegistryError
from .artifacts import run_files
from .connect import Tracking, mlflow_errors
from .gate import FORMAT, Decision, StoredDecision
from .lineage import Version, get_version
from .versions import CANDIDATE, CHAMPION, PREVIOUS, alias_lock, aliases, model_name, same_draft

DECISION_TAG = "draftforge.decision"
COMPARED_TAG = "draftforge.compared"
REASONS_TAG = "draftforge.reasons"
BY_CHOICE_TAG = "draftforge.by_choice"
RECORD_TAG = "draftforge.decision_record"
TAU_TAG, SPEEDUP_TAG = "draftforge.tau", "draftforge.speedup"
HISTORY_TAG = "draftforge.history"
ROLLED_BACK_TAG, UNDONE_TAG = "draftforge.rolled_back", "draftforge.rollback_undone"
ALREADY = "is the champion already"
_DECISIONS = "decisions"
"""Artifact folder of a run that holds its gate decisions."""
_MAX_TAG = 5000  # characters that every database of MLflow holds


def promote(tracking: Tracking, decision: Decision, version: Version) -> Decision:
    """Record the decision and, if it says so, make the version champion. Returns the decision as it was carried out.

    Raises RegistryError if the champion is no longer the one that was compared: measure again. Promoting the champion
    changes nothing. A draft that was rolled back is not promoted again.
    """
    name = version.name
    with alias_lock(tracking, name):
        # 1) Is there anything to decide?
        current = aliases(tracking, name).get(CHAMPION)
        if current == version.number:
            return decision.model_copy(update={"promote": True, "reasons": [ALREADY]})
        if rolled_back := _rolled_back(tracking, version):
            number, why = rolled_back
            reason = f"version {number} was rolled back ({why}); `draftforge rollback --undo` makes it champion again"
            decision = decision.model_copy(update={"promote": False, "reasons": [reason, *decision.reasons]})
        # 2) The comparison must be with the champion of now.
        champion = None if current is None else f"{name}/{current}"
        if decision.promote and decision.compared != champion:
            raise RegistryError(
                f"{name}: lost a race: the decision compared {decision.compared or 'no champion'}, "
                f"the champion is now {champion or 'unset'}; compare with that one again"
            )
        # 3) Record, name what a rollback returns to, and move: a cut between these loses nothing.
        _record(tracking, decision, version)
        if decision.promote:
            if current is not None and not decision.champion_lost:
                set_alias(tracking, name, PREVIOUS, current)
            move_champion(tracking, name, current, version.number, "promote", decision.reasons[-1])
    return decision


def rollback(tracking: Tracking, target_fingerprint: str, why: str = "") -> Version:
    """Make the previous champion of this target the champion again, and the one before it `previous`.

    A second rollback goes one further back, never forward to the version that was just left. That one is tagged, so
    that no later retraining promotes it again.
    """
    name = model_name(tracking, target_fingerprint)
    with alias_lock(tracking, name):
        # 1) Refuse where there is nothing to return to.
        known = aliases(tracking, name)
        current, previous = known.get(CHAMPION), known.get(PREVIOUS)
        if current is None:
            raise RegistryError(f"{name}: has no champion to roll back")
        if previous is None:
            raise RegistryError(f"{name}: version {current} is the champion and there is no earlier one to go back to")
        # 2) A promotion that was cut off between its two aliases leaves both on one version: mend it, and let a person
        # look.
        if previous == current:
            older = _champion_before(tracking, name, current)
            set_alias(tracking, name, PREVIOUS, older)
            raise RegistryError(
                f"{name}: champion and previous are both version {current}, an earlier move was cut off; "
                f"previous is now {older or 'unset'}: look, and roll back again if that is wanted"
            )
        # 3) Tag the version that is left, move, and name what the next rollback returns to. Cut off in between, no
        #    retraining promotes that version again.
        left = str(current)
        with mlflow_errors(tracking.uri):
            tracking.client.set_model_version_tag(name, left, ROLLED_BACK_TAG, why[:1000] or "no reason given")
        try:
            move_champion(tracking, name, current, previous, "rollback", why)
        except RegistryError:  # another host's champion is not what was to be left
            with mlflow_errors(tracking.uri):
                tracking.client.delete_model_version_tag(name, left, ROLLED_BACK_TAG)
            raise
        set_alias(tracking, name, PREVIOUS, _champion_before(tracking, name, previous))
    return get_version(tracking, f"{name}/{previous}")


def undo_rollback(tracking: Tracking, target_fingerprint: str, why: str = "") -> Version:
    """Make the version that the last rollback left the champion again; a second undo takes back the rollback before it.

    The reason of the rollback stays with the version, which may be promoted as any other again. Raises RegistryError
    where the champion has not come from a rollback, or has moved since.
    """
    name = model_name(tracking, target_fingerprint)
    with alias_lock(tracking, name):
        # 1) The last rollback that still stands.
        current = aliases(tracking, name).get(CHAMPION)
        if current is None:
            raise RegistryError(f"{name}: has no champion, so no rollback to undo")
        standing = _standing_rollbacks(tracking, name)
        left, returned_to = standing[-1] if standing else (None, None)
        if left is None or returned_to != current:
            raise RegistryError(f"{name}: no rollback to undo: champion {name}/{current} is not there by one")
        version = get_version(tracking, f"{name}/{left}")
        # 2) What bars it from promotion goes first: cut off here, the same undo does the rest.
        with mlflow_errors(tracking.uri):
            reason = (tracking.client.get_model_version(name, str(left)).tags or {}).get(ROLLED_BACK_TAG)
            if reason is not None:
                text = f"{reason}; undone: {why or 'no reason given'}"[:_MAX_TAG]
                tracking.client.set_model_version_tag(name, str(left), UNDONE_TAG, text)
                tracking.client.delete_model_version_tag(name, str(left), ROLLED_BACK_TAG)
        # 3) Move, and name what the next rollback returns to.
        set_alias(tracking, name, PREVIOUS, current)
        move_champion(tracking, name, current, left, "undo", why)
    return version


def _standing_rollbacks(tracking: Tracking, name: str) -> list[tuple[int, int]]:
    """Rollbacks since the last promotion that were not undone, oldest first: the version left, the one returned to."""
    found: list[tuple[int, int]] = []
    for event in history(tracking, name):
        match event.get("event"), event.get("from"), event.get("to"):
            case "rollback", int(left), int(to):
                found.append((left, to))
            case "undo", _, _ if found:
                found.pop()
            case _:
                found.clear()
    return found


def move_champion(tracking: Tracking, name: str, current: int | None, to: int, event: str, why: str) -> None:
    """Move `champion` from version `current` to version `to`, and add that to the history. Hold `alias_lock`.

    Raises RegistryError where another host moved the alias before or meanwhile.
    """
    # MLflow has no compare-and-set: read before the move and after it.
    found = aliases(tracking, name).get(CHAMPION)
    if found != current:
        raise _lost_race(name, current, found)
    set_alias(tracking, name, CHAMPION, to)
    known = aliases(tracking, name)
    if known.get(CHAMPION) != to:
        raise _lost_race(name, to, known.get(CHAMPION))
    # The new champion is no candidate any more.
    if known.get(CANDIDATE) == to:
        set_alias(tracking, name, CANDIDATE, None)
    _add_to_history(tracking, name, {"event": event, "from": current, "to": to, "why": why[:100]})


def set_alias(tracking: Tracking, name: str, alias: str, number: int | None) -> None:
    """Point an alias at a version; None deletes the alias."""
    with mlflow_errors(tracking.uri):
        if number is None:
            tracking.client.delete_registered_model_alias(name, alias)
        else:
            tracking.client.set_registered_model_alias(name, alias, str(number))


def _lost_race(name: str, expected: int | None, found: int | None) -> RegistryError:
    was, is_now = ("unset" if number is None else f"version {number}" for number in (expected, found))
    return RegistryError(f"{name}: lost a race: champion was {was} and is now {is_now}; compare with that one again")


def history(tracking: Tracking, name: str) -> list[dict[str, Any]]:
    """Moves of a registered model's champion, oldest first: at, event, from, to, why."""
    with mlflow_errors(tracking.uri):
        text = tracking.client.get_registered_model(name).tags.get(HISTORY_TAG, "[]")
    try:
        events = json.loads(text)
    except ValueError:
        events = []  # edited by hand; the aliases stay the truth
    return [event for event in events if isinstance(event, dict)] if isinstance(events, list) else []


def _add_to_history(tracking: Tracking, name: str, event: dict[str, Any]) -> None:
    """Append an event to the history tag. Its oldest events are dropped where the tag would exceed MLflow's limit."""
    # The time in the name sorts a version's decisions, and keeps two of them apart.
    now = datetime.now(UTC).isoformat(timespec="seconds")
    events = [*history(tracking, name), {"at": now, **event}]
    while len(text := json.dumps(events, ensure_ascii=False)) > _MAX_TAG and len(events) > 1:
        del events[0]
    with mlflow_errors(tracking.uri):
        tracking.client.set_registered_model_tag(name, HISTORY_TAG, text)


def _champion_before(tracking: Tracking, name: str, number: int) -> int | None:
    """Version that was champion before `number`, by the history; deleted versions are skipped. None: there is none."""
    # The line of champions that leads to the present one: a rollback takes off what came after where it returned to.
    line: list[int] = []
    for event in history(tracking, name):
        start, to = event.get("from"), event.get("to")
        if isinstance(start, int) and line[-1:] != [start]:
            line.append(start)
        if event.get("event") == "rollback":
            while line and line[-1] != to:
                line.pop()
        if isinstance(to, int) and line[-1:] != [to]:
            line.append(to)
    if number not in line:
        return None
    # What stands before its last occurrence, newest first.
    last = len(line) - 1 - line[::-1].index(number)
    for older in reversed(line[:last]):
        if older != number and _exists(tracking, name, older):
            return older
    return None


def _exists(tracking: Tracking, name: str, number: int) -> bool:
    try:
        get_version(tracking, f"{name}/{number}")
    except RegistryError:
        return False
    return True


def _rolled_back(tracking: Tracking, version: Version) -> tuple[int, str] | None:
    """Version number and reason of a rollback of this draft: this version, or another one with the same weights."""
    for same in same_draft(tracking, version):
        with mlflow_errors(tracking.uri):
            tags = tracking.client.get_model_version(same.name, str(same.number)).tags or {}
        if ROLLED_BACK_TAG in tags:
            return same.number, str(tags[ROLLED_BACK_TAG])
    return None


def _record(tracking: Tracking, decision: Decision, version: Version) -> None:
    """Store the full decision as an artifact of the version's run, and its main figures as tags of the version."""
    now = datetime.now(UTC)
    path = f"{_DECISIONS}/{version.name}-v{version.number}-{now:%Y%m%dT%H%M%S.%f}.json"
    tags = {
        DECISION_TAG: "promote" if decision.promote else "refuse",
        COMPARED_TAG: decision.compared or "none",
        REASONS_TAG: "; ".join(decision.reasons)[:2000],
        BY_CHOICE_TAG: decision.by_choice,
        RECORD_TAG: path,
    }
    if decision.numbers.evidence is not None:
        figures = decision.numbers.evidence.candidate
        tags |= {TAU_TAG: f"{figures.tau:.4f}", SPEEDUP_TAG: f"{figures.speedup.value:.4f}"}
    # The artifact goes first: a tag never names a record that does not exist.
    record = StoredDecision(version=version.reference, at=now, **vars(decision))
    with mlflow_errors(tracking.uri):
        tracking.client.log_text(version.run_id, record.dump(), path)
        for key, value in tags.items():
            tracking.client.set_model_version_tag(version.name, str(version.number), key, value)


def decisions(tracking: Tracking, version: Version) -> list[StoredDecision]:
    """Every decision that was made about a version, oldest first.

    Raises RegistryError for a record of another format, or a damaged one.
    """
    # A run holds decisions about all of its versions: take those of this one.
    start = f"{_DECISIONS}/{version.name}-v{version.number}-"
    with mlflow_errors(tracking.uri):
        names = sorted(artifact.path for artifact in tracking.client.list_artifacts(version.run_id, _DECISIONS))
    own = [name for name in names if name.startswith(start)]
    with run_files(tracking, version.run_id, own) as folder:
        return [_parse_decision(name, (folder / name).read_bytes()) for name in own]


def judged_figures(tracking: Tracking, version: Version) -> tuple[float | None, float | None]:
    """tau and expected speed-up on the holdout at the last gate decision about a version; None: no gate judged it."""
    with mlflow_errors(tracking.uri):
        tags = tracking.client.get_model_version(version.name, str(version.number)).tags or {}
    return tag_number(tags.get(TAU_TAG)), tag_number(tags.get(SPEEDUP_TAG))


def tag_number(text: str | None) -> float | None:
    """Number in a tag; None where there is none, also where somebody edited it."""
    try:
        value = float(text or "nan")
    except ValueError:
        return None
    return value if value == value else None


def last_decision(tracking: Tracking, version: Version) -> StoredDecision | None:
    """The newest decision about a version; None where there is none, or none that can be read."""
    try:
        found = decisions(tracking, version)
    except RegistryError:
        return None
    return found[-1] if found else None


def _parse_decision(name: str, data: bytes) -> StoredDecision:
    try:
        # The format first: fields of another format would give misleading errors.
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
