"""The command line: what is parsed reaches the verbs, help is quick and complete, errors are one line."""

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import draftforge.pipeline
from draftforge import __version__, cli
from draftforge.errors import InputError, LockedError, TrainingDivergedError

STAGES = ["distill", "mix", "capture", "train", "score"]
REGISTRY = ["promote", "rollback", "fetch", "registry", "retrain", "watch"]
VERBS = [*STAGES, *REGISTRY, "skip-layers", "export", "generate", "bench", "doctor"]
VERBS += ["inspect-mix", "report", "metrics"]
Calls = list[tuple[str, tuple[Any, ...], dict[str, Any]]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What reached the verbs; recipes are loaded as ("recipe", path, overrides)."""
    made: Calls = []

    def record(name: str) -> Callable[..., int]:
        def verb(*args: Any, **options: Any) -> int:
            made.append((name, args, options))
            return 0

        return verb

    verbs = SimpleNamespace(**{name.replace("-", "_"): record(name) for name in VERBS})
    monkeypatch.setattr(draftforge.pipeline, "verbs", verbs, raising=False)
    monkeypatch.setattr("draftforge.pipeline.doctor.doctor", record("doctor"))
    monkeypatch.setattr(cli, "_load", lambda path, overrides: ("recipe", str(path), list(overrides or [])))
    return made


def run(*args: str) -> int:
    """The exit code of a command line."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(args))
    return int(ended.value.code or 0)


def test_stages_get_the_recipe_with_its_overrides(calls: Calls) -> None:
    assert run("capture", "r.yaml", "seed=1", "--answers-to", "kept") == 0
    assert calls.pop() == ("capture", (("recipe", "r.yaml", ["seed=1"]), Path("kept"), None, []), {})
    assert run("capture", "r.yaml", "--part", "2/5") == 0
    assert calls.pop() == ("capture", (("recipe", "r.yaml", []), None, "2/5", []), {})
    assert run("capture", "r.yaml", "--join", "a", "--join", "b") == 0
    assert calls.pop() == ("capture", (("recipe", "r.yaml", []), None, None, [Path("a"), Path("b")]), {})
    for verb in ("distill", "mix", "promote", "rollback"):
        assert run(verb, "r.yaml", "seed=1", "drafts.a.steps=-3") == 0
        assert calls.pop() == (verb, (("recipe", "r.yaml", ["seed=1", "drafts.a.steps=-3"]),), {})
    for verb in ("train", "score"):
        assert run(verb, "r.yaml", "--draft", "small", "seed=1") == 0
        assert calls.pop() == (verb, (("recipe", "r.yaml", ["seed=1"]), "small"), {})


def test_using_a_draft(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe: tuple[str, str, list[str]] = ("recipe", "r.yaml", [])
    assert run("export", "r.yaml", "out", "--draft", "eagle") == 0
    assert calls.pop() == ("export", (recipe, Path("out"), "eagle", None, None), {})
    assert run("export", "r.yaml", "out", "--format", "speculators", "--target-id", "owner/model") == 0
    assert calls.pop() == ("export", (recipe, Path("out"), None, "speculators", "owner/model"), {})
    assert (
        run("generate", "r.yaml", "Hello you", "-k", "3", "-n", "9", "-t", "0.8", "--rule", "block", "--seed", "4") == 0
    )
    options = {
        "draft": None,
        "rule": "block",
        "draft_tokens": 3,
        "tree": None,
        "helped_by": None,
        "max_new_tokens": 9,
        "temperature": 0.8,
        "seed": 4,
    }
    assert calls.pop() == ("generate", (recipe, "Hello you"), options)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(read=lambda: "from a pipe"))
    assert run("generate", "r.yaml", "-") == 0
    assert calls.pop()[1] == (recipe, "from a pipe")
    for verb, *asked in (("score",), ("generate", "Hello you"), ("bench",)):
        assert run(verb, "r.yaml", *asked, "seed=1", "--draft-device", "cuda:1") == 0
        assert calls.pop()[1][0] == ("recipe", "r.yaml", ["seed=1", "score.draft_device=cuda:1"])
    assert run("fetch", "out", "--target", "owner/model", "--workdir", "w") == 0
    store = {"model": None, "tracking_uri": None}
    options = {"target": "owner/model", **store, "alias": "champion", "layout": None, "target_id": None}
    assert calls.pop() == ("fetch", (Path("out"),), {**options, "workdir": Path("w")})
    assert run("fetch", "out", "--target", "abc", "--format", "gguf", "--target-id", "a/b", "--alias", "previous") == 0
    given = {"target": "abc", "layout": "gguf", "target_id": "a/b", "alias": "previous", "workdir": None}
    assert calls.pop() == ("fetch", (Path("out"),), {**store, **given})
    listed = {"target": None, "decisions": False, "as_json": False, "workdir": None}
    assert run("registry") == 0
    assert calls.pop() == ("registry", (None,), {**store, **listed})
    assert run("registry", "r.yaml", "seed=1", "--json", "--decisions", "--target", "ab") == 0
    in_full = {"target": "ab", "decisions": True, "as_json": True}
    assert calls.pop() == ("registry", (("recipe", "r.yaml", ["seed=1"]),), {**store, **listed, **in_full})


def test_reports(calls: Calls) -> None:
    assert run("report", "r.yaml", "seed=1", "--out", "page.html") == 0
    assert calls.pop() == ("report", (("recipe", "r.yaml", ["seed=1"]), Path("page.html")), {})


def test_metrics(calls: Calls) -> None:
    recipe: tuple[str, str, list[str]] = ("recipe", "r.yaml", [])
    assert run("metrics", "r.yaml") == 0
    assert calls.pop() == ("metrics", (recipe, None, None, [], [], 0.0, 0.05, False), {})
    asked = ("--served", "a", "--served", "b", "--since", "c", "--since", "d", "--margin", "0.1", "--fail-on-parting")
    assert run("metrics", "r.yaml", "--out", "m.prom", "--interval", "60", *asked) == 0
    assert calls.pop() == ("metrics", (recipe, Path("m.prom"), None, ["a", "b"], ["c", "d"], 60.0, 0.1, True), {})
    assert run("metrics", "r.yaml", "--listen", "127.0.0.1:9109") == 0
    assert calls.pop()[1][2] == "127.0.0.1:9109"


def test_retraining(calls: Calls) -> None:
    recipe: tuple[str, str, list[str]] = ("recipe", "r.yaml", ["seed=1"])
    assert run("retrain", "r.yaml", "seed=1") == 0
    assert calls.pop() == ("retrain", (recipe,), {"dry_run": False})
    assert run("retrain", "r.yaml", "seed=1", "--dry-run") == 0
    assert calls.pop() == ("retrain", (recipe,), {"dry_run": True})
    usual = {"every": "6h", "jitter": None, "once": False, "port": None, "address": "127.0.0.1"}
    assert run("watch", "r.yaml", "seed=1") == 0
    assert calls.pop() == ("watch", (recipe, "r.yaml", ["seed=1"]), usual)
    asked = ("--every", "1d", "--jitter", "5m", "--webhook", "8770", "--bind", "0.0.0.0", "--once")
    assert run("watch", "r.yaml", *asked) == 0
    given = {"every": "1d", "jitter": "5m", "once": True, "port": 8770, "address": "0.0.0.0"}
    assert calls.pop() == ("watch", (("recipe", "r.yaml", []), "r.yaml", []), given)
    assert run("watch", "r.yaml", "--webhook", "65536") == 2


def test_skipping_layers(calls: Calls) -> None:
    recipe: tuple[str, str, list[str]] = ("recipe", "r.yaml", ["seed=1"])
    usual = {"domain": None, "draft_tokens": None, "tries": 200, "conversations": 16, "seed": 0, "out": None}
    assert run("skip-layers", "r.yaml", "seed=1") == 0
    assert calls.pop() == ("skip-layers", (recipe,), usual)
    asked = ("--domain", "code", "-k", "4", "--tries", "9", "--conversations", "2", "--seed", "7", "--out", "f.json")
    assert run("skip-layers", "r.yaml", "seed=1", *asked) == 0
    given = {"domain": "code", "draft_tokens": 4, "tries": 9, "conversations": 2, "seed": 7, "out": Path("f.json")}
    assert calls.pop() == ("skip-layers", (recipe,), given)
    assert run("skip-layers", "r.yaml", "--tries", "0") == 2


def test_benchmarks(calls: Calls) -> None:
    assert run("bench", "r.yaml", "seed=1", "--prompts", "a.jsonl", "--prompts", "b.jsonl") == 0
    options: dict[str, Any] = {
        "prompts": [Path("a.jsonl"), Path("b.jsonl")],
        "drafts": [],
        "trees": [],
        "helped_by": None,
        "draft_tokens": "2,4,8",
        "batch_sizes": "1,4,16",
        "max_new_tokens": 256,
        "max_prompts": None,
        "temperature": 0.0,
        "rule": None,
        "repeats": 3,
        "seed": 0,
        "out": None,
        "fresh": False,
    }
    assert calls.pop() == ("bench", (("recipe", "r.yaml", ["seed=1"]),), options)
    given = "--draft small --draft ./x --tree wide --helped-by lookup -k 3 -b 1,64 -n 9 --max-prompts 5 -t 0.5"
    given += " --rule block --repeats 2"
    assert run("bench", "r.yaml", "--prompts", "a.jsonl", *given.split(), "--seed", "4", "--out", "o", "--fresh") == 0
    assert calls.pop()[2] == options | {
        "prompts": [Path("a.jsonl")],
        "drafts": ["small", "./x"],
        "trees": ["wide"],
        "helped_by": "lookup",
        "draft_tokens": "3",
        "batch_sizes": "1,64",
        "max_new_tokens": 9,
        "max_prompts": 5,
        "temperature": 0.5,
        "rule": "block",
        "repeats": 2,
        "seed": 4,
        "out": Path("o"),
        "fresh": True,
    }


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
    monkeypatch.setattr(cli, "_load", lambda path, overrides: SimpleNamespace(public=dict))
    assert run(*shlex.split(example.partition(" >")[0])) == 0
    assert len(calls) == (0 if example.startswith("recipe") else 1)


def test_every_verb_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    shown = capsys.readouterr().out
    assert not [verb for verb in [*VERBS, "recipe"] if f" {verb} " not in shown]


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from draftforge import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'mlflow', 'datasets', 'pydantic', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    assert time.monotonic() - start < 3  # 0.2 s on an idle machine


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


def test_debug_shows_where(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr(cli, "_load", fail)
    for args, debug in ((["--debug"], ""), ([], "1")):
        monkeypatch.setenv("DRAFTFORGE_DEBUG", debug)
        with pytest.raises(KeyError):
            cli.main([*args, "distill", "r.yaml"])


def test_other_ranks_say_who_they_are(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise InputError("bad")

    monkeypatch.setattr(cli, "_load", fail)
    monkeypatch.setenv("RANK", "1")
    assert run("distill", "r.yaml") == 2
    assert capsys.readouterr().err == "error (rank 1): bad\n"


def test_wrong_usage_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("distil") == 2
    assert "distill" in capsys.readouterr().err
    assert run("generate", "r.yaml", "x", "-k", "0") == 2
    assert run("fetch", "out") == 2
    capsys.readouterr()
    assert run("generate", "r.yaml") == 2
    assert capsys.readouterr().err == "error: Missing argument 'PROMPT'; see `draftforge generate --help`\n"
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
