"""DFlash drafter: the logits of all levels come out of one pass, whatever tokens stand above each.

Shapes: B active slots, F nodes read at once, K drafted tokens, W = K + 1 tokens of a block, R round starts
of recorded texts, A features, H hidden size, V vocabulary.

As in vLLM and llama.cpp a block has as many masks as the run drafts levels, also where an answer has fewer tokens
left; as in llama.cpp it has no more than it was trained with.
"""

import torch
from torch import Tensor

from ..drafts.dflash import DFlashDraft
from ..kernels.document_mask import QueryMask
from ..kv_cache import KVCache
from ..models import CausalModel, States
from ..replay.packing import Pack
from ..sampling_settings import SamplingSettings
from .base import Texts, Trace
from .logits import MOST_PAIRS, over_vocabulary, trace_levels


class DFlashDrafter:
    """DFlash drafter. Its KV cache holds the context: all tokens but the last emitted one. A block's own keys are
    dropped with its round."""

    needs_hidden_states = True
    nested = False
    needs_host_sync = False

    def __init__(self, draft: DFlashDraft, target: CausalModel) -> None:
        self._draft, self._target = draft, target
        self._embed = draft.embed_tokens if draft.embed_tokens is not None else target.embed
        self.aux_layers = draft.config.aux_layers
        self.levels: int | None = draft.config.block_size - 1
        self.width = draft.config.draft_vocab_size

    def reserve(self, slots: int, tokens: int, nodes: int, levels: int) -> None:
        self._block = 1 + self._masks(levels)
        device = self._draft.fc.weight.device
        self._cache = KVCache(slots, tokens + max(self._block, levels + 1), device)
        self._last_S = torch.zeros(slots, dtype=torch.long, device=device)

    def begin(self, slots_R: Tensor, known: Texts, states: States) -> None:
        self._last_S[slots_R] = known.last()
        counts_R = known.counts_B - 1
        self._draft.append_context(self._read(states), self._cache.prefill(slots_R, counts_R))

    def open(self, batch: int, chain: bool) -> Tensor:
        # The block's tokens see each other in both directions, so the tree mask is all ones; but for causal layers.
        depth_BW = torch.arange(self._block, device=self._cache.device).expand(batch, -1)
        whole_BWW = depth_BW.new_ones(batch, self._block, self._block, dtype=torch.bool)
        step = self._cache.branch(depth_BW, whole_BWW)
        causal = self._cache.branch(depth_BW, whole_BWW.tril()) if self._draft.config.causal != "none" else None

        # One pass for all levels; mask j drafts level j, and the anchor's own state is not used.
        embeds_BWH = self._blocks(self._last_S[:batch], self._block - 1)
        self._logits_BKV = self._logits(self._draft.decode(embeds_BWH, step, causal)[:, 1:])
        return self._logits_BKV[:, 0]

    def expand(self, tokens_BF: Tensor, parents_BF: Tensor, depth: int) -> Tensor:
        # Logits of a level do not depend on the node: every node of it gets the same.
        return self._logits_BKV[:, depth + 1, None].expand(-1, tokens_BF.shape[1], -1)

    def observe(self, new: Texts, states: States) -> None:
        # The context grows by the emitted tokens, read from the target's features, in place of the block's keys.
        new = new.cut()
        batch, width = new.ids_BT.shape
        self._draft.append_context(self._read(states)[:, :width], self._cache.extend(batch, width))
        self._cache.keep(new.counts_B)
        self._last_S[:batch] = new.last()

    def move(self, source: int, destination: int) -> None:
        self._cache.move(source, destination)
        self._last_S[destination] = self._last_S[source]

    def trace(self, pack: Pack, count: int, sampling: SamplingSettings, states: States | None) -> Trace:
        """Trace from one block at every round start. Levels past the answer's end are computed and ignored."""
        # Every round start is the anchor of a block.
        if states is None:
            raise ValueError("DFlash needs the target's states; ask for proposer.needs_hidden_states")
        masks, read_BTA, at_BM = self._masks(count), self._read(states), pack.places(-1)
        blocks_NWH = self._blocks(pack.ids_BT.gather(1, at_BM).flatten(), masks)
        blocks_BMWH = blocks_NWH.view(*at_BM.shape, *blocks_NWH.shape[1:])

        # Few rows at a time: attention holds a score for each pair of query and key.
        tokens = at_BM.shape[1] * (1 + masks)
        parts = [
            self._draft(blocks_BMWH[some], read_BTA[some], QueryMask(pack.documents(some), at_BM[some]))
            for some in pack.groups(tokens * (tokens + read_BTA.shape[1]), MOST_PAIRS)
        ]

        # Back to one row a round start; mask j stands at place 1 + j of its block.
        states_RWH = pack.unplaced(torch.cat(parts))
        levels = ((states_RWH[:, 1 + mask], self._logits) for mask in range(masks))
        return trace_levels(pack, count, levels, self._draft.vocab_size, sampling)

    def _masks(self, levels: int) -> int:
        return min(levels, self._draft.config.block_size - 1)

    def _blocks(self, anchors_R: Tensor, masks: int) -> Tensor:
        """Embeddings [R, W, H] of blocks: an anchor and `masks` mask tokens each."""
        masks_RK = anchors_R.new_full((len(anchors_R), masks), self._draft.config.mask_token_id)
        return self._embed(torch.cat([anchors_R[:, None], masks_RK], 1))

    def _read(self, states: States) -> Tensor:
        if states.aux_BTA is None:
            raise ValueError("DFlash needs the target's captured layers; ask for proposer.aux_layers")
        return states.aux_BTA.to(self._draft.fc.weight.dtype)

    def _logits(self, state: Tensor) -> Tensor:
        """Normed states [..., H] -> logits over the target's vocabulary, -inf outside the draft's."""
        head = self._draft.lm_head
        if head is None:
            return self._target.logits(state)
        logits: Tensor = head(state)
        config = self._draft.config
        return over_vocabulary(logits, self._draft.draft_ids, config.vocab_size) if config.reduced else logits
