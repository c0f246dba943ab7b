"""The package as it is shipped, and the rules its files keep: floors, imports, sizes, no machine's paths."""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import draftforge

ROOT = Path(__file__).resolve().parent.parent
FLOORS = ["cli", "api", "pipeline", "recipe", "registry", "train", "eval", "data", "specdec", "distributed", "ground"]
GROUND = {"__init__", "errors", "fingerprint", "storage", "progress", "key_forms", "masking", "http_replies"}
NOT_PACKAGES = {"configs", "scripts", "tests", "docs", "runs", "build", "dist", "mlruns"}
MAX_LINES = 600
MACHINE_PATH = re.compile(r"(?<![\w.:/*{}$])/(?:home|root|work|tmp|opt|mnt|srv|Users|content|workspace)(?:/|\b)")


def project_files(*suffixes: str) -> Iterator[Path]:
    """The project's own text files; what tools, runs and environments leave behind is not among them."""
    for folder, names, files in os.walk(ROOT):
        names[:] = [name for name in names if not is_left_behind(name)]
        for name in files:
            if name.endswith(suffixes or ("",)):
                yield Path(folder, name)


def is_left_behind(name: str) -> bool:
    return (
        (name.startswith(".") and name != ".ci")
        or name in {"__pycache__", "runs", "build", "dist", "mlruns"}
        or (name.endswith(".egg-info"))
    )


def package_folders() -> list[str]:
    found = {path.parent.relative_to(ROOT) for path in project_files("__init__.py")}
    return sorted(".".join(("draftforge", *folder.parts)) for folder in found)


def sources() -> Iterator[Path]:
    for path in project_files(".py"):
        if path.relative_to(ROOT).parts[0] not in NOT_PACKAGES:
            yield path


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floor_of(module: str) -> int:
    top = module.split(".")[0]
    return FLOORS.index("ground" if top in GROUND or not top else top)


class Import(NamedTuple):
    path: Path
    line: int
    module: str
    """Dotted, relative to the package; absolute imports keep their name behind a slash."""
    at_load: bool


@cache
def imports_of(path: Path) -> list[Import]:
    """Every import of one source file, also those inside functions."""
    return list(_imports_of(path))


def _imports_of(path: Path) -> Iterator[Import]:
    tree = ast.parse(path.read_text())
    lazy = {
        id(inner)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef)
        or (isinstance(outer, ast.If) and "TYPE_CHECKING" in ast.unparse(outer.test))
        for inner in ast.walk(outer)
    }
    folder = path.parent.relative_to(ROOT).parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(path, node.lineno, f"/{alias.name}", id(node) not in lazy)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield Import(path, node.lineno, f"/{node.module}", id(node) not in lazy)
        elif isinstance(node, ast.ImportFrom):
            base = (*folder[: len(folder) + 1 - node.level], *(node.module or "").split("."))
            for alias in node.names:
                yield Import(
                    path, node.lineno, resolve([part for part in base if part], alias.name), id(node) not in lazy
                )


def resolve(base: list[str], name: str) -> str:
    """`from base import name`: the module `base.name` where there is one, else `base`."""
    inner = ROOT.joinpath(*base, name)
    return ".".join([*base, name] if inner.with_suffix(".py").is_file() or inner.is_dir() else base)


def test_packages_listed_are_the_folders_that_exist() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert sorted(settings["packages"]) == package_folders()


def test_imports_run_down_only() -> None:
    """But for the root, which names what Python users import, and imports it when it is first used."""
    wrong = [
        f"{use.path.relative_to(ROOT)}:{use.line}: {FLOORS[floor_of(module_of(path))]} imports {use.module or 'root'}"
        for path in sources()
        if path != ROOT / "__init__.py"
        for use in imports_of(path)
        if not use.module.startswith("/") and floor_of(use.module) < floor_of(module_of(path))
    ]
    assert not wrong, "\n".join(wrong)


def test_sources_import_each_other_relatively() -> None:
    own = {"draftforge", *FLOORS, *GROUND}
    wrong = [
        f"{path.relative_to(ROOT)}:{use.line}: import {use.module[1:]}"
        for path in sources()
        for use in imports_of(path)
        if use.module.startswith("/") and use.module[1:].split(".")[0] in own
    ]
    assert not wrong, "\n".join(wrong)


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = {
        module_of(path): {use.module for use in imports_of(path) if use.at_load and not use.module.startswith("/")}
        for path in sources()
    }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail[trail.index(module) :], module))
        if module not in done:
            for below in sorted(graph.get(module, set())):
                visit(below, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_no_file_is_longer_than_a_person_reads() -> None:
    counts = {path: len(path.read_text().splitlines()) for path in project_files(".py")}
    long = {path: count for path, count in counts.items() if count > MAX_LINES}
    assert not [f"{path.relative_to(ROOT)}: {count} lines" for path, count in long.items()]


def test_no_text_names_a_path_of_some_machine() -> None:
    wrong = []
    for path in project_files(".py", ".md", ".yaml", ".yml", ".toml", ".in", "Makefile", "run", ".sh", ".jsonl"):
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if MACHINE_PATH.search(line):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the checkout, so that nothing is left in the checkout itself."""
    copy = tmp_path_factory.mktemp("checkout") / "draftforge"
    shutil.copytree(ROOT, copy, ignore=lambda _, names: [name for name in names if is_left_behind(name)])
    out = tmp_path_factory.mktemp("wheel")
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(out), str(copy)]
    run([sys.executable, "-m", "pip", "--quiet", *build])
    (found,) = out.glob("*.whl")
    return found


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


def test_the_wheel_holds_the_package_its_recipes_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {f"draftforge/{path.relative_to(ROOT).as_posix()}" for path in sources()} | {"draftforge/py.typed"}
    beside = [*(ROOT / "configs").rglob("*.*"), *project_files(".jinja", ".css")]
    expected |= {f"draftforge/{path.relative_to(ROOT).as_posix()}" for path in beside}
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert any(name.startswith("draftforge/configs/") for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_an_installed_wheel_imports_and_runs(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    site = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]))
    run([sys.executable, "-m", "pip", "--quiet", "--python", python, "install", "--no-deps", "--no-index", str(wheel)])
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")  # their packages, not the editable one
    where = "import draftforge, draftforge.errors; print(draftforge.__file__)"
    assert Path(run([python, "-I", "-c", where])).is_relative_to(site)
    assert run([str(tmp_path / "venv" / "bin" / "draftforge"), "--version"]) == f"draftforge {draftforge.__version__}"
    assert "distill" in run([python, "-I", "-m", "draftforge.cli", "--help"])


def test_the_editable_install_is_this_checkout() -> None:
    assert draftforge.__file__ is not None
    assert Path(draftforge.__file__).resolve().parent == ROOT
