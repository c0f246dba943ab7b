"""Values for the shell's completion: recipe files, `section.key=value` with the values that a key takes, names of
drafts, trees, domains and registered versions.

Nothing heavy is imported: keys come from a table in the user's cache that the first completion writes, names from the
recipe's YAML, the mix's manifest and the registry's SQLite file. What cannot be read offers nothing, as a completion
has no place for an error.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

from typer import Context

from .. import __version__

FORMATS = ("hf", "vllm", "sglang", "speculators", "medusa", "gguf")
ALIASES = ("champion", "candidate", "previous")
METHODS = ("lookup", "suffix", "lookahead", "jacobi")
"""Ways of drafting without a draft; a test compares all three with what the verbs take."""
_MOST_FILES, _MOST_BYTES, _LONGEST_HELP = (
    200,
    200_000,
    72,
)  # Typer breaks longer ones into lines, which shells take for further values
_PLAIN, _MARKS = re.compile(r"(?:~/)?[\w./@:=+,-]+"), re.compile(r"[\x00-\x1f\x7f\\$`\"']")
"""Values that no shell takes for more than a word, and marks that help may not have: zsh evaluates both."""
Items = list[tuple[str, str]]
"""Offered values, each with its help."""
Complete = Callable[[Context, str], Items]


class Key(NamedTuple):
    """A key of recipes; `*` in it stands for a name that recipes give, or for an index."""

    key: str
    values: list[str]
    """What it takes, where that is one of a few."""
    help: str
    when: list[list[str]]
    """Other keys with the values that they must have, as `drafts.*.family` must be small for keys of small drafts."""


def _safe(complete: Complete) -> Complete:
    """A completion that offers nothing where it fails, and nothing that a shell may take for a command."""

    @wraps(complete)
    def offered(ctx: Context, incomplete: str) -> Items:
        try:
            items = complete(ctx, incomplete)
            return [(value, _MARKS.sub("", text)) for value, text in items if _PLAIN.fullmatch(value)]
        except Exception:
            return []

    return offered


def one_of(*values: str) -> Complete:
    """Complete one of some fixed values."""

    def offered(ctx: Context, incomplete: str) -> Items:
        return [(value, "") for value in values if value.startswith(incomplete)]

    return offered


@_safe
def recipes(ctx: Context, incomplete: str) -> Items:
    """Complete a YAML file; of a folder, the files in it and in folders right under it."""
    typed = Path(incomplete).expanduser()
    folder, start = (typed, "") if incomplete.endswith("/") or not incomplete else (typed.parent, typed.name)
    shown = incomplete[: len(incomplete) - len(start)]
    found: list[str] = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith(start) and not path.name.startswith("."):
            inside = [path] if path.is_file() else sorted([*path.glob("*.y*ml"), *path.glob("*/*.y*ml")])
            found += [f"{shown}{one.relative_to(folder)}" for one in inside if one.suffix in (".yaml", ".yml")]
    return [(name, "") for name in found[:_MOST_FILES]]


@_safe
def overrides(ctx: Context, incomplete: str) -> Items:
    """Complete `section.key=value`: a key of the recipe, then what it takes."""
    recipe = _recipe(ctx)
    known = {key: (values, text) for key, values, text in _keys_of(recipe)}
    # bash takes `key=value` for three words, the others for one.
    before = [str(word) for word in ctx.params.get("overrides") or []]
    if before[-1:] == ["="]:
        return [(value, "") for value in known.get(before[-2], ([], ""))[0]]
    if not incomplete and before[-1:] and before[-1] in known:
        return [(value, "") for value in known[before[-1]][0]]
    key, equals, _ = incomplete.partition("=")
    if equals:
        return [(f"{key}={value}", "") for value in known.get(key, ([], ""))[0]]
    return [(f"{name}=", text) for name, (_, text) in known.items() if name.startswith(incomplete)]


@_safe
def drafts(ctx: Context, incomplete: str) -> Items:
    """Complete the name of a draft of the recipe."""
    return [(name, str(draft.get("family", ""))) for name, draft in _recipe(ctx)["drafts"].items()]


@_safe
def methods(ctx: Context, incomplete: str) -> Items:
    """Complete the name of a draft of the recipe, or of a way of drafting that needs none."""
    return [*drafts(ctx, incomplete), *((name, "without a draft") for name in METHODS)]


@_safe
def trees(ctx: Context, incomplete: str) -> Items:
    """Complete the name of a tree of the recipe."""
    return [(name, str(tree.get("kind", ""))) for name, tree in _recipe(ctx)["score"]["trees"].items()]


@_safe
def domains(ctx: Context, incomplete: str) -> Items:
    """Complete a domain: those of the newest mix in the work folder, else those that the recipe names."""
    recipe = _recipe(ctx)
    workdir = Path(recipe.get("workdir") or f"runs/{recipe['name']}")
    for manifest in sorted(workdir.glob("mix-*/manifest.json"), key=lambda path: path.stat().st_mtime, reverse=True):
        by_split = json.loads(manifest.read_text())["conversations"]
        return [(name, "") for name in sorted({domain for split in by_split.values() for domain in split})]
    return [(str(source["domain"]), "") for source in recipe["mix"]["sources"] if source.get("domain")]


@_safe
def pushed(ctx: Context, incomplete: str) -> Items:
    """Complete what `push` takes: a recipe, or a version of the registry's SQLite file."""
    return [*recipes(ctx, incomplete), *_registered(ctx, incomplete)]


@_safe
def _registered(ctx: Context, incomplete: str) -> Items:
    import sqlite3

    from ..registry.store_address import DATABASE_NAME

    workdir = ctx.params.get("workdir")
    stores = [Path(workdir)] if workdir else [Path("runs"), *sorted(Path("runs").glob("*/"))]
    found: dict[str, str] = {}
    for store in (folder / DATABASE_NAME for folder in stores):
        if not store.is_file():
            continue
        with sqlite3.connect(f"{store.resolve().as_uri()}?mode=ro", uri=True) as database:
            for name, alias in database.execute("SELECT name, alias FROM registered_model_aliases"):
                found[f"models:/{name}@{alias}"] = str(store.parent)
            for name, number in database.execute("SELECT name, version FROM model_versions"):
                found[f"models:/{name}/{number}"] = str(store.parent)
    return list(found.items())


def _recipe(ctx: Context) -> dict[str, Any]:
    """The recipe on the command line as YAML, unchecked; empty: it cannot be read."""
    import yaml

    # Behind an option that lacks its value the words before it are not parsed yet.
    words = (word for word in ctx.args if word.endswith((".yaml", ".yml")))
    try:
        place = Path(ctx.params.get("recipe") or next(words))
        if not place.is_file() or place.stat().st_size > _MOST_BYTES:  # a pipe would hold the shell
            return {}
        found = yaml.safe_load(place.read_text(encoding="utf-8"))
    except (StopIteration, OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _keys_of(recipe: dict[str, Any]) -> Iterator[tuple[str, list[str], str]]:
    """Keys that a recipe has, their values and help, with the names that it gives in place of `*`."""
    found: dict[str, tuple[list[str], str]] = {}
    for row in table():
        for key, names in _named(row.key.split("."), recipe):
            wanted = ((_at(recipe, _filled(other, names)), value) for other, value in row.when)
            if all(is_value in (None, value) for is_value, value in wanted):
                values, text = found.get(key, ([], row.help))
                found[key] = [*dict.fromkeys([*values, *row.values])], text
    return ((key, values, text) for key, (values, text) in sorted(found.items()))


def _named(parts: list[str], at: Any, before: tuple[str, ...] = (), names: tuple[str, ...] = ()) -> Iterator[Any]:
    """Each way to fill in the `*` of a key, as the key and the names."""
    for place, part in enumerate(parts):
        if part == "*":
            inside = at if isinstance(at, dict) else range(len(at)) if isinstance(at, list) else ()
            for name in inside:
                yield from _named(parts[place + 1 :], at[name], (*before, str(name)), (*names, str(name)))
            return
        before, at = (*before, part), at.get(part) if isinstance(at, dict) else None
    yield ".".join(before), names


def _filled(key: str, names: tuple[str, ...]) -> str:
    rest = iter(names)
    return ".".join(next(rest) if part == "*" else part for part in key.split("."))


def _at(recipe: Any, key: str) -> Any:
    for part in key.split("."):
        recipe = (
            recipe.get(part) if isinstance(recipe, dict) else recipe[int(part)] if isinstance(recipe, list) else None
        )
    return recipe


def table() -> list[Key]:
    """All keys of recipes, from the user's cache; written anew where a file that they come from has changed."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = home / "draftforge" / f"recipe-keys-{__version__}.json"
    try:
        known = json.loads(cache.read_text())
        if all(Path(path).stat().st_mtime_ns == changed for path, changed in known["sources"].items()):
            return [Key(*row) for row in known["keys"]]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    # Making the models takes seconds; what they were made of is remembered with the keys.
    import sys

    from .. import recipe, storage

    root = recipe.schema()
    keys = list(_leaves(root, root, "", []))
    ours = [str(module.__file__) for name, module in sys.modules.items() if name.startswith("draftforge.")]
    sources = {path: Path(path).stat().st_mtime_ns for path in ours if Path(path).is_file()}
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        storage.write_json(cache, {"sources": sources, "keys": keys})
    except OSError:  # a home that is read-only
        pass
    return keys


def _leaves(node: Any, root: dict[str, Any], key: str, when: list[list[str]], text: str = "") -> Iterator[Key]:
    """Keys below a node of the JSON schema: plain values, and lists of them."""
    from ..recipe import branches

    text = text or str(node.get("description", ""))
    for branch in branches(node, root):
        # Named fields; those with one value only tell a union's members apart.
        fields = branch.get("properties", {})
        constants = [[_join(key, name), one["const"]] for name, one in fields.items() if "const" in one]
        for name, one in fields.items():
            own = [] if "const" in one else constants
            yield from _leaves(one, root, _join(key, name), [*when, *own], str(one.get("description", "")))
        # Mappings of any name and lists of sections, to be filled in.
        inner = [*branch.get("patternProperties", {}).values(), branch.get("additionalProperties"), branch.get("items")]
        for one in inner:
            if isinstance(one, dict) and any("properties" in below for below in branches(one, root)):
                yield from _leaves(one, root, _join(key, "*"), when)
        if not fields and branch.get("type") != "null" and not any(isinstance(one, dict) for one in inner[:-1]):
            values = [str(value) for value in branch.get("enum", [branch["const"]] if "const" in branch else [])]
            values += ["true", "false"] if branch.get("type") == "boolean" else []
            yield Key(key, values, shorten(text, _LONGEST_HELP, placeholder="…"), when)


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name
