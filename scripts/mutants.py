"""Breaks the core in small ways, one at a time, and asks whether the tests notice (mutation testing by hand).

    python scripts/mutants.py                 every break of scripts/mutants.yaml
    python scripts/mutants.py --sample 10     ten of them, drawn by the commit: other ones for each commit
    python scripts/mutants.py --check         only whether every break still fits the code

Works on a copy of the checkout. Exit code 1 where a break survives, 2 where one does not fit.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "scripts" / "mutants.yaml"
TESTS_PASSED, TESTS_FAILED = 0, 1  # pytest's exit codes; any other says that the tests did not run


class Mutant(NamedTuple):
    """One break: `old`, which `file` holds once, becomes `new`, and one of `tests` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only whether every break still fits the code")
    parser.add_argument("--sample", type=int, metavar="N", help="only N of them, drawn by the commit")
    parser.add_argument("--only", metavar="TEXT", help="only those whose name holds this")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="breaks tried at once; default: 1")
    options = parser.parse_args()

    mutants = [Mutant(**entry) for entry in yaml.safe_load(LIST.read_text())]
    if unfit := [problem for mutant in mutants if (problem := misfit(mutant))]:
        print("\n".join(unfit), file=sys.stderr)
        return 2
    if options.check:
        print(f"{len(mutants)} mutants fit the code")
        return 0
    if options.only is not None:
        mutants = [mutant for mutant in mutants if options.only in mutant.name]
    if options.sample is not None:
        mutants = random.Random(commit()).sample(mutants, min(options.sample, len(mutants)))

    # Every worker breaks a copy of its own.
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        copies = SimpleQueue[Path]()
        for number in range(options.jobs):
            copies.put(copy_checkout(Path(folder, str(number))))

        def work(mutant: Mutant) -> bool:
            copy = copies.get()
            try:
                return is_killed(mutant, copy)
            finally:
                copies.put(copy)

        killed = sum(pool.map(work, mutants))
    print(f"{killed} of {len(mutants)} mutants killed")
    return 0 if killed == len(mutants) else 1


def misfit(mutant: Mutant) -> str | None:
    """Why a break cannot be made, in one line; None where it can."""
    path = ROOT / mutant.file
    times = path.read_text().count(mutant.old) if path.is_file() else 0
    if times != 1:
        return f"{mutant.name}: {mutant.file} holds {times} times, must hold once: {mutant.old}"
    lost = [name for name in mutant.tests.split() if not (ROOT / name).exists()]
    return f"{mutant.name}: no such tests: {', '.join(lost)}" if lost else None


def commit() -> str:
    """What the sample is drawn by: the commit, or the list itself outside a git checkout."""
    found = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or LIST.read_text()


def copy_checkout(folder: Path) -> Path:
    """Copy the project's files, with the link by which its root is imported as `draftforge`."""
    copy = folder / "draftforge"
    shutil.copytree(
        ROOT, copy, ignore=shutil.ignore_patterns(".*", "runs", "build", "dist", "__pycache__", "*.egg-info")
    )
    if (ROOT / ".cache").exists():  # the real target, for tests that need it
        (copy / ".cache").symlink_to((ROOT / ".cache").resolve())
    return copy


def is_killed(mutant: Mutant, copy: Path) -> bool:
    """Whether a test fails under this break; the file is put right again."""
    path = copy / mutant.file
    text, started = path.read_text(), time.monotonic()
    path.write_text(text.replace(mutant.old, mutant.new))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutant.tests.split()]
    paths = os.pathsep.join(filter(None, [str(copy.parent), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    finally:
        path.write_text(text)
    verdict = {TESTS_FAILED: "killed", TESTS_PASSED: "SURVIVED"}.get(done.returncode, "NOT RUN")
    print(f"{verdict:8} {time.monotonic() - started:5.0f} s  {mutant.name}", flush=True)
    if verdict == "NOT RUN":
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
    return verdict == "killed"


if __name__ == "__main__":
    raise SystemExit(main())
