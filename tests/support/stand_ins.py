"""Tiny models for the decoder's tests: a random Llama target, and drafts that agree with it now and then."""

import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftforge.specdec.drafts.eagle3 import Eagle3Config, Eagle3Draft
from draftforge.specdec.drafts.small import SmallDraft
from draftforge.specdec.models import CausalModel

VOCAB = 61


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


def target(seed: int = 0) -> CausalModel:
    return CausalModel(llama(seed=seed))


def near_copy(model: CausalModel, noise: float = 0.05, seed: int = 1) -> SmallDraft:
    """The target with noisy weights: agrees with it often, not always."""
    torch.manual_seed(seed)
    draft = copy.deepcopy(model.model)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(noise * weight.std() * torch.randn_like(weight)) if weight.dim() > 1 else None
    return SmallDraft(draft)


def random_eagle3(model: CausalModel, draft_vocab: int | None = None, seed: int = 2) -> Eagle3Draft:
    """A head with the target's own lm_head and a weak layer: right at times."""
    torch.manual_seed(seed)
    config = Eagle3Config(
        hidden_size=48,
        target_hidden_size=48,
        intermediate_size=96,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=model.vocab_size,
        draft_vocab_size=draft_vocab or model.vocab_size,
        aux_layers=(1, 2, 4),
        max_position_embeddings=256,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
    )
    ids = torch.randperm(model.vocab_size)[: config.draft_vocab_size].sort().values
    draft = Eagle3Draft(config, ids).eval()
    with torch.no_grad():
        draft.lm_head.weight.copy_(model.model.get_output_embeddings().weight[ids])
    return draft


def prompts(count: int, seed: int = 3, vocab: int = VOCAB) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 12, (count,), generator=generator).tolist()
    return [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in lengths]
