"""`dflash`: a few decoder layers that fill in a block of masks from the target's features, in one pass (DFlash; Chen,
Liang, Liu 2026, arXiv 2602.06036); with a Markov head DSpark (see `drafts/dspark.py`).

Shapes: B rows, T tokens, M blocks a row, W tokens of a block, K drafted ones, S steps ahead, N supervised positions,
H hidden size, E rank of the Markov head, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import fingerprint
from ...data.batches import Batch, moved
from ...data.store import Capture
from ...errors import InputError
from ...specdec.drafts.dflash import DFlashConfig, DFlashDraft
from ...specdec.kernels.document_mask import QueryMask
from ...specdec.models import head_arithmetic
from ...specdec.targets import Target
from ..losses.linear_head import Head, LossSettings, Rows, on_device
from ..settings import DFlashSettings
from .base import ExtraLoss, Inputs, LoadTarget, Start
from .feature_family import (
    FeatureFamily,
    check_vocabulary,
    fresh_draft,
    head_incompatibility,
    largest_vocabulary,
)
from .initial_weights import layer_fields


class Blocks:
    """Blocks of a batch: where they begin, and which supervised token each of their states drafts."""

    def __init__(self, batch: Batch, offsets: list[int], draft_tokens: int) -> None:
        """`offsets`: of each sample, how many tokens before its first supervised position its first block begins."""

        # For each sample: the anchors of its blocks, and the block and the step in it of each supervised token.
        rows: list[list[Tensor]] = [[] for _ in range(batch.ids_BT.shape[0])]
        filled = [0] * len(rows)
        block, step, row_of, chains = [], [], [], [torch.zeros(draft_tokens, 0, dtype=torch.int64)]
        for place, low, high, offset in zip(batch.spans, batch.offsets[:-1], batch.offsets[1:], offsets, strict=True):
            # The first supervised token is drafted from the last prompt token; the first block may begin before that.
            first = place.start + place.prompt - 1
            earlier = min(offset, max(place.prompt - 2, 0))  # an anchor has something before it, as in decoding

            # Supervised tokens by their distance from the first anchor: quotient and remainder give block and step.
            ahead_n = torch.arange(earlier, earlier + high - low)
            count = -(-(earlier + high - low) // draft_tokens) if high > low else 0
            rows[place.row].append(first - earlier + draft_tokens * torch.arange(count))
            block.append(filled[place.row] + ahead_n // draft_tokens)
            step.append(ahead_n % draft_tokens)
            row_of.append(torch.full_like(ahead_n, place.row))
            filled[place.row] += count

            # A block's chain is its supervised tokens in order; the first block's may begin after some others.
            link_n = torch.where(ahead_n < draft_tokens, ahead_n - earlier, ahead_n % draft_tokens)
            chain_KC = torch.full((draft_tokens, count), -1)
            chain_KC[link_n, ahead_n // draft_tokens] = torch.arange(low, high)
            chains.append(chain_KC)

        # Then as tensors: [B, M] anchors, rows with fewer of them padded.
        device, width = batch.ids_BT.device, max(1, *filled)
        at_BM = torch.zeros(len(rows), width, dtype=torch.int64)
        for row, parts in enumerate(rows):
            if filled[row]:
                at_BM[row, : filled[row]] = torch.cat(parts)
        block_N, self.step_N = torch.cat(row_of) * width + torch.cat(block), moved(torch.cat(step), device)
        self.anchors = QueryMask(batch.documents, moved(at_BM, device))
        """Positions [B, M] of the anchors; a row that has fewer repeats its first token, which then means nothing."""
        self.at_N = moved(block_N, device) * draft_tokens + self.step_N
        """The state that drafts each supervised token, in the flattened [B, M, K]."""

        self.chains_KC = moved(torch.cat(chains, 1), device)
        """The supervised tokens of each block in order, as numbers of positions; -1: it has no more."""

    def ids(self, ids_BT: Tensor, mask_id: int, masks: int) -> Tensor:
        """Token ids [B, M, W]: anchors and masks."""
        anchor_BM1 = ids_BT.gather(1, self.anchors.at_BM)[..., None]
        return torch.cat([anchor_BM1, torch.full_like(anchor_BM1, mask_id).expand(-1, -1, masks)], -1)


def block_offset(sample: int, epoch: int, draft_tokens: int) -> int:
    """Offset of a sample's blocks in one epoch: its first block begins so many tokens before its first supervised
    position, from 0 to draft_tokens - 1.

    The offset follows from sample and epoch alone: the same however samples are dealt out, and after a resume. Each
    epoch moves it by one, so that a token is drafted at different steps of a block.
    """
    return (int(fingerprint.of_json(["blocks", sample])[:8], 16) + epoch) % draft_tokens


_DEFAULT_LAYERS = 3  # of a fresh draft whose recipe names no number


@dataclass(frozen=True)
class BlockInputs(Inputs):
    """Inputs with the blocks that the micro-batch is cut into."""

    blocks: Blocks | None = None


class DFlashFamily(FeatureFamily[DFlashSettings, DFlashDraft]):
    """DFlash family: each supervised token is drafted once, in the block where it falls, as in decoding."""

    name = "dflash"
    draft_class = DFlashDraft

    def __init__(self, draft: DFlashDraft, settings: DFlashSettings, loss: LossSettings, target: Target | None) -> None:
        ids = draft.draft_ids if draft.config.reduced else None
        super().__init__(draft, settings, loss, target, draft.config.aux_layers, ids)
        self._draft_tokens = settings.draft_tokens
        if settings.confidence_weight:
            self.extra_loss = ExtraLoss("confidence_loss", settings.confidence_weight)

    @classmethod
    def start(cls, settings: DFlashSettings, seed: int, capture: Capture, load_target: LoadTarget) -> Start:
        """Fresh draft: random layers, the target's tables or copies of them.

        Copies of the target's layers learn faster for some dozen steps and are worse after 240 (docs/experiments.md).
        """
        # The vocabulary and the dimensions, then random weights by the seed.
        target = load_target()
        capture.check_target(target)

        def make(draft_ids: Tensor | None) -> DFlashDraft:
            config = dflash_config(settings, target, target.vocab_size if draft_ids is None else len(draft_ids))
            return DFlashDraft(config, draft_ids, settings.train_embeddings, settings.train_head)

        return fresh_draft(cls.name, settings, seed, capture, target, make)

    @classmethod
    def incompatibility(cls, settings: DFlashSettings, draft: DFlashDraft, source: str) -> str | None:
        """Compare blocks, layers, mask token, vocabulary, width, own head and own embeddings."""
        # The shape of the blocks and the layers.
        config = draft.config
        if settings.draft_tokens != config.draft_tokens:
            return f"draft_tokens = {settings.draft_tokens}: {source} has blocks that draft {config.draft_tokens}"
        if settings.markov_rank != config.markov_rank:
            return f"markov_rank = {settings.markov_rank}: {source} has {config.markov_rank}"
        if settings.layers not in (None, config.num_hidden_layers):
            return f"layers = {settings.layers}: {source} has {config.num_hidden_layers}"
        if settings.mask_token not in (None, config.mask_token_id):
            return f"mask_token = {settings.mask_token}: {source} has {config.mask_token_id}"

        # What the draft must have to be trained.
        if settings.train_head and draft.lm_head is None:
            return f"train_head = true: {source} has no head of its own"
        if settings.confidence_weight and draft.confidence_head is None:
            return f"confidence_weight = {settings.confidence_weight:g}: {source} has no confidence head"
        return head_incompatibility(settings, draft, source)

    @classmethod
    def check(cls, settings: DFlashSettings, load_target: LoadTarget) -> DFlashDraft:
        """Check that the target has the layers that are read, the tokens that are drafted, and one for the mask; and
        plain logits for a Markov head, which engines add its bias to."""
        target = load_target()
        check_vocabulary(settings, target)
        scale, softcap = head_arithmetic(target.config)
        if settings.markov_rank and (scale != 1.0 or softcap is not None):
            raise InputError(
                f"draft.markov_rank = {settings.markov_rank}: the target scales or caps its logits, and a Markov head "
                "needs plain ones"
            )
        config = dflash_config(settings, target, largest_vocabulary(settings, target.vocab_size))
        with torch.device("meta"):
            return DFlashDraft(config, None, settings.train_embeddings, settings.train_head)

    @classmethod
    def freeze(cls, draft: DFlashDraft, settings: DFlashSettings) -> None:
        """Train all but, where the recipe says so, a head of the draft's own, and a confidence head without loss."""
        super().freeze(draft, settings)
        if draft.confidence_head is not None:
            draft.confidence_head.requires_grad_(settings.confidence_weight > 0)
        if draft.lm_head is not None:
            draft.lm_head.requires_grad_(settings.train_head)

    @torch.no_grad()
    def inputs(self, batch: Batch, samples: Sequence[int]) -> BlockInputs:
        """Run the target, or take its cached features; cut each sample into blocks."""
        offsets = [block_offset(sample, self.epoch, self._draft_tokens) for sample in samples]
        blocks = Blocks(batch, [0] if batch.empty else offsets, self._draft_tokens)
        return BlockInputs(batch, features=self._features(batch, samples), blocks=blocks)

    def rows(self, inputs: Inputs) -> Rows:
        """Rows: the state that drafts each supervised token, and behind it what a Markov head reads."""
        assert isinstance(inputs, BlockInputs) and inputs.blocks is not None and inputs.features is not None
        # Anchors and masks through the draft, which attends to the target's features before each block.
        blocks, config = inputs.blocks, self.draft.config
        ids_BMW = blocks.ids(inputs.batch.ids_BT, config.mask_token_id, config.block_size - 1)
        embed = self.draft.embed_tokens if self.draft.embed_tokens is not None else self._target.embed
        states_BMWH = self.draft(embed(ids_BMW), inputs.features.aux_BTA, blocks.anchors)

        # A Markov head reads the token before each supervised one, as the text has it.
        states_NX, markov = self.draft.drafting(states_BMWH).flatten(0, 2)[blocks.at_N], self.draft.markov_head
        if markov is not None:
            before_N = inputs.batch.ids_BT.flatten()[inputs.batch.positions_N]
            states_NX = torch.cat([states_NX, markov.embed(before_N)], -1)

        # A block has one chain for draft_tokens positions; other families begin one at each.
        teacher, weight = self.teacher(inputs.features), float(self._draft_tokens)
        return Rows(
            states_NX[None],
            None,
            teacher,
            self.step_weights,
            blocks.step_N[None],
            blocks.chains_KC,
            weight,
            extra_loss=lambda alpha_1N: self._confidence_loss(states_NX, blocks.step_N, alpha_1N[0]),
        )

    def _confidence_loss(self, states_NX: Tensor, step_N: Tensor, alpha_N: Tensor) -> Tensor:
        """Binary cross-entropy of the confidence with the acceptance, summed over positions and weighted steps."""
        assert self.draft.confidence_head is not None
        each_N = F.binary_cross_entropy_with_logits(self.draft.confidence_head(states_NX), alpha_N, reduction="none")
        return (each_N * on_device(self.step_weights, each_N.device)[step_N]).sum()

    def head(self) -> Head:
        """The draft's own head, or the target's; with the Markov head's matrix."""
        head = self._target_head if self.draft.lm_head is None else Head(self.draft.lm_head.weight)
        markov = self.draft.markov_head
        return head if markov is None else head._replace(markov_VE=markov.markov_w2.weight)


def dflash_config(settings: DFlashSettings, target: Target, draft_vocabulary: int) -> DFlashConfig:
    """The draft's dimensions: layers like the target's own."""
    return DFlashConfig(
        **layer_fields(target, settings.intermediate_size),
        num_hidden_layers=settings.layers or _DEFAULT_LAYERS,
        target_hidden_size=target.hidden_size,
        draft_vocab_size=draft_vocabulary,
        aux_layers=read_layers(settings, target.num_layers),
        block_size=settings.draft_tokens + (not settings.markov_rank),
        sample_from_anchor=settings.markov_rank > 0,
        markov_rank=settings.markov_rank,
        confidence_head=settings.confidence_weight > 0,
        mask_token_id=mask_token(settings, target),
    )


def read_layers(settings: DFlashSettings, total: int) -> tuple[int, ...]:
    """The target layers that are read: those named, or one for each layer of the draft, evenly spaced.

    The published drafts leave out the first output and the last two; shallow targets give what they have.
    """
    # Named layers, which the recipe has ascending from 1 on.
    if settings.aux_layers is not None:
        if settings.aux_layers[-1] > total:
            named = list(settings.aux_layers)
            raise InputError(f"draft.aux_layers = {named}: must be between 1 and {total}, the target's last layer")
        return settings.aux_layers

    # Otherwise evenly spaced ones, within the published range where that is wide enough.
    count = min(settings.layers or _DEFAULT_LAYERS, total)
    if count == 1:
        return (total // 2 + 1,)
    low, high = (2, total - 2) if total - 3 >= count else (1, total)
    return tuple(round(low + index * (high - low) / (count - 1)) for index in range(count))


def mask_token(settings: DFlashSettings, target: Target) -> int:
    """Mask token id: the recipe's, the tokenizer's own, or one that no text has; InputError where there is none."""
    # Named in the recipe.
    if settings.mask_token is not None:
        if settings.mask_token >= target.vocab_size:
            raise InputError(f"draft.mask_token = {settings.mask_token}: must be below {target.vocab_size}")
        return settings.mask_token

    # Otherwise the first that there is; the last id that no token has is free for sure.
    tokenizer = target.tokenizer
    unused = range(len(tokenizer), target.vocab_size)
    for found in (tokenizer.mask_token_id, *unused[-1:], tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(found, int) and found < target.vocab_size:
            return found
    raise InputError("draft.mask_token: the tokenizer has no token for a mask; name one that no text has")
