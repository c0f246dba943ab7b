"""Which serving engine computes which feature of an EAGLE-3 head: vLLM 0.32 and 0.33, SGLang 0.5.23, llama.cpp b11549.

An engine either refuses a feature that it lacks, or drops it in silence, and acceptance falls.
"""

from collections.abc import Iterable, Mapping
from typing import Literal, Protocol

ServingEngine = Literal["vllm", "sglang", "llama.cpp"]
ENGINES: tuple[ServingEngine, ...] = ("vllm", "sglang", "llama.cpp")
NAMES: Mapping[ServingEngine, str] = {"vllm": "vLLM", "sglang": "SGLang", "llama.cpp": "llama.cpp"}

FLAGS = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")
"""Norms of an EAGLE-3 head, by the names of its config."""
_HONOURED: Mapping[str, tuple[ServingEngine, ...]] = {
    "fc_norm": ("vllm", "sglang"),
    "norm_before_fc": ("vllm", "sglang", "llama.cpp"),
    "norm_output": ("vllm", "sglang"),
    "norm_before_residual": ("vllm", "llama.cpp"),
    "body": ("vllm",),
    "layers": ("vllm", "sglang"),
    "sliding_window": ("vllm",),
    "attention_bias": ("vllm",),
    "fc_bias": ("sglang",),
    "aux_layers": ("vllm", "sglang"),
}
"""Engines that compute each feature as it was trained. aux_layers: another number of them than three, none included."""


class Head(Protocol):
    """Fields of an EAGLE-3 head's config that decide which engines compute it."""

    @property
    def aux_layers(self) -> tuple[int, ...]: ...
    @property
    def body(self) -> str: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def windows(self) -> list[int | None]: ...
    @property
    def attention_bias(self) -> bool: ...
    @property
    def fc_bias(self) -> bool: ...


def honours(engine: ServingEngine, feature: str) -> bool:
    """Whether an engine computes a feature, one of the names above."""
    return engine in _HONOURED[feature]


def best_flags(engines: Iterable[ServingEngine]) -> dict[str, bool]:
    """The norms that a fresh head has: all that each of the engines computes; of the two norms before fc, one."""
    wanted = list(engines)
    flags = {flag: all(honours(engine, flag) for engine in wanted) for flag in FLAGS}
    return flags | {"norm_before_fc": flags["norm_before_fc"] and not flags["fc_norm"]}


def not_honoured(engine: ServingEngine, head: Head) -> str | None:
    """The first feature of a head that an engine does not compute, as `name value`; None: it computes all."""
    has = {flag: (getattr(head, flag), getattr(head, flag)) for flag in (*FLAGS, "attention_bias", "fc_bias")} | {
        "body": (head.body != "llama", head.body),
        "layers": (head.num_hidden_layers > 1, head.num_hidden_layers),
        "sliding_window": (any(head.windows), next(filter(None, head.windows), None)),
        "aux_layers": (len(head.aux_layers) != 3, list(head.aux_layers)),
    }
    odd = [f"{name} {value}" for name, (there, value) in has.items() if there and not honours(engine, name)]
    return odd[0] if odd else None
