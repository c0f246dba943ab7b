"""What a round costs at batch 1: draft and verify times, measured once per shape.

Times come from the decoder's own timer; plain decoding and every K or tree take turns (`turns.py`). All checkpoints of
one shape share the table. Times at other batch sizes and contexts: `load_fit.py`.
"""

import math
import platform
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import nn

from .. import fingerprint
from ..errors import CorruptDataError, InputError, MissingFileError
from ..progress import bar, say
from ..specdec.decoder import decode_rounds
from ..specdec.models import CausalModel
from ..specdec.proposers.base import Proposer
from ..specdec.requests import DecodeRun, Request, RoundSeconds, RoundTimer
from ..specdec.rules import choose_rule
from ..specdec.sampling import SamplingSettings
from ..storage import lock, read_json, write_json
from .draft_configs import DraftConfig, ProposerSpec
from .settings import ScoreSettings
from .speedup import Gain

_FEWEST_ROUNDS = 5


class Mode(NamedTuple):
    """One of the decoders that take turns."""

    config: DraftConfig
    proposer: Proposer | None
    rule: str
    nodes: int
    """Of a full draft."""

    @classmethod
    def of(cls, config: DraftConfig, spec: ProposerSpec, settings: ScoreSettings) -> "Mode":
        proposer = spec.make()
        return cls(config, proposer, timed_rule(spec, settings), proposer.most_nodes(config.levels))


PLAIN_MODE = Mode(DraftConfig(0), None, "greedy", 0)


class Parts(NamedTuple):
    """Seconds of a typical round."""

    draft: float
    verify: float
    rest: float
    rounds: int
    """Behind the times."""


def timed_rule(spec: ProposerSpec, settings: ScoreSettings) -> str:
    """The rule under which rounds are timed: the deciding one of the first sampling setting."""
    return choose_rule(settings.sampling[0], spec.proposer, settings.sampled_rules)


def most_tokens(rounds: int, levels: int) -> int:
    """Tokens of an answer that lasts so many rounds, none of them with its draft clipped."""
    return 1 + rounds * (levels + 1)


def by_turns(
    target: CausalModel,
    modes: Sequence[Mode],
    prompts: Sequence[list[int]],
    sampling: SamplingSettings,
    rounds: int,
) -> dict[DraftConfig, list[RoundSeconds]]:
    """Every mode decodes the prompts, all of them at once; they take turns after each round."""
    timers = {mode.config: RoundTimer(target.device) for mode in modes}
    turns = [decode_rounds(_run(target, mode, prompts, sampling, rounds, timers[mode.config])) for mode in modes]
    for _ in range(rounds + 1):  # the first turn reads the prompts
        for turn in turns:
            next(turn)
    return {config: timer.rounds for config, timer in timers.items()}


def _run(
    target: CausalModel,
    mode: Mode,
    prompts: Sequence[list[int]],
    sampling: SamplingSettings,
    rounds: int,
    timer: RoundTimer,
) -> DecodeRun:
    longest, levels = most_tokens(rounds, mode.config.levels), max(mode.config.levels, 1)
    requests = [Request(prompt, sampling, seed, longest) for seed, prompt in enumerate(prompts)]
    return DecodeRun(target, mode.proposer, requests, mode.rule, levels, batch_size=len(prompts), timer=timer)


def plain_seconds(plain: Sequence[RoundSeconds]) -> float:
    """Of a plain round: the lower quartile, which is of rounds that nothing else slowed down."""
    return lower_quartile([one.total for one in plain])


def typical(mode: Mode, rounds: Sequence[RoundSeconds], plain: Sequence[RoundSeconds], where: str = "") -> Parts:
    """Times of rounds with a full draft, each as a share of the plain round beside it.

    A proposer that seldom drafts that many is timed on what it does draft.
    """
    pairs, seconds = list(zip(rounds, plain)), plain_seconds(plain)
    full = [(one, beside) for one, beside in pairs if one.drafted == mode.nodes]
    if len(full) < min(_FEWEST_ROUNDS, len(pairs)):
        say(
            f"times of {mode.config}{where}: only {len(full)} full rounds; taken from all {len(pairs)} that were not "
            "warm-up"
        )
        full = pairs

    def middle(part: Callable[[RoundSeconds], float]) -> float:
        return seconds * statistics.median(part(one) / beside.total for one, beside in full)

    draft, verify = middle(lambda one: one.draft), middle(lambda one: one.verify)
    return Parts(draft, verify, middle(lambda one: one.rest), len(full))


def lower_quartile(values: Sequence[float]) -> float:
    """Interpolated; of one value, itself."""
    return statistics.quantiles(values, n=4, method="inclusive")[0] if len(values) > 1 else values[0]


COSTS_VERSION = 4  # of what is measured; a new number measures everything again
_CONFIG_NOISE = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")
_CONFIG_NOISE_ENDINGS = ("_token_id", "_dropout", "_range", "id2label", "label2id")


class CostKey(BaseModel):
    """What times depend on: everything but the weights' values."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int = COSTS_VERSION
    hardware: str
    """CPU model and threads, or the GPU's name."""
    software: str
    dtype: str
    target: dict[str, Any]
    draft: dict[str, Any]
    sampling: str
    plans: dict[str, dict[str, Any]]
    """By label: the rule, the levels, and what the tree's times depend on (null: a chain)."""

    @property
    def digest(self) -> str:
        """64 hex digits: same shape, same digest."""
        return fingerprint.of_json(self.model_dump(mode="json"))


class RoundCost(BaseModel):
    """Seconds of a round that drafts one way, at batch 1."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    draft_seconds: float = Field(ge=0)
    verify_seconds: float = Field(gt=0)
    rest_seconds: float = Field(ge=0)
    rounds: int = Field(ge=1)
    """Rounds behind the times."""

    @property
    def seconds(self) -> float:
        """The whole round."""
        return self.draft_seconds + self.verify_seconds + self.rest_seconds


class CostTable(BaseModel):
    """Measured times of one target and draft shape on one machine."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    key: CostKey
    plain_seconds: float = Field(gt=0)
    """Seconds of a token decoded without a draft."""
    plain_rounds: int = Field(ge=1)
    context_tokens: float = Field(ge=0)
    """Mean context length at which times were taken."""
    by_plan: dict[str, RoundCost]
    """By the config's label."""

    @model_validator(mode="after")
    def _covers_its_key(self) -> "CostTable":
        if sorted(self.by_plan) != sorted(self.key.plans):
            raise ValueError(f"by_plan {sorted(self.by_plan)}: must hold the key's plans {sorted(self.key.plans)}")
        return self

    def cost(self, config: DraftConfig) -> RoundCost:
        """The cost of a round that drafts so. Raises InputError for a config that was not measured."""
        if config.label not in self.by_plan or self.key.plans[config.label]["levels"] != config.levels:
            known = ", ".join(f"{label} ({shape['levels']} levels)" for label, shape in self.key.plans.items())
            raise InputError(f"{config} ({config.levels} levels): no times measured; there are times for {known}")
        return self.by_plan[config.label]

    def round_seconds(self, config: DraftConfig, drafted_share: float = 1.0) -> float:
        """A round's time. `drafted_share`: share of rounds that draft at all; the others cost a plain token."""
        full = self.cost(config).seconds
        return full if drafted_share == 1.0 else drafted_share * full + (1 - drafted_share) * self.plain_seconds

    def gain(self, config: DraftConfig, drafted_share: float = 1.0) -> Gain:
        """What drafting so makes of a tau: prompts are left out, so tau x plain / (draft + verify + rest)."""
        return Gain(0.0, self.round_seconds(config, drafted_share) / self.plain_seconds)

    @property
    def description(self) -> str:
        """Where the times were taken, in words."""
        return "times at batch 1"


def cost_key(
    target: CausalModel,
    draft: nn.Module | str,
    specs: Sequence[ProposerSpec],
    settings: ScoreSettings,
) -> CostKey:
    """The key of this pair of shapes on this machine, at the first of the sampling settings.

    `draft`: the module, or the name of a training-free proposer.
    """
    sampling = settings.sampling[0]
    plans = {
        config.label: {"rule": timed_rule(spec, settings), "levels": config.levels, "tree": spec.work}
        for spec in specs
        for config in spec.configs
    }
    return CostKey(
        hardware=hardware_name(target.device),
        software=f"torch {torch.__version__}",
        dtype=str(target.dtype).removeprefix("torch."),
        target=module_signature(target.model),
        draft={"class": draft} if isinstance(draft, str) else module_signature(draft) | _elsewhere(draft, target),
        sampling="greedy" if sampling.greedy else "sampled",
        plans=plans,
    )


def measure_costs(
    key: CostKey,
    target: CausalModel,
    specs: Sequence[ProposerSpec],
    prompts: Sequence[list[int]],
    settings: ScoreSettings,
) -> CostTable:
    """Decode the first prompts plainly and with each config of the key, by turns.

    Answers do not stop before `costs.rounds`: times do not depend on what is said.
    """
    if not prompts:
        raise InputError("no prompts: times are measured on at least one")
    sampling, asked = settings.sampling[0], settings.costs
    modes = [PLAIN_MODE, *(Mode.of(config, spec, settings) for spec in specs for config in spec.configs)]
    deepest = max(mode.config.levels for mode in modes)
    room = target.max_positions - most_tokens(asked.rounds, deepest)
    if room < 1:
        most = (target.max_positions - 2) // (deepest + 1)
        raise InputError(
            f"score.costs.rounds = {asked.rounds}: so many rounds of up to {deepest + 1} tokens do not fit the "
            f"target's context of {target.max_positions}; at most {most} do (more with smaller score.draft_tokens)"
        )
    prompts = [prompt[-room:] for prompt in prompts[: asked.prompts]]  # their ends: the answer needs the rest
    rounds: dict[DraftConfig, list[RoundSeconds]] = {mode.config: [] for mode in modes}
    with bar("measure times", len(prompts) + 1, "prompts") as advance:
        # Allocations, kernel choices and clocks settle before anything counts.
        by_turns(target, modes, prompts[:1], sampling, asked.rounds)
        advance(note="warm-up")
        for prompt in prompts:
            timed = by_turns(target, modes, [prompt], sampling, asked.rounds)
            for config, seconds in timed.items():
                rounds[config] += seconds[asked.warmup_rounds :]
            advance()
    plain = rounds[PLAIN_MODE.config]
    return CostTable(
        key=key,
        plain_seconds=plain_seconds(plain),
        plain_rounds=len(plain),
        context_tokens=statistics.fmean(map(len, prompts)) + asked.rounds / 2,
        by_plan={mode.config.label: _cost(typical(mode, rounds[mode.config], plain)) for mode in modes[1:]},
    )


def cached_costs(folder: Path, key: CostKey, measure: Callable[[], CostTable], wait_seconds: float = 0.0) -> CostTable:
    """The table of this key under `folder`; measured and kept where there is none. One process measures at a time."""
    path = folder / f"costs-{fingerprint.short(key.digest)}.json"
    with lock(folder / ".costs.lock", wait_seconds, "a process that measures times"):
        known = _read(path)
        if known is not None and known.key == key:
            return known
        measured = measure()
        if measured.key != key:
            raise InputError(f"{path}: times were measured for another shape than asked for")
        write_json(path, measured.model_dump(mode="json"))
        return measured


def hardware_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's model and the threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    return f"{_cpu_model()}, {torch.get_num_threads()} threads"


def module_signature(module: nn.Module) -> dict[str, Any]:
    """What decides a module's speed: its class, configuration, and the names, shapes and types of its tensors."""
    inner = getattr(module, "model", None)  # a wrapped transformers model keeps the configuration
    tensors = [
        (name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    ]
    return {
        "class": type(module).__name__,
        "config": _speed_fields(getattr(module, "config", None) or getattr(inner, "config", None)),
        "parameters": sum(math.prod(shape) for _, shape, _ in tensors),
        "tensors": fingerprint.of_json(sorted(tensors)),
    }


def _elsewhere(draft: nn.Module, target: CausalModel) -> dict[str, str]:
    """The draft's own hardware, where that is not the target's."""
    devices = {parameter.device for parameter in draft.parameters()} - {target.device}
    return {"hardware": hardware_name(devices.pop())} if devices else {}


def _speed_fields(config: Any) -> dict[str, Any]:
    if isinstance(config, BaseModel):
        fields = config.model_dump(mode="json")
    elif hasattr(config, "to_dict"):
        fields = config.to_dict()
    else:
        fields = dict(vars(config)) if config is not None else {}
    return {name: _plain(value) for name, value in sorted(fields.items()) if not _is_noise(name)}


def _is_noise(name: str) -> bool:
    return name.startswith("_") or name in _CONFIG_NOISE or name.endswith(_CONFIG_NOISE_ENDINGS)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items() if not _is_noise(str(name))}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | bool | int | None) else repr(value)


def _cost(parts: Parts) -> RoundCost:
    return RoundCost(
        draft_seconds=parts.draft, verify_seconds=parts.verify, rest_seconds=parts.rest, rounds=parts.rounds
    )


def _read(path: Path) -> CostTable | None:
    try:
        return CostTable.model_validate(read_json(path))
    except MissingFileError:
        return None
    except (CorruptDataError, ValidationError):
        say(f"{path}: not a readable table of times; measuring again")
        return None


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
