"""The cost table: measured times of rounds and prompts of one target and draft shape on one machine.

A row is a round at a batch size, a K or tree, and a context. Where the recipe states no load, rows are at batch 1, one
a K or tree, and are looked up; over a load's grid they are fitted (`cost_model.py`). `cost_measurement.py` measures
them. All checkpoints of one shape share a table.
"""

import math
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from torch import nn

from .. import fingerprint
from ..errors import CorruptDataError, InputError, MissingFileError
from ..progress import say
from ..specdec.accept_rules import choose_rule
from ..specdec.models import CausalModel
from ..storage import lock, read_json, read_object, write_json
from .draft_configs import DraftConfig, ProposerSpec
from .settings import ScoreSettings
from .speedup import Gain

_LEAST, _MOST = 1e-12, 1_000_000_000
"""Seconds and counts that no machine measures less or more of: a fit of others has no end."""
_MOST_BATCH, _MOST_BYTES = 4096, 1 << 60
"""Batch size and bytes of a fit of others: each size up to the largest is looked at."""
COSTS_VERSION: Final = 6  # of what is measured; a new number measures everything again
PLAIN_WAY, CHAIN_WAY = "plain", "chain"
UNSTEADY = 0.1  # drift of an engine's times that is worth a word
_CONFIG_NOISE = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")
_CONFIG_NOISE_ENDINGS = ("_token_id", "_dropout", "_range", "id2label", "label2id")


class _Record(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class CostKey(_Record):
    """Key of a cost table: everything that times depend on, the weights' values left out."""

    version: int = COSTS_VERSION
    hardware: str
    """CPU model and threads, or the GPU's name."""
    engine: str = ""
    """Serving engine that was measured, with its version; empty: draftforge's own decoder."""
    software: str
    dtype: str
    target: dict[str, Any]
    draft: dict[str, Any]
    sampling: str
    plans: dict[str, dict[str, Any]]
    """By label of the K or tree: the accept rule, the levels, and the tree's shape as times depend on it (null: a
    chain)."""

    @property
    def digest(self) -> str:
        """SHA-256 of the key, 64 hex digits: equal keys have equal digests."""
        return fingerprint.of_json(self.model_dump(mode="json", exclude=None if self.engine else {"engine"}))


class RoundCost(_Record):
    """Seconds of one round by part: drafting, the target's verification, and the rest."""

    draft_seconds: float = Field(ge=0, le=_MOST)
    verify_seconds: float = Field(gt=_LEAST, le=_MOST)
    rest_seconds: float = Field(ge=0, le=_MOST)

    @property
    def seconds(self) -> float:
        """Seconds of the whole round."""
        return self.draft_seconds + self.verify_seconds + self.rest_seconds


class MeasuredRound(RoundCost):
    """Measured round, a row of the cost table."""

    way: str
    """plain, chain, or "tree NAME"."""
    batch_size: int = Field(ge=1, le=_MOST)
    levels: int = Field(ge=0, le=_MOST)
    tokens: int = Field(ge=1, le=_MOST)
    """Tokens of each sequence in the target's pass: drafted nodes and one more."""
    context_tokens: float = Field(ge=0, le=_MOST)
    rounds: int = Field(ge=1, le=_MOST)
    """Number of timed rounds behind the seconds."""

    @property
    def place(self) -> tuple[int, float]:
        """Grid place, batch size and context, at which the round was interleaved with a plain one."""
        return self.batch_size, self.context_tokens

    def apart_from(self, other: "MeasuredRound") -> float:
        """Difference of two rounds' seconds, over the lesser."""
        return max(self.seconds, other.seconds) / min(self.seconds, other.seconds) - 1

    def scaled(self, factor: float) -> "MeasuredRound":
        names = ("draft_seconds", "verify_seconds", "rest_seconds")
        return self.model_copy(update={name: factor * getattr(self, name) for name in names})


class MeasuredPrompt(_Record):
    """Measured prefill: the seconds of a prompt that was read alone."""

    tokens: int = Field(ge=1, le=_MOST)
    plain_seconds: float = Field(gt=_LEAST, le=_MOST)
    draft_seconds: float = Field(ge=0, le=_MOST)
    """Seconds that the draft adds to the target's."""


class ClosedLoop(_Record):
    """Measured closed-loop traffic of an engine: `batch_size` requests in flight, the next one sent when one ends."""

    batch_size: int = Field(ge=1, le=_MOST)
    levels: int = Field(ge=0, le=_MOST)
    """K; 0: without a draft."""
    prompt_tokens: int = Field(ge=1, le=_MOST)
    answer_tokens: int = Field(ge=2, le=_MOST)
    seconds: float = Field(gt=_LEAST, le=_MOST)
    """Of each of those in flight, for every prompt that was read: `batch_size` over prompts a second."""
    rounds: float = Field(gt=_LEAST, le=_MOST)
    """Of a request, for every prompt that was read."""
    drafted_share: float = Field(ge=0, le=_MOST)
    """Share of a request's rounds that draft."""
    prompts: int = Field(ge=1, le=_MOST)
    """Number of prompts behind the seconds."""


class CostTable(_Record):
    """Cost table: measured times of one target and draft shape on one machine. It answers for batch 1 itself."""

    key: CostKey
    """Hardware, software, precision and shapes."""
    points: list[MeasuredRound] = Field(min_length=1)
    prompt_points: list[MeasuredPrompt] = []
    """Prefill times of draftforge's own decoder; empty where times were measured at batch 1 only."""
    closed_loops: list[ClosedLoop] = []
    """Of an engine, at the load's lengths: they tell what prompts cost between the rounds of others."""
    draft_bytes: int = Field(default=0, ge=0, le=_MOST_BYTES)
    """Weights that the draft does not share with the target."""
    cache_bytes_per_token: float = Field(default=0.0, ge=0, le=_MOST_BYTES)
    """Bytes that the draft keeps of each token of each sequence: keys, values and buffers."""
    idle_as_full: bool = False
    """Whether a round that drafts nothing takes as long as a full one: on a GPU nothing waits to learn what was found
    to draft."""
    again: list[MeasuredRound] = []
    """Of an engine: the last place of each K, timed once more when its server had been measured everywhere."""
    measured: str = ""
    """Day on which an engine was measured, such as 2026-11-30; empty: not noted."""

    @model_validator(mode="after")
    def _has_plain_rounds(self) -> "CostTable":
        if all(point.way != PLAIN_WAY for point in self.points):
            raise ValueError("points: must hold a plain round")
        return self

    @model_validator(mode="after")
    def _has_loops_of_an_engine(self) -> "CostTable":
        looped = {(loop.levels, loop.batch_size) for loop in self.closed_loops}
        if self.key.engine and looped != {(point.levels, point.batch_size) for point in self.points}:
            raise ValueError(
                "closed_loops: an engine's times must have them at every K and batch size; prompts that were timed "
                "alone do not tell what they cost beside other requests"
            )
        return self

    @property
    def whose(self) -> str:
        """Whose times these are, in words: hardware and precision, after the engine where one was measured."""
        where = f"{self.key.hardware}, {self.key.dtype}"
        doubt = f"; timed again, its rounds differed by {self.drift:.0%}" if self.drift > UNSTEADY else ""
        return f"{self.key.engine} on {where}, measured {self.measured}{doubt}" if self.key.engine else where

    @property
    def drift(self) -> float:
        """Largest difference of an engine's rounds from the same ones `again`, over the lesser of both; 0: none."""
        first = {(point.levels, point.place): point for point in self.points}
        pairs = [(first.get((one.levels, one.place), one), one) for one in self.again]
        return max((one.apart_from(other) for one, other in pairs), default=0.0)

    @property
    def plain_seconds(self) -> float:
        """Seconds of a token decoded without a draft, at batch 1."""
        return self.cost(DraftConfig(0)).seconds

    def cost(self, config: DraftConfig) -> MeasuredRound:
        """Cost of a round at batch 1 with this K or tree. Raises InputError where it was not measured."""
        row = (way_of(config), config.levels, 1)
        for point in self.points:
            if (point.way, point.levels, point.batch_size) == row:
                return point
        known = ", ".join(f"{label} ({shape['levels']} levels)" for label, shape in self.key.plans.items())
        raise InputError(f"{config} ({config.levels} levels): no times measured; there are times for {known}")

    def round_seconds(self, config: DraftConfig, drafted_share: float = 1.0) -> float:
        """Mean seconds of a round. `drafted_share`: share of rounds that draft; the others cost a plain token, or as
        much (`idle_as_full`)."""
        full = self.cost(config).seconds
        if drafted_share == 1.0 or self.idle_as_full:
            return full
        return drafted_share * full + (1 - drafted_share) * self.plain_seconds

    def gain(self, config: DraftConfig, drafted_share: float = 1.0) -> Gain:
        """Gain of this K or tree at batch 1, without prompts: speed-up = tau x plain / (draft + verify + rest)."""
        return Gain(0.0, self.round_seconds(config, drafted_share) / self.plain_seconds)

    @property
    def description(self) -> str:
        """Words that say where the times hold."""
        return "times at batch 1"


def way_of(config: DraftConfig) -> str:
    """Way of drafting, the group of rounds that one fit describes: plain, chains of every K, or one tree."""
    if config.tree:
        return f"tree {config.tree}"
    return CHAIN_WAY if config.levels else PLAIN_WAY


def timed_rule(spec: ProposerSpec, settings: ScoreSettings) -> str:
    """The rule under which rounds are timed: the deciding one of the first sampling setting."""
    return choose_rule(settings.sampling[0], spec.proposer, settings.sampled_rules)


def cost_key(
    target: CausalModel,
    draft: nn.Module | str,
    specs: Sequence[ProposerSpec],
    settings: ScoreSettings,
) -> CostKey:
    """The key of this pair of shapes on this machine, at the first of the sampling settings.

    `draft`: the module, or the name of a training-free proposer.
    """
    # The plans name each K or tree with its rule: another rule or tree shape takes other times.
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


def cached_costs(path: Path, key: CostKey, measure: Callable[[], CostTable], wait_seconds: float = 0.0) -> CostTable:
    """Cost table of this key from a file; measured and written where the file has none.

    A lock lets one process measure in a folder at a time. Raises InputError where `measure` returns another key.
    """
    # The lock is held while measuring: two measurements at once would slow each other down.
    with lock(path.parent / ".costs.lock", wait_seconds, "a process that measures times"):
        # A table of the same key needs no new measurement.
        known = kept_table(path)
        if known is not None and known.key == key:
            return known
        # Measure, and write only what was asked for.
        measured = measure()
        if measured.key != key:
            raise InputError(f"{path}: times were measured for another shape than asked for")
        write_json(path, measured.model_dump(mode="json"))
        return measured


def kept_table(path: Path) -> CostTable | None:
    """The table in a file; None where there is none, or a damaged or outdated one, which is said."""
    try:
        return CostTable.model_validate(read_json(path))
    except MissingFileError:
        return None
    except CorruptDataError:
        why = "not a readable table of times"
    except ValidationError as error:
        why = error.errors()[0]["msg"]
    say(f"{path}: {why}; measuring again")
    return None


def write_tables(path: Path, tables: Iterable[CostTable]) -> None:
    """Write the cost tables of one machine to one file, which `score.costs.fit` of another machine may name."""
    write_json(path, {"fits": [table.model_dump(mode="json") for table in tables]})


def read_tables(path: Path) -> list[CostTable]:
    """Read what `write_tables` wrote. Raises MissingFileError, or CorruptDataError naming the file and the fault."""
    # Two checks: the file holds tables, and each has the present version and was measured over a grid.
    found = read_object(path).get("fits")
    if not isinstance(found, list) or not found:
        raise CorruptDataError(f"{path}: fits: must be a list of measured times")
    try:
        tables = TypeAdapter(list[CostTable]).validate_python(found)
    except ValidationError as error:
        first = error.errors()[0]
        raise CorruptDataError(f"{path}: fits.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if any(table.key.version != COSTS_VERSION or not (table.prompt_points or table.closed_loops) for table in tables):
        raise CorruptDataError(f"{path}: not times of version {COSTS_VERSION} that were measured over a load's grid")
    for table in tables:
        if (largest := max(point.batch_size for point in table.points)) > _MOST_BATCH:
            raise CorruptDataError(f"{path}: fits: batch_size {largest}: must be {_MOST_BATCH:,} at most")
        plain = {point.place for point in table.points if point.way == PLAIN_WAY}
        if alone := [point for point in table.points if point.place not in plain]:
            raise CorruptDataError(f"{path}: fits: no plain round beside the {alone[0].way} at {alone[0].place}")
    for key in (table.key for table in tables):
        shapes = all(type(shape.get("levels")) is int and "tree" in shape for shape in key.plans.values())
        if not shapes or not all(isinstance(side.get("config") or {}, dict) for side in (key.target, key.draft)):
            raise CorruptDataError(f"{path}: fits: a key's plans must have levels and a tree, its models a config")
    return tables


def table_for(key: CostKey, tables: Sequence[CostTable], path: Path) -> CostTable:
    """The table of this target and draft shape, on whatever hardware. Raises InputError where there is none."""
    why = [incompatibility(key, table.key) for table in tables]
    if None not in why:
        raise InputError(f"score.costs.fit {path}: holds no times of this target and draft: {'; '.join(map(str, why))}")
    return tables[why.index(None)]


def incompatibility(asked: CostKey, known: CostKey) -> str | None:
    """Reason why the times of `known` do not hold for `asked`, whatever the hardware and precision; None: they do."""
    # 1) Both models must have the same class, size and configuration. Library versions may add fields.
    for name in ("target", "draft"):
        one, other = getattr(asked, name), getattr(known, name)
        for field in ("class", "parameters"):
            if one.get(field) != other.get(field):
                return f"{name} {field} {other.get(field)} instead of {one.get(field)}"
        different = _differing(one.get("config") or {}, other.get("config") or {})
        if different:
            return f"{name} {different[0]} differs"
    # 2) Every K or tree that is asked for must be measured, or lie between measured ones.
    missing = sorted(label for label, config in asked.plans.items() if not _is_covered(label, config, known.plans))
    return f"no {missing[0]}" if missing else None


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Fields that both have and that differ: versions of libraries add fields of their own."""
    return sorted(name for name in one.keys() & other.keys() if one[name] != other[name])


def _is_covered(label: str, config: Mapping[str, Any], known: Mapping[str, Mapping[str, Any]]) -> bool:
    # Chains are fitted over K, so any K between the least and the largest measured one is covered.
    if config["tree"] is None and label.isdigit():  # a chain
        measured = [other["levels"] for name, other in known.items() if name.isdigit()]
        return bool(measured) and min(measured) <= config["levels"] <= max(measured)
    other = known.get(label)
    return other is not None and (other["levels"], other["tree"]) == (config["levels"], config["tree"])


def hardware_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's model and the threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    return f"{_cpu_model()}, {torch.get_num_threads()} threads"


def module_signature(module: nn.Module) -> dict[str, Any]:
    """Signature of what decides a module's speed: class, configuration, and names, shapes and types of its tensors."""
    # Names and shapes tell fused from separate projections, types tell quantised weights.
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
    """Hardware of the draft where it runs on another device than the target; empty otherwise."""
    devices = {parameter.device for parameter in draft.parameters()} - {target.device}
    return {"hardware": hardware_name(devices.pop())} if devices else {}


def _speed_fields(config: Any) -> dict[str, Any]:
    # Configurations of ours, of transformers, and plain objects.
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


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
