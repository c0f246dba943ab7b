"""Heads that make a DFlash draft a DSpark one (DeepSeek and Peking University 2026, "DSpark: Confidence-Scheduled
Speculative Decoding with Semi-Autoregressive Generation").

Shapes: V vocabulary, Vd draft vocabulary, H hidden size, R Markov rank.

One pass of the block's layers gives the states of all drafted tokens. Then tokens are drafted from left to right: the
Markov head adds a bias to a token's logits that follows from the token before it, and the confidence head says from
the state and that same token how likely the next one is accepted.

Parameters bear the names of the checkpoint layout that vLLM, SGLang and speculators read.
"""

import torch.nn.functional as F
from torch import Tensor, nn


class MarkovHead(nn.Module):
    """Bias of a token's logits by the token before it: W2 W1[token], of rank R (markov_head_type vanilla)."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int) -> None:
        super().__init__()
        # The bias begins near zero, so that a fresh draft is a DFlash draft.
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        nn.init.normal_(self.markov_w1.weight, std=0.01)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [..., R] of the tokens before, by target ids [...]."""
        return self.markov_w1(ids)  # type: ignore[no-any-return]

    def bias(self, before: Tensor) -> Tensor:
        """Bias [..., Vd] from the embeddings [..., R] of the tokens before."""
        return self.markov_w2(before)  # type: ignore[no-any-return]


class _Float32Linear(nn.Linear):
    """Linear layer that computes in float32 whatever its weights are, as engines do."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight.float(), self.bias.float())


class ConfidenceHead(nn.Module):
    """Logit of the probability that a drafted token is accepted, given that those before it were."""

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.proj = _Float32Linear(hidden_size + rank, 1)

    def forward(self, state_and_before: Tensor) -> Tensor:
        """Logits [...] from the token's state and the embedding of the token before it, side by side [..., H + R]."""
        return self.proj(state_and_before)[..., 0]  # type: ignore[no-any-return]
