"""Moving the alias `champion`, forward and back, with a history of every move in a tag of the registered model.

Movers take turns (`turns.py`), and a move re-reads the alias before and after: what somebody else moved meanwhile, by
hand in MLflow's own pages say, is reported as a lost race.
"""

import json
from datetime import UTC, datetime
from typing import Any

from ..errors import RegistryError
from .connect import Tracking, mlflow_errors
from .lineage import Version, get_version
from .models import CANDIDATE, CHAMPION, PREVIOUS, aliases, model_name
from .turns import moving

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
