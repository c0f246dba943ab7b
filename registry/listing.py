"""Listing of the registry for `draftforge registry`: each target with its versions, each draft with its targets."""

from datetime import UTC, datetime
from functools import partial
from typing import Any

from mlflow.entities.model_registry import ModelVersion
from pydantic import BaseModel, ConfigDict

from ..errors import RegistryError
from ..fingerprint import short
from ..progress import say
from .champion_alias import (
    BY_CHOICE_TAG,
    DECISION_TAG,
    REASONS_TAG,
    ROLLED_BACK_TAG,
    SPEEDUP_TAG,
    TAU_TAG,
    UNDONE_TAG,
    decisions,
    history,
    tag_number,
)
from .connect import Tracking, all_pages, mlflow_errors, whole_number
from .gate import StoredDecision
from .lineage import LINEAGE_TAG, Version, as_version
from .versions import CANDIDATE, CHAMPION, PREVIOUS, aliases, targets

_ORDER = (CHAMPION, CANDIDATE, PREVIOUS)


class _Listed(BaseModel):
    model_config = ConfigDict(frozen=True, ser_json_inf_nan="null")


class ListedVersion(_Listed):
    """One registered version, as `draftforge registry` lists it."""

    reference: str
    """`name/number`."""
    aliases: list[str]
    draft: str
    """12 hex digits of the draft's digest, which is the same for every target and plan."""
    family: str
    step: int
    plan: str
    """K, or the name of the draft tree, at which the draft was chosen."""
    tau: float | None
    """tau on the holdout at the last gate decision; None: no gate has judged it."""
    speedup: float | None
    registered: datetime
    run: str
    """MLflow's id of the run that made it."""
    run_name: str
    recipe: str
    """12 hex digits of the recipe's fingerprint."""
    parent: str | None
    """Version that its training was warm-started from; None: trained from the start."""
    decision: str
    """promote, refuse, or empty: none was taken."""
    reasons: str
    by_choice: str
    """Words on a gate.min_speedup below 1 at that decision; empty where a draft had to be worth serving."""
    rolled_back: str | None
    """Reason of its rollback; None: no rollback of it stands."""
    rollback_undone: str | None
    """Reasons of a rollback of it and of its undoing; None: there was none."""
    decisions: list[StoredDecision] | None = None
    """Gate decisions in full, oldest first; None where they were not asked for."""


class ListedTarget(_Listed):
    """One target, newest version first."""

    name: str
    """Name of the target's registered model."""
    fingerprint: str
    target: str
    versions: list[ListedVersion]
    moves: list[dict[str, Any]]
    """Moves of the champion's alias, oldest first."""

    def by_alias(self) -> list[tuple[str, ListedVersion]]:
        """Alias and version, the champion first; then, with "-", versions without one that were rolled back."""
        named = [(alias, version) for alias in _ORDER for version in self.versions if alias in version.aliases]
        left = [version for version in self.versions if version.rolled_back is not None and not version.aliases]
        return [*named, *(("-", version) for version in left)]


class ServedTarget(_Listed):
    """One target for which a draft is registered."""

    target: str
    fingerprint: str
    reference: str
    aliases: list[str]


class ListedDraft(_Listed):
    """One draft, with every target that it is registered for."""

    draft: str
    family: str
    step: int
    run: str
    run_name: str
    recipe: str
    serves: list[ServedTarget]


class Listing(_Listed):
    """Listing of the whole registry, by target and by draft."""

    targets: list[ListedTarget]
    drafts: list[ListedDraft]


def listing(tracking: Tracking, target: str = "", with_decisions: bool = False) -> Listing:
    """Listing of every target of the registry, or of those whose fingerprint begins with `target`."""
    # Run names are asked for once and shared by all targets.
    run_names: dict[str, str] = {}
    found = [
        ListedTarget(
            name=entry.name,
            fingerprint=entry.fingerprint,
            target=entry.target_name,
            versions=_versions(tracking, entry.name, run_names, with_decisions),
            moves=history(tracking, entry.name),
        )
        for entry in targets(tracking)
        if entry.fingerprint.startswith(target)
    ]
    return Listing(targets=found, drafts=_by_draft(found))


def _versions(tracking: Tracking, name: str, run_names: dict[str, str], with_decisions: bool) -> list[ListedVersion]:
    known = aliases(tracking, name)
    search = partial(tracking.client.search_model_versions, f"name = '{name}'", 200, None)
    # Versions of others under the same name have no lineage and are not listed.
    ours = [record for record in all_pages(tracking, search) if LINEAGE_TAG in (record.tags or {})]
    found = [(as_version(record), record) for record in ours]
    found.sort(key=lambda one: -one[0].number)
    return [_listed(tracking, version, record, known, run_names, with_decisions) for version, record in found]


def _listed(
    tracking: Tracking,
    version: Version,
    record: ModelVersion,
    known: dict[str, int],
    run_names: dict[str, str],
    with_decisions: bool,
) -> ListedVersion:
    # Several versions share a run: ask for its name once.
    lineage, tags = version.lineage, record.tags or {}
    made = whole_number(record.creation_timestamp, f"{version.reference}: its time")
    if version.run_id not in run_names:
        run_names[version.run_id] = _run_name(tracking, version.run_id)
    return ListedVersion(
        reference=version.reference,
        aliases=sorted(alias for alias, number in known.items() if number == version.number),
        draft=short(lineage.draft),
        family=lineage.family,
        step=lineage.step,
        plan="" if lineage.plan is None else str(lineage.plan),
        tau=tag_number(tags.get(TAU_TAG)),
        speedup=tag_number(tags.get(SPEEDUP_TAG)),
        registered=datetime.fromtimestamp(made / 1000, UTC),
        run=version.run_id,
        run_name=run_names[version.run_id],
        recipe=short(lineage.recipe_fingerprint),
        parent=lineage.parent,
        decision=tags.get(DECISION_TAG, ""),
        reasons=tags.get(REASONS_TAG, ""),
        by_choice=tags.get(BY_CHOICE_TAG, ""),
        rolled_back=tags.get(ROLLED_BACK_TAG),
        rollback_undone=tags.get(UNDONE_TAG),
        decisions=_decisions(tracking, version) if with_decisions else None,
    )


def _decisions(tracking: Tracking, version: Version) -> list[StoredDecision]:
    """Gate decisions of a version in full; an empty list, with a message, where they cannot be read."""
    try:
        return decisions(tracking, version)
    except RegistryError as error:
        say(f"{version.reference}: its decisions cannot be listed: {error}")
        return []


def _run_name(tracking: Tracking, run_id: str) -> str:
    """The run's name; empty for one that was deleted, since its versions outlive it."""
    try:
        with mlflow_errors(tracking.uri):
            return str(tracking.client.get_run(run_id).info.run_name or "")
    except RegistryError:
        return ""


def _by_draft(found: list[ListedTarget]) -> list[ListedDraft]:
    # One entry a content digest: a draft registered for several targets collects all of them.
    drafts: dict[str, ListedDraft] = {}
    for entry in found:
        for version in entry.versions:
            here = ServedTarget(
                target=entry.target,
                fingerprint=entry.fingerprint,
                reference=version.reference,
                aliases=version.aliases,
            )
            known = drafts.get(version.draft)
            drafts[version.draft] = ListedDraft(
                **{key: getattr(version, key) for key in ("draft", "family", "step", "run", "run_name", "recipe")},
                serves=[*(known.serves if known else []), here],
            )
    return sorted(drafts.values(), key=lambda draft: (draft.run_name, draft.family, draft.step, draft.draft))
