"""How much memory a training step needs above weights, gradients and optimizer, for a target of any shape.

    python3 scripts/bench_memory.py                       # EAGLE-3 for a target of Qwen3-0.6B's shape, 8,192 tokens
    python3 scripts/bench_memory.py --hidden 2048 --layers 16 --vocabulary 128256 --tokens 16384

Weights are random: memory does not ask what they say. On a machine without a GPU the steps run and nothing is measured.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from draftforge.data.batches import collate
from draftforge.specdec.drafts.eagle3 import Eagle3Draft
from draftforge.specdec.models import CausalModel
from draftforge.specdec.targets import Target
from draftforge.train.families.eagle3 import Eagle3Family, eagle3_config
from draftforge.train.losses.linear_head import LossSettings
from draftforge.train.optimizers import make_optimizer
from draftforge.train.precision import matrix_dtype
from draftforge.train.settings import Eagle3Settings
from draftforge.train.training_engine import TorchEngine

_DOCUMENT = 1024
_PROMPT = 64


class Text(NamedTuple):
    """A sample of any words."""

    prompt_ids: list[int]
    answer_ids: list[int]


def random_target(given: argparse.Namespace, device: torch.device) -> CausalModel:
    """A target of this shape, in bfloat16 on a GPU."""
    config = Qwen3Config(
        hidden_size=given.hidden,
        intermediate_size=3 * given.hidden,
        num_hidden_layers=given.layers,
        num_attention_heads=given.heads,
        num_key_value_heads=max(1, given.heads // 2),
        head_dim=given.head_dim,
        vocab_size=given.vocabulary,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = Qwen3ForCausalLM(config).to(dtype)
    return CausalModel(model.requires_grad_(False).eval())


def random_texts(tokens: int, vocabulary: int) -> list[Text]:
    """Documents of so many tokens together, nearly all of them answers."""
    size = min(_DOCUMENT, tokens)
    ids = torch.randint(vocabulary, (tokens // size, size), generator=torch.Generator().manual_seed(0)).tolist()
    prompt = min(_PROMPT, size // 2)
    return [Text(row[:prompt], row[prompt:]) for row in ids]


def measure(given: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Bytes: of weights, gradients and optimizer state together, and what a step adds to them at its peak."""
    settings = Eagle3Settings(
        draft_tokens=given.steps, logits_bytes=given.logits_bytes, row_tokens=given.tokens, features_bytes=0
    )
    target = random_target(given, device)
    draft = Eagle3Draft(eagle3_config(settings, target, target.vocab_size)).to(device)
    loss = LossSettings({"kl": 1.0}, 3.0, matrix_dtype("auto", device), settings.logits_bytes)
    family = Eagle3Family(draft, settings, loss, cast(Target, target))
    engine = TorchEngine(family, make_optimizer(family, settings), 1.0)
    batch = collate(random_texts(given.tokens, target.vocab_size), row_tokens=settings.row_tokens).to(device)
    for _ in range(2):  # the first step makes optimizer state and compiles kernels
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        engine.accumulate(family.inputs(batch, []), 1.0 / max(1, batch.supervised), last=True)
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
        engine.step(1e-4)
    trained = list(family.trainable().values())
    frozen = sum(p.numel() * p.element_size() for p in target.model.parameters())
    standing = frozen + sum(p.numel() for p in trained) * 4 * 4  # weights, gradients, two moments, float32
    naive = 4 * batch.supervised * target.vocab_size
    return {"standing": standing, "above": peak - standing if peak else float("nan"), "one_fp32_logits": naive}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {
        "hidden": 1024,
        "layers": 28,
        "heads": 16,
        "head-dim": 128,
        "vocabulary": 151936,
        "tokens": 8192,
        "steps": 4,
        "logits-bytes": 1 << 28,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    given = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = measure(given, device)
    gib = {name: value / 2**30 for name, value in found.items()}
    where = torch.cuda.get_device_name() if device.type == "cuda" else "cpu, nothing measured"
    print(
        f"{where}: weights, gradients and optimizer {gib['standing']:.2f} GiB, a step adds {gib['above']:.2f} GiB; "
        f"float32 logits of one step ahead alone would be {gib['one_fp32_logits']:.2f} GiB"
    )
    if given.out is not None:
        given.out.write_text(json.dumps({"device": where, **vars(given) | {"out": None}, "bytes": found}, indent=1))


if __name__ == "__main__":
    main()
