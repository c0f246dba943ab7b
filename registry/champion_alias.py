"""Promotion and rollback: the gate's decision is recorded beside the version, then the champion's alias moves.

On one host a file lock lets one promotion or rollback work at a time. Between hosts the aliases are re-read before and
after each move; what another host moved in between is a lost race, reported as RegistryError. docs/registry.md names
the window that stays open.

A move takes several requests: champion, previous, the bar on what was rolled back, history. It is written down before
the first of them (`MOVE_TAG`). The next verb finishes a move that was cut off after champion had moved, and forgets one
that was cut off before.
"""

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from mlflow.entities.model_registry import RegisteredModel
from pydantic import ValidationError

from ..errors import RegistryError
from ..storage import parse_json, utf8
from .artifacts import run_files, run_names, run_place
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
HISTORY_TAG, MOVE_TAG = "draftforge.history", "draftforge.move"
ROLLED_BACK_TAG, UNDONE_TAG = "draftforge.rolled_back", "draftforge.rollback_undone"
ALREADY = "is the champion already"
UNMET = "does not meet today's gate"
_DECISIONS = "decisions"
"""Artifact folder of a run that holds its gate decisions."""
_MAX_TAG = 5000  # characters that every database of MLflow holds
_MAX_EVENTS = _MAX_TAG // len('{"from": 1, "to": 2}')  # no more fit into a tag
_TEXTS = ("at", "event", "why")  # of a move
_MAX_REASON, _MAX_REASON_LISTED = 1000, 100  # characters of a reason: beside a version, and in the history


def promote(tracking: Tracking, decision: Decision, version: Version) -> Decision:
    """Record the decision and, if it says so, make the version champion. Returns the decision as it was carried out.

    Raises RegistryError if the champion is no longer the one that was compared: measure again. Promoting the champion
    changes nothing. A draft that was rolled back is not promoted again.
    """
    name = version.name
    with alias_lock(tracking, name):
        # 1) Is there anything to decide?
        _settle(tracking, name)
        known = aliases(tracking, name)
        current = known.get(CHAMPION)
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
        # 3) Record, and move. A rollback returns to what was champion, unless its files are gone.
        record_decision(tracking, decision, version)
        if decision.promote:
            previous = known.get(PREVIOUS) if current is None or decision.champion_lost else current
            move_champion(tracking, name, current, version.number, "promote", decision.reasons[-1], previous)
    return decision


def rollback(tracking: Tracking, target_fingerprint: str, why: str = "") -> Version:
    """Make the previous champion of this target the champion again, and the one before it `previous`.

    A second rollback goes one further back, never forward to the version that was just left. That one is tagged, so
    that no later retraining promotes it again.
    """
    name = model_name(tracking, target_fingerprint)
    with alias_lock(tracking, name):
        # 1) A rollback that was cut off after it had moved the champion is this one.
        finished = _settle(tracking, name)
        if finished is not None and finished["event"] == "rollback":
            return get_version(tracking, f"{name}/{finished['to']}")
        # 2) Refuse where there is nothing to return to.
        known = aliases(tracking, name)
        current, previous = known.get(CHAMPION), known.get(PREVIOUS)
        if current is None:
            raise RegistryError(f"{name}: has no champion to roll back")
        if previous == current:  # moved by hand
            previous = _champion_before(tracking, name, current)
        if previous is None:
            raise RegistryError(f"{name}: version {current} is the champion and there is no earlier one to go back to")
        # 3) Move, and name what the next rollback returns to.
        older = _champion_before(tracking, name, previous)
        move_champion(tracking, name, current, previous, "rollback", why, older)
    return get_version(tracking, f"{name}/{previous}")


def undo_rollback(tracking: Tracking, target_fingerprint: str, why: str = "") -> Version:
    """Make the version that the last rollback left the champion again; a second undo takes back the rollback before it.

    The reason of the rollback stays with the version, which may be promoted as any other again. Raises RegistryError
    where the champion has not come from a rollback, or has moved since.
    """
    name = model_name(tracking, target_fingerprint)
    with alias_lock(tracking, name):
        # 1) An undo that was cut off after it had moved the champion is this one.
        finished = _settle(tracking, name)
        if finished is not None and finished["event"] == "undo":
            return get_version(tracking, f"{name}/{finished['to']}")
        # 2) The last rollback that still stands.
        current = aliases(tracking, name).get(CHAMPION)
        if current is None:
            raise RegistryError(f"{name}: has no champion, so no rollback to undo")
        standing = _standing_rollbacks(tracking, name)
        left, returned_to = standing[-1] if standing else (None, None)
        if left is None or returned_to != current:
            raise RegistryError(f"{name}: no rollback to undo: champion {name}/{current} is not there by one")
        version = get_version(tracking, f"{name}/{left}")
        # 3) Move; a rollback of it returns to where this one did.
        move_champion(tracking, name, current, left, "undo", why, current)
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


def move_champion(
    tracking: Tracking, name: str, current: int | None, to: int, event: str, why: str, previous: int | None = None
) -> None:
    """Move `champion` from version `current` to version `to`, and all that follows from it. Hold `alias_lock`.

    `previous`: version that a rollback returns to afterwards. Raises RegistryError where another host moved the alias
    before or meanwhile.
    """
    # 1) What is about to be done comes first: cut off from here on, `_settle` does the rest.
    now = datetime.now(UTC).isoformat(timespec="seconds")
    move = {"at": now, "event": event, "from": current, "to": to, "why": why[:_MAX_REASON], "previous": previous}
    _set_tag(tracking, name, MOVE_TAG, json.dumps(move, ensure_ascii=False))
    # 2) MLflow has no compare-and-set: read before the move and after it.
    found = aliases(tracking, name).get(CHAMPION)
    if found == current:
        set_alias(tracking, name, CHAMPION, to)
        current, found = to, aliases(tracking, name).get(CHAMPION)
    if found != current:
        _set_tag(tracking, name, MOVE_TAG, None)
        raise _lost_race(name, current, found)
    # 3) What follows from it.
    _finish(tracking, name, move)


def settle(tracking: Tracking, target_fingerprint: str) -> None:
    """Finish a move of this target's champion that was cut off after the alias had moved; forget one cut off before."""
    name = model_name(tracking, target_fingerprint)
    with alias_lock(tracking, name):
        _settle(tracking, name)


def _settle(tracking: Tracking, name: str) -> dict[str, Any] | None:
    """Finish a move that was cut off after it had moved `champion`, and return it; forget one that had not."""
    try:
        model = _registered_model(tracking, name)
    except RegistryError:  # no draft of this target is registered
        return None
    if MOVE_TAG not in model.tags:
        return None
    move = _made_move(model)
    if move is None:
        _set_tag(tracking, name, MOVE_TAG, None)
    else:
        _finish(tracking, name, move)
    return move


def _made_move(model: RegisteredModel) -> dict[str, Any] | None:
    """The move that is written down as begun and not as finished; None: there is none, or `champion` has not moved."""
    try:
        move = parse_json(model.tags.get(MOVE_TAG, "null"))
        sound = all(isinstance(move[key], str) for key in _TEXTS) and _is_version(move["previous"]) and _is_event(move)
        moved = sound and move["to"] == int(model.aliases[CHAMPION])
        return _event(move) | {"previous": move["previous"]} if moved else None
    except (ValueError, TypeError, KeyError):  # none, or edited by hand
        return None


def _is_event(value: Any) -> bool:
    """Whether a value of a tag is a move between versions."""
    return isinstance(value, dict) and _is_version(value.get("from")) and _is_version(value.get("to"))


def _event(value: Mapping[str, Any]) -> dict[str, Any]:
    """What a tag says of a move: the versions, and texts that a file and a database can hold."""
    texts = {key: utf8(value[key]) for key in _TEXTS if isinstance(value.get(key), str)}
    return texts | {"from": value.get("from"), "to": value.get("to")}


def _is_version(value: Any) -> bool:
    """Whether a value of a tag is a version's number, or None."""
    return value is None or (type(value) is int and 0 < value < 1 << 31)


def _finish(tracking: Tracking, name: str, move: dict[str, Any]) -> None:
    """Do all that follows from a move of `champion`; done twice, it changes nothing. Versions deleted since are passed
    over."""
    event, start, to, why, previous = (move[key] for key in ("event", "from", "to", "why", "previous"))
    # 1) A rollback bars what it left from promotion; an undo lifts that, and the reason stays.
    if event == "rollback" and _exists(tracking, name, start):
        _set_version_tag(tracking, name, start, ROLLED_BACK_TAG, why or "no reason given")
    if event == "undo" and (barred := _version_tags(tracking, name, to).get(ROLLED_BACK_TAG)) is not None:
        text = f"{barred}; undone: {why or 'no reason given'}"
        _set_version_tag(tracking, name, to, UNDONE_TAG, text[:_MAX_TAG])
        _set_version_tag(tracking, name, to, ROLLED_BACK_TAG, None)
    # 2) What a rollback returns to; the new champion is no candidate any more.
    set_alias(tracking, name, PREVIOUS, previous if _exists(tracking, name, previous) else None)
    if aliases(tracking, name).get(CANDIDATE) == to:
        set_alias(tracking, name, CANDIDATE, None)
    # 3) The history. Its oldest events are dropped where the tag would exceed MLflow's limit.
    events = _events(_registered_model(tracking, name), move)[-_MAX_EVENTS:]
    while len(text := json.dumps(events, ensure_ascii=False)) > _MAX_TAG and len(events) > 1:
        del events[0]
    _set_tag(tracking, name, HISTORY_TAG, text)
    _set_tag(tracking, name, MOVE_TAG, None)


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
    model = _registered_model(tracking, name)
    return _events(model, _made_move(model))


def _events(model: RegisteredModel, move: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Moves that the history holds, and last of them `move`, which may have been cut off before it came there."""
    try:
        known = parse_json(model.tags.get(HISTORY_TAG, "[]"))
    except ValueError:
        known = []  # edited by hand; the aliases stay the truth
    events = [_event(event) for event in known if _is_event(event)] if isinstance(known, list) else []
    if move is not None:
        last = {key: move[key] for key in ("at", "event", "from", "to")} | {"why": move["why"][:_MAX_REASON_LISTED]}
        events += [] if events[-1:] == [last] else [last]
    return events


def _registered_model(tracking: Tracking, name: str) -> RegisteredModel:
    with mlflow_errors(tracking.uri):
        return tracking.client.get_registered_model(name)


def _set_tag(tracking: Tracking, name: str, tag: str, value: str | None) -> None:
    """Set a tag of a registered model; None deletes it."""
    with mlflow_errors(tracking.uri):
        if value is None:
            tracking.client.delete_registered_model_tag(name, tag)
        else:
            tracking.client.set_registered_model_tag(name, tag, value)


def _set_version_tag(tracking: Tracking, name: str, number: int, tag: str, value: str | None) -> None:
    """Set a tag of a version; None deletes it."""
    with mlflow_errors(tracking.uri):
        if value is None:
            tracking.client.delete_model_version_tag(name, str(number), tag)
        else:
            tracking.client.set_model_version_tag(name, str(number), tag, value)


def _version_tags(tracking: Tracking, name: str, number: int) -> dict[str, str]:
    with mlflow_errors(tracking.uri):
        return tracking.client.get_model_version(name, str(number)).tags or {}


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


def _exists(tracking: Tracking, name: str, number: int | None) -> bool:
    if number is None:
        return False
    try:
        get_version(tracking, f"{name}/{number}")
    except RegistryError:
        return False
    return True


def _rolled_back(tracking: Tracking, version: Version) -> tuple[int, str] | None:
    """Version number and reason of a rollback of this draft: this version, or another one with the same weights."""
    for same in same_draft(tracking, version):
        tags = _version_tags(tracking, same.name, same.number)
        if ROLLED_BACK_TAG in tags:
            return same.number, str(tags[ROLLED_BACK_TAG])
    return None


def record_decision(tracking: Tracking, decision: Decision, version: Version) -> None:
    """Store the full decision as an artifact of the version's run, and its main figures as tags of the version.

    Raises RegistryError where the run's artifacts lie outside the store.
    """
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
    record = StoredDecision(version=version.reference, at=now, **vars(decision)).dump()
    run_place(tracking, version.run_id)
    with mlflow_errors(tracking.uri):
        tracking.client.log_text(version.run_id, record, path)
        for key, value in tags.items():
            tracking.client.set_model_version_tag(version.name, str(version.number), key, value)


def decisions(tracking: Tracking, version: Version) -> list[StoredDecision]:
    """Every decision that was made about a version, oldest first.

    Raises RegistryError for a record of another format, or a damaged one.
    """
    # A run holds decisions about all of its versions: take those of this one.
    start = f"{_DECISIONS}/{version.name}-v{version.number}-"
    own = [name for name in run_names(tracking, version.run_id, _DECISIONS) if name.startswith(start)]
    with run_files(tracking, version.run_id, own) as folder:
        return [_parse_decision(name, (folder / name).read_bytes()) for name in own]


def judged_figures(tracking: Tracking, version: Version) -> tuple[float | None, float | None]:
    """tau and expected speed-up on the holdout at the last gate decision about a version; None: no gate judged it."""
    tags = _version_tags(tracking, version.name, version.number)
    return tag_number(tags.get(TAU_TAG)), tag_number(tags.get(SPEEDUP_TAG))


def tag_number(text: str | None) -> float | None:
    """Number in a tag; None where there is none, also where somebody edited it."""
    try:
        value = float(text or "nan")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


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
        found = parse_json(data)
        known = found.get("format", 1) if isinstance(found, dict) else None
        if known != FORMAT:
            raise RegistryError(f"{name}: is a decision of format {known}; this draftforge reads format {FORMAT}")
        return StoredDecision.model_validate(found)
    except ValidationError as error:
        problem = error.errors()[0]
        raise RegistryError(f"{name}: {'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None
    except ValueError as error:
        raise RegistryError(f"{name}: not valid JSON ({error})") from None
