"""How fast the training loss of a live teacher is, and how much memory it takes: value and both gradients.

    python3 scripts/bench_loss.py
    python3 scripts/bench_loss.py --vocabulary 49152 --positions 8192 --way autograd --way torch --way triton

Pairs are drafted positions: steps ahead times supervised positions. Weights and states are random. `--way` says how the
gradient on the logits is made: autograd of the definitions in chunks, the closed form in torch, or that in Triton. Ways
that an objective or this machine does not have are left out. On a CPU seconds are those of the process.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from draftforge.train.families.target_features import summary
from draftforge.train.losses import linear_head
from draftforge.train.losses.fused_torch import FUSED
from draftforge.train.losses.linear_head import Head, LossSettings, Rows, head_loss
from draftforge.train.losses.objectives import FullDistribution

OBJECTIVES = ("kl", "ce", "tv", "lk_hybrid", "jsd", "reverse_kl", "lk", "expected_length")
WAYS = ("autograd", "torch", "triton")
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


class Measured(NamedTuple):
    """One objective, made in one way."""

    pairs_per_second: float
    gib: float
    """At the peak, above what was there before."""
    loss: float
    norms: tuple[float, float]
    """Of the gradients of states and weights."""


def measure(given: argparse.Namespace, objective: str, chunk_bytes: int, way: str, device: torch.device) -> Measured:
    """Time and memory of the loss and of the gradients of states and head."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = (given.steps, given.positions, given.hidden)
    weight_VH = (torch.randn(given.vocabulary, given.hidden, device=device) * 3 / given.hidden**0.5).requires_grad_()
    states_SNH = torch.randn(shape, device=device, dtype=dtype).requires_grad_()
    teacher = RandomTeacher.of(torch.randn(shape[1:], device=device, dtype=dtype), weight_VH.detach().to(dtype))
    rows = Rows(states_SNH, None, teacher, (1.0,) * given.steps)
    settings = LossSettings({objective: 1.0}, dtype=dtype, logits_bytes=chunk_bytes)

    def once() -> tuple[float, tuple[float, float]]:
        loss, _ = head_loss(rows, Head(weight_VH), settings)
        states, weights = torch.autograd.grad(loss, [states_SNH, weight_VH])
        return float(loss), (float(states.norm()), float(weights.norm()))

    with patch.object(linear_head, "way_of", lambda *_: way):
        loss, norms = once()
        base = _memory(device)
        clock = time.perf_counter if device.type == "cuda" else time.process_time
        start = clock()
        for _ in range(_REPEATS):
            once()
        peak = _memory(device, reset=False)
    rate = given.steps * given.positions * _REPEATS / (clock() - start)
    return Measured(rate, (peak - base) / 2**30, loss, norms)


def _memory(device: torch.device, reset: bool = True) -> int:
    """Bytes in use now, from where the peak counts; or, without `reset`, at the peak. Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        if not reset:
            return torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    if not Path("/proc/self/clear_refs").exists():
        return 0
    if reset:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmRSS:" if reset else "VmHWM:")[1].split()[0])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"vocabulary": 49152, "hidden": 576, "positions": 16384, "steps": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--chunk-mib", type=int, action="append", help="logits_bytes; may be given again")
    parser.add_argument("--way", choices=WAYS, action="append", help="may be given again; absent: the one in use")
    parser.add_argument("--objective", choices=OBJECTIVES, action="append", help="may be given again; absent: all")
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    given = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = []
    for objective in given.objective or OBJECTIVES:
        fused = objective in FUSED
        ways = given.way or ["triton" if device.type == "cuda" else "torch" if fused else "autograd"]
        for mib in given.chunk_mib or [256, 1024]:
            for way in ways:
                if (way == "torch" and not fused) or (way == "triton" and device.type != "cuda"):
                    continue
                row = measure(given, objective, mib << 20, way, device)
                speed = f"{row.pairs_per_second:12,.0f} pairs/s {row.gib:6.2f} GiB"
                norms = ", ".join(f"{norm:.6g}" for norm in row.norms)
                print(f"{objective:16} {way:9} {mib:5} MiB {speed}  loss {row.loss:.7g}, gradients {norms}", flush=True)
                found.append({"objective": objective, "way": way, "chunk_mib": mib, **row._asdict()})
    if given.out is not None:
        given.out.write_text(json.dumps({**vars(given), "out": None, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
