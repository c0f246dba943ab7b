"""Bad input through the command line: one line that names field or file, the value and the rule; nothing half-written.

One tiny work folder, trained once, is copied for every damage.
"""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from distilled import cached_stages
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from draftforge import storage
from draftforge.cli import main
from draftforge.data import mix
from draftforge.data.capture import manifest
from draftforge.pipeline import draft_scorer
from draftforge.pipeline.workspace import Workspace
from draftforge.recipe import load_recipe
from draftforge.specdec.formats import tensors
from draftforge.train import checkpoints
from draftforge.train.loop import Trainer

Damage = Callable[[Path], object]
Fails = Callable[..., str]
SMALL = {"family": "small", "layers": 2, "steps": 4, "warmup_steps": 1, "tokens_per_step": 256, "score_every": 2}


class Trained(NamedTuple):
    recipe: Path
    work: Path


@pytest.fixture(scope="module")
def trained_once(
    tmp_path_factory: pytest.TempPathFactory, recipe_in: Callable[..., Path], finished_stages: Path
) -> Trained:
    folder = tmp_path_factory.mktemp("bad-input")
    recipe = recipe_in(folder, drafts={"small": SMALL})
    with cached_stages(finished_stages):
        assert code_of("score", recipe) == 0
    return Trained(recipe, folder / "work")


@pytest.fixture
def trained(trained_once: Trained, tmp_path: Path) -> Trained:
    """A recipe and a copy of a work folder in which its draft is trained and scored."""
    shutil.copytree(trained_once.work, tmp_path / "work")
    return Trained(trained_once.recipe, tmp_path / "work")


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Fails:
    """`fails(code, *args)`: the line with which a command line fails; progress may stand before it."""

    def run(code: int, *args: object) -> str:
        capsys.readouterr()
        ended = code_of(*args)
        said = capsys.readouterr().err
        lines = said.strip().splitlines()
        assert ended == code, said
        assert lines[-1].startswith("error: "), said
        assert "Traceback" not in said and "unexpected" not in said and said.count("error: ") == 1
        return lines[-1]

    return run


def code_of(*args: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(arg) for arg in args])
    return int(ended.value.code or 0)


def half_written(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.endswith((".tmp", ".old"))]


def one(work: Path, pattern: str) -> Path:
    return min(work.glob(pattern))


def cut(pattern: str) -> Damage:
    return lambda work: one(work, pattern).write_bytes(one(work, pattern).read_bytes()[:100])


def write(pattern: str, text: str) -> Damage:
    return lambda work: one(work, pattern).write_text(text)


def unfinished_capture(work: Path) -> None:
    one(work, "capture-*/manifest.json").unlink()


def unfinished_training(work: Path) -> None:
    """As if it had been killed after step 2, with that step's trainer."""
    last = one(work, "train-*/checkpoints/step-000004")
    shutil.move(last / "trainer", last.with_name("step-000002") / "trainer")
    shutil.rmtree(last)
    record = one(work, "train-*/checkpoints/step-000002/trainer/trainer.json")
    trainer = storage.read_json(record)
    storage.write_json(record, trainer | {"state": trainer["state"] | {"step": 2, "scored": [2]}})


def both(first: Damage, second: Damage) -> Damage:
    return lambda work: (first(work), second(work))


def fill(path: Path, value: Any) -> None:
    """Give every entry of a JSON object this value."""
    storage.write_json(path, dict.fromkeys(storage.read_json(path), value))


def write_ancestors(value: Any) -> Damage:
    return lambda work: storage.write_json(work / "ancestors.json", {"f" * 64: value})


DAMAGES: list[tuple[str, Damage, str]] = [
    ("score", cut("capture-*/shards/00000-train.safetensors"), r"00000-train\.safetensors: 100 bytes, \d+ recorded"),
    ("score", write("capture-*/manifest.json", '{"format": 1, "shards": [{}]}'), "manifest.json: not a capture manif"),
    ("capture", both(unfinished_capture, write("capture-*/header.json", "[]")), "header.json: holds a JSON list"),
    (
        "capture",
        both(unfinished_capture, write("capture-*/shards/00000-train.json", "{}")),
        "00000-train.json: not the record",
    ),
    (
        "capture",
        both(unfinished_capture, cut("mix-*/conversations.parquet")),
        "conversations.parquet: its content does not match",
    ),
    ("train", both(unfinished_training, write("train-*/checkpoints/*2/trainer/trainer.json", "{}")), "trainer.json: n"),
    ("train", both(unfinished_training, cut("train-*/checkpoints/*2/trainer/state.safetensors")), "unreadable"),
    ("train", both(unfinished_training, cut("train-*/init/model.safetensors")), "init/model.safetensors: not a read"),
    ("train", both(unfinished_training, write("train-*/train.json", "[]")), "train.json: holds a JSON list"),
    ("train", both(unfinished_training, write("train-*/metrics.jsonl", "[]\n")), "metrics.jsonl: not JSON lines"),
    ("generate", cut("train-*/checkpoints/step-000004/model.safetensors"), "model.safetensors: not a readable"),
    ("generate", write("train-*/checkpoints/step-000004/config.json", "{"), "step-000004/config.json: not valid JSON"),
    ("generate", write("train-*/checkpoints/step-000004/draftforge.json", "[]"), "draftforge.json: holds a JSON list"),
    ("score", write("owner.json", "[]"), "owner.json: holds a JSON list"),
    ("score", write("owner.json", '{"recipe": "other"}'), "belongs to recipe 'other', not 'tiny'"),
    ("score", write("targets.json", "{"), "targets.json: not valid JSON"),
    ("score", lambda work: fill(work / "targets.json", "abc"), "targets.json: [0-9a-f]{64}: must be a fingerprint"),
    ("score", write_ancestors(["x"]), "ancestors.json: [0-9a-f]{64}: must be a list of fingerprints"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "damage", "says"), DAMAGES, ids=[f"{i}-{one[0]}" for i, one in enumerate(DAMAGES)])
def test_a_damaged_file_is_named(verb: str, damage: Damage, says: str, trained: Trained, fails: Fails) -> None:
    damage(trained.work)
    more = ["hi", "--draft", "small"] if verb == "generate" else []
    line = fails(2, verb, trained.recipe, *more, f"workdir={trained.work}")
    assert re.search(says, line), line
    assert str(trained.work) in line
    assert not half_written(trained.work)


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage",
    [
        cut("score-*/parts/small-000004.parquet"),
        write("score-*/parts/small-000004.json", "{}"),
        lambda work: one(work, "score-*/parts/small-000004.parquet").unlink(),
        cut("score-*/counts.parquet"),
        write("digests.json", '{"a": 1}'),
    ],
)
def test_what_is_only_remembered_is_made_again(damage: Damage, trained: Trained) -> None:
    before = one(trained.work, "score-*/counts.parquet").read_bytes()
    notes = one(trained.work, "score-*/parts/small-000004.json").read_bytes()
    damage(trained.work)
    assert code_of("score", trained.recipe, f"workdir={trained.work}") == 0
    assert one(trained.work, "score-*/counts.parquet").read_bytes() == before
    assert one(trained.work, "score-*/parts/small-000004.json").read_bytes() == notes
    assert len(list(trained.work.glob("train-*"))) == 1


def edit_config(**changes: Any) -> Damage:
    def edit(target: Path) -> None:
        storage.write_json(target / "config.json", storage.read_json(target / "config.json") | changes)

    return edit


def not_a_number(target: Path) -> None:
    weights = load_file(target / "model.safetensors")
    weights["model.norm.weight"][:] = float("nan")
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


TARGETS: list[tuple[Damage, str]] = [
    (shutil.rmtree, "no such folder"),
    (lambda t: (t / "model.safetensors").rename(t / "pytorch_model.bin"), "pickled weights are not loaded"),
    (cut("model.safetensors"), "cannot be loaded: SafetensorError"),
    (write("config.json", "[]"), "config.json: holds a JSON list"),
    (edit_config(model_type="bogus"), "cannot be loaded: ValueError: .*model type `bogus`"),
    (edit_config(num_hidden_layers=6), "missing keys: model.layers.4"),
    (edit_config(intermediate_size=64), r"mismatched keys: .*shape \("),
    (lambda t: (t / "tokenizer.json").unlink(), "cannot be loaded"),
    (write("tokenizer.json", "{}"), "cannot be loaded: KeyError"),
    (lambda t: (t / "chat_template.jinja").unlink(), "the tokenizer has no chat template"),
    (write("chat_template.jinja", "{{ raise_exception('no') }}"), "its chat template refuses the messages"),
    (not_a_number, "its logits are not finite"),
]


@pytest.mark.parametrize(("damage", "says"), TARGETS, ids=range(len(TARGETS)))
def test_a_target_that_cannot_be_used_is_refused(
    damage: Damage, says: str, write_recipe: Callable[..., Path], tiny_target_folder: Path, tmp_path: Path, fails: Fails
) -> None:
    target = tmp_path / "target"
    shutil.copytree(tiny_target_folder, target)
    damage(target)
    line = fails(2, "capture", write_recipe(), f"target.model={target}")
    assert re.search(says, line) and str(target) in line
    assert not list((tmp_path / "work").glob("capture-*"))


@pytest.mark.slow
def test_libraries_say_nothing_beside_our_line(
    write_recipe: Callable[..., Path], tiny_target_folder: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    shutil.copytree(tiny_target_folder, target)
    edit_config(num_hidden_layers=6)(target)
    command = [sys.executable, "-m", "draftforge.cli", "capture", str(write_recipe()), f"target.model={target}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    *progress, line = done.stderr.splitlines()
    assert all(said.startswith("mix: ") for said in progress) and "missing keys" in line


def test_a_start_that_is_missing_is_found_before_the_capture(
    write_recipe: Callable[..., Path], tmp_path: Path, fails: Fails
) -> None:
    line = fails(2, "capture", write_recipe(), "drafts.small.init_from=/nowhere")
    assert line == "error: drafts.small.init_from: /nowhere: no such draft folder"
    assert not list(tmp_path.rglob("capture-*"))


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("target.device=gpu7", "target.device: gpu7: must be auto, cpu"),
        ("target.device=cuda:64", "target.device: cuda:64: there are"),
        ("target.adapter=/nowhere", "target.adapter: /nowhere"),
        ("drafts={s: {family: small, from_model: /nowhere}}", "drafts.s.from_model: /nowhere: no such folder"),
        (
            "drafts={s: {family: small, layers: 2, lora: {rank: 2, targets: [zzz]}}}",
            r"s.lora: targets \['zzz'\]",
        ),
        ("drafts={s: {family: small, layers: 2, init_from: /nowhere}}", "s.init_from: /nowhere: no such draft folder"),
        (
            "drafts={s: {family: small, layers: 2, init_from: /usr}}",
            r"drafts.s.init_from /usr: no draft folder \(no draftforge.json\)",
        ),
    ],
)
def test_settings_that_do_not_fit_are_named(override: str, says: str, trained: Trained, fails: Fails) -> None:
    line = fails(2, "train", trained.recipe, f"workdir={trained.work}", override)
    assert re.search(says, line), line
    assert not half_written(trained.work)


@pytest.mark.parametrize(
    ("draft", "says"),
    [
        ("{family: eagle3, aux_layers: [1, 2, 9]}", "drafts.s.aux_layers = [1, 2, 9]: must be between 1 and 4"),
        (
            "{family: eagle3, aux_layers: [0, 1, 2]}",
            "drafts.s: aux_layers [0, 1, 2]: must be different layers in ascending order, from 1 on",
        ),
        ("{family: small, layers: 9}", "drafts.s.layers 9: must be between 2 and the target's 4"),
        ("{family: small, layers: [0, 9]}", "drafts.s.layers [0, 9]: must start at 0 and end at 3"),
    ],
)
def test_layers_that_do_not_exist_are_found_out_before_anything_is_written(
    draft: str, says: str, trained: Trained, write_recipe: Callable[..., Path], tmp_path: Path, fails: Fails
) -> None:
    before = set(trained.work.glob("train-*"))
    assert says in fails(2, "train", trained.recipe, f"workdir={trained.work}", f"drafts={{s: {draft}}}")
    assert set(trained.work.glob("train-*")) == before
    (tmp_path / "fresh").mkdir()
    fresh = f"workdir={tmp_path / 'fresh' / 'work'}"
    assert says in fails(2, "capture", write_recipe(), fresh, f"drafts={{s: {draft}}}")
    assert not list((tmp_path / "fresh" / "work").glob("capture-*"))


def test_a_start_of_another_shape_is_refused_by_name(trained: Trained, fails: Fails) -> None:
    start = one(trained.work, "train-*/checkpoints/step-000004")
    draft = f"drafts={{s: {{family: small, layers: 3, init_from: {start}}}}}"
    line = fails(2, "train", trained.recipe, f"workdir={trained.work}", draft)
    assert f"error: drafts.s.layers = 3: init_from {start} has 2 layers" in line


DEMO = Path(__file__).parents[2] / "configs" / "demo.yaml"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["", "--draft", "none"], "PROMPT: is empty"),
        (["--draft", "none"], "PROMPT: is missing; give the user's message, or --messages FILE"),
        (["hi", "--draft", "none", "--system", " "], "--system ' ': is empty; must hold text"),
        (["--messages", "missing.json", "--draft", "none"], "--messages missing.json: no such file"),
        (["--messages", str(DEMO), "--draft", "none"], "demo.yaml: not JSON"),
        (["a\udcffb", "--draft", "none"], "argument .*: must be UTF-8 text"),
        (["word " * 500, "--draft", "none"], "must fit the context of 512"),
        (["hi", "--draft", "smal"], r"--draft smal: must be a draft folder or one of .*\(small\)"),
        (["hi", "--draft", "none", "--rule", "gredy"], "rule: 'gredy': must be one of greedy, token, block, onehot"),
        (["hi", "--draft", "lookup", "--rule", "block", "-t", "1"], "rule: 'block': reads the draft's probabilities"),
        (
            ["hi", "--cascade", "lookup", "--draft", "none"],
            "--cascade lookup: helps a small draft, not --draft none",
        ),
        (["hi", "--draft", "none", "-k", "0"], "--draft-tokens.*(greater than or equal to 1|not in the range 1)"),
        (["hi", "--draft", "none", "-t", "inf"], "--temperature"),
        (["hi", "--draft", "none", "--seed", "9" * 30], "--seed"),
        (["hi", "--drft", "none"], "No such option: --drft"),
    ],
)
def test_what_cannot_be_generated_is_one_line(
    options: list[str], says: str, trained_once: Trained, fails: Fails
) -> None:
    assert re.search(says, fails(2, "generate", trained_once.recipe, *options))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ([], "must be a list of messages with role and content, or a request that holds them"),
        ({"prompt": "x"}, "must be a list of messages"),
        ([{"role": "user"}], "messages"),
        ([{"content": "x"}], r"messages\[0\]: role is missing"),
        (
            [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}],
            "--system 'z': the messages begin with",
        ),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "request.json"),
    ],
)
def test_messages_that_cannot_be_asked_are_one_line(
    body: object, says: str, trained_once: Trained, tmp_path: Path, fails: Fails
) -> None:
    storage.write_json(tmp_path / "request.json", body)
    options = ["--messages", tmp_path / "request.json", "--draft", "none", "--system", "z"]
    assert re.search(says, fails(2, "generate", trained_once.recipe, *options))


def test_a_draft_of_another_tokenizer_neither_drafts_nor_leaves(trained: Trained, tmp_path: Path, fails: Fails) -> None:
    foreign = tmp_path / "foreign"
    shutil.copytree(one(trained.work, "train-*/checkpoints/step-000004"), foreign)
    meta = storage.read_json(foreign / "draftforge.json")
    storage.write_json(foreign / "draftforge.json", meta | {"tokenizer_digest": "0" * 64})
    here = f"workdir={trained.work}"
    assert "another tokenizer" in fails(2, "generate", trained.recipe, "hi", here, "--draft", foreign)
    assert "another tokenizer" in fails(2, "export", trained.recipe, tmp_path / "out", here, "--draft", foreign)
    assert not (tmp_path / "out").exists() and not half_written(tmp_path)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("onnx", "format onnx: must be one of hf, vllm, sglang, speculators, medusa, gguf"),
        ("speculators", "format speculators: takes no small draft; small drafts go as hf, vllm, sglang"),
    ],
)
def test_formats_that_do_not_suit_the_draft(
    name: str, says: str, trained: Trained, tmp_path: Path, fails: Fails
) -> None:
    options = [f"workdir={trained.work}", "--draft", "small", "--format", name]
    assert says in fails(2, "export", trained.recipe, tmp_path / "out", *options)
    assert not (tmp_path / "out").exists() and not half_written(tmp_path)


def test_work_folders_that_cannot_be_used(trained: Trained, tmp_path: Path, fails: Fails) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    assert "is a file, must be a folder" in fails(2, "mix", trained.recipe, f"workdir={file}")
    assert "not a directory" in fails(2, "mix", trained.recipe, f"workdir={file}/below")
    assert file.read_text() == "mine"
    assert "holds no mlflow.db" in fails(2, "fetch", tmp_path / "o", "--target", "f" * 64, "--workdir", tmp_path / "no")
    assert not (tmp_path / "no").exists() and not (tmp_path / "o").exists()
    space = Workspace(load_recipe(trained.recipe, [f"workdir={trained.work}"]))
    with space.alone():
        for verb in ("mix", "capture", "train", "score", "promote"):
            assert "locked by another run" in fails(4, verb, trained.recipe, f"workdir={trained.work}")


def test_what_a_killed_run_left_goes_with_the_next(trained: Trained) -> None:
    left = [trained.work / ".mix-0123.01234567.tmp", one(trained.work, "train-*") / "checkpoints/.step-1.01234567.tmp"]
    for folder in left:
        folder.mkdir()
    kept = trained.work / ".mine.tmp"
    kept.mkdir()
    assert code_of("mix", trained.recipe, f"workdir={trained.work}") == 0
    assert kept.is_dir() and not any(folder.exists() for folder in left)


def full(kind: str) -> Callable[..., None]:
    def write(*_: object, **__: object) -> None:
        if kind == "safetensors":
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        raise OSError(errno.ENOSPC, "Error writing bytes to file. Detail: No space left on device")

    return write


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "module", "name", "kind"),
    [
        ("mix", mix.pq, "write_table", "os"),
        ("capture", os, "fsync", "os"),
        ("train", checkpoints, "save_file", "safetensors"),
        ("train", tensors, "save_file", "safetensors"),
    ],
)
def test_a_full_disk_leaves_nothing_half_written(
    verb: str, module: Any, name: str, kind: str, trained: Trained, fails: Fails
) -> None:
    eagle = "{family: eagle3, draft_vocabulary: 200, steps: 2, warmup_steps: 1, tokens_per_step: 256}"
    call = (verb, trained.recipe, f"workdir={trained.work}", f"drafts={{draft: {eagle}}}")
    for folder in trained.work.glob(f"{verb}-*"):
        shutil.rmtree(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, full(kind))
        assert "no space left on the device" in fails(3, *call)
    assert not half_written(trained.work)
    assert code_of(*call) == 0


def test_sigterm_unwinds_and_the_same_command_goes_on(
    write_recipe: Callable[..., Path], tmp_path: Path, fails: Fails
) -> None:
    recipe = write_recipe(drafts={"small": SMALL})
    plain, calls = manifest.write_shard, []

    def interrupted(*args: Any) -> Path:
        calls.append(args)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "write_shard", interrupted)
        assert "stopped by SIGTERM" in fails(143, "capture", recipe)
    assert not half_written(tmp_path)
    assert len(list((tmp_path / "work").glob("capture-*/shards/*.json"))) == 2  # what is being written is finished
    assert code_of("capture", recipe) == 0


def test_sigterm_in_the_last_save_stops_after_it(write_recipe: Callable[..., Path], fails: Fails) -> None:
    recipe = write_recipe(drafts={"small": SMALL})
    plain = Trainer.save

    def save(run: Trainer) -> None:
        if run.state.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        plain(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "save", save)
        patch.setattr(draft_scorer, "score_draft", lambda *_: pytest.fail("went on to the next stage"))
        assert "stopped by SIGTERM" in fails(143, "score", recipe)


def test_a_loss_that_is_not_finite_ends_with_3(trained: Trained, fails: Fails) -> None:
    unfinished_training(trained.work)
    state = one(trained.work, "train-*/checkpoints/*2/trainer/state.safetensors")
    weights = load_file(state)
    name = next(name for name in weights if name.startswith("weights/"))
    weights[name].fill_(float("nan"))
    save_file(weights, state)
    line = fails(3, "train", trained.recipe, f"workdir={trained.work}")
    assert "step 3, rank 0: the loss is not finite; nothing was updated" in line
    assert not list(trained.work.glob("train-*/checkpoints/step-000004"))


def test_passwords_are_not_shown(
    write_recipe: Callable[..., Path], tmp_path: Path, fails: Fails, capsys: pytest.CaptureFixture[str]
) -> None:
    store, command = "http://me:s3cr@et@127.0.0.1:9", ["/bin/true", "--api-key", "s3cr-et@"]
    recipe = write_recipe(registry={"tracking_uri": store}, promotion={"command": command})
    assert "http://***@127.0.0.1:9: MLflow cannot be reached" in fails(3, "distill", recipe)
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["owner.json"]
    assert code_of("recipe", "show", recipe) == 0
    shown = capsys.readouterr().out
    assert "http://***@127.0.0.1:9" in shown and "s3cr" not in shown and "et@" not in shown
    assert "s3cr" not in json.dumps(load_recipe(recipe).public())


def test_a_source_of_another_kind_is_told_so_before_the_mix_is_read(
    write_recipe: Callable[..., Path], tmp_path: Path, fails: Fails
) -> None:
    log = tmp_path / "proxy.jsonl"
    log.write_text(json.dumps({"request": {"messages": [{"role": "user", "content": "hello"}]}}) + "\n")
    recipe = write_recipe(mix={"sources": [{"kind": "vllm", "path": str(log), "domain": "d"}]})
    line = fails(2, "mix", recipe)
    assert f"mix.sources[0].kind vllm: {log} looks like kind openai" in line
    assert not list((tmp_path / "work").glob("*mix-*"))
