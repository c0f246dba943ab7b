"""A draft on another device than the target, or in another precision. All that crosses, crosses here.

To the draft: texts, the nodes to read, and the target's states where it reads them. Back: logits over the vocabulary,
and traces. What a head borrows of the target, its embeddings or its head, is copied to the draft's place once a target,
when it is first read.

Shapes: B active slots, F nodes read at once, V vocabulary.
"""

import copy
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..cuda_graphs import running
from ..drafts.base import DraftModule
from ..models import CausalModel, States
from ..replay.packing import Pack
from ..sampling_settings import SamplingSettings
from .base import Drafter, Texts, Trace


class DraftDevice(NamedTuple):
    """Device and dtype of a model's tensors."""

    device: torch.device
    dtype: torch.dtype


def device_of(model: DraftModule | CausalModel) -> DraftDevice:
    """The device and dtype of a draft's or a target's weights."""
    return DraftDevice(model.device, model.dtype)


class OtherDeviceDrafter:
    """Wrapper of a drafter on another device: inputs are sent there, logits and traces come back to the target's."""

    def __init__(self, drafter: Drafter, here: torch.device, there: torch.device) -> None:
        self._drafter, self._here, self._there = drafter, here, there
        self.aux_layers, self.needs_hidden_states, self.nested = (
            drafter.aux_layers,
            drafter.needs_hidden_states,
            drafter.nested,
        )
        self.levels, self.width = drafter.levels, drafter.width
        self.needs_host_sync = True  # what crosses waits for either device

    def reserve(self, slots: int, tokens: int, nodes: int, levels: int) -> None:
        with running(self._there):
            self._drafter.reserve(slots, tokens, nodes, levels)

    def begin(self, slots_R: Tensor, known: Texts, states: States) -> None:
        with running(self._there):
            self._drafter.begin(slots_R.to(self._there), self._send_texts(known), self._send_states(states))

    def open(self, batch: int, chain: bool) -> Tensor:
        with running(self._there):
            return self._drafter.open(batch, chain).to(self._here)

    def expand(self, tokens_BF: Tensor, parents_BF: Tensor, depth: int) -> Tensor:
        with running(self._there):
            logits_BFV = self._drafter.expand(tokens_BF.to(self._there), parents_BF.to(self._there), depth)
            return logits_BFV.to(self._here)

    def observe(self, new: Texts, states: States) -> None:
        with running(self._there):
            self._drafter.observe(self._send_texts(new), self._send_states(states))

    def move(self, source: int, destination: int) -> None:
        with running(self._there):
            self._drafter.move(source, destination)

    def trace(self, pack: Pack, count: int, sampling: SamplingSettings, states: States | None) -> Trace:
        # The pack is built again on the draft's device, from the texts that the host has.
        with running(self._there):
            sent = None if states is None else self._send_states(states)
            trace = self._drafter.trace(Pack(pack.texts, self._there), count, sampling, sent)

        # Back to the target's device.
        offered_R = None if trace.offered_R is None else trace.offered_R.to(self._here)
        return Trace(trace.rank_RK.to(self._here), trace.q_RK.to(self._here), offered_R)

    def _send_texts(self, texts: Texts) -> Texts:
        return Texts(texts.ids_BT.to(self._there), texts.counts_B.to(self._there), texts.known)

    def _send_states(self, states: States) -> States:
        """States on the draft's device; unchanged for a draft that reads none, so that nothing is sent."""
        if not self.needs_hidden_states:
            return states
        aux = None if states.aux_BTA is None else states.aux_BTA.to(self._there)
        return States(states.hidden_BTH.to(self._there), aux)


def remote_copy(target: CausalModel, place: DraftDevice) -> CausalModel:
    """The target's `embed` and `logits`, and no more, on another device: for drafts that borrow them."""
    # One copy a target and place; it goes when the target goes.
    known = _COPIES.setdefault(target, {})
    if place not in known:
        known[place] = _RemoteWeights(target, place)
    return known[place]


class _RemoteWeights(CausalModel):
    """Lazy copies of the target's embeddings and head, made at first use. Tied ones are copied once."""

    def __init__(self, target: CausalModel, place: DraftDevice) -> None:
        self.__dict__.update(target.__dict__)  # loaded and checked already
        self._place, self._memo, self._brought = place, dict[int, Any](), set[str]()

    def embed(self, ids: Tensor) -> Tensor:
        self._bring("_embedding")
        return super().embed(ids)

    def logits(self, hidden: Tensor) -> Tensor:
        self._bring("_head")
        return super().logits(hidden)

    def _bring(self, name: str) -> None:
        # deepcopy's memo keeps weights that embeddings and head share one tensor.
        if name not in self._brought:
            theirs: nn.Module = getattr(self, name)
            with torch.inference_mode(False), torch.no_grad():
                setattr(self, name, copy.deepcopy(theirs, self._memo).to(*self._place))
            self._brought.add(name)


_COPIES: WeakKeyDictionary[CausalModel, dict[DraftDevice, _RemoteWeights]] = WeakKeyDictionary()
