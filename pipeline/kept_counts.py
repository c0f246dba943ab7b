"""A version's counts on the holdout, kept beside its lineage in the registry: what it promised when it was promoted."""

import tempfile
from pathlib import Path

import pyarrow as pa

from ..eval import counts
from ..registry.artifacts import download, stored_files
from ..registry.connect import Tracking, mlflow_errors
from ..registry.lineage import Version

KEPT_COUNTS = "holdout.parquet"


def keep_counts(tracking: Tracking, version: Version, table: pa.Table) -> None:
    """Keep a version's counts on the holdout, at the K or tree that it was judged at."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / KEPT_COUNTS
        counts.write(table, path)
        with mlflow_errors(tracking.uri):
            tracking.client.log_artifact(version.run_id, str(path), version.lineage.folder)


def kept_counts(tracking: Tracking, version: Version) -> pa.Table | None:
    """What `keep_counts` kept; None where nothing was."""
    with mlflow_errors(tracking.uri):
        root = f"{tracking.client.get_run(version.run_id).info.artifact_uri}/{version.lineage.folder}"
    if KEPT_COUNTS not in stored_files(tracking, root):
        return None
    with tempfile.TemporaryDirectory() as folder:
        download(tracking, root, {KEPT_COUNTS: 0}, Path(folder))
        return counts.read(Path(folder) / KEPT_COUNTS)
