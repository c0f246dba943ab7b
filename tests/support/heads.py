"""Heads with random weights, of sizes that all differ, so that a mixed-up dimension or norm shows."""

from typing import Any, TypeVar

import torch
from torch import nn

from draftforge.specdec.drafts.eagle import EagleConfig, EagleDraft
from draftforge.specdec.drafts.eagle3 import Eagle3Config, Eagle3Draft
from draftforge.specdec.drafts.medusa import MedusaConfig, MedusaDraft

Module = TypeVar("Module", bound=nn.Module)

LAYER: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 61,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


def eagle(own_embeddings: bool = False, seed: int = 0) -> EagleDraft:
    torch.manual_seed(seed)
    return _lively(EagleDraft(EagleConfig(**LAYER), own_embeddings))


def eagle3(draft_vocab: int = 61, own_embeddings: bool = False, seed: int = 0, **fields: Any) -> Eagle3Draft:
    torch.manual_seed(seed)
    fields = {**LAYER, "target_hidden_size": 24, "draft_vocab_size": draft_vocab, "aux_layers": (1, 2, 4), **fields}
    ids = torch.randperm(61)[:draft_vocab].sort().values
    return _lively(Eagle3Draft(Eagle3Config(**fields), ids, own_embeddings))


def medusa(fc_bias: bool = False, num_layers: int = 1, seed: int = 0) -> MedusaDraft:
    torch.manual_seed(seed)
    config = MedusaConfig(hidden_size=24, vocab_size=61, num_heads=3, num_layers=num_layers, fc_bias=fc_bias)
    return _lively(MedusaDraft(config))


@torch.no_grad()
def _lively(draft: Module) -> Module:
    for weight in draft.parameters():
        weight.add_(0.3 * torch.randn_like(weight))
    return draft.eval()
