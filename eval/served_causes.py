"""Known causes of served acceptance that is lower than replayed, by engine, layout and what the draft has.

Shapes of a loss, from acceptance by position: `all`, the first position already falls; `later`, the first is as it
should be and later ones fall; `any`, either.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from ..specdec.engine_features import FLAGS, ServingEngine, honours

Shape = Literal["all", "later", "any"]
_FIRST_HOLDS = 0.9
"""Share of the replayed acceptance from which the first position counts as unharmed."""


class KnownCause(NamedTuple):
    """A known cause: where it occurs, its sign and its cure."""

    engines: tuple[ServingEngine, ...]
    families: tuple[str, ...]
    shape: Shape
    fits: Callable[[Any, str], bool]
    """(config of the draft, layout of its files) -> whether this draft can have it."""
    cause: str
    cure: str


def shape_of(served: Sequence[float], ours: Sequence[float]) -> Shape:
    """Shape of a loss by acceptance of each position; `any` where the engine counts no positions."""
    if not served or not ours or ours[0] == 0:
        return "any"
    return "later" if served[0] >= _FIRST_HOLDS * ours[0] else "all"


def known_causes(engine: str, family: str, layout: str, config: Any, shape: Shape) -> list[KnownCause]:
    """Causes that fit an engine, a draft and the shape of its loss, the likeliest first."""
    fitting = [one for one in CAUSES if engine in one.engines and family in one.families and one.fits(config, layout)]
    return [one for one in fitting if "any" in (shape, one.shape) or one.shape == shape]


def _has(name: str) -> Callable[[Any, str], bool]:
    return lambda config, layout: bool(getattr(config, name, False))


def _always(config: Any, layout: str) -> bool:
    return True


_HEADS = ("eagle3", "peagle")
_SHAPES: dict[str, Shape] = {
    "fc_norm": "all",
    "norm_before_fc": "all",
    "norm_output": "later",
    "norm_before_residual": "all",
}
_ENGINES: tuple[ServingEngine, ...] = ("vllm", "sglang", "llama.cpp")

CAUSES: Sequence[KnownCause] = (
    KnownCause(
        ("sglang",),
        (*_HEADS, "dflash", "dspark"),
        "all",
        lambda config, layout: layout == "speculators",
        "SGLang does not understand a folder of the speculators format: names and layers are not found",
        "export it with --format sglang",
    ),
    *(
        KnownCause(
            tuple(engine for engine in _ENGINES if not honours(engine, flag)),
            _HEADS,
            _SHAPES[flag],
            _has(flag),
            f"the engine leaves {flag} out in silence",
            "serve with vLLM from 0.32 on, or train without it (serving_engines)",
        )
        for flag in FLAGS
    ),
    KnownCause(
        ("vllm",),
        _HEADS,
        "later",
        lambda config, layout: layout == "speculators" and config.norm_output,
        "vLLM before 0.32 does not pass norm_output on from the speculators format",
        "vLLM from 0.32 on, or export with --format vllm",
    ),
    KnownCause(
        ("vllm",),
        _HEADS,
        "all",
        lambda config, layout: layout != "speculators" and config.fc_norm,
        "vLLM of 0.23 takes fc_norm at the top level of the native layout alone",
        "look whether config.json has fc_norm at its top level; vLLM from 0.32 on",
    ),
    KnownCause(
        ("sglang",),
        _HEADS,
        "all",
        lambda config, layout: config.body == "qwen3" or config.attention_bias,
        "SGLang drops q_norm and k_norm, and the biases of query, key and value",
        "serve with vLLM, or train a head with a Llama body without biases",
    ),
    KnownCause(
        ("vllm", "sglang"),
        _HEADS,
        "all",
        _has("aux_layers"),
        "the engine captures other layers: it reads another key of the config (eagle_config's ids are one less; vLLM's "
        "newer runner reads the top-level list alone), or this target's class does not capture layers",
        "write num_aux_hidden_states, the top-level list and eagle_config's list; look for the layers in its log",
    ),
    KnownCause(
        ("vllm", "sglang", "llama.cpp"),
        (*_HEADS, "dflash", "dspark"),
        "any",
        lambda config, layout: getattr(config, "sliding_window", None) is not None,
        "the engine drafts without the draft's sliding window, so that long texts suffer",
        "vLLM from 0.32 on; SGLang: --speculative-draft-window-size",
    ),
    KnownCause(
        ("llama.cpp",),
        _HEADS,
        "all",
        lambda config, layout: len(config.aux_layers) != 3,
        "the converter writes layers 2, N/2 and N-3 whatever the head reads",
        "export it with --format gguf, which writes the head's own layers",
    ),
    KnownCause(
        ("vllm", "sglang"),
        ("dflash", "dspark"),
        "all",
        _always,
        "a block is read as anchor-first where it is fill-in, or the other way: sample_from_anchor is absent",
        "write sample_from_anchor at the top level of config.json",
    ),
    KnownCause(
        ("vllm",),
        ("dflash",),
        "any",
        lambda config, layout: layout == "speculators",
        "vLLM makes one causal flag of sliding_window_non_causal: false makes full layers causal",
        "write sliding_window_non_causal true for a draft whose layers see their whole block",
    ),
    KnownCause(
        ("sglang",),
        ("eagle", "eagle3", "dflash", "dspark"),
        "all",
        _always,
        "the engine shares the target's embeddings or head where the draft has its own",
        "train with the target's, or serve with vLLM",
    ),
    KnownCause(
        ("vllm",),
        ("medusa",),
        "any",
        _has("fc_bias"),
        "vLLM drops the biases of the blocks unless medusa_fc_bias is true",
        "write medusa_fc_bias true",
    ),
    KnownCause(
        _ENGINES,
        ("eagle", *_HEADS, "dflash", "dspark", "small"),
        "any",
        _always,
        "rope_theta or its scaling is lost in config.json (readers take 10000), or max_position_embeddings is 2048",
        "write rope_theta and rope_parameters alike, and the target's max_position_embeddings",
    ),
    KnownCause(
        _ENGINES,
        ("small", "eagle", *_HEADS, "dflash", "dspark", "medusa"),
        "any",
        _always,
        "requests are of another kind than the replayed ones: another template, thinking on, a temperature above 0",
        "give prompts of the traffic by --answers; compare the ids of one prompt in the engine's log",
    ),
)
"""Causes in order of likelihood."""
