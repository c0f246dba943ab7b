"""Tensors from the host to a device."""

import torch
from torch import Tensor


def send(values: Tensor, device: torch.device) -> Tensor:
    """Put a CPU tensor on the device without waiting for what the device does."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)
