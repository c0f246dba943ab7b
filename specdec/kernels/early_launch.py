"""Kernels that begin while the one before them ends (programmatic dependent launch), on GPUs since Hopper.

Such a kernel waits by itself, with `gdc_wait`, before it reads what another one of the same graph wrote; before that
it may fetch what nobody writes.
"""

from functools import cache

import torch
import triton
import triton.language as tl


@cache
def early(device: torch.device) -> dict[str, bool]:
    """Options of a kernel that may begin while the one before it ends, where the device can; it waits by itself."""
    can = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"EARLY": can, "launch_pdl": can}


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def fetch(at):  # type: ignore[no-untyped-def]
    """Ask for the memory lines of these addresses, without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )
