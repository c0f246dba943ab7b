"""Fewer and larger kernels for a frozen model on a GPU: Liger's norms (Hsu et al. 2024, arXiv 2410.10989), gated
products and rotary embeddings in one kernel each, and one product where several layers read the same input.

A module of transformers is a handful of small kernels that each read and write the whole activation. Here it becomes
one, where that gives what the module itself gives: every class is tried once, on numbers of its own size, and left as
it is where the two disagree. Only modules of the given model change; what other models of its class do is untouched.

Shapes: B rows, T tokens, H width, D head size.
"""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cuda_graphs import current
from .merged_projections import share_products

Forward = Callable[[Any, Tensor], Tensor]
"""(module, what it reads) -> what it gives."""
_CLOSE = 2e-2  # of the largest value: two roundings in bfloat16
_SCALES = (0.1, 1.0, 4.0)  # of the numbers that a fused forward is tried on
_ROTARY = "apply_rotary_pos_emb"  # what transformers calls the function in each model's file


def can_fuse(device: torch.device) -> bool:
    """Whether fused kernels run on the device: CUDA with liger-kernel installed."""
    return device.type == "cuda" and find_spec("liger_kernel") is not None


@torch.no_grad()
def fuse(model: nn.Module, share: bool = True) -> list[str]:
    """Replace modules of a frozen model by fused kernels; returns the names of what was replaced.

    `share`: also multiply once where layers read the same few rows, which needs weights that stay where they are.
    """
    device = next(model.parameters()).device
    with current(device):  # Triton launches there
        # 1) Norms and gated MLPs: one fused forward a class, taken where it agrees with the module's own.
        fused: dict[type, Forward | None] = {}
        for module in model.modules():
            kind = type(module)
            if kind not in fused:
                fused[kind] = next((forward for forward in _candidates(module) if _agree(module, forward)), None)
            forward = fused[kind]
            if forward is not None:
                module.forward = MethodType(forward, module)  # bound: a copy of the module runs on its own weights
        names = [kind.__name__ for kind, forward in fused.items() if forward is not None]
        # 2) Queries, keys and values, and gate and up, in one product each.
        shared = share_products(model) if share else 0
        names += [f"{shared} shared products"] if shared else []
        # 3) Rotary embeddings, which the classes of one Python module share.
        files = sorted({kind.__module__ for kind in fused})
        return [*names, *(f"{file}.{_ROTARY}" for file in files if _replace_rotary(file, device))]


def _candidates(module: Any) -> list[Forward]:
    """Candidate fused forwards for a module, by its class name and its parts; `_agree` decides."""
    weight = getattr(module, "weight", None)
    # Two conventions of RMSNorm, scale by w or by 1 + w; only one of them agrees with the module.
    if "RMSNorm" in type(module).__name__ and isinstance(weight, Tensor) and weight.dim() == 1:
        return [_norm, _norm_from_one]
    # A gated MLP by the names of its layers, whose activation must be SiLU.
    gated = all(isinstance(getattr(module, name, None), nn.Linear) for name in ("gate_proj", "up_proj", "down_proj"))
    return [_gated] if gated and _is_silu(getattr(module, "act_fn", None), module.gate_proj.weight.device) else []


def _is_silu(activation: Any, device: torch.device) -> bool:
    """Whether an activation is SiLU, compared by itself.

    Compared within the whole MLP, another one could pass: behind weights of zeros, or on large numbers.
    """
    if not callable(activation):
        return False
    x = torch.linspace(-6, 6, 97, device=device)
    return torch.allclose(activation(x), F.silu(x), rtol=0, atol=1e-4)


def _norm(module: Any, x: Tensor) -> Tensor:
    return _normed(module, x, 0.0, "llama")


def _norm_from_one(module: Any, x: Tensor) -> Tensor:
    """RMSNorm of Gemma, whose weight is added to 1."""
    return _normed(module, x, 1.0, "gemma")


def _normed(module: Any, x: Tensor, offset: float, casting: str) -> Tensor:
    from liger_kernel.ops import LigerRMSNormFunction

    # Llama-like norms call it variance_epsilon, Gemma-like ones eps.
    eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None) or 1e-6
    normed: Tensor = LigerRMSNormFunction.apply(x, module.weight, eps, offset, casting, False)
    return normed


def _gated(module: Any, x: Tensor) -> Tensor:
    gate, up = module.gate_proj(x), module.up_proj(x)
    # Our own kernel has no gradient, Liger's has.
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):  # an adapter learns below
        from liger_kernel.ops import LigerSiLUMulFunction

        product = LigerSiLUMulFunction.apply(gate, up)
    else:
        from .pointwise import gated_silu

        product = gated_silu(gate, up)
    down: Tensor = module.down_proj(product)
    return down


def _agree(module: Any, fused: Forward) -> bool:
    """Whether the fused forward and the module's own agree on a row of small, middling and large numbers."""
    weight = module.weight if hasattr(module, "weight") else module.gate_proj.weight
    row_1H = torch.linspace(-3, 3, weight.shape[-1], device=weight.device, dtype=weight.dtype)[None]
    rows = [scale * row_1H for scale in _SCALES]
    return all(_close(module(x_1H), fused(module, x_1H)) for x_1H in rows)


def _close(theirs: Tensor, ours: Tensor) -> bool:
    if theirs.shape != ours.shape or theirs.dtype != ours.dtype:
        return False
    limit = _CLOSE * float(theirs.float().abs().max()) + 1e-6
    return bool(torch.allclose(ours.float(), theirs.float(), rtol=0, atol=limit))


def _replace_rotary(name: str, device: torch.device) -> bool:
    """Replace the rotary function of a Python module of transformers by one kernel; returns whether it is replaced.

    All models of that Python module share the function. So the new one calls the old one where a gradient is needed
    or the tensors are on another device.
    """
    file: Any = sys.modules[name]
    # Nothing to replace, or replaced for another model already.
    theirs = getattr(file, _ROTARY, None)
    if theirs is None or isinstance(theirs, _Rotary):
        return theirs is not None
    # Taken only where the kernel computes the same.
    ours = _Rotary(theirs, device)
    if ours.agrees():
        setattr(file, _ROTARY, ours)
    return isinstance(getattr(file, _ROTARY), _Rotary)


class _Rotary:
    """Rotary embedding in one kernel: rotates query [B, Q, T, D] and key [B, G, T, D] by cos, sin [B, T, D]."""

    def __init__(self, theirs: Callable[..., tuple[Tensor, Tensor]], device: torch.device) -> None:
        self._theirs, self._device = theirs, device

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **named: Any) -> Any:
        # The kernel works in place, without a gradient, over whole heads; all else goes to the replaced function.
        learns = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
        elsewhere = q.device.type != self._device.type
        if rest or named or learns or elsewhere or cos.dim() != 3 or cos.shape[-1] != q.shape[-1]:
            return self._theirs(q, k, cos, sin, *rest, **named)
        return self._fused(q, k, cos, sin)

    def agrees(self) -> bool:
        """Whether the kernel and the replaced function rotate alike, on a few random numbers."""
        generator = torch.Generator().manual_seed(0)
        q, k = (torch.randn(2, heads, 3, 8, generator=generator).to(self._device) for heads in (4, 2))
        angle = torch.rand(2, 3, 4, generator=generator).to(self._device).repeat(1, 1, 2)
        try:
            theirs = self._theirs(q, k, angle.cos(), angle.sin())
        except TypeError:  # it rotates something else
            return False
        ours = self._fused(q.clone(), k.clone(), angle.cos(), angle.sin())
        return all(_close(one, other) for one, other in zip(theirs, ours, strict=True))

    @staticmethod
    def _fused(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        from .pointwise import rotate

        q, k, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, cos, sin))
        rotate(q, k, cos, sin)
        return q, k
