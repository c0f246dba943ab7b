"""GGUF as a draft format: written, found, read back and refused like the folders of other engines."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import heads
import numpy as np
import pytest
import torch
from byte_level import byte_level_tokenizer
from stand_ins import llama
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftforge.errors import FormatError, InputError, MissingFileError
from draftforge.specdec.drafts import DraftModule
from draftforge.specdec.drafts.dflash import DFlashDraft
from draftforge.specdec.drafts.eagle3 import Eagle3Draft
from draftforge.specdec.drafts.small import SmallDraft
from draftforge.specdec.formats import (
    DraftMeta,
    convert_draft,
    detect,
    load_draft,
    read_draft,
    read_meta,
    save_draft,
    write_draft,
)
from draftforge.specdec.formats.gguf.file import GgufFile, read_gguf, write_gguf
from draftforge.specdec.formats.gguf.llama import read_llama, write_llama

VOCAB = 280
CPU = torch.device("cpu")
DRAFTS: dict[str, Callable[[], DraftModule]] = {
    "small": lambda: SmallDraft(llama(layers=2, vocab=VOCAB)),
    "eagle3": lambda: head(),
    "dflash": lambda: block(),
    "dspark": lambda: block(**heads.DSPARK),
    "dspark-filled-in": lambda: block(**heads.DSPARK | {"sample_from_anchor": False, "confidence_head": False}),
}


def head(**fields: Any) -> Eagle3Draft:
    """A reduced vocabulary of 40."""
    draft = heads.eagle3(40, vocab_size=VOCAB, intermediate_size=64, **fields)
    with torch.no_grad():
        for index, norm in enumerate([draft.norm, draft.midlayer.input_layernorm, draft.midlayer.hidden_norm]):
            norm.weight.mul_(index + 2)
    return draft


def block(draft_vocab: int = 40, **fields: Any) -> DFlashDraft:
    """A reduced vocabulary of 40."""
    fields = {"vocab_size": VOCAB, "intermediate_size": 64, "mask_token_id": 279, **fields}
    return heads.dflash(draft_vocab, **fields)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_level_tokenizer(["the order of the day: the lamp and the other lamp were sold for coins"] * 2, VOCAB)


@pytest.fixture(params=DRAFTS)
def draft(request: pytest.FixtureRequest) -> DraftModule:
    return DRAFTS[request.param]()


@pytest.fixture
def written(draft: DraftModule, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
    """The file of a folder that holds nothing else."""
    write_draft(draft, tmp_path, "gguf", tokenizer=tokenizer)
    return tmp_path / "draft.gguf"


def same(one: DraftModule, other: DraftModule) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def rewrite(path: Path, change: Callable[[GgufFile], Any]) -> None:
    content = read_gguf(path)
    change(content)
    write_gguf(path, content)


def test_a_folder_and_its_file_are_the_same_draft(draft: DraftModule, written: Path) -> None:
    assert list(written.parent.iterdir()) == [written]
    for place in (written, written.parent):
        again = read_draft(place)
        assert detect(place) == "gguf" and type(again) is type(draft) and same(again, draft)
    if isinstance(draft, Eagle3Draft | DFlashDraft):
        assert again.config == draft.config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_draft_is_written_again_as_gguf_and_loses_nothing(
    draft: DraftModule, tokenizer: PreTrainedTokenizerFast, dtype: torch.dtype, tmp_path: Path
) -> None:
    meta = DraftMeta(
        family=draft.family,  # type: ignore[arg-type]
        target_fingerprint="f" * 64,
        tokenizer_digest="d" * 64,
        step=3,
        draft_tokens=4,
        draftforge_version="0",
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    save_draft(draft.to(dtype), tmp_path / "draft", meta, tmp_path / "tokenizer" if draft.family == "small" else None)
    out = tmp_path / "out"
    out.mkdir()
    convert_draft(tmp_path / "draft", out, "gguf", tokenizer=tokenizer)
    assert sorted(path.name for path in out.iterdir()) == ["draft.gguf", "draftforge.json"]
    for place in (out, out / "draft.gguf"):
        again, found = load_draft(place, CPU, dtype)
        assert found == read_meta(place) == meta and same(again, draft)
    (out / "draftforge.json").unlink()
    with pytest.raises(MissingFileError, match=r"out/draftforge\.json: no such file"):
        load_draft(out / "draft.gguf", CPU, dtype)
    assert read_draft(out).family == draft.family  # a stranger's file brings no lineage


@pytest.mark.slow
def test_every_missing_misshapen_and_damaged_tensor_is_named(draft: DraftModule, written: Path) -> None:
    content = read_gguf(written)
    for name, tensor in content.tensors.items():
        others = {other: kept for other, kept in content.tensors.items() if other != name}
        spoilt = {"is missing": others, "has shape": others | {name: torch.cat([tensor, tensor])}}
        if tensor.is_floating_point():
            spoilt |= {"is int64, must be": others | {name: tensor.long()}}
        for message, tensors in spoilt.items():
            if (name, message) in {("output.weight", "is missing"), ("d2t", "is missing"), ("d2t", "has shape")}:
                continue  # tied embeddings, and the size of the draft's vocabulary, are read off these
            write_gguf(written, content._replace(tensors=tensors))
            with pytest.raises(FormatError, match=message) as refused:
                read_draft(written)
            assert f"{written}: tensor {name} {message}" in str(refused.value)


def test_values_that_are_not_finite_are_named(
    draft: DraftModule, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftforge.specdec.formats.gguf.file._compare", lambda *args: None)  # nan is not equal to nan
    rewrite(written, lambda content: content.tensors["output_norm.weight"].fill_(float("nan")))
    with pytest.raises(FormatError, match=r"tensor output_norm\.weight has values that are not finite"):
        read_draft(written)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda fields, arch: fields.pop(f"{arch}.embedding_length"), r"key \w+\.embedding_length is missing"),
        (lambda fields, arch: fields.update({f"{arch}.rope.dimension_count": 4}), "rope.dimension_count 4: must be 8"),
        (lambda fields, arch: fields.update({f"{arch}.rope.scaling.type": "su"}), "scaling.type su: must be none"),
        (lambda fields, arch: fields.update({f"{arch}.attention.value_length": 9}), "value_length 9: must be 8"),
    ],
)
def test_keys_that_ask_for_something_else(written: Path, change: Callable[..., Any], message: str) -> None:
    rewrite(written, lambda content: change(content.fields, content.architecture))
    with pytest.raises(FormatError, match=message):
        read_draft(written)


def test_keys_that_other_writers_leave_out(draft: DraftModule, written: Path) -> None:
    """Where a key is absent llama.cpp takes the same as we do."""
    if isinstance(draft, SmallDraft):  # its heads make up its width; the head's do not
        optional = {"attention.key_length", "attention.value_length", "rope.dimension_count"}
    elif isinstance(draft, DFlashDraft):
        optional = {"attention.causal", "sample_from_anchor"}
    else:
        optional = {"norm_before_residual", "norm_before_fc"}

    def change(content: GgufFile) -> None:
        for key in (*sorted(optional), "rope.freq_base", "vocab_size"):
            del content.fields[f"{content.architecture}.{key}"]

    rewrite(written, change)
    assert same(read_draft(written), draft)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_tensors_of_other_types_are_the_numbers_that_they_stand_for(
    draft: DraftModule, written: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantised, expected = gguf.GGMLQuantizationType[kind], dict(read_gguf(written).tensors)
    add_tensor = gguf.GGUFWriter.add_tensor

    def add(writer: gguf.GGUFWriter, name: str, numbers: Any) -> None:
        if name.startswith("blk") and numbers.ndim == 2 and numbers.shape[-1] % 32 == 0:
            stored = gguf.quantize(numbers, quantised)
            expected[name] = torch.from_numpy(np.array(gguf.dequantize(stored, quantised)))
            add_tensor(writer, name, stored, raw_dtype=quantised)
        else:
            add_tensor(writer, name, numbers)

    content = read_gguf(written)
    with monkeypatch.context() as patch:
        patch.setattr("draftforge.specdec.formats.gguf.file._compare", lambda *args: None)
        patch.setattr(gguf.GGUFWriter, "add_tensor", add)
        write_gguf(written, content)
    found = read_gguf(written).tensors
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert any(not torch.equal(tensor, content.tensors[name]) for name, tensor in found.items())
    assert type(read_draft(written)) is type(draft)


def test_a_type_that_stands_for_no_numbers_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "draft.gguf", "llama")
    writer.add_tensor("output.weight", np.zeros((2, 2), dtype=np.int8))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(FormatError, match=r"draft\.gguf: tensor output\.weight is I8: cannot be read"):
        read_draft(tmp_path)


def test_what_is_no_draft_is_refused_by_name(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="format gguf: takes no medusa draft; medusa drafts go as vllm, medusa"):
        write_draft(heads.medusa(), tmp_path, "gguf", tokenizer=tokenizer)
    with pytest.raises(InputError, match="format gguf: takes no eagle draft"):
        write_draft(heads.eagle(), tmp_path, "gguf", tokenizer=tokenizer)
    with pytest.raises(InputError, match="format gguf: holds the target's tokenizer; give it"):
        write_draft(head(), tmp_path, "gguf")
    with pytest.raises(FormatError, match=r"format gguf: llama\.cpp does not compute fc_norm True"):
        write_draft(head(fc_norm=True), tmp_path, "gguf", tokenizer=tokenizer)
    assert not list(tmp_path.iterdir())
    with pytest.raises(MissingFileError, match=r"nowhere\.gguf: no such file"):
        read_draft(tmp_path / "nowhere.gguf")
    write_gguf(tmp_path / "other.gguf", GgufFile("gemma3", {"general.name": "other"}, {"fc.weight": torch.zeros(1)}))
    with pytest.raises(FormatError, match=r"general\.architecture 'gemma3': a draft is 'llama', 'eagle3' or 'dflash'"):
        read_draft(tmp_path)
    write_draft(head(), tmp_path, "gguf", tokenizer=tokenizer)
    with pytest.raises(FormatError, match=r"holds draft\.gguf and other\.gguf; name the file that is the draft"):
        read_draft(tmp_path)
    assert read_draft(tmp_path / "draft.gguf").family == "eagle3"


def test_what_llamacpp_would_compute_otherwise_is_refused(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    other = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, hidden_act="gelu", **sizes))
    with pytest.raises(FormatError, match="format gguf: hidden_act gelu: must be silu"):
        write_llama(other, tokenizer, tmp_path / "draft.gguf")
    odd = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes))
    odd.config.rope_parameters = {"rope_type": "llama3", "type": "llama3", "rope_theta": 1e4, "factor": 8.0}
    with pytest.raises(FormatError, match="format gguf: low_freq_factor: Field required"):
        write_llama(odd, tokenizer, tmp_path / "draft.gguf")


def test_dflash_drafts_that_llamacpp_would_run_otherwise(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    for message, draft in (
        ("as wide as its target; 24 and 20 differ", block(target_hidden_size=20)),
        ("rope_scaling llama3: llama.cpp does not read its factors", block(rope_scaling=heads.SCALINGS["llama3"])),
        ("rope_scaling yarn: beta_fast 8 and beta_slow 0.1: llama.cpp computes 32 and 1 only", block(
            rope_scaling=heads.SCALINGS["yarn"]
        )),
    ):  # fmt: skip
        with pytest.raises(FormatError, match=f"format gguf: .*{message}"):
            write_draft(draft, tmp_path, "gguf", tokenizer=tokenizer)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dflash.attention.causal": True}, r"dflash\.attention\.causal True: must be False"),
        ({"dflash.sample_from_anchor": True}, r"dflash\.sample_from_anchor True: must be False"),
        ({"dflash.attention.sliding_window": 64}, r"dflash\.attention\.sliding_window 64: must be 0"),
        ({"dflash.block_count": 99}, r"dflash\.block_count 99: there are only 27 tensors"),
        ({"tokenizer.ggml.mask_token_id": 280}, "mask_token_id 280: must be below vocab_size 280"),
        ({"dflash.target_layers": [4, 2]}, r"aux_layers \[4, 2\]: must be different layers in ascending order"),
    ],
)
def test_keys_of_dflash_that_ask_for_something_else(
    changes: dict[str, Any], message: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    write_draft(block(), tmp_path, "gguf", tokenizer=tokenizer)
    rewrite(tmp_path / "draft.gguf", lambda content: content.fields.update(changes))
    with pytest.raises(FormatError, match=message):
        read_draft(tmp_path)


def test_dflash_drafts_of_the_whole_vocabulary(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    for own in (False, True):
        draft = block(VOCAB, own_embeddings=own, own_head=own, rope_scaling=heads.SCALINGS["linear"])
        write_draft(draft, tmp_path, "gguf", tokenizer=tokenizer)
        again = read_draft(tmp_path)
        assert isinstance(again, DFlashDraft) and again.config == draft.config and same(again, draft)


def test_d2t_that_names_a_token_twice(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    write_draft(head(), tmp_path, "gguf", tokenizer=tokenizer)
    rewrite(tmp_path / "draft.gguf", lambda content: content.tensors["d2t"].fill_(7))
    with pytest.raises(FormatError, match="d2t names token 7 more than once"):
        read_draft(tmp_path)


def test_a_folder_of_safetensors_is_not_taken_for_gguf(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Published models often lie beside their own GGUF file."""
    write_draft(head(), tmp_path, "vllm")
    write_draft(head(seed=1), tmp_path, "gguf", tokenizer=tokenizer)
    assert detect(tmp_path) == "eagle3" and same(read_draft(tmp_path), head())


def scaled(theta: float, head_dim: int, **scaling: Any) -> LlamaForCausalLM:
    sizes = {"hidden_size": 2 * head_dim, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    rope = {"rope_type": "llama3", "rope_theta": theta, **scaling}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, head_dim=head_dim, rope_parameters=rope, **sizes))


@pytest.mark.parametrize(
    ("theta", "head_dim", "factor", "original", "high"),
    [
        (500000.0, 128, 8.0, 8192, 4.0),  # Llama 3.1
        (500000.0, 64, 32.0, 8192, 4.0),  # Llama 3.2
        (10000.0, 32, 8.0, 64, 4.0),
        (10000.0, 4, 8.0, 100, 4.0),  # no frequency lies between the two bounds
        (500000.0, 64, 8.0, 8192, 2.0),
    ],
)
def test_rope_scaling_comes_back_from_its_factors(
    theta: float, head_dim: int, factor: float, original: int, high: float,
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path,
) -> None:  # fmt: skip
    fields = {"factor": factor, "original_max_position_embeddings": original}
    model = scaled(theta, head_dim, **fields, low_freq_factor=1.0, high_freq_factor=high)
    if high != 4.0:  # its factors would not tell a reader where they came from
        with pytest.raises(FormatError, match=r"tensor rope_freqs\.weight: is not a rope scaling in the way of Llama"):
            write_llama(model, tokenizer, tmp_path / "draft.gguf")
        assert not list(tmp_path.iterdir())
        return
    write_llama(model, tokenizer, tmp_path / "draft.gguf")
    again = read_llama(tmp_path / "draft.gguf")
    assert torch.equal(again.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    assert again.model.rotary_emb.inv_freq[-1] * factor == theta ** (2 / head_dim - 1)
    if head_dim > 4:
        assert again.config.rope_parameters.items() >= fields.items()
