"""The recipe's `registry` and `gate` sections: where drafts are kept, and what the next champion must show."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class RegistrySettings(BaseModel):
    """MLflow store of runs and versions: its address, experiment and model name."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    tracking_uri: str | None = None
    """An MLflow server (`https://…`) or database (`sqlite:///…`). None: the environment's MLFLOW_TRACKING_URI, else a
    SQLite file in the work folder."""
    experiment: str = Field(default="draftforge", min_length=1, max_length=500)
    """The MLflow experiment that holds the runs; made when it does not exist."""
    model: str = Field(default="draftforge", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)
    """First part of every registered model's name; the target's 12 hex digits follow."""
    log_with: list[Literal["tensorboard", "wandb"]] = []
    """Trackers that get parameters and figures too, beside MLflow: TensorBoard (`tensorboard/` in the work folder),
    Weights & Biases (project: `experiment`; its own WANDB_ variables name key, entity and mode)."""
    artifact_roots: list[str] = []
    """Further places (folders, or addresses such as s3://bucket/models) from which files of runs and versions may be
    copied, beside where the store keeps its own; a version that names another place is refused."""
    connect_seconds: float = Field(default=8.0, gt=0)
    """Seconds in which a server must answer at the start, or the run is refused."""
    notice_seconds: float = Field(default=30.0, gt=0)
    """Seconds within which a run says that its server no longer answers; the work goes on meanwhile."""


class GateSettings(BaseModel):
    """Gate settings: what a candidate must show on the holdout to become the champion."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    min_speedup: float = Field(default=1.0, ge=0)
    """The lower end of the expected speed-up over plain decoding must lie above this, less the error of fitted times.
    From 1 on the candidate must be shown to beat prompt lookup as well. Below 1 a draft that is not worth serving may
    become champion, which decisions, report and `draftforge registry` say; 0 asks for nothing."""
    non_inferiority_margin: float = Field(default=0.0, ge=0, lt=1)
    """The candidate must be faster, and the lower end of its relative gain may not lie below minus this. 0: it must be
    shown to be faster; above 0 an equal draft may replace its equal."""
    domain_margin: float = Field(default=0.05, ge=0, lt=1)
    """Margin of each domain: the lower end of its relative gain may not lie below minus this."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """Least coverage of the intervals that the evidence carries."""
    min_clusters: int = Field(default=20, ge=1)
    """Least number of holdout clusters (of near-duplicate conversations) behind a decision. Of 20 clusters, 96 % of
    holdouts hold some of a kind of traffic that makes up 15 %; no interval knows of what is not there."""
    min_domain_clusters: int = Field(default=20, ge=1)
    """Domains with fewer clusters are too small to be asked for non-inferiority: they are reported, and refuse only
    where the whole interval lies below the margin."""
