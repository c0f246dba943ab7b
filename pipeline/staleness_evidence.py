"""Evidence of staleness: target, gate, recent traffic and mix are examined, each only where something changed.

- Nothing changed: no answers are generated.
- The logs changed: the mix is made anew, and a sample of its new conversations (the probe) is answered.
- The target changed: a draft is due whatever the answers say; a probe shows how far the old draft fell.
"""

import math
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from .. import fingerprint
from ..data.capture.capture import capture_conversations
from ..data.capture.reuse import drop_damaged
from ..data.conversation import Conversation, turns
from ..data.dedup import Asking, asked_elsewhere, asking
from ..data.mix import load_members, load_mix
from ..data.rehearsal import base_of
from ..data.split import unit
from ..errors import CorruptDataError, LostFilesError
from ..eval.acceptance import too_few_clusters
from ..eval.counts import values
from ..eval.draft_configs import ProposerSpec
from ..eval.leaderboard import serving
from ..eval.score import Identity
from ..eval.settings import FEWEST_CLUSTERS, HOLDOUT_SPLIT
from ..progress import say
from ..registry.champion_alias import UNMET, last_decision
from ..registry.gate import decide_alone
from ..registry.lineage import Lineage, Version, ancestors, cluster_digest, inherited_clusters
from ..registry.versions import champion, latest_champion, missing_file, resolve_models_uri
from ..specdec.formats import read_meta
from ..specdec.stored_draft import StoredDraft
from ..specdec.targets import covered_since, fingerprint_of
from .draft_scorer import Scorer
from .promotion import check_stages, kept_counts
from .stages import Stage, Stages, mix_stage, stage_address
from .staleness import Cause, Change, Staleness, mix_drift, tau_change
from .workspace import Workspace, in_stage


def new_conversations(
    space: Workspace, version: Version, mix: Sequence[Conversation], known: Collection[str]
) -> list[Conversation]:
    """Conversations of a mix that a version has never seen: as new to it as its holdout was.

    Left out are conversations of the version's own mix (ids `known`), those in a cluster that it or an ancestor was
    trained on, and turns that were asked in its train split.
    """
    # 1) Whole conversations: near-copies share a cluster, also with what ancestors were trained on.
    trained = inherited_clusters(space.tracking, version)
    fresh = [chat for chat in mix if chat.id not in known and cluster_digest(chat.cluster) not in trained]
    # 2) Single turns: the same question may be asked inside another conversation.
    folder = space.folder("mix", version.lineage.mix_fingerprint)
    members = load_members([folder] if folder.is_dir() else [])
    before: list[Asking] = [(one.split, one.member.turn_keys) for one in members if one.split == "train"]
    left_out = asked_elsewhere([asking(HOLDOUT_SPLIT, one) for one in fresh], before)
    found = [one.model_copy(update={"asked_elsewhere": places}) for one, places in zip(fresh, left_out)]
    return [one for one in found if turns(one)]


def sample(space: Workspace, conversations: Sequence[Conversation], first: Collection[str] = ()) -> list[Conversation]:
    """Sample of at most `retrain.probe_conversations` conversations, drawn by a hash of their ids, so always the same.

    Conversations whose id is in `first` are preferred. The result is in the order of ids.
    """
    salt, most = space.recipe.mix.salt, space.recipe.retrain.probe_conversations
    ranked = sorted(conversations, key=lambda one: (one.id not in first, unit("probe", salt, one.id), one.id))
    return sorted(ranked[:most], key=lambda one: one.id)


def answer_probe(space: Workspace, conversations: Sequence[Conversation]) -> Stage:
    """Capture the target's answers to a probe at the scored sampling settings; the next probe replaces its folder."""
    recipe, target = space.recipe, space.target
    # 1) The same conversations, settings and target: the answers of the last look are used again.
    inputs = [
        [(one.id, one.cluster, one.asked_elsewhere) for one in conversations],
        recipe.capture.identity(),
        [sampling.model_dump() for sampling in recipe.score.sampling],
        [target.fingerprint, str(target.dtype)],
    ]
    if space.asks_proven_alone:
        inputs.append("proven prompts alone")
    stage = stage_address(space, "probe", inputs)
    # 2) One probe is kept. A dry run has links to the real ones, which are not its own to remove.
    for earlier in space.root.glob("probe-*"):
        if earlier != stage.folder and not earlier.is_symlink():
            shutil.rmtree(earlier)
    # 3) All of them are held out, whatever split the mix gave them: no draft learns from a probe.
    held_out = [one.model_copy(update={"split": HOLDOUT_SPLIT}) for one in conversations]
    drop_damaged(stage.folder)  # of a killed run; few and small
    capture_conversations(target, held_out, recipe.capture, recipe.score.sampling, stage.folder)
    return stage


def probe_counts(space: Workspace, version: Version, folder: Path, captured: Stage) -> pa.Table:
    """Counts of a registered version, replayed on captured answers with the K or tree it was promoted with.

    Only the counts that the speed-up is computed from. `folder`: the version's files.
    """
    settings = space.recipe.score.model_copy(update={"decode_conversations": 0, "max_conversations": 0})
    scorer = Scorer(space.with_recipe(space.recipe.model_copy(update={"score": settings})), captured, HOLDOUT_SPLIT)
    draft, step = scorer.load(folder), version.lineage.step
    table, _ = scorer.counts([_drafting(scorer, draft)], Identity("champion", step))
    return serving(table, settings)


def _drafting(scorer: Scorer, draft: StoredDraft) -> ProposerSpec:
    """Spec of the tree or of the chains that a version was registered with."""
    plan = draft.plan
    if plan.tree is not None:
        return scorer.tree_spec(draft, plan.tree_name, plan.tree)
    return ProposerSpec(draft.proposer, (plan.draft_tokens,))


def judge(space: Workspace) -> Staleness:
    """Judge whether the champion of the recipe's target is stale: by target, files and traffic.

    The caller holds the work folder's lock: mixes and answers may be made.
    """
    # 1) A champion of this very target: does it meet the gate, and has its traffic changed?
    now = champion(space.tracking, space.target_fingerprint)
    missing = None if now is None else missing_file(space.tracking, now)
    if now is not None and missing is None:
        return Staleness(now, (*_gate(space, now), *_traffic(space, now)))
    # 2) None that can serve: a draft is due. What is the newest champion of any target worth here?
    causes = []
    if now is not None:
        text = f"champion {now.reference}: its files are gone ({missing}): this target needs a draft again"
        causes.append(Cause("files", "stale", text, {"missing": str(missing)}))
    old = latest_champion(space.tracking)
    if old is None:
        text = "no champion of any target yet: distilling from the recipe's start"
        return Staleness(None, (*causes, Cause("first", "stale", text, {})))
    if old.lineage.target_fingerprint != space.target_fingerprint:
        then, here = (fingerprint.short(one) for one in (old.lineage.target_fingerprint, space.target_fingerprint))
        why = what_changed(old.lineage, space.target_files, space.target_settings.context)
        text = f"target changed: {old.reference} drafts for another one ({then}, now {here}): {why}"
        causes.append(Cause("target", "stale", text, {"then": then, "now": here}))
    return Staleness(old, (*causes, *_new_target(space, old)))


def _gate(space: Workspace, now: Version) -> list[Cause]:
    """Examine whether the champion meets today's gate, by the figures of its last decision; nothing where it does."""
    last = last_decision(space.tracking, now)
    found = None if last is None else last.numbers.evidence
    decision = None if found is None else decide_alone(found, space.recipe.gate)
    if found is None or decision is None or decision.promote:
        return []
    speedup, least = found.candidate.speedup, space.recipe.gate.min_speedup
    numbers = {"speedup": speedup.value, "low": speedup.low, "clusters": found.clusters, "min_speedup": least}
    return [Cause("gate", "stale", f"{now.reference} {UNMET}: {'; '.join(decision.reasons)}", numbers)]


def what_changed(then: Lineage, now: Mapping[str, str], context: int | None) -> str:
    """Say which files of a target (`now`, stated context) changed since a version was promoted for another."""
    if not now:
        return "its files are gone"
    if not then.target_files:
        # Promoted by an older version, which recorded no files: does all that it looked at still hold?
        since, held = covered_since(now), then.target_fingerprint == fingerprint_of(now, context, earlier=True)
        if held:
            return f"an older version did not look at {', '.join(since)}; all else is as it was"
        return "which file changed is unknown, as an older version promoted it"
    names = sorted(then.target_files.keys() | now.keys())
    changed = [name for name in names if then.target_files.get(name) != fingerprint.short(now.get(name, ""))]
    return f"{', '.join(changed)} changed" if changed else "its stated context changed"


def inherit_mix(space: Workspace, stale: Version) -> None:
    """Keep what the champion was trained on out of the holdout, where the recipe makes another mix than its own."""
    theirs = stale.lineage.mix_fingerprint
    if _unchanged(space, stale):
        return
    # The champion's mix knows its train split; without it, the nearest ancestor's mix is better than none.
    if space.folder("mix", theirs).is_dir():
        space.inherit(theirs)
        return
    say(
        f"{stale.reference}: its mix {fingerprint.short(theirs)} is not in {space.root}: what it was trained on, "
        "or its near-copies, may be held out"
    )
    before = (one.lineage.mix_fingerprint for one in ancestors(space.tracking, stale))
    nearest = next((mix for mix in before if space.folder("mix", mix).is_dir()), None)
    if nearest is not None:  # it carries on what the ones before it held
        space.inherit(nearest)


def _unchanged(space: Workspace, version: Version) -> bool:
    """Whether the recipe makes the mix that this version was trained on, apart from rehearsed old conversations."""
    theirs, own = version.lineage.mix_fingerprint, Stages(space).mix.fingerprint
    folder = space.folder("mix", theirs)
    return own == theirs or (folder.is_dir() and base_of(folder) == own)


def _new_target(space: Workspace, old: Version) -> list[Cause]:
    """Examine how far tau of a champion falls on the recipe's target, for which it was not trained."""
    # 1) A mix for this target.
    _check_before_mix(space, old)
    with in_stage("mix"):
        inherit_mix(space, old)
        mix = load_mix(mix_stage(Stages(space)).folder)
    # 2) What keeps the old draft from being measured here at all: the verdict is unknown.
    with in_stage("probe"):
        try:
            folder = resolve_models_uri(space.tracking, old.uri, space.root / "models", afresh=True)
        except LostFilesError as error:
            text = f"{old.reference}: its files are gone or damaged ({error})"
            return [Cause("files", "unknown", text, {"missing": str(error)})]
        if read_meta(folder).tokenizer_digest != space.target.tokenizer_digest:
            text = f"{old.reference}: drafts with another tokenizer; it cannot serve the new target"
            return [Cause("acceptance", "unknown", text, {})]
        # 3) The same holdout conversations as at its promotion where there are any, for a paired comparison.
        before = _kept(space, old)
        known = [] if before is None else values(before, "conversation")
        held_out = [one for one in mix if one.split == HOLDOUT_SPLIT]
        captured = answer_probe(space, sample(space, held_out, known))
        try:
            now = probe_counts(space, old, folder, captured)
        # Damaged answers are repaired elsewhere; shapes that do not fit the new target are a finding.
        except CorruptDataError:
            raise
        except (RuntimeError, ValueError) as error:
            text = f"{old.reference}: cannot draft for the new target ({str(error).splitlines()[0]})"
            return [Cause("acceptance", "unknown", text, {})]
        return [_fall(space, old, before, now, "on the new target")]


def _traffic(space: Workspace, now: Version) -> list[Cause]:
    """Examine how traffic changed since the champion was trained: drift of the mix, and tau on new conversations."""
    # 1) The same mix: the same traffic, and nothing to answer.
    with in_stage("mix"):
        if _unchanged(space, now):
            return []
        _check_before_mix(space, now)
        inherit_mix(space, now)
        stage = mix_stage(Stages(space))
        mix, theirs = load_mix(stage.folder), _mix_of(space, now)
        known = set() if theirs is None else {one.id for one in load_mix(theirs.folder)}
    # 2) Another mix: how far its shares moved, and how the champion does on what is new in it.
    with in_stage("probe"):
        return [_drift(space, now, theirs, mix), _recent(space, now, mix, known)]


def _check_before_mix(space: Workspace, old: Version) -> None:
    """Check what the stages of a retraining need; of drafts that may start from the champion only `distill` can."""
    warm = space.recipe.retrain.warm_start
    drafts = {name for name, draft in space.drafts.items() if not (warm and draft.draft_family == old.lineage.family)}
    check_stages(Stages(space), drafts)


def _mix_of(space: Workspace, version: Version) -> Stage | None:
    """Mix that a version was trained on; None where its folder is gone."""
    folder = space.folder("mix", version.lineage.mix_fingerprint)
    return Stage(folder, version.lineage.mix_fingerprint) if folder.is_dir() else None


def _drift(space: Workspace, now: Version, theirs: Stage | None, mix: Sequence[Conversation]) -> Cause:
    """Compare the mix with the champion's, as that was before old conversations were blended in."""
    if theirs is None:
        text = f"{now.reference}: its mix is not in {space.root}: nothing to see a drift against"
        return Cause("drift", "unknown", text, {})
    # Rehearsed conversations are no traffic: they would count as drift.
    base = base_of(theirs.folder)
    folder = theirs.folder if base is None or not space.folder("mix", base).is_dir() else space.folder("mix", base)
    settings = space.recipe.retrain
    drift = mix_drift(load_mix(folder), mix, space.recipe.capture.sampling, settings.drift_margin)
    # The verdict in words, with both sides of the comparison.
    verdict = drift.verdict(settings.drift_margin, settings.confidence)
    words = {
        "stale": "the mix drifted",
        "held": "the mix is as it was",
        "unknown": "cannot tell whether the mix drifted",
    }
    text = (
        f"{words[verdict]}: {drift.distance:.1%} of it moved, allowed is {settings.drift_margin:.1%} "
        f"(p = {drift.p_value:.3g}; {drift.conversations_before} conversations then, {drift.conversations_now} now; "
        f"most: {drift.moved})"
    )
    return Cause("drift", verdict, text, drift._asdict() | {"margin": settings.drift_margin})


def _recent(space: Workspace, now: Version, mix: Sequence[Conversation], known: set[str]) -> Cause:
    """Compare the champion's tau on conversations that it has never seen with its tau on the holdout."""
    fresh = new_conversations(space, now, mix, known)
    if not fresh:
        return Cause("acceptance", "held", "no new conversations to measure acceptance on", {"conversations": 0})
    # Both sides of the comparison: counts of the promotion, and of a probe.
    before = _kept(space, now)
    if before is None:
        text = f"{now.reference}: was promoted without its counts being kept: nothing to see a fall against"
        return Cause("acceptance", "unknown", text, {})
    captured = answer_probe(space, sample(space, fresh))
    folder = resolve_models_uri(space.tracking, now.uri, space.root / "models")
    return _fall(space, now, before, probe_counts(space, now, folder, captured), "on recent traffic")


def _kept(space: Workspace, version: Version) -> pa.Table | None:
    """Holdout counts of a version's promotion, those that the speed-up is computed from; None: none were kept."""
    kept = kept_counts(space.tracking, version)
    return None if kept is None else serving(kept, space.recipe.score)


def _fall(space: Workspace, version: Version, before: pa.Table | None, now: pa.Table, where: str) -> Cause:
    """Cause "acceptance": the change of tau from counts `before` (None: unknown) to `now`, with its verdict."""
    settings = space.recipe.retrain
    change = tau_change(now.slice(0, 0) if before is None else before, now, settings.confidence)
    conversations = len(values(now, "conversation"))
    numbers = {**change._asdict(), "conversations": conversations, "margin": settings.acceptance_margin}
    verdict = change.verdict(settings.acceptance_margin)
    return Cause("acceptance", verdict, _describe(version, change, verdict, conversations, where), numbers)


def _describe(version: Version, change: Change, verdict: str, conversations: int, where: str) -> str:
    """Line such as `tiny/1: tau fell on recent traffic: 1.90, was 2.40 (-20.8%, between … and …; 9 conversations)`."""
    verb = {"stale": "fell", "held": "held"}.get(verdict)
    finding = f"tau {verb} {where}" if verb else f"cannot tell whether tau fell {where}"
    was = "unknown" if math.isnan(change.before) else f"{change.before:.2f}"
    numbers = f"{change.now:.2f}, was {was}"
    if not math.isnan(change.upper):
        numbers += f" ({change.ratio - 1:+.1%}, between {change.lower - 1:+.1%} and {change.upper - 1:+.1%}"
        return f"{version.reference}: {finding}: {numbers}; {conversations} conversations)"
    # Without bounds: nothing to compare with, or too few clusters on one side.
    fewest = min(change.clusters_before, change.clusters_now)
    why = f"; {too_few_clusters(fewest)}" if 0 < fewest < FEWEST_CLUSTERS else ""
    return f"{version.reference}: {finding}: {numbers} ({conversations} conversations{why})"
