"""What a benchmark is asked to do."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import InputError
from ..specdec.proposers.trees import MOST_LEVELS
from ..specdec.rules import known_rule
from ..specdec.sampling import SamplingSettings

_MOST_SLOTS = 65_536  # more than any GPU holds caches for; a slip of the keyboard should not be tried


@dataclass(frozen=True)
class BenchSettings:
    """Its options, by the names of the command line. Raises InputError for what cannot be done."""

    prompts: Sequence[Path]
    drafts: Sequence[str] = ()
    """Names in the recipe, folders, training-free methods, "champion"; empty: the recipe's drafts and prompt lookup."""
    trees: Sequence[str] = ()
    """Of the recipe's score.trees; empty: all of them."""
    helped_by: str | None = None
    """What drafts for each small draft, measured beside the draft alone; None: nothing does."""
    draft_tokens: Sequence[int] = (2, 4, 8)
    batch_sizes: Sequence[int] = (1, 4, 16)
    max_new_tokens: int = 256
    max_prompts: int | None = None
    temperature: float = 0.0
    rule: str | None = None
    repeats: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        _check_numbers("--draft-tokens", self.draft_tokens, MOST_LEVELS)
        _check_numbers("--batch-size", self.batch_sizes, _MOST_SLOTS)
        if not self.prompts:
            raise InputError("--prompts: give at least one file")
        if self.max_new_tokens < 2:
            raise InputError(f"--max-new-tokens {self.max_new_tokens}: must be >= 2: the first token needs no round")
        for option, value in (("--repeats", self.repeats), ("--max-prompts", self.max_prompts)):
            if value is not None and value < 1:
                raise InputError(f"{option} {value}: must be >= 1")
        if self.rule is not None:
            known_rule(self.rule)

    @property
    def sampling(self) -> SamplingSettings:
        return SamplingSettings(temperature=self.temperature)


def numbers_of(option: str, text: str) -> list[int]:
    """Such as [2, 4, 8] of "2,4,8"."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"{option} {text}: must be whole numbers with commas between, such as 2,4,8") from None


def _check_numbers(option: str, values: Sequence[int], most: int) -> None:
    wrong = next((value for value in values if not 1 <= value <= most), None)
    if wrong is not None or not values:
        asked = option if wrong is None else f"{option} {wrong}"
        raise InputError(f"{asked}: every one must be >= 1 and <= {most}, and there must be one")
