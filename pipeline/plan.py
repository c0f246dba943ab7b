"""`draftforge plan`: memory, disk and hours of a recipe's stages on GPUs that are not here, with each figure's basis.

FLOPs and bytes follow from the model's shapes. The speeds at which a GPU works through them were fitted to one H200
with SmolLM2-135M-Instruct (docs/experiments.md), that of large products to the run of 247 Llama layers there. How
far the model is from other rows of that page, tests/pipeline/test_plan.py computes.

Rows that nothing was fitted to: a pass of 2,560 slots -15 %, plain decoding of 64 slots -16 %; EAGLE-3 training with
a vocabulary of 32,768 -6 %, of 16,384 -11 %, with two layers -7 %; memory of micro-batches of a half and a quarter
-7 %, of two layers +1 %, of Qwen3-0.6B's shape -7 %. Rows that they were fitted to: within 12 %; whole stages of one
run, whose starts and rendering are counted in: a capture of 40,046 answers -14 %, trainings of EAGLE-3 and `small`
-8 % and -5 % (two processes on one host, 801d3d8). Nothing larger was measured, but for the FLOPs of that stack of
Llama layers.

Shapes: B slots, T tokens of a context, H hidden size, I width of an MLP, V vocabulary, K tokens drafted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from pydantic import ValidationError
from rich.table import Table
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from ..data.conversation import turn_ends
from ..data.record_outcomes import SourceCounts
from ..data.settings import CaptureSettings, DatasetSource, TargetSource
from ..data.sources import read_records
from ..data.stratify import lengths_of
from ..errors import InputError, named, refused_value
from ..progress import Console
from ..recipe import Recipe
from ..specdec.loading import refused
from ..specdec.model_folder import check_folder, check_size, of_known_size
from ..specdec.models import CausalModel
from ..specdec.served_context import served_context
from ..specdec.targets import Target, snapshot
from ..storage import expanded, size_text
from ..train.families import family_of
from ..train.families.feature_family import largest_vocabulary
from ..train.memory_estimate import DiskFootprint
from ..train.settings import Eagle3Settings, SmallSettings
from .cli_options import GpuName
from .estimates import duration_text


class Gpu(NamedTuple):
    """A kind of GPU, by its data sheet."""

    flops: float
    """Products of bfloat16 a second, without sparsity."""
    bandwidth: float
    """Bytes a second of its memory."""
    memory: float
    """Bytes."""


GPUS: dict[GpuName, Gpu] = {
    "a100": Gpu(312e12, 2.04e12, 80e9),
    "h100": Gpu(989e12, 3.35e12, 80e9),
    "h200": Gpu(989e12, 4.8e12, 141e9),
}
_H200 = GPUS["h200"]

# Fitted on one H200 (docs/experiments.md names runs and commits).
_LAYER_SECONDS = 36e-6  # of a decoding pass, whatever its batch: a plain token takes 1.14 ms in 30 layers
_CACHE_SHARE = 0.7  # of the bandwidth at which attention reads a cache: 9.0 ms of a pass with 2,560 slots
_WEIGHT_SHARE = 0.8  # of the bandwidth at which a pass reads weights; assumed
_VOCABULARY_BYTES = 217.0  # a logit while a token is sampled and its signals are made: 5.7 ms of that pass
_HOST_SECONDS = 1.4e-3  # a decoding pass
_OCCUPANCY = 0.68  # slots at work, between captures of 59.9 s and 126 s
_HEAD_SHARE = 0.84  # of the products a second, in the two heads: 58 ms of a training step of 65,515 positions
_LOSS_BYTES = 15.3  # a logit of the loss and its gradient: 41 ms of that step
_ATTENTION_SECONDS = 2.5e-10  # a position, layer, token ahead and element of the hidden state: 38 ms of that step
_STEP = {"eagle3": 1.02, "small": 1.6}  # measured step over the sum of its parts
_ACTIVATION_BYTES = {
    "eagle3": 2.94,
    "small": 4.1,
}  # an activation that a backward pass keeps: steps of 10.8 and 10.3 GiB
_REPLAY_SECONDS = 11.7e-6  # an answer token and checkpoint, of EAGLE-3 on SmolLM2: 24.8 s of 2,180 answers
_REPLAY_PRODUCTS = 2 * 4 * (5.1e6 + 49152 * 576)  # what it computes meanwhile
_ANSWER_SHARE = 0.75  # of `max_new_tokens`: 194 of 256
_CAPTURE_RANKS, _SCORE_RANKS = 0.93, 0.63  # speed of n GPUs is n to this power: 1.90 and 1.55 times on two
_RENDER_SECONDS = 0.45e-3  # a prompt, one after another on the host: 40,046 in 18 s
_START_SECONDS = 10  # of a stage: loading, graphs, checking a capture; 5 of a capture, 13 of a training were measured
FIT_ERRORS = "fit errors: expect about 15 % more or less, larger targets worse: docs/distill.md"


def mfu(hidden: int) -> float:
    """Model FLOPs utilization of a stack: 28 % at H = 576, 50 % at H = 5120 (both measured)."""
    return 0.55 * hidden / (hidden + 550)


class _Shapes(CausalModel):
    """A target without weights, which families ask for shapes."""

    def __init__(self, model: Any, context: int | None) -> None:
        super().__init__(model.requires_grad_(False).eval(), context, loaded=False)
        self.tokenizer = SimpleNamespace(all_special_ids=[], mask_token_id=0)
        self.stop_ids = frozenset[int]()


@dataclass(frozen=True)
class TargetShapes:
    """Sizes of a target, of its config alone."""

    shapes: _Shapes

    @classmethod
    def of_config(cls, config: Any, trust_remote_code: bool = False) -> "TargetShapes":
        """Sizes of the model that a config of transformers describes."""
        inner = config.get_text_config()
        with of_known_size(inner, "target.model"), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(inner, dtype=torch.bfloat16, trust_remote_code=trust_remote_code)
        return cls(_Shapes(model, served_context(inner.to_dict())))

    @cached_property
    def parameters(self) -> int:
        """All parameters."""
        return sum(one.numel() for one in self.shapes.model.parameters())

    @cached_property
    def head(self) -> int:
        """Parameters of the head."""
        return self.shapes.vocab_size * self.shapes.hidden_size

    @cached_property
    def active(self) -> float:
        """Parameters of the layers that a token passes through: of experts those that are chosen."""
        config, total = self.shapes.config, 0.0
        experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
        chosen = getattr(config, "num_experts_per_tok", None)
        share = chosen / experts if type(chosen) is int and type(experts) is int and experts > 0 else 1.0
        for name, one in self.shapes.stack.named_parameters():
            if one.ndim > 1 and "embed_tokens" not in name:
                total += one.numel() * (share if ".experts." in name else 1.0)
        return total

    @cached_property
    def cache_bytes(self) -> int:
        """Bytes of keys and values that a token leaves in the cache, bfloat16."""
        config = self.shapes.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(2 * 2 * config.num_hidden_layers * heads * size)

    def pass_seconds(self, gpu: Gpu, tokens: float) -> float:
        """Seconds of the layers over many tokens, as they are read for features or signals."""
        return tokens * 2 * self.active / (gpu.flops * mfu(self.shapes.hidden_size))


class Answers(NamedTuple):
    """Answers that a recipe asks for."""

    train: float
    scored: float
    """Of selection and holdout, at every scored sampling setting."""
    selection: float
    holdout: float
    tokens: float
    """Mean tokens of one."""
    prompt: float
    """Mean tokens of its prompt."""

    @property
    def all(self) -> float:
        return self.train + self.scored


class Cost(NamedTuple):
    """Cost of a stage on some GPUs."""

    seconds: float
    memory: float
    """Bytes on each GPU; 0: the stage has no estimate."""
    disk: float
    basis: str


def plan(recipe: Recipe, gpu: GpuName, counts: Sequence[int]) -> None:
    """Print memory, disk and time of each stage on `counts` GPUs of a kind, with what each figure follows from.

    Raises MissingFileError for sources or a config that are not there.
    """
    counts = list(dict.fromkeys(counts))
    target, (answers, assumed) = load_shapes(recipe), answers_of(recipe)
    tables = {count: costs(recipe, target, answers, GPUS[gpu], count) for count in counts}
    console, table = Console(highlight=False), Table(title=f"{recipe.name} on {gpu}", title_justify="left")
    if not console.is_terminal:
        console.width = 160
    for heading in (
        "stage",
        *(f"{n} GPU{'s' * (n > 1)}: {what}" for n in counts for what in ("time", "memory")),
        "disk",
    ):
        table.add_column(heading)
    for stage in next(iter(tables.values())):
        rows = [tables[count][stage] for count in counts]
        cells = [cell for row in rows for cell in (_time(row), _memory(row, GPUS[gpu]))]
        table.add_row(stage, *cells, size_text(int(rows[0].disk)) if rows[0].disk else "-")
    totals = [sum(cost.seconds for cost in each.values()) for each in tables.values()]
    disk = sum(cost.disk for cost in tables[counts[0]].values())
    table.add_row("all", *(cell for total in totals for cell in (duration_text(total), "")), size_text(int(disk)))
    console.print(table)
    for line in (*assumed, *(f"{stage}: {cost.basis}" for stage, cost in tables[counts[0]].items()), FIT_ERRORS):
        console.print(line, style="dim", markup=False, soft_wrap=True)


def load_shapes(recipe: Recipe) -> TargetShapes:
    """Shapes of a recipe's target; of a hub id the config alone is downloaded."""
    settings = recipe.target
    path = expanded(settings.model)
    options: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code, "gguf_file": settings.gguf_file}
    if path.suffix == ".gguf":
        path, options["gguf_file"] = path.parent, path.name
    with refused(f"target.model: {settings.model}"):
        if not path.is_dir():
            wanted = ["config.json", "*.py", *filter(None, [options["gguf_file"]])]
            path = snapshot(settings.model, settings.revision, "target.model", wanted)
        check_folder(path, f"target.model: {settings.model}", settings.trust_remote_code)
        if options["gguf_file"] is not None:
            check_size(path, f"target.model: {settings.model}", options["gguf_file"])
        config = AutoConfig.from_pretrained(path, **options)
        return TargetShapes.of_config(config, settings.trust_remote_code)


def answers_of(recipe: Recipe) -> tuple[Answers, list[str]]:
    """Answers that a recipe asks for, by reading its sources, and what is assumed of them."""
    # 1) Turns and prompts of the sources; copies are found only by the mix.
    turns, prompts, assumed = 0, 0.0, list[str]()
    for index, source in enumerate(recipe.mix.sources):
        if isinstance(source, TargetSource):
            turns, prompts = turns + source.count, prompts + 32 * source.count
            continue
        if isinstance(source, DatasetSource) and source.rows is None:
            raise InputError(f"mix.sources[{index}].rows: must say how many rows of {source.name} count")
        for record in read_records(source, recipe.base_dir, index, SourceCounts()):
            asked = len(turn_ends(record))
            turns, prompts = turns + asked, prompts + asked * lengths_of(record).prompt
    limit = recipe.mix.limit
    kept = min(turns, limit) if limit else turns
    # 2) Splits, and the length of an answer.
    mix, settings, tokens = recipe.mix, recipe.capture, _ANSWER_SHARE * recipe.capture.max_new_tokens
    selection, holdout = kept * mix.selection_share, kept * mix.holdout_share
    scored = (selection + holdout) * len(recipe.score.sampling)
    train = kept - selection - holdout
    if settings.budget is not None and settings.budget.tokens is not None:
        train = min(train, max(0.0, settings.budget.tokens / tokens - scored))
    assumed.append(
        f"answers: {turns:,} turns in the sources, copies included; {tokens:,.0f} tokens each are assumed, "
        f"{_ANSWER_SHARE:.0%} of capture.max_new_tokens"
    )
    shown = min(recipe.score.max_conversations or selection, selection)
    held = min(recipe.score.max_conversations or holdout, holdout)
    return Answers(train, scored, shown, held, tokens, prompts / max(turns, 1)), assumed


def costs(recipe: Recipe, target: TargetShapes, answers: Answers, gpu: Gpu, count: int) -> dict[str, Cost]:
    """Cost of each stage by its name; a training that no figures were fitted for has none."""
    found = {"capture": capture_cost(recipe.capture, target, answers, gpu, count)}
    for name, settings in recipe.drafts.items():
        if not isinstance(settings, Eagle3Settings | SmallSettings):
            why = f"no estimate: family {settings.family} (eagle3 and small have one); the totals leave it out"
            found[f"train {name}"] = Cost(0, 0, 0, why)
            continue
        try:
            with named(f"drafts.{name}"):
                found[f"train {name}"] = training_cost(settings, target, gpu, count)
        except ValidationError as error:  # a draft for such a target is none
            raise refused_value(error, f"drafts.{name}: ") from None
    # What comes before the work that these count.
    for name, cost in found.items():
        before = _START_SECONDS + (_RENDER_SECONDS * answers.all if name == "capture" else 0)
        found[name] = cost._replace(seconds=cost.seconds + before) if cost.memory else cost
    found["score"] = _scoring_cost(recipe, target, answers, gpu, count, answers.selection, recipe.drafts.values())
    found["promote"] = _scoring_cost(recipe, target, answers, gpu, 1, answers.holdout, [])
    return found


def decoding_seconds(target: TargetShapes, gpu: Gpu, slots: float, context: float) -> float:
    """Seconds of one decoding pass of so many slots, a token each, sampling and signals included."""
    shapes = target.shapes
    read = 2 * target.parameters / (gpu.bandwidth * _WEIGHT_SHARE)
    cached = slots * context * target.cache_bytes / (gpu.bandwidth * _CACHE_SHARE)
    products = target.pass_seconds(gpu, slots) + slots * 2 * target.head / (gpu.flops * _HEAD_SHARE)
    drawn = slots * shapes.vocab_size * _VOCABULARY_BYTES / gpu.bandwidth
    return shapes.num_layers * _LAYER_SECONDS + read + cached + products + drawn + _HOST_SECONDS


def capture_cost(settings: CaptureSettings, target: TargetShapes, answers: Answers, gpu: Gpu, count: int) -> Cost:
    """Cost of the capture by our own decoder, each GPU with a share of the answers."""
    longest = answers.prompt + settings.max_new_tokens
    weights, a_slot = 2 * target.parameters, target.cache_bytes * longest + 48 * target.shapes.vocab_size
    fits = (0.95 * gpu.memory - weights) / a_slot
    slots = max(1.0, min(settings.batch_size, fits, answers.all / count))
    tokens = answers.all * answers.tokens
    a_pass = decoding_seconds(target, gpu, slots, answers.prompt + answers.tokens / 2)
    seconds = tokens / slots * a_pass / _OCCUPANCY + target.pass_seconds(gpu, answers.all * answers.prompt)
    width = {"float32": 4}.get(settings.store_dtype, 2)
    kept = (settings.top_k + settings.tail_samples) * (4 + width) + 14 if settings.top_k else 8
    disk = answers.train * answers.tokens * kept + answers.scored * answers.tokens * 8
    basis = (
        f"{tokens:,.0f} tokens of {answers.all:,.0f} answers; {slots:,.0f} slots a GPU, {1e3 * a_pass:.1f} ms a pass, "
        f"{_OCCUPANCY:.0%} of them at work; {kept} bytes a token"
        + ("; as our own decoder would answer: capture.backend has no estimate" if settings.engine is not None else "")
    )
    return Cost(seconds / count**_CAPTURE_RANKS, weights + slots * a_slot, disk, basis)


def training_cost(settings: Eagle3Settings | SmallSettings, target: TargetShapes, gpu: Gpu, count: int) -> Cost:
    """Cost of the training of one draft, of the families that figures were fitted for."""
    # 1) The draft, without weights: its sizes, and what its checkpoints take.
    family, shapes = family_of(settings), target.shapes
    draft = cast(nn.Module, family.check(settings, lambda: cast(Target, shapes)))
    family.freeze(cast(Any, draft), settings)
    footprint = DiskFootprint.expected(draft, None)
    layers, beside = draft_layers(draft), target if family.needs_target(settings) else None
    # 2) Time: the target's layers, heads, the loss, the draft's layers and attention; forward and backward are three
    # products.
    ahead = settings.draft_tokens if isinstance(settings, Eagle3Settings) else 1
    hidden, vocabulary = shapes.hidden_size, shapes.vocab_size
    if isinstance(settings, Eagle3Settings):
        vocabulary = largest_vocabulary(settings, vocabulary)
    share = gpu.flops * mfu(hidden)
    heads = 6 * ahead * vocabulary * hidden + (2 * target.head if beside is not None else 0)
    each = (beside.pass_seconds(gpu, 1) if beside is not None else 0) + heads / (gpu.flops * _HEAD_SHARE)
    each += ahead * vocabulary * _LOSS_BYTES / gpu.bandwidth + 6 * ahead * layers.products / share
    each += ahead * layers.depth * hidden * _ATTENTION_SECONDS * _H200.flops / gpu.flops
    each *= _STEP[settings.family]
    positions = settings.steps * settings.tokens_per_step
    # 3) Memory: weights of both, gradients and optimizer, activations of a micro-batch, logits.
    micro = settings.tokens_per_step / max(1, settings.accumulation) / count
    sharded = count if settings.zero_stage else 1
    standing = 8 * footprint.parameters + 8 * footprint.parameters / sharded
    standing += 2 * target.parameters if beside is not None else 0
    kept = micro * ahead * _ACTIVATION_BYTES[settings.family] * layers.activations
    memory = standing + kept + 2 * settings.logits_bytes + 4 * vocabulary * hidden
    basis = (
        f"{footprint.parameters / 1e6:,.1f} M trained parameters; {positions:,} positions, {1 / each:,.0f} a second "
        f"and GPU; {size_text(int(kept))} of activations of {micro:,.0f} positions a micro-batch"
    )
    return Cost(positions * each / count, memory, footprint.bytes_to_write(settings, 0) + footprint.draft, basis)


class DraftLayers(NamedTuple):
    """Sizes of a draft's layers."""

    depth: int
    products: int
    """Parameters that a position is multiplied with, heads and embeddings aside."""
    activations: int
    """Elements that a position leaves for the backward pass, about: 4 H, and 6 H + 4 I a layer."""


def draft_layers(draft: nn.Module) -> DraftLayers:
    """Sizes of the layers of an EAGLE-3 draft or a small model."""
    aside = ("lm_head", "embed_tokens")
    sizes = {name: one for name, one in draft.named_parameters() if one.ndim == 2}
    inner = {name: one for name, one in sizes.items() if not any(part in name for part in aside)}
    wide = [one.shape for name, one in inner.items() if name.endswith("down_proj.weight")]
    hidden, inside = wide[0]
    products = sum(one.numel() for one in inner.values())
    return DraftLayers(len(wide), products, 4 * hidden + len(wide) * (6 * hidden + 4 * inside))


def _scoring_cost(
    recipe: Recipe,
    target: TargetShapes,
    answers: Answers,
    gpu: Gpu,
    count: int,
    conversations: float,
    drafts: Any,
) -> Cost:
    """Cost of replaying checkpoints on answers; of a promotion's two drafts where `drafts` is empty."""
    tokens = conversations * len(recipe.score.sampling) * answers.tokens
    checkpoints = sum(-(-one.steps // (one.score_every or one.steps)) for one in drafts) or 2
    hidden, vocabulary = target.shapes.hidden_size, target.shapes.vocab_size
    body = 12 * hidden * hidden  # of one layer, about
    relative = 2 * max(recipe.score.draft_tokens) * (body + vocabulary * hidden) / _REPLAY_PRODUCTS
    faster = gpu.flops * mfu(hidden) / (_H200.flops * mfu(576))
    each = _REPLAY_SECONDS * max(1.0, relative / faster)
    read = target.pass_seconds(gpu, tokens + conversations * answers.prompt)
    seconds = (tokens * checkpoints * each + read) / count**_SCORE_RANKS + 60
    memory = 2 * target.parameters + recipe.score.trace_bytes + (4 << 30)
    basis = (
        f"{tokens:,.0f} answer tokens, {checkpoints} checkpoints, {1e6 * each:.1f} us each; a minute for times of "
        "rounds; 4 GiB for a pass are assumed"
    )
    return Cost(seconds, memory, 0, basis)


def _time(cost: Cost) -> str:
    return duration_text(cost.seconds) if cost.memory else "-"


def _memory(cost: Cost, gpu: Gpu) -> str:
    if not cost.memory:
        return "-"
    return f"{cost.memory / 2**30:.1f} GiB" + (" (does not fit)" if cost.memory > gpu.memory else "")
