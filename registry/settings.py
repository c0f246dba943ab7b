"""The recipe's sections `registry` and `gate`. Light: importing this file does not import MLflow."""

import re

from pydantic import BaseModel, ConfigDict, Field


class RegistrySettings(BaseModel):
    """Where runs and versions are kept."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    tracking_uri: str | None = None
    """An MLflow server (`https://…`) or database (`sqlite:///…`). None: the environment's MLFLOW_TRACKING_URI, else a
    SQLite file in the work folder."""
    experiment: str = Field(default="draftforge", min_length=1, max_length=500)
    """The MLflow experiment that holds the runs; made when it does not exist."""
    model: str = Field(default="draftforge", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)
    """First part of every registered model's name; the target's 12 hex digits follow."""
    connect_seconds: float = Field(default=8.0, gt=0)
    """How long a server may take to answer at the start before the run is refused."""


def redacted(text: str) -> str:
    """The text without the user name and password of any URL in it."""
    return re.sub(r"\b(password|passwd|token)=[^&\s]+", r"\1=***", re.sub(r"//[^/\s]*@", "//***@", text))


class GateSettings(BaseModel):
    """What a candidate must show on the holdout to become the champion."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    min_speedup: float = Field(default=0.0, ge=0)
    """Least expected speed-up over plain decoding; 0 asks for none (on a slow CPU speculation may lose)."""
    non_inferiority_margin: float = Field(default=0.02, ge=0, lt=1)
    """The candidate must be faster, and the lower end of its relative gain may not lie below minus this. 0: it must be
    shown to be faster."""
    domain_margin: float = Field(default=0.05, ge=0, lt=1)
    """The same for each domain: the lower end of its relative gain may not lie below minus this."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """Least coverage of the intervals that the evidence carries."""
    min_conversations: int = Field(default=20, ge=1)
    """Least number of holdout conversations behind the comparison."""
    min_domain_conversations: int = Field(default=20, ge=1)
    """Domains with fewer conversations are too small to be asked for non-inferiority: they are reported, and refuse
    only where the whole interval lies below the margin."""
