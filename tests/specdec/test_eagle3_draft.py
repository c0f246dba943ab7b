"""The EAGLE-3 head against arithmetic written out in loops: as it is trained, and as it drafts on its cache."""

import math

import torch
import torch.nn.functional as F
from stand_ins import random_eagle3, target
from torch import Tensor

from draftforge.specdec.cache import KVCache
from draftforge.specdec.drafts.eagle3 import Eagle3Draft

TOKENS, STEPS = 9, 4


def lively_draft() -> Eagle3Draft:
    """Weights so large that a position, a norm or a residual in the wrong place shows."""
    draft = random_eagle3(target(), draft_vocab=40)
    torch.manual_seed(4)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    return draft


def inputs(draft: Eagle3Draft) -> tuple[Tensor, Tensor]:
    """Embeddings of x_0 .. x_{T-1}, and the target's features at each of them."""
    generator = torch.Generator().manual_seed(5)
    size = draft.config.hidden_size
    return torch.randn(TOKENS, size, generator=generator), torch.randn(TOKENS, 3 * size, generator=generator)


def turned(x_HD: Tensor, position: int) -> Tensor:
    """Rotary embedding, one pair of numbers at a time."""
    out, half = x_HD.clone(), x_HD.shape[1] // 2
    for i in range(half):
        angle = position * 10000.0 ** (-i / half)
        low, high = x_HD[:, i], x_HD[:, i + half]
        out[:, i] = low * math.cos(angle) - high * math.sin(angle)
        out[:, i + half] = high * math.cos(angle) + low * math.sin(angle)
    return out


def plainly(draft: Eagle3Draft, embeds_TH: Tensor, aux_TA: Tensor, i: int) -> list[Tensor]:
    """States of all steps at position i: true pairs 0..i, then the draft's own state with one more token a step."""
    layer, attn = draft.midlayer, draft.midlayer.self_attn
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def one(embed: Tensor, state: Tensor, position: int) -> Tensor:
        z = torch.cat([layer.input_layernorm(embed), layer.hidden_norm(state)])
        keys.append(turned(attn.k_proj(z).view(2, 8), position))
        values.append(attn.v_proj(z).view(2, 8))
        heads = []
        for head, query in enumerate(turned(attn.q_proj(z).view(6, 8), position)):
            scores = torch.stack([query @ key[head // 3] for key in keys]) / math.sqrt(8)
            heads.append(sum(w * value[head // 3] for w, value in zip(scores.softmax(0), values)))
        state = state + attn.o_proj(torch.cat(heads))
        normed, mlp = layer.post_attention_layernorm(state), layer.mlp
        return state + mlp.down_proj(F.silu(mlp.gate_proj(normed)) * mlp.up_proj(normed))  # type: ignore[no-any-return]

    for t in range(i + 1):
        state = one(embeds_TH[t + 1], draft.fc(aux_TA[t]), t)
    states = [state]
    for k in range(1, STEPS):
        states.append(one(embeds_TH[i + 1 + k], states[-1], i + k))
    return states


@torch.no_grad()
def test_training_and_drafting_compute_what_is_written_down() -> None:
    draft = lively_draft()
    embeds_TH, aux_TA = inputs(draft)
    first, width = 2, TOKENS - STEPS - 2
    trained = draft(embeds_TH[None], aux_TA[None], torch.tensor([first]), width, STEPS)
    for column in range(width):
        i = first + column
        expected = plainly(draft, embeds_TH, aux_TA, i)
        cache = KVCache(1, TOKENS, torch.device("cpu"))
        step = cache.prefill([0], [i + 1])
        state_BNH = draft.decode(embeds_TH[None, 1 : i + 2], draft.fc(aux_TA[None, : i + 1]), step)[:, -1:]
        for k in range(STEPS):
            if k:
                state_BNH = draft.decode(embeds_TH[None, None, i + 1 + k], state_BNH, cache.extend(1, 1))
                cache.keep([1])
            torch.testing.assert_close(trained[k][0, column], expected[k], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(state_BNH[0, 0], expected[k], rtol=1e-4, atol=1e-4)
