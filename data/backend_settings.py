"""Which engine answers a capture: the section `capture.backend`."""

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class TransformersBackend(_Section):
    """The target as it is loaded here, on our own cache: answers and signals in one pass."""

    kind: Literal["transformers"] = "transformers"


class VllmBackend(_Section):
    """vLLM, as a server or in this process. Prompts go as token ids: rendering and tokenizing stay here."""

    kind: Literal["vllm"]
    url: str | None = None
    """Address of a server, such as http://localhost:8000; absent: vLLM is started in this process."""
    model: str | None = None
    """The server's name of the target; absent: the only one that it serves."""
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable that holds the server's API key."""
    signals: Literal["target", "engine"] = "target"
    """target: one pass of the target here over each answer gives all signals, and checks the engine's log-probs.
    engine: the engine's own top-k log-probs are kept, without tail samples; nothing is computed here."""
    tolerance: float = Field(default=0.25, gt=0)
    """With signals target: largest mean difference (nats) of the log-probs of a shard's answers, here and there."""
    timeout_seconds: float = Field(default=600.0, gt=0)
    """How long a server may take for one answer."""
    retries: int = Field(default=6, ge=0)
    """How often a request is sent again after a lost connection, a timeout, a busy server or an unusable reply."""
    tensor_parallel: int | None = Field(default=None, ge=1)
    """In this process: GPUs that share the target; absent: one."""
    gpu_memory_share: float | None = Field(default=None, gt=0, le=1)
    """In this process: share of the GPU's memory that vLLM takes, as the target here needs room too; absent: half."""

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = urlsplit(url)
        if parts.username or parts.password:
            raise ValueError("must hold no user name or password; name the key's variable in api_key_env")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError("must be an address such as http://localhost:8000")
        return url.rstrip("/").removesuffix("/v1")

    @model_validator(mode="after")
    def _fits_the_place(self) -> "VllmBackend":
        for name in ("model", "api_key_env"):
            if self.url is None and getattr(self, name) is not None:
                raise ValueError(f"{name} is the server's; give its url, or leave it out")
        for name in ("tensor_parallel", "gpu_memory_share"):
            if self.url is not None and getattr(self, name) is not None:
                raise ValueError(f"{name} is of a vLLM in this process; a server at url has its own settings")
        return self

    def identity(self) -> dict[str, Any]:
        """What decides the content of a capture."""
        return {"kind": self.kind, "signals": self.signals}


Backend = Annotated[TransformersBackend | VllmBackend, Field(discriminator="kind")]
