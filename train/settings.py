"""The recipe's `draft` section: what is trained, from what, and how."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from .. import fingerprint
from ..eval.settings import FEWEST_CLUSTERS
from ..specdec.engine_features import ENGINES, FLAGS, NAMES, ServingEngine, best_flags, honours
from .losses import schedule
from .losses.schedule import A_TENTH_KL, FULL, KL, Objective, Phase, Schedule, Section, StepWeights

_NOT_IDENTITY = {
    "accumulation",
    "row_tokens",
    "engine",
    "zero_stage",
    "offload_optimizer",
    "save_every",
    "keep_best",
    "logits_bytes",
    "activation_checkpointing",
    "init_from",
}
_LEAST_WEIGHT = 1e-30  # float32 divides by it
_MUON_RATE = 8e-3


class _Training(Section):
    """Training settings that all families share. A step is one optimizer step over all ranks."""

    steps: int = Field(default=200, ge=1)
    """Optimizer steps."""
    tokens_per_step: int = Field(default=4096, ge=1)
    """Tokens of one step over all ranks and micro-batches, prompts included; an epoch at most."""
    row_tokens: int = Field(default=0, ge=0)
    """Samples are packed side by side into rows of about so many tokens, each seeing only itself; 0: of the longest."""
    accumulation: int = Field(default=1, ge=1)
    """Micro-batches per rank and step. More of them need less memory and change nothing else."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: matrices inside the network by Muon, embeddings, heads, norms and biases by AdamW."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Peak learning rate of AdamW."""
    muon_rate: float = Field(default=_MUON_RATE, gt=0)
    """Peak learning rate of Muon, whose updates are scaled to the size of AdamW's."""
    warmup_steps: int = Field(default=10, ge=0)
    """Steps of linear warm-up; a cosine follows."""
    final_rate_share: float = Field(default=0.1, ge=0, le=1)
    """Learning rate of the last step, as a share of the peak."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decay of matrices, per step and rate."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """First-moment decay of AdamW."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Second-moment decay of AdamW."""
    clip_norm: float = Field(default=1.0, ge=0)
    """Gradients are scaled down to this norm; 0: never."""
    objective: Schedule = Field(default=KL)
    """Weights of the objectives that are summed: kl, ce (of the target's likeliest token), tv (the rejection rate),
    reverse_kl, jsd, lk (-log acceptance), lk_hybrid (kl, later tv), expected_length (tokens a round). A weight may be
    {weight, temperature}. In turn: a list of {until, objective}, the last without until, which is a step."""
    lk_eta: float = Field(default=3.0, ge=0)
    """Rate eta of lk_hybrid: how soon it turns from kl to tv as acceptance rises."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of matrix products. auto: bfloat16 on CUDA and on CPUs that multiply it in hardware, else float32."""
    score_every: int = Field(default=0, ge=0)
    """Score, and keep a checkpoint, every so many steps and at the end; 0: at the end only."""
    save_every: int = Field(default=0, ge=0)
    """Also save every so many steps, to resume from; only the newest of these is kept. 0: where scored only."""
    score_conversations: int = Field(default=0, ge=0)
    """At every scored step, while training, replay so many conversations of the selection split: tau goes into the
    metrics. It needs the target loaded. 0: none. All checkpoints that are kept are scored in full afterwards anyway."""
    keep_best: int | None = Field(default=None, ge=1)
    """Number of scored checkpoints to keep, those with the highest tau, beside the last one; absent: all are kept."""
    patience: int | None = Field(default=None, ge=1)
    """Stop early once so many scored steps in a row brought no tau above the best one's interval; absent: never."""
    engine: Literal["auto", "torch", "deepspeed"] = "auto"
    """auto: deepspeed with CUDA or more than one process, torch for one CPU process."""
    zero_stage: int = Field(default=0, ge=0, le=3)
    """DeepSpeed's ZeRO: 1 shards the optimizer, 2 gradients too, 3 weights too."""
    offload_optimizer: bool = False
    """Keep each rank's share of the optimizer (its state and float32 weights) in the CPU's memory, and step it there:
    slower, 12 bytes a sharded parameter less on the GPU. Needs zero_stage 1, 2 or 3."""
    logits_bytes: int = Field(default=1 << 28, ge=1)
    """Memory for logits: the loss is computed over as many positions at a time as fit."""
    draft_tokens: int = Field(default=4, ge=1, le=16)
    """Tokens a round that the draft is made for: steps that eagle and eagle3 unroll in training, heads of medusa, masks
    of a dflash block."""
    init_from: Path | None = None
    """Draft to start from instead of fresh weights (warm start): a folder, or models:/NAME@champion, models:/NAME/3."""

    @model_validator(mode="after")
    def _consistent(self) -> "_Training":
        # Periods lie within the training.
        if self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps {self.warmup_steps}: must not exceed steps {self.steps}")
        if self.score_every > self.steps:
            raise ValueError(f"score_every {self.score_every}: must not exceed steps {self.steps}")
        # Keeping the best and stopping early both need tau with an interval, so several conversations a score.
        for name, value in (("keep_best", self.keep_best), ("patience", self.patience)):
            if value is not None and (self.score_conversations < FEWEST_CLUSTERS or not self.score_every):
                raise ValueError(
                    f"{name} {value}: needs score_every above 0 and score_conversations of at least "
                    f"{FEWEST_CLUSTERS}, got {self.score_every} and {self.score_conversations}"
                )
        # Phases of the objective; what the engines can do.
        schedule.check(self.phases, self.steps)
        if self.zero_stage and self.engine == "torch":
            raise ValueError(f"zero_stage {self.zero_stage}: needs engine deepspeed, got engine torch")
        if self.offload_optimizer and not self.zero_stage:
            raise ValueError("offload_optimizer true: needs zero_stage 1, 2 or 3, got 0")
        return self

    def identity(self) -> dict[str, Any]:
        """Identity of a training: settings that decide its result, not those that divide it among memory and machines.

        `init_from` is left out because a path says nothing of its content; `checkpoints.claim` records its digest.
        """
        # Settings that nothing reads do not decide the result.
        unused = set() if any("lk_hybrid" in phase.objective for phase in self.phases) else {"lk_eta"}
        unused |= {"patience", "score_conversations"} if self.patience is None else set()

        # Without Muon its rate is the default one, under which drafts are recorded.
        read = self if self.optimizer == "muon" else self.model_copy(update={"muon_rate": _MUON_RATE})

        # The objective in its canonical form: {kl: 1} and a single phase of it are one identity.
        values = read.model_dump(mode="json", exclude=_NOT_IDENTITY | unused | {"objective"})
        return values | {"objective": schedule.identity(self.phases)}

    @property
    def draft_family(self) -> str:
        """Family of the draft that is trained, by the name that checkpoints record."""
        return str(self.family)  # type: ignore[attr-defined]

    @property
    def phases(self) -> list[Phase]:
        """Phases of the schedule, in turn; mostly one."""
        return schedule.phases_of(self.objective)

    def objective_at(self, step: int) -> Objective:
        """Objective of the step after `step` done ones."""
        return self.phases[schedule.phase_at(self.phases, step)].mix

    @property
    def needs_whole_distribution(self) -> bool:
        """Whether an objective reads what stored signals do not hold: only a live target teaches it."""
        # Stored signals hold temperature 1, and entries that give the expectations over p alone.
        parts = [(name, value) for phase in self.phases for name, value in phase.objective.items()]
        return any(name in FULL or schedule.parts_of(value)[1] != 1.0 for name, value in parts)

    @property
    def fingerprint(self) -> str:
        """64 hex digits of `identity`."""
        return fingerprint.of_json(self.identity())


class LoraSettings(Section):
    """Low-rank adapters instead of full weights; merged whenever a checkpoint is saved."""

    rank: int = Field(default=16, ge=1)
    """Rank of the adapters."""
    alpha: float = Field(default=32.0, gt=0)
    """LoRA alpha: adapters are scaled by alpha / rank."""
    targets: str | list[str] = "all-linear"
    """Names of the adapted modules, or all-linear: every linear layer but the head."""

    @model_validator(mode="after")
    def _no_head(self) -> "LoraSettings":
        named = [self.targets] if isinstance(self.targets, str) else self.targets
        if not named or any(name.split(".")[-1] in ("lm_head", "embed_tokens") for name in named):
            raise ValueError(f"targets {self.targets}: must name linear layers, not the head or the embeddings")
        return self


class OnPolicySettings(Section):
    """On-policy distillation: some prompts are answered by the draft as it is, and the frozen target, which is loaded,
    teaches it there. The loss is still divided by the tokens of the recorded answers: each token of a step weighs the
    same however the step is divided, and own answers that end early only make its loss smaller."""

    share: float = Field(default=0.5, gt=0, le=1)
    """Share of the samples of a step that the draft answers anew; the others keep the recorded answer."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature of the draft; 0 takes its likeliest tokens."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Longest own answer, where the recorded one is longer; absent: as long as that."""


class SmallSettings(_Training):
    """An independent causal LM, trained from the stored signals alone where the objective is of kl, ce and tv at
    temperature 1 and `on_policy` is absent; otherwise the frozen target is loaded."""

    family: Literal["small"] = "small"
    layers: int | list[int] | None = None
    """Prune the target: how many of its layers to keep, evenly spaced, or which. First and last must be kept."""
    from_model: str | None = None
    """Start from this Hugging Face folder or hub id instead; it must have the target's tokenizer."""
    revision: str | None = None
    """Branch, tag or commit of `from_model` on the hub."""
    trust_remote_code: bool = False
    """Run Python code that ships with `from_model`. Off unless you have read that code."""
    activation_checkpointing: bool = False
    """Recompute the layers' activations in the backward pass: less memory, a third more time."""
    lora: LoraSettings | None = None
    """Train adapters only; absent: all weights."""
    on_policy: OnPolicySettings | None = None
    """Train on the draft's own answers too, slower; absent: on recorded ones only."""

    @model_validator(mode="after")
    def _one_source(self) -> "SmallSettings":
        if (self.layers is None) == (self.from_model is None):
            raise ValueError(f"layers {self.layers}, from_model {self.from_model}: give exactly one of them")
        if isinstance(self.layers, int) and self.layers < 2:
            raise ValueError(f"layers {self.layers}: must be at least 2, the first and the last")
        if isinstance(self.layers, list) and (len(self.layers) < 2 or self.layers != sorted(set(self.layers))):
            raise ValueError(f"layers {self.layers}: must be at least 2 different layers in ascending order")
        return self

    @model_validator(mode="after")
    def _whole_sampler(self) -> "SmallSettings":
        if self.on_policy is not None and self.zero_stage == 3:
            raise ValueError("zero_stage 3: splits weights, which on_policy needs whole; set 2")
        return self

    def identity(self) -> dict[str, Any]:
        """Identity; `on_policy` is left out where absent, so that drafts whose records lack the field are found."""
        values = super().identity()
        return values if self.on_policy is not None else {name: values[name] for name in values if name != "on_policy"}


class FeatureSettings(_Training):
    """Settings of the families that draft several tokens from one state, with the frozen target loaded."""

    step_weights: StepWeights = 0.8
    """Weights of the loss of the tokens ahead: a number w stands for 1, w, w ** 2 ...; or a list, one for each of
    draft_tokens. expected_length has weights of its own."""
    features_bytes: int | None = Field(default=None, ge=0)
    """Memory for the target's features of samples that will come again; 0: run the target each time. Absent: 2 GiB
    where the target is on the CPU, 0 elsewhere."""

    @model_validator(mode="after")
    def _one_weight_a_token(self) -> "FeatureSettings":
        if isinstance(self.step_weights, list) and len(self.step_weights) != self.draft_tokens:
            raise ValueError(f"step_weights {self.step_weights}: must be as many as draft_tokens {self.draft_tokens}")
        try:
            least = min(self.weight_of_steps())
        except OverflowError:
            raise ValueError(f"step_weights {self.step_weights}: its powers are too large to compute with") from None
        if least < _LEAST_WEIGHT:
            raise ValueError(
                f"step_weights {self.step_weights}: gives a token weight {least:g}, must be at least {_LEAST_WEIGHT:g}"
            )
        return self

    def weight_of_steps(self) -> tuple[float, ...]:
        """Weights of the loss of each token ahead, one for each of `draft_tokens`."""
        if isinstance(self.step_weights, list):
            return tuple(self.step_weights)
        return tuple(self.step_weights**k for k in range(self.draft_tokens))

    def identity(self) -> dict[str, Any]:
        """Identity; a single weight goes by the name `step_decay`, under which drafts are recorded."""
        values = super().identity()
        return values if isinstance(self.step_weights, list) else values | {"step_decay": values.pop("step_weights")}


class Eagle3Settings(FeatureSettings):
    """EAGLE-3: one decoder layer on the target's features, trained with the frozen target loaded."""

    family: Literal["eagle3"] = "eagle3"
    draft_vocabulary: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    """Draft only so many tokens, the most frequent of the supervised ones; auto: as many as are fastest, by coverage
    and measured times; absent: the whole vocabulary."""
    aux_layers: tuple[int, ...] | None = Field(default=None, min_length=1)
    """Target layers that are read, as indexes into hidden_states; absent: 2, N // 2, N - 3."""
    layers: int | None = Field(default=None, ge=1)
    """Number of decoder layers; absent: that of the draft in init_from, 1 in a fresh draft."""
    body: Literal["llama", "qwen3"] | None = None
    """Kind of the decoder layers: qwen3 norms the queries and keys of each head; absent: as the draft in init_from has
    it, llama in a fresh draft."""
    intermediate_size: int | None = Field(default=None, ge=1)
    """Width of the MLPs; absent: the target's."""
    sliding_window: int | None = Field(default=None, ge=1)
    """Attention sees only so many tokens, its own included, in every layer; absent: as the draft in init_from has it,
    all of them in a fresh draft."""
    serving_engines: list[ServingEngine] | None = Field(default=None, min_length=1)
    """Engines that are to serve the draft: a fresh one gets all of the next four norms that each of them computes (of
    the first two, one), and settings that one of them does not compute are refused. Absent: the engine of score.load,
    else all three get the norms that they share."""
    fc_norm: bool | None = None
    """A norm over the features of each read layer before they are mixed (EAGLE-3.1); absent: as the draft in
    init_from has it, in a fresh draft as serving_engines allow. So are the next three."""
    norm_before_fc: bool | None = None
    """One norm over the features of all read layers before they are mixed; not beside fc_norm."""
    norm_output: bool | None = None
    """The next drafting step reads the draft's normed state, not the un-normed one (EAGLE-3.1)."""
    norm_before_residual: bool | None = None
    """The first layer's output is added to the normed state, not to the un-normed one."""
    train_embeddings: bool = False
    """Give the draft its own embeddings and train them; off: it shares the target's, frozen."""
    train_head: bool = True
    """Train the head, which starts from the target's rows; off: it stays as it is."""

    @model_validator(mode="after")
    def _ordered_layers(self) -> "Eagle3Settings":
        layers = list(self.aux_layers or [1])
        if layers != sorted(set(layers)) or layers[0] < 1:
            raise ValueError(f"aux_layers {layers}: must be different layers in ascending order, from 1 on")
        return self

    @model_validator(mode="after")
    def _served_as_trained(self) -> "Eagle3Settings":
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("norm_before_fc true: must be false where fc_norm is true")
        named: dict[str, Any] = {flag: getattr(self, flag) or None for flag in FLAGS} | {
            "layers": None if self.layers == 1 else self.layers,
            "body": None if self.body == "llama" else self.body,
            "sliding_window": self.sliding_window,
            "aux_layers": None if len(self.aux_layers or (1, 2, 3)) == 3 else list(self.aux_layers or ()),
        }
        for engine in self.serving_engines or ():
            for name, value in named.items():
                if value is not None and not honours(engine, name):
                    raise ValueError(f"{name} {value}: {NAMES[engine]}, of serving_engines, does not compute it")
        return self

    def flags(self) -> dict[str, bool]:
        """Norms of a fresh draft: as they are set, else all that the engines compute."""
        # Of the two norms before fc one at most: one that is set goes before one that is not.
        best = best_flags(self.serving_engines or ENGINES)
        if self.fc_norm is False:
            best["norm_before_fc"] = all(
                honours(engine, "norm_before_fc") for engine in self.serving_engines or ENGINES
            )
        if self.fc_norm or self.norm_before_fc:
            best |= {"fc_norm": False, "norm_before_fc": False}
        return best | {flag: value for flag in FLAGS if (value := getattr(self, flag)) is not None}

    def identity(self) -> dict[str, Any]:
        """Identity: the norms of a fresh draft in place of the engines that they follow from; what a warm start leaves
        to its draft is left out, so that drafts whose records lack these fields are found."""
        values = super().identity()
        left_out = [name for name in _SINCE_31 if values[name] is None]
        values = {name: value for name, value in values.items() if name not in ("serving_engines", *left_out)}
        return values if self.init_from is not None else values | self.flags()


_SINCE_31 = ("layers", "body", "sliding_window", "norm_before_fc", "norm_output", "norm_before_residual")


class EagleSettings(FeatureSettings):
    """EAGLE-1: one decoder layer on the target's last state, under the target's own frozen head and embeddings."""

    family: Literal["eagle"] = "eagle"
    objective: Schedule = Field(default=A_TENTH_KL)
    """Weights of the objectives that are summed, beside `feature_weight`; as published, kl at a tenth of that."""
    intermediate_size: int | None = Field(default=None, ge=1)
    """Width of the MLP; absent: the target's."""
    feature_weight: float = Field(default=1.0, ge=0)
    """Weight of the smooth L1 loss between the draft's states and the target's; 0: none."""
    feature_noise: float = Field(default=0.2, ge=0)
    """Width of the uniform noise on the target's states in training, times 512 over the text's tokens; 0: none."""


class BackboneSettings(Section):
    """Medusa-2: adapters on the target's layers, trained together with the heads. The target becomes another model."""

    lora: LoraSettings = LoraSettings(rank=32, alpha=16.0)
    """LoRA adapters on the target's layers."""
    start_step: int = Field(default=100, ge=0)
    """Number of steps at the beginning in which the heads train alone."""
    rate_share: float = Field(default=0.25, gt=0, le=1)
    """Learning rate of the adapters, as a share of the heads'."""
    heads_weight: float = Field(default=0.2, gt=0)
    """Weight of the heads' loss beside the divergence from the target as it was."""


class MedusaSettings(FeatureSettings):
    """Heads that each draft one of the next draft_tokens tokens from the target's last state."""

    family: Literal["medusa"] = "medusa"
    blocks: int = Field(default=1, ge=1)
    """Residual layers of a head."""
    train_heads: bool = True
    """Train each head's linear layer to the vocabulary, which starts from the target's; off: the blocks alone, in much
    less memory."""
    backbone: BackboneSettings | None = None
    """Train the target too (Medusa-2); absent: it stays as it is (Medusa-1)."""
    activation_checkpointing: bool = False
    """Recompute the backbone's activations in the backward pass: less memory, a third more time."""

    @model_validator(mode="after")
    def _possible_backbone(self) -> "MedusaSettings":
        # Medusa-1: the target is not trained, so nothing of it can be recomputed.
        if self.backbone is None:
            if self.activation_checkpointing:
                raise ValueError(
                    "activation_checkpointing: recomputes the backbone, which is not trained; give backbone"
                )
            return self

        # Medusa-2: its layers train for at least one step, are whole on each rank, and are not scored midway.
        if self.backbone.start_step >= self.steps:
            raise ValueError(f"backbone.start_step {self.backbone.start_step}: must be less than steps {self.steps}")
        if self.zero_stage == 3:
            raise ValueError("zero_stage 3: splits weights, which backbone needs whole; set 2")
        if self.score_conversations:
            raise ValueError(
                f"score_conversations {self.score_conversations}: are replayed on the target as it was, which backbone "
                "changes; set 0"
            )
        return self


class DFlashSettings(FeatureSettings):
    """A few decoder layers that draft a block of `draft_tokens` in one pass, trained with the frozen target loaded."""

    family: Literal["dflash"] = "dflash"
    layers: int | None = Field(default=None, ge=1)
    """Number of decoder layers; absent: that of the draft in init_from, 3 in a fresh draft."""
    aux_layers: tuple[int, ...] | None = Field(default=None, min_length=1)
    """Target layers that are read, as indexes into hidden_states; absent: one a layer of the draft, from 2 to N - 2."""
    mask_token: int | None = Field(default=None, ge=0)
    """Id of the token that stands for what is to be drafted; absent: the tokenizer's mask token, an id that its
    vocabulary leaves free, its padding or the end of a text."""
    draft_vocabulary: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    """Draft only so many tokens, the most frequent of the supervised ones; auto: as many as are fastest, by coverage
    and measured times; absent: the whole vocabulary."""
    intermediate_size: int | None = Field(default=None, ge=1)
    """Width of the MLPs; absent: the target's."""
    train_embeddings: bool = False
    """Give the draft its own embeddings and train them; off: it shares the target's, frozen."""
    train_head: bool = False
    """Give the draft its own head and train it; off: it shares the target's, or has frozen rows of it."""
    markov_rank: int = Field(default=0, ge=0)
    """Rank of a Markov head, which tells each token's logits of the token before it and makes it a DSpark draft, of a
    block without an unused place; 256 as published. 0: none, the tokens of a block do not know each other."""
    confidence_weight: float = Field(default=0.0, ge=0)
    """Weight of the loss of a confidence head beside a Markov head, which learns how likely each token is accepted; 1
    as published. 0: no such head is made or trained."""

    @model_validator(mode="after")
    def _ordered_layers(self) -> "DFlashSettings":
        layers = list(self.aux_layers or [1])
        if layers != sorted(set(layers)) or layers[0] < 1:
            raise ValueError(f"aux_layers {layers}: must be different layers in ascending order, from 1 on")
        return self

    @model_validator(mode="after")
    def _confidence_beside_markov(self) -> "DFlashSettings":
        if self.confidence_weight and not self.markov_rank:
            raise ValueError(f"confidence_weight {self.confidence_weight:g}: needs markov_rank above 0")
        return self

    @property
    def draft_family(self) -> str:
        """dspark with a Markov head, which engines serve by another method, else dflash."""
        return "dspark" if self.markov_rank else self.family

    def identity(self) -> dict[str, Any]:
        """Identity; DSpark's settings are left out where they are off, so that drafts whose records lack them are
        found."""
        return {name: value for name, value in super().identity().items() if value or name not in _OF_DSPARK}


_OF_DSPARK = ("markov_rank", "confidence_weight")

Settings = SmallSettings | MedusaSettings | EagleSettings | Eagle3Settings | DFlashSettings
DraftSettings = Annotated[Settings, Field(discriminator="family")]
