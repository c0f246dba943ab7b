"""Mix, capture and training: each writes a folder that is named by the fingerprint of its settings and inputs.

Same fingerprint: the folder is used as it is. With several ranks, all of them capture and train. Work that only one
process can do is done by the first rank, and the others wait for the finished folder.
"""

import gc
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import fingerprint, storage
from ..data.backends.base import check_backend
from ..data.capture.capture import capture, check_spread
from ..data.capture.manifest import Part, content_digest, finished_records, is_captured, join
from ..data.capture.plan import plan_shards
from ..data.capture.reuse import ReusableAnswers, answers_digest
from ..data.chat_template import require_chat_template
from ..data.conversation import as_served
from ..data.mix import FORMAT as MIX_FORMAT
from ..data.mix import MANIFEST as MIX_MANIFEST
from ..data.mix import READING, build_mix, check_unanswered, load_manifest, load_mix, summary
from ..data.prompts import prompts_of
from ..data.rehearsal import blend, conversations_to_add
from ..data.settings import ReadLimits, TargetSource
from ..data.sources import check_kinds, input_digests
from ..data.store import MANIFEST as CAPTURE_MANIFEST
from ..data.store import Capture, read_manifest
from ..errors import DraftforgeError, InputError, MissingFileError, named
from ..eval.held_loss import held_loss, loss_change, loss_words
from ..eval.settings import SELECTION_SPLIT
from ..eval.training_eval import SampledScore
from ..progress import say
from ..registry.lineage import Version
from ..specdec.drafts import DraftModule
from ..specdec.formats import META_FILE, read_meta
from ..specdec.formats.checkpoint import HELD_LOSS, OWN_TARGET
from ..specdec.proposers.tree_settings import MergedTree
from ..specdec.target_settings import TemplateLimits
from ..specdec.targets import Target, resolve_device, sampling_defaults
from ..train.checkpoints import claim, is_finished, list_steps, newest, step_folder
from ..train.families import check_teacher_signals, family_of
from ..train.families.initial_draft import INIT, load_start, store_initial_draft
from ..train.loop import check_engine, train
from ..train.memory_estimate import DiskFootprint
from ..train.settings import Settings
from ..train.throughput import MetricSink
from .estimates import Work, conditions_of, estimated
from .workspace import Workspace

_LEAST_FREE_BYTES = 100_000_000  # for a mix, notes and a small draft; what a stage writes is estimated as it starts


@dataclass(frozen=True)
class Stage:
    """Address of a stage: its folder, which exists once the stage has run, and its fingerprint."""

    folder: Path
    fingerprint: str


class Stages:
    """Addresses of the stages of one run, each computed at its first use and then kept.

    Fingerprints form a chain: that of a stage is the hash of its own settings and of the fingerprints of what it reads.
    """

    def __init__(self, space: Workspace, mix: Stage | None = None) -> None:
        """`mix`: a finished mix that is used instead of the recipe's own."""
        self.space, self.recipe, self.given_mix = space, space.recipe, mix
        self._captured: Stage | None = None
        self._trainings: dict[str, Stage] = {}

    @cached_property
    def mix(self) -> Stage:
        """Mix: conversations, split into train, selection and holdout."""
        if self.given_mix is not None:
            return self.given_mix
        settings, base = self.recipe.mix, self.recipe.base_dir
        check_kinds(settings.sources, base)  # before all of it is hashed and read
        # Where files lie does not count, only what they hold; nor does what the recipe lets pass, which is checked each
        # time.
        excluded: Any = {
            "sources": {"__all__": {"path", "name"}},
            **dict.fromkeys(("ancestors", "contamination", "may_be_unanswered"), True),
        }
        if settings.read_limits == ReadLimits():  # other ones may leave lines out
            excluded["read_limits"] = True
        inputs: list[Any] = [
            MIX_FORMAT,
            READING,
            settings.model_dump(mode="json", exclude=excluded),
            input_digests(settings, base),
            sorted(fingerprint.of_file(base / path / MIX_MANIFEST) for path in settings.ancestors),
            self.space.ancestors,
        ]
        # Prompts that the target writes change with it.
        if self.asks_target:
            inputs.append(self.space.target_fingerprint)
        return stage_address(self.space, "mix", inputs)

    @cached_property
    def capture(self) -> Stage:
        """Capture: the target's answers to the mix, and the signals that drafts learn from."""
        recipe = self.recipe
        # The dtype is an input too: bfloat16 and float32 answers differ.
        inputs = [
            self.mix.fingerprint,
            recipe.capture.identity(),
            [sampling.model_dump() for sampling in recipe.score.sampling],
            self.space.target_fingerprint,
            str(resolve_device(recipe.target.device, recipe.target.dtype)[1]),
        ]
        if recipe.target.template_limits != TemplateLimits():  # others may leave conversations out
            inputs.append(recipe.target.template_limits.model_dump())
        if recipe.capture.answers is not None:
            with named("capture.answers"):
                inputs.append(answers_digest(recipe.capture.answers))
        if self.space.asks_proven_alone:
            inputs.append("proven prompts alone")  # captures before that rule asked all
        return stage_address(self.space, "capture", inputs)

    @property
    def captured(self) -> Stage:
        """Capture as an input of later stages. One that a budget ended is known by its content, once that is there."""
        if self._captured is None:
            manifest = self.capture.folder / CAPTURE_MANIFEST
            if not manifest.is_file():
                return self.capture
            # Settings do not tell where a time budget ended it: the content joins the fingerprint.
            content = content_digest(read_manifest(self.capture.folder))
            known = self.capture.fingerprint
            name = known if content is None else fingerprint.of_json([known, content])
            self._captured = Stage(self.capture.folder, name)
        return self._captured

    def training(self, name: str) -> Stage:
        """Training of the recipe's draft of that name. Raises MissingFileError where its initial draft is gone."""
        if name not in self._trainings:
            self._trainings[name] = training_address(self.space, self.captured, name)
        return self._trainings[name]

    def score(self, drafts: Mapping[str, str]) -> Stage:
        """Score of drafts: counts and figures. `drafts`: by name, digests of what is scored (trainings, or files)."""
        # Settings of cost and speed change no counts, and so leave them valid.
        settings, neutral = self.recipe.score, {"costs", "load", "batch_size", "replay_tokens"}
        kept = settings.model_dump(mode="json", exclude=neutral)
        inputs = [self.captured.fingerprint, dict(drafts), kept, settings.sampled_rules]
        # Other drafts that merged trees put beside these.
        if others := {name: self.training(name).fingerprint for name in settings.drafts_beside(drafts)}:
            inputs.append(others)
        return stage_address(self.space, "score", inputs)

    @property
    def run_fingerprint(self) -> str:
        """Fingerprint of recipe, mix and target, by which a later call finds the MLflow run to resume."""
        return fingerprint.of_json([self.recipe.resolved(), self.mix.fingerprint, self.space.target_fingerprint])

    @property
    def asks_target(self) -> bool:
        """Whether the target itself makes prompts of the mix."""
        return any(isinstance(source, TargetSource) for source in self.recipe.mix.sources)

    def capture_is_new(self) -> None:
        """Forget addresses that follow from an earlier content of the capture."""
        self._captured = None
        self._trainings.clear()


def stage_address(space: Workspace, name: str, inputs: Sequence[Any]) -> Stage:
    """Address of a stage, by its name and what it depends on."""
    found = fingerprint.of_json([name, inputs])
    return Stage(space.folder(name, found), found)


def training_address(space: Workspace, captured: Stage, name: str) -> Stage:
    """Address of the training of a draft on that capture. Raises MissingFileError where its initial draft is gone."""
    settings = space.drafts[name]
    inputs = [captured.fingerprint, settings.identity(), space.recipe.seed, _start_digest(settings, f"drafts.{name}")]
    return stage_address(space, f"train-{name}", inputs)


def captured_stages(space: Workspace) -> Stages:
    """The recipe's mix and its capture, made where they are missing."""
    stages = Stages(space)
    mix_stage(stages)
    capture_stage(stages)
    return stages


def mix_stage(stages: Stages) -> Stage:
    """Make the mix. Conversations that an ancestor's mix placed in train or selection never enter its holdout."""
    space, stage = stages.space, stages.mix
    if stages.given_mix is not None:
        return stage

    def work() -> None:
        ask = prompts_of(space.target, stages.recipe.capture.batch_size) if stages.asks_target else None
        earlier = [space.folder("mix", ancestor) for ancestor in space.ancestors]
        build_mix(stages.recipe.mix, stages.recipe.base_dir, stage.folder, ask, earlier)

    _once(space, stage.folder, (stage.folder / MIX_MANIFEST).is_file, work, "mix")
    manifest = load_manifest(stage.folder)
    check_unanswered(manifest, stages.recipe.mix)
    say(f"mix: {summary(manifest)}")
    return stage


def blended_mix(stages: Stages, old: str) -> Stage:
    """Rehearsal mix: the mix with `retrain.old_share` of its training conversations taken from the mix `old`.

    The mix itself where it has them already, or where `old` is gone.
    """
    space, mix = stages.space, stages.mix
    # 1) Nothing to add: no share asked for, the same mix, or no folder left of the old one.
    share, earlier = space.recipe.retrain.old_share, space.folder("mix", old)
    if not share or mix.fingerprint == old or not earlier.is_dir():
        return mix
    added = conversations_to_add(mix.folder, earlier, share, space.recipe.mix.salt)
    if not added:
        return mix
    # 2) The blend is a mix of its own, named by what was added.
    stage = stage_address(space, "mix", [mix.fingerprint, old, added])

    def work() -> None:
        blend(mix.folder, earlier, added, {"of": mix.fingerprint, "old": old}, stage.folder)
        say(f"mix: {len(added)} conversations of an earlier one added")

    _once(space, stage.folder, (stage.folder / MIX_MANIFEST).is_file, work, "mix with old conversations")
    return stage


def check_capture(stages: Stages) -> None:
    """Check, before the mix is built, what a capture needs beside it: device, disk, target, engine, given answers.

    Raises what the stage itself would raise. Where the capture is on disk, only device and disk are looked at.
    """
    space, recipe, settings = stages.space, stages.recipe, stages.recipe.capture
    # 1) The machine.
    resolve_device(recipe.target.device, recipe.target.dtype)
    storage.require_free_space(space.root, _LEAST_FREE_BYTES, "free some, or choose another workdir")
    if is_captured(stages.capture.folder, settings.budget):
        return
    # 2) The target, which the stages would load next. A sharded one only teaches: an engine, or recorded answers,
    #    must answer in its stead.
    if recipe.target.shard:
        check_spread(settings)
    target = space.target
    require_chat_template(target.tokenizer)
    # 3) Who answers in its stead.
    if space.first_rank:
        check_backend(target, settings, recipe.score.sampling)
        if settings.answers is not None:
            ReusableAnswers(settings.answers, target.fingerprint, target.vocab_size)


def check_training(stages: Stages, names: Collection[str], begun_only: bool = False) -> None:
    """Check, before the mix is built, what the training of these drafts needs beside answers: engine, start, target,
    and disk, unless another machine trains what is `begun_only` here.

    Raises what the stage itself would raise, about `drafts.NAME`. A training that is finished needs nothing.
    """
    # 1) Each training by itself.
    space, kept, written = stages.space, 0, [0]
    for name in names:
        settings, folder = space.drafts[name], stages.training(name).folder
        if is_finished(folder, settings.steps):
            continue
        with _naming(name):
            check_engine(settings)
            check_teacher_signals(settings, not space.recipe.capture.top_k)
            if not space.first_rank or (folder / INIT).is_dir():
                continue
            footprint = _check_start(stages, settings)
        if footprint is not None and not begun_only:
            written.append(footprint.checkpoint)
            kept += footprint.draft + footprint.bytes_to_write(settings, 0) - footprint.checkpoint
    _check_merged(stages, names)
    # 2) The disk for what all of them keep, and for the checkpoint that one of them writes.
    advice = f"all trainings together ({', '.join(names)}); free some, raise score_every or lower keep_best"
    storage.require_free_space(space.root, kept + max(written), advice)


def capture_stage(stages: Stages, part: Part | None = None) -> Stage:
    """Capture the target's answers and signals. `part`: only that part of them, in a folder of its own."""
    space, recipe, folder = stages.space, stages.recipe, stages.capture.folder
    if part is not None:
        folder = folder.with_name(folder.name + part.suffix)

    def work() -> None:
        mix, scored, allowed = stages.mix.folder, recipe.score.sampling, recipe.mix.may_be_unanswered
        with estimated(space, "capture", lambda: _answers_to_come(stages, folder, part), folder) as reached:
            capture(space.target, mix, recipe.capture, scored, folder, part, space.ranks, allowed, reached)

    _once(space, folder, lambda: is_captured(folder, recipe.capture.budget), work, "capture", every_rank=True)
    if part is not None:
        return Stage(folder, stages.capture.fingerprint)
    stages.capture_is_new()
    return stages.captured


def _answers_to_come(stages: Stages, folder: Path, part: Part | None) -> Work:
    """Work of a capture: the answers that its folder lacks."""
    recipe, target, settings = stages.recipe, stages.space.target, stages.recipe.capture
    shards = plan_shards(load_mix(stages.mix.folder), settings, recipe.score.sampling)
    if part is not None:
        shards = part.shards(shards)
    done = finished_records(folder, shards, content=False)
    left = sum(len(shard.answers) for shard in shards if shard.name not in done)
    asked = [recipe.target.model, str(target.dtype), settings.model_dump(mode="json")]
    return Work(left, "answers", conditions_of(stages.space, target.device, *asked))


def join_stage(stages: Stages, parts: Sequence[Path]) -> None:
    """Join the parts of a capture that several machines made."""
    recipe = stages.recipe
    dtype = resolve_device(recipe.target.device, recipe.target.dtype)[1]
    conversations = as_served(load_mix(stages.mix.folder), sampling_defaults(recipe.target))
    found = stages.space.target_fingerprint
    join(parts, found, str(dtype), conversations, recipe.capture, recipe.score.sampling, stages.capture.folder)


def prepare_drafts(stages: Stages) -> None:
    """Make initial drafts while the target is loaded, for families that train without it."""
    space = stages.space
    for name, settings in space.drafts.items():
        folder = stages.training(name).folder
        needs_target = family_of(settings).needs_target(settings)
        if space.first_rank and not needs_target and not (folder / INIT).is_dir():
            data = Capture.open(stages.captured.folder, verify=False)
            with _naming(name):
                claim(folder, settings, space.recipe.seed, data)
                store_initial_draft(settings, space.recipe.seed, data, folder, lambda: space.target)


def train_stage(stages: Stages, name: str, sink: MetricSink) -> Stage:
    """Train one draft, or resume its training, to its last step. Every rank takes part."""
    space, stage = stages.space, stages.training(name)
    settings = space.drafts[name]
    # 1) Done already? The first rank decides for all of them.
    if space.ranks.broadcast(f"{stage.folder.name}: whether it is done", is_finished(stage.folder, settings.steps)):
        say(f"train {name}: done ({stage.folder.name})")
        _note_changed_targets(stages, name)
        return stage
    # 2) Read the answers, whose digests one rank verifies, and train.
    data = Capture.open(stages.captured.folder, verify=space.first_rank)
    with _naming(name):
        scorer, begun = _training_scorer(space, settings, data), newest(stage.folder) or 0
        work = partial(_steps_to_come, space, settings, begun)
        with estimated(space, f"train {name}", work, stage.folder) as reached:
            watched = _WatchedSink(sink, reached, begun, settings.steps)
            train(settings, space.recipe.seed, data, stage.folder, lambda: space.target, watched, scorer)
    # 3) Give the memory back: an engine's cycles hold the optimizer, and scoring should not find the card full.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    _note_changed_targets(stages, name)
    return stage


def _note_changed_targets(stages: Stages, name: str) -> None:
    """Note beside each checkpoint whose training changed the target what that did to its loss on held answers.

    Says it of the last one, and what must be served together.
    """
    space, stage, settings = stages.space, stages.training(name), stages.space.drafts[name]
    if not (space.first_rank and family_of(settings).changes_target(settings)):
        return
    # 1) The old target once, and each new one that lacks its note.
    metas = {folder: read_meta(folder) for folder in checkpoints_of(stage).values() if (folder / OWN_TARGET).is_dir()}
    if missing := [folder for folder, meta in metas.items() if HELD_LOSS not in meta.extra]:
        score = space.recipe.score
        samples = Capture.open(stages.captured.folder, verify=False).samples(SELECTION_SPLIT)
        before = held_loss(space.target, samples, score.replay_tokens)
        for folder in missing:
            own = space.target_settings.model_copy(
                update={"model": str(folder / OWN_TARGET), "adapter": None, "gguf_file": None, "revision": None}
            )
            after = held_loss(Target.load(own), samples, score.replay_tokens)
            extra = metas[folder].extra | {HELD_LOSS: loss_change(before, after, score.confidence).record()}
            metas[folder] = metas[folder].model_copy(update={"extra": extra})
            storage.write_json(folder / META_FILE, metas[folder].model_dump())
    # 2) In words.
    for draft, meta in list(metas.items())[-1:]:
        say(f"drafts.{name}: its training changed the target: serve {draft / OWN_TARGET} with the draft {draft}")
        say(f"drafts.{name}: the new target: {loss_words(meta.extra[HELD_LOSS])}")


def _steps_to_come(space: Workspace, settings: Settings, begun: int) -> Work:
    """Work of a training: the tokens of its steps after `begun` ones."""
    kept = {name: value for name, value in settings.identity().items() if name not in ("steps", "warmup_steps")}
    how = conditions_of(space, resolve_device("auto", "auto")[0], space.recipe.target.model, kept)
    return Work((settings.steps - begun) * settings.tokens_per_step, "tokens", how)


class _WatchedSink:
    """Sink of a training's figures that also tells which share of its steps, after `begun` ones, is done."""

    def __init__(self, sink: MetricSink, reached: Callable[[float], None], begun: int, steps: int) -> None:
        self._sink, self._reached, self._begun, self._steps = sink, reached, begun, steps

    def log(self, step: int, values: dict[str, float]) -> None:
        self._sink.log(step, values)
        self._reached((step - self._begun) / max(self._steps - self._begun, 1))


def _training_scorer(space: Workspace, settings: Settings, data: Capture) -> SampledScore | None:
    """Scorer that measures this draft's acceptance during its training; None where the recipe asks for none."""
    if not settings.score_conversations:
        return None
    samples, K = data.samples(SELECTION_SPLIT), settings.draft_tokens
    return SampledScore(lambda: space.target, samples, space.recipe.score, K, settings.score_conversations)


class Start(NamedTuple):
    """Start of a retraining: the champion whose weights drafts begin with. It is scored as it is, as step 0."""

    version: Version
    folder: Path
    drafts: tuple[str, ...]
    """Names of the drafts that start from it; it is listed under the first."""

    @property
    def checkpoint(self) -> tuple[str, int]:
        """Name and step that it is listed under."""
        return self.drafts[0], 0


def checkpoints_of(stage: Stage) -> dict[int, Path]:
    """Checkpoints of a training: the draft folder of each saved step."""
    return {step: step_folder(stage.folder, step) for step in list_steps(stage.folder)}


def last_checkpoint(stage: Stage, where: str) -> Path:
    """Draft folder of a training's last checkpoint. Raises InputError, which begins with `where`, if there is none."""
    found = checkpoints_of(stage)
    if not found:
        raise InputError(f"{where}: has no checkpoint yet; run `draftforge train`")
    return found[max(found)]


def _check_start(stages: Stages, settings: Settings) -> DiskFootprint | None:
    """Check that a draft can be made of the target, or that the draft which it starts from fits; what it takes on disk.

    Without the target, as its files are gone, the stage finds out itself what it can do: None.
    """
    space, family, draft = stages.space, family_of(settings), _start_draft(stages, settings)
    if draft is None:
        return None
    family.freeze(draft, settings)
    return DiskFootprint.expected(draft, family.beside(settings, lambda: space.target))


def _start_draft(stages: Stages, settings: Settings) -> DraftModule | None:
    """Draft that a training starts from, with or without its weights; None without the target's files."""
    space, captured = stages.space, stages.captured.folder
    if settings.init_from is not None and (captured / CAPTURE_MANIFEST).is_file():
        return load_start(settings, settings.init_from, Capture.open(captured, verify=False)).draft
    if not space.target_files:
        return None
    if settings.init_from is not None:
        return load_start(settings, settings.init_from, space.target).draft
    draft: DraftModule = family_of(settings).check(settings, lambda: space.target)
    return draft


def _check_merged(stages: Stages, names: Collection[str]) -> None:
    """Raise InputError where a merged tree names drafts, some of these among them, that read unlike target layers."""
    space = stages.space
    for label, tree in space.recipe.score.trees.items():
        merged = tree.names if isinstance(tree, MergedTree) and space.first_rank else []
        drafts = {
            name: _start_draft(stages, space.drafts[name]) for name in merged if not set(names).isdisjoint(merged)
        }
        layers = {
            name: draft.target_layers for name, draft in drafts.items() if draft is not None and draft.target_layers
        }
        if len(set(layers.values())) > 1:
            read = ", ".join(f"{name} {list(which)}" for name, which in layers.items())
            raise InputError(f"score.trees.{label}: its drafts read target layers ({read}): must read the same ones")


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Rename `draft.FIELD` in errors of a training to `drafts.NAME.FIELD`, as the recipe has it."""
    try:
        yield
    except DraftforgeError as error:
        field, dot, rest = str(error).partition(".")
        if not (field == "draft" and dot):
            raise
        raise type(error)(f"drafts.{name}.{rest}") from error


def _start_digest(settings: Settings, where: str) -> str | None:
    """Digest of the draft that training starts from (weights and config); None: fresh weights.

    Raises MissingFileError where the folder or its draft is gone.
    """
    if settings.init_from is None:
        return None
    if not settings.init_from.is_dir():
        raise MissingFileError(f"{where}.init_from: {settings.init_from}: no such draft folder")
    if not (settings.init_from / META_FILE).is_file():
        raise MissingFileError(f"{where}.init_from {settings.init_from}: no draft folder (no {META_FILE})")
    names = [path.name for path in settings.init_from.glob("*.safetensors")]
    return fingerprint.of_files(settings.init_from, [*names, "config.json"])


def _once(
    space: Workspace,
    folder: Path,
    done: Callable[[], bool],
    work: Callable[[], None],
    name: str,
    every_rank: bool = False,
) -> None:
    """Run a stage's `work` on the first rank (or on every one), unless that finds it `done`; all wait for its end."""
    ranks, started = space.ranks, time.monotonic()
    # The first rank decides: on a shared file system, others may see the folder later.
    is_done = ranks.broadcast(f"{folder.name}: whether it is done", done())
    if not is_done:
        if ranks.first or every_rank:
            work()
        ranks.barrier(folder.name)
    say(f"{name}: done ({folder.name})" if is_done else f"{name}: {time.monotonic() - started:.0f} s ({folder.name})")
    # No rank goes on before it sees the result itself.
    ranks.wait_for_file(done, folder.name)
