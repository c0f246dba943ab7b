"""The recipe's `score.load` and `score.race` sections: the load that drafts are picked for, and an early end."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..specdec.rules import RULES

Engine = Literal["vllm", "sglang", "llama.cpp", "draftforge"]
EngineRule = Literal["token", "block", "onehot", "match"]
_USUAL: dict[Engine, EngineRule] = {"vllm": "onehot", "sglang": "onehot", "llama.cpp": "onehot"}
"""How engines verify above temperature 0 where nothing else is asked of them."""


class LoadSettings(BaseModel):
    """What the server is asked: drafts are picked by expected speed-up at this load."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    engine: Engine = "draftforge"
    """The serving engine. It fixes the accept rule above temperature 0, and how acceptance is counted in `as the engine
    counts`."""
    rule: EngineRule | None = None
    """The engine's rule where it is not its usual one (onehot; of draftforge: the first of score.rules)."""
    batch_sizes: dict[int, float] = Field(default={1: 1.0}, min_length=1)
    """Requests answered side by side, each with its share of the time in which any are. Shares need not add up to 1;
    with a share of 0 a batch size is measured and shown, and counts for nothing."""
    context_tokens: int = Field(ge=2)
    """Tokens that a round's attention reads of a request, on average: the prompt and half the answer."""
    answer_tokens: int = Field(ge=2)
    """Tokens of an answer, on average."""

    @model_validator(mode="after")
    def _possible(self) -> "LoadSettings":
        for size, share in self.batch_sizes.items():
            if size < 1 or share < 0:
                raise ValueError(f"batch_sizes {size}: {share:g}: a batch size must be >= 1 and its share >= 0")
        if not sum(self.batch_sizes.values()) > 0:
            raise ValueError(f"batch_sizes {self.batch_sizes}: one share must be > 0")
        if self.prompt_tokens < 1:
            raise ValueError(
                f"context_tokens {self.context_tokens}: is the prompt and half of answer_tokens {self.answer_tokens}; "
                "that leaves no prompt"
            )
        if self.rule is not None and self.engine != "draftforge" and self.engine not in RULES[self.rule].engines:
            can = [name for name, rule in RULES.items() if self.engine in rule.engines and not rule.greedy_only]
            raise ValueError(f"rule {self.rule}: {self.engine} has {', '.join(can)}")
        return self

    @property
    def prompt_tokens(self) -> int:
        """Tokens of a prompt, on average."""
        return self.context_tokens - self.answer_tokens // 2

    @property
    def shares(self) -> dict[int, float]:
        """Batch sizes in order, with shares that add up to 1."""
        total = sum(self.batch_sizes.values())
        return {size: share / total for size, share in sorted(self.batch_sizes.items())}

    @property
    def largest(self) -> int:
        return max(self.batch_sizes)

    @property
    def main(self) -> int:
        """The batch size with the largest share; of equal ones the larger."""
        return max(self.batch_sizes, key=lambda size: (self.batch_sizes[size], size))

    @property
    def serving_rule(self) -> EngineRule | None:
        """The engine's rule above temperature 0; None: that of score.rules."""
        return self.rule or _USUAL.get(self.engine)

    @property
    def said(self) -> str:
        """The load in words."""
        sizes = ", ".join(f"{size} ({share:.0%})" for size, share in self.shares.items() if share)
        return f"{self.engine}, batch {sizes}, context {self.context_tokens:,}, answers of {self.answer_tokens:,}"


class RaceSettings(BaseModel):
    """Checkpoints that can no longer win are dropped before all conversations are scored."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    error: float = Field(default=0.05, gt=0, lt=0.5)
    """Probability, at most, that the checkpoint which scoring everything would choose is dropped."""
    blocks: int = Field(default=8, ge=2, le=64)
    """After so many parts of the conversations it is asked who can still win; each part loads every draft again."""
