"""Serving commands: parsed by the engine where its package is here, else by a parser of its documented options.

llama.cpp's parser is in xllamacpp. vLLM's is asked in its own environment (tests/engines/test_vllm_commands.py); here
the grammar of its commands alone is checked, against the fields of SpeculativeConfig that 0.23, 0.32 and 0.33 have.
SGLang needs a GPU to be installed: its options, with their types, are those of 0.5.23's arg_groups/fields/spec.py.
"""

import argparse
import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from llamacpp import parsed
from trained import Trained
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from draftforge.errors import InputError
from draftforge.specdec.accept_rules import RULES
from draftforge.specdec.formats import convert_draft
from draftforge.specdec.formats.layouts import FAMILIES, Format
from draftforge.specdec.proposers.tree_settings import ConfidentChain, DynamicTree, StaticTree
from draftforge.specdec.serve_commands import ServeCommand, lookup_command, plain_command, serve_command
from draftforge.specdec.serving_plan import ServingPlan, write_plan
from draftforge.specdec.target_settings import TargetSettings

TARGET = TargetSettings(model="owner/model", revision="main", context=4096)
GGUF = TargetSettings(model="/models", gguf_file="target.gguf", context=512)
DRAFT = "/drafts/a draft"
CHAIN = ServingPlan.chain(3)
DYNAMIC = DynamicTree(kind="dynamic", levels=5, top_k=4, nodes=16)
STATIC = StaticTree(kind="static", widths=[3, 2])
VLLM_FIELDS = {
    "method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "draft_sample_method",
    "rejection_sample_method",
}  # fmt: skip


def tree_plan(tree: Any, rule: Any = "greedy") -> ServingPlan:
    return ServingPlan(draft_tokens=tree.levels, tree_name="wide", tree=tree, chain_tokens=2, rule=rule)


def command(
    layout: Format, family: str, plan: ServingPlan = CHAIN, target: TargetSettings | None = TARGET
) -> ServeCommand:
    return serve_command(layout, family, plan, DRAFT, target)


def sglang(text: str) -> argparse.Namespace:
    """SGLang's documented options of 0.5.23, as its launcher parses them."""
    parser = argparse.ArgumentParser(exit_on_error=True, allow_abbrev=False)
    for name in ("model-path", "revision", "speculative-algorithm", "speculative-draft-model-path"):
        parser.add_argument(f"--{name}", type=str)
    for name in (
        "context-length", "speculative-num-steps", "speculative-eagle-topk", "speculative-num-draft-tokens",
        "speculative-ngram-max-bfs-breadth",
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int)
    for name in (
        "trust-remote-code", "speculative-use-rejection-sampling", "speculative-use-block-verification",
    ):  # fmt: skip
        parser.add_argument(f"--{name}", action="store_true")
    words = shlex.split(text)
    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    return parser.parse_args(words[3:])


def vllm(text: str) -> dict[str, Any]:
    """The JSON of a vLLM command's --speculative-config."""
    words = shlex.split(text)
    assert words[:2] == ["vllm", "serve"] and words[-2] == "--speculative-config"
    found: dict[str, Any] = json.loads(words[-1])
    assert set(found) <= VLLM_FIELDS
    return found


@pytest.mark.parametrize("layout", FAMILIES)
def test_every_family_of_every_format_has_a_command(layout: Format) -> None:
    for family in FAMILIES[layout]:
        for target in (TARGET, None):
            text = command(layout, family, target=target).text
            assert DRAFT in (text if layout == "hf" else " ".join(shlex.split(text)))
            assert (layout in ("speculators", "medusa")) or ("TARGET" in text) == (target is None or layout == "gguf")


@pytest.mark.parametrize(
    ("family", "method"),
    [("small", "draft_model"), *((name, name) for name in ("eagle", "eagle3", "medusa", "dflash", "dspark"))],
)
def test_vllm(family: str, method: str) -> None:
    found = command("vllm", family)
    assert vllm(found.text) == {"method": method, "model": DRAFT, "num_speculative_tokens": 3}
    assert shlex.split(found.text)[2:-2] == ["owner/model", "--revision", "main", "--max-model-len", "4096"]
    assert [note for note in found.notes if "0.32" in note] == list(found.notes) and bool(found.notes) == (
        family in ("medusa", "dspark")
    )


@pytest.mark.parametrize(
    ("rule", "more"),
    [
        ("onehot", {}),
        ("token", {"draft_sample_method": "probabilistic"}),
        ("block", {"draft_sample_method": "probabilistic", "rejection_sample_method": "block"}),
        ("match", None),
        ("multiround", None),
    ],
)
def test_rules_of_vllm(rule: Any, more: dict[str, str] | None) -> None:
    found = command("vllm", "eagle3", ServingPlan.chain(3, rule))
    asked = vllm(found.text)
    assert {name: value for name, value in asked.items() if name.endswith("_method")} == (more or {})
    assert bool(found.notes) == (more is None)
    assert more is not None or f"vLLM has no rule {rule}" in found.notes[0]
    assert more is None or (rule in RULES and "vllm" in RULES[rule].engines)


def test_speculators_are_served_by_themselves() -> None:
    found = command("speculators", "eagle3")
    assert shlex.split(found.text) == ["vllm", "serve", DRAFT, "--max-model-len", "4096"]
    assert ["no place for the target's revision main" in note for note in found.notes] == [True]
    found = command("speculators", "eagle3", ServingPlan.chain(3, "token"), None)
    assert shlex.split(found.text) == ["vllm", "serve", DRAFT]
    assert ["no place for rule token" in note for note in found.notes] == [True]


@pytest.mark.parametrize("layout", ["vllm", "speculators", "gguf"])
def test_engines_of_chains_get_the_best_chain_and_say_so(layout: Format) -> None:
    found = command(layout, "eagle3", tree_plan(DYNAMIC), GGUF)
    said = "drafts no such tree: K=2, the best chain that was measured, instead of tree wide"
    assert sum(said in note for note in found.notes) == 1
    if layout == "vllm":
        assert vllm(found.text)["num_speculative_tokens"] == 2
    if layout == "gguf":
        assert parsed(found.text).speculative.draft.n_max == 2


@pytest.mark.parametrize(
    ("family", "plan", "algorithm", "steps", "topk", "tokens"),
    [
        ("small", CHAIN, "STANDALONE", 3, 1, 4),
        ("eagle", CHAIN, "EAGLE", 3, 1, 4),
        ("eagle3", CHAIN, "EAGLE3", 3, 1, 4),
        ("dflash", CHAIN, "DFLASH", None, None, 4),
        ("eagle3", tree_plan(DYNAMIC), "EAGLE3", 5, 4, 17),
        ("eagle3", tree_plan(STATIC), "EAGLE3", 2, 1, 3),
        ("small", tree_plan(DYNAMIC), "STANDALONE", 2, 1, 3),
    ],
)
def test_sglang(
    family: str, plan: ServingPlan, algorithm: str, steps: int | None, topk: int | None, tokens: int
) -> None:
    """EAGLE's dynamic trees are SGLang's own; the token that a draft follows counts among its draft tokens."""
    found = command("sglang", family, plan)
    asked = sglang(found.text)
    assert (asked.model_path, asked.revision, asked.context_length) == ("owner/model", "main", 4096)
    assert (asked.speculative_algorithm, asked.speculative_draft_model_path) == (algorithm, DRAFT)
    assert (asked.speculative_num_steps, asked.speculative_eagle_topk) == (steps, topk)
    assert asked.speculative_num_draft_tokens == tokens
    assert not asked.speculative_use_rejection_sampling and not asked.speculative_use_block_verification
    chain = plan.tree is not None and (family == "small" or plan.tree.kind == "static")
    assert bool(found.notes) == chain and all("best chain" in note for note in found.notes)


def test_sglang_takes_the_length_of_a_dspark_draft_from_its_folder() -> None:
    found = command("sglang", "dspark")
    asked = shlex.split(found.text)
    assert asked[-4:] == ["--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", DRAFT]
    assert "whatever K" in found.notes[0] and "SGLANG_RAGGED_VERIFY_MODE=compact" in found.notes[1]


def test_llamacpp_ends_a_draft_where_the_plans_confidence_does() -> None:
    tree = ConfidentChain(kind="confident", levels=5, confidence_threshold=0.3)
    found = command("gguf", "dspark", tree_plan(tree), GGUF)
    drafting = parsed(found.text).speculative.draft
    assert (drafting.n_max, drafting.p_min) == (5, pytest.approx(0.3)) and not found.notes


def test_rules_of_sglang() -> None:
    assert sglang(command("sglang", "eagle3", ServingPlan.chain(3, "token")).text).speculative_use_rejection_sampling
    assert sglang(command("sglang", "eagle", ServingPlan.chain(3, "block")).text).speculative_use_block_verification
    for family, rule in (("small", "token"), ("eagle3", "match")):
        found = command("sglang", family, ServingPlan.chain(3, rule))  # type: ignore[arg-type]
        assert "sampling" not in found.text and f"has no rule {rule}" in found.notes[0]


@pytest.mark.parametrize(
    ("family", "kind"), [("small", "SIMPLE"), ("eagle3", "EAGLE3"), ("dflash", "DFLASH"), ("dspark", "DSPARK")]
)
def test_llamacpps_own_parser_takes_its_command(family: str, kind: str) -> None:
    found = command("gguf", family, target=GGUF)
    params = parsed(found.text)
    assert (params.model.path, params.n_ctx) == ("/models/target.gguf", 512)
    drafting = params.speculative.draft
    assert (drafting.mparams.path, drafting.n_max, drafting.p_min) == (f"{DRAFT}/draft.gguf", 3, 0.0)
    assert params.speculative.types[-1].name == f"COMMON_SPECULATIVE_TYPE_DRAFT_{kind}"
    assert not drafting.probabilistic and not found.notes
    drawn = parsed(command("gguf", family, ServingPlan.chain(3, "token"), GGUF).text)
    assert drawn.speculative.draft.probabilistic
    (note,) = command("gguf", family).notes
    assert "TARGET.gguf is the target as a GGUF file" in note
    on_hub = serve_command("gguf", family, CHAIN, "me/draft", GGUF)  # it takes files alone
    assert on_hub.notes == ("it reads the draft from disk: hf download me/draft --local-dir me/draft",)
    assert parsed(on_hub.text).speculative.draft.mparams.path == "me/draft/draft.gguf"


def test_llamacpps_parser_refuses_what_it_does_not_know(capfd: pytest.CaptureFixture[str]) -> None:
    """The check above could fail: an option that is gone, and one that never was."""
    for wrong in ("--draft-max 3", "--spec-draft-k 3"):
        with pytest.raises(ValueError, match="llama-server"):
            parsed(f"llama-server -m t.gguf -md d.gguf {wrong}")
    assert "the argument has been removed" in capfd.readouterr().err


def test_transformers_says_what_its_draft_folder_must_say() -> None:
    found = command("hf", "small", ServingPlan.chain(3, "onehot"))
    assert f"draft = AutoModelForCausalLM.from_pretrained('{DRAFT}')" in found.text.splitlines()
    compile(found.text, "command", "exec")
    assert "transformers has no rule onehot" in found.notes[0]


def test_prompt_lookup_and_no_draft() -> None:
    assert vllm(lookup_command("vllm", 4, TARGET).text) == {
        "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
    }  # fmt: skip
    asked = sglang(lookup_command("sglang", 4, TARGET).text)
    assert (asked.speculative_algorithm, asked.speculative_num_draft_tokens) == ("NGRAM", 5)
    params = parsed(lookup_command("llama.cpp", 4, GGUF).text)
    assert params.speculative.types[-1].name == "COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE"
    assert (params.speculative.ngram_simple.size_n, params.speculative.ngram_simple.size_m) == (3, 4)
    assert parsed(plain_command("llama.cpp", GGUF).text).model.path == "/models/target.gguf"
    assert sglang(plain_command("sglang", TARGET).text).speculative_algorithm is None
    assert shlex.split(plain_command("draftforge", TARGET).text)[:3] == ["vllm", "serve", "owner/model"]


def test_what_a_server_must_know_of_the_target() -> None:
    target = TargetSettings(model="owner/model", adapter="owner/lora", trust_remote_code=True)
    for layout in ("vllm", "sglang"):
        found = command(layout, "eagle3", target=target)
        assert "--trust-remote-code" in found.text
        assert found.notes == ("the draft is for the target with the adapter owner/lora merged into it: serve that",)
    with pytest.raises(InputError, match="medusa: SGLang serves no such draft; it serves small, eagle"):
        command("sglang", "medusa")


def test_transformers_drafts_as_many_tokens_as_the_plan_says(
    trained_drafts: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The printed lines, run: K comes from the folder, and the draft's own sureness cuts nothing."""
    source, out = shutil.copytree(trained_drafts.draft_folders["small"], tmp_path / "source"), tmp_path / "out"
    write_plan(source, CHAIN)
    out.mkdir()
    convert_draft(source, out, "hf")
    drafted: list[int] = []
    whole = AssistedCandidateGenerator.get_candidates

    def counted(self: Any, input_ids: Any, *rest: Any, **options: Any) -> Any:
        found = whole(self, input_ids, *rest, **options)
        drafted.append(found[0].shape[1] - input_ids.shape[1])
        return found

    monkeypatch.setattr(AssistedCandidateGenerator, "get_candidates", counted)
    target = TargetSettings(model=str(trained_drafts.target_folder))
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "attention_mask": torch.ones(1, 4), "max_new_tokens": 20}
    exec(serve_command("hf", "small", CHAIN, str(out), target).text, {"inputs": inputs})
    assert drafted and drafted[0] == 3 and max(drafted) == 3
