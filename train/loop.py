"""Training of one draft, top to bottom: resolve, model, optimizer, data, loop.

The loop's order never changes: evaluate, save, stop test, one step, log. Its state is `LoopState`, and lies beside the
weights of every checkpoint; a run that was killed at any moment goes on with the same losses.
"""

import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from .. import fingerprint
from ..data.batches import Batch, BatchPlan, OptimizerStep, collate
from ..data.store import Capture, Sample
from ..distributed import process_group
from ..distributed.process_group import Ranks
from ..errors import RecipeError, TrainingDivergedError
from ..progress import say
from ..specdec.formats.checkpoint import DraftMeta, read_meta, save_draft
from ..specdec.targets import Target
from ..storage import require_free_space
from . import checkpoints
from .checkpoints import LoopState, claim
from .engine import Engine, NonFiniteGradientError, TorchEngine
from .families import build, check_taught
from .families.base import Family
from .families.initial_draft import INIT, prepare
from .losses.linear_head import AGREE, ALPHA, COUNT, LOSS
from .losses.schedule import describe as describe_objective
from .losses.schedule import phase_at
from .memory_estimate import Footprint, forget_peak, longest, memory_named, peak
from .optimizers import forget, learning_rate, make_optimizer
from .settings import Settings
from .stopping import BestCheckpoints, StopRequest, TrainingStoppedError, best, on_sigterm, stalled
from .throughput import MetricLog, MetricSink, Pace, describe, extend_digest, smooth

T = TypeVar("T")
U = TypeVar("U")


def ahead(items: Iterator[T], work: Callable[[T], U]) -> Generator[tuple[T, U], None, None]:
    """Each item with the result of its work, which a thread did while the item before was used.

    `items` never ends. An error of the work is raised where its item is due.
    """
    with ThreadPoolExecutor(1, "batches") as pool:

        def begin() -> tuple[T, U]:
            item = next(items)
            return item, work(item)

        pending = pool.submit(begin)
        while True:
            ready = pending.result()
            pending = pool.submit(begin)
            yield ready


def wants_deepspeed(settings: Settings) -> bool:
    """Resolve `engine`. Raises RecipeError where the ranks launched do not fit it."""
    world = process_group.world_size()
    if settings.engine == "torch" and world > 1:
        raise RecipeError(
            f"draft.engine torch: runs in one process, but {world} were launched; set draft.engine=deepspeed"
        )
    if settings.engine == "auto":
        return world > 1 or torch.cuda.is_available()
    return settings.engine == "deepspeed"


def make_engine(
    settings: Settings, family: Family, optimizer: torch.optim.Optimizer, ranks: Ranks, use_deepspeed: bool
) -> Engine:
    """The engine that fits this machine."""
    if not use_deepspeed:
        return TorchEngine(family, optimizer, settings.clip_norm)
    from .engine_deepspeed import DeepSpeedEngine

    return DeepSpeedEngine(settings, family, optimizer, ranks)


LoadTarget = Callable[[], Target]
Scorer = Callable[[Path, int], dict[str, float]]
"""(draft folder, step) -> its figures, tau, tau_low and tau_high among them; rank 0 runs it while the others wait."""
METRICS_FILE, SCORES_FILE = "metrics.jsonl", "scores.jsonl"


def train(
    settings: Settings,
    seed: int,
    capture: Capture,
    folder: Path,
    load_target: LoadTarget,
    sink: MetricSink,
    scorer: Scorer | None = None,
) -> list[Path]:
    """Train one draft in `folder`, from the start or from where it was left. Returns the kept checkpoints' folders.

    Raises TrainingDivergedError before an update that is not finite, TrainingStoppedError after SIGTERM,
    DeviceMemoryError or DiskFullError for what will not fit, LostRankError where another rank is gone.
    """
    use_deepspeed = wants_deepspeed(settings)
    check_taught(settings, capture.bare)
    with process_group.join(use_deepspeed) as ranks, on_sigterm() as stop, ExitStack() as inside:
        if ranks.first:
            claim(folder, settings, seed, capture)
            checkpoints.delete_old(folder)
            prepare(settings, seed, capture, folder, load_target)
        ranks.after_first()

        forget_peak(ranks.device)
        torch.manual_seed(_seed("family", seed))  # the same on every rank

        def running_target() -> Target:
            return inside.enter_context(load_target().running())

        family = build(settings, folder / INIT, running_target, capture, ranks.device).to(ranks.device)
        step = checkpoints.newest(folder)
        restored = checkpoints.restore(folder, step) if step is not None else None
        if restored is not None:
            load_weights(family, restored.weights)
        state = restored.state if restored is not None else LoopState()
        footprint = Footprint.of(family)  # before an engine shards it

        optimizer = make_optimizer(family, settings)
        engine = make_engine(settings, family, optimizer, ranks, use_deepspeed)
        samples = capture.samples("train")
        plan = BatchPlan(
            samples,
            settings.tokens_per_step,
            seed,
            ranks.world_size,
            ranks.rank,
            settings.accumulation,
            settings.row_tokens,
        )
        check_teacher(family, capture, samples, ranks)
        describe(settings, family, plan, len(samples), ranks, engine.name)
        run = Trainer(
            settings, folder, capture, family, engine, plan, samples, ranks, sink, scorer, stop, state, footprint
        )
        if not run.finished:
            if ranks.first:
                require_free_space(folder, footprint.rest(settings, state.step))
            run.rehearse()
            forget(optimizer)
        if restored is not None and restored.moments:
            engine.load_moments(restored.moments, state.step)
        torch.manual_seed(_seed("train", seed, ranks.rank))
        if restored is not None:
            checkpoints.restore_rng(restored.rng, ranks)
        if family.needs_signals and capture.truncated:
            say("the capture kept no draws from the tails: what lies beyond its top k is left out of the objective")
        if state.step:
            say(f"going on after step {state.step}")
        return run.loop()


class Trainer:
    """The loop and what it needs."""

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        capture: Capture,
        family: Family,
        engine: Engine,
        plan: BatchPlan,
        samples: list[Sample],
        ranks: Ranks,
        sink: MetricSink,
        scorer: Scorer | None,
        stop: StopRequest,
        state: LoopState,
        footprint: Footprint,
    ) -> None:
        self.settings, self.folder, self.capture = settings, folder, capture
        self.family, self.engine, self.plan, self.samples = family, engine, plan, samples
        self.ranks, self.sink, self.scorer, self.stop, self.state = ranks, sink, scorer, stop, state
        self.footprint = footprint
        self.metrics, self.scores = MetricLog(folder / METRICS_FILE), MetricLog(folder / SCORES_FILE)
        self.begun_at = state.step
        if ranks.first:
            self.metrics.truncate(state.step)
            self.scores.truncate(state.step)

    def loop(self) -> list[Path]:
        """Train to the last step. Returns the folders of the kept checkpoints."""
        settings, state = self.settings, self.state
        pace = Pace(settings.steps, state.step)
        saved = state.step  # a resumed step was evaluated and saved before
        with closing(ahead(self.plan.steps(state.position), self.batches)) as steps:
            while True:
                due = state.step > saved
                if due and self.is_scored(state.step):
                    self.evaluate()
                asked = self.anyone_asked()
                if due and (self.is_scored(state.step) or self.is_saved(state.step) or asked):
                    self.save()
                if self.finished:
                    break
                if asked:
                    raise TrainingStoppedError(
                        f"stopped by SIGTERM after step {state.step}; the same command goes on from there"
                    )
                pace.begin()
                step, batches = next(steps)  # to wait for them is part of the step's time
                values = self.one_step(step, batches)
                seconds = pace.end(state.step, step.supervised)
                speed = {"tokens_per_second": step.supervised / seconds, "positions_per_second": step.tokens / seconds}
                self.log({**values, "seconds": seconds, **speed, **peak(self.ranks.device)})
                pace.show(state.step, state.smoothed_loss)
        return [checkpoints.step_folder(self.folder, step) for step in state.scored]

    @property
    def finished(self) -> bool:
        """Whether no step is left to do."""
        return self.state.step >= self.settings.steps or self.state.stopped

    def is_scored(self, step: int) -> bool:
        """Whether this step's draft is scored and kept."""
        return step == self.settings.steps or bool(self.settings.score_every and step % self.settings.score_every == 0)

    def is_saved(self, step: int) -> bool:
        """Whether this step is one to resume from."""
        return bool(self.settings.save_every and step % self.settings.save_every == 0)

    def rehearse(self) -> None:
        """A step at rate 0 on the longest samples, as late as one trains most: what does not fit into memory fails now.

        Weights stay as they are; moments are to be forgotten, and random numbers seeded, afterwards.
        """
        step = longest(self.plan, self.samples, self.state.position[0])
        self.family.step = self.settings.steps - 1
        try:
            for phase in self.settings.phases:
                self.family.aim(self.settings.objective_at((phase.until or self.settings.steps) - 1))
                self.reduce(self.accumulate(step, self.batches(step)), step)
                self.update(step, rate=0.0)
        except TrainingDivergedError as error:
            raise TrainingDivergedError(f"before {error}") from None

    def one_step(self, step: OptimizerStep, batches: list[Batch]) -> dict[str, float]:
        """Forward, backward and update on one global batch. Advances the state only when all of it is done."""
        settings, state = self.settings, self.state
        phase = self.enter_phase()
        self.family.step, self.family.epoch = state.step, state.position[0]
        loss, values = self.reduce(self.accumulate(step, batches), step)
        rate = learning_rate(
            state.step, settings.steps, settings.warmup_steps, settings.learning_rate, settings.final_rate_share
        )
        norm = self.update(step, rate)
        state.smoothed_loss = smooth(state.smoothed_loss, loss, state.step)
        state.step += 1
        state.position = list(step.after)
        state.loss_digest = extend_digest(state.loss_digest, state.step, loss)
        state.supervised_tokens += step.supervised
        return {"loss": loss, **values, **phase, "gradient_norm": norm, "learning_rate": rate}

    def enter_phase(self) -> dict[str, float]:
        """Set the objective of the coming step; its phase's number, where there are several."""
        settings, step = self.settings, self.state.step
        objective = settings.objective_at(step)
        if objective != self.family.loss_settings.objective or step == self.begun_at:
            say(f"from step {step + 1} on: objective {describe_objective(objective)}")
        self.family.aim(objective)
        phases = settings.phases
        return {"phase": float(phase_at(phases, step) + 1)} if len(phases) > 1 else {}

    def accumulate(self, step: OptimizerStep, batches: list[Batch]) -> Tensor:
        """Forward and backward of this rank's micro-batches; their sums, [A, S, 4]."""
        scale = 1.0 / max(1, step.supervised)
        sums_AS4 = []
        with memory_named(self.settings, self.ranks.rank):
            for number, (indexes, batch) in enumerate(zip(step.micro_batches, batches, strict=True), start=1):
                inputs = self.family.inputs(batch.to(self.ranks.device), indexes)
                sums_AS4.append(self.engine.accumulate(inputs, scale, last=number == len(step.micro_batches)))
        return torch.stack(sums_AS4)

    def update(self, step: OptimizerStep, rate: float) -> float:
        """One step of the optimizer; the gradient's norm."""
        try:
            with memory_named(self.settings, self.ranks.rank):
                return self.engine.step(rate)
        except NonFiniteGradientError as error:
            alone = self.ranks.world_size == 1  # a gradient is a sum over ranks: any of them may have spoilt it
            raise TrainingDivergedError(
                self.name_nonfinite_parameter(step, str(error), self.ranks.rank if alone else None)
            ) from None

    def batches(self, step: OptimizerStep) -> list[Batch]:
        """This rank's micro-batches as tensors on the CPU."""
        found = []
        for indexes in step.micro_batches:
            chosen = [self.samples[index] for index in indexes]
            signals = [self.capture.signals(sample) for sample in chosen] if self.family.needs_signals else None
            found.append(collate(chosen, signals, self.settings.row_tokens))
        return found

    def reduce(self, sums_AS4: Tensor, step: OptimizerStep) -> tuple[float, dict[str, float]]:
        """Mean loss and figures over all ranks. Raises TrainingDivergedError on every rank if one is not finite."""
        broken_A = ~sums_AS4.isfinite().flatten(1).all(-1)
        broken_R = torch.zeros(self.ranks.world_size, device=sums_AS4.device)
        broken_R[self.ranks.rank] = broken_A.any().float()
        sums_S4 = sums_AS4.sum(0)
        everything = self.ranks.sum(torch.cat([sums_S4.flatten(), broken_R]).double())
        broken = everything[sums_S4.numel() :].nonzero()[:, 0].tolist()
        if broken:
            raise TrainingDivergedError(
                self.name_nonfinite_parameter(step, "the loss is not finite", broken[0], broken_A.tolist())
            )
        sums = everything[: sums_S4.numel()].view_as(sums_S4).tolist()
        values, extra = {}, self.family.extra
        beside = 0.0 if extra is None else sums.pop()[LOSS]
        loss = sum(weight * row[LOSS] for weight, row in zip(self.family.step_weights, sums, strict=True))
        if extra is not None:
            loss = extra.total(loss, beside)
            values[extra.name] = beside / max(1, step.supervised)
        for number, row in enumerate(sums, start=1):
            values[f"alpha_{number}"] = row[ALPHA] / max(1.0, row[COUNT])
            values[f"agree_{number}"] = row[AGREE] / max(1.0, row[COUNT])
        return loss / max(1, step.supervised), values

    def name_nonfinite_parameter(
        self, step: OptimizerStep, what: str, rank: int | None, broken: list[bool] | None = None
    ) -> str:
        """Step, rank (None: any) and samples behind a number that is not finite; where known, of its micro-batches."""
        indexes = step.samples
        if rank == self.ranks.rank:
            flags = broken or [True] * len(step.micro_batches)
            indexes = [index for flag, part in zip(flags, step.micro_batches) if flag for index in part]
        names = ", ".join(self.samples[index].id for index in indexes)
        where = "all ranks" if rank is None else f"rank {rank}"
        return f"step {self.state.step + 1}, {where}: {what}; nothing was updated; samples {names}"

    def evaluate(self) -> None:
        """Let the scorer score the draft as it would be saved, and decide whether training on pays."""
        if self.scorer is None:
            return
        state, figures_3 = self.state, torch.zeros(3, dtype=torch.float64, device=self.ranks.device)
        with checkpoints.extra_files(self.folder) as place:
            with self.engine.whole():
                if self.ranks.first:
                    save_draft(self.family.export(), place, self.meta(), self.folder / INIT)
            if self.ranks.first:
                values = self.scorer(place, state.step)
                self.scores.log(state.step, values)
                self.sink.log(state.step, values)
                figures_3 += torch.tensor(
                    [values[name] for name in ("tau", "tau_low", "tau_high")], dtype=torch.float64
                )
        self.ranks.after_first()
        state.standings.append(BestCheckpoints(state.step, *self.ranks.sum(figures_3).tolist()))
        if self.settings.patience is not None and stalled(state.standings, self.settings.patience):
            state.stopped = True
            say(f"stopping early: tau has not risen for {self.settings.patience} scored steps")

    def save(self) -> None:
        """Write a checkpoint; older ones lose what they no longer need."""
        if self.is_scored(self.state.step):
            self.state.scored = self.kept()
        weights, moments, rng = self.engine.weights(), self.engine.moments(), checkpoints.rng_state(self.ranks)
        with self.engine.whole():
            if self.ranks.first:
                require_free_space(self.folder, self.footprint.checkpoint)
                checkpoints.save(
                    self.folder,
                    self.family.export(),
                    self.meta(),
                    self.folder / INIT,
                    self.state,
                    weights,
                    moments,
                    rng,
                    self.family.complete,
                )
        self.ranks.after_first()

    def kept(self) -> list[int]:
        """Scored steps whose drafts stay, this one among them."""
        known = [*self.state.scored, self.state.step]
        if self.settings.keep_best is None:
            return known
        standings = [one for one in self.state.standings if one.step in known]
        chosen, judged = best(standings, self.settings.keep_best), {one.step for one in standings}
        return [step for step in known if step in chosen or step not in judged or step == self.state.step]

    def meta(self) -> DraftMeta:
        """Lineage of the draft at this step."""
        return read_meta(self.folder / INIT).model_copy(update={"step": self.state.step})

    def log(self, values: dict[str, float]) -> None:
        """One line in metrics.jsonl, with the time of day (seconds since 1970), and the values to the sink."""
        if self.ranks.first:
            self.metrics.log(self.state.step, values | {"time": time.time()})
            self.sink.log(self.state.step, values)

    def anyone_asked(self) -> bool:
        """Whether any rank was told to stop: then all of them save together."""
        if self.ranks.world_size == 1:
            return self.stop.asked
        asked = torch.tensor([float(self.stop.asked)], device=self.ranks.device)
        return bool(self.ranks.sum(asked).item() > 0)


@torch.no_grad()
def load_weights(family: Family, weights: dict[str, Tensor]) -> None:
    """Put saved weights into the family, before any engine shards it."""
    for name, parameter in family.trainable().items():
        parameter.copy_(weights[name])


def check_teacher(family: Family, capture: Capture, samples: list[Sample], ranks: Ranks) -> None:
    """Compare a live teacher with the stored signals of one sample, once, before anything is trained.

    Every rank does: a pass of a spread target is one of all of them.
    """
    if family.needs_signals:
        return
    if capture.bare:
        say("the capture keeps no signals: the target is not compared with them")
        return
    family.check_teacher(collate(samples[:1], [capture.signals(samples[0])]).to(ranks.device))


def _seed(*parts: object) -> int:
    return int(fingerprint.of_json(list(parts))[:15], 16)
