"""`generate --cascade`: a small draft with something smaller that drafts for it."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import heads
import pytest
from drafted import add_idle_layer

from draftforge.errors import InputError
from draftforge.pipeline import generate
from draftforge.pipeline.cli_options import GenerateOptions
from draftforge.pipeline.generate import GeneratedAnswer
from draftforge.pipeline.workspace import Workspace
from draftforge.recipe import load_recipe
from draftforge.specdec.drafts.eagle import EagleConfig, EagleDraft
from draftforge.specdec.formats import write_draft

Say = Callable[..., GeneratedAnswer]


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory, recipe_in: Callable[..., Path]) -> Workspace:
    folder = tmp_path_factory.mktemp("helped")
    trees = {"grown": {"kind": "static", "widths": [2, 1]}}
    return Workspace(load_recipe(recipe_in(folder, score={"draft_tokens": [4], "trees": trees})))


@pytest.fixture(scope="module")
def longer(tmp_path_factory: pytest.TempPathFactory, tiny_target_folder: Path) -> Path:
    """A draft that says what the target says: its layers, and one that does nothing."""
    folder = tmp_path_factory.mktemp("longer") / "longer"
    add_idle_layer(tiny_target_folder, folder)
    return folder


@pytest.fixture(scope="module")
def say(space: Workspace, longer: Path) -> Say:
    def speak(cascade: str | None, temperature: float = 0.0, draft: object = longer, **options: Any) -> GeneratedAnswer:
        asked = {"max_new_tokens": 17, "seed": 7, "cascade": cascade, "temperature": temperature, **options}
        return generate.answer_prompt(space, "hi there", GenerateOptions(draft=str(draft), **asked))

    return speak


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_rounds_are_those_of_the_draft_alone(say: Say, temperature: float, tiny_target_folder: Path) -> None:
    alone = say(None, temperature).generation
    assert alone.tokens == say(None, temperature, draft="none").generation.tokens or temperature
    saved: list[int] = []
    for helper in ("lookup", str(tiny_target_folder)):
        helped = say(helper, temperature)
        assert (helped.generation.tokens, helped.generation.rounds) == (alone.tokens, alone.rounds)
        passes = re.fullmatch(rf".* helped by {helper} \((\d+) of its passes instead of (\d+)\)", helped.draft)
        assert passes is not None
        saved.append(int(passes[2]) - int(passes[1]))
    assert saved[0] >= 0 and saved[1] > 0


def test_what_cannot_be_helped_or_help_is_refused(say: Say, space: Workspace, tmp_path: Path) -> None:
    sizes = {**heads.LAYER, "hidden_size": space.target.hidden_size, "vocab_size": space.target.vocab_size}
    write_draft(EagleDraft(EagleConfig(**sizes), False), tmp_path, "vllm")
    with pytest.raises(InputError, match="--cascade lookup: helps a small draft, not one of family eagle"):
        say("lookup", draft=tmp_path)
    with pytest.raises(InputError, match=f"--cascade {tmp_path}: must be a small draft or lookup, not eagle"):
        say(str(tmp_path))
    with pytest.raises(InputError, match="--cascade lookup: helps a small draft, not --draft none"):
        say("lookup", draft="none")
    with pytest.raises(InputError, match="--cascade lookup: helps to draft chains, not --tree grown"):
        say("lookup", tree="grown")
    with pytest.raises(InputError, match="--cascade nobody: must be a draft folder or one of the recipe's drafts"):
        say("nobody")


def test_a_helper_that_is_not_smaller_is_refused(say: Say, longer: Path, tiny_target_folder: Path) -> None:
    for helper in (longer, tiny_target_folder):
        with pytest.raises(InputError, match=f"--cascade {helper}: has [0-9,]+ parameters; .* must have fewer"):
            say(str(helper), draft=tiny_target_folder)


def test_drafts_that_were_made_for_shorter_texts_are_refused(
    say: Say, tiny_target_folder: Path, tmp_path: Path
) -> None:
    short = tmp_path / "short"
    shutil.copytree(tiny_target_folder, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 20}))
    asks = ((None, short), ("lookup", short), (str(short), tiny_target_folder))
    for cascade, draft in asks:
        with pytest.raises(InputError, match=f"{short}: max_position_embeddings 20: must hold the longest text here"):
            say(cascade, draft=draft)
