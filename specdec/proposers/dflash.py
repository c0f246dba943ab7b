"""DFlash drafter: the states of all levels come out of one pass, whatever tokens stand above each. The Markov head of a
DSpark draft then tells each level's logits of the token right above.

Shapes: B active slots, F nodes read at once, K drafted tokens, W tokens of a block, R round starts of recorded texts,
N some of these, A features, H hidden size, E rank of the Markov head, V vocabulary, U that of the draft.

As in vLLM and llama.cpp a block has as many masks as the run drafts levels, also where an answer has fewer tokens
left; as in llama.cpp it has no more than it was trained with. With `sample_from_anchor` it has one mask fewer.

A round may draft fewer tokens: as in DeepSpec and llama.cpp a chain ends before the first token whose confidence is
below a threshold. It follows from the tokens above, so the rules that read no q stay lossless. Nothing gets narrower:
all logits there become -inf, which drafts nothing.
"""

import math

import torch
from torch import Tensor

from ..drafts.dflash import DFlashDraft
from ..kernels.document_mask import QueryMask
from ..kv_cache import KVCache
from ..models import CausalModel, States
from ..replay.packing import Pack
from ..sampling import penalised
from ..sampling_settings import SamplingSettings
from .base import Texts, Trace
from .logits import MOST_LOGITS, MOST_PAIRS, over_vocabulary, own_vocabulary, see, trace_levels


class DFlashDrafter:
    """DFlash drafter. Its KV cache holds the context: all tokens but the last emitted one. A block's own keys are
    dropped with its round."""

    needs_hidden_states = True
    nested = False
    needs_host_sync = False

    def __init__(self, draft: DFlashDraft, target: CausalModel, confidence_threshold: float = 0.0) -> None:
        """`confidence_threshold`: tokens below it end a chain; 0: none does, and no confidence head is needed."""
        self._draft, self._target = draft, target
        self._least = math.log(confidence_threshold / (1 - confidence_threshold)) if confidence_threshold else None
        self._embed = draft.embed_tokens if draft.embed_tokens is not None else target.embed
        self.aux_layers = draft.config.aux_layers
        self.levels: int | None = draft.config.draft_tokens
        self.width = draft.config.draft_vocab_size

    def reserve(self, slots: int, tokens: int, nodes: int, levels: int) -> None:
        self._masks = self._masks_of(levels)
        device = self._draft.fc.weight.device
        self._cache = KVCache(slots, tokens + max(1 + self._masks, levels + 1), device)
        self._last_S = torch.zeros(slots, dtype=torch.long, device=device)

    def begin(self, slots_R: Tensor, known: Texts, states: States) -> None:
        self._last_S[slots_R] = known.last()
        counts_R = known.counts_B - 1
        self._draft.append_context(self._read(states), self._cache.prefill(slots_R, counts_R))

    def open(self, batch: int, chain: bool) -> Tensor:
        # The block's tokens see each other in both directions, so the tree mask is all ones; but for causal layers.
        width = 1 + self._masks
        depth_BW = torch.arange(width, device=self._cache.device).expand(batch, -1)
        whole_BWW = depth_BW.new_ones(batch, width, width, dtype=torch.bool)
        step = self._cache.branch(depth_BW, whole_BWW)
        causal = self._cache.branch(depth_BW, whole_BWW.tril()) if self._draft.config.causal != "none" else None

        # One pass for all levels.
        embeds_BWH = self._blocks(self._last_S[:batch], self._masks)
        self._states_BKH = self._draft.drafting(self._draft.decode(embeds_BWH, step, causal))
        self._logits_BKU = self._logits(self._states_BKH)
        return self._level(0, self._last_S[:batch, None])[:, 0]

    def expand(self, tokens_BF: Tensor, parents_BF: Tensor, depth: int) -> Tensor:
        return self._level(depth + 1, tokens_BF)

    def _level(self, level: int, above_BF: Tensor) -> Tensor:
        """Logits [B, F, V] of a level below each of the tokens above."""
        # Without a Markov head they do not depend on the node: every node of the level gets the same.
        logits_B1U, markov = self._logits_BKU[:, level, None], self._draft.markov_head
        if markov is None:
            return self._whole(logits_B1U).expand(-1, above_BF.shape[1], -1)

        states_BFH = self._states_BKH[:, level, None].expand(-1, above_BF.shape[1], -1)
        return self._whole(self._told(logits_B1U, self._joined(states_BFH, above_BF)))

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
        """Trace from one block at every round start, each level below the answer's own token. Levels past the answer's
        end are computed and ignored."""
        # Every round start is the anchor of a block.
        if states is None:
            raise ValueError("DFlash needs the target's states; ask for proposer.needs_hidden_states")
        masks, read_BTA, at_BM = self._masks_of(count), self._read(states), pack.places(-1)
        blocks_NWH = self._blocks(pack.ids_BT.gather(1, at_BM).flatten(), masks)
        blocks_BMWH = blocks_NWH.view(*at_BM.shape, *blocks_NWH.shape[1:])

        # Few rows at a time: attention holds a score for each pair of query and key.
        tokens = at_BM.shape[1] * (1 + masks)
        parts = [
            self._draft(blocks_BMWH[some], read_BTA[some], QueryMask(pack.documents(some), at_BM[some]))
            for some in pack.groups(tokens * (tokens + read_BTA.shape[1]), MOST_PAIRS)
        ]

        # Back to one row a round start.
        states_RKH = pack.unplaced(self._draft.drafting(torch.cat(parts)))
        above = (pack.next_tokens(k - 1)[0] for k in range(states_RKH.shape[1]))
        ids_R = self._draft.draft_ids if self._draft.config.reduced else None
        head, ids_R = own_vocabulary(self._head, ids_R)
        levels = ((self._joined(states_RKH[:, k], above_R), head) for k, above_R in enumerate(above))
        trace = trace_levels(pack, count, levels, self._draft.vocab_size, sampling, ids_R)
        return trace if self._least is None else trace._replace(offered_R=self._offered(states_RKH, pack, sampling))

    def _offered(self, states_RKH: Tensor, pack: Pack, sampling: SamplingSettings) -> Tensor:
        """Levels [R] that a round drafts at each start: its own likeliest tokens decide how long it stays confident."""
        V, found = self._draft.vocab_size, []
        first_BV = None if sampling.repetition_penalty == 1.0 else pack.first_places(V)
        anchor_R, step = pack.next_tokens(-1)[0], max(1, MOST_LOGITS // V)
        for start in range(0, max(pack.rounds, 1), step):
            rows = slice(start, start + step)
            seen_NV = None if first_BV is None else pack.seen(first_BV, rows, 0)
            above_N, offered_N = anchor_R[rows], torch.zeros_like(anchor_R[rows])
            for k in range(states_RKH.shape[1]):
                # One level more where all levels so far were confident.
                joined_NX = self._joined(states_RKH[rows, k], above_N)
                offered_N += (offered_N == k) & self._sure(joined_NX)[..., 0]
                # The chain's next token, as it is drafted.
                above_N = penalised(self._whole(self._head(joined_NX)), sampling, seen_NV).argmax(-1)
                seen_NV = see(seen_NV, above_N)
            found.append(offered_N)
        return torch.cat(found)

    def _joined(self, state: Tensor, above: Tensor) -> Tensor:
        """States [..., H] and, for a Markov head, embeddings [..., E] of the tokens above, side by side."""
        markov = self._draft.markov_head
        return state if markov is None else torch.cat([state, markov.embed(above)], -1)

    def _head(self, joined: Tensor) -> Tensor:
        """Logits [..., U] of the draft's vocabulary from what `_joined` gives."""
        logits = self._logits(joined[..., : self._draft.config.hidden_size])
        return logits if self._draft.markov_head is None else self._told(logits, joined)

    def _told(self, logits: Tensor, joined: Tensor) -> Tensor:
        """Logits [..., U] with the Markov head's bias, from what `_joined` gives; -inf where confidence is too low."""
        assert self._draft.markov_head is not None
        logits = logits + self._draft.markov_head.bias(joined[..., self._draft.config.hidden_size :])
        return logits if self._least is None else logits.masked_fill(~self._sure(joined), -torch.inf)

    def _sure(self, joined: Tensor) -> Tensor:
        """Whether the next token is likely enough to be accepted [..., 1], from what `_joined` gives."""
        assert self._draft.confidence_head is not None and self._least is not None
        sure: Tensor = self._draft.confidence_head(joined)[..., None] >= self._least
        return sure

    def _masks_of(self, levels: int) -> int:
        config = self._draft.config
        return min(levels, config.draft_tokens) - config.sample_from_anchor

    def _blocks(self, anchors_R: Tensor, masks: int) -> Tensor:
        """Embeddings [R, W, H] of blocks: an anchor and `masks` mask tokens each."""
        masks_RK = anchors_R.new_full((len(anchors_R), masks), self._draft.config.mask_token_id)
        return self._embed(torch.cat([anchors_R[:, None], masks_RK], 1))

    def _read(self, states: States) -> Tensor:
        if states.aux_BTA is None:
            raise ValueError("DFlash needs the target's captured layers; ask for proposer.aux_layers")
        return states.aux_BTA.to(self._draft.fc.weight.dtype)

    def _logits(self, state: Tensor) -> Tensor:
        """Normed states [..., H] -> logits [..., U] of the draft's vocabulary."""
        head = self._draft.lm_head
        logits: Tensor = self._target.logits(state) if head is None else head(state)
        return logits

    def _whole(self, logits: Tensor) -> Tensor:
        """Logits of the draft's vocabulary over the target's: -inf outside it."""
        config = self._draft.config
        return over_vocabulary(logits, self._draft.draft_ids, config.vocab_size) if config.reduced else logits
