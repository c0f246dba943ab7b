"""Fewer and larger kernels for a frozen model on a GPU: Liger's norms (Hsu et al. 2024, arXiv 2410.10989), gated
products and rotary embeddings in one kernel each, and one product where several layers read the same input.

A module of transformers is a handful of small kernels that each read and write the whole activation. Here it becomes
one, where that gives what the module itself gives: every class is tried once, on numbers of its own size, and left as
it is where the two disagree. A decoder layer adds and norms in one kernel, and its last product adds to the residual;
where it decodes few rows, it is the kernels of row_products.py and flash_decoding.py. Only modules of the given
model change; what other models of its class do is untouched.

Shapes: B rows, N tokens, H width, Q query heads, G key-value heads, D head size.
"""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from ...errors import one_line
from ...progress import say
from ..cuda_graphs import current
from .attention import NAME, attend
from .merged_projections import joint_weights, share_products

Forward = Callable[..., Any]
"""(module, what it reads) -> what it gives."""
_CLOSE = 2e-2  # of the largest value: two roundings in bfloat16
_SCALES = (0.1, 1.0, 4.0)  # of the numbers that a fused forward is tried on
_TRIAL = "draftforge-trial"
_TRIED = (5, 20)  # rows that the kernels for few rows are tried on: either of them on several
_ATTENTION = ("scaling", "sliding_window", "softcap")  # what a layer tells its attention, beside what it attends with
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
        # 2) Queries, keys and values, and gate and up, in one product each; layers, and the angles that they read.
        shared = share_products(model) if share else 0
        names += _fuse_layers(model) + _fuse_angles(model)
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

    normed: Tensor = LigerRMSNormFunction.apply(x, module.weight, _eps(module), offset, casting, False)
    return normed


def _eps(norm: Any) -> float:
    """Epsilon of a norm: Llama-like ones call it variance_epsilon, Gemma-like ones eps."""
    return float(getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None) or 1e-6)


def _fuse_layers(model: nn.Module) -> list[str]:
    """Fuse decoder layers whose norm and MLP are fused: ours, and transformers' that compute what `_layer` does.

    Returns the names of their classes, and again of those that take the kernels for few rows.
    """
    taken: dict[type, bool] = {}
    few: dict[type, bool] = {}  # whether the kernels for few rows agree with the class
    module: Any
    for module in model.modules():
        kind, parts = type(module), dict(module.named_children())
        if not _has_fused_parts(parts):
            continue
        if hasattr(kind, "finish"):
            module.read, module.finish = MethodType(_read_ours, module), MethodType(_finish_ours, module)
            taken[kind] = True
            if kind not in few:
                few[kind] = _few_agree(module, _try_ours)
            module.few_rows = few[kind]
        elif parts.keys() == {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}:
            if kind not in taken:
                taken[kind] = _layers_agree(module)
            if taken[kind]:
                module.forward = MethodType(_layer, module)
                if kind not in few:
                    few[kind] = _few_agree(module, _try_theirs)
                module.few_rows = few[kind]
                if few[kind]:
                    module.tells_attention = _told(module)
    names = [kind.__name__ for kind, agrees in taken.items() if agrees]
    return [*names, *(f"few rows of {kind.__name__}" for kind, agrees in few.items() if agrees)]


def _has_fused_parts(parts: dict[str, nn.Module]) -> bool:
    norm, mlp = (_forward_of(parts.get(name)) for name in ("post_attention_layernorm", "mlp"))
    return norm in (_norm, _norm_from_one) and mlp is _gated


def _forward_of(module: nn.Module | None) -> object:
    """The fused forward that a module has, if any."""
    return None if module is None else getattr(vars(module).get("forward"), "__func__", None)


def _layer(module: Any, hidden_states: Tensor, *rest: Any, **named: Any) -> Any:
    """Decoder layer of pre-norm attention and gated MLP. Where something learns, or a copy of the layer has other
    parts, the class's own forward runs."""
    if _trains(hidden_states) or rest or not _has_fused_parts(dict(module.named_children())):
        return type(module).forward(module, hidden_states, *rest, **named)
    step, told = named.get("kv_step"), getattr(module, "tells_attention", None)
    if told is not None and step is not None and step.past_B is not None:
        told_step = {**told, "kv_step": step}
        attention = lambda query, key, value: attend(module.self_attn, query, key, value, None, **told_step)[0]  # noqa: E731
        decoded = _decoded(module, hidden_states, named["position_embeddings"], attention)
        if decoded is not None:
            return decoded
    attended = module.self_attn(hidden_states=module.input_layernorm(hidden_states), **named)[0]
    return _finish(module, hidden_states, attended)


def _trains(x: Tensor) -> bool:
    """Whether a pass may be one of training, which neither sums in place nor kernels without autocast serve."""
    return torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type)


def _decoded(module: Any, state_BNH: Tensor, turn: tuple[Tensor, Tensor], attention: Forward) -> Tensor | None:
    """What a decoder layer gives for few rows, in a few kernels; None where they do not take its parts.

    `turn`: cos, sin [B, N, D]; `attention`: queries [B, Q, N, D], keys and values -> [B, N, Q, D].
    """
    heads = _heads(module, [(state_BNH, module.input_layernorm)], *turn)
    return None if heads is None else _finish_few(module, state_BNH, attention(*heads))


def _heads(module: Any, parts: Any, cos_BND: Tensor, sin_BND: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Rotated queries [B, Q, N, D], rotated keys [B, G, N, D] and values of parts with their norms, in one kernel.

    None where the kernel does not take the layer's parts, or so many rows.
    """
    from .row_products import takes, turned_product

    attn, x = module.self_attn, parts[0][0]
    # Nothing else may stand in the attention, such as norms of its heads.
    only = {name for name, _ in attn.named_children()} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    linears = [attn.q_proj, attn.k_proj, attn.v_proj] if only and _few(module, x) else []
    weight, norms = joint_weights(linears), [_norm_of(norm) for _, norm in parts]
    if weight is None or not takes(x, weight) or None in norms or cos_BND.shape != (*x.shape[:2], attn.head_dim):
        return None
    sizes = [linear.out_features for linear in linears]
    turned = (sizes[0] + sizes[1]) // attn.head_dim
    product = turned_product([(x, norm) for (x, _), norm in zip(parts, norms)], weight, cos_BND, sin_BND, turned)
    query, key, value = (
        part.view(*x.shape[:2], -1, attn.head_dim).transpose(1, 2) for part in torch.split(product, sizes, dim=-1)
    )
    return query, key, value


def _few(module: Any, x: Tensor) -> bool:
    """Whether a layer's output and MLP are those that kernels for few rows take, and x [..., H] has so few."""
    from .row_products import takes

    mlp = module.mlp
    plain = all(type(one) is nn.Linear and one.bias is None for one in (module.self_attn.o_proj, mlp.down_proj))
    gate_up = joint_weights([mlp.gate_proj, mlp.up_proj])
    return getattr(module, "few_rows", False) and plain and gate_up is not None and takes(x, gate_up)


def _norm_of(module: Any) -> Any:
    """Settings of a fused RMSNorm, ours or transformers'; None: it is no such norm."""
    from .row_products import Norm

    if _forward_of(module) is _norm:
        return Norm(module.weight, _eps(module))
    return Norm(module.weight, _eps(module), 1.0) if _forward_of(module) is _norm_from_one else None


def _finish_few(module: Any, residual: Tensor, attended_BNQD: Tensor) -> Tensor:
    """What a decoder layer gives [B, N, H] of its residual and heads' attention, in three kernels."""
    from .row_products import add_product, gated_product

    mlp, norm = module.mlp, _norm_of(module.post_attention_layernorm)
    state = add_product(attended_BNQD.flatten(-2), module.self_attn.o_proj.weight, residual)
    gate_up: Any = joint_weights([mlp.gate_proj, mlp.up_proj])
    return add_product(gated_product(state, norm, gate_up), mlp.down_proj.weight, state)


def _read_ours(module: Any, parts: Any, waves: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`DecoderLayer.read` of our own drafts."""
    x = parts[0][0]
    heads = None if _trains(x) or not _few(module, x) else _heads(module, parts, *waves.whole_heads)
    read: tuple[Tensor, Tensor, Tensor] = type(module).read(module, parts, waves) if heads is None else heads
    return read


def _finish_ours(module: Any, residual: Tensor, attended: Tensor) -> Tensor:
    """`DecoderLayer.finish` of our own drafts."""
    if _trains(residual):
        learned: Tensor = type(module).finish(module, residual, attended)
        return learned
    if _few(module, residual):
        return _finish_few(module, residual, attended)
    return _finish(module, residual, module.self_attn.o_proj(attended.flatten(-2)))


def _finish(module: Any, residual: Tensor, attended: Tensor) -> Tensor:
    """What a decoder layer gives [..., H]: residual and attention's output, and the MLP of their normed sum."""
    from .pointwise import add_norm

    # The sum is normed in the same kernel.
    norm, down = module.post_attention_layernorm, module.mlp.down_proj
    offset, late = (0.0, True) if _forward_of(norm) is _norm else (1.0, False)
    state, normed = add_norm(residual, attended, norm.weight, _eps(norm), offset, late)
    product = _gated_product(module.mlp, normed)
    # Nobody else reads the sum, so the last product is added in its place.
    plain = type(down) is nn.Linear and down.bias is None
    if plain:
        state.flatten(0, -2).addmm_(product.flatten(0, -2), down.weight.t())
    return state if plain else state + down(product)


def _layers_agree(module: Any) -> bool:
    """Whether `_layer` and the class's own forward agree, whatever attention gives. No hook of the layer runs: those of
    a sharded target would take its weights apart again."""
    weight = module.post_attention_layernorm.weight
    row_11H = torch.linspace(-3, 3, len(weight), device=weight.device, dtype=weight.dtype)[None, None]
    # A stand-in for attention: the layer's own wants positions and a cache.
    own = vars(module.self_attn).get("forward")
    module.self_attn.forward = lambda hidden_states, **named: (hidden_states.flip(-1), None)
    try:
        rows = [scale * row_11H for scale in _SCALES]
        pairs = [(type(module).forward(module, row_11H), _layer(module, row_11H)) for row_11H in rows]
    except (TypeError, AttributeError):  # it reads something else
        return False
    finally:
        del module.self_attn.forward
        if own is not None:
            module.self_attn.forward = own
    return all(isinstance(theirs, Tensor) and _close(theirs, ours) for theirs, ours in pairs)


def _few_agree(module: Any, trial: Callable[[Any, Tensor], list[tuple[Any, Any]]]) -> bool:
    """Whether the kernels for few rows and the layer's class agree, for each row of as many as either kernel takes."""
    from triton.errors import TritonError

    weight = module.post_attention_layernorm.weight
    row_H, module.few_rows = torch.linspace(-3, 3, len(weight), device=weight.device, dtype=weight.dtype), True
    for count in _TRIED:
        rows = [_SCALES[n % len(_SCALES)] * row_H.roll(n) for n in range(count)]
        try:
            pairs = trial(module, torch.stack(rows)[None])
        except TritonError as error:  # of a GPU, or a Triton, that they were not written for
            say(f"{type(module).__name__}: its own modules decode few rows: {one_line(error)}")
            return False
        for theirs, ours in pairs:
            alike = isinstance(theirs, Tensor) and isinstance(ours, Tensor) and theirs.shape == ours.shape
            if not alike or not all(map(_close, theirs.flatten(0, 1), ours.flatten(0, 1))):
                return False
    return True


def _try_theirs(module: Any, state_1NH: Tensor) -> list[tuple[Any, Any]]:
    """What the class of a layer of transformers gives around a stand-in for attention, and what ours give."""
    turn = _some_angles(module, state_1NH)
    if turn is None:
        return [(None, None)]
    return [(_told_trial(module, state_1NH, turn, []), _decoded(module, state_1NH, turn, _mixed))]


def _told(module: Any) -> dict[str, Any]:
    """What a layer tells its attention, which the kernels for few rows tell it in its place."""
    told: list[dict[str, Any]] = []
    row_11H = module.post_attention_layernorm.weight[None, None]
    _told_trial(module, row_11H, _some_angles(module, row_11H), told)
    return {name: told[0][name] for name in _ATTENTION if name in told[0]}


def _told_trial(module: Any, state_1NH: Tensor, turn: Any, told: list[dict[str, Any]]) -> Any:
    """The class's own forward, whose attention is `_mixed` and notes what it is told; None: it reads something else."""
    config = module.self_attn.config
    config._attn_implementation = _TRIAL
    try:
        return type(module).forward(module, state_1NH, position_embeddings=turn, trial=told)
    except (TypeError, AttributeError):
        return None
    finally:
        config._attn_implementation = NAME


def _some_angles(module: Any, state_1NH: Tensor) -> tuple[Tensor, Tensor] | None:
    """Cosine and sine [1, N, D] for a layer that attends by our own function; None: it does not."""
    attn = module.self_attn
    size = getattr(attn, "head_dim", None)
    if size is None or getattr(getattr(attn, "config", None), "_attn_implementation", None) != NAME:
        return None
    angle_1ND = torch.linspace(0, 3, size * state_1NH.shape[1], device=state_1NH.device).view(1, -1, size)
    return angle_1ND.cos().to(state_1NH.dtype), angle_1ND.sin().to(state_1NH.dtype)


def _try_ours(module: Any, state_1NH: Tensor) -> list[tuple[Any, Any]]:
    """What the class of a layer of our own gives before and behind attention, and what the kernels give."""
    attn, kind = module.self_attn, type(module)
    parts = [(state_1NH, module.post_attention_layernorm)] * (attn.q_proj.in_features // state_1NH.shape[-1])
    positions_1N = torch.arange(7, 7 + state_1NH.shape[1], device=state_1NH.device)[None]
    waves = attn.rope.waves(positions_1N, state_1NH.dtype)
    theirs, ours = kind.read(module, parts, waves), module.read(parts, waves)
    attended = _mixed(*theirs)
    pairs = [(one.transpose(1, 2), other.transpose(1, 2)) for one, other in zip(theirs, ours)]
    return [*pairs, (kind.finish(module, state_1NH, attended), module.finish(state_1NH, attended))]


def _attend_trial(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    trial: list[dict[str, Any]] | None = None,
    **told: Any,
) -> tuple[Tensor, None]:
    """Attention of a trial: `_mixed`; `trial` notes what it is told."""
    if trial is not None:
        trial.append(told)
    return _mixed(query, key, value), None


def _mixed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A stand-in for attention that reads all heads: [B, N, Q, D]."""
    shared = query.shape[1] // key.shape[1]
    return (query + (key - 2 * value).repeat_interleave(shared, 1)).transpose(1, 2)


AttentionInterface.register(_TRIAL, _attend_trial)


def _fuse_angles(model: nn.Module) -> list[str]:
    """Fuse the modules that make a pass's rotary angles, where frequencies are fixed; returns their classes' names."""
    names: list[str] = []
    module: Any
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        fixed = isinstance(kind, str) and "dynamic" not in kind and kind != "longrope"
        if not fixed or not hasattr(module, "inv_freq") or not hasattr(module, "attention_scaling"):
            continue
        positions_BN = torch.tensor([[0, 1, 2, 1000], [7, 63, 64, 8000]], device=module.inv_freq.device)
        x = module.inv_freq.new_zeros(1)
        if all(map(_close, module(x, positions_BN), _angles(module, x, positions_BN))):
            module.forward = MethodType(_angles, module)
            names.append(type(module).__name__)
    return names


def _angles(module: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine [B, T, D] of a module's rotary angles in x's type."""
    from .pointwise import angles

    return angles(position_ids, module.inv_freq, float(module.attention_scaling), x.dtype)


def _gated(module: Any, x: Tensor) -> Tensor:
    down: Tensor = module.down_proj(_gated_product(module, x))
    return down


def _gated_product(module: Any, x: Tensor) -> Tensor:
    """What the down projection of a gated MLP reads [..., I]."""
    gate, up = module.gate_proj(x), module.up_proj(x)
    # Our own kernel has no gradient, Liger's has.
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):  # an adapter learns below
        from liger_kernel.ops import LigerSiLUMulFunction

        product: Tensor = LigerSiLUMulFunction.apply(gate, up)
        return product
    from .pointwise import gated_silu

    return gated_silu(gate, up)


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
