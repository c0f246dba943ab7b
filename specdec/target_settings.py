"""The recipe's `target` section: which model, as it is served."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..errors import InputError
from ..storage import expanded


class TemplateLimits(BaseModel):
    """What a rendering of a chat template may take; no template of a real model comes near. All renderings of a run
    together may take `seconds` three times, and a quarter of a second each."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    seconds: float = Field(default=20.0, ge=0.1, le=3600)
    """Most CPU seconds."""
    megabytes: int = Field(default=1000, ge=50, le=1_000_000)
    """Most memory, on Linux."""
    characters: int = Field(default=1 << 20, ge=1)
    """Longest template."""


class TargetSettings(BaseModel):
    """A causal language model as it is served."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    model: str = Field(min_length=1)
    """Local folder, .gguf file, hub id, or `models:/name/version` (resolved before loading)."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    gguf_file: str | None = None
    """Name of the GGUF file inside a folder or hub id."""
    adapter: str | None = None
    """Folder or hub id of a LoRA adapter, merged into the weights after loading."""
    context: int | None = Field(default=None, ge=2)
    """Longest sequence that the server admits (vLLM's --max-model-len); absent: what vLLM derives from the config,
    scaled as the rotary embedding is (YaRN: the original length times the factor). A long-rope model (Phi-3) turns to
    its long factors where this exceeds its original context, which is its default."""
    dtype: Literal["auto", "native", "float32", "bfloat16", "float16"] = "auto"
    """auto: bfloat16 on CUDA, float32 elsewhere. native: bfloat16 where the hardware multiplies it, which some CPUs do
    (AVX512_BF16, AMX), else float32; in bfloat16 a round over several tokens costs hardly more than over one."""
    device: str = "auto"
    """auto: the process's CUDA device where there is one, else cpu."""
    trust_remote_code: bool = False
    """Run Python code that ships with the model. Off unless you have read that code."""
    shard: bool = False
    """In a training on several GPUs, each holds its share of every layer's weights: for a target larger than one card.
    Such a target only teaches; another engine answers for it."""

    template_limits: TemplateLimits = TemplateLimits()
    """Limits of its chat template; a conversation that goes over them is left out or refused."""

    @model_validator(mode="after")
    def _shards_plain_weights(self) -> "TargetSettings":
        if self.shard and self.adapter is not None:
            raise ValueError(f"shard true: cannot merge adapter {self.adapter}; give a folder that it is merged into")
        if self.shard and (self.gguf_file is not None or self.model.endswith(".gguf")):
            raise ValueError(f"shard true: cannot shard the GGUF file {self.gguf_file or self.model}; give safetensors")
        if self.shard and self.device not in ("auto", "cpu"):
            raise ValueError(
                f"shard true: device {self.device} is one for all ranks; must be auto, each rank's own GPU"
            )
        return self

    def absolute(self) -> "TargetSettings":
        """The same with the absolute paths of what lies on this disk, which name it from any folder."""
        named = {"model": self.model, "adapter": self.adapter}
        paths = {field: expanded(text).absolute() for field, text in named.items() if text is not None}
        return self.model_copy(update={field: str(path) for field, path in paths.items() if path.exists()})


def named_target(name: str) -> TargetSettings:
    """Settings of the model that --target names. Raises InputError for an empty name."""
    if not name:
        raise InputError("--target: is empty; name a model's folder, a .gguf file or a hub id")
    return TargetSettings(model=name)
