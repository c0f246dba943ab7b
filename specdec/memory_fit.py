"""Memory fit: how many slots of a target's cache a GPU holds, and whether CUDA graphs can hold its passes."""

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from ..errors import InputError
from ..storage import size_text
from .cuda_graphs import OpCounter, running
from .kv_cache import KVCache, reads_lengths
from .models import CausalModel

_WORKING = 48  # bytes that one row of the vocabulary takes a token while it is sampled and listened to


class PassProbe(NamedTuple):
    """Findings of a pass over one token."""

    token_bytes: int  # of keys and values that it left in the cache
    waits: bool  # whether it waits for the device, as models do that sort tokens by expert on the host


def probe_pass(target: CausalModel) -> PassProbe:
    """Probe a pass: run one token through the model, once for each model."""
    if target not in _probed:
        _probed[target] = _probe(target)
    return _probed[target]


_probed: WeakKeyDictionary[CausalModel, PassProbe] = WeakKeyDictionary()


def _probe(target: CausalModel) -> PassProbe:
    # A prefill of one token into a cache of one place: its size is that of a token.
    cache, watch = KVCache(1, 1, target.device), OpCounter()
    count_R = torch.ones(1, dtype=torch.long, device=target.device)
    ids_BT, step = count_R[None], cache.prefill(count_R - 1, count_R)
    with running(target.device), watch:
        target.logits(target.states(ids_BT, step).hidden_BTH)
    return PassProbe(cache.nbytes, bool(watch.waiting or watch.bringing))


def takes_graphs(target: CausalModel) -> bool:
    """Whether CUDA graphs can hold the target's passes over a cache."""
    return reads_lengths(target.device) and not probe_pass(target).waits


def fitting_slots(target: CausalModel, slots: int, capacity: int) -> int:
    """Number of slots of that capacity that fit the GPU, at most `slots` and at least 1; off a GPU `slots`."""
    if target.device.type != "cuda":
        return slots
    return max(1, min(slots, _most_slots(target, probe_pass(target).token_bytes, capacity)))


def fitting_capacity(target: CausalModel, token_bytes: int, slots: int, least: int, wanted: int) -> int:
    """Capacity in tokens of each of that many slots: the wanted one, or what fits the GPU; off a GPU the wanted one.

    Raises InputError where that is less than `least`.
    """
    if target.device.type != "cuda":
        return wanted
    # Each slot, and the spare one, takes its cache and the working memory of one row of the vocabulary.
    free = _free_bytes(target)
    fits = (free // (slots + 1) - _WORKING * target.vocab_size) // token_bytes - 1
    if fits < least:
        raise InputError(
            f"batch_size {slots}: {size_text(free)} are free on {target.device}, too little for caches of {least} "
            f"tokens: must be at most {max(0, _most_slots(target, token_bytes, least))}"
        )
    return min(wanted, fits)


def _most_slots(target: CausalModel, token_bytes: int, capacity: int) -> int:
    """Slots of that capacity that fit, beside the spare one."""
    return _free_bytes(target) // (_WORKING * target.vocab_size + token_bytes * (capacity + 1)) - 1


def _free_bytes(target: CausalModel) -> int:
    # Blocks that torch keeps for reuse count as free.
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(target.device)[0]
