"""Training of one draft, top to bottom: resolve, data, model, engine, resume, loop.

The loop's order never changes: evaluate, save, stop test, step, log. Its state is `LoopState`, and lies beside the
weights of every checkpoint; a run that was killed at any moment goes on with the same losses.

Shapes: A micro-batches of a rank's step, S steps ahead that are trained (and the extra loss), R ranks.
"""

import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from .. import fingerprint
from ..data.batches import Batch, BatchPlan, OptimizerStep, collate
from ..data.store import Capture, Sample
from ..distributed import Ranks, training_ranks, world_size
from ..errors import RecipeError, TrainingDivergedError
from ..progress import say
from ..specdec.formats.checkpoint import DraftMeta, read_meta, save_draft
from ..specdec.targets import Target
from ..storage import require_free_space
from . import checkpoints
from .checkpoints import LoopState, claim
from .families import build, check_teacher_signals
from .families.base import Family
from .families.initial_draft import INIT, store_initial_draft
from .losses.linear_head import AGREE, ALPHA, COUNT, LOSS
from .losses.schedule import describe as describe_objective
from .losses.schedule import phase_at
from .memory_estimate import DiskFootprint, explain_out_of_memory, longest_step, peak_memory, reset_peak_memory
from .optimizers import learning_rate, make_optimizer, reset_state
from .settings import Settings
from .stopping import CheckpointScore, StopRequest, TrainingStoppedError, best_steps, on_sigterm, stalled
from .throughput import MetricLog, MetricSink, Pace, extend_digest, print_training_plan, smooth
from .training_engine import NO_DEEPSPEED, Engine, NonFiniteGradientError, TorchEngine

T = TypeVar("T")
U = TypeVar("U")
LoadTarget = Callable[[], Target]
Scorer = Callable[[Path, int], dict[str, float]]
"""Scoring of a saved draft: (draft folder, step) -> figures by name, tau, tau_low and tau_high among them. Rank 0 runs
it while the other ranks wait."""
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
    # 1) resolve: the engine, the ranks, whose folder it is, the draft before its first step
    use_deepspeed = wants_deepspeed(settings)
    check_teacher_signals(settings, capture.bare)
    with training_ranks(use_deepspeed) as ranks, on_sigterm() as stop, ExitStack() as running:
        # Only rank 0 writes; the others wait for it at the barrier and then read the same files.
        if ranks.first:
            claim(folder, settings, seed, capture)
            checkpoints.delete_leftovers(folder)
            store_initial_draft(settings, seed, capture, folder, load_target)
        ranks.barrier(f"{folder.name}: the first draft")

        # 2) data: which samples make up each step, dealt out to ranks and micro-batches
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

        # 3) model: the draft as it starts, or as the newest checkpoint has it; the target beside it where it is needed
        reset_peak_memory(ranks.device)
        torch.manual_seed(seed_from("family", seed))  # the same on every rank
        family = build(
            settings, folder / INIT, lambda: running.enter_context(load_target().running()), capture, ranks.device
        ).to(ranks.device)

        # Weights are loaded while the family is whole; moments follow once an engine has sharded it (5).
        step = checkpoints.newest(folder)
        restored = None if step is None else checkpoints.restore(folder, step)
        state = LoopState() if restored is None else restored.state
        if restored is not None:
            checkpoints.check_fits(folder, restored, {name: one.shape for name, one in family.trainable().items()})
            load_weights(family, restored.weights)
        footprint = DiskFootprint.from_family(family)  # before an engine shards it

        # 4) engine: optimizer and sharding; then whatever can fail does so now, before hours of work
        optimizer = make_optimizer(family, settings)
        engine = make_engine(settings, family, optimizer, ranks, use_deepspeed)
        check_teacher(family, capture, samples, ranks)
        print_training_plan(settings, family, footprint, plan, len(samples), ranks, engine.name, state.step)
        trainer = Trainer(
            settings, folder, capture, family, engine, plan, samples, ranks, sink, scorer, stop, state, footprint
        )

        # The largest step and the bytes on disk are tried out; the moments that the dry run left are zeroed.
        if not trainer.finished:
            if ranks.first:
                require_free_space(folder, footprint.bytes_to_write(settings, state.step))
            trainer.memory_dry_run()
            reset_state(optimizer)

        # 5) resume: the optimizer's state and the random numbers of the checkpoint
        if restored is not None and restored.moments:
            engine.load_moments(restored.moments, state.step)
        # Ranks draw different numbers: the seed holds the rank. A checkpoint replaces it by the state it stored.
        torch.manual_seed(seed_from("train", seed, ranks.rank))
        if restored is not None:
            checkpoints.restore_rng(restored.rng, ranks)

        # What a reader of the log must know before the first step.
        if family.needs_signals and capture.truncated:
            say("the capture kept no draws from the tails: what lies beyond its top k is left out of the objective")
        if state.step:
            say(f"going on after step {state.step}")

        # 6) loop
        return trainer.loop()


def figures_on_disk(folder: Path) -> list[dict[str, Any]]:
    """Figures that a training has left in its folder: rows of losses, then of scores, each with its `step`."""
    return [row for name in (METRICS_FILE, SCORES_FILE) for row in MetricLog(folder / name).read()]


def wants_deepspeed(settings: Settings) -> bool:
    """Whether DeepSpeed is the engine, with `auto` resolved. Raises RecipeError for more ranks than it takes."""
    world = world_size()
    if settings.engine == "torch" and world > 1:
        raise RecipeError(
            f"draft.engine torch: runs in one process, but {world} were launched; set draft.engine=deepspeed"
        )
    # auto: plain torch only for one process without CUDA.
    if settings.engine == "auto":
        return world > 1 or torch.cuda.is_available()
    return settings.engine == "deepspeed"


def check_engine(settings: Settings) -> None:
    """Raise RecipeError where this launch cannot train: several ranks in plain torch, or DeepSpeed is not installed."""
    if wants_deepspeed(settings) and find_spec("deepspeed") is None:
        raise RecipeError(NO_DEEPSPEED)


def make_engine(
    settings: Settings, family: Family, optimizer: torch.optim.Optimizer, ranks: Ranks, use_deepspeed: bool
) -> Engine:
    """Engine around a family: plain torch, or DeepSpeed where `use_deepspeed`. Only DeepSpeed's imports deepspeed."""
    if not use_deepspeed:
        return TorchEngine(family, optimizer, settings.clip_norm)
    from .deepspeed_engine import DeepSpeedEngine

    return DeepSpeedEngine(settings, family, optimizer, ranks)


@torch.no_grad()
def load_weights(family: Family, weights: dict[str, Tensor]) -> None:
    """Copy saved weights by name into the family's trainable parameters, before any engine shards it."""
    for name, parameter in family.trainable().items():
        parameter.copy_(weights[name])


def check_teacher(family: Family, capture: Capture, samples: list[Sample], ranks: Ranks) -> None:
    """Compare a live teacher with the stored signals of one sample, once, before anything is trained.

    Every rank does: all of them run the pass of a sharded target together.
    """
    # The stored signals are themselves the teacher: there is nothing to compare them with.
    if family.needs_signals:
        return
    # A bare capture has nothing that the live target could be compared with.
    if capture.bare:
        say("the capture keeps no signals: the target is not compared with them")
        return
    family.check_teacher(collate(samples[:1], [capture.signals(samples[0])]).to(ranks.device))


def seed_from(*parts: object) -> int:
    """Seed of torch's generator, 60 bits of a hash of these values: the same in every process."""
    return int(fingerprint.of_json(list(parts))[:15], 16)


def prefetch(items: Iterator[T], work: Callable[[T], U]) -> Generator[tuple[T, U], None, None]:
    """Prefetch: each item with the result of its work, which a thread did while the item before was used.

    `items` never ends. An error of the work is raised where its item is due.
    """
    with ThreadPoolExecutor(1, "batches") as pool:

        def begin() -> tuple[T, U]:
            item = next(items)
            return item, work(item)

        # One item is in preparation at any time, so memory holds two items at most.
        pending = pool.submit(begin)
        while True:
            ready = pending.result()
            pending = pool.submit(begin)
            yield ready


@dataclass
class Trainer:
    """The training loop of one draft on one rank, with the objects that it drives."""

    settings: Settings
    folder: Path
    capture: Capture
    family: Family
    engine: Engine
    plan: BatchPlan
    samples: list[Sample]
    ranks: Ranks
    sink: MetricSink
    scorer: Scorer | None
    stop: StopRequest
    state: LoopState
    footprint: DiskFootprint
    metrics: MetricLog = field(init=False)
    scores: MetricLog = field(init=False)
    first_step: int = field(init=False)
    """Steps that were done before this process began: these are already evaluated, saved and logged."""

    def __post_init__(self) -> None:
        self.metrics, self.scores = MetricLog(self.folder / METRICS_FILE), MetricLog(self.folder / SCORES_FILE)
        self.first_step = self.state.step
        # Lines past the checkpoint belong to steps that will be done again.
        if self.ranks.first:
            self.metrics.truncate(self.state.step)
            self.scores.truncate(self.state.step)

    def loop(self) -> list[Path]:
        """Train to the last step. Returns the folders of the kept checkpoints."""
        settings, state = self.settings, self.state
        pace = Pace(settings.steps, state.step)
        with closing(prefetch(self.plan.steps(state.position), self.batches)) as steps:
            while True:
                is_new = state.step > self.first_step  # a resumed step was evaluated and saved before

                # 1) evaluate
                if is_new and self.is_scored(state.step):
                    self.evaluate()

                # 2) save, also where any rank was asked to stop
                stop = self.stop_requested()
                if is_new and (self.is_scored(state.step) or self.is_saved(state.step) or stop):
                    self.save()

                # 3) stop test
                if self.finished:
                    break
                if stop:
                    raise TrainingStoppedError(
                        f"stopped by SIGTERM after step {state.step}; the same command goes on from there"
                    )

                # 4) step; to wait for its batches is part of its time
                pace.begin()
                step, batches = next(steps)
                values = self.one_step(step, batches)
                seconds = pace.end(state.step, step.supervised)

                # 5) log
                speed = {"tokens_per_second": step.supervised / seconds, "positions_per_second": step.tokens / seconds}
                self.log({**values, "seconds": seconds, **speed, **peak_memory(self.ranks.device)})
                say(pace.line(state.step, state.smoothed_loss))
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

    def memory_dry_run(self) -> None:
        """A step at rate 0 on the longest samples, as late as one trains most: what does not fit into memory fails now.

        Weights stay as they are; moments are to be forgotten, and random numbers seeded, afterwards.
        """
        # The worst case: the longest samples, and a family's late stage (a Medusa-2 backbone, say), which trains more.
        step = longest_step(self.plan, self.samples, self.state.position)
        self.family.step = self.settings.steps - 1
        try:
            # Each phase once: objectives differ in memory. Rate 0 allocates the moments and leaves the weights alone.
            for phase in self.settings.phases:
                self.family.set_objective(self.settings.objective_at((phase.until or self.settings.steps) - 1))
                self.reduce(self.accumulate(step, self.batches(step)), step)
                self.update(step, rate=0.0)
        except TrainingDivergedError as error:
            raise TrainingDivergedError(f"before {error}") from None

    def one_step(self, step: OptimizerStep, batches: list[Batch]) -> dict[str, float]:
        """Forward, backward and update on one global batch. Returns the step's figures by name."""
        settings, state = self.settings, self.state

        # 1) what is minimised, and how far the training is
        phase = self.enter_phase()
        self.family.step, self.family.epoch = state.step, step.epoch

        # 2) forward and backward of all micro-batches; every rank hears of a loss that is not finite
        loss, values = self.reduce(self.accumulate(step, batches), step)

        # 3) update, unless the gradient is not finite
        rate = learning_rate(
            state.step, settings.steps, settings.warmup_steps, settings.learning_rate, settings.final_rate_share
        )
        norm = self.update(step, rate)

        # 4) the state goes on only when all of that is done
        state.smoothed_loss = smooth(state.smoothed_loss, loss, state.step)
        state.step += 1
        state.position = step.after
        state.loss_digest = extend_digest(state.loss_digest, state.step, loss)
        state.supervised_tokens += step.supervised
        return {"loss": loss, **values, **phase, "gradient_norm": norm, "learning_rate": rate}

    def enter_phase(self) -> dict[str, float]:
        """Set the objective of the coming step. Returns its phase's number, from 1, where there are several."""
        settings, step = self.settings, self.state.step
        objective = settings.objective_at(step)

        # A change is reported; so is the objective with which this process begins.
        if objective != self.family.loss_settings.objective or step == self.first_step:
            say(f"from step {step + 1} on: objective {describe_objective(objective)}")
        self.family.set_objective(objective)
        phases = settings.phases
        return {"phase": float(phase_at(phases, step) + 1)} if len(phases) > 1 else {}

    def accumulate(self, step: OptimizerStep, batches: list[Batch]) -> Tensor:
        """Forward and backward of this rank's micro-batches. Returns their sums [A, S, 4] (columns: see LOSS)."""
        # Every token of the global batch weighs the same: sums are divided by its supervised tokens over all ranks.
        scale = 1.0 / max(1, step.supervised)
        sums_AS4 = []
        with explain_out_of_memory(self.settings, self.ranks.rank):
            # The engine is told of the last micro-batch: its gradients complete those of the step.
            for number, (indexes, batch) in enumerate(zip(step.micro_batches, batches, strict=True), start=1):
                inputs = self.family.inputs(batch.to(self.ranks.device), indexes)
                sums_AS4.append(self.engine.accumulate(inputs, scale, last=number == len(step.micro_batches)))
        return torch.stack(sums_AS4)

    def update(self, step: OptimizerStep, rate: float) -> float:
        """One step of the optimizer. Returns the gradient's norm before clipping; raises TrainingDivergedError."""
        try:
            with explain_out_of_memory(self.settings, self.ranks.rank):
                return self.engine.step(rate)
        except NonFiniteGradientError as error:
            alone = self.ranks.world_size == 1  # a gradient is a sum over ranks: any of them may have spoilt it
            raise TrainingDivergedError(
                self.name_nonfinite_samples(step, str(error), self.ranks.rank if alone else None)
            ) from None

    def batches(self, step: OptimizerStep) -> list[Batch]:
        """This rank's micro-batches as tensors on the CPU."""
        found = []
        for indexes in step.micro_batches:
            chosen = [self.samples[index] for index in indexes]
            # Stored signals are read from disk only where they teach.
            signals = [self.capture.signals(sample) for sample in chosen] if self.family.needs_signals else None
            found.append(collate(chosen, signals, self.settings.row_tokens))
        return found

    def reduce(self, sums_AS4: Tensor, step: OptimizerStep) -> tuple[float, dict[str, float]]:
        """Mean loss and figures over all ranks. Raises TrainingDivergedError on every rank if one is not finite."""
        # 1) one collective for the sums and for who has a number that is not finite
        broken_A = ~sums_AS4.isfinite().flatten(1).all(-1)
        broken_R = torch.zeros(self.ranks.world_size, device=sums_AS4.device)
        broken_R[self.ranks.rank] = broken_A.any().float()
        sums_S4 = sums_AS4.sum(0)
        everything = self.ranks.sum(torch.cat([sums_S4.flatten(), broken_R]).double())
        broken = everything[sums_S4.numel() :].nonzero()[:, 0].tolist()
        if broken:
            raise TrainingDivergedError(
                self.name_nonfinite_samples(step, "the loss is not finite", broken[0], broken_A.tolist())
            )

        # 2) the loss: steps ahead by their weights, and the family's extra loss, whose sum is the last row
        sums = everything[: sums_S4.numel()].view_as(sums_S4).tolist()
        values, extra = {}, self.family.extra_loss
        extra_sum = 0.0 if extra is None else sums.pop()[LOSS]
        loss = sum(weight * row[LOSS] for weight, row in zip(self.family.step_weights, sums, strict=True))
        if extra is not None:
            loss = extra.total(loss, extra_sum)
            values[extra.name] = extra_sum / max(1, step.supervised)

        # 3) acceptance and agreement of each step ahead
        for number, row in enumerate(sums, start=1):
            values[f"alpha_{number}"] = row[ALPHA] / max(1.0, row[COUNT])
            values[f"agree_{number}"] = row[AGREE] / max(1.0, row[COUNT])
        return loss / max(1, step.supervised), values

    def name_nonfinite_samples(
        self, step: OptimizerStep, what: str, rank: int | None, broken: list[bool] | None = None
    ) -> str:
        """The line of an error: step, rank (None: any) and samples behind a number that is not finite.

        `broken`: which of this rank's micro-batches have one, where that is known.
        """
        indexes = step.samples
        # On the rank that has the number, only the micro-batches that are known to have it; elsewhere all of the step.
        if rank == self.ranks.rank:
            flags = broken or [True] * len(step.micro_batches)
            indexes = [index for flag, part in zip(flags, step.micro_batches) if flag for index in part]

        # Sample ids, so that a reader can look the data up.
        names = ", ".join(self.samples[index].id for index in indexes)
        where = "all ranks" if rank is None else f"rank {rank}"
        return f"step {self.state.step + 1}, {where}: {what}; nothing was updated; samples {names}"

    def evaluate(self) -> None:
        """Let the scorer score the draft as it would be saved, and decide whether training on pays."""
        if self.scorer is None:
            return
        state, figures = self.state, list[float]()
        # The draft is saved as it would be served, scored from there, and deleted. All ranks unshard it together.
        with checkpoints.temporary_draft_folder(self.folder) as temporary:
            with self.engine.unsharded():
                # Rank 0 writes the draft while it is whole.
                if self.ranks.first:
                    save_draft(self.family.export(), temporary, self.meta(), self.folder / INIT)
            # Rank 0 scores it, outside `unsharded`: the others need not hold gathered weights meanwhile.
            if self.ranks.first:
                values = self.scorer(temporary, state.step)
                self.scores.log(state.step, values)
                self.sink.log(state.step, values)
                figures = [values[name] for name in ("tau", "tau_low", "tau_high")]

        # Early stopping is decided from the same figures on every rank, so that all of them stop together.
        figures = self.ranks.broadcast(f"{self.folder.name}: the score of step {state.step}", figures)
        state.standings.append(CheckpointScore(state.step, *figures))
        if self.settings.patience is not None and stalled(state.standings, self.settings.patience):
            state.stopped = True
            say(f"stopping early: tau has not risen for {self.settings.patience} scored steps")

    def save(self) -> None:
        """Write a checkpoint; older ones lose what they no longer need."""
        if self.is_scored(self.state.step):
            self.state.scored = self.kept()

        # Collective calls, on every rank: gather weights, moments and random states.
        weights, moments, rng = self.engine.weights(), self.engine.moments(), checkpoints.rng_state(self.ranks)
        # Rank 0 writes; the space is checked before the first byte.
        with self.engine.unsharded():
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
                    self.family.write_extra_files,
                )

        # No rank goes on before the checkpoint is complete.
        self.ranks.barrier(f"{self.folder.name}: the checkpoint of step {self.state.step}")

    def kept(self) -> list[int]:
        """Scored steps whose drafts stay on disk: the best `keep_best`, the unscored ones and this one."""
        known = [*self.state.scored, self.state.step]
        if self.settings.keep_best is None:
            return known

        # The newest stays whatever its tau; a step without a score cannot be ranked and stays too.
        scores = [score for score in self.state.standings if score.step in known]
        best, judged = best_steps(scores, self.settings.keep_best), {score.step for score in scores}
        return [step for step in known if step in best or step not in judged or step == self.state.step]

    def meta(self) -> DraftMeta:
        """Lineage record of the draft at this step: that of the initial draft, with the step number."""
        return read_meta(self.folder / INIT).model_copy(update={"step": self.state.step})

    def log(self, values: dict[str, float]) -> None:
        """Log the values: a line in metrics.jsonl, with the time (seconds since 1970), and a call of the sink."""
        if self.ranks.first:
            self.metrics.log(self.state.step, values | {"time": time.time()})
            self.sink.log(self.state.step, values)

    def stop_requested(self) -> bool:
        """Whether any rank was told to stop, in which case all ranks save together. All ranks must call it."""
        if self.ranks.world_size == 1:
            return self.stop.requested
        # SIGTERM may reach one rank alone: the flags are summed, so that all ranks decide alike.
        requested = torch.tensor([float(self.stop.requested)], device=self.ranks.device)
        return bool(self.ranks.sum(requested).item() > 0)
