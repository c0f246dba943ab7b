"""The decoder's own key-value cache: preallocated, ragged, attention over true lengths.

Shapes: S slots, B rows of one pass (the first B slots), N new tokens a row, T prompt tokens, G key-value heads,
L cached positions, D head size.

transformers changes its cache API between minor releases, so no model here ever sees one: the attention function
(`attention.py`) writes into and reads from a `Step` of this cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class KVCache:
    """Keys and values of S slots of `capacity` tokens each. Layers are allocated when first written.

    A slot's length is the number of tokens whose keys count; what lies past it is garbage that the next pass
    overwrites. Rejecting drafted tokens is therefore free: the length just does not grow.
    """

    def __init__(self, slots: int, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self.device = device
        self.lengths = [0] * slots
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def prefill(self, slots: Sequence[int], lengths: Sequence[int]) -> "Step":
        """A step that fills fresh slots with right-padded prompts; each sees only itself, causally."""
        for slot, length in zip(slots, lengths):
            self.lengths[slot] = length
        return Step(self, rows=torch.tensor(slots, device=self.device), positions_BN=None, visible_BNL=None)

    def extend(self, batch: int, tokens: int) -> "Step":
        """A step that adds `tokens` tokens to each of the first `batch` slots; call `keep` after it.

        Rows shorter than `tokens` are padded on the right: causality hides the padding from real tokens.
        """
        length_B = torch.tensor(self.lengths[:batch], device=self.device)
        positions_BN = length_B[:, None] + torch.arange(tokens, device=self.device)
        longest = max(self.lengths[:batch]) + tokens
        visible_BNL = torch.arange(longest, device=self.device) <= positions_BN[..., None]
        rows = torch.arange(batch, device=self.device)
        return Step(self, rows=rows, positions_BN=positions_BN, visible_BNL=visible_BNL)

    def keep(self, counts: Sequence[int]) -> None:
        """Let the first `counts[b]` tokens of the last step stay in slot b."""
        for slot, count in enumerate(counts):
            self.lengths[slot] += count

    def move(self, source: int, destination: int) -> None:
        """Copy one slot onto another, so that the active slots stay the first ones."""
        length = self.lengths[source]
        for layer in (*self._keys.values(), *self._values.values()):
            layer[destination, :, :length] = layer[source, :, :length]
        self.lengths[destination] = length

    def write(self, layer: int, step: "Step", key_BGND: Tensor, value_BGND: Tensor) -> None:
        """Store a layer's new keys and values where the step puts them."""
        if layer not in self._keys:
            shape = (len(self.lengths), key_BGND.shape[1], self.capacity)
            self._keys[layer] = key_BGND.new_zeros(*shape, key_BGND.shape[-1])
            self._values[layer] = value_BGND.new_zeros(*shape, value_BGND.shape[-1])
        if step.positions_BN is None:
            self._keys[layer][step.rows, :, : key_BGND.shape[2]] = key_BGND
            self._values[layer][step.rows, :, : key_BGND.shape[2]] = value_BGND
        else:
            at = (step.rows[:, None], slice(None), step.positions_BN)
            self._keys[layer][at] = key_BGND.transpose(1, 2)
            self._values[layer][at] = value_BGND.transpose(1, 2)

    def read(self, layer: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
        """Views [B, G, L, D] of the first `batch` slots, cut to the longest of them; nothing is copied."""
        return self._keys[layer][:batch, :, :length], self._values[layer][:batch, :, :length]


@dataclass(frozen=True)
class Step:
    """Where one forward pass writes its keys and what each of its tokens may see."""

    cache: KVCache
    rows: Tensor  # [B] slots
    positions_BN: Tensor | None  # None: prefill, positions 0..T-1
    visible_BNL: Tensor | None  # None: prefill, causal
