"""The recipe's `target` section: which model answers."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TargetSettings(BaseModel):
    """A causal language model as it is served."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model: str = Field(min_length=1)
    """Local folder, .gguf file, hub id, or `models:/name/version` (resolved before loading)."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    gguf_file: str | None = None
    """Name of the GGUF file inside a folder or hub id."""
    adapter: str | None = None
    """Folder or hub id of a LoRA adapter, merged into the weights after loading."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: bfloat16 on CUDA, float32 elsewhere."""
    device: str = "auto"
    """auto: the process's CUDA device where there is one, else cpu."""
    trust_remote_code: bool = False
    """Run Python code that ships with the model. Off unless you have read that code."""
