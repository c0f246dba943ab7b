"""What one pass of a target shows of its caches and how it can be run: how many slots fit, whether graphs hold it."""

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from ..errors import InputError
from .cache import KVCache, reads_lengths
from .cuda_graphs import OpCounter, running
from .models import CausalModel

_WORKING = 48  # bytes that one row of the vocabulary takes a token while it is sampled and listened to


class Probe(NamedTuple):
    """What a pass over one token showed."""

    token_bytes: int  # that it left in the cache
    waits: bool  # for the device, as models do that sort tokens by expert on the host


def probe_pass(target: CausalModel) -> Probe:
    """Run one token through the model; once for each model."""
    if target not in _probed:
        _probed[target] = _probe(target)
    return _probed[target]


_probed: WeakKeyDictionary[CausalModel, Probe] = WeakKeyDictionary()


def _probe(target: CausalModel) -> Probe:
    cache, watch = KVCache(1, 1, target.device), OpCounter()
    one = torch.ones(1, dtype=torch.long, device=target.device)
    ids_BT, step = one[None], cache.prefill(one - 1, one)
    with running(target.device), watch:
        target.logits(target.states(ids_BT, step).hidden_BTH)
    return Probe(cache.nbytes, bool(watch.waiting or watch.bringing))


def takes_graphs(target: CausalModel) -> bool:
    """Whether CUDA graphs can hold its passes over a cache."""
    return reads_lengths(target.device) and not probe_pass(target).waits


def fitting_slots(target: CausalModel, slots: int, capacity: int) -> int:
    """At most so many slots of that capacity as fit the GPU; at least one is tried."""
    if target.device.type != "cuda":
        return slots
    return max(1, min(slots, _most(target, probe_pass(target).token_bytes, capacity)))


def fitting_capacity(target: CausalModel, token_bytes: int, slots: int, least: int, wanted: int) -> int:
    """The wanted capacity of that many slots, or what fits the GPU. Elsewhere memory is not ours to count.

    Raises InputError where that is less than `least`.
    """
    if target.device.type != "cuda":
        return wanted
    free = _free(target)
    fits = (free // (slots + 1) - _WORKING * target.vocab_size) // token_bytes - 1
    if fits < least:
        raise InputError(
            f"batch_size {slots}: {free / 1e9:.1f} GB are free on {target.device}, too little for caches of {least} "
            f"tokens: must be at most {max(0, _most(target, token_bytes, least))}"
        )
    return min(wanted, fits)


def _most(target: CausalModel, token_bytes: int, capacity: int) -> int:
    """Slots of that capacity that fit, beside the spare one."""
    return _free(target) // (_WORKING * target.vocab_size + token_bytes * (capacity + 1)) - 1


def _free(target: CausalModel) -> int:
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(target.device)[0]
