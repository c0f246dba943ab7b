"""Work folders that tests share: stages that are made once a session, and a recipe that was distilled once."""

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from draftforge.pipeline import stages
from draftforge.pipeline.distill import Outcome

SMALL = {"family": "small", "layers": 2, "steps": 4, "warmup_steps": 1, "tokens_per_step": 256, "score_every": 2}
_PLACES = {"build_mix": 2, "capture": 4, "train": 3}  # of the folder among the arguments


class Distilled(NamedTuple):
    """A recipe that was distilled once: look at it, and change nothing."""

    recipe: Path
    outcome: Outcome
    printed: str


@contextmanager
def cached_stages(kept: Path, reads: bool = True) -> Iterator[None]:
    """A mix, capture or training that lies in the folder `kept` is copied, not made again; others are kept there.

    A folder's name is the fingerprint of all that decides its content. Metrics of a copied training are not logged.
    """

    def cached(whole: Callable[..., Any], place: int, *arguments: Any) -> None:
        folder: Path = arguments[place]
        known = kept / folder.name
        if reads and known.is_dir():
            shutil.copytree(known, folder, dirs_exist_ok=True)
            return
        whole(*arguments)
        if not known.is_dir():
            shutil.copytree(folder, known)

    with pytest.MonkeyPatch.context() as patch:
        for name, place in _PLACES.items():
            patch.setattr(stages, name, partial(cached, getattr(stages, name), place))
        yield


class Snapshot:
    """A folder with a work folder in it, as it was when this was made: it is put back in its one place, as the store
    names absolute paths."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.saved = root, root.with_name(name)
        shutil.copytree(root, self.saved)

    @property
    def recipe(self) -> Path:
        return self.root / "tiny.yaml"

    def put_back(self) -> None:
        """Undo all that was done in the folder."""
        database, aside = Path("work") / "mlflow.db", self.saved.with_name("mlflow.db")
        (self.root / database).rename(aside)
        shutil.rmtree(self.root)
        shutil.copytree(self.saved, self.root)
        aside.replace(self.root / database)
        restore(self.saved / database, self.root / database)


def restore(saved: Path, database: Path) -> None:
    """Give a database that connections are open to (MLflow keeps its own) what is in a saved one, by SQLite itself.

    A connection keeps pages until the file's count of changes differs from the one that it saw. A plain copy sets that
    back: as many changes as after the copy before, and the connection answers from before the copy.
    """
    with closing(sqlite3.connect(saved)) as source, closing(sqlite3.connect(database)) as target:
        source.backup(target)
