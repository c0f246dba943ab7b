"""Precision of matrix products. Weights, gradients and optimizer state are float32 always."""

import torch

from ..specdec.targets import multiplies_bfloat16


def matrix_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Dtype of matrix products; `auto` is bfloat16 where the hardware multiplies it, else float32."""
    if precision != "auto":
        return torch.bfloat16 if precision == "bfloat16" else torch.float32
    return torch.bfloat16 if multiplies_bfloat16(str(device)) else torch.float32
