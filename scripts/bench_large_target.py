"""Trains an EAGLE-3 head for a target that is larger than one card, spread over several: memory, speed, losses.

    python3 scripts/bench_large_target.py --times 1.1                    # every GPU of this machine
    torchrun --nproc-per-node 4 scripts/bench_large_target.py --times 1.1
    CUDA_VISIBLE_DEVICES= python3 scripts/bench_large_target.py --ranks 2 --bytes 4000000 --hidden 64 --vocabulary 320

The target is a Llama of random weights, made in place on each rank: nothing of it is written to disk. It is asked about
random tokens, so losses only show that a draft trains. Its checkpoint is written at the end, as after every training.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, PreTrainedTokenizerFast

from draftforge import fingerprint, storage
from draftforge.data.store import FORMAT, MANIFEST, SHARDS, Capture, Sample, write_shard
from draftforge.distributed import ranks
from draftforge.specdec.sampling_settings import SamplingSettings
from draftforge.specdec.sharding import fill_unsharded, skeleton
from draftforge.specdec.target_settings import TargetSettings
from draftforge.specdec.targets import Target
from draftforge.train.loop import train
from draftforge.train.settings import Eagle3Settings

_PROMPT = 16
_HEAD = 128  # width of an attention head, where the hidden size is a multiple


class RandomWeights:
    """Tensors whose rows follow from their name: as a model's files would give them, but made on the device."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype

    def rows(self, name: str, shape: torch.Size, rows: slice) -> Tensor:
        """Norms are ones; what a layer adds is small beside what passes it, so that roundings stay small too."""
        first, last, _ = rows.indices(shape[0])
        size = (last - first, *shape[1:])
        if len(shape) == 1:
            return torch.ones(size, device=self._device, dtype=self._dtype)
        generator = torch.Generator(self._device)
        generator.manual_seed(int(fingerprint.of_json([name, first])[:15], 16))
        drawn = torch.empty(size, device=self._device, dtype=self._dtype)
        return drawn.normal_(0.0, 1.0 if "embed" in name else 0.5 * shape[-1] ** -0.5, generator=generator)


class Figures:
    """A sink that keeps each step's."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def log(self, step: int, values: dict[str, float]) -> None:
        self.steps.append(values)


def shape_of(given: argparse.Namespace, wanted: int, number: int) -> LlamaConfig:
    """A Llama of at least `wanted` bytes of weights, of `number` bytes each."""
    hidden, vocabulary = given.hidden, given.vocabulary
    head = min(_HEAD, hidden // 2)
    heads, shared, inner = hidden // head, max(1, hidden // head // 8), 7 * hidden // 2
    layer = 2 * hidden * hidden + 2 * hidden * shared * head + 3 * hidden * inner + 2 * hidden
    rest = wanted - number * (2 * vocabulary * hidden + hidden)
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=max(4, -(-rest // (number * layer))),
        num_attention_heads=heads,
        num_key_value_heads=shared,
        head_dim=head,
        vocab_size=vocabulary,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )


def random_target(config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> Target:
    """Embeddings, norm and head; the layers come when the training asks for them."""
    model, weights = skeleton(config, dtype), RandomWeights(device, dtype)
    fill_unsharded(model, model.get_decoder().layers, weights, device)
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="b")
    identity = fingerprint.of_json(["random", config.to_diff_dict()])
    return Target(model, tokenizer, TargetSettings(model="random", shard=True), identity, weights)


def random_answers(folder: Path, target: Target, given: argparse.Namespace, tokens: int) -> None:
    """A capture of recorded answers without signals: so many tokens of random documents."""
    (folder / SHARDS).mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(target.vocab_size, (max(1, tokens // given.document), given.document), generator=generator)
    samples = [
        Sample(
            id=f"{number}",
            conversation=f"{number}",
            turn=0,
            cluster=f"{number}",
            domain="random",
            split="train",
            sampling=SamplingSettings(),
            max_new_tokens=given.document,
            finish="length",
            prompt_ids=ids[:_PROMPT],
            answer_ids=ids[_PROMPT:],
        )
        for number, ids in enumerate(rows.tolist())
    ]
    unknown = torch.full((sum(len(sample.answer_ids) for sample in samples),), torch.nan)
    path = write_shard(folder, "00000-train", samples, {"logp_n": unknown})
    record = {"name": "00000-train", "split": "train", "bytes": path.stat().st_size}
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "target": target.fingerprint,
        "tokenizer": target.tokenizer_digest,
        "vocab_size": target.vocab_size,
        "stop_ids": sorted(target.stop_ids),
        "special_ids": [],
        "settings": {"top_k": 0},
        "shards": [record | {"sha256": fingerprint.of_file(path)}],
    }
    storage.write_json(folder / MANIFEST, manifest)


def measure(given: argparse.Namespace, work: Path) -> dict[str, Any]:
    """One rank's part."""
    mine = ranks()
    rank, world = mine.rank, mine.world_size
    on_gpu = torch.cuda.is_available()
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    card = torch.cuda.get_device_properties(device).total_memory if on_gpu else 0
    wanted = given.bytes or int(given.times * card)
    config = shape_of(given, wanted, dtype.itemsize)
    target = random_target(config, device, dtype)
    a_step = given.tokens * world
    if rank == 0:
        random_answers(work / "answers", target, given, a_step * given.steps)
    mine.barrier("the random answers")
    settings = Eagle3Settings(
        steps=given.steps,
        warmup_steps=1,
        tokens_per_step=a_step,
        row_tokens=given.document,
        intermediate_size=given.hidden,
        draft_tokens=given.draft_tokens,
        logits_bytes=1 << 30,
    )
    sink = Figures()
    train(settings, 0, Capture.open(work / "answers"), work / "training", lambda: target, sink)
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else 0
    held = mine.gather("the memory of every rank", [held_bytes(target.model), peak])
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "card_bytes": card,
        "layers": config.num_hidden_layers,
        "target_bytes": dtype.itemsize * sum(parameter.numel() for parameter in target.model.parameters()),
        "held_bytes": [one[0] for one in held],
        "peak_bytes": [one[1] for one in held],
        "seconds": [step["seconds"] for step in sink.steps],
        "positions_per_second": [step["positions_per_second"] for step in sink.steps],
        "losses": [step["loss"] for step in sink.steps],
    }


def held_bytes(model: nn.Module) -> int:
    """Bytes of the parameters that this rank holds; sharded ones on the meta device have none."""
    local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return sum(tensor.numel() * tensor.element_size() for tensor in local if tensor.device.type != "meta")


def show(found: dict[str, Any]) -> None:
    """What was found, for people."""
    of = f", {found['target_bytes'] / found['card_bytes']:.2f} of a card's" if found["card_bytes"] else ""
    print(f"target: {found['layers']} layers, {found['target_bytes']:,} bytes{of}; {found['device']}")
    print(f"held by each rank: {_gib(found['held_bytes'])} of weights")
    if any(found["peak_bytes"]):
        print(f"peak of each rank: {_gib(found['peak_bytes'])}")
    for number, one in enumerate(zip(found["seconds"], found["positions_per_second"], found["losses"]), start=1):
        print(f"step {number}: {one[0]:.2f} s, {one[1]:,.0f} positions/s, loss {one[2]:.4f}")


def _gib(numbers: Sequence[int]) -> str:
    return ", ".join(f"{number / 2**30:.4g} GiB" for number in numbers)


def launch(given: argparse.Namespace, arguments: Sequence[str], work: Path) -> int:
    """This script again, on each rank; the exit code."""
    count = given.ranks or max(1, torch.cuda.device_count())
    place = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    return subprocess.run([*place, str(Path(__file__).resolve()), *arguments, "--work", str(work)]).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=float, default=1.1, help="the target's size, as a share of a card's memory")
    parser.add_argument("--bytes", type=int, help="the target's size in bytes instead; required without a GPU")
    parser.add_argument("--ranks", type=int, help="processes to start; absent: one a GPU")
    parser.add_argument("--work", type=Path, help="a new folder that is kept; absent: a temporary one")
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    counts = {"steps": 5, "hidden": 8192, "vocabulary": 32000, "tokens": 8192, "document": 2048, "draft-tokens": 3}
    for name, value in counts.items():
        parser.add_argument(f"--{name}", type=int, default=value, help="of a rank and step" * (name == "tokens"))
    given = parser.parse_args(arguments)
    if given.bytes is None and not torch.cuda.is_available():
        parser.error("--bytes: required where there is no GPU")
    if "RANK" not in os.environ:
        with tempfile.TemporaryDirectory() as temporary:
            return launch(given, arguments, given.work or Path(temporary) / "work")
    run = f"large-target-{os.environ['MASTER_PORT']}-{os.getppid()}"  # the ranks of one machine share their parent
    place = Path(tempfile.gettempdir()) / run
    found = measure(given, given.work or place)
    if os.environ["RANK"] == "0":
        shutil.rmtree(place, ignore_errors=True)
        show(found)
        if given.out is not None:
            given.out.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
