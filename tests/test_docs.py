"""The pages: links lead somewhere, recipes load, command lines and names of the Python API are some that there are."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import draftforge
from draftforge import cli
from draftforge.recipe import load_recipe

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LONG = {ROOT / "docs" / name for name in ("experiments.md", "logs.md")}
"""Lab book, and the audit of every field of a logged request."""
REST: dict[str, Any] = {
    "name": "rest",
    "target": {"model": "./target"},
    "mix": {"sources": [{"kind": "prompts", "path": "log.txt"}]},
    "drafts": {"small": {"family": "small", "layers": 2}},
}
"""What a piece of a recipe leaves out."""


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """Fenced blocks: page, text."""
    for page in PAGES:
        for text in re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.S | re.M):
            yield page.name, text


def recipes() -> Iterator[Any]:
    for page, text in blocks("yaml"):
        raw = yaml.safe_load(text)
        if isinstance(raw, list) and "kind" in raw[0]:
            raw = {"mix": {"sources": raw}}
        if isinstance(raw, dict) and "litellm_settings" not in raw:
            yield pytest.param(raw, id=f"{page}: {' '.join(raw)}")


def commands() -> Iterator[Any]:
    """Lines of blocks that call draftforge, by its name or by its module, without what a shell or a reader reads."""
    for page, text in blocks("(?:bash)?"):
        for line in text.replace("\\\n", " ").splitlines():
            said = re.match(r"(?:\$ |\.venv/bin/)?draftforge ([a-z].*)|.*-m draftforge\.cli (.*)", line.strip())
            if said and "[" not in (words := said[1] or said[2]):
                yield pytest.param(shlex.split(words, comments=True), id=f"{page}: {words[:60]}")


def anchors(page: Path) -> set[str]:
    text = page.read_text()
    named = {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in re.findall(r"^#+ (.*)$", text, re.M)}
    return named | set(re.findall(r'<a id="([^"]+)">', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    lost = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        place, _, heading = link.partition("#")
        found = (page.parent / place).resolve() if place else page
        there = place.startswith("http") or (found.exists() and (not heading or heading in anchors(found)))
        lost += [] if there else [link]
    assert not lost


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_no_conflict_of_a_merge_is_left(page: Path) -> None:
    assert not re.findall(r"^(?:<<<<<<<|=======|>>>>>>>).*", page.read_text(), re.M)


@pytest.mark.parametrize("raw", recipes())
def test_every_recipe_loads(raw: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    whole = {**REST, **{key: {**REST.get(key, {}), **value} if key == "mix" else value for key, value in raw.items()}}
    path.write_text(yaml.safe_dump(whole))
    assert load_recipe(path).name


@pytest.mark.parametrize("words", commands())
def test_every_command_line_is_one_that_there_is(words: list[str]) -> None:
    command = typer.main.get_command(cli.app)
    while hasattr(command, "commands"):
        assert words[0] in command.commands, f"no such command: {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    command.make_context(command.name or "", list(words))


def test_every_name_of_the_python_api_is_one_that_there_is() -> None:
    made = {"df": draftforge, "target": draftforge.Target, "draft": draftforge.Draft, "recipe": draftforge.Recipe}
    used = {use for _, text in blocks("python") for use in re.findall(rf"\b({'|'.join(made)})\.(\w+)\(", text)}
    assert not [f"{of}.{name}" for of, name in used if not hasattr(made[of], name)]
    assert {("df", "distill"), ("target", "stream"), ("recipe", "save")} <= used


@pytest.mark.parametrize("page", sorted(set((ROOT / "docs").glob("*.md")) - LONG), ids=lambda page: page.name)
def test_each_page_begins_with_its_task_and_commands_and_is_read_at_one_sitting(page: Path) -> None:
    lines = page.read_text().splitlines()
    opening = " ".join(lines[2 : lines.index("", 2)])
    assert lines[0].startswith("# ") and re.match(r"For .+?: .*?\.", opening) and len(lines) <= 200
    verbs = set(re.findall(r"`draftforge ([a-z-]+)", opening))
    command = typer.main.get_command(cli.app)
    assert hasattr(command, "commands") and verbs <= set(command.commands)
    assert verbs or page.name in {"glossary.md", "python.md", "parity.md"}


def test_readme_is_read_in_five_minutes_and_the_glossary_has_each_word_once() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
    lines = re.findall(r"^\| (.*?) \| (.+) \|$", (ROOT / "docs" / "glossary.md").read_text(), re.M)
    words = [word for names, _ in lines if names != "word" for word in names.split(", ")]
    assert len(words) == len(set(words)) >= 40
    assert {"target", "draft", "round", "K", "tau", "captured position", "domain", "champion"} <= set(words)
