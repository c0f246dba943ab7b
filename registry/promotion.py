"""Carrying a decision out: its record beside the version, the gist as tags, and the alias moved where it says so."""

import json
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..errors import LockedError, RegistryError, TrackingError
from ..progress import say
from .artifacts import download
from .connect import Tracking, mlflow_errors
from .gate import FORMAT, Decision, StoredDecision
from .lineage import Version, get_version
from .versions import CANDIDATE, CHAMPION, PREVIOUS, aliases, aliases_lock, model_name, same_content

TURN_TAG = "draftforge.turn"
_SETTLE_SECONDS = 1.0
"""Least time between a claim and its reading: a request to a server takes a few hundredths of this."""
_ABANDONED_SECONDS = 30.0
"""A claim that stands so long was left by a process that died: a move takes a second or two."""
_GIVE_UP_SECONDS = 120.0
_LOOK_SECONDS = 0.25


@contextmanager
def moving(tracking: Tracking, name: str) -> Iterator[None]:
    """Hold this while the champion of a registered model is compared and moved. Raises LockedError."""
    with aliases_lock(tracking, name):
        if tracking.uri.startswith("sqlite"):  # a file: whoever reaches it shares the lock beside it
            yield
            return
        with turn(tracking, name):
            yield


@contextmanager
def turn(tracking: Tracking, name: str) -> Iterator[None]:
    """The turn among hosts."""
    mine = uuid.uuid4().hex
    _take(tracking, name, mine)
    try:
        yield
    finally:
        with suppress(TrackingError, RegistryError):  # it is abandoned, and so taken over in time
            if _claimed(tracking, name) == mine:
                _release(tracking, name)


def _take(tracking: Tracking, name: str, mine: str) -> None:
    until = time.monotonic() + _GIVE_UP_SECONDS
    while True:
        _wait_until_free(tracking, name, until)
        started = time.monotonic()
        try:
            with mlflow_errors(tracking.uri):
                tracking.client.set_registered_model_tag(name, TURN_TAG, mine)
        except TrackingError:  # two that make a new tag at once: the database takes one of them
            if _claimed(tracking, name) in ("", mine):
                raise
        time.sleep(max(_SETTLE_SECONDS, 3 * (time.monotonic() - started)))
        if _claimed(tracking, name) == mine:
            return


def _wait_until_free(tracking: Tracking, name: str, until: float) -> None:
    """Until nobody claims the turn, or the same claim has stood for too long. By this host's clock alone."""
    seen, since = None, time.monotonic()
    while holder := _claimed(tracking, name):
        if holder != seen:
            seen, since = holder, time.monotonic()
        if time.monotonic() - since > _ABANDONED_SECONDS:
            say(f"{name}: another promotion or rollback was cut off; going on without it")
            return
        if time.monotonic() > until:
            raise LockedError(f"{name}: held by other promotions or rollbacks; wait for them to end")
        time.sleep(_LOOK_SECONDS)


def _claimed(tracking: Tracking, name: str) -> str:
    with mlflow_errors(tracking.uri):
        return str(tracking.client.get_registered_model(name).tags.get(TURN_TAG, ""))


def _release(tracking: Tracking, name: str) -> None:
    with mlflow_errors(tracking.uri):
        tracking.client.delete_registered_model_tag(name, TURN_TAG)


HISTORY_TAG = "draftforge.history"
ROLLED_BACK_TAG = "draftforge.rolled_back"
_MAX_TAG = 5000  # characters that every database of MLflow holds


def history(tracking: Tracking, name: str) -> list[dict[str, Any]]:
    """Moves of a registered model's champion, oldest first: at, event, from, to, why."""
    with mlflow_errors(tracking.uri):
        text = tracking.client.get_registered_model(name).tags.get(HISTORY_TAG, "[]")
    try:
        events = json.loads(text)
    except ValueError:
        events = []  # edited by hand; the aliases stay the truth
    return [event for event in events if isinstance(event, dict)] if isinstance(events, list) else []


def rollback(tracking: Tracking, target_fingerprint: str, why: str = "") -> Version:
    """Make the previous champion of this target the champion again, and the one before it `previous`.

    A second rollback goes one further back, never forward to the version that was just left. That one is tagged, so
    that no later retraining promotes it again.
    """
    name = model_name(tracking, target_fingerprint)
    with moving(tracking, name):
        known = aliases(tracking, name)
        current, previous = known.get(CHAMPION), known.get(PREVIOUS)
        if current is None:
            raise RegistryError(f"{name}: has no champion to roll back")
        if previous is None:
            raise RegistryError(f"{name}: version {current} is the champion and there is no earlier one to go back to")
        if previous == current:
            older = _before(tracking, name, current)
            _set_alias(tracking, name, PREVIOUS, older)
            raise RegistryError(
                f"{name}: champion and previous are both version {current}, an earlier move was cut off; "
                f"previous is now {older or 'unset'}: look, and roll back again if that is wanted"
            )
        move_champion(tracking, name, current, previous, "rollback", why)
        with mlflow_errors(tracking.uri):
            tracking.client.set_model_version_tag(name, str(current), ROLLED_BACK_TAG, why[:1000] or "no reason given")
        _set_alias(tracking, name, PREVIOUS, _before(tracking, name, previous))
    return get_version(tracking, f"{name}/{previous}")


def move_champion(tracking: Tracking, name: str, seen: int | None, to: int, event: str, why: str) -> None:
    """Move the alias from `seen` to `to` and note it. RegistryError when somebody else moved it. Hold the lock."""
    found = aliases(tracking, name).get(CHAMPION)
    if found != seen:
        raise RegistryError(_lost(name, seen, found))
    _set_alias(tracking, name, CHAMPION, to)
    known = aliases(tracking, name)
    if known.get(CHAMPION) != to:
        raise RegistryError(_lost(name, to, known.get(CHAMPION)))
    if known.get(CANDIDATE) == to:
        _set_alias(tracking, name, CANDIDATE, None)
    _note(tracking, name, {"event": event, "from": seen, "to": to, "why": why[:100]})


def _set_alias(tracking: Tracking, name: str, alias: str, number: int | None) -> None:
    with mlflow_errors(tracking.uri):
        if number is None:
            tracking.client.delete_registered_model_alias(name, alias)
        else:
            tracking.client.set_registered_model_alias(name, alias, str(number))


def set_previous(tracking: Tracking, name: str, number: int) -> None:
    """Name the version that a rollback returns to. Done before the champion moves: a cut between loses nothing."""
    _set_alias(tracking, name, PREVIOUS, number)


def _lost(name: str, expected: int | None, found: int | None) -> str:
    def word(number: int | None) -> str:
        return "unset" if number is None else f"version {number}"

    return f"{name}: lost a race: champion was {word(expected)} and is now {word(found)}; compare with that one again"


def _note(tracking: Tracking, name: str, event: dict[str, Any]) -> None:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    events = [*history(tracking, name), {"at": now, **event}]
    while len(text := json.dumps(events, ensure_ascii=False)) > _MAX_TAG and len(events) > 1:
        del events[0]
    with mlflow_errors(tracking.uri):
        tracking.client.set_registered_model_tag(name, HISTORY_TAG, text)


def _before(tracking: Tracking, name: str, number: int) -> int | None:
    """The champion before version `number` became it, as the history tells; skips versions deleted since."""
    line = _line_of_champions(history(tracking, name))
    if number not in line:
        return None
    place = len(line) - 1 - line[::-1].index(number)
    for older in reversed(line[:place]):
        if older != number and _exists(tracking, name, older):
            return older
    return None


def _line_of_champions(events: list[dict[str, Any]]) -> list[int]:
    """Champions that lead to the present one: a rollback takes off what came after the version it returned to."""
    line: list[int] = []
    for event in events:
        start, to = event.get("from"), event.get("to")
        if isinstance(start, int) and line[-1:] != [start]:
            line.append(start)
        if event.get("event") == "rollback":
            while line and line[-1] != to:
                line.pop()
        if isinstance(to, int) and line[-1:] != [to]:
            line.append(to)
    return line


def _exists(tracking: Tracking, name: str, number: int) -> bool:
    try:
        get_version(tracking, f"{name}/{number}")
    except RegistryError:
        return False
    return True


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
