"""EAGLE heads that leave in a folder draft in an engine what they draft here: embeddings and rotations are the same."""

from pathlib import Path
from typing import Any

import heads
import pytest
import torch
from engine import EngineHead
from families import SUPPORTED, tiny
from stand_ins import LAYER
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from draftforge.specdec.drafts.eagle import EagleDraft
from draftforge.specdec.drafts.eagle3 import Eagle3Draft
from draftforge.specdec.drafts.layers import Rope, frequencies
from draftforge.specdec.formats import read_draft, write_draft
from draftforge.specdec.formats.llama import rope_parameters
from draftforge.specdec.models import CausalModel
from draftforge.specdec.proposers.base import Texts
from draftforge.specdec.proposers.factory import make_drafter

PROMPT = 30
AHEAD = [5, 44, 17]  # drafted tokens that are read
FOR_TARGETS = {**LAYER, "hidden_size": 48}


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    """In float32; the un-normed states of EAGLE-1, and so its logits, reach the hundreds."""
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def assert_apart(ours: Tensor, theirs: Tensor) -> None:
    assert (ours - theirs).abs().max() > 1e-2 * theirs.abs().max()


def head_for(model: CausalModel, family: str, **fields: Any) -> EagleDraft | Eagle3Draft:
    fields = {**FOR_TARGETS, "vocab_size": model.vocab_size, **fields}
    return heads.eagle(**fields) if family == "eagle" else heads.eagle3(target_hidden_size=48, **fields)


def here(draft: Any, model: CausalModel, ids: list[int]) -> Tensor:
    """Logits [4, V] of what our decoder drafts after a text and each drafted token."""
    drafter = make_drafter(draft, model)
    states = model.states(torch.tensor([ids[:-1]]), aux_layers=drafter.aux_layers)
    drafter.reserve(1, len(ids) + 1, len(AHEAD), len(AHEAD) + 1)
    drafter.begin(torch.tensor([0]), Texts.of([ids]), states)
    rows = [drafter.open(1, chain=True)[0]]
    for depth, token in enumerate(AHEAD):
        rows.append(drafter.expand(torch.tensor([[token]]), torch.tensor([[depth - 1]]), depth)[0, 0])
    return torch.stack(rows)


def in_engine(folder: Path, model: CausalModel, ids: list[int], scale: float = 1.0) -> Tensor:
    """The same of an engine that reads the folder and lends the target's table."""
    head = EngineHead(folder, scale * model.model.get_input_embeddings().weight)
    states = model.states(torch.tensor([ids[:-1]]), aux_layers=(1, 2, 4))
    assert states.aux_BTA is not None
    features_TH = head.fuse(states.aux_BTA[0] if head.third else states.hidden_BTH[0])
    rows = []
    for ahead in range(len(AHEAD) + 1):
        state_TH = head.states(torch.tensor([*ids[1:], *AHEAD[:ahead]]), features_TH)
        features_TH = torch.cat([features_TH, state_TH[-1:]])
        rows.append(head.logits(state_TH[-1]) if head.third else model.logits(state_TH[-1]))
    return torch.stack(rows)


@pytest.mark.parametrize("layout", ["vllm", "sglang"])
@pytest.mark.parametrize("family", ["eagle", "eagle3"])
@pytest.mark.parametrize("name", ["gemma2", "gemma3", "granite", "llama"])
@torch.inference_mode()
def test_heads_of_targets_that_scale_embeddings(name: str, family: str, layout: Any, tmp_path: Path) -> None:
    """The engine's table is bare; a head that was made for scaled embeddings would draft something else there."""
    kind, options = SUPPORTED[name]  # without Gemma 2's soft-cap, which flattens what is compared
    model = CausalModel(tiny(kind, {**options, "final_logit_softcapping": None}))
    ids = torch.randint(0, 61, (PROMPT,), generator=torch.Generator().manual_seed(3)).tolist()
    draft = head_for(model, family, rms_norm_eps=1e-2)  # large, so that a norm does not hide a scale
    write_draft(draft, tmp_path, layout)
    assert torch.equal(here(read_draft(tmp_path), model, ids), here(draft, model, ids))
    engine = in_engine(tmp_path, model, ids)
    assert_close(here(draft, model, ids), engine)
    assert_apart(in_engine(tmp_path, model, ids, scale=48**0.5), engine)


@pytest.mark.parametrize("family", ["eagle", "eagle3"])
@torch.inference_mode()
def test_embeddings_of_the_heads_own_are_read_as_they_are(family: str, tmp_path: Path) -> None:
    model = CausalModel(tiny(*SUPPORTED["gemma3"]))
    ids = torch.randint(0, 61, (PROMPT,), generator=torch.Generator().manual_seed(3)).tolist()
    draft = head_for(model, family, own_embeddings=True)
    write_draft(draft, tmp_path, "vllm")
    assert_close(here(read_draft(tmp_path), model, ids), in_engine(tmp_path, model, ids))


@pytest.mark.parametrize("kind", heads.SCALINGS)
@pytest.mark.parametrize("family", ["eagle", "eagle3"])
@torch.inference_mode()
def test_heads_with_scaled_rotations(family: str, kind: str, tmp_path: Path) -> None:
    """The engine learns of the scaling from config.json alone."""
    model = CausalModel(tiny(*SUPPORTED["llama"]))
    ids = torch.randint(0, 61, (PROMPT,), generator=torch.Generator().manual_seed(3)).tolist()
    draft, plain = head_for(model, family, rope_scaling=heads.SCALINGS[kind]), head_for(model, family)
    write_draft(draft, tmp_path, "vllm")
    ours = here(read_draft(tmp_path), model, ids)
    assert_close(ours, in_engine(tmp_path, model, ids))
    assert_apart(here(plain, model, ids), ours)


@pytest.mark.parametrize("kind", [None, *heads.SCALINGS])
def test_rotations_are_those_of_transformers(kind: str | None) -> None:
    config = heads.eagle(rope_scaling=None if kind is None else heads.SCALINGS[kind], rope_theta=5e5).config
    rotary = LlamaRotaryEmbedding(
        LlamaConfig(head_dim=8, max_position_embeddings=256, rope_parameters=rope_parameters(config))
    )
    positions = torch.tensor([[0, 1, 2, 63, 64, 65, 200, 255]])
    x_BHND = torch.randn(1, 2, 8, 8)
    expected, _ = apply_rotary_pos_emb(x_BHND, x_BHND, *rotary(x_BHND, positions))
    rope = Rope(config.rope_theta, 8, config.rope_scaling)
    turned = rope(x_BHND, rope.waves(positions, torch.float32))
    torch.testing.assert_close(turned, expected, atol=2e-5, rtol=2e-5)
    half = rope(x_BHND.bfloat16(), rope.waves(positions, torch.bfloat16))
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("original", [6, 16, 8192, 1_000_000])
@pytest.mark.parametrize(("theta", "factor"), [(100.0, 2.5), (1e4, 1.0), (5e5, 40.0)])
@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_frequencies_at_other_sizes(kind: str, theta: float, factor: float, original: int) -> None:
    """Llama's heads of 128, and ramps that start and end anywhere, also outside of the pairs."""
    scaling = {**heads.SCALINGS[kind], "factor": factor}
    if kind != "linear":
        scaling["original_max_position_embeddings"] = original
    if kind == "yarn":
        scaling["beta_slow"] = 1.0
    config = heads.eagle(rope_scaling=scaling, rope_theta=theta, head_dim=128).config
    rotary = LlamaRotaryEmbedding(LlamaConfig(head_dim=128, rope_parameters=rope_parameters(config)))
    assert config.rope_scaling is not None
    ours = frequencies(theta, 128, config.rope_scaling)
    torch.testing.assert_close(ours, rotary.inv_freq, atol=0, rtol=2e-6)
    assert config.rope_scaling.stretch == pytest.approx(rotary.attention_scaling)
