"""What the fixture `distilled_once` gives."""

from pathlib import Path
from typing import NamedTuple

from draftforge.pipeline.distill import Outcome


class Distilled(NamedTuple):
    """A recipe that was distilled once: look at it, and change nothing."""

    recipe: Path
    outcome: Outcome
    printed: str
