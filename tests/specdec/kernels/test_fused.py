"""Fused modules: taken where they give what the module gives, and left alone elsewhere.

Liger's kernels need a GPU; here a stand-in computes what they document. Ours run in Triton's interpreter.
"""

import copy
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from families import SUPPORTED, tiny
from proposing import taught
from stand_ins import near_copy, prompts, target
from torch import Tensor, nn

pytest.importorskip("triton")

from triton import OutOfResources

from draftforge.specdec import kv_cache
from draftforge.specdec.decoder import generate
from draftforge.specdec.drafts.layer_skip import SkippedDraft, SkippedLayers
from draftforge.specdec.kernels import fused, pointwise, row_products
from draftforge.specdec.kernels.fused import _Rotary, fuse
from draftforge.specdec.kernels.row_products import Blocks
from draftforge.specdec.kv_cache import KVCache
from draftforge.specdec.models import CausalModel
from draftforge.specdec.proposers.factory import make_proposer
from draftforge.specdec.requests import Request
from draftforge.specdec.sampling_settings import SamplingSettings

TRIED = fused._TRIED
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


class Norm:
    calls = 0

    @classmethod
    def apply(cls, x: Tensor, weight: Tensor, eps: float, offset: float, casting: str, in_place: bool) -> Tensor:
        cls.calls += 1
        normed = x.float() * (x.float().pow(2).mean(-1, keepdim=True) + eps).rsqrt()
        return (normed * (weight.float() + offset)).to(x.dtype)


class Product:
    @staticmethod
    def apply(gate: Tensor, up: Tensor) -> Tensor:
        return torch.nn.functional.silu(gate) * up


class Rope:
    calls = 0

    @classmethod
    def rotate(cls, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        cls.calls += 1
        pointwise.rotate(q, k, cos, sin)


@pytest.fixture(autouse=True)
def liger(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    ops: Any = ModuleType("liger_kernel.ops")
    ops.LigerRMSNormFunction, ops.LigerSiLUMulFunction = Norm, Product
    counted: Any = ModuleType("pointwise")
    counted.rotate, counted.gated_silu = Rope.rotate, pointwise.gated_silu
    counted.add_norm, counted.angles = pointwise.add_norm, pointwise.angles
    monkeypatch.setitem(sys.modules, "draftforge.specdec.kernels.pointwise", counted)
    blocks = lambda rows, width, kind: Blocks(1 if rows <= 8 else 16, 64, 64, 4)  # noqa: E731
    monkeypatch.setattr(row_products, "_blocks", blocks)  # fewer programs for the interpreter
    monkeypatch.setattr(fused, "_TRIED", (2,))
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", ops)
    Norm.calls = Rope.calls = 0
    yield
    # Later models of these families, too, would be rotated by the interpreter.
    for name, place in list(sys.modules.items()):
        if name.startswith("transformers.models.") and isinstance(rotary := vars(place).get(fused._ROTARY), _Rotary):
            setattr(place, fused._ROTARY, rotary._theirs)


def logits(model: CausalModel) -> Tensor:
    with torch.no_grad():
        return model.logits(model.states(IDS).hidden_BTH)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_a_fused_model_says_what_it_said(family: str) -> None:
    model = CausalModel(tiny(*SUPPORTED[family]))
    before = logits(model)
    names = fuse(model.model)
    assert any("RMSNorm" in name for name in names) and any("rotary" in name for name in names)
    assert f"{2 * model.num_layers} shared products" in names
    after = logits(model)
    assert Norm.calls > 2 * model.num_layers and Rope.calls > model.num_layers
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_layers_add_in_their_norms_and_products(dtype: torch.dtype) -> None:
    """States of the layers before are left as they are: drafts read them."""
    model = CausalModel(tiny(*SUPPORTED["llama"]).to(dtype))
    with torch.no_grad():
        before = model.states(IDS, aux_layers=(1, model.num_layers))
        names = fuse(model.model)
        after = model.states(IDS, aux_layers=(1, model.num_layers))
    assert "LlamaDecoderLayer" in names and "LlamaRotaryEmbedding" in names
    for found, expected in zip(after, before):
        assert found is not None and expected is not None
        assert float((found - expected).norm()) <= (1e-5 if dtype == torch.float32 else 2e-2) * float(expected.norm())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "decoded"),
    [("llama", True), ("mistral", True), ("qwen2", False), ("qwen3", False)],
)
def test_few_rows_are_decoded_by_few_kernels(family: str, decoded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chains and trees, with what the layer tells its attention; other parts than the kernels take stay."""
    name, options = SUPPORTED[family]
    model = CausalModel(tiny(name, {**options, "num_hidden_layers": 2}).requires_grad_(False))
    monkeypatch.setattr(kv_cache, "reads_lengths", lambda device: True)

    def passes() -> list[Tensor]:
        cache = KVCache(2, 24, torch.device("cpu"))
        with torch.no_grad():
            model.states(IDS[:, :7].expand(2, -1), cache.prefill(torch.arange(2), torch.tensor([7, 4])))
            chain = model.states(IDS[:, :3].expand(2, -1), cache.extend(2, 3), aux_layers=(2,))
            cache.keep(torch.tensor([3, 1]))
            tree = cache.branch(
                torch.tensor([[0, 1, 1]] * 2), torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]] * 2).bool()
            )
            assert chain.aux_BTA is not None
            return [chain.hidden_BTH, chain.aux_BTA, model.states(IDS[:, 2:5].expand(2, -1), tree).hidden_BTH]

    before = passes()
    with monkeypatch.context() as patch:
        if family == "llama":
            patch.setattr(fused, "_TRIED", TRIED)
        names = fuse(model.model)
    assert any("few rows" in name for name in names) == decoded
    adding = Mock(wraps=row_products.add_product)
    monkeypatch.setattr(row_products, "add_product", adding)
    torch.testing.assert_close(passes(), before, rtol=1e-4, atol=1e-4)
    assert adding.call_count == (2 * 2 * model.num_layers if decoded else 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["turned_product", "gated_product", "add_product"])
def test_layers_on_which_a_kernel_errs_stay(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even on the second of some rows alone; ours and those of transformers."""

    def wrong(*given: Any) -> Tensor:
        found: Tensor = product(*given)
        found[:, 1] *= 3
        return found

    product = getattr(row_products, name)
    monkeypatch.setattr(row_products, name, wrong)
    family, options = SUPPORTED["llama"]
    model = CausalModel(tiny(family, {**options, "num_hidden_layers": 1}))
    for one in (model.model, copy.deepcopy(taught("eagle3")).requires_grad_(False)):
        names = fuse(one)
        assert any("Layer" in name or "layer" in name for name in names)
        assert not any("few rows" in name for name in names)


def test_layers_stay_where_a_kernel_cannot_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as on a GPU with less shared memory; a line says so."""
    error = OutOfResources(300000, 100000, "shared memory")
    monkeypatch.setattr(row_products, "gated_product", Mock(side_effect=error))
    family, options = SUPPORTED["llama"]
    model = CausalModel(tiny(family, {**options, "num_hidden_layers": 1}))
    assert not any("few rows" in name for name in fuse(model.model))
    assert "LlamaDecoderLayer: its own modules decode few rows: out of resource: " in capsys.readouterr().err


def test_layers_that_compute_something_else_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(*SUPPORTED["llama"])
    forward = type(model.get_decoder().layers[0]).forward
    monkeypatch.setattr(
        type(model.get_decoder().layers[0]), "forward", lambda *args, **named: 2 * forward(*args, **named)
    )
    assert "LlamaDecoderLayer" not in fuse(model)


def test_a_layer_of_a_fused_target_may_lack_parts() -> None:
    """And what is left runs as before: a fused forward belongs to one module."""
    model = CausalModel(tiny(*SUPPORTED["llama"]).requires_grad_(False))
    skipped = SkippedLayers(mlp=(0,), attention=(1,))
    before = logits(SkippedDraft(model, skipped).lm)
    assert "LlamaDecoderLayer" in fuse(model.model)
    torch.testing.assert_close(logits(SkippedDraft(model, skipped).lm), before, rtol=1e-4, atol=1e-4)


def test_gated_products_of_another_activation_stay() -> None:
    assert not any("MLP" in name for name in fuse(tiny(*SUPPORTED["gemma3"])))  # tanh-GELU
    assert any("MLP" in name for name in fuse(tiny(*SUPPORTED["llama"])))


def test_another_activation_is_seen_behind_a_layer_of_zeros_and_on_large_numbers() -> None:
    family, options = SUPPORTED["gemma3"]
    silent, loud = tiny(family, options), tiny(family, {**options, "initializer_range": 1.0})
    nn.init.zeros_(silent.get_decoder().layers[0].mlp.down_proj.weight)
    for model in (silent, loud):
        assert not any("MLP" in name for name in fuse(model))


def test_a_gated_product_is_tried_at_several_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    product = pointwise.gated_silu
    clipped = lambda gate, up: product(gate, up).clamp(-20, 20)  # noqa: E731
    monkeypatch.setattr(sys.modules["draftforge.specdec.kernels.pointwise"], "gated_silu", clipped)
    model = tiny(*SUPPORTED["llama"])
    mlp = model.get_decoder().layers[0].mlp
    row = torch.linspace(-3, 3, model.config.hidden_size)[None]
    with torch.no_grad():
        mlp.up_proj.weight.mul_(10 / mlp.up_proj(row).abs().max() / mlp.act_fn(mlp.gate_proj(row)).abs().max())
        mlp.gate_proj.weight.abs_()
    assert not any("MLP" in name for name in fuse(model))


def test_kernels_are_tried_where_the_model_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on torch's current device."""
    entered: list[torch.device] = []

    def current(device: torch.device) -> AbstractContextManager[None]:
        entered.append(device)
        return nullcontext()

    monkeypatch.setattr(fused, "current", current)
    fuse(tiny(*SUPPORTED["llama"]))
    assert entered == [torch.device("cpu")]


def test_a_copy_runs_on_its_own_weights() -> None:
    model = tiny(*SUPPORTED["llama"])
    fuse(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_decoder().norm.weight.zero_()
        assert float(other.get_decoder().norm(torch.ones(1, other.config.hidden_size)).abs().max()) == 0
        assert float(model.get_decoder().norm(torch.ones(1, model.config.hidden_size)).abs().max()) > 0


def test_what_disagrees_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Norm, "apply", lambda x, *rest: x * 1.1)
    monkeypatch.setattr(sys.modules["draftforge.specdec.kernels.pointwise"], "rotate", lambda q, k, cos, sin: None)
    names = fuse(tiny(*SUPPORTED["llama"]))
    assert not any("Norm" in name or "rotary" in name for name in names)


def test_learned_queries_keep_their_own_rotation() -> None:
    model = tiny(*SUPPORTED["llama"])
    fuse(model)
    Rope.calls = 0
    model(input_ids=IDS).logits.sum().backward()
    assert Rope.calls == 0
    assert model.get_decoder().layers[0].self_attn.q_proj.weight.grad is not None


def test_an_adapter_still_learns_through_a_gated_product() -> None:
    model = tiny(*SUPPORTED["llama"]).requires_grad_(False)
    fuse(model)
    embeds = model.get_input_embeddings()(IDS).requires_grad_()
    model(inputs_embeds=embeds).logits.sum().backward()
    assert embeds.grad is not None and float(embeds.grad.abs().max()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["small", "eagle", "eagle3", "dflash"])
def test_a_fused_draft_drafts_what_it_drafted(name: str) -> None:
    model = target()
    draft: Any = near_copy(model) if name == "small" else copy.deepcopy(taught(name))
    requests = [Request(ids, SamplingSettings(), 0, 7) for ids in prompts(2)]

    def rounds() -> list[Any]:
        found = dict(generate(model, make_proposer(draft, model), requests, rule="greedy", draft_tokens=3))
        return [(answer.tokens, answer.rounds) for _, answer in sorted(found.items())]

    before = rounds()
    assert fuse(draft.requires_grad_(False))
    assert rounds() == before


def test_medusa_blocks_are_products_and_sums_alone() -> None:
    assert not fuse(copy.deepcopy(taught("medusa")))
