"""Context of a model under scaled rotary embeddings: the longest sequence that a server admits, as vLLM derives it from
the config (`_get_and_verify_max_len`).

| scaling | longest sequence |
|---|---|
| none, llama3 | the config's own length |
| linear, dynamic | that, times the factor |
| yarn | the original length, times the factor (vLLM up to 0.29), or the config's own (since 0.30); here the larger |
| vLLM's other names for yarn | the config's own length (since 0.30) |
| longrope | the config's own length; where no context is stated, the original one |

Configs that hold the scaled length, as those of most models do, give the same under every version. Where only the
original one stands there (512, times 4), vLLM serves 2,048 positions up to 0.29 and 512 since 0.30, unless its
`--hf-overrides` name the scaled length. A log does not tell which version served it, so a prompt that any of them
answered is asked; `target.context` states less.
"""

from collections.abc import Mapping
from typing import Any

from ..errors import FormatError

_LENGTHS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"),
    *("max_target_positions", "max_sequence_length", "max_seq_length", "seq_len"),
)
_SCALED_ALREADY = ("su", "longrope", "llama3", "deepseek_yarn", "deepseek_llama_scaling", "telechat3-yarn")
_ORIGINAL, _STATED = "original_max_position_embeddings", "model_max_length"
_LARGEST = 1 << 53  # up to which numbers of JSON are whole ones everywhere


def longest_context(config: Mapping[str, Any]) -> int | None:
    """Longest sequence that a config of a language model allows; None: it names no length.

    Raises FormatError for a length or a factor that is no number above 0.
    """
    known = {name: config[name] for name in _LENGTHS if isinstance(config.get(name), int)}
    name = _STATED if config.get(_STATED) else min(known, key=lambda one: known[one], default=None)
    longest = None if name is None else int(_above_zero(name, config[name]))
    if longest is None or "gemma3" in str(config.get("model_type")):  # whose length is the scaled one
        return longest
    # The factor is that of the last layer type which has one.
    factor, original = 1.0, longest
    for rope in _scalings(config):
        kind = _kind(rope)
        if kind not in _SCALED_ALREADY:
            factor = _above_zero("factor", rope.get("factor") or factor)
            original = int(_above_zero(_ORIGINAL, rope.get(_ORIGINAL) or original)) if kind == "yarn" else original
    return max(longest, int(_above_zero("factor", original * factor)))


def served_context(config: Mapping[str, Any]) -> int | None:
    """Longest sequence that a server admits which states no context of its own; None: the config names no length."""
    if any(_kind(rope) == "longrope" for rope in _scalings(config)) and config.get(_ORIGINAL):
        return int(_above_zero(_ORIGINAL, config[_ORIGINAL]))
    return longest_context(config)


def rotates(config: Mapping[str, Any]) -> bool:
    """Whether positions are rotary, so that a longer sequence than the config's can be computed at all."""
    return bool(_scalings(config)) or config.get("rope_theta") is not None


def _above_zero(name: str, value: Any) -> float:
    # A text or a list times a length would be made as many times; `True` is no number.
    if type(value) not in (int, float) or not 0 < value <= _LARGEST:
        raise FormatError(f"config.json: {name} {str(value)[:60]!r}: must be a number above 0, at most {_LARGEST:,}")
    number: float = value
    return number


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _scalings(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Rotary parameters of each kind of layer, or the only ones."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, Mapping):
        return []
    each = [value for value in rope.values() if isinstance(value, Mapping)]
    return each if len(each) == len(rope) else [rope]
