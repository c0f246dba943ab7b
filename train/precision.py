"""Precision of matrix products. Weights, gradients and optimizer state are float32 always."""

from typing import Any

import torch


def matrix_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Dtype of matrix products; `auto` is bfloat16 where the hardware multiplies it, else float32."""
    if precision != "auto":
        return torch.bfloat16 if precision == "bfloat16" else torch.float32
    if device.type == "cuda":
        return torch.bfloat16
    # A CPU: torch tells its instruction sets, in versions that have `get_capabilities`.
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    fast = capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
    return torch.bfloat16 if fast else torch.float32
