"""What a benchmark keeps: the record of every run, from which all its figures follow, and the report."""

import math
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from .arrivals import TimedAnswer
from .figures import Estimate
from .plans import Plan

PLAIN = "plain"
EVERY = "(all)"
"""All domains together; no domain is called so."""


class BenchPrompt(NamedTuple):
    """One prompt, as the target reads it."""

    name: str
    domain: str
    ids: list[int]


def _known(value: Any) -> Any:
    return math.nan if value is None else value


Number = Annotated[
    float, BeforeValidator(_known), PlainSerializer(lambda x: None if math.isnan(x) else x, when_used="json")
]
"""NaN where it is not known; null in JSON."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Setting(_Record):
    """What one run differs from another in: a method, how much it drafts, and the batch size."""

    method: str
    levels: int = Field(ge=0)
    """K of a chain, or levels of the tree; 0: nothing is drafted."""
    tree: str = ""
    rule: str = "greedy"
    batch_size: int = Field(ge=1)

    @property
    def plan(self) -> Plan:
        return Plan(self.levels, self.tree)

    @property
    def plain(self) -> bool:
        return not self.levels

    @property
    def way(self) -> str:
        """The method and what it drafts, as sentences name it."""
        return self.method if self.plain else f"{self.method} {self.plan}"


class RoundParts(_Record):
    """Where the time of a round goes: means under a timer, in a short run of its own."""

    draft_seconds: Number
    verify_seconds: Number
    rest_seconds: Number


class Memory(_Record):
    """Bytes that drafting adds."""

    weights: int
    """Of the draft, what it shares with the target left out."""
    state: int
    """Its caches and buffers at this batch size."""
    peak: int | None
    """Most that torch allocated during the run on top of what was there before it; CUDA only."""


class RunRecord(_Record):
    """One run of all prompts."""

    setting: Setting
    repeat: int = Field(ge=0)
    seconds: float = Field(gt=0)
    answers: list[TimedAnswer] = Field(min_length=1)
    parts: RoundParts
    memory: Memory


class Spread(_Record):
    """A figure of several repeats: the median, the least and the most."""

    value: Number
    low: Number
    high: Number

    @property
    def estimate(self) -> Estimate:
        """As tables show it: one repeat has no spread."""
        return Estimate(self.value) if self.low == self.high else Estimate(self.value, self.low, self.high)


class Interval(_Record):
    """A figure of counts with its bootstrap interval."""

    value: Number
    low: Number
    high: Number

    @classmethod
    def of(cls, estimate: Estimate) -> "Interval":
        return cls(value=estimate.value, low=estimate.low, high=estimate.high)

    @property
    def estimate(self) -> Estimate:
        return Estimate(self.value, self.low, self.high)


class LengthRow(_Record):
    """Answers of one range of lengths."""

    lengths: str
    prompts: int
    speedup: Spread
    first_token_share: Number
    """Of their time, what passes before the first token."""


class BenchRow(_Record):
    """Figures of one setting in one domain."""

    setting: Setting
    domain: str
    prompts: int
    tokens: int
    rounds: float
    tau: Interval
    alphas: list[Interval]
    tokens_per_second: Spread
    decoding_tokens_per_second: Spread
    """Without the time in which the target reads prompts, and without first tokens."""
    speedup: Spread
    decoding_speedup: Spread
    first_token_p50: Number
    first_token_p95: Number
    inter_token_p50: Number
    inter_token_p95: Number
    first_token_share: Number
    round_seconds: Number
    """Of this setting, in all domains: the mean of its fullest rounds, the median of that over repeats."""
    break_even_tau: Number
    """The time of a round over that of a step of plain decoding, at this batch size."""
    slots: Number
    """In use, on average."""
    parts: RoundParts
    memory: Memory
    equal_answers: Number
    """Share that equals plain decoding's at this batch size; not known above temperature 0."""
    lengths: list[LengthRow]


class Failure(_Record):
    """A method, or one of its settings, that did not run."""

    method: str
    plan: str
    batch_size: int | None
    """None: at every batch size."""
    reason: str


class Surroundings(_Record):
    """Where figures come from."""

    hardware: str
    dtype: str
    torch: str
    transformers: str
    draftforge: str
    commit: str | None
    command: list[str]
    target: str
    target_fingerprint: str
    drafts: dict[str, str]
    """Where each method's draft lies; "" where nothing was trained."""
    prompts: dict[str, int]
    """By domain."""
    prompts_left_out: int
    """Too long for the target's context."""
    max_new_tokens: int
    sampling: str
    repeats: int
    confidence: float


class Report(_Record):
    """All of it; what bench.json holds."""

    version: int = 1
    surroundings: Surroundings
    rows: list[BenchRow]
    failures: list[Failure]
    words: list[str]
