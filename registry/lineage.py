"""Lineage of a version: target, data, recipe, files, training clusters, and the version it was warm-started from.

The record is the version's tag `draftforge.lineage`; the hashed ids of its training clusters are an artifact of its
run, so that a later holdout can be checked against everything that any ancestor was trained on.
"""

import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflow.entities.model_registry import ModelVersion
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from .. import __version__
from ..errors import CorruptDataError, RegistryError
from ..fingerprint import of_bytes, of_json, short
from ..specdec.serving_plan import PLAN_FILE, ServingPlan, check_named_files
from .artifacts import run_files
from .connect import Tracking, mlflow_errors, whole_number

LINEAGE_TAG = "draftforge.lineage"
CONTENT_TAG, DRAFT_TAG = "draftforge.content", "draftforge.draft"
CLUSTERS_NAME = "train_clusters.txt"
_HEX64 = r"^[0-9a-f]{64}$"
_MOST_ANCESTORS = 10_000


class Lineage(BaseModel):
    """Lineage record: all inputs that decided what a draft is.

    Unknown keys are ignored, so that older readers read newer records.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    target_fingerprint: str = Field(pattern=_HEX64)
    target_name: str
    target_files: dict[str, str] = {}
    """First 12 hex digits of the digest of each file that made up the target; empty: an older version recorded none."""
    tokenizer_digest: str
    mix_fingerprint: str
    capture_fingerprint: str
    counts_digest: str
    """SHA-256 of counts.parquet, the score by which the draft was chosen."""
    recipe_fingerprint: str
    family: str
    step: int = Field(ge=0)
    plan: ServingPlan | None = None
    """K or tree and rule that the choice was made at; the drafts of a merged tree by where they lie among the files."""
    measured: str = ""
    """Where the times that the choice was made by hold: hardware, precision, load."""
    parent: str | None = None
    """The version it was warm-started from, `name/number`; of this target or of another."""
    draftforge_version: str = __version__
    git_commit: str | None = None
    files: dict[str, str] = {}
    """SHA-256 of each file of the draft folder; filled in when the draft is registered."""
    beside: dict[str, str] = {}
    """SHA-256 of the files that the registry put beside them, for MLflow alone: no part of the draft."""
    clusters_digest: str | None = None
    """SHA-256 of the list of training clusters; filled in when the draft is registered."""

    @field_validator("plan", mode="before")
    @classmethod
    def _names_no_file_of_this_disk(cls, raw: Any) -> Any:
        # Before the plan is read: a tree reads the file of a shape and the drafts that it names, wherever they lie.
        check_named_files(raw.get("tree") if isinstance(raw, dict) else None)
        return raw

    @property
    def content(self) -> str:
        """Content digest over all files: equal drafts with equal plans have equal digests."""
        return of_json(self.files)

    @property
    def draft(self) -> str:
        """Digest of the draft alone: equal drafts have equal ones, whatever they are served with."""
        return of_json({name: digest for name, digest in self.files.items() if name != PLAN_FILE})

    @property
    def folder(self) -> str:
        """Artifact folder of this record in the run."""
        return f"lineage/{short(self.content)}"


@dataclass(frozen=True)
class Version:
    """A model version that draftforge registered, with its lineage."""

    name: str
    number: int
    run_id: str
    source: str
    lineage: Lineage

    @property
    def reference(self) -> str:
        """`name/number`, as lineage and decisions name it."""
        return f"{self.name}/{self.number}"

    @property
    def uri(self) -> str:
        """`models:/name/number`."""
        return f"models:/{self.reference}"


def as_version(record: ModelVersion) -> Version:
    """Convert MLflow's record of a version. Raises RegistryError if draftforge did not register it."""
    name, number = str(record.name), whole_number(record.version, f"{record.name}: version")
    # The tag tells our versions from those of others in the same registry.
    text = (record.tags or {}).get(LINEAGE_TAG)
    if text is None:
        raise RegistryError(f"models:/{name}/{number}: has no tag {LINEAGE_TAG}; it was not registered by draftforge")
    try:
        # People can edit tags: name the first field that is wrong.
        lineage = Lineage.model_validate_json(text)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise RegistryError(f"models:/{name}/{number}: tag {LINEAGE_TAG}: {where}: {problem['msg']}") from None
    return Version(name, number, str(record.run_id or ""), str(record.source), lineage)


def get_version(tracking: Tracking, reference: str) -> Version:
    """Read the version `name/number`."""
    name, _, number = reference.rpartition("/")
    if not name or not re.fullmatch("[0-9]{1,9}", number):
        raise RegistryError(f"{reference}: must read name/number")
    with mlflow_errors(tracking.uri):
        record = tracking.client.get_model_version(name, number)
    return as_version(record)


def ancestors(tracking: Tracking, version: Version) -> Iterator[Version]:
    """Ancestors of a version by warm start, nearest first.

    Raises RegistryError for a deleted ancestor, whose training data cannot be known, for a circle, and for
    a line of ancestors without end.
    """
    # Hand-edited tags could make a circle, in which the walk would never end.
    seen = {version.reference}
    while parent := version.lineage.parent:
        if parent in seen:
            raise RegistryError(f"{version.reference}: its ancestors form a circle at {parent}")
        if len(seen) > _MOST_ANCESTORS:
            raise RegistryError(f"{version.reference}: has more than {_MOST_ANCESTORS} ancestors before it")
        seen.add(parent)
        try:
            version = get_version(tracking, parent)
        except RegistryError as error:
            raise RegistryError(f"{version.reference}: its parent {parent} cannot be read: {error}") from error
        yield version


def cluster_digest(cluster: str) -> str:
    """The 16 hex digits that stand for a cluster id outside the mix."""
    return of_bytes(cluster.encode())[:16]


def clusters_file(clusters: Iterable[str]) -> bytes:
    """Content of the clusters file: hashed ids, sorted, one a line. The same set gives the same bytes."""
    return "".join(f"{digest}\n" for digest in sorted({cluster_digest(cluster) for cluster in clusters})).encode()


def training_clusters(tracking: Tracking, version: Version) -> frozenset[str]:
    """Hashed ids of the clusters that this version itself was trained on, checked against the recorded digest."""
    # The digest in the tag guards the artifact: a changed list could hide an overlap.
    wanted = version.lineage.clusters_digest
    if wanted is None:
        raise RegistryError(f"{version.reference}: has no record of its training clusters")
    name = f"{version.lineage.folder}/{CLUSTERS_NAME}"
    with run_files(tracking, version.run_id, [name]) as folder:
        data = (folder / name).read_bytes()
    if of_bytes(data) != wanted:
        raise CorruptDataError(f"{version.reference}: {name} does not match its recorded digest")
    return frozenset(data.decode(errors="replace").split())


def inherited_clusters(tracking: Tracking, version: Version) -> set[str]:
    """Hashed ids of the clusters that this version or any ancestor was trained on."""
    members = (version, *ancestors(tracking, version))
    return {cluster for member in members for cluster in training_clusters(tracking, member)}


def holdout_overlap(tracking: Tracking, version: Version, holdout_clusters: Iterable[str]) -> int:
    """Number of holdout clusters that this version or any ancestor was trained on. A fair comparison needs 0."""
    holdout = {cluster_digest(cluster) for cluster in holdout_clusters}
    return len(holdout & inherited_clusters(tracking, version))


def git_commit() -> str | None:
    """The commit of the draftforge checkout in use; None for an installed wheel."""
    # Only a checkout has a commit of its own; a wheel inside another repository must not take that one's.
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None
