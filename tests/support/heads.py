"""Heads with random weights, of sizes that all differ, so that a mixed-up dimension or norm shows."""

from typing import Any, TypeVar

import torch
from torch import nn

from draftforge.specdec.drafts.dflash import DFlashConfig, DFlashDraft
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
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 8.0,
        "beta_slow": 0.1,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.5, 2.0, 6.0],
        "long_factor": [1.0, 1.5, 2.0, 6.0],
        "original_max_position_embeddings": 64,
        "attention_factor": 1.2,
        "short_mscale": 1.2,
        "long_mscale": 1.2,
    },
}
"""Of rotary embeddings of 4 pairs, as config.json names them: under each no two pairs are slowed alike, but linear."""


def eagle(own_embeddings: bool = False, seed: int = 0, **fields: Any) -> EagleDraft:
    torch.manual_seed(seed)
    return _lively(EagleDraft(EagleConfig(**{**LAYER, **fields}), own_embeddings))


def eagle3(draft_vocab: int = 61, own_embeddings: bool = False, seed: int = 0, **fields: Any) -> Eagle3Draft:
    torch.manual_seed(seed)
    own = {"target_hidden_size": 24, "draft_vocab_size": draft_vocab, "aux_layers": (1, 2, 4)}
    fields = {**LAYER, **own, **fields}
    ids = torch.randperm(fields["vocab_size"])[:draft_vocab].sort().values
    return _lively(Eagle3Draft(Eagle3Config(**fields), ids, own_embeddings))


def dflash(
    draft_vocab: int = 61, own_embeddings: bool = False, own_head: bool = False, seed: int = 0, **fields: Any
) -> DFlashDraft:
    """Two layers, three captured ones, blocks of an anchor and five masks."""
    torch.manual_seed(seed)
    own = {"num_hidden_layers": 2, "target_hidden_size": 24, "draft_vocab_size": draft_vocab, "aux_layers": (1, 2, 4)}
    fields = {**LAYER, **own, "block_size": 6, "mask_token_id": 60, **fields}
    ids = torch.randperm(fields["vocab_size"])[:draft_vocab].sort().values
    return _lively(DFlashDraft(DFlashConfig(**fields), ids, own_embeddings, own_head))


DSPARK: dict[str, Any] = {"sample_from_anchor": True, "markov_rank": 7, "confidence_head": True}


def dspark(draft_vocab: int = 61, **fields: Any) -> DFlashDraft:
    """As `dflash`, in blocks of an anchor and four masks that draft five tokens."""
    return dflash(draft_vocab, **{**DSPARK, "block_size": 5, **fields})


def medusa(fc_bias: bool = False, num_layers: int = 1, seed: int = 0) -> MedusaDraft:
    torch.manual_seed(seed)
    config = MedusaConfig(hidden_size=24, vocab_size=61, num_heads=3, num_layers=num_layers, fc_bias=fc_bias)
    return _lively(MedusaDraft(config))


@torch.no_grad()
def _lively(draft: Module) -> Module:
    for weight in draft.parameters():
        weight.add_(0.3 * torch.randn_like(weight))
    return draft.eval()
