"""What DFlash and DSpark are trained on: which state drafts which supervised token; and that decoding drafts the same
there."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from draftforge.data.batches import collate
from draftforge.data.store import Capture
from draftforge.errors import InputError
from draftforge.specdec.drafts.dflash import DFlashDraft
from draftforge.specdec.proposers.base import Texts
from draftforge.specdec.proposers.dflash import DFlashDrafter
from draftforge.specdec.proposers.factory import make_drafter
from draftforge.specdec.targets import Target
from draftforge.train.families.dflash import (
    Blocks,
    DFlashFamily,
    block_offset,
    dflash_config,
    read_layers,
)
from draftforge.train.families.feature_family import copy_tables
from draftforge.train.losses.linear_head import COUNT, LOSS, Head, LossSettings, head_loss
from draftforge.train.settings import DFlashSettings

K = 3
DSPARK: dict[str, Any] = {"markov_rank": 7, "confidence_weight": 0.5}


class Talk(NamedTuple):
    prompt_ids: list[int]
    answer_ids: list[int]


TALKS = [Talk([10, 11, 12, 13], [14, 15, 16, 17]), Talk([20], [21, 22]), Talk([30, 31], [32])]


@pytest.mark.parametrize("row_tokens", [0, 20])
@pytest.mark.parametrize("begin", range(K))
def test_every_supervised_token_is_drafted_in_one_block(begin: int, row_tokens: int) -> None:
    batch = collate(TALKS, row_tokens=row_tokens)
    blocks = Blocks(batch, [begin] * len(TALKS), K)
    width = blocks.anchors.at_BM.shape[1]
    ids_BMW = blocks.ids(batch.ids_BT, 99, K)
    assert ids_BMW.shape == (len(batch.ids_BT), width, 1 + K) and bool((ids_BMW[..., 1:] == 99).all())
    taught = [token for talk in TALKS for token in talk.answer_ids]
    for position, at, step, token in zip(batch.positions_N, blocks.at_N, blocks.step_N, taught, strict=True):
        row, (block, mask) = int(at) // (width * K), divmod(int(at) % (width * K), K)
        anchor = int(blocks.anchors.at_BM[row, block])
        assert mask == int(step) and int(batch.ids_BT[row, anchor + 1 + mask]) == token
        assert int(position) == row * batch.ids_BT.shape[1] + anchor + mask
        assert int(ids_BMW[row, block, 0]) == int(batch.ids_BT[row, anchor])
        assert int(blocks.anchors.documents.document_BT[row, anchor]) == int(
            blocks.anchors.documents.document_BT[row, anchor + 1 + mask]
        )
    chains = [[n for n in chain if n >= 0] for chain in blocks.chains_KC.T.tolist()]
    assert sorted(n for chain in chains for n in chain) == list(range(batch.supervised))
    for chain, column in zip(chains, blocks.chains_KC.T.tolist(), strict=True):
        assert column[: len(chain)] == chain == list(range(chain[0], chain[0] + len(chain)))
        assert len({int(blocks.at_N[n]) // K for n in chain}) == 1  # of one block
    first = [int(blocks.step_N[offset]) for offset in batch.offsets[:-1]]
    assert first == [begin, 0, 0]  # there is nothing before a prompt of one token, and one token before one of two


def test_blocks_begin_at_every_place_as_samples_come_again() -> None:
    for sample in range(5):
        assert sorted(block_offset(sample, epoch, 7) for epoch in range(20, 27)) == list(range(7))
    assert len({block_offset(sample, 0, 7) for sample in range(50)}) == 7


def family_of(target: Target, draft_ids: torch.Tensor | None = None, **update: Any) -> DFlashFamily:
    settings = DFlashSettings(**{"draft_tokens": K, "layers": 2, **update})
    torch.manual_seed(0)
    size = target.vocab_size if draft_ids is None else len(draft_ids)
    config = dflash_config(settings, target, size)
    draft = DFlashDraft(config, draft_ids, settings.train_embeddings, settings.train_head)
    copy_tables(draft, target)
    if draft.markov_head is not None:  # which begins with next to nothing
        torch.nn.init.normal_(draft.markov_head.markov_w1.weight)
    return DFlashFamily(draft, settings, LossSettings({"kl": 1.0}), target)


@pytest.mark.parametrize("count", [1, 4], ids=["alone", "packed"])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("dspark", [{}, DSPARK], ids=["dflash", "dspark"])
def test_the_loss_is_that_of_what_decoding_drafts(
    dspark: dict[str, Any], reduced: bool, count: int, target: Target, tiny_capture: Capture
) -> None:
    """The agreement of training and serving: a drafter on its cache, begun where each block begins, that is told the
    text's own tokens. The confidence learns how much of p and q overlaps there."""
    ids = torch.arange(0, 300, 2) if reduced else None
    family = family_of(target, ids, **dspark)
    family.epoch = 1
    samples = tiny_capture.samples("train")[1 : 1 + count]
    batch = collate(samples, row_tokens=200)
    assert batch.documents.packed == (count > 1)
    loss, sums = family(family.inputs(batch, range(count)))
    expected, counts, confidence, weights = [0.0] * K, [0] * K, 0.0, (1.0, 0.8, 0.64)
    drafter = make_drafter(family.draft, target)
    assert isinstance(drafter, DFlashDrafter)
    with torch.inference_mode():
        for number, sample in enumerate(samples):
            tokens = sample.prompt_ids + sample.answer_ids
            states = target.states(torch.tensor([tokens]), aux_layers=drafter.aux_layers)
            logp = target.logits(states.hidden_BTH)[0].float().log_softmax(-1)
            logp = logp if ids is None else logp[:, ids]
            first = len(sample.prompt_ids) - 1
            for anchor in range(first - block_offset(number, 1, K), len(tokens) - 1, K):
                drafter.reserve(1, len(tokens), 0, K)
                prefix = tokens[: anchor + 1]
                drafter.begin(
                    torch.tensor([0]),
                    Texts.of([prefix]),
                    target.states(torch.tensor([prefix[:-1]]), aux_layers=drafter.aux_layers),
                )
                above = [*tokens[anchor : anchor + K], 0, 0]  # past the text nothing is counted
                rows = [drafter.open(1, chain=True)[0]]
                rows += [
                    drafter.expand(torch.tensor([[above[k + 1]]]), torch.zeros(1, 1).long(), k)[0, 0]
                    for k in range(K - 1)
                ]
                for k, logits in enumerate(rows):
                    if first <= anchor + k < len(tokens) - 1:
                        logq = (logits if ids is None else logits[ids]).float().log_softmax(-1)
                        expected[k] += float((logp[anchor + k].exp() * (logp[anchor + k] - logq)).sum())
                        counts[k] += 1
                        if dspark:
                            overlap = torch.minimum(logp[anchor + k].exp(), logq.exp()).sum()
                            confidence += weights[k] * bce(family.draft, drafter._states_BKH[0, k], above[k], overlap)
    if dspark:  # the extra loss is the last row of the sums
        assert sums[K, LOSS].item() == pytest.approx(confidence, rel=1e-4) and sums[K, COUNT] == 0
        sums = sums[:K]
    assert sums[:, LOSS].tolist() == pytest.approx(expected, rel=1e-4)
    assert sums[:, COUNT].tolist() == counts and sum(counts) == batch.supervised and min(counts) > 0
    weighted = sum(w * one for w, one in zip(weights, expected))
    assert loss.item() == pytest.approx(weighted + 0.5 * confidence, rel=1e-4)


def bce(draft: DFlashDraft, state_H: torch.Tensor, above: int, overlap: torch.Tensor) -> float:
    """Binary cross-entropy of the confidence head's probability, written out."""
    assert draft.markov_head is not None and draft.confidence_head is not None
    weight, bias = draft.confidence_head.proj.weight[0], draft.confidence_head.proj.bias[0]
    z = weight @ torch.cat([state_H, draft.markov_head.markov_w1.weight[above]]) + bias
    return float(-(overlap * F.logsigmoid(z) + (1 - overlap) * F.logsigmoid(-z)))


def test_gradients_of_the_markov_head_are_those_of_the_plain_loss(target: Target, tiny_capture: Capture) -> None:
    """Of its two matrices, of the confidence head and the body: autograd of the sums written out."""
    family = family_of(target, **DSPARK)
    batch = collate(tiny_capture.samples("train")[:3], row_tokens=200)
    inputs = family.inputs(batch, range(3))
    loss, _ = family(inputs)
    loss.backward()
    found = {name: p.grad.clone() for name, p in family.named_parameters() if p.grad is not None}
    family.zero_grad()

    rows, draft, head = family.rows(inputs), family.draft, target.model.get_output_embeddings().weight
    states = target.states(batch.ids_BT, documents=batch.documents)
    p_NV = target.logits(states.hidden_BTH.flatten(0, 1)[batch.positions_N]).softmax(-1).detach()
    assert draft.markov_head is not None and draft.confidence_head is not None
    before_NE = draft.markov_head.markov_w1(batch.ids_BT.flatten()[batch.positions_N])
    state_NH = rows.states_SNH[0, :, : head.shape[1]]
    q_NV = (state_NH @ head.T + before_NE @ draft.markov_head.markov_w2.weight.T).softmax(-1)
    z_N = draft.confidence_head.proj(torch.cat([state_NH, before_NE], -1))[:, 0]
    overlap_N = torch.minimum(p_NV, q_NV).sum(-1).detach()
    weight_N = torch.tensor([1.0, 0.8, 0.64])[rows.steps()[0]]
    kl_N = (p_NV * (p_NV.log() - q_NV.log())).sum(-1)
    bce_N = F.binary_cross_entropy_with_logits(z_N, overlap_N, reduction="none")
    plain = (weight_N * (kl_N + 0.5 * bce_N)).sum()
    assert loss.item() == pytest.approx(plain.item(), rel=1e-4)
    plain.backward()
    expected = {name: p.grad for name, p in family.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys() and len([name for name in found if "markov" in name]) == 2
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("objective", [{"kl": 1.0}, {"tv": 1.0}, {"lk_hybrid": 1.0}, {"jsd": 1.0}])
def test_a_markov_head_is_more_columns_of_the_head(
    objective: dict[str, float], target: Target, tiny_capture: Capture
) -> None:
    """Loss and gradients of a trained and a frozen part equal those of one matrix, in chunks and at once."""
    family = family_of(target, train_head=True, **DSPARK)
    batch = collate(tiny_capture.samples("train")[:3])
    rows, head = family.rows(family.inputs(batch, range(3))), family.head()
    found = []
    for heads, few in ((head, True), (head, False), (Head(head.whole(torch.float32).detach().requires_grad_()), False)):
        settings = LossSettings(objective, logits_bytes=1 << 13 if few else 1 << 28)
        loss, sums = head_loss(rows, heads, settings)
        wanted = [one for one in (heads.weight_VH, heads.markov_VE) if one is not None]
        gradients = torch.autograd.grad(loss, wanted, retain_graph=True)
        found.append((loss.detach(), sums, torch.cat(gradients, 1)))
    for one in found[1:]:
        for ours, theirs in zip(found[0], one, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_the_expected_length_of_blocks(target: Target, tiny_capture: Capture) -> None:
    """By hand from the acceptance of each token: 1 + a_1 + a_1 a_2 + ..., of every block, which counts for its K."""
    family = family_of(target)
    samples = tiny_capture.samples("train")[:3]
    batch = collate(samples)
    inputs = family.inputs(batch, range(3))
    loss, _ = DFlashFamily(
        family.draft, DFlashSettings(draft_tokens=K), LossSettings({"expected_length": 1.0}), target
    )(inputs)
    rows = family.rows(inputs)
    states = target.states(batch.ids_BT, documents=batch.documents)
    p_NV = target.logits(states.hidden_BTH.flatten(0, 1)[batch.positions_N]).softmax(-1)
    alpha_N = torch.minimum(p_NV, target.logits(rows.states_SNH[0]).softmax(-1)).sum(-1)
    expected = 0.0
    assert rows.chains_KM is not None
    for chain in rows.chains_KM.T.tolist():
        reached = 1.0
        expected += 1.0
        for n in chain:
            reached *= float(alpha_N[n].detach()) if n >= 0 else 0.0
            expected += reached
    assert loss.item() == pytest.approx(-K * expected, rel=1e-4)


@pytest.mark.parametrize("dspark", [{}, DSPARK])
def test_an_empty_batch_gives_zeros(dspark: dict[str, Any], target: Target) -> None:
    family = family_of(target, **dspark)
    loss, sums = family(family.inputs(collate([]), []))
    loss.backward()
    assert loss.item() == 0 and not sums.any()
    assert all(parameter.grad is not None for parameter in family.draft.parameters())


def test_only_the_draft_is_trained(target: Target) -> None:
    names = set(family_of(target).trainable())
    assert all(name.startswith("draft.") for name in names)
    assert not any("lm_head" in name or "embed" in name for name in names)
    assert "draft.lm_head.weight" in family_of(target, train_head=True).trainable()
    assert "draft.lm_head.weight" not in family_of(target, torch.arange(40)).trainable()
    assert "draft.embed_tokens.weight" in family_of(target, train_embeddings=True).trainable()
    inside, tables, small = family_of(target, train_head=True).parameter_groups()
    assert len(tables) == 1 and len(inside) == 1 + 2 * 7 and len(small) == 2 + 2 * 4
    inside, tables, small = family_of(target, **DSPARK).parameter_groups()
    assert len(tables) == 3 and len(inside) == 1 + 2 * 7 and len(small) == 2 + 2 * 4 + 1
    silent = family_of(target, **DSPARK)
    DFlashFamily.freeze(silent.draft, DFlashSettings(draft_tokens=K, markov_rank=7))
    assert not any("confidence" in name for name in silent.trainable())


def test_what_is_read_of_the_target() -> None:
    """As published drafts have it where the target is deep enough: layers 1, 9, 17, 25, 33 of 36, counted from 0."""
    asked = [
        (5, 36, (2, 10, 18, 26, 34)),
        (1, 36, (19,)),
        (3, 30, (2, 15, 28)),
        (3, 4, (1, 2, 4)),
        (3, 6, (2, 3, 4)),
        (5, 3, (1, 2, 3)),
        (2, 1, (1,)),
    ]
    for layers, total, expected in asked:
        assert read_layers(DFlashSettings(layers=layers), total) == expected
    assert read_layers(DFlashSettings(aux_layers=(1, 4)), 4) == (1, 4)
    with pytest.raises(InputError, match=r"draft\.aux_layers = \[1, 5\]: must be between 1 and 4"):
        read_layers(DFlashSettings(aux_layers=(1, 5)), 4)


def test_the_token_of_a_mask(target: Target) -> None:
    settings = DFlashSettings()
    own = dflash_config(settings, target, target.vocab_size).mask_token_id
    assert own == target.tokenizer.eos_token_id  # no mask token, no free id, no padding
    assert dflash_config(DFlashSettings(mask_token=7), target, target.vocab_size).mask_token_id == 7
    with pytest.raises(InputError, match=r"draft\.mask_token = 300: must be below 300"):
        DFlashFamily.check(DFlashSettings(mask_token=300), lambda: target)
    with pytest.raises(InputError, match=r"draft\.aux_layers = \[9\]: must be between 1 and 4"):
        DFlashFamily.check(DFlashSettings(aux_layers=(9,)), lambda: target)


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"draft_tokens": 5}, "draft_tokens = 5: x has blocks that draft 3"),
        ({"layers": 3}, "layers = 3: x has 2"),
        ({"aux_layers": (1, 2)}, r"aux_layers = [1, 2]: x reads [1, 4]"),
        ({"draft_vocabulary": 40}, "draft_vocabulary = 40: x drafts 300 tokens"),
        ({"intermediate_size": 8}, "intermediate_size = 8: x has 256"),
        ({"mask_token": 5}, "mask_token = 5: x has 2"),
        ({"train_embeddings": True}, "train_embeddings = true: x has no embeddings of its own"),
        ({"train_head": True}, "train_head = true: x has no head of its own"),
        ({"layers": None}, None),
        ({"markov_rank": 7}, "markov_rank = 7: x has 0"),
    ],
)
def test_starts_of_another_shape(update: dict[str, Any], message: str | None, target: Target) -> None:
    settings = DFlashSettings(**{"draft_tokens": K, "layers": 2, **update})
    assert DFlashFamily.incompatibility(settings, family_of(target).draft, "x") == message


def test_starts_of_a_dspark_draft(target: Target) -> None:
    draft = family_of(target, markov_rank=7).draft
    assert draft.family == DFlashSettings(markov_rank=7).draft_family == "dspark"
    updates: list[tuple[dict[str, Any], str | None]] = [
        ({"markov_rank": 8}, "markov_rank = 8: x has 7"),
        ({"markov_rank": 7, "confidence_weight": 1.0}, "confidence_weight = 1: x has no confidence head"),
        ({"markov_rank": 7, "draft_tokens": 4}, "draft_tokens = 4: x has blocks that draft 3"),
        ({"markov_rank": 7}, None),
    ]
    for update, message in updates:
        settings = DFlashSettings(**{"draft_tokens": K, "layers": 2, **update})
        assert DFlashFamily.incompatibility(settings, draft, "x") == message
    assert DFlashFamily.incompatibility(DFlashSettings(draft_tokens=K, markov_rank=7), family_of(target).draft, "x")
    with pytest.raises(ValueError, match="confidence_weight 1: needs markov_rank above 0"):
        DFlashSettings(confidence_weight=1.0)
    assert DFlashSettings().identity().keys() == DFlashSettings(markov_rank=7).identity().keys() - {"markov_rank"}


def test_a_target_that_scales_its_logits(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftforge.train.families.dflash.head_arithmetic", lambda config: (0.5, None))
    DFlashFamily.check(DFlashSettings(), lambda: target)
    with pytest.raises(InputError, match=r"draft\.markov_rank = 7: the target scales or caps its logits"):
        DFlashFamily.check(DFlashSettings(markov_rank=7), lambda: target)


def test_layers_out_of_order() -> None:
    for layers in ((2, 1), (0, 1), (1, 1)):
        with pytest.raises(ValueError, match="must be different layers in ascending order, from 1 on"):
            DFlashSettings(aux_layers=layers)
