"""Plant faults into copies of healthy drafts, let `draftforge doctor` examine each, and print what it names.

    python scripts/plant_faults.py OUT --target TARGET --draft HEALTHY [--draft HEALTHY ...] [--answers FILE]

Each fault is one that trainers, converters and configs make: the files of a copy are changed, in the layouts that the
draft's family has, as far as the draft has what the fault needs. A table goes to standard output, `faults.json` to OUT:
the fault, tau of the healthy draft, of the copy and of the corrected one, and what was named.
"""

import argparse
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftforge.errors import DraftforgeError
from draftforge.eval.diagnosis import ReplayBench
from draftforge.pipeline.cli_options import DraftDoctorOptions
from draftforge.pipeline.doctor_report import Diagnosis
from draftforge.pipeline.draft_doctor import Examination
from draftforge.progress import say
from draftforge.specdec.diagnosis.reading import shared_copy
from draftforge.specdec.formats import Format, Verifier, read_draft, write_draft
from draftforge.specdec.formats.layouts import FAMILIES
from draftforge.specdec.target_settings import TargetSettings
from draftforge.specdec.targets import Target

Json = dict[str, Any]
Tensors = dict[str, Tensor]
Plant = Callable[[Json, Tensors], None]
"""Changes a draft's config and tensors in place; raises LookupError where the draft does not have what it needs."""
IDS, NESTED, LAYER = "eagle_aux_hidden_state_layer_ids", "eagle_config", "transformer_layer_config"
SEED = 7


class Fault(NamedTuple):
    """A fault, the families and formats that it is planted in, and the hypotheses any of which names it."""

    name: str
    families: tuple[str, ...]
    formats: tuple[Format, ...]
    names: tuple[str, ...]
    plant: Plant


def moved(by: int) -> Plant:
    """Captured layers `by` off, under every key that names them."""

    def plant(config: Json, tensors: Tensors) -> None:
        block = config.get("dflash_config", {})
        lists = [
            (config, IDS),
            (config.get(NESTED, {}), IDS),
            (block, "target_layer_ids"),
            (config, "aux_hidden_state_layer_ids"),
        ]
        found = [(holder, key) for holder, key in lists if holder.get(key)]
        if not found or any(
            min(holder[key]) + by < (0 if holder in (block, config.get(NESTED)) else 1) for holder, key in found
        ):
            raise LookupError
        for holder, key in found:
            holder[key] = [layer + by for layer in holder[key]]

    return plant


def flipped(flag: str) -> Plant:
    def plant(config: Json, tensors: Tensors) -> None:
        config[flag] = not config.get(flag, False)

    return plant


def unsaid(flag: str) -> Plant:
    """A flag that the config does not name."""

    def plant(config: Json, tensors: Tensors) -> None:
        del config[flag]

    return plant


def field(name: str, value: Any) -> Plant:
    """A field of the layer's config with another value."""

    def plant(config: Json, tensors: Tensors) -> None:
        holder = config.get(LAYER, config)
        if name == "rope_theta" and "rope_parameters" in holder:
            holder["rope_parameters"]["rope_theta"] = value
        elif name == "rope_scaling" and "rope_parameters" in holder:
            holder["rope_parameters"] |= value
        elif name == "causal":
            config["dflash_config"]["causal"] = value
        else:
            holder[name] = value

    return plant


def dropped(*ends: str) -> Plant:
    """Tensors whose names end so are not in the file."""

    def plant(config: Json, tensors: Tensors) -> None:
        gone = [name for name in tensors if name.endswith(ends)]
        if not gone:
            raise LookupError
        for name in gone:
            del tensors[name]

    return plant


def changed(end: str, how: Callable[[Tensor], Tensor]) -> Plant:
    """Every tensor whose name ends so, changed."""

    def plant(config: Json, tensors: Tensors) -> None:
        names = [name for name in tensors if name.endswith(end)]
        if not names:
            raise LookupError
        for name in names:
            tensors[name] = how(tensors[name]).contiguous()

    return plant


def exchanged(one: str, other: str) -> Plant:
    def plant(config: Json, tensors: Tensors) -> None:
        names = [name for name in tensors if one in name]
        if not names:
            raise LookupError
        for name in names:
            tensors[name], tensors[name.replace(one, other)] = tensors[name.replace(one, other)], tensors[name]

    return plant


def both(*plants: Plant) -> Plant:
    def plant(config: Json, tensors: Tensors) -> None:
        for one in plants:
            one(config, tensors)

    return plant


def as_ids(config: Json, tensors: Tensors) -> None:
    """d2t holds ids, as in GGUF."""
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def lent(name: str) -> Plant:
    """Embeddings or head of another target beside the draft."""

    def plant(config: Json, tensors: Tensors) -> None:
        if f"{name}.weight" in tensors or (
            name == "lm_head" and config.get("draft_vocab_size") != config.get("vocab_size")
        ):
            raise LookupError
        holder = config.get(LAYER, config)
        like = next(tensor for tensor in tensors.values() if tensor.is_floating_point())
        shape = (holder["vocab_size"], holder["hidden_size"])
        draw = torch.Generator().manual_seed(SEED)
        tensors[f"{name}.weight"] = (0.05 * torch.randn(shape, generator=draw)).to(like.dtype)

    return plant


def prefixed(config: Json, tensors: Tensors) -> None:
    for name in list(tensors):
        if name not in ("d2t", "t2d"):
            tensors[f"model.{name}"] = tensors.pop(name)


def halved(config: Json, tensors: Tensors) -> None:
    """State before embedding, where the layout has the embedding first."""
    names = [f"{layer}self_attn.{one}_proj.weight" for layer in ("midlayer.", "layers.0.") for one in "qkv"]
    found = [name for name in names if name in tensors] if "norm.weight" in tensors else ["fc.weight"]
    for name in found:
        tensors[name] = torch.cat(tensors[name].chunk(2, 1)[::-1], 1)


def reordered(config: Json, tensors: Tensors) -> None:
    """Columns of fc in the order high, middle, low."""
    count = len(
        config.get(IDS)
        or config.get("dflash_config", {}).get("target_layer_ids")
        or config["aux_hidden_state_layer_ids"]
    )
    tensors["fc.weight"] = torch.cat(tensors["fc.weight"].chunk(count, 1)[::-1], 1)


def interleaved(*kinds: str) -> Plant:
    """Rows of query, key or both as llama.cpp keeps those of Llama."""

    def plant(config: Json, tensors: Tensors) -> None:
        size = config.get(LAYER, config).get("head_dim")
        if size is None:
            size = config["hidden_size"] // config["num_attention_heads"]
        for name, tensor in tensors.items():
            if name.endswith(tuple(f"{kind}_proj.weight" for kind in kinds)):
                heads = tensor.view(-1, 2, size // 2, tensor.shape[1])
                tensors[name] = heads.transpose(1, 2).reshape(tensor.shape).contiguous()

    return plant


def stale_map(config: Json, tensors: Tensors) -> None:
    """d2t and t2d of another draft, of as many ids."""
    whole = config.get(LAYER, config)["vocab_size"]
    ids = torch.randperm(whole, generator=torch.Generator().manual_seed(SEED))[: len(tensors["d2t"])].sort().values
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(whole, dtype=torch.bool).index_fill(0, ids, True)


def codes(config: Json, tensors: Tensors) -> None:
    """int8 codes of the MLP copied into the weights' dtype, without their scale."""
    for name, tensor in tensors.items():
        if name.endswith("down_proj.weight"):
            tensors[name] = (tensor / tensor.abs().max() * 127).round()


def scaled_codes(config: Json, tensors: Tensors) -> None:
    """int8 codes with a scale beside them."""
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        scale = tensors[name].abs().amax(1, keepdim=True).float() / 127
        tensors[name], tensors[f"{name}_scale"] = (tensors[name] / scale).round().to(torch.int8), scale


def disagreeing(config: Json, tensors: Tensors) -> None:
    """Both lists of captured layers are the same, where one counts one less."""
    config[NESTED][IDS] = list(config[IDS])


def undefined(config: Json, tensors: Tensors) -> None:
    """A few values that are not finite."""
    name = next(name for name in tensors if name.endswith("up_proj.weight"))
    tensors[name][0, :2] = float("nan")


def reversed_layers(config: Json, tensors: Tensors) -> None:
    count = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("layers."))
    if count < 2:
        raise LookupError
    kept = dict(tensors)
    for name, tensor in kept.items():
        if name.startswith("layers."):
            _, number, rest = name.split(".", 2)
            tensors[f"layers.{count - 1 - int(number)}.{rest}"] = tensor


def unanchored(config: Json, tensors: Tensors) -> None:
    """A block whose first row is said to draft nothing."""
    for holder in (config, config.get("dflash_config", {})):
        if "sample_from_anchor" in holder:
            holder["sample_from_anchor"] = False


def without_norm(config: Json, tensors: Tensors) -> None:
    """The file lacks the final norm."""
    del tensors["norm.weight"]


def turned_heads(config: Json, tensors: Tensors) -> None:
    count, kept = config["num_heads"], dict(tensors)
    for name, tensor in kept.items():
        kind, number, rest = name.split(".", 2)
        tensors[f"{kind}.{count - 1 - int(number)}.{rest}"] = tensor


def late_heads(config: Json, tensors: Tensors) -> None:
    """A head for the target's own next token stands first, as some trainers have it."""
    count, kept = config["num_heads"], dict(tensors)
    for name, tensor in kept.items():
        kind, number, rest = name.split(".", 2)
        if int(number) + 1 < count:
            tensors[f"{kind}.{int(number) + 1}.{rest}"] = tensor


def untied(config: Json, tensors: Tensors) -> None:
    """The head of another model, in a draft whose head is its embeddings."""
    if not config.get("tie_word_embeddings"):
        raise LookupError
    config["tie_word_embeddings"] = False
    table = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = 0.05 * torch.randn(table.shape, generator=torch.Generator().manual_seed(SEED)).to(table)


HEADS, BLOCKS = ("eagle3",), ("eagle3", "dflash", "dspark")
LAYERED = ("eagle", "eagle3", "dflash", "small")
BOTH: tuple[Format, ...] = ("vllm", "speculators")
OURS: tuple[Format, ...] = ("vllm",)
ALL: tuple[Format, ...] = ("vllm", "speculators", "gguf")
ROPE, LAYERS = ("rotary embedding",), ("captured layers",)
FAULTS = (
    Fault("captured layers one too high", BLOCKS, BOTH, LAYERS, moved(1)),
    Fault("captured layers one too low", BLOCKS, BOTH, LAYERS, moved(-1)),
    Fault("both lists of captured layers alike", HEADS, OURS, ("unreadable files", *LAYERS), disagreeing),
    Fault("norm_before_residual flipped", HEADS, BOTH, ("norm flags",), flipped("norm_before_residual")),
    Fault("norm_output flipped", HEADS, BOTH, ("norm flags",), flipped("norm_output")),
    Fault("fc_norm not said", HEADS, OURS, ("unreadable files", "norms around fc"), unsaid("fc_norm")),
    Fault(
        "norm_before_residual not said",
        HEADS,
        ("speculators",),
        ("unreadable files", "norm flags"),
        unsaid("norm_before_residual"),
    ),
    Fault("rope_theta lost", ("eagle", *BLOCKS), BOTH, ROPE, field("rope_theta", 3e2)),
    Fault("rope_theta of another model", LAYERED, BOTH, ROPE, field("rope_theta", 5e6)),
    Fault(
        "linear rope scaling",
        ("eagle", *BLOCKS),
        BOTH,
        ROPE,
        field("rope_scaling", {"rope_type": "linear", "factor": 8.0}),
    ),
    Fault("partial_rotary_factor", BLOCKS, OURS, ("unreadable files",), field("partial_rotary_factor", 0.25)),
    Fault("d2t holds ids", BLOCKS, BOTH, ("unreadable files", "vocabulary map"), as_ids),
    Fault("d2t is missing", BLOCKS, OURS, ("unreadable files", "vocabulary map"), dropped("d2t")),
    Fault("d2t is zeros", BLOCKS, OURS, ("unreadable files", "vocabulary map"), changed("d2t", torch.zeros_like)),
    Fault("d2t of another draft", BLOCKS, OURS, ("vocabulary map",), stale_map),
    Fault(
        "a matrix of zeros", LAYERED, OURS, ("tensors that nothing filled",), changed("o_proj.weight", torch.zeros_like)
    ),
    Fault(
        "a norm filled with ones",
        BLOCKS,
        OURS,
        ("tensors that nothing filled",),
        changed("norm.weight", torch.ones_like),
    ),
    Fault(
        "embeddings of another target",
        ("eagle", *BLOCKS),
        OURS,
        ("embeddings or head of another target",),
        lent("embed_tokens"),
    ),
    Fault("head of another target", ("dflash",), OURS, ("embeddings or head of another target",), lent("lm_head")),
    Fault("weights of norms less one", BLOCKS, OURS, ("weights of norms",), changed("norm.weight", lambda w: w - 1)),
    Fault("rows of query and key interleaved", LAYERED, OURS, ("rotary pairs",), interleaved("q", "k")),
    Fault("rows of the key alone interleaved", LAYERED, OURS, ("rotary pairs",), interleaved("k")),
    Fault("key and value exchanged", LAYERED, OURS, ("weights in another order",), exchanged("k_proj", "v_proj")),
    Fault("gate and up exchanged", LAYERED, OURS, ("weights in another order",), exchanged("gate_proj", "up_proj")),
    Fault("fc columns from high to low", BLOCKS, OURS, ("order of the captured layers",), reordered),
    Fault("state before embedding", ("eagle", "eagle3"), OURS, ("embedding and state exchanged",), halved),
    Fault("final norm is missing", HEADS, OURS, ("unreadable files",), without_norm),
    Fault("codes without scale", ("eagle", *BLOCKS), OURS, ("integer codes",), codes),
    Fault("int8 with scales", BLOCKS, OURS, ("unreadable files",), scaled_codes),
    Fault("names with a prefix", BLOCKS, OURS, ("unreadable files",), prefixed),
    Fault("values that are not finite", BLOCKS, OURS, ("unreadable files",), undefined),
    Fault(
        "sliding window of 16",
        BLOCKS,
        OURS,
        ("sliding window",),
        both(field("sliding_window", 16), field("use_sliding_window", True), field("max_window_layers", 0)),
    ),
    Fault("anchor that does not draft", ("dspark",), BOTH, ("layout of a block",), unanchored),
    Fault("causal block", ("dflash",), OURS, ("causal or not",), field("causal", True)),
    Fault(
        "another mask token",
        ("dflash",),
        OURS,
        ("mask token",),
        lambda config, tensors: config["dflash_config"].update(mask_token_id=5),
    ),
    Fault("layers in reverse", ("dflash",), OURS, ("weights in another order",), reversed_layers),
    Fault("heads in reverse", ("medusa",), OURS, ("order of heads",), turned_heads),
    Fault("heads one late", ("medusa",), OURS, ("order of heads",), late_heads),
    Fault("bias not said", ("medusa",), OURS, ("unreadable files",), field("medusa_fc_bias", False)),
    Fault("another head", ("small",), ("hf",), ("tied embeddings", "embeddings or head of another target"), untied),
)
"""Faults of files; `planted_modules` has those of GGUF files, which are written with them."""


def planted(healthy: Path, folder: Path, fault: Fault, layout: Format, target: Target) -> Path:
    """A copy of a draft with a fault, in a layout. Raises LookupError where the draft does not have what it needs."""
    draft = read_draft(healthy, target.num_layers)
    place = folder / f"{draft.family}-{healthy.name}-{layout}-{fault.name.replace(' ', '-')}"
    place.mkdir(parents=True, exist_ok=True)
    architectures = list(target.model.config.architectures or ["LlamaForCausalLM"])
    write_draft(draft, place, layout, 4, Verifier("owner/target", architectures), target.tokenizer)
    config, weights = json.loads((place / "config.json").read_text()), place / "model.safetensors"
    tensors = load_file(weights)
    before = json.dumps(config), {name: tensor.clone() for name, tensor in tensors.items()}
    try:
        fault.plant(config, tensors)
    except (LookupError, StopIteration) as error:
        raise LookupError("the draft does not have what it needs" + f" ({error})" * bool(error.args)) from None
    same = json.dumps(config) == before[0] and tensors.keys() == before[1].keys()
    if same and all(torch.equal(tensors[name], before[1][name]) for name in tensors):
        raise LookupError("it changes nothing in this draft")
    (place / "config.json").write_text(json.dumps(config, indent=2))
    # Two names may hold one tensor by now.
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, weights, {"format": "pt"})
    return place


def planted_gguf(
    healthy: Path, folder: Path, target: Target, skipped: Counter[str]
) -> Iterator[tuple[str, tuple[str, ...], Path]]:
    """GGUF files that were written with a fault: the name, the hypotheses that name it, the folder.

    `skipped` counts reasons why one was not.
    """
    draft: Any = read_draft(healthy, target.num_layers)
    if draft.family != "eagle3":
        return
    changes: dict[str, tuple[tuple[str, ...], Json]] = {
        "gguf: captured layers one too high": (
            LAYERS,
            {"aux_layers": tuple(layer + 1 for layer in draft.target_layers)},
        ),
        "gguf: norm_before_residual flipped": (
            ("norm flags",),
            {"norm_before_residual": not draft.config.norm_before_residual},
        ),
        "gguf: rope base lost": (ROPE, {"rope_theta": 3e2}),
    }
    for name, (names, fields) in changes.items():
        other = shared_copy(draft)
        other.config = other.config.model_copy(update=fields)
        place = folder / f"{healthy.name}-{name.replace(': ', '-').replace(' ', '-')}"
        place.mkdir(parents=True, exist_ok=True)
        try:
            write_draft(other, place, "gguf", 4, None, target.tokenizer)
        except DraftforgeError as error:
            say(f"{healthy.name}: {name}: not planted: {error}")
            skipped[str(error)] += 1
            continue
        yield name, names, place


class Work(NamedTuple):
    """A draft with a fault, and the hypotheses any of which names it."""

    healthy: Path
    fault: str
    layout: str
    names: tuple[str, ...]
    place: Path


def all_planted(healthy: Path, options: argparse.Namespace, target: Target, skipped: Counter[str]) -> Iterator[Work]:
    """All faults of a draft's family, planted. `skipped` counts reasons why one was not."""
    family = read_draft(healthy, target.num_layers).family
    for fault in FAULTS:
        layouts = [one for one in fault.formats if family in FAMILIES[one]] if family in fault.families else []
        skipped[f"a fault of other families than {family}"] += family not in fault.families
        for layout in layouts or (["hf"] if family == "small" and "small" in fault.families else []):
            if options.only not in fault.name or layout not in options.formats:
                continue
            try:
                place = planted(healthy, options.out, fault, layout, target)
            except (DraftforgeError, LookupError) as error:
                say(f"{healthy.name}: {fault.name}, {layout}: not planted: {error}")
                skipped[str(error)] += 1
                continue
            yield Work(healthy, fault.name, layout, fault.names, place)
    if "gguf" in options.formats and options.only in "gguf":
        for name, names, place in planted_gguf(healthy, options.out, target, skipped):
            yield Work(healthy, name, "gguf", names, place)


@cache
def loaded(model: str) -> Target:
    """The target, loaded once in a process."""
    return Target.load(TargetSettings(model=model))


@cache
def sound(healthy: Path, model: str, answers: Path | None) -> tuple[Diagnosis, ReplayBench]:
    """What the doctor says of the healthy draft, and the pass of the target that its copies are replayed on, too."""
    found = Examination(DraftDoctorOptions(draft=healthy, target=model, answers=answers), loaded(model))
    return found.run(), found.bench


def examined(work: Work, model: str, answers: Path | None) -> Json:
    """What the doctor makes of a draft with a fault."""
    healthy, bench = sound(work.healthy, model, answers)
    assert healthy.before is not None
    began, tau = time.monotonic(), healthy.before["tau"]["value"]
    options = DraftDoctorOptions(draft=work.place, target=model, answers=answers)
    found = Examination(options, loaded(model), bench).run()
    before, after = (None if one is None else one["tau"]["value"] for one in (found.before, found.after))
    return {
        "draft": str(work.healthy),
        "fault": work.fault,
        "layout": work.layout,
        "healthy": tau,
        "before": before,
        "after": after,
        "verdict": found.verdict,
        "named": [f"{cause['hypothesis']}: {cause['what']}" for cause in found.causes],
        "right": bool({cause["hypothesis"] for cause in found.causes} & set(work.names)),
        "restored": after is not None and after >= 0.99 * tau,
        "harmless": before is not None and before >= 0.97 * tau,
        "seconds": round(time.monotonic() - began, 1),
    }


def line_of(row: Json) -> str:
    """A row of the table."""
    said = "harmless" if row["harmless"] and not row["named"] else "named" if row["right"] else "MISSED"
    figures = f"{row['before'] or 1:5.2f} -> {row['after'] or 0:5.2f} of {row['healthy']:5.2f}  "
    figures += f"{said:9}{'restored' * row['restored']:9}{row['seconds']:6.1f} s"
    return f"{row['fault']:38} {row['layout']:12} {figures}  {'; '.join(row['named'])[:110]}"


def main() -> int:
    """Plant, examine, print; 1 where fewer than nine tenths are named and restored."""
    parser = argparse.ArgumentParser(description="Plant faults into drafts and let the doctor name them.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", type=Path, action="append", required=True)
    parser.add_argument("--answers", type=Path)
    parser.add_argument("--only", default="", help="faults whose names hold this")
    parser.add_argument("--formats", nargs="*", default=["vllm", "speculators", "gguf", "hf"], help="of the copies")
    parser.add_argument("--processes", type=int, default=1, help="examinations at a time, each with the target")
    options = parser.parse_args()
    skipped, rows = Counter[str](), list[Json]()
    with ExitStack() as stack:
        # Each fault is examined as soon as it is planted.
        each: Callable[..., Iterator[Json]] = map
        if options.processes > 1:
            context = multiprocessing.get_context("spawn")
            each = stack.enter_context(ProcessPoolExecutor(options.processes, context)).map
        target = loaded(options.target)
        work = (one for healthy in options.draft for one in all_planted(healthy, options, target, skipped))
        found = each(partial(examined, model=options.target, answers=options.answers), work)
        for healthy in options.draft:
            told, _ = sound(healthy, options.target, options.answers)
            assert told.before is not None
            figures = f"tau {told.before['tau']['value']:.2f} at K={told.draft_tokens}, {told.answers} answers"
            print(f"{healthy.name}: {told.verdict}, {figures}", flush=True)
        for row in found:
            rows.append(row)
            print(line_of(row), flush=True)
            (options.out / "faults.json").write_text(json.dumps(rows, indent=1))
    harmful = [row for row in rows if not (row["harmless"] and not row["named"])]
    good = [row for row in harmful if row["right"] and row["restored"]]
    ends = f"{sum(row['right'] for row in harmful)} named, {len(good)} named and restored within 1 %"
    print(f"{len(harmful)} of {len(rows)} faults lower acceptance; {ends}")
    for why, count in (+skipped).most_common():
        print(f"{count} not planted: {why}")
    return 0 if len(good) >= 0.9 * len(harmful) else 1


if __name__ == "__main__":
    sys.exit(main())
