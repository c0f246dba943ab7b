"""The stages up to a score, each a folder named by the fingerprint of its settings and inputs.

Same fingerprint: the folder is used as it is. With several ranks, all answer and train; what only one can do the first
does, and the others wait for the finished folder.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import fingerprint, storage
from ..data.capture.capture import capture
from ..data.capture.manifest import Part, content_digest, is_captured, join
from ..data.capture.reuse import answers_digest
from ..data.mix import MANIFEST as MIX_MANIFEST
from ..data.mix import build_mix, load_mix
from ..data.prompts import prompts_of
from ..data.replay_mix import blend, to_add
from ..data.settings import TargetSource
from ..data.sources import input_digests
from ..data.store import MANIFEST as CAPTURE_MANIFEST
from ..data.store import Capture
from ..errors import DraftforgeError, MissingFileError
from ..eval.settings import SELECTION_SPLIT
from ..eval.training_eval import SampledScore
from ..progress import say
from ..specdec.formats import META_FILE
from ..specdec.formats.checkpoint import OWN_TARGET
from ..specdec.targets import place
from ..train.checkpoints import claim, is_finished, list_steps, step_folder
from ..train.families import check_taught, family_of
from ..train.families.initial_draft import INIT, prepare
from ..train.loop import train
from ..train.settings import Settings
from ..train.throughput import MetricSink
from .workspace import Workspace


@dataclass(frozen=True)
class Stage:
    """A finished stage."""

    folder: Path
    fingerprint: str


def mix_stage(space: Workspace) -> Stage:
    """Conversations to answer. What an ancestor's mix placed in train or selection never enters this holdout."""
    stage, settings = mix_place(space), space.recipe.mix

    def work() -> None:
        ask = prompts_of(space.target, space.recipe.capture.batch_size) if _asks_target(space) else None
        earlier = [space.folder("mix", ancestor) for ancestor in space.ancestors]
        build_mix(settings, space.recipe.base_dir, stage.folder, ask, earlier)

    _once(space, stage.folder, (stage.folder / MIX_MANIFEST).is_file, work, "mix")
    return stage


def mix_place(space: Workspace) -> Stage:
    """Where the recipe's mix lies, or will."""
    settings = space.recipe.mix
    inputs: list[Any] = [
        settings.model_dump(
            mode="json", exclude={"sources": {"__all__": {"path", "name"}}, "ancestors": True, "contamination": True}
        ),
        input_digests(settings, space.recipe.base_dir),
        sorted(fingerprint.of_file(space.recipe.base_dir / path / MIX_MANIFEST) for path in settings.ancestors),
        space.ancestors,
    ]
    if _asks_target(space):
        inputs.append(space.target_fingerprint)
    return _stage(space, "mix", inputs)


def blended_stage(space: Workspace, mix: Stage, old: str) -> Stage:
    """The mix with `retrain.old_share` of its training conversations from the mix `old`: the same stage where it has
    them, or where that mix is gone."""
    share, place = space.recipe.retrain.old_share, space.folder("mix", old)
    if not share or mix.fingerprint == old or not place.is_dir():
        return mix
    added = to_add(mix.folder, place, share, space.recipe.mix.salt)
    if not added:
        return mix
    stage = _stage(space, "mix", [mix.fingerprint, old, added])

    def work() -> None:
        blend(mix.folder, place, added, {"of": mix.fingerprint, "old": old}, stage.folder)
        say(f"mix: {len(added)} conversations of an earlier one added")

    _once(space, stage.folder, (stage.folder / MIX_MANIFEST).is_file, work, "mix with old conversations")
    return stage


def _asks_target(space: Workspace) -> bool:
    return any(isinstance(source, TargetSource) for source in space.recipe.mix.sources)


def capture_stage(space: Workspace, mix: Stage, part: Part | None = None) -> Stage:
    """The target's answers and signals. `part`: no more than that part of them, in a folder of its own.

    A capture that a budget ended is known by its content from here on.
    """
    stage, recipe = capture_place(space, mix), space.recipe
    if part is not None:
        stage = Stage(stage.folder.with_name(stage.folder.name + part.suffix), stage.fingerprint)

    def work() -> None:
        if space.first_rank:
            for name, settings in space.drafts.items():  # hours before the training would find it out
                _check_start(space, name, settings)
        capture(space.target, mix.folder, recipe.capture, recipe.score.sampling, stage.folder, part, space.crew)

    def done() -> bool:
        return is_captured(stage.folder, recipe.capture.budget)

    _once(space, stage.folder, done, work, "capture", together=True)
    content = content_digest(storage.read_object(stage.folder / CAPTURE_MANIFEST))
    return stage if content is None else Stage(stage.folder, fingerprint.of_json([stage.fingerprint, content]))


def join_stage(space: Workspace, mix: Stage, parts: Sequence[Path]) -> Stage:
    """The capture of the parts that several machines made."""
    stage, recipe = capture_place(space, mix), space.recipe
    dtype = place(recipe.target.device, recipe.target.dtype)[1]
    conversations, scored = load_mix(mix.folder), recipe.score.sampling
    join(parts, space.target_fingerprint, str(dtype), conversations, recipe.capture, scored, stage.folder)
    return stage


def capture_place(space: Workspace, mix: Stage) -> Stage:
    """Where the recipe's capture lies, or will."""
    recipe = space.recipe
    inputs = [
        mix.fingerprint,
        recipe.capture.identity(),
        [sampling.model_dump() for sampling in recipe.score.sampling],
        space.target_fingerprint,
        str(place(recipe.target.device, recipe.target.dtype)[1]),
    ]
    if recipe.capture.answers is not None:
        inputs.append(answers_digest(recipe.capture.answers))
    return _stage(space, "capture", inputs)


def prepare_drafts(space: Workspace, captured: Stage) -> None:
    """Make the initial drafts while the target is at hand, for those that train without it."""
    for name, settings in space.drafts.items():
        stage = trained(space, name, captured)
        needs_target = family_of(settings).needs_target(settings)
        if space.first_rank and not needs_target and not (stage.folder / INIT).is_dir():
            data = Capture.open(captured.folder, verify=False)
            _check_start(space, name, settings)
            with _naming(name):
                claim(stage.folder, settings, space.recipe.seed, data)
                prepare(settings, space.recipe.seed, data, stage.folder, lambda: space.target)


def train_stage(space: Workspace, name: str, captured: Stage, sink: MetricSink) -> Stage:
    """Checkpoints of one draft. Every rank takes part."""
    settings = space.drafts[name]
    stage = trained(space, name, captured)
    if is_finished(stage.folder, settings.steps):
        say(f"train {name}: done ({stage.folder.name})")
        return stage
    data = Capture.open(captured.folder, verify=space.first_rank)
    if space.first_rank and not (stage.folder / INIT).is_dir():
        _check_start(space, name, settings)
    with _naming(name), space.crew.together(stage.folder.name):
        scorer = _scorer(space, settings, data)
        train(settings, space.recipe.seed, data, stage.folder, lambda: space.target, sink, scorer)
    if space.first_rank and family_of(settings).changes_target(settings):
        draft = step_folder(stage.folder, list_steps(stage.folder)[-1])
        say(f"drafts.{name}: its training changed the target: serve {draft / OWN_TARGET} with the draft {draft}")
    gc.collect()  # an engine's cycles hold the optimizer; scoring should not find the card full
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return stage


def _scorer(space: Workspace, settings: Settings, data: Capture) -> SampledScore | None:
    """What scores this draft while it is trained, if anything does."""
    if not settings.score_conversations:
        return None
    samples, K = data.samples(SELECTION_SPLIT), settings.draft_tokens
    return SampledScore(lambda: space.target, samples, space.recipe.score, K, settings.score_conversations)


def checkpoints_of(stage: Stage) -> dict[int, Path]:
    """Draft folders of a training by step."""
    return {step: step_folder(stage.folder, step) for step in list_steps(stage.folder)}


def trained(space: Workspace, name: str, captured: Stage) -> Stage:
    """Where the training of a draft lies, or will."""
    settings = space.drafts[name]
    inputs = [captured.fingerprint, settings.identity(), space.recipe.seed, _start(settings, f"drafts.{name}")]
    return _stage(space, f"train-{name}", inputs)


def _check_start(space: Workspace, name: str, settings: Settings) -> None:
    """Whether a fresh draft can be made of the target, or the one to start from is there, and taught by what the
    capture keeps."""
    with _naming(name):
        check_taught(settings, not space.recipe.capture.top_k)
        if settings.init_from is None:
            family_of(settings).check(settings, lambda: space.target)
        else:
            _start(settings, f"drafts.{name}")


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """The training knows one draft, `draft`; people know it by its name in the recipe."""
    try:
        yield
    except DraftforgeError as error:
        field, dot, rest = str(error).partition(".")
        if not (field == "draft" and dot):
            raise
        raise type(error)(f"drafts.{name}.{rest}") from error


def _start(settings: Settings, where: str) -> str | None:
    """Content of the draft that training starts from."""
    if settings.init_from is None:
        return None
    if not settings.init_from.is_dir():
        raise MissingFileError(f"{where}.init_from: {settings.init_from}: no such draft folder")
    if not (settings.init_from / META_FILE).is_file():
        raise MissingFileError(f"{where}.init_from {settings.init_from}: no draft folder (no {META_FILE})")
    names = [path.name for path in settings.init_from.glob("*.safetensors")]
    return fingerprint.of_files(settings.init_from, [*names, "config.json"])


def _stage(space: Workspace, name: str, inputs: list[Any]) -> Stage:
    found = fingerprint.of_json([name, inputs])
    return Stage(space.folder(name, found), found)


def _once(
    space: Workspace,
    folder: Path,
    done: Callable[[], bool],
    work: Callable[[], None],
    name: str,
    together: bool = False,
) -> None:
    """Run `work` on the first rank unless it is `done`; other ranks wait for it, and before that work `together`."""
    if done():
        say(f"{name}: done ({folder.name})")
        return
    started = time.monotonic()
    if space.first_rank or together:
        work()
    if space.first_rank:
        space.crew.made(folder.name)
        say(f"{name}: {time.monotonic() - started:.0f} s ({folder.name})")
    else:
        space.crew.wait(done, folder.name)
