"""Retraining when the target has changed: idempotent, one at a time, and never a worse draft for anyone."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from .. import fingerprint, storage
from ..errors import InputError, LostFilesError
from ..eval import counts
from ..eval.figures import Estimate, tau
from ..eval.score import Identity
from ..eval.select import serving
from ..eval.settings import SELECTION_SPLIT
from ..eval.table import interval
from ..progress import say
from ..recipe import Recipe
from ..registry.lineage import Version
from ..registry.models import champion, latest_champion, missing_file
from ..registry.resolve import resolve_models_uri
from ..specdec.drafts import AnyDraft
from ..specdec.formats import DraftMeta, load_draft, read_meta
from ..specdec.formats.fit import check_fits
from ..train.families import family_of
from .distill import Outcome, distill
from .scoring import Scorer
from .stages import capture_stage, mix_place, mix_stage
from .workspace import Workspace


@dataclass(frozen=True)
class Retrained:
    """What a retraining found and did. `outcome` None: nothing was to do."""

    outcome: Outcome | None
    stale: Version | None = None
    stale_tau: Estimate | None = None


def retrain(space: Workspace) -> Retrained:
    """Distil for the recipe's target unless it has a champion whose files are there. LockedError: another one runs.

    The newest champion of another target is measured on the new target, and training starts from it where tokenizer,
    family and shapes allow; where they do not, it starts cold and says so.
    """
    timeout = space.recipe.retrain.lock_timeout_seconds
    with storage.lock(space.root / ".retrain.lock", timeout, "another retraining"):
        now = champion(space.tracking, space.target_fingerprint)
        missing = None if now is None else missing_file(space.tracking, now)
        if now is not None and missing is None:
            say("up to date: this target has its champion")
            return Retrained(None)
        if now is not None:
            say(f"champion {now.reference}: its files are gone ({missing}): this target needs a draft again")
        stale = latest_champion(space.tracking)
        if stale is None:
            say("no champion of any target yet: distilling from the recipe's start")
            return Retrained(distill(space))
        if stale.lineage.target_fingerprint != space.target_fingerprint:
            say(f"target changed: {stale.reference} drafts for another one")
        inherit_mix(space, stale)
        try:
            folder = resolve_models_uri(space.tracking, stale.uri, space.root / "models", afresh=True)
        except LostFilesError as error:
            say(f"cold start, not from {stale.reference}: its files are gone or damaged ({error})")
            return Retrained(distill(space), stale)
        stale_tau = _measure_stale(space, folder, stale)
        started = _warm(space, folder, stale) if space.recipe.retrain.warm_start else None
        if started is None:
            return Retrained(distill(space), stale, stale_tau)
        return Retrained(distill(started, parent=stale.reference), stale, stale_tau)


def inherit_mix(space: Workspace, stale: Version) -> None:
    """Keep what the champion was trained on out of the new holdout, where the recipe now makes another mix."""
    theirs = stale.lineage.mix_fingerprint
    if theirs == mix_place(space).fingerprint:
        return
    if space.folder("mix", theirs).is_dir():
        space.inherit(theirs)
    else:
        say(
            f"{stale.reference}: its mix {fingerprint.short(theirs)} is not in {space.root}: near-copies of what it "
            "was trained on may be held out"
        )


def _measure_stale(space: Workspace, folder: Path, stale: Version) -> Estimate | None:
    """Acceptance of the old champion on the new target's answers, by replay."""
    captured = capture_stage(space, mix_stage(space))
    if read_meta(folder).tokenizer_digest != space.target.tokenizer_digest:
        say(f"{stale.reference}: drafts with another tokenizer; it cannot serve the new target")
        return None
    scorer = Scorer(space, captured, SELECTION_SPLIT)
    try:
        chains = scorer.chains(scorer.load(folder))
        table, _ = scorer.counts([chains], Identity("stale", stale.lineage.step))
    except (RuntimeError, ValueError) as error:
        say(f"{stale.reference}: cannot draft for the new target ({str(error).splitlines()[0]})")
        return None
    K = max(space.recipe.score.draft_tokens)
    settings = space.recipe.score
    found = tau(serving(counts.where(table, draft_tokens=K), settings), settings.bootstrap)
    say(f"{stale.reference}: tau {interval(found)} at K={K} on the new target")
    return found


def _warm(space: Workspace, folder: Path, stale: Version) -> Workspace | None:
    """The same work with drafts of the champion's family starting from it; None (said aloud) where that cannot be."""
    meta = read_meta(folder)
    draft = load_draft(folder, space.target.device, space.target.dtype).draft
    mine = {name: settings for name, settings in space.recipe.drafts.items() if settings.family == meta.family}
    odd = {
        name: why
        for name, settings in mine.items()
        if (why := family_of(settings).misfit(settings, draft, stale.reference))
    }
    why = _obstacle(space, draft, meta)
    if why is None and len(odd) == len(mine):
        why = next(f"drafts.{name}.{field}" for name, field in odd.items())
    if why is not None:
        say(f"cold start, not from {stale.reference}: {why}")
        return None
    for name, field in odd.items():
        say(f"drafts.{name} starts cold: drafts.{name}.{field}")
    return space.with_recipe(_started_from(space.recipe, folder, mine.keys() - odd.keys()))


def _obstacle(space: Workspace, draft: AnyDraft, meta: DraftMeta) -> str | None:
    """Why no draft of the recipe can start from this one, whatever shape the recipe asks for."""
    if not any(draft.family == meta.family for draft in space.recipe.drafts.values()):
        return f"the recipe trains no draft of its family, {meta.family}"
    if meta.tokenizer_digest != space.target.tokenizer_digest:
        return "the new target has another tokenizer"
    try:
        check_fits(draft, space.target, "the draft")
    except InputError as error:
        return str(error)
    return None


def _started_from(recipe: Recipe, folder: Path, names: Collection[str]) -> Recipe:
    drafts = {}
    for name, draft in recipe.drafts.items():
        steps = recipe.retrain.steps or draft.steps
        change = {"steps": steps, "warmup_steps": min(draft.warmup_steps, steps), "init_from": folder}
        change["score_every"] = min(draft.score_every, steps)
        drafts[name] = draft if name not in names else type(draft).model_validate(draft.model_dump() | change)
    return recipe.model_copy(update={"drafts": drafts})
