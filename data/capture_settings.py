"""The recipe's `capture` section: how the target answers, and what is kept of it."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..specdec.sampling import SamplingSettings


class CaptureSettings(BaseModel):
    """How the target answers the mix. Train answers are drawn at each conversation's own sampling setting."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    max_new_tokens: int = Field(default=256, ge=1)
    """Longest answer; a conversation's own smaller limit holds."""
    sampling: SamplingSettings = SamplingSettings()
    """For train conversations whose log names none."""
    batch_size: int = Field(default=32, ge=1)
    """Answers in flight at once. Changes speed and memory only, so it may change between a stop and a resume."""
    top_k: int = Field(default=64, ge=1)
    """Likeliest tokens stored exactly, at each answer token of the train split."""
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
    seed: int = 0
    """Of the answers drawn at a temperature, and of the tail samples."""

    def identity(self) -> dict[str, Any]:
        """What decides the content: all but the batch size, and where recorded answers lie."""
        return self.model_dump(mode="json", exclude={"batch_size", "answers"})
