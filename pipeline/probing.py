"""A champion on a few answers that the target gives now."""

import shutil
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

import pyarrow as pa

from .. import fingerprint
from ..data.capture import capture_conversations
from ..data.conversation import Conversation, turns
from ..data.mending import mend
from ..data.mix import load_members
from ..data.split import unit
from ..data.threads import Asking, asked_elsewhere, asking
from ..eval.plans import Drafting
from ..eval.score import Identity
from ..eval.select import serving
from ..eval.settings import HOLDOUT_SPLIT
from ..registry.lineage import Version, ancestors, cluster_digest, training_clusters
from ..specdec.drafts import AnyDraft
from ..specdec.proposers import make_proposer
from .scoring import Scorer
from .stages import Stage
from .workspace import Workspace


def new_conversations(
    space: Workspace, version: Version, mix: Sequence[Conversation], known: Collection[str]
) -> list[Conversation]:
    """Conversations of a mix that a version's own mix (ids `known`) does not have and that lie near nothing that it or
    an ancestor was trained on, without turns that one of them was trained on: as new to it as its holdout was."""
    trained: set[str] = set()
    for one in (version, *ancestors(space.tracking, version)):
        trained |= training_clusters(space.tracking, one)
    fresh = [one for one in mix if one.id not in known and cluster_digest(one.cluster) not in trained]
    folder = space.folder("mix", version.lineage.mix_fingerprint)
    members = load_members([folder] if folder.is_dir() else [])
    before: list[Asking] = [(one.split, one.member.turn_keys) for one in members if one.split == "train"]
    left_out = asked_elsewhere([asking(HOLDOUT_SPLIT, one) for one in fresh], before)
    found = [one.model_copy(update={"asked_elsewhere": places}) for one, places in zip(fresh, left_out)]
    return [one for one in found if turns(one)]


def sample(space: Workspace, conversations: Sequence[Conversation], first: Collection[str] = ()) -> list[Conversation]:
    """At most `retrain.probe_conversations` of them, an even choice by hash; those whose id is in `first` go first."""
    salt, most = space.recipe.mix.salt, space.recipe.retrain.probe_conversations
    ranked = sorted(conversations, key=lambda one: (one.id not in first, unit("probe", salt, one.id), one.id))
    return sorted(ranked[:most], key=lambda one: one.id)


def answered(space: Workspace, conversations: Sequence[Conversation]) -> Stage:
    """The target's answers to them at the scored sampling settings, in a folder that the next probe replaces."""
    recipe, target = space.recipe, space.target
    inputs = [
        [(one.id, one.cluster, one.asked_elsewhere) for one in conversations],
        recipe.capture.identity(),
        [sampling.model_dump() for sampling in recipe.score.sampling],
        [target.fingerprint, str(target.dtype)],
    ]
    found = fingerprint.of_json(["probe", inputs])
    stage = Stage(space.folder("probe", found), found)
    for earlier in space.root.glob("probe-*"):
        if earlier != stage.folder and not earlier.is_symlink():
            shutil.rmtree(earlier)
    held_out = [one.model_copy(update={"split": HOLDOUT_SPLIT}) for one in conversations]
    mend(stage.folder)  # of a killed run; few and small
    capture_conversations(target, held_out, recipe.capture, recipe.score.sampling, stage.folder)
    return stage


def counts_of(space: Workspace, version: Version, folder: Path, captured: Stage) -> pa.Table:
    """Counts of a registered version, drafting as it was promoted, on captured answers; only what decides."""
    settings = space.recipe.score.model_copy(update={"decode_conversations": 0, "max_conversations": 0})
    scorer = Scorer(space.with_recipe(space.recipe.model_copy(update={"score": settings})), captured, HOLDOUT_SPLIT)
    draft, step = scorer.load(folder), version.lineage.step
    table, _ = scorer.counts([_drafting(scorer, space, draft, version)], Identity("champion", step))
    return serving(table, settings)


def _drafting(scorer: Scorer, space: Workspace, draft: AnyDraft, version: Version) -> Drafting:
    lineage = version.lineage
    if lineage.tree is not None:
        return scorer.tree_of(draft, str(lineage.tree_name), lineage.tree)
    K = lineage.draft_tokens or max(space.recipe.score.draft_tokens)
    return Drafting(partial(make_proposer, draft, space.target), (K,))
