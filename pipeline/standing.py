"""How a target's champion stands: from the registry, and from what the work folder notes of staleness and runs."""

import json
import re
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .. import storage
from ..errors import CorruptDataError, RegistryError
from ..progress import say
from ..registry.artifacts import download
from ..registry.champions import history
from ..registry.connect import Tracking, mlflow_errors
from ..registry.lineage import Version, get_version
from ..registry.models import CHAMPION, aliases, model_name
from .metric_families import Standing
from .staleness import STALENESS_FILE
from .workspace import Workspace

DECISION_TAG, RECORD_TAG = "draftforge.decision", "draftforge.decision_record"


def standing_of(space: Workspace) -> tuple[Standing, Version | None]:
    """What is known of the champion of the recipe's target, and the version itself."""
    tracking, target = space.tracking, space.target_fingerprint
    name = model_name(tracking, target)
    known: dict[str, Any] = {"target": target, "target_name": Path(space.recipe.target.model).name, "model": name}
    number = aliases(tracking, name).get(CHAMPION)
    reference = None if number is None else f"{name}/{number}"
    known |= _staleness(space.root / STALENESS_FILE, reference) | _last_run(tracking, space.recipe.name)
    known |= _last_decision(tracking, name)
    if number is None:
        return Standing(**known), None
    version = get_version(tracking, f"{name}/{number}")
    lineage = version.lineage
    with mlflow_errors(tracking.uri):
        record = tracking.client.get_model_version(name, str(number))
    known |= {
        "version": number,
        "family": lineage.family,
        "step": lineage.step,
        "draft_tokens": lineage.draft_tokens or 0,
        "tree": lineage.tree_name or "",
        "created_at": record.creation_timestamp / 1e3,
        "promoted_at": _promoted_at(tracking, name, number),
        "speedup": _speedup(tracking, version, record.tags or {}),
    }
    return Standing(**known), version


def _promoted_at(tracking: Tracking, name: str, number: int) -> float | None:
    """When the alias last moved to this version."""
    moves = [event for event in history(tracking, name) if event.get("to") == number]
    try:
        return datetime.fromisoformat(moves[-1]["at"]).timestamp() if moves else None
    except (KeyError, TypeError, ValueError):
        return None  # edited by hand


def _speedup(tracking: Tracking, version: Version, tags: Mapping[str, str]) -> float | None:
    """The expected speed-up that the decision rests on."""
    path = tags.get(RECORD_TAG)
    if path is None:
        return None
    try:
        with mlflow_errors(tracking.uri):
            root = str(tracking.client.get_run(version.run_id).info.artifact_uri)
        with tempfile.TemporaryDirectory() as folder:
            download(tracking, root, {path: 0}, Path(folder))
            found = json.loads((Path(folder) / path).read_bytes())["numbers"]["evidence"]["candidate"]["speedup"]
        return None if found is None else float(found)
    except (RegistryError, OSError, KeyError, TypeError, ValueError):
        return None  # gone, or written by hand: the metric is absent


def _last_decision(tracking: Tracking, name: str) -> dict[str, Any]:
    """Of the newest version that a gate judged."""
    with mlflow_errors(tracking.uri):
        found = tracking.client.search_model_versions(
            f"name = '{name}'", max_results=100, order_by=["version_number DESC"]
        )
    judged = next((one for one in found if DECISION_TAG in (one.tags or {})), None)
    if judged is None:
        return {}
    at = re.search(r"-(\d{8}T\d{6})(?:\.\d+)?\.json$", judged.tags.get(RECORD_TAG, ""))
    return {
        "decision": judged.tags[DECISION_TAG],
        "decided_version": int(judged.version),
        "decided_at": datetime.strptime(at[1], "%Y%m%dT%H%M%S").replace(tzinfo=UTC).timestamp() if at else None,
    }


def _last_run(tracking: Tracking, recipe: str) -> dict[str, Any]:
    """When the recipe's last run that is over ended, and how."""
    with mlflow_errors(tracking.uri):
        found = tracking.client.search_runs(
            [tracking.experiment_id],
            f"attributes.run_name = '{recipe}' and attributes.status != 'RUNNING'",
            max_results=1,
            order_by=["attributes.end_time DESC"],
        )
    if not found or not found[0].info.end_time:
        return {}
    return {"run_ended_at": found[0].info.end_time / 1e3, "run_succeeded": found[0].info.status == "FINISHED"}


def _staleness(path: Path, champion: str | None) -> dict[str, Any]:
    """The last check's record: `champion`, `checked_at` (Unix seconds), `stale`, `causes`, each an object with `kind`.

    It says nothing of a champion that came after it.
    """
    if not path.is_file():
        return {}
    try:
        record = storage.read_object(path)
        if champion is not None and record["champion"] != champion:
            return {}
        looked_at = [cause if isinstance(cause, dict) else {"kind": str(cause)} for cause in record.get("causes", [])]
        causes = [cause["kind"] for cause in looked_at if cause.get("verdict", "stale") == "stale"]
        return {
            "stale": bool(record["stale"]),
            "stale_causes": sorted(set(causes)) if record["stale"] else [],
            "checked_at": float(record["checked_at"]),
        }
    except (CorruptDataError, KeyError, TypeError, ValueError) as error:
        say(f"{path}: not a record of a check ({type(error).__name__}: {error}); staleness is not told")
        return {}
