"""EAGLE heads against arithmetic written out in loops: as they are trained, and as they draft on their cache."""

import math
from typing import Any

import heads
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draftforge.specdec.drafts.eagle import EagleDraft
from draftforge.specdec.drafts.eagle3 import Eagle3Draft
from draftforge.specdec.kernels.document_mask import Documents, QueryMask
from draftforge.specdec.kv_cache import KVCache

TOKENS, STEPS = 9, 4
CLOSE: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-3}  # float32; the un-normed states of EAGLE-1 reach the hundreds
Head = EagleDraft | Eagle3Draft
HEADS: dict[str, tuple[Any, dict[str, Any]]] = {
    "eagle": (heads.eagle, {}),
    "eagle3": (heads.eagle3, {"draft_vocab": 40}),
    "fc_norm": (heads.eagle3, {"fc_norm": True}),
    "norm_output": (heads.eagle3, {"norm_output": True}),
    "norm_before_residual": (heads.eagle3, {"norm_before_residual": True}),
    "other width": (heads.eagle3, {"target_hidden_size": 20, "fc_norm": True}),
    "norm_before_fc": (heads.eagle3, {"norm_before_fc": True}),
    "qwen3": (heads.eagle3, {"body": "qwen3", "norm_output": True}),
    "biases": (heads.eagle3, {"attention_bias": True, "fc_bias": True}),
    "two read layers": (heads.eagle3, {"aux_layers": (1, 3)}),
    "last state": (heads.eagle3, {"aux_layers": ()}),
    "window": (heads.eagle3, {"sliding_window": 3}),
    "window of one": (heads.eagle3, {"sliding_window": 1}),
    "window of two, three layers": (
        heads.eagle3,
        {"sliding_window": 2, "full_attention_layers": (1,), "num_hidden_layers": 3, "norm_before_residual": True},
    ),
    "two layers": (heads.eagle3, {"num_hidden_layers": 2, "norm_before_fc": True, "norm_output": True}),
}


def inputs(draft: Head) -> tuple[Tensor, Tensor]:
    """Embeddings of x_0 .. x_{T-1}, and what the head reads of the target at each of them."""
    generator = torch.Generator().manual_seed(5)
    config = draft.config
    aux = len(draft.config.aux_layers) if isinstance(draft, Eagle3Draft) else 0
    width = aux * draft.config.target_hidden_size if isinstance(draft, Eagle3Draft) and aux else config.hidden_size
    embeds = torch.randn(TOKENS, config.hidden_size, generator=generator)
    return embeds, 2 * torch.randn(TOKENS, width, generator=generator) + 0.5


def true_state(draft: Head, seen_X: Tensor) -> Tensor:
    """The state of a true position, [H]."""
    if isinstance(draft, EagleDraft):
        return seen_X
    if not draft.config.aux_layers:
        return seen_X
    if draft.fc.norms is not None:
        parts = [normed(part, norm.weight) for part, norm in zip(seen_X.chunk(3), draft.fc.norms)]  # type: ignore[arg-type]
        seen_X = torch.cat(parts)
    if draft.fc.input_norm is not None:
        seen_X = normed(seen_X, draft.fc.input_norm.weight)
    return draft.fc.weight @ seen_X + (0 if draft.fc.bias is None else draft.fc.bias)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean() + 1e-5).sqrt() * weight


def turned(x_HD: Tensor, position: int) -> Tensor:
    """Rotary embedding, one pair of numbers at a time."""
    out, half = x_HD.clone(), x_HD.shape[1] // 2
    for i in range(half):
        angle = position * 10000.0 ** (-i / half)
        low, high = x_HD[:, i], x_HD[:, i + half]
        out[:, i] = low * math.cos(angle) - high * math.sin(angle)
        out[:, i + half] = high * math.cos(angle) + low * math.sin(angle)
    return out


def entered(draft: Head, embed: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The residual, and what attention reads."""
    if isinstance(draft, EagleDraft):
        mixed = draft.fc.weight @ torch.cat([embed, state])
        return mixed, mixed
    layer = draft.midlayer
    state_normed = normed(state, layer.hidden_norm.weight)
    z = torch.cat([normed(embed, layer.input_layernorm.weight), state_normed])
    return state_normed if draft.config.norm_before_residual else state, z


def plainly(draft: Head, embeds_TH: Tensor, seen_TX: Tensor, i: int) -> list[Tensor]:
    """States of all steps at position i: true pairs 0..i, then the draft's own state with one more token a step."""
    keys: dict[int, list[Tensor]] = {number: [] for number, _ in enumerate(draft.blocks)}
    values: dict[int, list[Tensor]] = {number: [] for number in keys}

    def attended(number: int, z: Tensor, position: int) -> Tensor:
        attn: Any = draft.blocks[number].self_attn

        def heads_of(name: str, count: int) -> Tensor:
            linear = getattr(attn, f"{name}_proj")
            x = linear.weight @ z + (0 if linear.bias is None else linear.bias)
            found: Tensor = x.view(count, 8)
            norm = getattr(attn, f"{name}_norm", None)
            return found if norm is None else torch.stack([normed(head, norm.weight) for head in found])

        keys[number].append(turned(heads_of("k", 2), position))
        values[number].append(heads_of("v", 2))
        outputs, window = [], draft.windows[number] or TOKENS
        for head, query in enumerate(turned(heads_of("q", 6), position)):
            scores = torch.stack([query @ key[head // 3] for key in keys[number][-window:]]) / math.sqrt(8)
            outputs.append(sum(w * value[head // 3] for w, value in zip(scores.softmax(0), values[number][-window:])))
        bias = 0 if attn.o_proj.bias is None else attn.o_proj.bias
        mixed: Tensor = attn.o_proj.weight @ torch.cat(outputs) + bias
        return mixed

    def one(embed: Tensor, state: Tensor, position: int) -> Tensor:
        for number, block in enumerate(draft.blocks):
            layer: Any = block
            residual, z = (
                entered(draft, embed, state) if number == 0 else (state, normed(state, layer.input_layernorm.weight))
            )
            state = residual + attended(number, z, position)
            x, mlp = normed(state, layer.post_attention_layernorm.weight), layer.mlp
            state = state + mlp.down_proj.weight @ (F.silu(mlp.gate_proj.weight @ x) * (mlp.up_proj.weight @ x))
        if isinstance(draft, Eagle3Draft) and draft.config.norm_output:
            state = normed(state, draft.norm.weight)
        return state

    for t in range(i + 1):
        state = one(embeds_TH[t + 1], true_state(draft, seen_TX[t]), t)
    states = [state]
    for k in range(1, STEPS):
        states.append(one(embeds_TH[i + 1 + k], states[-1], i + k))
    return states


@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_training_and_drafting_compute_what_is_written_down(name: str) -> None:
    make, options = HEADS[name]
    draft: Head = make(**options)
    embeds_TH, seen_TX = inputs(draft)
    first, width = 2, TOKENS - STEPS - 2
    places = QueryMask(Documents.rows(torch.zeros(1, TOKENS)), torch.arange(first, first + width)[None])
    trained = draft(embeds_TH[None], seen_TX[None], places, STEPS)
    true_TH = torch.stack([true_state(draft, seen) for seen in seen_TX])
    for column in range(width):
        i = first + column
        expected = plainly(draft, embeds_TH, seen_TX, i)
        cache = KVCache(1, TOKENS, torch.device("cpu"))
        step = cache.prefill(torch.tensor([0]), torch.tensor([i + 1]))
        state_BNH = draft.decode(embeds_TH[None, 1 : i + 2], true_TH[None, : i + 1], step)[:, -1:]
        for k in range(STEPS):
            if k:
                state_BNH = draft.decode(embeds_TH[None, None, i + 1 + k], state_BNH, cache.extend(1, 1))
                cache.keep(torch.tensor([1]))
            torch.testing.assert_close(trained[k][0, column], expected[k], **CLOSE)
            torch.testing.assert_close(state_BNH[0, 0], expected[k], **CLOSE)


@pytest.mark.parametrize("name", ["eagle3", "two layers", "window of two, three layers"])
@torch.no_grad()
def test_packed_documents_are_as_they_are_alone(name: str) -> None:
    make, options = HEADS[name]
    draft: Head = make(**options)
    embeds_TH, seen_TX = inputs(draft)
    positions = [*range(4), *range(TOKENS - 4)]
    together = Documents(torch.tensor([[0] * 4 + [1] * (TOKENS - 4)]), torch.tensor([positions]))
    packed = draft(embeds_TH[None], seen_TX[None], QueryMask(together, torch.tensor([[5]])), 2)
    alone = QueryMask(Documents.rows(torch.zeros(1, TOKENS - 4)), torch.tensor([[1]]))
    for ours, theirs in zip(packed, draft(embeds_TH[None, 4:], seen_TX[None, 4:], alone, 2), strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize("norm_output", [False, True])
@torch.no_grad()
def test_the_head_reads_a_state_that_is_normed_once(norm_output: bool) -> None:
    draft = heads.eagle3(norm_output=norm_output)
    state = torch.randn(24)
    read = state if norm_output else normed(state, draft.norm.weight)
    torch.testing.assert_close(draft.logits(state), draft.lm_head.weight @ read)


@torch.no_grad()
def test_medusa_heads_are_residual_blocks_and_a_linear_layer() -> None:
    draft = heads.medusa(fc_bias=True, num_layers=2)
    hidden_BTH = torch.randn(2, 5, 24)
    for h in range(3):
        x = hidden_BTH
        for layer in draft.blocks[h].layers:  # type: ignore[union-attr]
            y = x @ layer.weight.T + layer.bias
            x = x + y / (1 + (-y).exp())
        torch.testing.assert_close(draft.logits(hidden_BTH, h), F.linear(x, draft.lm_heads[h].weight))  # type: ignore[arg-type]


def test_new_medusa_blocks_are_the_identity() -> None:
    config = heads.medusa().config.model_copy(update={"fc_bias": True})
    hidden = torch.randn(4, 24)
    assert torch.equal(type(heads.medusa())(config).state(hidden, 1), hidden)
