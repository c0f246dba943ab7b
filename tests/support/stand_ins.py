"""Tiny models for the decoder's tests: a random Llama target, and drafts that agree with it now and then."""

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from draftforge.specdec.decoder import Request, generate
from draftforge.specdec.drafts.dflash import DFlashConfig, DFlashDraft
from draftforge.specdec.drafts.eagle import EagleConfig, EagleDraft
from draftforge.specdec.drafts.eagle3 import Eagle3Config, Eagle3Draft
from draftforge.specdec.drafts.medusa import MedusaConfig, MedusaDraft
from draftforge.specdec.drafts.peagle import PEagleDraft
from draftforge.specdec.drafts.small import SmallDraft
from draftforge.specdec.kernels.document_mask import Documents, QueryMask
from draftforge.specdec.models import CausalModel, States
from draftforge.specdec.sampling_settings import SamplingSettings

VOCAB = 61
LAYER: dict[str, Any] = {
    "intermediate_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
"""Of an EAGLE head for the target below."""


def llama(layers: int = 4, seed: int = 0, vocab: int = VOCAB) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.4,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


def seen_before(ids: Sequence[int], known: int, vocab_size: int) -> Tensor:
    """Marks [1, V] of the tokens in ids[:known]."""
    marks_1V = torch.zeros(1, vocab_size, dtype=torch.bool)
    marks_1V[0, list(ids[:known])] = True
    return marks_1V


def target(layers: int = 2) -> CausalModel:
    return CausalModel(llama(layers))


def near_copy(model: CausalModel, noise: float = 0.05, seed: int = 1) -> SmallDraft:
    """The target with noisy weights: agrees with it often, not always."""
    torch.manual_seed(seed)
    draft = copy.deepcopy(model.model)
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.dim() > 1:  # drawn on the CPU: the same on every device
                weight.add_(noise * weight.std() * torch.randn(weight.shape).to(weight.device))
    return SmallDraft(draft)


DEEP: dict[str, Any] = {
    "num_hidden_layers": 2,
    "body": "qwen3",
    "sliding_window": 4,
    "full_attention_layers": (1,),
    "norm_before_fc": True,
    "norm_output": True,
    "norm_before_residual": True,
}


def random_eagle3(model: CausalModel, draft_vocab: int | None = None, seed: int = 2, **fields: Any) -> Eagle3Draft:
    """A head with the target's own lm_head and a weak layer: right at times."""
    torch.manual_seed(seed)
    config = Eagle3Config(
        hidden_size=48,
        target_hidden_size=48,
        **LAYER,
        vocab_size=model.vocab_size,
        draft_vocab_size=draft_vocab or model.vocab_size,
        aux_layers=(1, 2, model.num_layers),
        **fields,
    )
    ids = torch.randperm(model.vocab_size)[: config.draft_vocab_size].sort().values
    draft = Eagle3Draft(config, ids).eval()
    with torch.no_grad():
        draft.lm_head.weight.copy_(model.model.get_output_embeddings().weight[ids])
    return draft


def random_eagle(model: CausalModel, seed: int = 2) -> EagleDraft:
    """An EAGLE-1 head that has learned nothing yet."""
    torch.manual_seed(seed)
    return EagleDraft(EagleConfig(hidden_size=48, **LAYER, vocab_size=model.vocab_size)).eval()


def taught_eagle(model: CausalModel, steps: int = 40) -> EagleDraft:
    """An EAGLE-1 head after a few steps on the target's own answers: right at times."""
    draft = random_eagle(model)
    ids_BT, states = _answers(model)
    return _taught(draft, _two_steps(draft, model, ids_BT, states.hidden_BTH, model.logits), steps)


def taught_eagle3(
    model: CausalModel, draft_vocab: int | None = None, steps: int = 40, deep: bool = False
) -> Eagle3Draft:
    """An EAGLE-3 head after the same. `deep`: with a second layer, a window in the first, and the norms of 2026."""
    draft = random_eagle3(model, draft_vocab, **(DEEP if deep else {}))
    ids_BT, states = _answers(model, draft.config.aux_layers)
    known = torch.isin(torch.arange(model.vocab_size), draft.draft_ids).nonzero()[:, 0]
    return _taught(draft, _two_steps(draft, model, ids_BT, states.aux_BTA, draft.logits, known), steps)


def parallel_eagle3(model: CausalModel) -> PEagleDraft:
    """A P-EAGLE head: its first token is the taught head's, its later ones are right by chance."""
    taught = taught_eagle3(model)
    torch.manual_seed(9)
    draft = PEagleDraft(taught.config, 7, taught.draft_ids)
    draft.load_state_dict({**taught.state_dict(), "mask_hidden": torch.randn(draft.mask_hidden.shape)})
    return draft.eval()


def _two_steps(
    draft: Any,
    model: CausalModel,
    ids_BT: Tensor,
    features_BTA: Tensor | None,
    logits: Callable[[Tensor], Tensor],
    draft_ids: Tensor | None = None,
) -> Callable[[], Tensor]:
    """Cross-entropy of what a head drafts of its draft ids (None: all) in two steps of its training-time test."""
    width = ids_BT.shape[1] - 3
    trained = first_positions(ids_BT, width)
    place_V = places(model.vocab_size, draft_ids)

    def loss() -> Tensor:
        states = draft(model.embed(ids_BT).detach(), features_BTA, trained, 2)
        said = [(ids_BT[:, 2 + k : 2 + k + width], logits(state)) for k, state in enumerate(states)]
        return torch.stack([F.cross_entropy(x.flatten(0, 1), place_V[ids.flatten()]) for ids, x in said]).sum()

    return loss


def places(vocab_size: int, draft_ids: Tensor | None) -> Tensor:
    """Each token's place [V] among the draft ids (None: all are), -100 without one."""
    ids = torch.arange(vocab_size) if draft_ids is None else draft_ids
    return torch.full((vocab_size,), -100).index_copy(0, ids, torch.arange(len(ids)))


def taught_dflash(model: CausalModel, draft_vocab: int | None = None, steps: int = 60, **fields: Any) -> DFlashDraft:
    """Blocks that draft three tokens, after a few steps on the target's own answers: right at times. With the `fields`
    of a DSpark draft its Markov head learns too, and its confidence head what the draft gives the right token."""
    torch.manual_seed(2)
    config = DFlashConfig(
        hidden_size=48,
        target_hidden_size=48,
        **LAYER,
        vocab_size=model.vocab_size,
        num_hidden_layers=2,
        draft_vocab_size=draft_vocab or model.vocab_size,
        aux_layers=(1, model.num_layers),
        mask_token_id=60,
        **{"block_size": 4, **fields},
    )
    ids = torch.randperm(model.vocab_size)[: config.draft_vocab_size].sort().values
    draft = DFlashDraft(config, ids)
    if draft.lm_head is not None:
        draft.lm_head.weight.data.copy_(model.model.get_output_embeddings().weight[ids])
    ids_BT, answers = _answers(model, config.aux_layers)
    place_V, begins = places(model.vocab_size, ids), itertools.cycle(range(1, 7))

    def loss() -> Tensor:
        """Blocks at every sixth place, which is another one in each step."""
        anchor_M = torch.arange(next(begins), ids_BT.shape[1] - 3, 6)
        block_BMW = F.pad(ids_BT[:, anchor_M, None], (0, config.block_size - 1), value=60)
        ahead_BMK = ids_BT[:, anchor_M[:, None] + torch.arange(1, 4)]
        anchors = QueryMask(Documents.rows(ids_BT), anchor_M.expand(len(ids_BT), -1))
        states = draft.drafting(draft(model.embed(block_BMW).detach(), answers.aux_BTA, anchors))
        logits = model.logits(states) if draft.lm_head is None else draft.lm_head(states)
        if draft.markov_head is None or draft.confidence_head is None:
            return F.cross_entropy(logits.flatten(0, 2), place_V[ahead_BMK.flatten()])

        before = draft.markov_head.embed(ids_BT[:, anchor_M[:, None] + torch.arange(3)])
        said = -F.cross_entropy(
            (logits + draft.markov_head.bias(before)).flatten(0, 2), place_V[ahead_BMK.flatten()], reduction="none"
        )
        sure = draft.confidence_head(torch.cat([states, before], -1)).flatten()
        return F.binary_cross_entropy_with_logits(sure, said.exp().detach()) - said.mean()

    return _taught(draft, loss, steps)


def first_positions(ids_BT: Tensor, width: int) -> QueryMask:
    """The first `width` positions of rows of one document each."""
    at_BM = torch.arange(width).expand(len(ids_BT), width)
    return QueryMask(Documents.rows(ids_BT), at_BM)


def taught_medusa(model: CausalModel, heads: int = 3, steps: int = 40) -> MedusaDraft:
    """Heads after a few steps on the target's own answers: right at times."""
    torch.manual_seed(2)
    config = MedusaConfig(hidden_size=48, vocab_size=model.vocab_size, num_heads=heads, num_layers=1, fc_bias=True)
    draft = MedusaDraft(config)
    ids_BT, states = _answers(model)
    width = ids_BT.shape[1] - 1 - heads

    def loss() -> Tensor:
        logits = [draft.logits(states.hidden_BTH[:, :width], head).flatten(0, 1) for head in range(heads)]
        return sum(F.cross_entropy(x, ids_BT[:, 2 + h : 2 + h + width].flatten()) for h, x in enumerate(logits))  # type: ignore[return-value]

    return _taught(draft, loss, steps)


def _answers(model: CausalModel, aux_layers: Sequence[int] = ()) -> tuple[Tensor, States]:
    """The first tokens of the tests' prompts and of the greedy answers to them, and the target's states along them."""
    asked = prompts(12)
    answers = dict(generate(model, None, [Request(ids, SamplingSettings(), 0, 31) for ids in asked], batch_size=12))
    ids_BT = torch.tensor([[*ids, *answers[index].tokens][:31] for index, ids in enumerate(asked)])
    with torch.no_grad():
        return ids_BT, model.states(ids_BT, aux_layers=aux_layers)


D = TypeVar("D", bound=nn.Module)


def _taught(draft: D, loss: Callable[[], Tensor], steps: int) -> D:
    optimizer = torch.optim.AdamW(draft.parameters(), lr=5e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return draft.eval().requires_grad_(False)


def prompts(count: int, seed: int = 3, vocab: int = VOCAB) -> list[list[int]]:
    """The first so many of an endless list for each seed."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (int(torch.randint(1, 12, (), generator=generator)) for _ in range(count))
    return [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in lengths]


def bigram(logits_VV: Tensor) -> CausalModel:
    """A target whose next token depends on the last one alone: logits [V] by row. V must be even.

    One-hot embeddings, layers that add nothing, and the table as the head.
    """
    vocab = len(logits_VV)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=vocab,
        intermediate_size=vocab,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=256,
        rms_norm_eps=1e-12,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    layer = model.model.layers[0]
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.zero_()
    model.model.embed_tokens.weight.copy_(torch.eye(vocab))
    model.lm_head.weight.copy_(logits_VV.T / vocab**0.5)  # the norm makes one-hot rows that long
    return CausalModel(model)
