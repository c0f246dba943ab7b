"""How fast the training loss of a live teacher is, and how much memory it takes: value and both gradients.

    python3 scripts/bench_loss.py
    python3 scripts/bench_loss.py --vocabulary 151936 --hidden 1024 --positions 8192 --chunk-mib 256 --chunk-mib 1024

Pairs are drafted positions: steps ahead times supervised positions. Weights and states are random.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftforge.train.families.target_features import summary
from draftforge.train.losses.fused_torch import FullDistribution
from draftforge.train.losses.linear_head import Head, LossSettings, Rows, head_loss
from draftforge.train.losses.schedule import Objective

OBJECTIVES: tuple[Objective, ...] = ({"kl": 1.0}, {"lk_hybrid": 1.0}, {"jsd": 1.0}, {"expected_length": 1.0})
_REPEATS = 3
_PART = 512  # positions whose normaliser is made at once


@dataclass(frozen=True)
class RandomTeacher:
    """A linear head on states, as a frozen target has."""

    hidden_NH: Tensor
    weight_VH: Tensor
    lse_N: Tensor
    best_N: Tensor
    live = True

    @classmethod
    def of(cls, hidden_NH: Tensor, weight_VH: Tensor) -> "RandomTeacher":
        parts = [summary(part @ weight_VH.T) for part in torch.split(hidden_NH, _PART)]
        return cls(hidden_NH, weight_VH, torch.cat([lse for lse, _ in parts]), torch.cat([best for _, best in parts]))

    def at(self, rows: slice, temperatures: Sequence[float]) -> FullDistribution:
        lse_TC = torch.stack([self.lse_N[rows]] * len(temperatures))
        return FullDistribution(self.hidden_NH[rows] @ self.weight_VH.T, lse_TC, self.best_N[rows])


def measure(given: argparse.Namespace, objective: Objective, chunk_bytes: int, device: torch.device) -> dict[str, Any]:
    """Pairs a second, and GiB at the peak above what was there before."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = (given.steps, given.positions, given.hidden)
    weight_VH = (torch.randn(given.vocabulary, given.hidden, device=device) * 3 / given.hidden**0.5).requires_grad_()
    states_SNH = torch.randn(shape, device=device, dtype=dtype).requires_grad_()
    teacher = RandomTeacher.of(torch.randn(shape[1:], device=device, dtype=dtype), weight_VH.detach().to(dtype))
    rows = Rows(states_SNH, None, teacher, (1.0,) * given.steps)
    settings = LossSettings(objective, dtype=dtype, logits_bytes=chunk_bytes)

    def once() -> None:
        loss, _ = head_loss(rows, Head(weight_VH), settings)
        torch.autograd.grad(loss, [states_SNH, weight_VH])

    once()
    base = _synchronised(device)
    start = time.perf_counter()
    for _ in range(_REPEATS):
        once()
    peak = _synchronised(device, reset=False)
    rate = given.steps * given.positions * _REPEATS / (time.perf_counter() - start)
    return {"pairs_per_second": rate, "gib": (peak - base) / 2**30}


def _synchronised(device: torch.device, reset: bool = True) -> int:
    """Wait for the device. Bytes in use now, from where the peak counts; or, without `reset`, at the peak."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    if not reset:
        return torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"vocabulary": 49152, "hidden": 576, "positions": 16384, "steps": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--chunk-mib", type=int, action="append", help="logits_bytes; may be given again")
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    given = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = []
    for objective in OBJECTIVES:
        for mib in given.chunk_mib or [256, 1024]:
            row = {"objective": next(iter(objective)), "chunk_mib": mib, **measure(given, objective, mib << 20, device)}
            print(f"{row['objective']:16} {mib:5} MiB {row['pairs_per_second']:12,.0f} pairs/s {row['gib']:6.2f} GiB")
            found.append(row)
    if given.out is not None:
        given.out.write_text(json.dumps({**vars(given), "out": None, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
