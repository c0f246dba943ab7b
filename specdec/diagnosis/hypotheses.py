"""Hypotheses of a draft that drafts worse than it was trained to: each changes, in memory, how the draft or the target
is read. What the draft reads of the target, and norms, are here; other subjects have files of their own.

The order of HYPOTHESES is that of likelihood: of changes that restore alike the first is named.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import torch
from torch import Tensor, nn

from ..drafts.eagle3 import Eagle3Draft
from ..drafts.layers import RMSNorm
from . import attention_changes, vocabulary_changes, weight_changes
from .reading import Change, Changes, Reading, Scene, configured, put, shared_copy

FEATURES = ("eagle", "eagle3", "peagle")
BLOCKS = (*FEATURES, "dflash", "dspark")
STATEFUL = (*BLOCKS, "medusa")
ALL = (*STATEFUL, "small")
_ARRANGED = 4  # captured layers of which all orders are tried


@dataclass(frozen=True)
class Hypothesis:
    """What may be wrong, the families that it fits, and the changed readings to try."""

    name: str
    families: tuple[str, ...]
    changes: Changes

    def of(self, reading: Reading, scene: Scene) -> Iterator[Change]:
        """Changed readings of a draft; none where its family has no such fault."""
        if reading.draft.family in self.families:
            yield from self.changes(reading, scene)


def _layers(reading: Reading, scene: Scene) -> Iterator[Change]:
    """Captured layers one or two off, those that every engine takes by default, and evenly spaced ones."""
    now, last = tuple(reading.draft.target_layers), scene.target.num_layers
    moved = [tuple(layer + by for layer in now) for by in (1, -1, 2, -2)]
    if len(now) == 3:
        moved += [tuple(layer + by for layer in (2, last // 2, last - 3)) for by in (0, 1, -1)]
    if len(now) > 1:
        moved.append(tuple(2 + round(place * (last - 4) / (len(now) - 1)) for place in range(len(now))))
    yield from _captured(reading, moved, last)


def _each_layer(reading: Reading, scene: Scene) -> Iterator[Change]:
    """Another layer in the place of each captured one."""
    now, last = tuple(reading.draft.target_layers), scene.target.num_layers
    others = [(*now[:at], other, *now[at + 1 :]) for at in range(len(now)) for other in range(1, last + 1)]
    yield from _captured(reading, others, last)


def _captured(reading: Reading, layers: Iterable[tuple[int, ...]], last: int) -> Iterator[Change]:
    """The draft with other captured layers, where those are ascending layers up to the `last`."""
    now = tuple(reading.draft.target_layers)
    for some in dict.fromkeys(layers):
        if some != now and list(some) == sorted(set(some)) and some[0] >= 1 and some[-1] <= last:
            draft = configured(reading, aux_layers=some)
            yield Change(f"captured layers {list(some)}, not {list(now)}", replace(reading, draft=draft))


def _layer_order(reading: Reading, scene: Scene) -> Iterator[Change]:
    """Columns of fc in another order than the captured layers."""
    count = len(reading.draft.target_layers)
    orders = list(permutations(range(count))) if count <= _ARRANGED else [tuple(reversed(range(count)))]
    for order in orders:
        if order == tuple(range(count)):
            continue
        draft = shared_copy(reading.draft)
        parts = draft.fc.weight.chunk(count, dim=1)
        put(draft.fc, "weight", torch.cat([parts[place] for place in order], 1))
        shown = [reading.draft.target_layers[place] for place in order]
        yield Change(f"fc reads the captured layers in the order {shown}", replace(reading, draft=draft))


def _norm_of_state(reading: Reading, scene: Scene) -> Iterator[Change]:
    """The target's last state before its final norm instead of after it."""
    if reading.draft.target_layers:
        return
    words = "after" if reading.before_norm else "before"
    yield Change(
        f"the target's state {words} its final norm is read", replace(reading, before_norm=not reading.before_norm)
    )


def _paired(reading: Reading, scene: Scene) -> Iterator[Change]:
    """Pairs of state and token shifted against each other."""
    for by in (-1, 1):
        words = "before" if by < 0 else "after"
        yield Change(
            f"the state of the token {words} the served one is read", replace(reading, shift=reading.shift + by)
        )


def _flags(reading: Reading, scene: Scene) -> Iterator[Change]:
    """Flags without tensors: every other setting of norm_output and norm_before_residual."""
    config = reading.draft.config
    names = ("norm_before_residual", "norm_output")
    now = tuple(getattr(config, name) for name in names)
    for values in ((not now[0], now[1]), (now[0], not now[1]), (not now[0], not now[1])):
        fields = dict(zip(names, values))
        said = ", ".join(
            f"{name} {str(value).lower()}" for name, value in fields.items() if value != getattr(config, name)
        )
        yield Change(said, replace(reading, draft=configured(reading, **fields)))


def _fusion_norms(reading: Reading, scene: Scene) -> Iterator[Change]:
    """Norms around fc: without those that are there, and with norms of ones where there are none."""
    config = reading.draft.config
    if not config.aux_layers:
        return
    size, count = config.target_hidden_size, len(config.aux_layers)
    for fc_norm, before_fc in ((False, False), (True, False), (False, True)):
        if (fc_norm, before_fc) == (config.fc_norm, config.norm_before_fc):
            continue
        draft = configured(reading, fc_norm=fc_norm, norm_before_fc=before_fc)
        like = draft.fc.weight
        norms = [RMSNorm(size, config.rms_norm_eps).to(like) for _ in range(count)]
        if fc_norm and config.norm_before_fc:  # the same weights, in pieces
            for norm, part in zip(norms, draft.fc.input_norm.weight.chunk(count)):
                put(norm, "weight", part)
        whole = RMSNorm(count * size, config.rms_norm_eps).to(like)
        if before_fc and config.fc_norm:
            put(whole, "weight", torch.cat([norm.weight for norm in draft.fc.norms]))
        draft.fc.norms = nn.ModuleList(norms) if fc_norm else None
        draft.fc.input_norm = whole if before_fc else None
        yield Change(
            f"fc_norm {str(fc_norm).lower()}, norm_before_fc {str(before_fc).lower()}", replace(reading, draft=draft)
        )


def _norm_weights(reading: Reading, scene: Scene) -> Iterator[Change]:
    """Weights of norms that are stored less one, as Gemma's are; or the two norms of the first layer exchanged."""
    for by in (1.0, -1.0):
        draft = shared_copy(reading.draft)
        for module in draft.modules():
            if "RMSNorm" in type(module).__name__ and isinstance(getattr(module, "weight", None), Tensor):
                put(module, "weight", module.weight + by)
        yield Change(f"weights of all norms {by:+g}", replace(reading, draft=draft))
    if isinstance(reading.draft, Eagle3Draft):
        draft = shared_copy(reading.draft)
        first = draft.midlayer
        first.input_layernorm, first.hidden_norm = first.hidden_norm, first.input_layernorm
        yield Change("input_layernorm and hidden_norm exchanged", replace(reading, draft=draft))


def _eps(reading: Reading, scene: Scene) -> Iterator[Change]:
    now = getattr(getattr(reading.draft, "config", None), "rms_norm_eps", None)
    if now is None:
        return
    for eps in (1e-5, 1e-6):
        if math.isclose(eps, now):
            continue
        draft = configured(reading, rms_norm_eps=eps)
        for module in draft.modules():
            if isinstance(module, RMSNorm):
                module.eps = eps
        yield Change(f"rms_norm_eps {eps:g}, not {now:g}", replace(reading, draft=draft))


HYPOTHESES: Sequence[Hypothesis] = (
    Hypothesis("captured layers", ("eagle3", "peagle", "dflash", "dspark"), _layers),
    Hypothesis("norm flags", ("eagle3", "peagle"), _flags),
    Hypothesis("norms around fc", ("eagle3", "peagle"), _fusion_norms),
    Hypothesis("vocabulary map", ("eagle3", "peagle", "dflash", "dspark"), vocabulary_changes.vocabulary),
    Hypothesis("rotary embedding", BLOCKS, attention_changes.rope),
    Hypothesis("rotary embedding", ("small",), attention_changes.small_rope),
    Hypothesis("embeddings or head of another target", ALL, vocabulary_changes.lent),
    Hypothesis("tied embeddings", ALL, vocabulary_changes.tied),
    Hypothesis("another tokenizer", ALL, vocabulary_changes.tokenizer),
    Hypothesis("state before or after the norm", STATEFUL, _norm_of_state),
    Hypothesis("layout of a block", ("dflash", "dspark"), attention_changes.anchor),
    Hypothesis("mask token", ("dflash", "dspark"), attention_changes.block),
    Hypothesis("causal or not", ("dflash", "dspark"), attention_changes.causal),
    Hypothesis("position shift", BLOCKS, attention_changes.positions),
    Hypothesis("state and token shifted", STATEFUL, _paired),
    Hypothesis("sliding window", ("eagle3", "peagle", "dflash", "dspark"), attention_changes.windows),
    Hypothesis("order of heads", ("medusa",), weight_changes.medusa),
    Hypothesis("order of the captured layers", ("eagle3", "peagle", "dflash", "dspark"), _layer_order),
    Hypothesis("embedding and state exchanged", FEATURES, weight_changes.halves),
    Hypothesis("rotary pairs", (*BLOCKS, "small"), attention_changes.pairs),
    Hypothesis("size of heads", BLOCKS, attention_changes.heads),
    Hypothesis("weights of norms", ALL, _norm_weights),
    Hypothesis("weights in another order", ALL, weight_changes.gates),
    Hypothesis("integer codes", ALL, weight_changes.codes),
    Hypothesis("scaled embeddings", FEATURES, vocabulary_changes.scaled),
    Hypothesis("epsilon of norms", BLOCKS, _eps),
    Hypothesis("dtype", ALL, weight_changes.float32),
)
"""Hypotheses in order of likelihood."""
LAST_RESORTS: Sequence[Hypothesis] = (
    Hypothesis("captured layers", ("eagle3", "peagle", "dflash", "dspark"), _each_layer),
)
"""Hypotheses of many changes, which are tried where none of the others restores."""
