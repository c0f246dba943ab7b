"""`draftforge export`: a draft is copied or converted to another format; what was written is read back and scored.

With `--policy` the folder also holds K by batch size for an engine's scheduler, from counts on the selection split and
times over the batch sizes of `score.load`.
"""

import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from .. import fingerprint
from ..data.store import Sample
from ..errors import FormatError, InputError, TrackingError
from ..eval.leaderboard import config_rows
from ..eval.score import Identity, stratified_conversations
from ..eval.serving_load import Candidate, LoadTimes, serving_policy
from ..eval.settings import HOLDOUT_SPLIT, SELECTION_SPLIT
from ..eval.summary import policy_summary
from ..eval.target_pass_cache import replay_samples
from ..masking import masked
from ..progress import say
from ..recipe import Recipe
from ..registry.champion_alias import judged_figures, last_decision
from ..registry.connect import Tracking
from ..registry.gate import Evidence, times_text
from ..registry.lineage import Version
from ..registry.settings import RegistrySettings
from ..registry.store_address import resolve_uri, store_exists
from ..registry.versions import champion, is_models_uri, registered_draft, resolve_models_uri
from ..specdec.drafts.eagle3 import Eagle3Draft
from ..specdec.formats import (
    Format,
    Verifier,
    check_family,
    convert_draft,
    known_format,
    needs_verifier,
    read_draft,
    read_meta,
)
from ..specdec.formats.layer_skip import is_skip_file
from ..specdec.formats.layouts import NATIVE, layout_of
from ..specdec.model_card import DraftFacts, card_files, facts_of, write_card
from ..specdec.replay.replay import Counted
from ..specdec.serve_commands import ServeCommand, lookup_command, plain_command, serve_command
from ..specdec.serving_plan import PLAN_FILE, FoundPlan, ServingPlan, find_plan, holds_plan
from ..specdec.serving_policy import PolicyEngine, ServingPolicy, check_policy, known_policy_engine
from ..storage import lies_inside, new_folder
from .draft_scorer import Scorer
from .generate import find_draft, require_champion
from .stages import Stage, captured_stages
from .workspace import Workspace, require_whole

_CHECKED_CONVERSATIONS = 4


def export(
    recipe: Recipe,
    out: Path,
    draft: str | None,
    layout: str | None,
    target_id: str | None,
    policy_engine: str | None = None,
) -> None:
    """Copy a draft to `out`, or write it in the format `layout`; score what was written.

    `draft` None: the champion. `target_id`: hub id of the target, for formats that name it. `policy_engine`: also write
    K by batch size as this engine's scheduler reads it.
    """
    # 1) What can be refused before the target is loaded.
    chosen = None if layout is None else known_format(layout)
    engine = None if policy_engine is None else known_policy_engine(policy_engine)
    if engine is not None and recipe.score.load is None:
        raise InputError(f"--policy {engine}: needs score.load: its batch sizes are those that times are measured at")
    require_whole(recipe, "an export")
    require_champion(recipe, draft)
    space = Workspace(recipe)
    folder = find_draft(space, draft)
    if is_skip_file(folder):
        raise InputError(f"--draft {folder}: names layers of the target; it has no weights to export")
    # 2) A policy goes with one format. A format may not take the family, or may want to name the target.
    facts, found = facts_of(folder, Path(recipe.target.model).name), find_plan(folder)
    if engine is not None:
        needed = check_policy(engine, facts.family, chosen)
        chosen = chosen if layout_of(folder) == needed else needed
    verifier = None
    if chosen is not None:
        check_family(chosen, read_meta(folder).family)
        verifier = verifier_of(space, target_id) if needs_verifier(chosen) else None
    # 3) Write it and compare; beside it goes how it is served.
    captured = captured_stages(space).captured
    policy = None if engine is None else _policy(space, captured, folder, engine, draft or "")
    scorer = Scorer(space, captured, HOLDOUT_SPLIT)
    if draft is None:
        version = champion(space.tracking, space.target_fingerprint)
    else:
        version = _registered_as(space, folder)
    if version is not None:
        facts = version_facts(space.tracking, version)
        found = FoundPlan(version.lineage.plan) if found.assumed and version.lineage.plan else found
    command: list[ServeCommand] = []

    def add_card(beside: Path) -> None:
        layout = chosen or layout_of(folder)
        place, target = str(out.absolute()), space.target_settings
        command.append(write_card(beside, place, layout, found, facts, target, policy=policy))

    export_draft(scorer, folder, out, add_card, chosen, verifier, space.target.tokenizer)
    known = "" if version is None else f", which is registered as {version.reference}"
    say(f"{out}: exported from {folder}{known}, read back and scored equal")
    if found.assumed:
        say(f"{folder}: {found.assumed}")
    if policy is None and (before := found.plan.policy):
        say(f"{folder / before}: a policy is not carried over; --policy writes one")
    show_command(command[0])


def _policy(space: Workspace, captured: Stage, folder: Path, engine: PolicyEngine, name: str) -> ServingPolicy:
    """Policy of a draft, and a sentence on it: chains of every K of the recipe, counted on the selection split."""
    # 1) Times are those of the score where it had the same ways of drafting.
    settings, scorer = space.recipe.score, Scorer(space, captured, SELECTION_SPLIT)
    draft, identity = scorer.load(folder), Identity(folder.name, 0)
    times = scorer.times(draft, scorer.specs(draft, name))
    assert isinstance(times, LoadTimes)  # the recipe states a load
    # 2) Counts of every K; nothing is decoded to check them, as scoring did.
    table, _ = scorer.counts([scorer.chain_spec(draft)], identity, checked=())
    rows = config_rows([table], {identity: times}, settings)[identity]
    candidates = [Candidate(one.config, one.tau, one.drafted, one.drafted_share) for one in rows]
    # 3) The policy, and what it rests on.
    module = draft.module
    layers = tuple(layer - 1 for layer in module.config.aux_layers) if isinstance(module, Eagle3Draft) else ()
    policy = serving_policy(engine, times, candidates, settings.tie_share, layers)
    say(policy_summary(policy, times, candidates))
    load, rules = times.load, settings.sampled_rules
    if load.engine != engine and not all(sampling.greedy for sampling in settings.sampling):
        say(f"acceptance above temperature 0 is that of score.load.engine {load.engine}, by its rule {rules[0]}")
    return policy


def _registered_as(space: Workspace, folder: Path) -> Version | None:
    """Version of the recipe's target with the files of a draft's folder: the champion, else the newest; None: none has.

    A registry that does not answer is said, and none: a checkpoint is exported all the same.
    """
    if not folder.is_dir() or not store_exists(space.recipe.registry, space.root):
        return None
    beside = {PLAN_FILE, *card_files(folder)}
    files = {name: digest for name, digest in fingerprint.file_digests(folder).items() if name not in beside}
    try:
        return registered_draft(space.tracking, space.target_fingerprint, files)
    except TrackingError as error:
        say(f"{folder}: whether it is registered is not known, so its card has no figures of the holdout: {error}")
        return None


def version_facts(tracking: Tracking, version: Version) -> DraftFacts:
    """Facts of a registered version for its model card, with its figures on the holdout and the last decision."""
    lineage, (tau, speedup) = version.lineage, judged_figures(tracking, version)
    last = last_decision(tracking, version)
    judged = None if last is None else last.numbers.evidence
    domains = {} if judged is None else {name: row.model_dump() for name, row in judged.candidate_domains.items()}
    return DraftFacts(
        family=lineage.family,
        target=lineage.target_name,
        target_fingerprint=lineage.target_fingerprint,
        version=version.reference,
        step=lineage.step,
        tau=tau,
        speedup=speedup,
        speedup_interval=None if judged is None else judged.candidate.speedup.ends,
        decision="" if last is None else last.outcome,
        measured=lineage.measured,
        domains=domains,
    )


def show_command(command: ServeCommand) -> None:
    """Print the command that serves a draft: the command alone to standard output."""
    say(f"to serve it with {command.engine}:")
    print(command.text)
    for note in command.notes:
        say(note)


def show_serving(space: Workspace, evidence: Evidence | None) -> None:
    """Print the command that serves the target's champion from this machine's copy of it.

    Without a champion: prompt lookup where the gate's `evidence` of the holdout shows that it pays, else no draft.
    """
    load = space.recipe.score.load
    engine = "vllm" if load is None else load.engine
    target, now = space.target_settings, champion(space.tracking, space.target_fingerprint)
    # 1) The champion, whose copy was checked when it was measured.
    if now is not None:
        folder = resolve_models_uri(space.tracking, now.uri, space.root / "models")
        say(f"{now.reference} is the champion: {find_plan(folder).plan}")
        show_command(serve_command(NATIVE, now.lineage.family, find_plan(folder).plan, str(folder), target))
        layout = {"sglang": "sglang", "llama.cpp": "gguf"}.get(engine, "FORMAT")
        command = fetch_command(space, "OUT", space.target_fingerprint, ["--format", layout])
        say(f"for another engine or machine: {command}")
        return
    # 2) What is best without one.
    if evidence is not None and evidence.lookup is not None and evidence.lookup_pays:
        lookup = evidence.lookup
        found = f"{times_text(lookup.speedup)} at K = {lookup.draft_tokens} on the holdout"
        say(f"no draft serves this target; prompt lookup beats plain decoding, {found}")
        show_command(lookup_command(engine, lookup.draft_tokens, target))
    else:
        say("no draft serves this target yet; without one")
        show_command(plain_command(engine, target))


def fetch_command(space: Workspace, out: str, target_fingerprint: str, options: Sequence[str] = ()) -> str:
    """Command that copies a draft of this target out of the recipe's registry, on any machine that reaches it."""
    target, settings = space.recipe.target, space.recipe.registry
    # A model's own path, which some formats read, says no more than the files: what is set beside it is in the
    # fingerprint alone.
    beside = (target.adapter, target.gguf_file, target.revision, target.context, target.trust_remote_code or None)
    bare = all(one is None for one in beside) and not is_models_uri(target.model)
    model = space.target_settings.model if bare else target_fingerprint
    words = ["draftforge", "fetch", out, "--target", model]
    words += ["--tracking-uri", masked(resolve_uri(settings, space.root))]
    words += [] if settings.model == RegistrySettings().model else ["--model", settings.model]
    return shlex.join([*words, *options])


def say_assumed(folder: Path) -> None:
    """Say what is assumed of a draft's folder without a plan."""
    if assumed := find_plan(folder).assumed:
        say(f"{folder}: {assumed}")


def export_draft(
    scorer: Scorer,
    folder: Path,
    out: Path,
    add: Callable[[Path], None] | None = None,
    layout: Format | None = None,
    verifier: Verifier | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Copy a draft (without its trainer's state) to `out`, which must not exist or be empty.

    `add`: write into the folder what is to stand beside the draft.
    `layout`: write it in this format instead; `verifier` and `tokenizer`, the target's, are for those that hold them.
    What was written is loaded again and must give the same counts on recorded answers. Raises FormatError otherwise,
    and leaves nothing behind.
    """
    # 1) An empty place, and something that can be copied.
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out}: exists and is not empty; name a new folder")
    if layout is None and not folder.is_dir():
        raise InputError(f"--draft {folder}: is a file: name the format to write it in, --format")
    if layout is None and (away := next((one for one in folder.iterdir() if not lies_inside(folder, one)), None)):
        raise InputError(f"--draft {folder}: {away.name}: is a link out of the folder, or no file; put a copy there")
    # 2) Write beside `out`; the folder gets its name only once it is seen to score the same.
    with new_folder(out) as beside:
        if layout is not None:
            convert_draft(folder, beside, layout, verifier, tokenizer)
        else:
            # A card of ours is written anew: another folder has another command.
            ours = card_files(folder)
            for path in sorted(path for path in folder.iterdir() if path.is_file() and path.name not in ours):
                shutil.copyfile(path, beside / path.name)
        if add is not None:
            add(beside)
        if not same_counts(scorer, folder, beside):
            raise FormatError(f"{out}: the exported draft does not score as the checkpoint {folder} does")


def rewrite_draft(
    folder: Path,
    out: Path,
    layout: Format,
    verifier: Verifier | None,
    tokenizer: PreTrainedTokenizerBase | None,
    add: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Write a draft in another format where no answers are at hand to score it on. `out` must not exist or be empty.

    `add`: write into the folder what is to stand beside the draft. What was written is read again and must hold the
    same weights, to the bit. Raises FormatError otherwise, and leaves nothing behind.
    """
    with new_folder(out) as beside:
        convert_draft(folder, beside, layout, verifier, tokenizer)
        add(beside)
        if not _same_weights(folder, beside):
            raise FormatError(f"{out}: the {layout} draft does not read back as the one that is stored")


def _same_weights(one: Path, other: Path) -> bool:
    """Whether two draft folders hold the same tensors, bit for bit."""
    first, second = (read_draft(place).state_dict() for place in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def verifier_of(space: Workspace, target_id: str | None) -> Verifier:
    """Verifier of a format that names its target: the given hub id, else the recipe's model where that is one."""
    name = space.recipe.target.model if target_id is None else target_id
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
        raise InputError(f"--target-id {name}: must be the target's hub id (owner/name), which the format names")
    model = space.target.model
    return Verifier(name, list(model.config.architectures or [type(model).__name__]))


def is_copy(out: Path, folder: Path, plan: ServingPlan) -> bool:
    """Whether `out` holds exactly the files that `export_draft` copies from `folder`, and this plan."""
    one, other = (
        {path.name: fingerprint.of_file(path) for path in place.glob("*") if path.is_file() and path.name != PLAN_FILE}
        for place in (folder, out)
    )
    return one == other and holds_plan(out, plan)


def same_counts(scorer: Scorer, one: Path, other: Path) -> bool:
    """Whether two draft folders give equal replay counts on a few recorded answers."""
    chosen = stratified_conversations(scorer.samples, _CHECKED_CONVERSATIONS)
    samples = [sample for sample in scorer.samples if sample.conversation in chosen]
    return _counts(scorer, one, samples) == _counts(scorer, other, samples)


def _counts(scorer: Scorer, folder: Path, samples: Sequence[Sample]) -> list[list[Counted]]:
    """Replay counts of each sample, in order, with the draft's chains, under every rule that has a replay."""
    proposer, settings = scorer.load(folder).proposer(), scorer.settings
    counted = dict(replay_samples(proposer, scorer.traces, samples, settings.draft_tokens, settings))
    return [counted[index] for index in range(len(samples))]
