"""Medusa-2: the target is trained too, becomes another model, and is written beside the draft."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafted import fit, fresh_family, greedy_accepted, save, talks
from trained import SEED, Trained, sentences

from draftforge.data.batches import collate
from draftforge.data.store import Capture
from draftforge.errors import InputError
from draftforge.specdec.formats import read_meta
from draftforge.specdec.kernels.merged_projections import share_products
from draftforge.specdec.target_settings import TargetSettings
from draftforge.specdec.targets import Target
from draftforge.train.families.medusa import MedusaFamily, check_trainable
from draftforge.train.losses.linear_head import LOSS
from draftforge.train.optimizers import make_optimizer, set_rate
from draftforge.train.settings import BackboneSettings, MedusaSettings


def settings_of(**update: Any) -> MedusaSettings:
    return MedusaSettings.model_validate({"draft_tokens": 3, "backbone": {"start_step": 0}, **update})


def family_of(target: Target, settings: MedusaSettings) -> MedusaFamily:
    return fresh_family(target, settings)  # type: ignore[return-value]


@torch.no_grad()
def stir(family: MedusaFamily) -> None:
    """Adapters that do something."""
    torch.manual_seed(1)
    for parameter in family.slow_parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))


def test_fresh_adapters_change_nothing_and_share_the_targets_weights(target: Target, tiny_capture: Capture) -> None:
    samples = tiny_capture.samples("train")[:3]
    trained, plain = family_of(target, settings_of()), family_of(target, settings_of(backbone=None))
    loss, sums = trained(trained.inputs(collate(samples), range(3)))
    _, plain_sums = plain(plain.inputs(collate(samples), range(3)))
    torch.testing.assert_close(sums[:-1], plain_sums, atol=1e-3, rtol=1e-4)
    assert float(sums[-1, LOSS]) == pytest.approx(0.0, abs=1e-3)
    assert float(loss.detach()) == pytest.approx(0.2 * sum(0.8**k * float(sums[k, LOSS]) for k in range(3)), rel=1e-3)
    assert trained._backbone is not None
    theirs = {x.data_ptr() for x in target.model.parameters()}
    held = {p.data_ptr() for name, p in trained._backbone._model.named_parameters() if ".lora_" not in name}
    assert held == theirs


def test_a_target_that_shares_products_is_held_once_too(load_tiny_target: Callable[[], Target]) -> None:
    target = load_tiny_target()
    share_products(target.model)
    backbone = family_of(target, settings_of())._backbone
    assert backbone is not None
    theirs = {id(vars(part)["shared"]) for part in target.model.modules() if "shared" in vars(part)}
    ours = {id(vars(part)["shared"]) for part in backbone._model.modules() if "shared" in vars(part)}
    assert ours == theirs and len(ours) == 2 * target.num_layers


def test_the_loss_is_divergence_from_the_old_target_and_the_heads_on_the_new(
    target: Target, tiny_capture: Capture, tmp_path: Path
) -> None:
    """Checked against the model that it writes, run as any other."""
    family = family_of(target, settings_of(backbone={"start_step": 0, "heads_weight": 0.5}))
    stir(family)
    sample = max(tiny_capture.samples("train"), key=lambda sample: len(sample.answer_ids))
    loss, sums = family(family.inputs(collate([sample]), [0]))
    new = written(family, target, tmp_path)
    ids, first = sample.prompt_ids + sample.answer_ids, len(sample.prompt_ids)
    with torch.no_grad():
        tokens = torch.tensor([ids])
        hidden_TH = new.states(tokens).hidden_BTH[0]
        old_TV = target.logits(target.states(tokens).hidden_BTH)[0].log_softmax(-1)
        new_TV = new.logits(hidden_TH).log_softmax(-1)
        heads = [family.draft.logits(hidden_TH, head).log_softmax(-1) for head in range(3)]

    def divergence(p_V: torch.Tensor, q_V: torch.Tensor) -> float:
        return float((p_V.exp() * (p_V - q_V)).sum())

    expected = [
        sum(divergence(old_TV[i + 1 + head], q_TV[i]) for i in range(first - 2, len(ids) - 2 - head))
        for head, q_TV in enumerate(heads)
    ]
    own = sum(divergence(old_TV[j], new_TV[j]) for j in range(first - 1, len(ids) - 1))
    assert own > 0.1
    assert sums[:, LOSS].tolist() == pytest.approx([*expected, own], rel=1e-3)
    total = own + 0.5 * sum(0.8**head * value for head, value in enumerate(expected))
    assert float(loss.detach()) == pytest.approx(total, rel=1e-3)


def test_the_heads_train_alone_until_the_start(target: Target, tiny_capture: Capture) -> None:
    family = family_of(target, settings_of(backbone={"start_step": 3}))
    stir(family)
    inputs = family.inputs(collate(tiny_capture.samples("train")[:2]), [0, 1])
    for family.step, moves in ((2, False), (3, True)):
        family.zero_grad()
        loss, sums = family(inputs)
        loss.backward()
        assert all(
            p.grad is not None and bool(p.grad.any()) == moves for p in family.slow_parameters()
        )  # there from the start on
        assert (float(sums[-1, LOSS]) > 0.01) == moves


def test_adapters_learn_at_their_share_of_the_rate(target: Target) -> None:
    for update in ({}, {"optimizer": "muon"}):
        settings = settings_of(backbone={"start_step": 0, "rate_share": 0.25}, **update)
        family = family_of(target, settings)
        optimizer = make_optimizer(family, settings)
        set_rate(optimizer, 1e-3)
        slow = {id(p) for p in family.slow_parameters()}
        rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
        assert set(rates) == {id(p) for p in family.trainable().values()}
        by_muon = settings.muon_rate if update else 1e-3
        assert all(rates[key] == pytest.approx(0.25 * by_muon) for key in slow)
        assert all(rates[id(linear.weight)] == pytest.approx(1e-3) for linear in family.draft.lm_heads)


def written(family: MedusaFamily, target: Target, folder: Path) -> Target:
    save(family, target, folder / "draft")
    found = read_meta(folder / "draft")
    new = Target.load(TargetSettings(model=str(folder / "draft" / "target"), device="cpu"))
    assert found.target_fingerprint == new.fingerprint != target.fingerprint
    assert found.extra == {"warm_start_step": 7, "original_target": target.fingerprint}
    assert new.tokenizer_digest == target.tokenizer_digest
    assert new.tokenizer.chat_template == target.tokenizer.chat_template
    return new


def test_a_quantised_target_is_refused(load_tiny_target: Callable[[], Target]) -> None:
    target = load_tiny_target()
    check_trainable(target)
    target.model.config.quantization_config = {"quant_method": "gguf"}
    with pytest.raises(InputError, match=r"draft\.backbone: the target is quantised"):
        check_trainable(target)


def test_recomputed_activations_give_the_same_gradients(target: Target, tiny_capture: Capture) -> None:
    batch, gradients = collate(tiny_capture.samples("train")[:2]), []
    for recompute in (False, True):
        family = family_of(target, settings_of(activation_checkpointing=recompute))
        stir(family)
        family(family.inputs(batch, [0, 1]))[0].backward()
        gradients.append([p.grad for p in family.slow_parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
def test_trained_heads_draft_for_the_trained_target(trained_drafts: Trained, tmp_path: Path) -> None:
    """Decoding with it is lossless for it; the old target stays as it was."""
    target = trained_drafts.target()
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    lines = sentences(72, SEED + 5).splitlines()
    prompts = [target.tokenizer(line).input_ids[:12] for line in lines[64:]]
    backbone = BackboneSettings(start_step=10)
    family = family_of(target, settings_of(backbone=backbone))
    losses = fit(family, talks(target, lines[:64]), steps=40)
    assert sum(losses[-5:]) < 0.3 * sum(losses[:5])
    new = written(family, target, tmp_path)
    assert greedy_accepted(family.draft, new, prompts, draft_tokens=3) > 40  # of 8 answers of 16 tokens
    for name, tensor in target.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
