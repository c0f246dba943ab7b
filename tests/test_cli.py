"""The command line: what is parsed reaches the verbs, help is quick and complete, errors are one line."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftforge import __version__, cli
from draftforge.errors import InputError, LockedError, TrainingDivergedError
from draftforge.pipeline.cli_options import (
    TARGET,
    BenchOptions,
    DraftDoctorOptions,
    GenerateOptions,
    MetricsOptions,
    PushOptions,
    SkipLayersOptions,
    StoreOptions,
    WatchOptions,
)
from draftforge.pipeline.doctor import gpu_driver

PLACES = {
    **dict.fromkeys(["distill", "mix", "capture", "train", "score", "promote"], "distill"),
    **{verb: verb for verb in ["retrain", "watch", "fetch", "export", "generate", "bench", "doctor", "report", "push"]},
    **{
        "registry": "registry_listing",
        "rollback": "promotion",
        "skip-layers": "layer_skip",
        "inspect-mix": "mix_report",
        "metrics": "monitoring",
    },
    **{"init": "init_recipe", "plan": "plan"},
}
"""The module of `draftforge.pipeline` that holds each verb's function."""
Calls = list[tuple[str, tuple[Any, ...]]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What reached the verbs; recipes are loaded as ("recipe", path, overrides)."""
    made: Calls = []

    def record(name: str) -> Callable[..., int | None]:
        def verb(*args: Any) -> int | None:
            made.append((name, args))
            return None if name in ("distill", "promote") else 0  # what they decided: nothing

        return verb

    for verb, module in PLACES.items():
        monkeypatch.setattr(f"draftforge.pipeline.{module}.{verb.replace('-', '_')}", record(verb))
    monkeypatch.setattr("draftforge.pipeline.registry_listing.require_store", lambda _: None)
    monkeypatch.setattr("draftforge.pipeline.retrain.dry_run", record("dry run"))
    monkeypatch.setattr("draftforge.pipeline.tryout.try_out", record("try"))
    monkeypatch.setattr("draftforge.pipeline.draft_doctor.examine_draft", record("examine"))
    monkeypatch.setattr("draftforge.pipeline.distill.open_workspace", lambda recipe: recipe)

    def load(path: Path, overrides: list[str] | None, draft_device: str | None = None) -> object:
        return "recipe", str(path), [*(overrides or []), *([draft_device] if draft_device else [])]

    monkeypatch.setattr(cli, "_load", load)
    return made


def run(*args: str) -> int:
    """The exit code of a command line."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(args))
    return int(ended.value.code or 0)


RECIPE = ("recipe", "r.yaml", ["seed=1"])
PUSHED = PushOptions(workdir=Path("w"), base_model="a/b", license="mit", private=True, dry_run=True)


@pytest.mark.parametrize(
    ("line", "verb", "args"),
    [
        ("capture r.yaml seed=1 --answers-to kept", "capture", (RECIPE, Path("kept"), None, [])),
        ("capture r.yaml seed=1 --part 2/5", "capture", (RECIPE, None, "2/5", [])),
        ("capture r.yaml seed=1 --join a --join b", "capture", (RECIPE, None, None, [Path("a"), Path("b")])),
        ("distill r.yaml seed=1", "distill", (RECIPE,)),
        ("plan r.yaml seed=1", "plan", (RECIPE, "h100", [1, 8])),
        ("plan r.yaml seed=1 --gpu h200 --gpus 2", "plan", (RECIPE, "h200", [2])),
        ("init --log l --target t", "init", (Path("l"), "t", Path("recipe.yaml"))),
        ("mix r.yaml seed=1", "mix", (RECIPE,)),
        ("promote r.yaml seed=1", "promote", (RECIPE,)),
        ("rollback r.yaml seed=1", "rollback", (RECIPE, False, "")),
        ("rollback r.yaml seed=1 --undo --why x", "rollback", (RECIPE, True, "x")),
        ("train r.yaml --draft small seed=1", "train", (RECIPE, "small")),
        ("score r.yaml --draft small seed=1", "score", (RECIPE, "small")),
        ("score r.yaml --draft-device cuda:1", "score", (("recipe", "r.yaml", ["cuda:1"]), None)),
        ("export r.yaml out seed=1 --draft eagle", "export", (RECIPE, Path("out"), "eagle", None, None, None)),
        ("export r.yaml out seed=1 --policy vllm", "export", (RECIPE, Path("out"), None, None, None, "vllm")),
        (
            "export r.yaml out seed=1 --format hf --target-id a/b",
            "export",
            (RECIPE, Path("out"), None, "hf", "a/b", None),
        ),
        ("report r.yaml seed=1 --out page.html", "report", (RECIPE, Path("page.html"))),
        ("inspect-mix r.yaml seed=1 --out page.html", "inspect-mix", (RECIPE, Path("page.html"), False)),
        ("push r.yaml me/it", "push", ("r.yaml", "me/it", PushOptions())),
        (
            "push models:/x@champion me/it --workdir w --base-model a/b --license mit --private --dry-run",
            "push",
            ("models:/x@champion", "me/it", PUSHED),
        ),
        ("retrain r.yaml seed=1", "retrain", (RECIPE,)),
        ("retrain r.yaml seed=1 --dry-run", "dry run", (RECIPE,)),
        ("watch r.yaml seed=1", "watch", (RECIPE, ["r.yaml", "seed=1"], WatchOptions())),
        (
            "watch r.yaml seed=1 --every 1d --jitter 5m --webhook 8770 --bind 0.0.0.0 --once",
            "watch",
            (
                RECIPE,
                ["r.yaml", "seed=1"],
                WatchOptions(every="1d", jitter="5m", once=True, webhook=8770, bind="0.0.0.0"),
            ),
        ),
        (
            "fetch out --target a/b --workdir w",
            "fetch",
            (Path("out"), "a/b", StoreOptions(workdir=Path("w")), "champion", None, None),
        ),
        (
            "fetch out --target abc --format gguf --target-id a/b --alias previous --model m --tracking-uri u",
            "fetch",
            (Path("out"), "abc", StoreOptions(model="m", tracking_uri="u"), "previous", "gguf", "a/b"),
        ),
        ("registry", "registry", (None, StoreOptions(), None, False, False)),
        ("try", "try", ([], None, TARGET)),
        ("doctor --workdir w --json", "doctor", (Path("w"), None, True)),
        (
            "doctor --draft d --target t --served m.txt --answers a.jsonl --json",
            "examine",
            (DraftDoctorOptions(draft=Path("d"), target="t", served="m.txt", answers=Path("a.jsonl")), True),
        ),
        ("try one two --target t", "try", (["one", "two"], None, "t")),
        ("try --prompts p.txt", "try", ([], Path("p.txt"), TARGET)),
        (
            "registry r.yaml seed=1 --json --decisions --target ab",
            "registry",
            (RECIPE, StoreOptions(), "ab", True, True),
        ),
        ("skip-layers r.yaml seed=1", "skip-layers", (RECIPE, SkipLayersOptions())),
        (
            "skip-layers r.yaml seed=1 --domain code -k 4 --tries 9 --conversations 2 --seed 7 --out f.json",
            "skip-layers",
            (
                RECIPE,
                SkipLayersOptions(domain="code", draft_tokens=4, tries=9, conversations=2, seed=7, out=Path("f.json")),
            ),
        ),
        ("generate r.yaml hello seed=1", "generate", (RECIPE, "hello", GenerateOptions())),
        (
            "generate r.yaml seed=1 --messages m.json --system s",
            "generate",
            (RECIPE, None, GenerateOptions(messages=Path("m.json"), system="s")),
        ),
        (
            "generate r.yaml hello seed=1 --draft d -k 3 -n 9 -t 0.8 --rule block --seed 4 --tree t --cascade lookup",
            "generate",
            (
                RECIPE,
                "hello",
                GenerateOptions(
                    draft="d",
                    draft_tokens=3,
                    max_new_tokens=9,
                    temperature=0.8,
                    rule="block",
                    seed=4,
                    tree="t",
                    cascade="lookup",
                ),
            ),
        ),
        ("bench r.yaml seed=1", "bench", (RECIPE, BenchOptions())),
        (
            "bench r.yaml seed=1 --prompts a --prompts b --draft small --draft ./x --tree wide --cascade lookup -k 3 "
            "-b 1,64 -n 9 --max-prompts 5 -t 0.5 --rule block --repeats 2 --seed 4 --out o --fresh",
            "bench",
            (
                RECIPE,
                BenchOptions(
                    prompts=[Path("a"), Path("b")],
                    drafts=["small", "./x"],
                    trees=["wide"],
                    cascade="lookup",
                    draft_tokens=(3,),
                    batch_sizes=(1, 64),
                    max_new_tokens=9,
                    max_prompts=5,
                    temperature=0.5,
                    rule="block",
                    repeats=2,
                    seed=4,
                    out=Path("o"),
                    fresh=True,
                ),
            ),
        ),
        ("metrics r.yaml seed=1", "metrics", (RECIPE, MetricsOptions())),
        (
            "metrics r.yaml seed=1 --served a --served b --since c --since d --margin 0.1 --fail-on-mismatch "
            "--interval 60 --out m --listen h:1",
            "metrics",
            (
                RECIPE,
                MetricsOptions(
                    served=["a", "b"],
                    since=["c", "d"],
                    margin=0.1,
                    fail_on_mismatch=True,
                    interval_seconds=60.0,
                    out=Path("m"),
                    listen="h:1",
                ),
            ),
        ),
    ],
)
def test_arguments_reach_the_verbs(calls: Calls, line: str, verb: str, args: tuple[Any, ...]) -> None:
    assert run(*line.split()) == 0
    assert calls == [(verb, args)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("watch r.yaml --webhook 65536", "Invalid value for '--webhook'"),
        ("skip-layers r.yaml --tries 0", "Invalid value for '--tries'"),
        ("bench r.yaml -k 2,a", "2,a: must be whole numbers with commas between, such as 2,4,8"),
        ("bench r.yaml -b 1.5", "1.5: must be whole numbers"),
        ("generate r.yaml hi --helped-by lookup", "--helped-by: the option's name is --cascade"),
        ("bench r.yaml --helped-by=lookup", "--helped-by: the option's name is --cascade"),
        ("metrics r.yaml --fail-on-parting", "--fail-on-parting: the option's name is --fail-on-mismatch"),
    ],
)
def test_options_that_are_refused(calls: Calls, line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*line.split()) == 2
    assert not calls and message in capsys.readouterr().err


def examples() -> list[str]:
    commands = [*cli.app.registered_commands, *cli.recipe_app.registered_commands]
    found = [
        re.findall(r"(?:draftforge|draftforge\.cli) (.*)", command.callback.__doc__ or "")
        for command in commands
        if command.callback
    ]
    assert all(found), "every verb has an example in its help"
    return [line for lines in found for line in lines]


@pytest.mark.parametrize("example", examples())
def test_examples_in_the_help_are_command_lines(calls: Calls, example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_load", lambda *_: SimpleNamespace(public=dict))
    assert run(*shlex.split(example.partition(" >")[0])) == 0
    assert len(calls) == (0 if example.startswith("recipe") else 1)


def test_every_verb_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    shown = capsys.readouterr().out
    assert not [verb for verb in [*PLACES, "recipe", "try"] if f" {verb} " not in shown]


DEMO = Path(__file__).parents[1] / "configs/demo.yaml"
HEAVY = {"torch", "transformers", "mlflow", "datasets", "pyarrow", "pandas", "scipy"}


LOOKS = [
    (["--help"], 0, HEAVY | {"pydantic", "numpy"}),
    (["recipe", "schema"], 0, HEAVY | {"numpy"}),
    (["distill", "missing.yaml"], 2, HEAVY | {"numpy"}),
    (["distill", str(DEMO), "drafts.eagle3.stepz=3"], 2, HEAVY | {"numpy"}),
    (["registry", "--workdir", "missing"], 2, HEAVY),
    (["registry", str(DEMO), "workdir=missing"], 2, HEAVY),
    (["fetch", "out", "--target", "x", "--workdir", "missing"], 2, HEAVY),
    (["plan", str(DEMO), "--gpu", "b300"], 2, HEAVY),
    (["init", "--log", "missing", "--target", "x"], 2, HEAVY - {"pyarrow"}),
    (["init", "--log", str(DEMO), "--target", ""], 2, HEAVY - {"pyarrow"}),
    (["init", "--log", "missing", "--target", "x", "--out", str(DEMO)], 2, HEAVY - {"pyarrow"}),
    (["doctor"], None, HEAVY - ({"torch"} if gpu_driver() else set())),  # 0 or 1, as this machine is
]
LOOK = f"""
import os, sys
from draftforge import cli
for arguments, code, heavy in {LOOKS!r}:
    if not os.fork():
        try: cli.main(arguments)
        except SystemExit as end: ended = end.code or 0
        found = heavy & set(sys.modules)
        if found or code not in (None, ended): print(arguments, ended, found, file=sys.stderr)
        os._exit(bool(found) or code not in (None, ended))
    assert not os.wait()[1], arguments
"""


def test_help_mistakes_and_looks_import_nothing_heavy() -> None:
    """Each in a process of its own, as `draftforge` starts it."""
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_registry_with_a_store_imports_mlflow_and_no_model_library(tmp_path: Path) -> None:
    program = (
        "import gc, sys; from draftforge import cli; from draftforge.registry.connect import open_tracking\n"
        "from draftforge.registry.settings import RegistrySettings; from pathlib import Path\n"
        f"open_tracking(RegistrySettings(), Path({str(tmp_path)!r}))\n"
        f"try: cli.main(['registry', '--workdir', {str(tmp_path)!r}])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "ours = {f'draftforge.{name}' for name in ('recipe', 'eval.score', 'registry.pyfunc_model')}\n"
        "heavy = {'torch', 'transformers', 'datasets', 'mlflow.pyfunc', 'scipy.special', *ours} & set(sys.modules)\n"
        "assert not heavy and 'mlflow' in sys.modules and gc.isenabled(), heavy"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert "no target has a draft here" in done.stdout
    # As a process of its own it ends at once, with all that it printed.
    words = [sys.executable, "-m", "draftforge.cli", "registry", "--workdir", str(tmp_path), "--json"]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == {"targets": [], "drafts": []}


def test_importing_the_package_imports_nothing_heavy() -> None:
    heavy = HEAVY | {"pydantic", "numpy", "typer", "yaml"}
    program = (
        "import sys, draftforge as df\n"
        f"assert not {heavy!r} & set(sys.modules), {heavy!r} & set(sys.modules)\n"
        "df.DraftforgeError, df.Recipe\n"
        f"assert not {HEAVY!r} & set(sys.modules), {HEAVY!r} & set(sys.modules)\n"
        "assert not [name for name in df.__all__ if name not in dir(df)]"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_version_and_module_entry() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "draftforge.cli", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"draftforge {__version__}\n"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (InputError("log.jsonl:3: not JSON"), 2, "error: log.jsonl:3: not JSON\n"),
        (TrainingDivergedError("step 3: loss is nan"), 3, "error: step 3: loss is nan\n"),
        (LockedError("runs: locked"), 4, "error: runs: locked\n"),
        (KeyboardInterrupt(), 130, None),
        (MemoryError(), 1, "error: MemoryError (out of memory: lower batch sizes"),
        (KeyError("x"), 1, "error: KeyError: 'x' (unexpected; DRAFTFORGE_DEBUG=1"),
        (RuntimeError("Symlink loop from '/a/b'"), 2, "error: '/a/b': is a link that leads to itself"),
        (RuntimeError("two\nlines"), 1, "error: RuntimeError: two lines (unexpected"),
    ],
)
def test_errors_are_one_line_and_an_exit_code(
    calls: Calls,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    line: str | None,
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(cli, "_load", fail)
    assert run("distill", "r.yaml") == code
    shown = capsys.readouterr()
    assert shown.out == ""
    if line is not None:
        assert shown.err.startswith(line) and shown.err.count("\n") == 1


def test_under_torchrun_the_code_is_said(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whose own exit code says less (tests/pipeline/test_ranks.py); by the first rank."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for rank, said in (("0", "exit code 2; torchrun ends with 1 whatever it is\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        assert run("rollback", "r.yaml", "--wrong") == 2
        assert capsys.readouterr().err.partition("--help`\n")[2] == said
        assert run("rollback", "r.yaml") == 0
        assert capsys.readouterr().err == ""


def test_debug_shows_where_and_no_secret(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise InputError("bad") from ValueError("http://me:hunter2@host\x1b[2J")

    monkeypatch.setattr(cli, "_load", fail)
    for args, debug in ((["--debug"], ""), ([], "1"), ([], "abc")):
        monkeypatch.setenv("DRAFTFORGE_DEBUG", debug)
        assert run(*args, "distill", "r.yaml") == 2
        shown = capsys.readouterr().err
        assert "in fail\n" in shown and shown.endswith("InputError: bad\n")
        assert "http://***@host\\x1b[2J\n" in shown


def test_other_ranks_say_who_they_are(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise InputError("bad")

    monkeypatch.setattr(cli, "_load", fail)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert run("distill", "r.yaml") == 2
    assert capsys.readouterr().err == "error (rank 1): bad\n"


@pytest.mark.parametrize(("local", "lines"), [("0", 1), ("1", 0)])
def test_what_all_ranks_of_a_host_fail_at_alike_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], local: str, lines: int
) -> None:
    """A recipe or an option, before the ranks have met; the first rank of each host says it."""
    (tmp_path / "r.yaml").write_text("name: r\nwrong: 1\n")
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("LOCAL_RANK", local)
    for arguments in (["distill", str(tmp_path / "r.yaml")], ["distill", str(tmp_path / "none.yaml")], ["distil"]):
        assert run(*arguments) == 2
        assert capsys.readouterr().err.count("error (rank 9): ") == lines


def test_wrong_usage_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("distil") == 2
    assert "distill" in capsys.readouterr().err
    assert run("generate", "r.yaml", "x", "-k", "0") == 2
    assert run("fetch", "out") == 2
    capsys.readouterr()
    assert run("fetch") == 2
    assert capsys.readouterr().err == "error: Missing argument 'OUT'; see `draftforge fetch --help`\n"
    assert run() == 2
    assert "Usage" in "".join(capsys.readouterr())


def test_recipe_verbs_print_results_to_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "{name: r, target: {model: a/b}, mix: {sources: [{kind: prompts, path: p}]},"
        " drafts: {s: {family: small, layers: 2}}}"
    )
    assert run("recipe", "show", str(recipe), "drafts.s.steps=77") == 0
    assert "    steps: 77\n" in capsys.readouterr().out
    assert run("recipe", "schema") == 0
    assert '"RetrainSettings"' in capsys.readouterr().out
    assert run("recipe", "show", str(recipe), "drafts.s.stpes=77") == 2
    said = capsys.readouterr().err
    assert said == "error: r.yaml: drafts.s.stpes: unknown key; the nearest known one is drafts.s.steps\n"
    assert run("recipe", "show", str(tmp_path / "none.yaml")) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'none.yaml'}: no such file\n"


def test_shell_completion_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"_DRAFTFORGE_COMPLETE": "complete_bash", "COMP_WORDS": "draftforge dis", "COMP_CWORD": "1"}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    done = subprocess.run([sys.executable, "-m", "draftforge.cli"], capture_output=True, text=True, check=False)
    assert "distill" in done.stdout.split()


def test_an_argument_that_is_no_text_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["fetch", "out", "--target", "\udcff"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: argument '\\udcff': must be UTF-8 text\n"
