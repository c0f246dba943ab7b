"""Completion through the shells' own protocol: what bash, zsh and fish are offered, with nothing heavy loaded."""

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from draftforge.cli import main
from draftforge.pipeline import completion
from draftforge.recipe import Recipe, schema
from draftforge.registry.versions import CANDIDATE, CHAMPION, PREVIOUS
from draftforge.specdec.formats.layouts import FAMILIES
from draftforge.specdec.proposers.training_free import TRAINING_FREE

RECIPE = {
    "name": "tiny",
    "workdir": "work",
    "target": {"model": "owner/model"},
    "mix": {"sources": [{"kind": "turns", "path": "a.jsonl", "domain": "support"}]},
    "drafts": {"head": {"family": "eagle3"}, "whole": {"family": "small"}},
    "score": {"trees": {"wide": {"kind": "static", "widths": [2, 1]}}},
}
HEAVY = {"torch", "transformers", "mlflow", "numpy", "pyarrow", "pandas", "draftforge.recipe"}


def asking(shell: str, *words: str) -> dict[str, str]:
    """What a shell puts into the environment to ask for the last word."""
    line = ["draftforge", *words]
    protocol = (
        {"COMP_WORDS": "\n".join(line), "COMP_CWORD": str(len(line) - 1)}
        if shell == "bash"
        else {"_TYPER_COMPLETE_ARGS": " ".join(line), "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    )
    return protocol | {"_DRAFTFORGE_COMPLETE": f"complete_{shell}"}


@pytest.fixture
def ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[str]]:
    """`ask("bash", "distill", "r.yaml", "see")`: what is offered for the last word, in a folder with a recipe."""
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(RECIPE))
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "other.yml").write_text("{}")
    (tmp_path / "recipes" / "log.jsonl").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def asked(shell: str, *words: str) -> list[str]:
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
            for name, value in asking(shell, *words).items():
                patch.setenv(name, value)
            main([])
        assert not ended.value.code
        printed = capsys.readouterr()
        assert not printed.err
        return [line for line in printed.out.splitlines() if line]

    return asked


def test_nothing_heavy_is_loaded_for_it(ask: Callable[..., list[str]], tmp_path: Path) -> None:
    completion.table()  # made once, by a completion before
    program = (
        "import atexit, sys; from draftforge.cli import main\n"
        f"atexit.register(lambda: print(sorted({HEAVY!r} & set(sys.modules)), file=sys.stderr))\n"
        "main([])"
    )
    env = os.environ | asking("bash", "distill", "r.yaml", "see")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert (done.stdout, done.stderr) == ("seed=\n", "[]\n")


def test_bash_is_offered_keys_and_values(ask: Callable[..., list[str]]) -> None:
    assert ask("bash", "distill", "r.yaml", "see") == ["seed="]
    keys = ask("bash", "distill", "r.yaml", "drafts.")
    assert {"drafts.head.aux_layers=", "drafts.whole.from_model="} <= set(keys)
    assert {"drafts.head.from_model=", "drafts.whole.aux_layers="}.isdisjoint(keys)
    # bash takes the = for a word of its own.
    families = sorted(ask("bash", "distill", "r.yaml", "drafts.head.family", "=", ""))
    assert families == ["dflash", "eagle", "eagle3", "medusa", "small"]
    assert ask("bash", "distill", "r.yaml", "capture.backend.kind", "=") == ["transformers", "vllm"]
    assert ask("bash", "distill", "r.yaml", "seed", "=", "1", "workdir_access", "=", "o") == ["owner"]
    assert ask("bash", "distill", "r.yaml", "target.shard", "=", "t") == ["true"]


def test_other_shells_get_key_and_value_in_one_word(ask: Callable[..., list[str]]) -> None:
    assert ask("fish", "distill", "r.yaml", "workdir_access=g") == ["workdir_access=group"]
    (line,) = ask("fish", "distill", "r.yaml", "capture.top_")
    assert line.startswith("capture.top_k=\t") and len(line) > 20
    assert '"capture.backend.kind=vllm"' in ask("zsh", "distill", "r.yaml", "capture.backend.kind=v")[0]


def test_names_are_those_of_recipe_mix_and_registry(ask: Callable[..., list[str]], tmp_path: Path) -> None:
    assert ask("bash", "train", "r.yaml", "--draft", "") == ["head", "whole"]
    assert ask("bash", "generate", "r.yaml", "--draft", "loo") == ["lookup", "lookahead"]
    assert ask("bash", "generate", "r.yaml", "--tree", "") == ["wide"]
    assert ask("bash", "inspect-mix", "r.yaml", "--domain", "") == ["support"]
    assert ask("bash", "fetch", "out", "--format", "s") == ["sglang", "speculators"]
    assert ask("bash", "fetch", "out", "--alias", "c") == ["champion", "candidate"]
    assert ask("bash", "plan", "r.yaml", "--gpu", "h") == ["h100", "h200"]
    # Recipes, those of a folder with its name.
    assert ask("bash", "distill", "r") == ["r.yaml", "recipes/other.yml"]
    assert ask("bash", "distill", "missing") == []
    # Once there are a mix and a registry.
    (tmp_path / "work" / "mix-1").mkdir(parents=True)
    sizes = {"train": {"code": 3, "chat": 1}, "holdout": {"code": 1}}
    (tmp_path / "work" / "mix-1" / "manifest.json").write_text(json.dumps({"conversations": sizes}))
    assert ask("bash", "skip-layers", "r.yaml", "--domain", "") == ["chat", "code"]
    with sqlite3.connect(tmp_path / "work" / "mlflow.db") as database:
        database.execute("CREATE TABLE registered_model_aliases (alias, version, name)")
        database.execute("CREATE TABLE model_versions (name, version)")
        database.execute("INSERT INTO registered_model_aliases VALUES ('champion', 1, 'draftforge-ab')")
        database.execute("INSERT INTO model_versions VALUES ('draftforge-ab', 1)")
    assert ask("bash", "push", "--workdir", "work", "mod") == [
        "models:/draftforge-ab@champion",
        "models:/draftforge-ab/1",
    ]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_nothing_that_a_shell_may_run_is_offered(ask: Callable[..., list[str]], tmp_path: Path, shell: str) -> None:
    """zsh evaluates what it is offered, and a backslash undoes the escape of a dollar sign."""
    for command in (r"\$(touch PWNED)", "`touch PWNED`", "a;b", "a b", "a\nb"):
        (tmp_path / "recipes" / f"{command.replace('/', '')}.yaml").write_text("{}")
        recipe = RECIPE | {"drafts": {command: {"family": "eagle3"}, "head": {"family": command}}}
        (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
        for words in (["recipes/"], ["r.yaml", "drafts."], ["r.yaml", "--draft", ""]):
            offered = "\n".join(ask(shell, "train", *words))
            assert not {"$", "`", "\\"} & set(offered.replace("\\\\:", ":")), offered
            assert not offered or "other.yml" in offered or "head" in offered


def test_a_broken_recipe_offers_no_names(ask: Callable[..., list[str]], tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("drafts: [")
    assert ask("bash", "train", "r.yaml", "--draft", "") == []
    assert ask("bash", "distill", "r.yaml", "workdir_a") == ["workdir_access="]


def test_a_pipe_holds_no_shell(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "r.yaml")
    (tmp_path / "large.yaml").write_text("name: x\n" + "#" * 200_000)
    for name in ("r.yaml", "large.yaml"):
        ctx: Any = SimpleNamespace(params={"recipe": tmp_path / name}, args=[])
        assert completion._recipe(ctx) == {}


def test_fixed_values_are_those_of_the_verbs() -> None:
    assert {CHAMPION, CANDIDATE, PREVIOUS} == set(completion.ALIASES)
    assert set(completion.METHODS) == TRAINING_FREE.keys()
    assert set(completion.FORMATS) == FAMILIES.keys()


def test_every_key_of_a_recipe_is_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keys = {row.key for row in completion.table()}
    sections = {name for name, node in schema()["properties"].items() if {"$ref", "default"} & node.keys()}
    assert {key.split(".")[0] for key in keys} == set(Recipe.model_fields) and sections
    for section in ("registry", "gate", "retrain", "promotion"):
        kind = Recipe.model_fields[section].annotation
        assert kind is not None
        assert {key for key in keys if key.startswith(f"{section}.")} == {
            f"{section}.{name}" for name in kind.model_fields
        }
    # A file that a key comes from changes: the table is made anew.
    cache = next((tmp_path / "draftforge").iterdir())
    stored = json.loads(cache.read_text())
    assert len(stored["sources"]) > 10
    cache.write_text(json.dumps({**stored, "keys": []}))
    assert not completion.table()
    changed = {path: at - 1 for path, at in stored["sources"].items()}
    cache.write_text(json.dumps({"sources": changed, "keys": []}))
    assert {row.key for row in completion.table()} == keys
