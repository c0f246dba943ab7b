"""Llama models (independent drafts, and targets) as GGUF in float32, and what all GGUF drafts share: dimensions, rope
scaling, order of q and k rows, tokenizer keys."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from ....errors import FormatError
from ...drafts.layers import LinearRope, Llama3Rope, RopeScaling, YarnRope, frequencies
from ...loading import adds_bos, refused
from ..llama import rope_fields, validated
from ..tensors import Spec, check_count, check_tensors
from .file import Field, GgufFile, read_gguf, write_gguf

LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names of a decoder layer's tensors: GGUF's -> transformers'."""


def open_gguf(path: Path, architecture: str) -> GgufFile:
    """Contents of a GGUF file. Raises FormatError where it is of another architecture."""
    content = read_gguf(path)
    if content.architecture != architecture:
        raise FormatError(f"{path}: general.architecture {content.architecture!r}: must be {architecture!r}")
    return content


def dimensions(arch: str, config: Any, layers: int, theta: float) -> dict[str, Field]:
    """GGUF keys of a model's dimensions, the same for every architecture."""
    # File type 0: all weights are float32.
    return {
        "general.name": arch,
        "general.file_type": 0,
        f"{arch}.block_count": layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.attention.value_length": config.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{arch}.rope.dimension_count": config.head_dim,
        f"{arch}.rope.freq_base": float(theta),
        f"{arch}.vocab_size": config.vocab_size,
    }


def read_dimensions(content: GgufFile, path: Path) -> dict[str, Any]:
    """Llama config fields from GGUF keys, with llama.cpp's defaults for absent ones.

    Raises FormatError naming the key.
    """

    def read(key: str, kind: type = int, default: Any = None) -> Any:
        return content.get(path, f"{content.architecture}.{key}", kind, default)

    # Keys may say what we compute, or be absent.
    hidden, heads = read("embedding_length"), read("attention.head_count")
    size = read("attention.key_length", default=hidden // max(heads, 1))
    tokens = content.fields.get("tokenizer.ggml.tokens")
    fixed = {"attention.value_length": size, "rope.dimension_count": size}
    for key, wanted in fixed.items():
        found = content.fields.get(f"{content.architecture}.{key}", wanted)
        if found != wanted:
            raise FormatError(f"{path}: {content.architecture}.{key} {found}: must be {wanted}")

    # Key-value heads, rope base and vocabulary have defaults.
    return {
        "max_position_embeddings": read("context_length"),
        "hidden_size": hidden,
        "intermediate_size": read("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": read("attention.head_count_kv", default=heads),
        "head_dim": size,
        "rms_norm_eps": read("attention.layer_norm_rms_epsilon", float),
        "rope_theta": read("rope.freq_base", float, 10000.0),
        "vocab_size": read("vocab_size", default=len(tokens) if isinstance(tokens, list) else None),
    }


def shapes_of(tensors: dict[str, Tensor]) -> dict[str, Spec]:
    """Specs that given tensors meet."""
    return {name: Spec(tuple(tensor.shape)) for name, tensor in tensors.items()}


def plain_weights(path: Path, tensors: dict[str, Tensor], expected: dict[str, Spec]) -> dict[str, Tensor]:
    """Tensors checked against specs, on the CPU, in float32 (ids stay integers)."""
    check_tensors(path, tensors, expected)
    floats = {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}
    return {name: tensor.cpu().contiguous() for name, tensor in floats.items()}


def to_ggml(path: Path, tensors: dict[str, Tensor], expected: dict[str, Spec], config: Any) -> dict[str, Tensor]:
    """Tensors checked, in float32 (ids stay integers), q and k with rows in llama.cpp's order."""
    stored = plain_weights(path, tensors, expected)
    return {
        name: _permute(name, tensor, config, (2, config.head_dim // 2)).contiguous() for name, tensor in stored.items()
    }


def from_ggml(path: Path, tensors: dict[str, Tensor], expected: dict[str, Spec], config: Any) -> dict[str, Tensor]:
    """Tensors checked, q and k with rows in transformers' order."""
    check_tensors(path, tensors, expected)
    return {name: _permute(name, tensor, config, (config.head_dim // 2, 2)) for name, tensor in tensors.items()}


def _permute(name: str, weight: Tensor, config: Any, split: tuple[int, int]) -> Tensor:
    """Permute q and k rows within each head: rotary halves (`split` (2, D / 2)) to neighbouring pairs, or back
    ((D / 2, 2)). Other tensors are returned unchanged."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2:][0])
    if heads is None:
        return weight
    return weight.reshape(heads, *split, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


ROPE_FACTORS = "rope_freqs.weight"
_USUAL_RAMP = (32.0, 1.0)
_LOW, _HIGH = 1.0, 4.0  # low_freq_factor and high_freq_factor of every Llama 3


def scaling_fields(arch: str, scaling: RopeScaling | None) -> dict[str, Field]:
    """GGUF keys of a rope scaling. Raises FormatError for one that llama.cpp would compute differently."""
    # Llama 3's scaling goes as a tensor (`factor_tensors`); a YaRN ramp other than the usual has no keys.
    match scaling:
        case None | Llama3Rope():
            return {}
        case LinearRope(factor=factor):
            return {f"{arch}.rope.scaling.type": "linear", f"{arch}.rope.scaling.factor": factor}
        case YarnRope(plain=False) as yarn:
            raise FormatError(
                f"format gguf: rope_scaling yarn: attention is scaled by {yarn.stretch:g}, or its ramp not truncated: "
                "llama.cpp has no key for it, vLLM computes it"
            )
        case YarnRope(factor=factor) as yarn if (yarn.beta_fast, yarn.beta_slow) == _USUAL_RAMP:
            return {
                f"{arch}.rope.scaling.type": "yarn",
                f"{arch}.rope.scaling.factor": factor,
                f"{arch}.rope.scaling.original_context_length": yarn.original_max_position_embeddings,
            }
        case YarnRope() as yarn:
            ramp = f"beta_fast {yarn.beta_fast:g} and beta_slow {yarn.beta_slow:g}"
            raise FormatError(f"format gguf: rope_scaling yarn: {ramp}: llama.cpp computes 32 and 1 only")
    raise FormatError(f"format gguf: rope_scaling {scaling.rope_type}: cannot be written")


def factor_tensors(theta: float, head_dim: int, scaling: RopeScaling | None) -> dict[str, Tensor]:
    """Rope factors tensor [F], by which llama.cpp divides each frequency: for Llama 3's scaling, which has no keys.

    Raises FormatError for factors that would not tell a reader which scaling they came from.
    """
    if not isinstance(scaling, Llama3Rope):
        return {}
    factors_F = _factors(theta, head_dim, scaling)
    _llama3(factors_F, Path("format gguf"), theta, head_dim)
    return {ROPE_FACTORS: factors_F}


def take_scaling(
    content: GgufFile, tensors: dict[str, Tensor], path: Path, theta: float, head_dim: int
) -> dict[str, Any] | None:
    """`rope_scaling` of a GGUF file; rope factors are removed from `tensors`. Raises FormatError for an unknown one."""
    # Factors without a type of scaling are Llama 3's.
    factors_F = tensors.pop(ROPE_FACTORS, None)
    keys = f"{content.architecture}.rope.scaling"
    kind = content.fields.get(f"{keys}.type", "none")
    if factors_F is not None and kind == "none":
        check_tensors(path, {ROPE_FACTORS: factors_F}, {ROPE_FACTORS: Spec((head_dim // 2,))})
        return _llama3(factors_F, path, theta, head_dim)

    # Otherwise keys alone say it.
    if kind == "none":
        return None
    if kind not in ("linear", "yarn") or factors_F is not None:
        also = f" beside {ROPE_FACTORS}" if factors_F is not None else ""
        raise FormatError(f"{path}: {keys}.type {kind}{also}: must be none, linear or yarn, or none beside the factors")

    # Linear needs the factor only, YaRN the original context too.
    scaling = {"rope_type": kind, "factor": content.get(path, f"{keys}.factor", float)}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = content.get(path, f"{keys}.original_context_length", int)
    return scaling


def _llama3(factors_F: Tensor, path: Path, theta: float, head_dim: int) -> dict[str, Any] | None:
    """Llama 3 rope scaling, solved from the factors [F] that a file holds; None: all factors are 1.

    Wavelengths above `original` are stretched by the largest factor, those below original / 4 are left; in between
    1 / factor goes linearly in original / wavelength, from 1 to 4.
    """
    # Factors of 1 scale nothing.
    if _close(factors_F, 1.0).all():
        return None

    other = FormatError(f"{path}: tensor {ROPE_FACTORS}: is not a rope scaling in the way of Llama 3")

    # The largest factor is `factor`: low frequencies are interpolated in full.
    most = float(f"{float(factors_F.max()):.6g}")
    if not most > 1:
        raise other
    wavelength_F = 2 * math.pi / frequencies(theta, head_dim, None).double()

    # Pairs on the ramp: solve original = wavelength x (1 + share x (4 - 1)) for each, and take the median.
    between_F = ~_close(factors_F, 1.0) & ~_close(factors_F, most)
    share_F = (1 / factors_F.double() - 1 / most) / (1 - 1 / most)
    found = ((_LOW + share_F * (_HIGH - _LOW)) * wavelength_F)[between_F]
    original = float(found.median()) if len(found) else float(wavelength_F[_close(factors_F, most)].min()) - 0.5

    # Without pairs on the ramp: the shortest wavelength that is interpolated in full bounds it.
    if math.isfinite(original) and original >= 1:
        scaling = {
            "rope_type": "llama3",
            "factor": most,
            "low_freq_factor": _LOW,
            "high_freq_factor": _HIGH,
            "original_max_position_embeddings": round(original),
        }
        # Accept the fields only if they give the same factors again.
        again_F = _factors(theta, head_dim, Llama3Rope.model_validate(scaling))
        if torch.allclose(again_F, factors_F, rtol=1e-5):
            return scaling
    raise other


def _close(factors_F: Tensor, value: float) -> Tensor:
    return torch.isclose(factors_F, torch.tensor(value), rtol=1e-5)


def _factors(theta: float, head_dim: int, scaling: Llama3Rope) -> Tensor:
    return frequencies(theta, head_dim, None) / frequencies(theta, head_dim, scaling)


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"
_REST = "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
_SPLITS = {f"{_CONTRACTIONS}\\p{{N}}{{1,3}}{_REST}": "llama-bpe", f"{_CONTRACTIONS}\\p{{N}}{_REST}": "qwen2"}
_KNOWN = "GPT-2's, SmolLM's, Llama 3's and Qwen 2's"


def vocabulary_fields(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> dict[str, Field]:
    """GGUF's `tokenizer.*` keys of a model with `vocab_size` rows. Raises FormatError unless it is a byte-level BPE."""
    # The tokenizer's rules decide whether llama.cpp cuts and merges text in the same way.
    rules = _rules(tokenizer)
    tokens, kinds = _tokens(tokenizer, vocab_size)
    fields: dict[str, Field] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre_tokenizer_name(rules),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in rules["model"]["merges"]],
        "tokenizer.ggml.add_bos_token": adds_bos(tokenizer),
    }

    # What a tokenizer may lack.
    for name, token in (("bos", tokenizer.bos_token_id), ("eos", tokenizer.eos_token_id)):
        if token is not None:
            fields[f"tokenizer.ggml.{name}_token_id"] = token
    if isinstance(tokenizer.chat_template, str):
        fields["tokenizer.chat_template"] = tokenizer.chat_template
    return fields


def pre_tokenizer_name(rules: dict[str, Any]) -> str:
    """llama.cpp's name of a pre-tokenizer, which cuts text into words. `rules`: tokenizer.json. Raises FormatError."""
    # One step, or a sequence of them.
    steps = rules["pre_tokenizer"] or {}
    steps = steps.get("pretokenizers", [steps])
    kinds = [step.get("type") for step in steps]
    last_splits = steps[-1].get("use_regex", True)
    if steps[-1].get("add_prefix_space"):
        raise FormatError("tokenizer: its pre-tokenizer adds a space before the text: llama.cpp would not")

    # llama.cpp knows pre-tokenizers by name only: match the steps against those that it implements.
    if kinds == ["ByteLevel"] and last_splits:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and last_splits and steps[0].get("individual_digits"):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not last_splits and steps[0].get("behavior") == "Isolated":
        name = _SPLITS.get(steps[0]["pattern"].get("Regex", ""))
        # llama.cpp looks whole words up before it merges for the first of them, and never for the other.
        if name is not None and bool(rules["model"].get("ignore_merges")) == (name == "llama-bpe"):
            return name
    raise FormatError(f"tokenizer: its pre-tokenizer {kinds} is none of {_KNOWN}: llama.cpp would read other tokens")


def _rules(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    # Slow tokenizers have no tokenizer.json.
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules: dict[str, Any] = json.loads(backend.to_str()) if backend is not None else {}
    model = rules.get("model") or {}
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        kind = f"{model['type']} with byte fallback" if model.get("byte_fallback") else model.get("type", "slow")
        raise FormatError(f"tokenizer: {kind}: only byte-level BPE can be written as GGUF")

    # Text must reach the BPE unchanged.
    normalizer = (rules.get("normalizer") or {}).get("type")
    if normalizer not in (None, "NFC"):  # llama.cpp has no NFC; Qwen's converted files live with that
        raise FormatError(f"tokenizer: normalizer {normalizer}: llama.cpp has none")
    return rules


def _tokens(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> tuple[list[str], list[int]]:
    """Token texts by id, and their GGUF token types; rows of the model beyond the tokenizer's are unused."""
    # Every id of the tokenizer must have a row in the model.
    texts = {index: text for text, index in tokenizer.get_vocab().items()}
    if max(texts) >= vocab_size:
        raise FormatError(f"tokenizer: has id {max(texts)}: the model has {vocab_size} rows")

    # Special tokens are control tokens, other added ones are user-defined.
    kinds = [gguf.TokenType.NORMAL if index in texts else gguf.TokenType.UNUSED for index in range(vocab_size)]
    for index, token in tokenizer.added_tokens_decoder.items():
        kinds[index] = gguf.TokenType.CONTROL if token.special else gguf.TokenType.USER_DEFINED
    return [texts.get(index, f"[PAD{index}]") for index in range(vocab_size)], [int(kind) for kind in kinds]


_ROPES = ("default", "llama3")


def write_llama(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: Path, hints: Mapping[str, Field] | None = None
) -> None:
    """Write a Llama model: an independent draft, or a target. Raises FormatError naming what is not plain Llama."""
    # Only what llama.cpp computes in the same way.
    if not isinstance(model, LlamaForCausalLM):
        raise FormatError(f"format gguf: {type(model).__name__}: only LlamaForCausalLM can be written")
    config, weights = model.config, model.state_dict()
    _check_llama(config)

    # Tensors under GGUF's names, with Llama 3's factors.
    names = _names(config)
    tensors = {name: weights[source] for name, source in names.items()}
    theta, scaling = _rope(config)
    tensors |= factor_tensors(theta, config.head_dim, scaling)

    # Keys: dimensions and the tokenizer.
    fields = dimensions("llama", config, config.num_hidden_layers, theta)
    fields |= {**vocabulary_fields(tokenizer, config.vocab_size), **(hints or {})}
    write_gguf(path, GgufFile("llama", fields, to_ggml(path, tensors, shapes_of(tensors), config)))


def read_llama(path: Path) -> LlamaForCausalLM:
    """Load a plain Llama from GGUF, in float32. Raises FormatError naming the key or tensor that is wrong."""
    # Without an output tensor the head is tied to the embeddings.
    content = open_gguf(path, "llama")
    tensors = dict(content.tensors)
    tied = "output.weight" not in tensors
    fields = read_dimensions(content, path)

    # Rope: plain or Llama 3's, the only ones that we write for a Llama.
    theta = fields.pop("rope_theta")
    scaling = take_scaling(content, tensors, path, theta, fields["head_dim"]) or {"rope_type": "default"}
    if scaling["rope_type"] not in _ROPES:
        raise FormatError(f"{path}: rope scaling {scaling['rope_type']}: must be {' or '.join(_ROPES)} in a Llama")

    # The number of layers is checked before anything is made for each.
    layers = content.get(path, "llama.block_count", int)
    check_count(path, "llama.block_count", layers, tensors)
    with refused(str(path)):  # transformers checks sizes against each other in ways of its own
        config = LlamaConfig(
            rope_parameters={"rope_theta": theta, **scaling},
            **fields,
            num_hidden_layers=layers,
            bos_token_id=content.fields.get("tokenizer.ggml.bos_token_id"),
            eos_token_id=content.fields.get("tokenizer.ggml.eos_token_id"),
            tie_word_embeddings=tied,
        )

        # Expected shapes from a model without storage.
        names = _names(config)
        with torch.device("meta"):
            specs = shapes_of(LlamaForCausalLM(config).state_dict())
    tensors = from_ggml(path, tensors, {name: specs[source] for name, source in names.items()}, config)

    # Load; tied weights have one tensor for two names.
    model = LlamaForCausalLM(config)
    model.load_state_dict({names[name]: tensor for name, tensor in tensors.items()}, strict=not tied)
    model.tie_weights()
    return model.eval()


def _check_llama(config: LlamaConfig) -> None:
    rope = config.rope_parameters["rope_type"]
    if rope not in _ROPES:
        raise FormatError(f"format gguf: rope_type {rope}: only {' and '.join(_ROPES)} can be written")
    if config.hidden_act != "silu":
        raise FormatError(f"format gguf: hidden_act {config.hidden_act}: must be silu, which llama.cpp computes")
    for name in ("attention_bias", "mlp_bias"):
        if getattr(config, name):
            raise FormatError(f"format gguf: {name} true: only models without biases can be written")


def _rope(config: LlamaConfig) -> tuple[float, Llama3Rope | None]:
    """Rotary base and scaling of a transformers config."""
    fields = rope_fields(Path("format gguf"), {"rope_parameters": config.rope_parameters})
    scaling = fields["rope_scaling"]
    return float(fields["rope_theta"]), scaling and validated(Llama3Rope, Path("format gguf"), scaling)


def _names(config: LlamaConfig) -> dict[str, str]:
    """Names of every tensor: GGUF's -> transformers'."""
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if not config.tie_word_embeddings:
        names["output.weight"] = "lm_head.weight"
    for layer in range(config.num_hidden_layers):
        for ours, name in LAYER.items():
            names[f"blk.{layer}.{ours}.weight"] = f"model.layers.{layer}.{name}.weight"
    return names
