"""Fetching in every layout that a family has, by folder and by fingerprint, with no recipe at hand."""

import json
import shutil
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from llamacpp import LlamaServer
from trained import DRAFTS, Trained
from transformers import AutoTokenizer

from draftforge.cli import main
from draftforge.errors import FormatError, InputError
from draftforge.eval.acceptance import Estimate
from draftforge.pipeline import export, registry_listing
from draftforge.pipeline.export import rewrite_draft
from draftforge.progress import Console
from draftforge.registry.champion_alias import promote, rollback, undo_rollback
from draftforge.registry.connect import Tracking, open_tracking
from draftforge.registry.gate import Decision, Evidence, Figures, Interval, Numbers
from draftforge.registry.lineage import Lineage, Version
from draftforge.registry.listing import ListedTarget, ListedVersion, Listing
from draftforge.registry.settings import RegistrySettings
from draftforge.registry.tracking import start_run
from draftforge.registry.versions import register_version
from draftforge.specdec.formats import Format, Verifier, read_draft, read_meta
from draftforge.specdec.formats.gguf.file import read_gguf
from draftforge.specdec.formats.gguf.llama import write_llama
from draftforge.specdec.formats.layouts import FAMILIES
from draftforge.specdec.serving_plan import FoundPlan, ServingPlan, find_plan, write_plan
from draftforge.specdec.target_settings import TargetSettings
from draftforge.specdec.targets import target_fingerprint

VERIFIER = Verifier("owner/model", ["LlamaForCausalLM"])
Code = Callable[..., int]
THREE = ServingPlan.chain(3)


REFUSED = [("dflash-reduced", "sglang"), ("dspark-reduced", "sglang")]  # it drafts with the target's head
PAIRS = [
    (name, layout)
    for name in DRAFTS
    for layout, families in FAMILIES.items()
    if name.removesuffix("-reduced") in families and (name, layout) not in REFUSED
]


@pytest.mark.parametrize(("name", "layout"), PAIRS)
def test_every_family_reads_back_from_every_layout(
    trained_drafts: Trained, tmp_path: Path, name: str, layout: Format
) -> None:
    folder = trained_drafts.draft_folders[name]
    tokenizer = AutoTokenizer.from_pretrained(trained_drafts.target_folder)
    rewrite_draft(folder, tmp_path / "out", layout, VERIFIER, tokenizer)
    written = read_draft(tmp_path / "out").state_dict()
    assert all(torch.equal(value, written[key]) for key, value in read_draft(folder).state_dict().items())


def test_a_draft_that_does_not_read_back_is_not_left(
    trained_drafts: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = export.convert_draft

    def spoil(source: Path, folder: Path, *options: object) -> None:
        inner(trained_drafts.draft_folders["eagle3"], folder, *options)  # type: ignore[arg-type]
        other = read_draft(folder)
        next(iter(other.parameters())).data.add_(1e-3)
        shutil.copytree(folder, tmp_path / "kept")
        monkeypatch.setattr(export, "read_draft", lambda place: other if place == folder else read_draft(place))

    monkeypatch.setattr(export, "convert_draft", spoil)
    with pytest.raises(FormatError, match="does not read back"):
        rewrite_draft(trained_drafts.draft_folders["eagle3"], tmp_path / "out", "sglang", None, None)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.fixture
def code() -> Code:
    """The exit code of a command line."""

    def run(*arguments: object) -> int:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        return int(ended.value.code or 0)

    return run


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tracking:
    """A registry that the environment names."""
    tracking = open_tracking(RegistrySettings(), tmp_path / "home")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking.uri)
    return tracking


def serve(
    store: Tracking,
    trained_drafts: Trained,
    name: str,
    parent: str | None = None,
    plan: ServingPlan | None = THREE,
) -> Version:
    """Register a trained draft for its target, with a plan, and make it champion."""
    folder = trained_drafts.draft_folders[name]
    meta, digest = read_meta(folder), "1" * 64
    lineage = Lineage(
        target_fingerprint=target_fingerprint(TargetSettings(model=str(trained_drafts.target_folder))),
        target_name="tiny",
        tokenizer_digest=meta.tokenizer_digest,
        mix_fingerprint=digest,
        capture_fingerprint=digest,
        counts_digest=digest,
        recipe_fingerprint=digest,
        family=meta.family,
        step=meta.step,
        plan=plan,
        measured="batch 1 on this machine",
        parent=parent,
    )
    with tempfile.TemporaryDirectory() as beside, start_run(store, f"train {name}") as run:
        copied = shutil.copytree(folder, Path(beside) / "draft")
        if plan is not None:
            write_plan(copied, plan)
        version = register_version(store, run.id, copied, lineage, ["c"])
    evidence = Evidence(
        candidate=Figures(tau=2.5, speedup=Interval.of(Estimate(1.75, 1.5, 2.0, 25))),
        conversations=30,
        clusters=25,
        confidence=0.95,
        lossless=True,
        export_reads_back=True,
        holdout_overlap=0,
    )
    numbers = Numbers(evidence=evidence)
    assert promote(store, Decision(promote=True, reasons=["better"], numbers=numbers, compared=parent), version).promote
    return version


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, trained_drafts: Trained) -> tuple[Tracking, Version]:
    """A registry with a champion of family eagle3: look at it, and change nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        store = open_tracking(RegistrySettings(), tmp_path_factory.mktemp("kept"))
    return store, serve(store, trained_drafts, "eagle3")


@pytest.fixture
def served(kept: tuple[Tracking, Version], monkeypatch: pytest.MonkeyPatch) -> Version:
    """That champion; the environment names its registry."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", kept[0].uri)
    return kept[1]


def test_fetch_without_a_recipe(
    served: Version, trained_drafts: Trained, tmp_path: Path, code: Code, capsys: pytest.CaptureFixture[str]
) -> None:
    target, digest = trained_drafts.target_folder, served.lineage.target_fingerprint
    for name, named, layout in (("a", target, "vllm"), ("b", digest[:6], "sglang"), ("c", digest, None)):
        out = tmp_path / name
        assert code("fetch", out, "--target", named, *(["--format", layout] if layout else [])) == 0
        assert read_meta(out).family == "eagle3" and read_draft(out).family == "eagle3"
    assert "as sglang, read back equal" in capsys.readouterr().err
    by_id = ["--format", "speculators", "--target-id", "owner/model"]
    assert code("fetch", tmp_path / "e", "--target", target, *by_id) == 0
    config = json.loads((tmp_path / "e" / "config.json").read_text())
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "owner/model",
        "architectures": ["LlamaForCausalLM"],
    }


TERMS = {
    "vllm": ('"method": "eagle3", "model": "{out}", "num_speculative_tokens": 2', "vllm serve {target} "),
    "sglang": (
        "--speculative-num-steps 2 --speculative-eagle-topk 1 --speculative-num-draft-tokens 3",
        "--model-path {target} ",
    ),
    "gguf": ("-md {out}/draft.gguf --spec-type draft-eagle3 --spec-draft-n-max 2", "llama-server -m TARGET.gguf "),
    "speculators": ("vllm serve {out}", "vllm serve {out}"),
}


def test_the_plan_travels_in_the_terms_of_each_engine(
    store: Tracking,
    trained_drafts: Trained,
    tmp_path: Path,
    code: Code,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A draft that was trained for more than the K that it is promoted at: what is served is what was promoted, from
    any folder."""
    version, target = serve(store, trained_drafts, "eagle3", plan=ServingPlan.chain(2)), trained_drafts.target_folder
    monkeypatch.chdir(target.parent)
    target = Path.cwd() / target.name
    for layout, terms in TERMS.items():
        out = tmp_path / layout
        named = ["--target-id", "owner/model"] if layout == "speculators" else []
        assert code("fetch", out, "--target", target.name, "--format", layout, *named) == 0
        said = capsys.readouterr()
        (command,) = said.out.splitlines()
        for part in terms:
            assert part.format(out=out, target=target) in command

        # The folder says the same, to programs and to people; and to us, should it become a draft again.
        record, card = json.loads((out / "serve.json").read_text()), (out / "README.md").read_text()
        assert record["command"] == command and f"to serve it with {record['engine']}:" in said.err
        assert (record["tau"], record["speedup"], record["measured"]) == (2.5, 1.75, "batch 1 on this machine")
        assert record["version"] == version.reference and find_plan(out) == FoundPlan(ServingPlan.chain(2))
        figures = ("K=2", "2.50", "1.75x [1.50, 2.00] over plain decoding (batch 1 on this machine)")
        assert f"expected speed-up: {figures[-1]}\nthe gate: promoted\n" in said.err
        for part in (command, *figures, version.reference, "tiny"):
            assert part in card
    config = json.loads((tmp_path / "speculators" / "config.json").read_text())
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 2
    fields = read_gguf(tmp_path / "gguf" / "draft.gguf").fields
    assert fields["draftforge.draft_tokens"] == 2 and fields["general.name"] == "eagle3 draft, K=2"
    assert fields["general.tags"] == ["speculative-decoding"] and fields["draftforge.rule"] == "greedy"

    # From the registry to a served request: the command goes through llama.cpp's own parser into its server.
    model, tokenizer = trained_drafts.target().model, trained_drafts.target().tokenizer
    write_llama(model, tokenizer, tmp_path / "target.gguf")
    command = json.loads((tmp_path / "gguf" / "serve.json").read_text())["command"]
    server = LlamaServer.of_command(command.replace("TARGET.gguf", str(tmp_path / "target.gguf")))
    answer = server.post("/completion", {"prompt": "Order 3: Maria bought", "n_predict": 16, "temperature": 0.0})
    timings = answer["timings"]
    assert answer["content"] and 0 < timings["draft_n"] <= 2 * timings["predicted_n"]


def test_a_registered_draft_without_a_plan_is_fetched_with_what_is_assumed(
    store: Tracking, trained_drafts: Trained, tmp_path: Path, code: Code, capsys: pytest.CaptureFixture[str]
) -> None:
    version = serve(store, trained_drafts, "small", plan=None)
    out, K = tmp_path / "out", read_meta(trained_drafts.draft_folders["small"]).draft_tokens
    assert code("fetch", out, "--target", version.lineage.target_fingerprint[:12]) == 0
    said = capsys.readouterr()
    assert f"has no serve.json: K={K} is assumed, what it was trained for" in said.err
    assert "TARGET: tiny, the model with that fingerprint" in said.err and said.out.startswith("vllm serve TARGET ")
    found = find_plan(out)
    assert found.plan == ServingPlan.chain(K) and found.assumed and "(assumed)" in (out / "README.md").read_text()
    assert code("fetch", tmp_path / "hf", "--target", trained_drafts.target_folder, "--format", "hf") == 0
    config = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert (config["num_assistant_tokens"], config["assistant_confidence_threshold"]) == (K, 0.0)
    assert config["num_assistant_tokens_schedule"] == "constant"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--target", "tiny", "--format", "gguf"],
            "error: --target tiny: no such folder, and not a hub id (owner/name), nor 6 hex digits or more of a "
            "fingerprint",
        ),
        (["--target", "./none.gguf"], "error: --target none.gguf: no such GGUF file"),
        (["--target", "ffffff"], "is the beginning of no target here: tiny ("),
        (["--target", "DIGITS", "--format", "gguf"], "name the target's model with --target"),
        (["--target", "DIGITS", "--format", "hf"], "format hf: takes no eagle3 draft"),
        (["--target", "DIGITS", "--format", "onnx"], "format onnx: must be one of"),
        (["--target", "FOLDER", "--format", "speculators"], "must be the target's hub id"),
        (["--target", "DIGITS", "--format", "speculators", "--target-id", "a/b"], "the format names its architecture"),
        (["--target", "FOLDER", "--format", "sglang", "--alias", "previous"], "has no previous in the registry"),
    ],
)
def test_what_cannot_be_fetched_is_said(
    served: Version,
    trained_drafts: Trained,
    tmp_path: Path,
    code: Code,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    words: str,
) -> None:
    known = {"DIGITS": served.lineage.target_fingerprint[:8], "FOLDER": str(trained_drafts.target_folder)}
    assert code("fetch", tmp_path / "out", *(known.get(option, option) for option in options)) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_listing_goes_both_ways(
    store: Tracking, trained_drafts: Trained, tmp_path: Path, code: Code, capsys: pytest.CaptureFixture[str]
) -> None:
    one = serve(store, trained_drafts, "eagle3")
    two = serve(store, trained_drafts, "small", parent=one.reference)
    capsys.readouterr()
    assert code("registry", "--json", "--decisions") == 0
    found = json.loads(capsys.readouterr().out)
    (target,) = found["targets"]
    assert target["fingerprint"] == one.lineage.target_fingerprint and target["target"] == "tiny"
    newest, oldest = target["versions"]
    assert (newest["reference"], newest["aliases"], newest["parent"]) == (two.reference, ["champion"], one.reference)
    assert (oldest["aliases"], oldest["family"], oldest["plan"]) == (["previous"], "eagle3", "K=3")
    assert (newest["tau"], newest["speedup"], newest["decision"], newest["reasons"]) == (2.5, 1.75, "promote", "better")
    assert newest["run_name"] == "train small" and newest["run"] == two.run_id
    assert newest["decisions"][0]["numbers"]["evidence"]["conversations"] == 30
    assert [move["to"] for move in target["moves"]] == [1, 2]
    by_family = {draft["family"]: draft for draft in found["drafts"]}
    (serves,) = by_family["small"]["serves"]
    assert serves == {
        "target": "tiny",
        "fingerprint": one.lineage.target_fingerprint,
        "reference": two.reference,
        "aliases": ["champion"],
    }
    assert code("registry", "--decisions") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "By target" in said and "By draft" in said and "1.75x" in said and f"{two.reference} promoted" in said
    # What was rolled back stays listed, with its reason, also once that was undone.
    rollback(store, one.lineage.target_fingerprint, "slow for users")
    assert code("registry", "--decisions") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "rolled back: slow for users" in said and "rollback: 2 to 1: slow for users" in said
    undo_rollback(store, one.lineage.target_fingerprint, "the network was")
    assert code("registry", "--json") == 0
    newest = json.loads(capsys.readouterr().out)["targets"][0]["versions"][0]
    assert newest["rolled_back"] is None
    assert newest["rollback_undone"] == "slow for users; undone: the network was"
    assert code("registry", "--target", "0" * 12) == 0
    assert "no target has a draft here (--target 000000000000)" in capsys.readouterr().out
    assert code("registry", "--target", "xyz") == 2
    assert "hex digits" in capsys.readouterr().err


def test_looking_makes_no_registry(
    tmp_path: Path,
    code: Code,
    write_recipe: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert code("registry", write_recipe()) == 2
    said = capsys.readouterr().err
    assert "work: nothing is registered yet; `draftforge distill RECIPE` does it\n" in said
    assert code("registry", "--workdir", tmp_path / "none") == 2
    assert "holds no mlflow.db" in capsys.readouterr().err and not (tmp_path / "none").exists()


def test_a_small_draft_and_its_tokenizer_go_to_gguf_by_digits(
    store: Tracking, trained_drafts: Trained, tmp_path: Path, code: Code
) -> None:
    """Its files hold the tokenizer; nothing of the target is needed."""
    digest = serve(store, trained_drafts, "small").lineage.target_fingerprint
    assert code("fetch", tmp_path / "out", "--target", digest[:8], "--format", "gguf") == 0
    assert (tmp_path / "out" / "draft.gguf").is_file()


@pytest.mark.parametrize(
    ("option", "field"),
    [("model", "registry.model"), ("tracking-uri", "registry.tracking_uri"), ("workdir", "workdir")],
)
def test_a_store_is_named_by_the_recipe_or_by_options_not_by_both(
    option: str,
    field: str,
    tmp_path: Path,
    code: Code,
    write_recipe: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert code("registry", write_recipe(), f"--{option}", "x") == 2
    said = capsys.readouterr().err
    assert said == f"error: --{option} x: the recipe names the registry; give {field}=x instead\n"


def test_an_export_copies_no_file_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    (tmp_path / "key").write_text("private")
    (tmp_path / "draft" / "notes").symlink_to(tmp_path / "key")
    scorer: Any = None
    with pytest.raises(InputError, match="notes: is a link out of the folder"):
        export.export_draft(scorer, tmp_path / "draft", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_names_in_a_registry_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    text = "[/x] [red]"
    version = ListedVersion(
        reference=f"{text}/1", aliases=["champion"], draft=text, family=text, step=1, plan=text, tau=1.0, speedup=1.0,
        registered=datetime.now(UTC), run=text, run_name=text, recipe=text, parent=text, decision="promote",
        reasons=text, by_choice=text, rolled_back=None, rollback_undone=text,
    )  # fmt: skip
    target = ListedTarget(name=text, fingerprint="ab" * 32, target=text, versions=[version], moves=[{"why": text}])
    console = Console(highlight=False, width=400)
    console.print(registry_listing._by_target(Listing(targets=[target], drafts=[])))
    registry_listing._show_moves(console, target)
    assert capsys.readouterr().out.count("[/x] [red]") >= 7
