"""Settings of sampling. They stand apart from its arithmetic: logs are read, in many processes, without torch."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer


class SamplingSettings(BaseModel):
    """How the next token is drawn.

    The processors run in Hugging Face's order: repetition penalty, temperature, top-k, top-p, min-p.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    temperature: float = Field(default=0.0, ge=0.0)
    """0 takes the most likely token; so does anything below 0.00001, as in vLLM."""
    top_k: int = Field(default=0, ge=0)
    """Keep the k most likely tokens and all that tie with the last of them; 0 keeps every token."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Keep the most likely tokens that together reach this probability; 1 keeps every token."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Drop tokens less likely than this share of the most likely one; 0 drops none."""
    repetition_penalty: float = Field(default=1.0, gt=0.0)
    """Divide positive and multiply negative logits of tokens that the prompt or the answer already holds; 1: leave."""

    @model_serializer(mode="wrap")
    def _as_recorded(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A penalty of 1 is not written, so that what was recorded or fingerprinted without one stays the same."""
        record: dict[str, Any] = handler(self)
        if self.repetition_penalty == 1.0:
            record.pop("repetition_penalty", None)
        return record

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < 1e-5

    @property
    def key(self) -> str:
        """A short label that is safe in file names, such as `t0`, `t0-r1.1` or `t0.8-k50-p0.95`.

        Two settings share a key only if they draw from the same distributions.
        """
        parts = ["t0" if self.greedy else f"t{_short(self.temperature)}"]
        if not self.greedy:
            parts += [f"k{self.top_k}"] if self.top_k > 0 else []
            parts += [f"p{_short(self.top_p)}"] if self.top_p < 1.0 else []
            parts += [f"m{_short(self.min_p)}"] if self.min_p > 0.0 else []
        parts += [f"r{_short(self.repetition_penalty)}"] if self.repetition_penalty != 1.0 else []
        return "-".join(parts)


API_DEFAULTS = {"temperature": 1.0}
"""What a server takes where neither a request nor the model's files name a setting; all others are neutral."""


def _short(value: float) -> str:
    return repr(float(value)).removesuffix(".0")
