"""Changes of positions and attention: rotary embedding, shifted positions, windows, causality, heads, blocks."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..drafts.dflash import DFlashDraft
from ..drafts.layers import Attention, LayerConfig, Rope, RopeScaling
from ..kernels.document_mask import QueryMask
from ..models import CausalModel
from .reading import Change, Reading, Scene, configured, put, shared_copy

_THETAS = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)
_WINDOWS = (512, 1024, 2048, 4096)


def _roped(reading: Reading, theta: float, scaling: RopeScaling | None) -> Any:
    """Copy of a draft with another rotary embedding."""
    draft = configured(reading, rope_theta=theta, rope_scaling=scaling)
    for module in draft.modules():
        if isinstance(module, Attention):
            module.rope = Rope(theta, module.head_dim, scaling)
    return draft


def rope(reading: Reading, scene: Scene) -> Iterator[Change]:
    """Rotary base and scaling: the target's, none, and bases that models have."""
    config: LayerConfig = reading.draft.config
    theirs = scaling_of(scene.target, config)
    bases = [theta_of(scene.target), *_THETAS, config.rope_theta]
    scalings = [config.rope_scaling, None, theirs]
    seen = {(config.rope_theta, config.rope_scaling)}
    for theta in bases:
        for scaling in scalings:
            if theta is None or (theta, scaling) in seen:
                continue
            seen.add((theta, scaling))
            kept = scaling == config.rope_scaling
            kind = "" if kept else f", rope_scaling {'none' if scaling is None else scaling.rope_type}"
            yield Change(
                f"rope_theta {theta:g}{kind} (was {config.rope_theta:g})",
                replace(reading, draft=_roped(reading, theta, scaling)),
            )


def theta_of(target: CausalModel) -> float | None:
    """Rotary base of a target; None: its config names none."""
    rope = getattr(target.config, "rope_parameters", None) or {}
    found = rope.get("rope_theta", getattr(target.config, "rope_theta", None))
    return None if found is None else float(found)


def scaling_of(target: CausalModel, config: LayerConfig) -> RopeScaling | None:
    """Rope scaling of a target as a draft's; None: none, or none that a draft may have."""
    rope = dict(getattr(target.config, "rope_parameters", None) or {})
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return None
    named = {name: value for name, value in rope.items() if name != "rope_theta" and value is not None}
    try:
        return type(config).model_validate(config.model_dump() | {"rope_scaling": named}).rope_scaling
    except ValueError:
        return None


def small_rope(reading: Reading, scene: Scene) -> Iterator[Change]:
    """Rotary base of a small model."""
    now = theta_of(reading.draft.lm)
    for theta in dict.fromkeys([theta_of(scene.target), *_THETAS]):
        if theta is None or theta == now:
            continue
        draft = shared_copy(reading.draft)
        for module in draft.modules():
            if isinstance(found := getattr(module, "inv_freq", None), Tensor):
                size = 2 * len(found)
                wave = theta ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
                module.inv_freq = wave.to(found.device)
        for config in (draft.model.config, draft.model.config.get_text_config()):
            config.rope_parameters = {"rope_type": "default", "rope_theta": theta}
        was = "none" if now is None else f"{now:g}"
        yield Change(f"rope_theta {theta:g} (was {was})", replace(reading, draft=draft))


def positions(reading: Reading, scene: Scene) -> Iterator[Change]:
    """Drafted positions one earlier or later against the context's."""
    for by in (-1, 1):
        draft = shared_copy(reading.draft)
        inner = draft.forward
        draft.forward = lambda embeds, states, at, *rest, inner=inner, by=by: inner(
            embeds, states, _Shifted(at, by), *rest
        )
        words = "earlier" if by < 0 else "later"
        yield Change(f"drafted positions one {words}", replace(reading, draft=draft, tampered=True))


class _Shifted(QueryMask):
    """The same queries, at other rotary positions."""

    def __init__(self, mask: QueryMask, by: int) -> None:
        super().__init__(mask.documents, mask.at_BM)
        self.positions_BM = mask.positions_BM + by


def windows(reading: Reading, scene: Scene) -> Iterator[Change]:
    """Sliding window: none, or one of the usual ones."""
    config = reading.draft.config
    for window in (None, *_WINDOWS):
        if window == config.sliding_window:
            continue
        draft = configured(reading, sliding_window=window, full_attention_layers=())
        was = "none" if config.sliding_window is None else config.sliding_window
        yield Change(
            f"sliding_window {'none' if window is None else window} (was {was})", replace(reading, draft=draft)
        )


def causal(reading: Reading, scene: Scene) -> Iterator[Change]:
    """A block that sees its later tokens, or does not."""
    config = reading.draft.config
    for causal in ("none", "all", "sliding"):
        if causal != config.causal and (causal != "sliding" or config.sliding_window is not None):
            words = {"none": "in both directions", "all": "causally", "sliding": "causally where a window slides"}
            yield Change(
                f"attends within a block {words[causal]}", replace(reading, draft=configured(reading, causal=causal))
            )


def heads(reading: Reading, scene: Scene) -> Iterator[Change]:
    """Another size of attention heads for the same projections."""
    config = reading.draft.config
    if getattr(config, "body", "llama") == "qwen3" or isinstance(reading.draft, DFlashDraft):
        return  # their norms have the size of a head
    wide, narrow = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    for size in (32, 48, 64, 80, 96, 128, 256, 16):
        if size == config.head_dim or wide % size or narrow % size or (wide // size) % (narrow // size):
            continue
        fields = {"head_dim": size, "num_attention_heads": wide // size, "num_key_value_heads": narrow // size}
        draft = configured(reading, **fields)
        for module in draft.modules():
            if isinstance(module, Attention):
                module.heads, module.groups, module.head_dim = wide // size, narrow // size, size
                module.rope = Rope(config.rope_theta, size, config.rope_scaling)
        yield Change(f"head_dim {size}, not {config.head_dim}", replace(reading, draft=draft))


def pairs(reading: Reading, scene: Scene) -> Iterator[Change]:
    """Rows of the query and key projections, of both or of one, in the order of interleaved rotary pairs, as GGUF
    stores some."""
    for names, interleaved in product((("q_proj", "k_proj"), ("q_proj",), ("k_proj",)), (True, False)):
        draft = shared_copy(reading.draft)
        for module in draft.modules():
            if hasattr(module, "q_proj") and hasattr(module, "k_proj"):
                for linear in (getattr(module, name) for name in names):
                    for name in ("weight", "bias"):
                        if getattr(linear, name, None) is not None:
                            put(linear, name, _reordered(getattr(linear, name), module.head_dim, interleaved))
        order = "interleaved" if interleaved else "halved"
        yield Change(
            f"rows of {' and '.join(names)} were stored for {order} rotary pairs", replace(reading, draft=draft)
        )


def _reordered(rows: Tensor, size: int, interleaved: bool) -> Tensor:
    """Rows of heads of a `size` from interleaved pairs to halves, or back."""
    heads = rows.view(-1, size, *rows.shape[1:])
    parts = (
        heads.view(len(heads), size // 2, 2, *rows.shape[1:])
        if interleaved
        else heads.view(len(heads), 2, size // 2, *rows.shape[1:])
    )
    return parts.transpose(1, 2).reshape(rows.shape)


def block(reading: Reading, scene: Scene) -> Iterator[Change]:
    """Mask tokens of a block: other special tokens and the last ones of the vocabulary."""
    config = reading.draft.config
    likely = [*scene.special_ids, *range(config.vocab_size - 1, max(config.vocab_size - 5, -1), -1), 0]
    for token in dict.fromkeys(likely):
        if token != config.mask_token_id and 0 <= token < config.vocab_size:
            draft = configured(reading, mask_token_id=token)
            yield Change(f"mask_token_id {token}, not {config.mask_token_id}", replace(reading, draft=draft))


def anchor(reading: Reading, scene: Scene) -> Iterator[Change]:
    """Rows of a block that draft the token after themselves: the anchor's row drafts too. A DSpark draft's config says
    which; it may be wrong either way."""
    config = reading.draft.config
    if config.markov_rank:
        said = not config.sample_from_anchor
        draft = configured(reading, sample_from_anchor=said)
        yield Change(
            f"sample_from_anchor {str(said).lower()}, not {str(not said).lower()}", replace(reading, draft=draft)
        )
        return

    draft = shared_copy(reading.draft)
    inner = draft.forward

    # A block then has one mask less: mask j's row moves to mask j + 1, where the drafter looks for it.
    def anchored(embeds: Tensor, aux: Tensor, at: QueryMask) -> Tensor:
        states = inner(embeds[:, :, :-1], aux, at)
        return torch.cat([states[:, :, :1], states], 2)

    draft.forward = anchored
    yield Change(
        "rows of a block draft the token after themselves (sample_from_anchor true)",
        replace(reading, draft=draft, tampered=True),
    )
