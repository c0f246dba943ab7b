"""What the gate reads and writes: evidence, verdicts by domain, the decision, and the decision as it is stored.

Unknown numbers are NaN here and null in JSON.
"""

import math
from datetime import datetime
from typing import Annotated, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from .settings import GateSettings

FORMAT: Final = 2
"""Of stored decisions. Raised when a field changes its meaning; 1 held its numbers as free JSON."""
Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="null")


class Interval(_Record):
    """A difference, candidate minus champion on the same conversations, and its confidence interval."""

    value: Number
    low: Number
    high: Number

    def over(self, whole: float) -> "Interval":
        """The same as a share of something; NaN where that is not above 0."""
        whole = whole if whole > 0 else math.nan
        return Interval(value=self.value / whole, low=self.low / whole, high=self.high / whole)


class Figures(_Record):
    """One draft on the holdout."""

    tau: Number
    """Tokens per round, pooled."""
    speedup: Number
    """Expected speed-up over plain decoding at the recipe's load; 1 is no gain."""


class DomainFigures(_Record):
    """One domain of the holdout."""

    conversations: int = Field(ge=0)
    champion_speedup: Number
    """The champion's expected speed-up on this domain alone, at the same times."""
    difference: Interval
    """Of the expected speed-ups on this domain, paired by conversation."""


class Evidence(_Record):
    """What was measured. Without a champion, `champion` and `difference` are None."""

    candidate: Figures
    conversations: int = Field(ge=0)
    confidence: Number
    """Coverage of the intervals below."""
    lossless: bool | None
    """Greedy speculative output equals plain greedy output in the self-test; None: it compared nothing."""
    export_reads_back: bool
    holdout_overlap: int = Field(ge=0)
    """Holdout clusters that the candidate or an ancestor was trained on."""
    compared: str | None = None
    """The champion that was measured beside the candidate, `name/number`."""
    champion_lost: str | None = None
    """What is wrong with that champion's files: it can serve nobody, and nothing was compared."""
    champion: Figures | None = None
    difference: Interval | None = None
    """Of the expected speed-ups, paired by conversation."""
    domains: dict[str, DomainFigures] = {}


class DomainVerdict(_Record):
    """What the gate made of one domain."""

    gain: Interval
    """As a share of the champion's expected speed-up on it."""
    judged: bool
    """Whether it has enough conversations (gate.min_domain_conversations) to be asked for non-inferiority."""
    passes: bool
    """Judged: the gain's lower end reaches minus gate.domain_margin. Not judged: it is not shown to lose."""
    more_conversations: int | None = None
    """So many more would probably settle it, if the gain stays what it is; None: settled, or no number would."""


class Numbers(_Record):
    """Every number that a decision rests on."""

    evidence: Evidence | None = None
    settings: GateSettings | None = None
    gain: Interval | None = None
    """In expected speed-up, as a share of the champion's."""
    domains: dict[str, DomainVerdict] = {}
    more_conversations: int | None = None
    """Holdout conversations missing for the comparison over all domains; None: none, or no number would help."""


class Decision(_Record):
    """The verdict, why, and every number that it rests on."""

    promote: bool
    reasons: list[str]
    numbers: Numbers = Numbers()
    compared: str | None = None
    champion_lost: bool = False
    """The champion's files are gone: no rollback should return to it."""


class StoredDecision(Decision):
    """A decision as the registry keeps it, beside the version that it was made about."""

    format: Literal[2] = FORMAT
    version: str
    """`name/number`."""
    at: datetime

    def dump(self) -> str:
        """As JSON text."""
        return self.model_dump_json(indent=2) + "\n"
