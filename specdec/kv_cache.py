"""Key-value cache of the decoder: preallocated, ragged, attention over true lengths.

Shapes: S slots, B rows of one pass (the first B slots), N new tokens a row, F tree entries so far, T prompt tokens,
G key-value heads, L cached positions, D head size (of a path: its depth).

transformers changes its cache API between minor releases, so no model here ever sees one: the attention function
(`attention.py`) writes into and reads from a `CacheStep` of this cache.
"""

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from .cuda_graphs import send


def runs_triton(device: torch.device) -> bool:
    """Whether Triton's kernels run on the device."""
    return device.type == "cuda" and find_spec("triton") is not None


def reads_lengths(device: torch.device) -> bool:
    """Whether attention over a cache on this device reads the slots' lengths there; else steps carry masks."""
    return runs_triton(device)


class KVCache:
    """Keys and values of S slots of `capacity` tokens each. Layers are allocated when first written.

    A slot's length is the number of tokens whose keys count; what lies past it is garbage that the next pass
    overwrites. Rejecting drafted tokens is therefore free: the length just does not grow. Lengths stay on the device,
    and where attention reads them there, nothing here waits for it.
    """

    def __init__(self, slots: int, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self.device = device
        self.lengths_S = torch.zeros(slots, dtype=torch.long, device=device)
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._addresses: list[tuple[list[Tensor], Tensor]] = []  # layers of one shape, and where each begins
        self._range = torch.arange(max(slots, capacity), device=device)  # made once: a launch less wherever it is read

    def prefill(self, slots_R: Tensor, lengths_R: Tensor) -> "CacheStep":
        """Prefill step: fills fresh slots with right-padded prompts; each sees only itself, causally."""
        self.lengths_S[slots_R] = lengths_R
        return CacheStep(self, slots_R, None, None)

    def extend(self, batch: int, tokens: int, skip: int = 0) -> "CacheStep":
        """Chain step: adds `tokens` tokens to each of the first `batch` slots; call `keep` after it.

        Rows shorter than `tokens` are padded on the right: causality hides the padding from real tokens. `skip`: number
        of tokens past a slot's length that count as part of its past.
        """
        # 1) New tokens stand right after each slot's past, at the positions that they have in the text.
        past_B = self.lengths_S[:batch]
        if skip:
            past_B = past_B + skip
        positions_BN = past_B[:, None]
        if tokens > 1:
            positions_BN = positions_BN + self._range[:tokens]
        rows = self._range[:batch]
        # 2) The kernel reads lengths on the device; elsewhere a causal mask is made, as wide as the longest row.
        if reads_lengths(self.device):
            return CacheStep(self, rows, positions_BN, positions_BN, past_B=past_B)
        longest = int(past_B.max()) + tokens
        visible_BNL = torch.arange(longest, device=self.device) <= positions_BN[..., None]
        return CacheStep(self, rows, positions_BN, positions_BN, visible_BNL)

    def branch(self, depth_BF: Tensor, visible_BNF: Tensor, positions_BN: Tensor | None = None) -> "CacheStep":
        """Tree step: adds the last N of F tree entries to each of the first B slots; call `keep_path` after it.

        The entries stand side by side past a slot's length. Each sees the slot's past and the entries that
        `visible_BNF` names; its position is the length plus its depth, computed here unless it is given.
        """
        # 1) Positions in the text, by the entries' depths.
        batch, new, entries = visible_BNF.shape
        past_B = self.lengths_S[:batch]
        rows, length_B1 = self._range[:batch], past_B[:, None]
        if positions_BN is None:
            positions_BN = length_B1 + depth_BF[:, entries - new :]
        # 2) The kernel reads lengths and the tree's mask on the device, and puts the new keys behind what is there.
        if reads_lengths(self.device):
            return CacheStep(self, rows, positions_BN, None, past_B=past_B, tree=(visible_BNF, depth_BF))
        # 3) Elsewhere a mask over all keys is made: which entry of the tree each key is, if any.
        at_BN = length_B1 + self._range[entries - new : entries]
        keys_L = torch.arange(int(past_B.max()) + entries, device=self.device)
        entry_BL = keys_L - length_B1
        inside_BL = (entry_BL >= 0) & (entry_BL < entries)
        entry_BL = entry_BL.clamp(0, entries - 1)
        # A query sees the whole past, and of the tree what its mask names.
        among_BNL = visible_BNF.gather(2, entry_BL[:, None].expand(-1, new, -1))
        visible_BNL = (keys_L < length_B1)[:, None] | (inside_BL[:, None] & among_BNL)
        # A sliding window needs a key's position in the text, which in the tree is not its place in the cache.
        key_positions_BL = torch.where(inside_BL, length_B1 + depth_BF.gather(1, entry_BL), keys_L)
        return CacheStep(self, rows, positions_BN, at_BN, visible_BNL, key_positions_BL)

    def keep(self, counts_B: Tensor) -> None:
        """Let the first `counts[b]` tokens of the last step stay in slot b."""
        self.lengths_S[: len(counts_B)].add_(counts_B)  # in place: `+=` would also copy the slice onto itself

    def keep_path(self, path_BD: Tensor, counts_B: Tensor) -> None:
        """Let the first `counts[b]` tree entries of `path_BD` stay in slot b, in that order, and drop the others.

        Past a path's end (-1) nothing moves.
        """
        if runs_triton(self.device):
            from .kernels.trees import keep_path

            for layers, addresses in self._layers_by_shape():
                keep_path(layers, addresses, self.lengths_S, path_BD)
        else:
            batch, depth = path_BD.shape
            place_D, rows_B1 = self._range[:depth], self._range[:batch, None]
            length_B1 = self.lengths_S[:batch, None]
            # Entries move right behind the slot's past; past the path's end each place is copied to itself.
            from_BD, to_BD = length_B1 + torch.where(path_BD < 0, place_D, path_BD), length_B1 + place_D
            for layer in (*self._keys.values(), *self._values.values()):
                # The right side is a copy, so overlapping moves are safe.
                layer[rows_B1, :, to_BD] = layer[rows_B1, :, from_BD]
        self.keep(counts_B)

    def move(self, source: int | Tensor, destination: int | Tensor, longest: int | None = None) -> None:
        """Copy a slot onto another, or several onto others, so that the active slots stay the first ones.

        `longest`: tokens of the longest of them, where the host knows; None: it is looked up where that costs no wait.
        """
        if longest is None and not reads_lengths(self.device):
            longest = int(self.lengths_S[source].max())
        for layer in (*self._keys.values(), *self._values.values()):
            layer[destination, :, :longest] = layer[source, :, :longest]
        self.lengths_S[destination] = self.lengths_S[source]

    def free(self, slots_R: Tensor) -> None:
        """Leave these slots without a past: passes that cover them cost nothing and never run past their end."""
        self.lengths_S.index_fill_(0, slots_R, 0)

    def _layers_by_shape(self) -> list[tuple[list[Tensor], Tensor]]:
        """Keys and values of all layers, those of one shape together, each with their addresses on the device."""
        # Layers stay where they are once they are allocated, so that the addresses are sent once.
        layers = [*self._keys.values(), *self._values.values()]
        if sum(len(alike) for alike, _ in self._addresses) != len(layers):
            shapes = {layer.shape for layer in layers}
            alike = [[layer for layer in layers if layer.shape == shape] for shape in shapes]
            begins = [torch.tensor([layer.data_ptr() for layer in some]) for some in alike]
            self._addresses = [(some, send(places, self.device)) for some, places in zip(alike, begins)]
        return self._addresses

    @property
    def nbytes(self) -> int:
        """Bytes allocated so far."""
        return sum(layer.nbytes for layer in (*self._keys.values(), *self._values.values()))

    def layer(self, layer: int, key_BGND: Tensor, value_BGND: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a whole layer, [S, G, L, D]; allocated at the first call, in the type of those given."""
        if layer not in self._keys:
            shape = (len(self.lengths_S), key_BGND.shape[1], self.capacity)
            self._keys[layer] = key_BGND.new_zeros(*shape, key_BGND.shape[-1])
            self._values[layer] = value_BGND.new_zeros(*shape, value_BGND.shape[-1])
        return self._keys[layer], self._values[layer]

    def write(self, layer: int, step: "CacheStep", key_BGND: Tensor, value_BGND: Tensor) -> None:
        """Store a layer's new keys and values where the step puts them."""
        keys, values = self.layer(layer, key_BGND, value_BGND)
        # Prefill fills a slot from its start; other steps scatter by row and place.
        if step.at_BN is None:
            keys[step.rows, :, : key_BGND.shape[2]] = key_BGND
            values[step.rows, :, : key_BGND.shape[2]] = value_BGND
        else:
            at = (step.rows[:, None], slice(None), step.at_BN)
            keys[at] = key_BGND.transpose(1, 2)
            values[at] = value_BGND.transpose(1, 2)

    def read(self, layer: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
        """Views [B, G, L, D] of the first `batch` slots, cut to the longest of them; nothing is copied."""
        return self._keys[layer][:batch, :, :length], self._values[layer][:batch, :, :length]


@dataclass(frozen=True)
class CacheStep:
    """Step of one forward pass: where it writes its keys, and what each of its tokens may see."""

    cache: KVCache
    rows: Tensor  # [B] slots
    positions_BN: Tensor | None  # of the new tokens in the text; None: prefill, 0..T-1
    at_BN: Tensor | None  # where their keys go; None: prefill, 0..T-1, or a tree that the kernel writes
    visible_BNL: Tensor | None = None  # None: prefill, causal
    key_positions_BL: Tensor | None = None  # None: a key's position is where it stands
    past_B: Tensor | None = None  # keys before the new ones; given: the attention reads these instead of a mask
    tree: tuple[Tensor, Tensor] | None = None  # (visible_BNF, depth_BF) of entries past those; None: a chain
