"""Serving policy: the chain length K that an engine's scheduler drafts with at each number of running requests.

| engine | its scheduler reads |
|---|---|
| vLLM 0.32, 0.33 | `num_speculative_tokens_per_batch_size` of the speculative config: [first, last, K] |
| SGLang 0.5.23 | `--speculative-adaptive-config`: `candidate_steps` from a batch size on |
| TensorRT-LLM | `draft_len_schedule` of the speculative config: K by batch size |

Above the largest measured batch size nothing is drafted. vLLM and SGLang keep the last K that they read, so K = 0 is
written out there.

SGLang picks among the candidates of a batch size by what was accepted of late; with one candidate it has no choice.
TensorRT-LLM 1.4 reads a key of the schedule as the last batch size of its K, older versions as the first one. Both ends
of every range are keys here, so both readings are the same policy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from ..errors import InputError
from .formats.layouts import NATIVE, Format

PolicyEngine = Literal["vllm", "sglang", "tensorrt-llm"]
POLICY_LAYOUTS: dict[PolicyEngine, Format] = {"vllm": NATIVE, "sglang": "sglang", "tensorrt-llm": "sglang"}
"""Format of the draft that each engine is given with a policy. TensorRT-LLM reads SGLang's files."""
_FAMILIES: Mapping[PolicyEngine, tuple[str, ...]] = {
    "vllm": ("small", "eagle", "eagle3", "dflash"),
    "sglang": ("eagle", "eagle3"),
    "tensorrt-llm": ("small", "eagle3", "dflash"),
}
"""Families whose K an engine changes from round to round; of Medusa's heads vLLM takes all, or stops."""
_FILES: Mapping[PolicyEngine, str] = {
    "vllm": "policy-vllm.yaml",
    "sglang": "policy-sglang.json",
    "tensorrt-llm": "policy-tensorrt-llm.yaml",
}
POLICY_FILES = frozenset(_FILES.values())
"""Names of the files that hold a policy, one an engine."""
assert set(POLICY_LAYOUTS) == set(get_args(PolicyEngine))


class DraftRange(NamedTuple):
    """Batch sizes from `first` to `last` that draft `draft_tokens` a round; 0: none."""

    first: int
    last: int
    draft_tokens: int


class AcceptanceGate(NamedTuple):
    """Acceptance below which an engine is to stop drafting."""

    rate: float
    """Accepted of drafted tokens from which drafting pays at some batch size of the policy."""
    rounds: int
    """Rounds whose mean rate is compared."""


@dataclass(frozen=True)
class ServingPolicy:
    """K by batch size, from 1 to the largest measured one. Raises InputError for what the engine does not take."""

    engine: PolicyEngine
    ranges: tuple[DraftRange, ...]
    """In order and without a gap; neighbours differ in K."""
    gate: AcceptanceGate | None = None
    """Only TensorRT-LLM has one."""
    captured_layers: tuple[int, ...] = ()
    """Layers whose output an EAGLE-3 head reads, counted from 0; TensorRT-LLM reads them in no file of a draft."""

    def __post_init__(self) -> None:
        starts = [1, *(one.last + 1 for one in self.ranges)]
        if [one.first for one in self.ranges] != starts[:-1] or any(one.last < one.first for one in self.ranges):
            raise InputError(f"policy {self.ranges}: ranges must follow one another from batch 1 on")
        if self.most_tokens < 1:
            raise InputError("policy: drafts at no batch size; serve without a draft")
        if self.engine == "tensorrt-llm" and self.ranges[0].draft_tokens != self.most_tokens:
            raise InputError(
                f"policy tensorrt-llm: K={self.ranges[0].draft_tokens} at batch 1; its schedule must begin with the "
                f"largest K, {self.most_tokens}"
            )

    @property
    def most_tokens(self) -> int:
        """Largest K, which sizes the engine's buffers."""
        return max((one.draft_tokens for one in self.ranges), default=0)

    @property
    def largest(self) -> int:
        """Largest batch size that was measured."""
        return self.ranges[-1].last

    @property
    def file(self) -> str:
        """Name of the policy's file in the draft's folder."""
        return _FILES[self.engine]

    @property
    def schedule(self) -> Any:
        """The ranges as the engine's scheduler reads them, and none above."""
        above = DraftRange(self.largest + 1, self.largest + 1, 0)
        ranges = [*self.ranges, *([above] if self.ranges[-1].draft_tokens else [])]
        match self.engine:
            case "vllm":
                return [list(one) for one in ranges]
            case "sglang":
                return {str(one.first): {"candidate_steps": [one.draft_tokens]} for one in ranges}
            case "tensorrt-llm":
                ends = {size: one.draft_tokens for one in self.ranges for size in (one.first, one.last)}
                return ends | {above.first: 0}


def known_policy_engine(name: str) -> PolicyEngine:
    """The engine of that name. Raises InputError listing those that take a policy."""
    if name not in POLICY_LAYOUTS:
        raise InputError(f"--policy {name}: must be one of {', '.join(POLICY_LAYOUTS)}")
    return name


def check_policy(engine: PolicyEngine, family: str, layout: Format | None) -> Format:
    """Format of the draft that goes with an engine's policy.

    Raises InputError where the engine does not change the K of the family, or reads another format than `layout`.
    """
    if family not in _FAMILIES[engine]:
        raise InputError(
            f"--policy {engine}: its scheduler does not change the draft length of a {family} draft; it does for "
            f"{', '.join(_FAMILIES[engine])}"
        )
    needed = POLICY_LAYOUTS[engine]
    if layout not in (None, needed):
        raise InputError(f"--policy {engine}: goes with --format {needed}, not {layout}")
    return needed
