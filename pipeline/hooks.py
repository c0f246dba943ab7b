"""The operator's command after a promotion or a rollback: told by its environment, never through a shell.

It runs once for each move of the alias, after it. Its failure undoes nothing: it is said, noted on the version, and
makes the verb exit with HookError's code. What failed, or what a kill kept from running, is caught up by the next
`promote`, `distill` or `retrain`, whatever else that does.
"""

import os
import shutil
import signal
import subprocess
from datetime import UTC, datetime
from typing import Literal, NamedTuple

from .. import storage
from ..errors import HookError, InputError
from ..progress import say
from ..recipe import PromotionSettings
from ..registry.champions import history
from ..registry.connect import mlflow_errors
from ..registry.lineage import Version
from ..registry.models import champion
from ..registry.promoting import last_decision
from ..registry.resolve import resolve_models_uri
from ..registry.settings import redacted
from .workspace import Workspace

Event = Literal["promote", "rollback"]
HOOK_TAG = "draftforge.hook"
_NOUN: dict[Event, str] = {"promote": "promotion", "rollback": "rollback"}
_DONE = "done"
_KEPT_CHARACTERS = 20_000
_DRAIN_SECONDS = 5.0


class _Ended(NamedTuple):
    """How a command ended: `problem` empty, or what went wrong in a few words."""

    output: str
    problem: str


def check_command(settings: PromotionSettings) -> None:
    """Raise InputError where the command names no program: found out before the work, not after the promotion."""
    if settings.command and shutil.which(settings.command[0]) is None:
        raise InputError(f"promotion.command {settings.command[0]}: no such program, or not executable")


def follow_champion(space: Workspace) -> None:
    """Run the command for the target's champion, unless it was run for the move that made it so. Raises HookError.

    Whoever comes by, a retraining with nothing else to do too, catches up what failed or was killed before.
    """
    if not space.recipe.promotion.command:
        return
    now = champion(space.tracking, space.target_fingerprint)
    if now is None:
        return
    move = _last_move(space, now)
    event: Event = "rollback" if move.get("event") == "rollback" else "promote"
    with mlflow_errors(space.tracking.uri):
        tags = space.tracking.client.get_model_version(now.name, str(now.number)).tags or {}
    if tags.get(HOOK_TAG) != _noted(event, move, _DONE):
        _follow(space, event, now, move)


def _last_move(space: Workspace, version: Version) -> dict[str, object]:
    moves = [move for move in history(space.tracking, version.name) if move.get("to") == version.number]
    return moves[-1] if moves else {}


def _noted(event: Event, move: dict[str, object], how: str) -> str:
    """The tag's words: the same version may be promoted, left and promoted again."""
    return f"{event} {move.get('at', '')}: {how}"


def _follow(space: Workspace, event: Event, version: Version, move: dict[str, object]) -> None:
    settings = space.recipe.promotion
    say(f"{version.reference}: running {settings.command[0]} after the {_NOUN[event]}")
    ended = run_command(settings, environment(space, event, version, move))
    output = _without_secrets(ended.output, space.tracking.uri)
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")
    note = _noted(event, move, ended.problem or _DONE)
    with mlflow_errors(space.tracking.uri):
        client = space.tracking.client
        client.log_text(version.run_id, output, f"hooks/{version.name}-v{version.number}-{stamp}.txt")
        client.set_model_version_tag(version.name, str(version.number), HOOK_TAG, note)
    if ended.problem:
        last = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "it said nothing")
        raise HookError(
            f"promotion.command {settings.command[0]}: {ended.problem}: {last[:300]} "
            f"({version.reference} stays champion)"
        )


def environment(space: Workspace, event: Event, version: Version, move: dict[str, object]) -> dict[str, str]:
    """What the command is told, beside the environment of this process."""
    decision = last_decision(space.tracking, version)
    path = space.root / "hooks" / f"{version.name}-v{version.number}-{event}.json"
    told = {
        "event": event,
        "version": version.reference,
        "target": version.lineage.target_fingerprint,
        "move": move,
        "decision": None if decision is None else decision.model_dump(mode="json"),
    }
    storage.write_json(path, told)
    return {
        "DRAFTFORGE_EVENT": event,
        "DRAFTFORGE_VERSION": version.reference,
        "DRAFTFORGE_URI": version.uri,
        "DRAFTFORGE_TARGET": version.lineage.target_fingerprint,
        "DRAFTFORGE_DECISION": str(path),
        "DRAFTFORGE_DRAFT": str(resolve_models_uri(space.tracking, version.uri, space.root / "models")),
        "MLFLOW_TRACKING_URI": space.tracking.uri,
    }


def run_command(settings: PromotionSettings, told: dict[str, str]) -> _Ended:
    """Run the command in a session of its own, so that nothing that it started outlives its time."""
    try:
        process = subprocess.Popen(
            settings.command,
            env=os.environ | told,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return _Ended("", f"cannot be started ({error})")
    problem = ""
    try:
        output, _ = process.communicate(timeout=settings.timeout_seconds)
    except subprocess.TimeoutExpired:
        output, problem = _killed(process), f"not done after {settings.timeout_seconds:g} s (promotion.timeout_seconds)"
    except BaseException:
        _killed(process)
        raise
    if not problem and process.returncode:
        code = process.returncode
        problem = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return _Ended(output.decode(errors="replace")[-_KEPT_CHARACTERS:], problem)


def _killed(process: "subprocess.Popen[bytes]") -> bytes:
    """What the command had said when it, and what it started, was killed."""
    os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.communicate(timeout=_DRAIN_SECONDS)[0]
    except subprocess.TimeoutExpired:  # something left the session and holds the pipe
        return b""


def _without_secrets(text: str, tracking_uri: str) -> str:
    return redacted(text.replace(tracking_uri, redacted(tracking_uri)))
