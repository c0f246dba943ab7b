"""The recipe's `capture` section: how the target answers, and what is kept of it."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..specdec.sampling import SamplingSettings
from .backend_settings import Backend, TransformersBackend, VllmBackend


class BudgetSettings(BaseModel):
    """What a capture may cost. The first limit that is reached ends it: no further shard of the train split is begun,
    those that are begun are finished. Selection and holdout are answered before, and always whole."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    tokens: int | None = Field(default=None, ge=1)
    """Answer tokens, of all splits."""
    hours: float | None = Field(default=None, gt=0)
    """Time of answering; what earlier runs into the same folder took counts."""
    gigabytes: float | None = Field(default=None, gt=0)
    """Size of the shards, 10^9 bytes each."""

    @model_validator(mode="after")
    def _limits_something(self) -> "BudgetSettings":
        if not self.limits:
            raise ValueError("must name tokens, hours or gigabytes; leave budget out for no limit")
        return self

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are set, by name."""
        return {name: value for name, value in self if value is not None}

    def share(self, parts: int, tokens: int = 0, size: int = 0) -> "BudgetSettings":
        """What one of so many machines, or ranks, may spend: each may take the whole time.

        `tokens` and `size` (bytes): of what is there already and counts for all of them.
        """
        change: dict[str, float] = {}
        if self.tokens is not None:
            change["tokens"] = min(self.tokens, tokens) + -(-max(0, self.tokens - tokens) // parts)
        if self.gigabytes is not None:
            change["gigabytes"] = min(self.gigabytes, size / 1e9) + max(0.0, self.gigabytes - size / 1e9) / parts
        return self.model_copy(update=change)


class CaptureSettings(BaseModel):
    """How the target answers the mix. Train answers are drawn at each conversation's own sampling setting."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    max_new_tokens: int = Field(default=256, ge=1)
    """Longest answer; a conversation's own smaller limit holds."""
    sampling: SamplingSettings = SamplingSettings()
    """For train conversations whose log names none."""
    batch_size: int = Field(default=32, ge=1)
    """Answers in flight at once. Changes speed and memory only, so it may change between a stop and a resume."""
    top_k: int = Field(default=64, ge=0)
    """Likeliest tokens stored exactly, at each answer token of the train split. 0: no signals at all, tail samples
    neither; drafts that train beside the target need none, and recorded answers then cost no pass of it."""
    tail_samples: int = Field(default=8, ge=1)
    """Tokens drawn from the rest of the distribution, which make expectations over all of it unbiased."""
    store_dtype: Literal["float16", "bfloat16", "float32"] = "float16"
    """Of the stored top-k and tail log-probs."""
    shard_samples: int = Field(default=256, ge=1)
    """Answers a shard; a stop loses at most one unfinished shard."""
    too_long: Literal["error", "skip"] = "error"
    """A prompt that leaves no room for an answer in the target's context: stop, or leave the turn out.
    A dialogue whose generated answers outgrow the context ends there; the manifest lists what was left out."""
    answers: Path | None = None
    """Answers that this target gave before (`draftforge capture --answers-to`): they are not drawn anew."""
    backend: Backend = TransformersBackend()
    """Which engine gives the answers."""
    budget: BudgetSettings | None = None
    """When to stop before all train conversations are answered; a larger one goes on from there."""
    seed: int = 0
    """Of the answers drawn at a temperature, and of the tail samples."""

    @model_validator(mode="after")
    def _recorded_answers_need_the_target(self) -> "CaptureSettings":
        if self.answers is not None and self.engine is not None and self.engine.signals == "engine" and self.top_k:
            raise ValueError(
                "answers (recorded ones) get signals from the target; set backend.signals to target, or top_k to 0"
            )
        return self

    @property
    def engine(self) -> VllmBackend | None:
        """The engine beside the target, if one answers."""
        return self.backend if isinstance(self.backend, VllmBackend) else None

    @property
    def reads_given(self) -> bool:
        """Whether the target runs over answers that it did not draw here: for signals, or to check an engine."""
        return bool(self.top_k) or (self.engine is not None and self.engine.signals == "target")

    def identity(self) -> dict[str, Any]:
        """What decides the content: all but the batch size, the budget, and where recorded answers and servers are."""
        own = self.model_dump(mode="json", exclude={"batch_size", "answers", "backend", "budget"})
        return own if self.engine is None else own | {"backend": self.engine.identity()}
