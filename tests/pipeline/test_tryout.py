"""`draftforge try`: a draft is trained once, the next call finds it, and the last lines say what was seen."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftforge.errors import InputError, MissingFileError
from draftforge.eval.draft_configs import DraftConfig
from draftforge.pipeline import tryout
from draftforge.pipeline.cli_options import TARGET
from draftforge.pipeline.generate import GeneratedAnswer
from draftforge.progress import Console
from draftforge.recipe import load_recipe
from draftforge.specdec.answers import Answer
from draftforge.specdec.requests import Generation, Round
from draftforge.specdec.stored_draft import StoredDraft


def test_prompts_come_from_arguments_a_file_or_the_package(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo\n")
    assert tryout.read_prompts(["a", "b"], None) == ["a", "b"]
    assert tryout.read_prompts([], file) == ["one", "two"]
    assert tryout.read_prompts([], None) == list(tryout.SHIPPED)


def test_prompts_that_are_none_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("\n")
    for given, path, message in (
        (["a"], file, "is given beside prompts"),
        ([], file, "is empty"),
        ([" "], None, "PROMPT: is empty"),
    ):
        with pytest.raises(InputError, match=message):
            tryout.read_prompts(given, path)
    file.write_bytes("caf\u00e9".encode("latin-1"))
    with pytest.raises(InputError, match=r"--prompts .*prompts\.txt: is not UTF-8 text"):
        tryout.read_prompts([], file)


def test_brackets_of_a_prompt_are_no_markup() -> None:
    console = Console(width=120, record=True)
    console.print(tryout._table([r"\[/x] [red]a"], [[]]))
    assert r"\[/x] [red]a" in console.export_text()


def test_the_default_target_is_fetched_by_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingFileError, match="make target"):
        tryout.try_out([], None, TARGET)


def test_tau_is_pooled_and_leaves_out_the_first_token() -> None:
    def answer(emitted: list[int]) -> Answer:
        rounds = [Round(drafted=4, reached=4, accepted=count - 1, emitted=count) for count in emitted]
        return Answer("", Generation(tokens=[0] * (1 + sum(emitted)), rounds=rounds), "greedy")

    assert tryout.tau_of([answer([3, 1]), answer([5])]) == 9 / 3
    assert tryout.tau_of([answer([])]) == 1.0


def answers_of(plain: float, each: float, tau: int, rounds: int = 6) -> dict[str, GeneratedAnswer]:
    """Answers whose plain passes and rounds take these seconds, after a prompt's pass; one pass is an outlier."""

    def answer(name: str, seconds: float, emitted: int) -> GeneratedAnswer:
        seen = [Round(drafted=4, reached=4, accepted=emitted - 1, emitted=emitted)] * (0 if name == "none" else rounds)
        arrivals = [9.0 + seconds * n + (50.0 if n == rounds else 0.0) for n in range(rounds + 1)]
        tokens = [0] * (1 + emitted * rounds)
        made = Generation(tokens=tokens, rounds=seen, arrivals=arrivals, seconds=arrivals[-1])
        return GeneratedAnswer("", made, "greedy", name, DraftConfig(4))

    return {"none": answer("none", plain, 1), "lookup": answer("lookup", each, 1), "tiny": answer("tiny", each, tau)}


@pytest.mark.parametrize(("each", "tau", "speed"), [(0.05, 2, 1.6), (0.1, 2, 0.8), (0.02, 2, 2.0), (0.02, 1, 1.0)])
def test_no_speed_above_tau_is_claimed_and_drafts_that_do_not_pay_are_said(
    each: float, tau: int, speed: float, capsys: pytest.CaptureFixture[str]
) -> None:
    row = answers_of(0.04, each, tau)
    assert tryout.speedup_of([row], "tiny") == pytest.approx(speed)
    tryout._headline(Console(width=400), [[row], [row]], 60)
    said = capsys.readouterr().out
    assert ("on your prompts neither pays, at best " in said) == (speed <= 1)
    assert ("on your prompts the draft is the better one, 2.00" in said) == (speed > 1)


def test_the_recipe_is_a_whole_one() -> None:
    assert list(load_recipe(tryout.RECIPE).drafts) == ["tiny"]


@pytest.mark.slow
def test_a_first_call_trains_and_the_next_one_finds_the_draft(
    tiny_target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a target of a few thousand weights, by the package's recipe cut to two steps."""
    recipe = yaml.safe_load(tryout.RECIPE.read_text())
    lines = [{"id": str(i), "messages": [{"role": "user", "content": f"word {i} and {i * i}"}]} for i in range(40)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe["target"] = {"model": "", "dtype": "float32"}
    sources = [{"kind": "messages", "path": "log.jsonl", "domain": "support"}]
    recipe["mix"] = {"sources": sources, "selection_share": 0.2, "holdout_share": 0.2}
    recipe["capture"]["max_new_tokens"] = 8
    recipe["drafts"]["tiny"] |= {"steps": 2, "warmup_steps": 1, "tokens_per_step": 64, "draft_vocabulary": 64}
    (tmp_path / "try.yaml").write_text(yaml.safe_dump(recipe))
    monkeypatch.setattr(tryout, "RECIPE", tmp_path / "try.yaml")
    monkeypatch.setattr(tryout, "_SHORT", 6)
    monkeypatch.setattr(tryout, "_LONG", 6)
    monkeypatch.chdir(tmp_path)
    seen, inner = [], tryout._answers

    def spy(*args: Any) -> Any:
        seen.append(args[2])
        return inner(*args)

    monkeypatch.setattr(tryout, "_answers", spy)
    loaded, load = [], StoredDraft.load

    def counted(path: Path, *rest: Any, **named: Any) -> StoredDraft:
        loaded.append(path)
        return load(path, *rest, **named)

    monkeypatch.setattr(StoredDraft, "load", counted)
    for trained in (False, True):
        tryout.try_out(["hello", "two words"], None, str(tiny_target_folder))
        shown = capsys.readouterr()
        assert ("train tiny: done" in shown.err) == trained
        assert "tiny, rule greedy, K=4: tau" in shown.out
        assert shown.out.count("x ") + shown.out.count("x\n") >= 6  # two speeds in each of three rows
        assert "The first of your prompts\nhello\n" in shown.out
        assert "a tiny draft gives" in shown.out.splitlines()[-2]
        # Every method has answered before times are taken.
        assert len(seen) == 1 + tryout._QUESTIONS + 2 and seen[0] == seen[1]
        seen.clear()
        assert len(loaded) == 1  # for all answers
        loaded.clear()
