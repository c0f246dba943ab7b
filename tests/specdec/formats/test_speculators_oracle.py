"""The `speculators` package reads what we write, and drafts the tokens that we draft. `make test-vllm` runs this."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import heads
import pytest
import torch
from safetensors.torch import load_file, save_file
from stand_ins import first_positions
from transformers import LlamaConfig, LlamaForCausalLM

from draftforge.specdec.drafts.dflash import DFlashDraft
from draftforge.specdec.drafts.eagle3 import Eagle3Draft
from draftforge.specdec.drafts.peagle import PEagleDraft
from draftforge.specdec.formats import Verifier, read_draft, write_draft
from draftforge.specdec.kernels.document_mask import Documents, QueryMask

speculators = pytest.importorskip("speculators", reason="an oracle, not a dependency: make test-vllm has it")
TOKENS, STEPS = 12, 3
BEFORE_FC: list[dict[str, bool]] = [{}, {"fc_norm": True}, {"norm_before_fc": True}]
FLAGS: list[dict[str, Any]] = [
    {**before, "norm_output": output, "norm_before_residual": residual}
    for before in BEFORE_FC
    for output in (False, True)
    for residual in (False, True)
]
STOCK = {"norm_before_fc": True, "norm_output": True, "norm_before_residual": True}
BODIES: list[dict[str, Any]] = [
    {"body": "qwen3"},
    {"body": "qwen3", "num_hidden_layers": 2, **STOCK},
    {"num_hidden_layers": 3, "fc_norm": True, "norm_output": True},
    {"attention_bias": True},
    {"aux_layers": (1, 3)},
    {"sliding_window": 4, **STOCK},  # but for the window's length, what its training command writes by default
    {"sliding_window": 4, "full_attention_layers": (0,), "num_hidden_layers": 2},
]


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of the heads' sizes; the package takes its embeddings where the head has none."""
    folder = tmp_path_factory.mktemp("target")
    layer = {name: value for name, value in heads.LAYER.items() if name != "rope_theta"}
    torch.manual_seed(7)
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, initializer_range=0.5, **layer)).save_pretrained(folder)
    return folder


def named(flags: dict[str, Any]) -> str:
    return "+".join(name if value is True else f"{name}={value}" for name, value in flags.items() if value) or "plain"


@pytest.mark.parametrize("flags", [*FLAGS, *BODIES], ids=named)
@pytest.mark.parametrize("draft_vocab", [61, 40])
@torch.no_grad()
def test_it_loads_our_folder_and_drafts_the_same_tokens(
    target_folder: Path, tmp_path: Path, draft_vocab: int, flags: dict[str, Any]
) -> None:
    ours = heads.eagle3(draft_vocab, **flags)
    write_draft(ours, tmp_path, "speculators", 4, Verifier(str(target_folder), ["LlamaForCausalLM"]))
    config: Any = speculators.SpeculatorModelConfig.from_pretrained(str(tmp_path))
    assert config.speculators_config.proposal_methods[0].speculative_tokens == 4
    assert config.transformer_layer_config.rope_parameters["rope_theta"] == 10000.0
    config.transformer_layer_config._attn_implementation = "eager"
    theirs: Any = speculators.SpeculatorModel.from_pretrained(str(tmp_path), config=config)
    assert type(theirs).__name__ == "Eagle3DraftModel"
    stored, loaded = load_file(tmp_path / "model.safetensors"), theirs.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in stored.items())
    of_the_target = {"embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight"}
    assert loaded.keys() - stored.keys() == of_the_target

    ids = torch.randint(61, (1, TOKENS + 1), generator=torch.Generator().manual_seed(3))
    aux = torch.randn(1, TOKENS + 1, 24 * len(ours.config.aux_layers), generator=torch.Generator().manual_seed(4))
    document = torch.zeros(1, TOKENS, dtype=torch.long)
    drafted = theirs(hidden_states=aux[:, :TOKENS], input_ids=ids[:, 1:], document_ids=document, ttt_steps=STEPS)
    states = ours(theirs.embed_tokens(ids), aux, first_positions(ids, TOKENS), STEPS)
    for k, (tokens, state) in enumerate(zip(drafted, states, strict=True)):
        inside = TOKENS - k  # later positions read past the end of the text
        if k and "sliding_window" in flags:  # engines and we count a window from the position that is drafted from, the
            inside = 4 - k  # package from the pair that the drafts began with: it sees up to k more keys
        assert torch.equal(ours.logits(state).argmax(-1)[:, :inside], tokens[:, :inside])


@pytest.mark.parametrize(
    "flags", [{}, STOCK, {"body": "qwen3", "num_hidden_layers": 2, "sliding_window": 4}], ids=named
)
@torch.no_grad()
def test_we_read_its_parallel_heads_and_compute_the_same(
    target_folder: Path, tmp_path: Path, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = heads.eagle3(40, own_embeddings=True, **flags)
    write_draft(draft, tmp_path, "speculators", 4, Verifier(str(target_folder), ["LlamaForCausalLM"]))
    path, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    entries = {"speculators_model_type": "peagle", "architectures": ["PEagleDraftModel"], "mask_token_id": 5}
    config = json.loads(path.read_text()) | entries
    config["speculators_config"]["algorithm"] = "peagle"
    path.write_text(json.dumps(config))
    save_file({**load_file(weights), "mask_hidden": torch.randn(1, 1, 72)}, weights)
    ours = read_draft(tmp_path)
    assert isinstance(ours, PEagleDraft) and ours.embed_tokens is not None

    read: Any = speculators.SpeculatorModelConfig.from_pretrained(str(tmp_path))
    read.transformer_layer_config._attn_implementation = "eager"
    theirs: Any = speculators.SpeculatorModel.from_pretrained(str(tmp_path), config=read)
    seen: dict[str, Any] = {}
    torch.manual_seed(0)
    core = importlib.import_module("speculators.models.peagle.core")
    monkeypatch.setattr(core, "compute_metrics", lambda **given: (seen.update(given), None))
    ids = torch.randint(61, (1, TOKENS + 1), generator=torch.Generator().manual_seed(3))
    aux = torch.randn(1, TOKENS + 1, 72, generator=torch.Generator().manual_seed(4))
    document, last = torch.zeros(1, TOKENS, dtype=torch.long), torch.zeros(1, TOKENS, 24)
    theirs(aux[:, :TOKENS], ids[:, 1:], document, verifier_last_hidden_states=last, num_depths=STEPS)
    mask_H = ours.embed_tokens(torch.tensor(5))
    states = ours.parallel(ours.embed_tokens(ids), aux, first_positions(ids, TOKENS), STEPS, mask_H)
    logits = torch.stack([ours.logits(state[0]) for state in states])
    depth, anchor = seen["depth"], seen["anchor_pos"]
    real = anchor >= 0  # it samples masks before the first pair too
    torch.testing.assert_close(logits[depth, anchor][real], seen["logits"][0, real], rtol=1e-4, atol=1e-4)
    assert set(depth[real].tolist()) == set(range(STEPS))


@pytest.mark.parametrize("flags", [{}, STOCK, *BODIES], ids=named)
def test_we_read_what_it_writes(target_folder: Path, tmp_path: Path, flags: dict[str, Any]) -> None:
    draft = heads.eagle3(40, **flags)
    write_draft(draft, tmp_path / ".", "speculators", 4, Verifier(str(target_folder), ["LlamaForCausalLM"]))
    model: Any = speculators.SpeculatorModel.from_pretrained(str(tmp_path))
    model.save_pretrained(tmp_path / "theirs")
    again = read_draft(tmp_path / "theirs")
    ours = draft.state_dict()
    assert isinstance(again, Eagle3Draft) and again.config == draft.config
    assert {name for name in again.state_dict() if name not in ours} == {"embed_tokens.weight"}
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in ours.items())


@pytest.mark.parametrize("two_way", [False, True])
@torch.no_grad()
def test_we_compute_its_dflash_layers_with_windows(target_folder: Path, tmp_path: Path, two_way: bool) -> None:
    """Causal in the block or not. The package counts a window from the anchor, engines and we from each token: it is
    longer than the text here."""
    write_draft(heads.dflash(40), tmp_path, "speculators", 5, Verifier(str(target_folder), ["LlamaForCausalLM"]))
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {"sliding_window_non_causal": two_way}
    slides = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64, "use_sliding_window": True}
    config["transformer_layer_config"] |= slides
    path.write_text(json.dumps(config))
    ours = read_draft(tmp_path)
    assert isinstance(ours, DFlashDraft) and ours.config.causal == ("none" if two_way else "sliding")
    check_blocks(ours, tmp_path)


@pytest.mark.parametrize("draft_vocab", [61, 40])
@pytest.mark.parametrize("make", [heads.dflash, heads.dspark])
@torch.no_grad()
def test_it_loads_our_folder_of_blocks_and_computes_the_same_ones(
    target_folder: Path, tmp_path: Path, make: Callable[[int], DFlashDraft], draft_vocab: int
) -> None:
    ours = make(draft_vocab)
    write_draft(ours, tmp_path, "speculators", 5, Verifier(str(target_folder), ["LlamaForCausalLM"]))
    check_blocks(ours, tmp_path)


def check_blocks(ours: DFlashDraft, folder: Path) -> None:
    """That the package loads the folder, and computes the logits of our module's blocks."""
    config: Any = speculators.SpeculatorModelConfig.from_pretrained(str(folder))
    assert config.speculators_config.proposal_methods[0].speculative_tokens == 5
    config.transformer_layer_config._attn_implementation = "eager"
    theirs: Any = speculators.SpeculatorModel.from_pretrained(str(folder), config=config)
    assert type(theirs).__name__ == ("DFlashDraftModel" if ours.markov_head is None else "DSparkDraftModel")
    stored, loaded = load_file(folder / "model.safetensors"), theirs.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in stored.items())

    tokens, blocks, width = 30, 7, ours.config.block_size
    ids = torch.randint(61, (1, tokens), generator=torch.Generator().manual_seed(3))
    aux = torch.randn(1, tokens, 72, generator=torch.Generator().manual_seed(4))
    mask, document = torch.ones(1, tokens), torch.zeros(1, tokens, dtype=torch.long)
    last = torch.zeros(1, tokens, 24)  # of the target: what it teaches is not looked at
    hidden, logits, _, _, places = theirs._backbone_forward(aux, ids, mask, last, document, max_anchors=blocks)
    anchors = places.view(blocks, width)[:, 0]
    block_ids = torch.full((1, blocks, width), 60)
    block_ids[0, :, 0] = ids[0, anchors]
    states = ours(theirs.embed_tokens(block_ids), aux, QueryMask(Documents.rows(ids), anchors[None]))
    torch.testing.assert_close(theirs.lm_head(states).flatten(1, 2), logits, rtol=1e-4, atol=1e-4)
    if ours.markov_head is None or ours.confidence_head is None:
        return
    before_ids = ids[0, places].view(blocks, width)
    embedded = theirs.markov_head.prev_embeddings(before_ids)
    bias = theirs.markov_head.block_bias(prev_token_ids=before_ids, hidden_states=hidden[0].view(blocks, width, -1))
    torch.testing.assert_close(ours.markov_head.bias(ours.markov_head.embed(before_ids)), bias)
    sure = theirs.confidence_head(torch.cat([hidden[0].view(blocks, width, -1), embedded], -1))
    torch.testing.assert_close(ours.confidence_head(torch.cat([states[0], embedded], -1)), sure, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", [heads.dflash, heads.dspark])
def test_we_read_the_block_drafts_that_it_writes(
    target_folder: Path, tmp_path: Path, make: Callable[[int], DFlashDraft]
) -> None:
    write_draft(make(40), tmp_path / ".", "speculators", 5, Verifier(str(target_folder), ["LlamaForCausalLM"]))
    model: Any = speculators.SpeculatorModel.from_pretrained(str(tmp_path))
    model.save_pretrained(tmp_path / "theirs")
    again, ours = read_draft(tmp_path / "theirs").state_dict(), make(40).state_dict()
    assert again.keys() == ours.keys() and all(torch.equal(again[name], tensor) for name, tensor in ours.items())
