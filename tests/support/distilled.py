"""Work folders that tests share: stages that are made once a session, and a recipe that was distilled once."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from draftforge.pipeline import stages
from draftforge.pipeline.distill import Outcome

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
