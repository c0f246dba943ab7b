"""The container image, without docker: the file's lint, and that what goes into the build makes the same package."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert hadolint, "pip install -e '.[dev]' brings it"
    done = subprocess.run([hadolint, "Dockerfile"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_image_runs_the_verbs_as_nobody_in_particular() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    last = DOCKERFILE.split("\nFROM ")[-1]
    (user,) = re.findall(r"^USER (.+)$", last, re.MULTILINE)
    assert int(user) > 0 and last.index("\nUSER") < last.index("\nENTRYPOINT")
    (entry,) = re.findall(r'^ENTRYPOINT \["(.+)"\]$', last, re.MULTILINE)
    assert entry in project["scripts"]
    (extras,) = re.findall(r"^ARG EXTRAS=(.+)$", DOCKERFILE, re.MULTILINE)
    assert set(extras.split(",")) == project["optional-dependencies"].keys() - {"dev"}
    (minor,) = re.findall(r"^ARG BASE=python:3\.(\d+)-slim$", DOCKERFILE, re.MULTILINE)
    assert int(minor) >= int(project["requires-python"].removeprefix(">=3."))
    # One version of torch everywhere; the arguments that may name an index with a password stay behind.
    assert {*re.findall(r"^ARG TORCH=(.+)$", DOCKERFILE, re.MULTILINE)} == {
        *re.findall(r"torch==([\d.]+)", (ROOT / "Makefile").read_text())
    }
    assert "ARG" not in last


def sent_to_docker(folder: Path) -> Path:
    """A copy of what .dockerignore lets through, whose lines are: all out, some files in, caches out."""
    first, *names, caches = (line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] != "#")
    assert (first, caches) == ("*", "**/__pycache__") and all(re.fullmatch(r"![\w.*/]+", name) for name in names)
    for name in names:
        found = [path for path in ROOT.glob(name[1:]) if "__pycache__" not in path.parts]
        assert found and all(path.is_file() for path in found), f"{name}: must let files in, and no folder"
        for path in found:
            to = folder / path.relative_to(ROOT)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, to)
    return folder


def built(source: Path, out: Path) -> dict[str, int]:
    """Sizes by name of the files in the wheel of a checkout."""
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(out), str(source)]
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *build], check=True)
    with zipfile.ZipFile(next(out.glob("*.whl"))) as wheel:
        return {info.filename: info.file_size for info in wheel.infolist() if not info.filename.endswith("RECORD")}


def test_docker_is_sent_files_of_git_alone(tmp_path: Path) -> None:
    sent = {path.relative_to(tmp_path).as_posix() for path in sent_to_docker(tmp_path).rglob("*") if path.is_file()}
    known = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    if not known:
        pytest.skip("no checkout")
    assert sent <= set(known)


@pytest.mark.slow
def test_what_docker_is_sent_makes_the_package_of_the_checkout(tmp_path: Path) -> None:
    (tmp_path / "sent").mkdir()
    sent = sent_to_docker(tmp_path / "sent")
    kept_out = shutil.ignore_patterns(".*", "__pycache__", "runs", "build", "dist", "*.egg-info", "tests", "docs")
    whole = Path(shutil.copytree(ROOT, tmp_path / "whole", ignore=kept_out))
    assert built(sent, tmp_path / "1") == built(whole, tmp_path / "2")
    assert not [path for path in sent.rglob("*") if path.suffix in (".db", ".safetensors", ".parquet")]
