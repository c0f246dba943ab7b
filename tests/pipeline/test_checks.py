"""What would fail only after the training is found out before any work, in one line that names the field."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import loads
import pytest
from byte_level import byte_level_tokenizer
from distilled import Distilled
from stand_ins import llama
from trained import Trained

from draftforge.errors import CorruptDataError, DiskFullError, DraftforgeError, InputError, MissingFileError
from draftforge.eval.cost_table import read_tables, write_tables
from draftforge.pipeline import distill as flow
from draftforge.pipeline import retrain, workspace
from draftforge.pipeline.mix_report import _known_context
from draftforge.pipeline.scoring import check_load
from draftforge.pipeline.workspace import Workspace
from draftforge.recipe import Recipe, load_recipe
from draftforge.specdec.formats.gguf.layouts import write_llama
from draftforge.specdec.target_settings import TargetSettings
from draftforge.specdec.targets import context_length
from draftforge.train import loop

pytestmark = pytest.mark.slow

WriteRecipe = Callable[..., Path]
LOAD = {"engine": "vllm", "batch_sizes": {1: 1.0}, "context_tokens": 300, "answer_tokens": 16}
VERBS: dict[str, Callable[[Recipe], object]] = {
    "distill": lambda recipe: flow.distill(workspace.open_workspace(recipe)),
    "score": lambda recipe: flow.score(recipe, None),
    "promote": flow.promote,
    "retrain": lambda recipe: retrain.retrain(recipe),
}
ALL: dict[str, Callable[[Recipe], object]] = {"capture": flow.capture, "train": flow.train, **VERBS}
GATED = ("distill", "promote", "retrain")
SERVER = "capture.backend={kind: vllm, url: 'http://127.0.0.1:9', retries: 0"
LORA = "{rank: 2, targets: [nothing]}"
FAULTS: list[tuple[tuple[str, ...], list[str], str]] = [
    # the target, the machine, who answers
    ((*ALL,), ["target.model=./nowhere"], r"target\.model: .*nowhere: no such folder"),
    ((*ALL,), ["target.device=cuda:7"], r"target\.device: cuda:7: there are \d+ CUDA devices"),
    ((*ALL,), ["target.model=UNTALKING"], r"has no chat template"),
    ((*ALL,), ["capture.answers=./nowhere"], r"capture\.answers: .*nowhere/answers\.json: no such file"),
    ((*ALL,), [f"{SERVER}}}"], r"capture\.backend\.url"),
    ((*ALL,), ["capture.backend={kind: vllm}"], r"capture\.backend: vLLM cannot be imported here"),
    (
        (*ALL,),
        [f"{SERVER}, api_key_env: NO_SUCH_KEY}}"],
        r"api_key_env: the environment variable NO_SUCH_KEY is not set",
    ),
    (
        (*ALL,),
        [f"{SERVER}}}", "score.sampling=[{temperature: 1.0, min_p: 0.1, top_p: 0.5}]"],
        r"vLLM applies min_p before",
    ),
    # the drafts
    ((*ALL,), ["drafts.small.engine=deepspeed"], r"drafts\.small\.engine deepspeed: the package is not installed"),
    ((*ALL,), ["capture.top_k=0"], r"drafts\.small\.family = small: is taught by stored signals"),
    ((*ALL,), ["drafts.small.layers=[0, 99]"], r"drafts\.small\.layers \[0, 99\]: must start at 0 and end at"),
    ((*ALL,), [f"drafts.small.lora={LORA}"], r"drafts\.small\.lora: targets \['nothing'\]"),
    ((*ALL,), ["drafts.small={family: small, from_model: ./nowhere}"], r"drafts\.small\.from_model: .*no such folder"),
    (
        (*ALL,),
        [f"drafts.small={{family: small, from_model: OTHER, lora: {LORA}}}"],
        r"drafts\.small\.lora: targets \['nothing'\]",
    ),
    ((*ALL,), ["drafts.small={family: small, from_model: UNTALKING}"], r"drafts\.small\.from_model: .*: tokenizer"),
    ((*ALL,), ["drafts.small.init_from=./nowhere"], r"drafts\.small\.init_from: .*nowhere: no such draft folder"),
    ((*ALL,), ["drafts.small.init_from=HEAD"], r"drafts\.small\.init_from: .*: is of family eagle3"),
    ((*ALL,), ["drafts.eagle3.aux_layers=[1, 2, 99]"], r"drafts\.eagle3\.aux_layers = .*the target's last layer"),
    ((*ALL,), ["drafts.eagle3.draft_vocabulary=9999"], r"drafts\.eagle3\.draft_vocabulary 9999: must not exceed"),
    (
        ("capture", "train"),  # such a draft is not scored
        [f"drafts.small={{family: medusa, backbone: {{lora: {LORA}}}}}"],
        r"drafts\.small\.backbone\.lora: targets",
    ),
    # the score
    ((*VERBS,), ["score.draft_device=cuda:7"], r"score\.draft_device: cuda:7: there are \d+ CUDA devices"),
    ((*VERBS,), ["score.costs.rounds=5000"], r"score\.costs\.rounds = 5000: so many rounds"),
    (
        (*VERBS,),
        ["score.trees={both: {kind: merged, drafts: [HEAD]}}"],
        r"score\.trees\.both: .*drafts with another tokenizer",
    ),
    # gate, registry, command
    (GATED, ["gate.min_speedup=1", "score.confidence=0.9"], r"score\.confidence = 0\.9: gate\.confidence asks for"),
    (GATED, ["score.max_conversations=1"], r"score\.max_conversations = 1: .* 2 clusters of gate\.min_clusters"),
    (GATED, ["promotion.command=[no-such-program]"], r"promotion\.command no-such-program: no such program"),
    (GATED, ["registry.tracking_uri=http://127.0.0.1:9", "registry.connect_seconds=0.5"], r"127\.0\.0\.1:9"),
]
"""Verbs that refuse these values of a recipe, and in which words."""


def score(**changes: Any) -> dict[str, Any]:
    return {"draft_tokens": [1, 2], "costs": {"rounds": 6, "warmup_rounds": 0}, "load": LOAD, **changes}


@pytest.mark.parametrize("verb", VERBS)
def test_a_load_beyond_the_targets_context_is_refused_before_any_work(verb: str, write_recipe: WriteRecipe) -> None:
    recipe = load_recipe(write_recipe(score=score(load={**LOAD, "context_tokens": 5000})))
    with pytest.raises(InputError, match=r"^score\.load\.context_tokens 5000: .* fit the target's context"):
        VERBS[verb](recipe)
    assert not list(recipe.workdir.glob("mix-*"))


@pytest.fixture(scope="module")
def folders(
    tiny_target_folder: Path, trained_drafts: Trained, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """A model with another tokenizer, without a chat template; one with the target's; a draft of another target."""
    other = shutil.copytree(tiny_target_folder, tmp_path_factory.mktemp("other") / "model")
    head = trained_drafts.draft_folders["eagle3"]
    return {"UNTALKING": str(trained_drafts.target_folder), "OTHER": str(other), "HEAD": str(head)}


@pytest.mark.parametrize(("verb", "changes", "said"), [(verb, *fault) for verbs, *fault in FAULTS for verb in verbs])
def test_what_needs_no_result_is_found_out_before_the_mix(
    verb: str,
    changes: list[str],
    said: str,
    write_recipe: WriteRecipe,
    folders: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop, "find_spec", lambda name: None)  # no DeepSpeed
    monkeypatch.setitem(sys.modules, "vllm", None)
    for name, folder in folders.items():
        changes = [change.replace(name, folder) for change in changes]
    recipe = load_recipe(write_recipe(), changes)
    with pytest.raises(DraftforgeError, match=said):
        ALL[verb](recipe)
    assert not [path for path in recipe.workdir.glob("*-*") if not path.name.startswith("mlflow")]


@pytest.mark.parametrize("verb", ALL)
def test_a_full_disk_is_found_out_before_the_mix(
    verb: str, write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(write_recipe())
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10_000_000))
    with pytest.raises(DiskFullError, match=r"work: 10\.0 MB free, 100 MB needed"):
        ALL[verb](recipe)
    assert not list(recipe.workdir.glob("mix-*"))


@pytest.mark.parametrize("verb", ["train", "distill", "promote"])
def test_a_disk_too_small_for_all_trainings_is_found_out_before_the_mix(verb: str, write_recipe: WriteRecipe) -> None:
    steps = ["drafts.small.steps=1000000000", "drafts.small.score_every=1"]
    recipe = load_recipe(write_recipe(), steps)
    with pytest.raises(DiskFullError, match=r"too little; all trainings together \(small, eagle3\); free some, raise"):
        ALL[verb](recipe)
    assert not list(recipe.workdir.glob("mix-*"))


def test_a_given_draft_that_does_not_fit_is_found_out_before_the_mix(
    write_recipe: WriteRecipe, folders: dict[str, str]
) -> None:
    recipe = load_recipe(write_recipe())
    with pytest.raises(InputError, match="drafts with another tokenizer"):
        flow.score(recipe, folders["HEAD"])
    assert not list(recipe.workdir.glob("mix-*"))


def test_new_traffic_is_mixed_once_the_retraining_can_go_on(
    distilled_once: Distilled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A champion whose traffic changed; what starts from it is checked when its start is known."""
    work, log = tmp_path / "work", tmp_path / "new.jsonl"
    shutil.copytree(distilled_once.recipe.parent / "work", work, ignore=shutil.ignore_patterns("mlflow*"))
    log.write_text("".join(f'{{"id": "{i}", "domain": "news", "turns": ["What is new in {i}?"]}}\n' for i in range(40)))
    store = f"registry.tracking_uri=sqlite:///{distilled_once.recipe.parent / 'work' / 'mlflow.db'}"
    changed = [f"workdir={work}", store, f"mix.sources=[{{kind: turns, path: '{log}'}}]"]
    mixes = {path.name for path in work.glob("mix-*")}
    for fault, said in (
        (f"{SERVER}}}", "capture.backend.url"),
        ("drafts.other={family: eagle, engine: deepspeed, steps: 2, warmup_steps: 1}", "is not installed"),
    ):
        monkeypatch.setattr(loop, "find_spec", lambda name: None)
        with pytest.raises(DraftforgeError, match=said):
            retrain.retrain(load_recipe(distilled_once.recipe, [*changed, fault]))
        assert {path.name for path in work.glob("mix-*")} == mixes


def test_a_draft_of_anybodys_is_not_refused_for_the_recipes_trees(write_recipe: WriteRecipe) -> None:
    """A foreign draft drafts chains only; a deep tree leaves rounds less room."""
    path = write_recipe(score=score(trees={"deep": {"kind": "static", "widths": [1] * 60}}))
    longest = context_length(load_recipe(path).target)
    assert longest is not None
    space = Workspace(load_recipe(path, [f"score.load.context_tokens={longest - 100}"]))
    check_load(space, trees=False)
    with pytest.raises(InputError, match=r"score\.load\.context_tokens"):
        check_load(space)


def test_given_times_that_do_not_hold_at_the_load_are_refused_and_read_once(
    write_recipe: WriteRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Path] = []

    def spy(path: Path) -> Any:
        reads.append(path)
        return read_tables(path)

    monkeypatch.setattr(workspace, "read_tables", spy)
    path = write_recipe(score=score())
    write_tables(tmp_path / "theirs.json", [loads.grid_table(lambda B, L, N, C: 1e-4 * L, [1, 2])])
    given = f"score.costs.fit={tmp_path / 'theirs.json'}"
    space = Workspace(load_recipe(path, [given]))
    check_load(space)
    assert space.given_times and reads == [tmp_path / "theirs.json"]
    assert space.with_recipe(load_recipe(path, [given])).given_times and len(reads) == 2
    with pytest.raises(InputError, match=r"^score\.load: batch 4096 is not within the measured range"):
        VERBS["distill"](load_recipe(path, [given, "score.load.batch_sizes={4096: 1}"]))
    (tmp_path / "theirs.json").write_text("{}")
    with pytest.raises(CorruptDataError, match=r"^score\.costs\.fit: .*theirs\.json: fits: must be a list"):
        flow.score(load_recipe(path, [given]), None)
    with pytest.raises(MissingFileError, match=r"^score\.costs\.fit: "):
        flow.promote(load_recipe(path, [f"score.costs.fit={tmp_path / 'none.json'}"]))
    assert not list((tmp_path / "work").glob("mix-*"))


def test_the_context_is_the_configs_or_the_servers(tiny_target_folder: Path, tmp_path: Path) -> None:
    settings = TargetSettings(model=str(tiny_target_folder))
    longest = context_length(settings)
    assert longest is not None and longest > 128
    assert context_length(settings.model_copy(update={"context": 128})) == 128
    assert _known_context(settings) == longest and _known_context(TargetSettings(model="owner/name")) is None
    (tmp_path / "config.json").write_text('{"model_type": "nobody knows"}')
    assert _known_context(TargetSettings(model=str(tmp_path))) is None
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')  # the architecture's default
    assert context_length(TargetSettings(model=str(tmp_path))) == 2048
    tokenizer, model = byte_level_tokenizer(["the order of the day"] * 2, 280), llama(vocab=283)
    write_llama(model, tokenizer, tmp_path / "target.gguf")
    assert context_length(TargetSettings(model=str(tmp_path / "target.gguf"))) == model.config.max_position_embeddings
