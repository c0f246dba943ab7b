"""DFlash against arithmetic written out token by token: as blocks are trained, as they are drafted on a cache."""

import math
from typing import Any

import heads
import pytest
import torch
import torch.nn.functional as F
from proposing import taught
from pydantic import ValidationError
from stand_ins import prompts, target
from torch import Tensor

from draftforge.specdec.decoder import Request, generate
from draftforge.specdec.drafts import dflash
from draftforge.specdec.drafts.dflash import DFlashDraft
from draftforge.specdec.kernels.document_mask import Documents, QueryMask
from draftforge.specdec.kv_cache import KVCache
from draftforge.specdec.proposers.base import Texts
from draftforge.specdec.proposers.dynamic_tree import DynamicProposer
from draftforge.specdec.proposers.factory import make_drafter, make_proposer
from draftforge.specdec.proposers.static_tree import StaticProposer
from draftforge.specdec.proposers.tree_shape import TreeShape
from draftforge.specdec.replay.dynamic import replay_dynamic
from draftforge.specdec.replay.expected_rounds import count_rounds
from draftforge.specdec.replay.replay import replay
from draftforge.specdec.replay.target_trace import RecordedAnswer, trace_target
from draftforge.specdec.sampling_settings import SamplingSettings

GREEDY = SamplingSettings()
TOKENS, WIDTH = 12, 4
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}  # float32, sums in another order


def normed(x: Tensor, weight: Any) -> Tensor:
    scaled: Tensor = x / (x.pow(2).mean() + 1e-5).sqrt() * weight
    return scaled


def turned(x_HD: Tensor, position: int) -> Tensor:
    """Rotary embedding, one pair of numbers at a time."""
    out, half = x_HD.clone(), x_HD.shape[1] // 2
    for i in range(half):
        angle = position * 10000.0 ** (-i / half)
        low, high = x_HD[:, i], x_HD[:, i + half]
        out[:, i] = low * math.cos(angle) - high * math.sin(angle)
        out[:, i + half] = high * math.cos(angle) + low * math.sin(angle)
    return out


def key_value(layer: Any, z: Tensor, position: int) -> tuple[Tensor, Tensor]:
    attn = layer.self_attn
    keys = torch.stack([normed(head, attn.k_norm.weight) for head in (attn.k_proj.weight @ z).view(2, 8)])
    return turned(keys, position), (attn.v_proj.weight @ z).view(2, 8)


def plainly(draft: DFlashDraft, embeds_WH: Tensor, aux_TA: Tensor, anchor: int) -> Tensor:
    """Normed states of one block whose first token stands at `anchor`: no cache, no mask, one token after the other."""
    context = [normed(draft.fc.weight @ aux, draft.hidden_norm.weight) for aux in aux_TA[:anchor]]
    states = list(embeds_WH)
    layers: Any = draft.layers
    for layer in layers:
        attn, mlp = layer.self_attn, layer.mlp
        seen = [key_value(layer, z, place) for place, z in enumerate(context)]
        inside = [normed(state, layer.input_layernorm.weight) for state in states]
        seen += [key_value(layer, z, anchor + place) for place, z in enumerate(inside)]
        whole, (window, causal) = seen, draft.config.sight(attn.layer_idx)
        for place, z in enumerate(inside):
            last = anchor + place if causal else len(whole) - 1
            seen = whole[max(0, anchor + place + 1 - (window or len(whole))) : last + 1]
            queries = torch.stack([normed(head, attn.q_norm.weight) for head in (attn.q_proj.weight @ z).view(6, 8)])
            outputs = []
            for head, query in enumerate(turned(queries, anchor + place)):
                scores = torch.stack([query @ key[head // 3] for key, _ in seen]) / math.sqrt(8)
                outputs.append(sum(w * value[head // 3] for w, (_, value) in zip(scores.softmax(0), seen)))
            state = states[place] + attn.o_proj.weight @ torch.cat(outputs)
            x = normed(state, layer.post_attention_layernorm.weight)
            states[place] = state + mlp.down_proj.weight @ (F.silu(mlp.gate_proj.weight @ x) * (mlp.up_proj.weight @ x))
    return torch.stack([normed(state, draft.norm.weight) for state in states])


SIGHTS: list[dict[str, Any]] = [
    {},
    {"sliding_window": 3},
    {"sliding_window": 2, "causal": "all"},
    {"sliding_window": 5, "full_attention_layers": (1,), "causal": "sliding"},
    {"causal": "all"},
]


@pytest.mark.parametrize("sights", SIGHTS)
@pytest.mark.parametrize("together", [1024, 8], ids=["all blocks at once", "two at once"])
@torch.no_grad()
def test_training_and_drafting_compute_what_is_written_down(
    together: int, sights: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dflash, "_TOGETHER", together)
    draft, generator = heads.dflash(target_hidden_size=20, **sights), torch.Generator().manual_seed(5)
    aux_BTA = 2 * torch.randn(2, TOKENS, 60, generator=generator) + 0.5
    anchor_BM = torch.tensor([[1, 3, 4, 9], [11, 2, 7, 7]])
    embeds_BMWH = torch.randn(2, 4, WIDTH, 24, generator=generator)
    trained = draft(embeds_BMWH, aux_BTA, QueryMask(Documents.rows(aux_BTA[..., 0]), anchor_BM))
    for row in range(2):
        for block, anchor in enumerate(anchor_BM[row].tolist()):
            expected = plainly(draft, embeds_BMWH[row, block], aux_BTA[row], anchor)
            torch.testing.assert_close(trained[row, block], expected, **CLOSE)
            cache = KVCache(1, TOKENS + WIDTH, torch.device("cpu"))
            first = min(3, anchor)
            draft.append_context(aux_BTA[row, None, :first], cache.prefill(torch.tensor([0]), torch.tensor([first])))
            if anchor > first:  # the rest arrives as it does in a round
                draft.append_context(aux_BTA[row, None, first:anchor], cache.extend(1, anchor - first))
                cache.keep(torch.tensor([anchor - first]))
            depth = torch.arange(WIDTH)[None]
            for _ in range(2):  # a block leaves nothing behind
                whole = torch.ones(1, WIDTH, WIDTH, dtype=torch.bool)
                steps = cache.branch(depth, whole), cache.branch(depth, whole.tril())
                drafted = draft.decode(embeds_BMWH[row, block, None], *steps)[0]
                torch.testing.assert_close(drafted, expected, **CLOSE)


@torch.no_grad()
def test_blocks_of_documents_that_share_a_row() -> None:
    """Each sees its own document only, at its own positions; what fills the row up is seen by none."""
    draft, generator = heads.dflash(), torch.Generator().manual_seed(5)
    aux_BTA, embeds_BMWH = (torch.randn(1, *sizes, generator=generator) for sizes in ((TOKENS, 72), (3, WIDTH, 24)))
    document_BT = torch.tensor([[0] * 5 + [1] * 6 + [-1]])
    positions_BT = torch.tensor([[*range(5), *range(6), 0]])
    anchors = QueryMask(Documents(document_BT, positions_BT), torch.tensor([[3, 7, 10]]))
    packed = draft(embeds_BMWH, aux_BTA, anchors)[0]
    for block, (start, anchor) in enumerate([(0, 3), (5, 2), (5, 5)]):
        expected = plainly(draft, embeds_BMWH[0, block], aux_BTA[0, start:], anchor)
        torch.testing.assert_close(packed[block], expected, **CLOSE)


@pytest.mark.slow
def test_every_number_of_levels_is_replayed_as_it_is_decoded() -> None:
    """A block of other length is another draft: one call that replays several gives each what decoding gives it."""
    model = target()
    proposer = make_proposer(taught("dflash"), model)
    longest: list[int] = []
    shorter: list[int] = []
    for ids in prompts(3):
        ((_, answer),) = generate(model, None, [Request(ids, GREEDY, 0, 28)])
        traced = trace_target(model, [RecordedAnswer(ids, answer.tokens, 28)], GREEDY, proposer.aux_layers)
        for _, K, counts in replay(proposer, traced, ["greedy"], [1, 3, 7])[0]:
            ((_, decoded),) = generate(model, proposer, [Request(ids, GREEDY, 0, 28)], draft_tokens=K)
            assert counts == count_rounds(decoded.rounds, K)
        for K, found in ((3, longest), (1, shorter)):
            with torch.inference_mode():
                found += proposer.trace(traced.pack, K, GREEDY, traced.states).rank_RK[:, 0].tolist()
    assert longest != shorter


@pytest.mark.parametrize("levels", [2, 6])
def test_trees_have_blocks_as_long_as_they_are_deep(levels: int) -> None:
    """Decoding, its replay and driving along the answer agree also where a tree ends above what is asked for."""
    model = target()
    draft = taught("dflash")
    shape = TreeShape([[0], [1], [0, 0], [1, 0], [0, 1]])
    for proposer in (
        StaticProposer(make_drafter(draft, model), shape, "deterministic"),
        DynamicProposer(make_drafter(draft, model), 3, 6),
    ):
        for ids in prompts(2):
            request = Request(ids, GREEDY, 0, 20)
            ((_, decoded),) = generate(model, proposer, [request], draft_tokens=levels)
            traced = trace_target(model, [RecordedAnswer(ids, decoded.tokens, 20)], GREEDY, proposer.aux_layers)
            ((counted,),) = replay(proposer, traced, ["greedy"], [levels])
            assert counted.counts == count_rounds(decoded.rounds, levels) == replay_dynamic(proposer, traced, levels)[0]


@pytest.mark.parametrize("own", [False, True])
@torch.inference_mode()
def test_embeddings_and_head_are_the_targets_unless_the_draft_has_its_own(own: bool) -> None:
    model, ids = target(4), prompts(4)[3]
    fields = {"hidden_size": 48, "target_hidden_size": 48}
    draft = heads.dflash(own_embeddings=own, own_head=own, **fields)
    states = model.states(torch.tensor([ids[:-1]]), aux_layers=draft.config.aux_layers)
    assert states.aux_BTA is not None
    drafter = make_drafter(draft, model)
    drafter.reserve(1, len(ids) + 1, 0, 3)
    drafter.begin(torch.tensor([0]), Texts.of([ids]), states)
    found = [
        drafter.open(1, chain=False)[0],
        *(drafter.expand(torch.tensor([[0]]), torch.tensor([[-1]]), k)[0, 0] for k in (0, 1)),
    ]
    block = torch.tensor([ids[-1], 60, 60, 60])
    table = draft.embed_tokens.weight if draft.embed_tokens is not None else model.model.get_input_embeddings().weight
    head = draft.lm_head.weight if draft.lm_head is not None else model.model.get_output_embeddings().weight
    expected = plainly(draft, table[block], states.aux_BTA[0], len(ids) - 1) @ head.T
    for ours, theirs in zip(found, expected[1:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)  # logits in the tens


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"draft_vocab_size": 62}, "draft_vocab_size 62: must not exceed vocab_size 61"),
        ({"mask_token_id": 61}, "mask_token_id 61: must be below vocab_size 61"),
        ({"aux_layers": (2, 1)}, r"aux_layers \[2, 1\]: must be different layers in ascending order"),
        ({"aux_layers": (0, 1)}, r"aux_layers \[0, 1\]: must be different layers in ascending order, from 1"),
        ({"block_size": 1}, "block_size"),
    ],
)
def test_dimensions_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    config = heads.dflash().config
    with pytest.raises(ValidationError, match=message):
        type(config).model_validate(config.model_dump() | fields)
