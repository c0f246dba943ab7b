"""EAGLE heads as engines build them: from the folder's config and tensors alone, with transformers' Llama layer.

Shapes: T tokens, H hidden size, D head size.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

_PREFIXES = ("layers.0.", "midlayer.")


class EngineHead:
    """One that lends the target's bare embedding `table` to a head without its own."""

    def __init__(self, folder: Path, table: Tensor) -> None:
        self.tensors = load_file(folder / "model.safetensors")
        self.config = LlamaConfig.from_pretrained(folder, attn_implementation="eager")
        self.table = self.tensors.get("embed_tokens.weight", table)
        self.third = "lm_head.weight" in self.tensors
        self._attention, self._mlp = LlamaAttention(self.config, 0), LlamaMLP(self.config)
        if self.third:
            for name in ("q_proj", "k_proj", "v_proj"):
                size = getattr(self._attention, name).out_features
                setattr(self._attention, name, nn.Linear(2 * self.config.hidden_size, size, bias=False))
        self._attention.load_state_dict(self._part("self_attn."))
        self._mlp.load_state_dict(self._part("mlp."))
        self._rotary = LlamaRotaryEmbedding(self.config)

    def fuse(self, features: Tensor) -> Tensor:
        """What the head reads of the target: its last state, or fc of three layers' features."""
        return features @ self.tensors["fc.weight"].T if self.third else features

    def states(self, ids_T: Tensor, state_TH: Tensor) -> Tensor:
        """The un-normed states [T, H] of pairs (state, next token) at positions 0..T-1, without a cache."""
        embeds_TH = self.table[ids_T]
        if self.third:
            normed = self._norm("input_layernorm", embeds_TH), self._norm("hidden_norm", state_TH)
            residual_TH, read = state_TH, torch.cat(normed, -1)
        else:
            residual_TH = read = torch.cat([embeds_TH, state_TH], -1) @ self.tensors["fc.weight"].T
        positions = torch.arange(len(ids_T))[None]
        mask = torch.full((1, 1, len(ids_T), len(ids_T)), -torch.inf).triu(1)
        turned = self._rotary(read[None], positions)
        attended = self._attention(hidden_states=read[None], position_embeddings=turned, attention_mask=mask)[0][0]
        residual_TH = residual_TH + attended
        return residual_TH + self._mlp(self._norm("post_attention_layernorm", residual_TH))  # type: ignore[no-any-return]

    def logits(self, state: Tensor) -> Tensor:
        """EAGLE-3's own, over its whole vocabulary."""
        return self._rms(self.tensors["norm.weight"])(state) @ self.tensors["lm_head.weight"].T  # type: ignore[no-any-return]

    def _part(self, middle: str) -> dict[str, Tensor]:
        starts = [prefix + middle for prefix in _PREFIXES]
        return {n.removeprefix(s): x for n, x in self.tensors.items() for s in starts if n.startswith(s)}

    def _norm(self, name: str, x: Tensor) -> Tensor:
        (weight,) = self._part(f"{name}.").values()
        return self._rms(weight)(x)  # type: ignore[no-any-return]

    def _rms(self, weight: Tensor) -> nn.Module:
        norm: nn.Module = LlamaRMSNorm(len(weight), self.config.rms_norm_eps)
        norm.load_state_dict({"weight": weight})
        return norm
