"""Repairs of a draft's files that no reader takes: each changes config or tensors in memory so that they may be read.

What is repaired is read by the readers of `formats`, out of a folder of its own: the draft's folder stays as it is.
"""

import math
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from ...errors import DraftforgeError, FormatError
from ...storage import read_object, write_json
from ..drafts.base import DraftModule
from ..engine_features import FLAGS
from ..formats import detect, read_draft
from ..formats.tensors import WEIGHTS_FILE, read_tensors
from ..models import CausalModel

_MOST_REPAIRS, _MOST_READ, _WIDEST = 3, 24, 1 << 20
_PREFIXES = ("module.", "model.", "draft_model.", "eagle_module.", "base_model.model.")
_LIST, _NESTED, _BLOCK = "eagle_aux_hidden_state_layer_ids", "eagle_config", "dflash_config"
_KINDS = {
    "midlayer.hidden_norm.weight": "LlamaForCausalLMEagle3",
    "layers.0.hidden_norm.weight": "LlamaForCausalLMEagle3",
    "hidden_norm.weight": "DFlashDraftModel",
    "fc.weight": "EagleLlamaForCausalLM",
    "lm_heads.0.weight": "MedusaModel",
}
_MISSING = re.compile(r"tensor (\S+) is missing")
_SHAPE = re.compile(r"tensor (\S+) has shape \(([\d, ]*)\), must be \(([\d, ]*)\)")
_UNKNOWN = re.compile(r"tensor (\S+) is not part of this format")
_DTYPE = re.compile(r"tensor (\S+) is (\S+), must be")
_INFINITE = re.compile(r"tensor (\S+) has values that are not finite")
_FIXED = re.compile(r": ([\w.]+) (\S+): must be (True|False|None|1|1\.0|silu|llama)(?:;|$)")


class Files(NamedTuple):
    """A draft's config and tensors, as they may be read."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    done: tuple[str, ...] = ()
    """What was repaired, in words."""

    def but(
        self, what: str, tensors: dict[str, Tensor] | None = None, fields: Mapping[str, Any] | None = None
    ) -> "Files":
        """The same with other tensors or fields of the config; `what`: in words."""
        config = {name: value for name, value in {**self.config, **(fields or {})}.items() if value is not None}
        return Files(config, self.tensors if tensors is None else tensors, (*self.done, what))


class Repaired(NamedTuple):
    """A draft that could be read, and what was repaired for it."""

    draft: DraftModule
    done: tuple[str, ...]


Repair = Callable[[Files, str, CausalModel], Iterator[Files]]
"""(files, the reader's refusal, target) -> files that may be read."""


def read_files(place: Path) -> Files | None:
    """Config and tensors of a draft's folder; None for a GGUF file, or a folder without either."""
    if place.is_file() or not (place / "config.json").is_file():
        return None
    return Files(read_object(place / "config.json"), dict(read_tensors(place).tensors))


def repaired(
    place: Path, refusal: str, target: CausalModel, note: Callable[[str], None] = lambda failure: None
) -> Iterator[Repaired]:
    """Drafts as they may have been meant, of a folder that the readers refuse: with one repair, then with more.

    `note` is told of each repair that fails at what the files hold.
    """
    files = read_files(place)
    waiting, tried, read = ([] if files is None else [(files, refusal)]), set[str](), 0
    while waiting and read < _MOST_READ:
        now, why = waiting.pop(0)
        for repair in REPAIRS:
            for other in _attempts(repair, now, why, target, note):
                key = repr((sorted(other.config.items(), key=str), sorted(map(id, other.tensors.values()))))
                if key in tried:
                    continue
                tried.add(key)
                try:
                    draft = _read(place, other, target)
                except DraftforgeError as error:
                    # Another refusal is another thing to repair; the same one means that this repaired nothing.
                    if str(error).split(": ", 1)[-1] != why.split(": ", 1)[-1] and len(other.done) < _MOST_REPAIRS:
                        waiting.append((other, str(error)))
                    continue
                except Exception as error:  # whatever a stranger's config and tensors make of a reader
                    note(f"repair fails: {other.done[-1]}: {_reason(error)}")
                    continue
                read += 1
                yield Repaired(draft, other.done)


def _attempts(
    repair: Repair, files: Files, why: str, target: CausalModel, note: Callable[[str], None]
) -> Iterator[Files]:
    """What a repair offers; one that fails at a stranger's files is none."""
    try:
        yield from repair(files, why, target)
    except Exception as error:
        note(f"repair fails: {repair.__name__.strip('_').replace('_', ' ')}: {_reason(error)}")


def _reason(error: Exception) -> str:
    return f"{type(error).__name__} {error}".partition("\n")[0][:200]


def _read(place: Path, files: Files, target: CausalModel) -> DraftModule:
    with tempfile.TemporaryDirectory(prefix="draftforge-doctor-") as folder:
        there = Path(folder)
        write_json(there / "config.json", files.config)
        tensors = {name: tensor.contiguous().clone() for name, tensor in files.tensors.items()}
        save_file(tensors, there / WEIGHTS_FILE)
        draft = read_draft(there, target.num_layers)
        draft.check_fits(target, place)
        return draft


# What each repair is for stands in its docstring; `why` is the reader's refusal.


def _object(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An object of a config; an empty one where there is none."""
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def _layer_lists(files: Files, why: str, target: CausalModel) -> Iterator[Files]:
    """Lists of captured layers that disagree, are out of order, or are more or fewer than fc reads."""
    config = files.config
    inner, block = _object(config, _NESTED), _object(config, _BLOCK)
    fc = files.tensors.get("fc.weight")
    if fc is None or fc.dim() != 2 or fc.shape[1] % target.hidden_size:
        return
    count, last = fc.shape[1] // target.hidden_size, target.num_layers
    named = [
        config.get(_LIST),
        inner.get(_LIST),
        config.get("aux_hidden_state_layer_ids"),
        config.get("target_layer_ids"),
        block.get("target_layer_ids"),
    ]
    lists = [tuple(one) for one in named if isinstance(one, list) and all(type(layer) is int for layer in one)]
    lists += [tuple(layer + by for layer in one) for by in (1, 2) for one in lists]
    lists += [tuple(sorted(set(one))) for one in lists] + ([(2, last // 2, last - 3)] if count == 3 else [])
    if "layer" not in why and "fc.weight" not in why and "ids" not in why:
        return
    for layers in dict.fromkeys(lists):
        if len(layers) != count or list(layers) != sorted(set(layers)) or not 1 <= layers[0] <= layers[-1] <= last:
            continue
        fields: dict[str, Any] = {}
        if "dflash" in str(config.get("architectures", "")).lower() or block:
            if "aux_hidden_state_layer_ids" in config:
                fields["aux_hidden_state_layer_ids"] = list(layers)
            else:
                fields[_BLOCK] = block | {"target_layer_ids": [layer - 1 for layer in layers]}
        else:
            fields[_LIST] = list(layers)
            if inner:
                fields[_NESTED] = inner | {_LIST: [layer - 1 for layer in layers]}
        fields |= {"num_aux_hidden_states": count} if count != 3 else {}
        yield files.but(f"captured layers {list(layers)}", fields=fields)


def _norm_flags(files: Files, why: str, target: CausalModel) -> Iterator[Files]:
    """Flags of norms that are absent, disagree, or do not fit the tensors."""
    inner = _object(files.config, _NESTED)
    if not any(word in why for word in (*FLAGS, "input_norm", "fc_norm")):
        return
    by_tensors = {
        "norm_before_fc": "input_norm.weight" in files.tensors,
        "fc_norm": any(name.startswith("fc_norm.") for name in files.tensors),
    }
    for residual in (False, True) if "norm_before_residual" in why else (files.config.get("norm_before_residual"),):
        for output in (False, True) if "norm_output" in why else (files.config.get("norm_output"),):
            flags = {**by_tensors, "norm_before_residual": residual, "norm_output": output}
            flags = {name: value for name, value in flags.items() if value is not None}
            said = ", ".join(
                f"{name} {str(value).lower()}" for name, value in flags.items() if value != files.config.get(name)
            )
            kept = {name: value for name, value in inner.items() if name not in FLAGS}
            nested = {_NESTED: kept | {n: v for n, v in flags.items() if n in inner}} if inner else {}
            yield files.but(said or "norm flags", fields={**flags, **nested})


def _vocabulary_map(files: Files, why: str, target: CausalModel) -> Iterator[Files]:
    """d2t that holds ids in place of offsets, does not fit t2d, or is missing."""
    d2t, t2d = files.tensors.get("d2t"), files.tensors.get("t2d")
    if "d2t" not in why and "t2d" not in why:
        return
    d2t, t2d = (one if one is not None and _is_map(one, target) else None for one in (d2t, t2d))
    rest = {name: tensor for name, tensor in files.tensors.items() if name != "t2d"}
    if d2t is not None:
        d2t = d2t.long()
        yield files.but("d2t holds ids, not offsets", rest | {"d2t": d2t - torch.arange(len(d2t))})
        yield files.but("d2t holds ids one too high", rest | {"d2t": d2t - 1})
    if t2d is not None:
        if t2d.dtype != torch.bool and int(t2d.max()) > 1:  # the draft id of each target id
            ids = (t2d >= 0).nonzero().flatten()
        else:
            ids = t2d.nonzero().flatten()
        yield files.but("d2t follows from t2d", rest | {"d2t": ids - torch.arange(len(ids))})
        if d2t is not None:
            yield files.but("t2d is not of this d2t, and is dropped", rest | {"d2t": d2t})


def _is_map(tensor: Tensor, target: CausalModel) -> bool:
    """Whether a tensor may be a vocabulary map: any other shape would be broadcast to its square."""
    whole = not tensor.is_floating_point() and not tensor.is_complex()
    return whole and tensor.dim() == 1 and 0 < len(tensor) <= target.embedding_rows


def _size(value: Any) -> int:
    """Size that a config names. Raises ValueError for what is none."""
    if type(value) is not int or not 0 < value <= _WIDEST:
        raise ValueError(f"{f'{value!r}'[:40]} is no size up to {_WIDEST:,}")
    return value


def _rope(files: Files, why: str, target: CausalModel) -> Iterator[Files]:
    """A partial rotary embedding, an unknown scaling, or a table of other frequencies."""
    if "rotary" not in why and "rope" not in why:
        return
    layer = files.config.get("transformer_layer_config")
    for field in ("rope_parameters", "rope_scaling", "partial_rotary_factor"):
        for place in ("", "transformer_layer_config"):
            holder = layer if place else files.config
            if not isinstance(holder, dict) or holder.get(field) is None:
                continue
            value = holder[field]
            if isinstance(value, dict):
                kept = {n: v for n, v in value.items() if n != "partial_rotary_factor"}
                plain = {
                    "rope_type": "default",
                    **({"rope_theta": value["rope_theta"]} if "rope_theta" in value else {}),
                }
                options: list[tuple[str, Any]] = [("partial_rotary_factor 1", kept), ("no rope scaling", plain)]
            else:
                options = [("partial_rotary_factor 1", 1)]
            for what, other in options:
                if other == value:
                    continue
                changed = {field: other}
                yield files.but(what, fields={place: {**holder, **changed}} if place else changed)
    tables = [name for name in files.tensors if name.endswith("inv_freq")]
    if tables:
        yield files.but(
            "the stored table of rotary frequencies is dropped",
            {name: tensor for name, tensor in files.tensors.items() if name not in tables},
        )


def _missing_tensor(files: Files, why: str, target: CausalModel) -> Iterator[Files]:
    """A tensor that is missing: the target's rows for a head, ones for a norm, zeros for a bias."""
    found = _MISSING.search(why)
    if found is None:
        return
    name, config = found[1], files.config
    layer = config.get("transformer_layer_config")
    config = {**config, **(layer if isinstance(layer, dict) else {})}
    head: Tensor = target.model.get_output_embeddings().weight.detach()
    size, like = config.get("hidden_size") or target.hidden_size, next(iter(files.tensors.values()))
    if name.startswith(("lm_head", "lm_heads")):
        d2t = files.tensors.get("d2t")
        if d2t is not None and not _is_map(d2t, target):
            return
        rows = (
            head if d2t is None else head[(d2t.long() + torch.arange(len(d2t))).clamp(0, len(head) - 1).to(head.device)]
        )
        if rows.shape[1] == size:
            rows = rows.cpu().to(_weight_dtype(files))
            yield files.but(f"{name} is missing: the target's head", files.tensors | {name: rows})
    elif name == "d2t":
        yield files.but(
            "d2t is missing: the first ids",
            files.tensors | {"d2t": torch.zeros(_size(config.get("draft_vocab_size")), dtype=torch.long)},
        )
    elif "norm" in name:
        width = size
        if name.rpartition(".")[0].endswith(("q_norm", "k_norm")):
            width = config.get("head_dim") or like.shape[-1]
        elif name.startswith(("input_norm", "fc_norm")):
            fc = files.tensors.get("fc.weight")
            width = 0 if fc is None else fc.shape[1] if name.startswith("input_norm") else target.hidden_size
        ones = torch.ones(_size(width), dtype=_weight_dtype(files))
        yield files.but(f"{name} is missing: ones", files.tensors | {name: ones})
    elif name.endswith(".bias"):
        weight = files.tensors.get(name.replace(".bias", ".weight"))
        if weight is not None:
            yield files.but(f"{name} is missing: zeros", files.tensors | {name: weight.new_zeros(len(weight))})


def _weight_dtype(files: Files) -> torch.dtype:
    return next((tensor.dtype for tensor in files.tensors.values() if tensor.is_floating_point()), torch.float32)


def _names(files: Files, why: str, target: CausalModel) -> Iterator[Files]:
    """Names of tensors with a prefix, or tensors that the format does not have."""
    for prefix in _PREFIXES:
        if any(name.startswith(prefix) for name in files.tensors):
            stripped = {name.removeprefix(prefix): tensor for name, tensor in files.tensors.items()}
            if len(stripped) == len(files.tensors):
                yield files.but(f"names of tensors without {prefix}", stripped)
    found = _UNKNOWN.search(why)
    if found is not None:
        name = found[1]
        yield files.but(
            f"tensor {name} is left out", {one: tensor for one, tensor in files.tensors.items() if one != name}
        )


def _shapes(files: Files, why: str, target: CausalModel) -> Iterator[Files]:
    """A tensor that is transposed, or sizes of the config that are not those of the tensors."""
    found = _SHAPE.search(why)
    if found is not None:
        name = found[1]
        shape, wanted = ([int(part) for part in text.split(",") if part.strip()] for text in found.groups()[1:])
        if len(shape) == 2 and shape[::-1] == wanted:
            kind = name.rpartition(".")[0].rpartition(".")[2]
            turned = {
                one: tensor.T.contiguous()
                if one == name or (f".{kind}." in one and list(tensor.shape) == shape)
                else tensor
                for one, tensor in files.tensors.items()
            }
            yield files.but(f"{name} transposed", turned)
    if found is None and "there are only" not in why and "must" not in why:
        return
    layer = files.config.get("transformer_layer_config")
    sizes = _sizes_of(files, layer if isinstance(layer, dict) else files.config, target)
    outer = {name: sizes.pop(name) for name in ("draft_vocab_size",) if name in sizes}
    said = ", ".join(f"{name} {value}" for name, value in {**sizes, **outer}.items())
    if isinstance(layer, dict) and (sizes or outer):
        yield files.but(said, fields={"transformer_layer_config": {**layer, **sizes}, **outer})
    elif sizes or outer:
        yield files.but(said, fields={**sizes, **outer})


def _sizes_of(files: Files, config: dict[str, Any], target: CausalModel) -> dict[str, int]:
    """Sizes by the tensors' shapes, where the config has others."""
    by_end = {name.rpartition("layers.")[2].partition(".")[2] or name: tensor for name, tensor in files.tensors.items()}
    by_end |= {name.removeprefix("midlayer."): tensor for name, tensor in files.tensors.items()}
    found: dict[str, int] = {}

    def note(field: str, name: str, axis: int) -> None:
        tensor = by_end.get(name)
        if tensor is not None and tensor.dim() > axis:
            found[field] = tensor.shape[axis]

    note("hidden_size", "self_attn.o_proj.weight", 0)
    note("intermediate_size", "mlp.gate_proj.weight", 0)
    note("draft_vocab_size", "lm_head.weight", 0)
    size = config.get("head_dim") or 0
    wide, narrow = by_end.get("self_attn.q_proj.weight"), by_end.get("self_attn.k_proj.weight")
    if (
        wide is not None
        and narrow is not None
        and not (size and wide.shape[0] % size == 0 and narrow.shape[0] % size == 0)
    ):
        size = math.gcd(wide.shape[0], narrow.shape[0])
        found["head_dim"] = size
    if wide is not None and narrow is not None and size:
        found |= {"num_attention_heads": wide.shape[0] // size, "num_key_value_heads": narrow.shape[0] // size}
    if config.get("vocab_size") != target.vocab_size and "vocab_size" in config:
        found["vocab_size"] = target.vocab_size
    return {name: value for name, value in found.items() if value != config.get(name, files.config.get(name))}


def _dtypes(files: Files, why: str, target: CausalModel) -> Iterator[Files]:
    """Quantised tensors: with the scales beside them, or as codes without."""
    if _DTYPE.search(why) is None:
        return
    weights, scaled, scales = dict(files.tensors), 0, set[str]()
    plain = _weight_dtype(files)
    plain = plain if plain in (torch.float32, torch.bfloat16, torch.float16) else torch.float32
    for name, tensor in files.tensors.items():
        if name in ("d2t", "t2d") or tensor.dtype in (torch.float32, torch.bfloat16, torch.float16):
            continue
        scale_name = next(
            (
                one
                for one in (f"{name}_scale", f"{name}.scale", name.replace(".weight", ".scales"), f"{name}_scale_inv")
                if one != name and one in files.tensors
            ),
            None,
        )
        value = tensor.to(torch.float32)
        if scale_name is not None:
            scale = files.tensors[scale_name].float()
            scale = scale if scale.dim() in (0, tensor.dim()) else scale[:, None]
            # A scale of more rows or columns than its weights would blow them up.
            pairs = zip(reversed(scale.shape), reversed(value.shape))
            if scale.dim() > value.dim() or any(size not in (1, rows) for size, rows in pairs):
                raise ValueError(f"{scale_name} has shape {tuple(scale.shape)}, {name} has {tuple(value.shape)}")
            value = value * scale
            scaled += 1
            scales.add(scale_name)
        weights[name] = value.to(plain)
    words = f"{scaled} tensors dequantised by their scales" if scaled else "quantised tensors read as plain weights"
    yield files.but(words, {name: tensor for name, tensor in weights.items() if name not in scales})


def _finite(files: Files, why: str, target: CausalModel) -> Iterator[Files]:
    """Values that are not finite, as 0."""
    found = _INFINITE.search(why)
    if found is not None:
        name = found[1]
        wrong = int((~torch.isfinite(files.tensors[name])).sum())
        yield files.but(
            f"{wrong} values of {name} that are not finite are 0",
            files.tensors | {name: torch.nan_to_num(files.tensors[name], 0.0, 0.0, 0.0)},
        )


def _fixed_fields(files: Files, why: str, target: CausalModel) -> Iterator[Files]:
    """A field of which readers know one value alone."""
    found = _FIXED.search(why)
    if found is None:
        return
    holder, _, name = found[1].rpartition(".")
    value = {"True": True, "False": False, "None": None, "1": 1, "1.0": 1.0}.get(found[3], found[3])
    for place in (holder,) if holder else ("", "transformer_layer_config"):
        inner = _object(files.config, place) if place else files.config
        if name in inner:
            fields = {place: {**inner, name: value}} if place else {name: value}
            yield files.but(f"{found[1]} {str(value).lower()}", fields=fields)


def _by_tensors(files: Files, why: str, target: CausalModel) -> Iterator[Files]:
    """Medusa's heads and biases, tied embeddings and architecture, by the names of the tensors."""
    config, names = files.config, set(files.tensors)
    if "medusa" in str(config.get("model_type", "")):
        bias = any(name.startswith("blocks.") and name.endswith(".bias") for name in names)
        numbers = [int(found[1]) for name in names if (found := re.match(r"lm_heads\.(\d{1,6})\.", name))]
        heads = 1 + max(numbers, default=-1)
        for field, value in {"medusa_fc_bias": bias, "num_heads": heads}.items():
            if value != config.get(field):
                yield files.but(f"{field} {str(value).lower()}", fields={field: value})
    if "lm_head.weight" in why and "keys" in why and not config.get("tie_word_embeddings"):
        yield files.but("tie_word_embeddings true", fields={"tie_word_embeddings": True})
    if "not a draft that can be read" in why:
        kind = next((kind for name, kind in _KINDS.items() if name in names), None)
        if kind is not None:
            yield files.but(f"architectures [{kind}]", fields={"architectures": [kind]})


REPAIRS: Sequence[Repair] = (
    _norm_flags,
    _layer_lists,
    _vocabulary_map,
    _rope,
    _missing_tensor,
    _names,
    _shapes,
    _dtypes,
    _finite,
    _fixed_fields,
    _by_tensors,
)


def refusal_of(place: Path, target: CausalModel) -> tuple[DraftModule | None, str]:
    """The draft, or None with the reader's refusal."""
    try:
        draft = read_draft(place, target.num_layers)
        draft.check_fits(target, place)
    except (FormatError, DraftforgeError) as error:
        return None, str(error)
    return draft, ""


def layout_name(place: Path) -> str:
    """Layout of a draft for people; "unknown" where nothing tells."""
    try:
        return detect(place)
    except DraftforgeError:
        return "unknown"
