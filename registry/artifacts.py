"""Upload and download of draft folders as MLflow artifacts: allowed files, and SHA-256 checks of what arrives.

No pickle travels: a file that is one by name or by its first bytes is refused, and nothing here ever loads one.
"""

import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from mlflow.store.artifact.artifact_repo import ArtifactRepository
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.store.artifact.models_artifact_repo import REGISTERED_MODEL_META_FILE_NAME

from .. import storage
from ..errors import FormatError, InputError, LostFilesError, MissingFileError, RegistryError
from ..fingerprint import of_file
from .connect import Tracking, mlflow_errors

PICKLE_SUFFIXES = (".bin", ".ckpt", ".dill", ".joblib", ".npy", ".npz", ".pickle", ".pkl", ".pt", ".pt2", ".pth")
_PICKLE_STARTS = (*(bytes((0x80, protocol)) for protocol in range(2, 6)), b"PK\x03\x04")  # raw; torch's zip


def file_digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a draft folder, by relative name. Raises FormatError for an empty folder or a pickle."""
    if not folder.is_dir():
        raise MissingFileError(f"{folder}: no such folder")
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    if not names:
        raise FormatError(f"{folder}: is empty; a draft has at least a config and weights")
    if found := pickles(folder, names):
        raise FormatError(f"{folder / found[0]}: is a pickle; drafts are stored as safetensors and JSON")
    return {name: of_file(storage.inside(folder, name)) for name in names}


def pickles(folder: Path, names: Iterable[str]) -> list[str]:
    """Names of the files that are pickles by name or content; only the first bytes are read."""
    return [name for name in names if named_like_pickle(name) or _starts_like_pickle(folder / name)]


def named_like_pickle(name: str) -> bool:
    """Whether the file's suffix is one that pickles and pickle-based checkpoints use."""
    return Path(name).suffix.lower() in PICKLE_SUFFIXES


def _starts_like_pickle(path: Path) -> bool:
    if path.suffix == ".safetensors":
        return False  # its first bytes are a length, which may be any number; only safetensors ever reads it
    with path.open("rb") as stream:
        return stream.read(4).startswith(_PICKLE_STARTS)


def stored_files(tracking: Tracking, uri: str) -> dict[str, int]:
    """Sizes of every file below an artifact address, by relative name."""
    with mlflow_errors(tracking.uri):
        return _walk(get_artifact_repository(uri, tracking_uri=tracking.uri), None)


def _walk(repository: ArtifactRepository, folder: str | None) -> dict[str, int]:
    files: dict[str, int] = {}
    for entry in repository.list_artifacts(folder):
        if entry.is_dir:
            files |= _walk(repository, entry.path)
        else:
            files[entry.path] = int(entry.file_size or 0)
    return files


def download(tracking: Tracking, uri: str, files: Mapping[str, int], into: Path) -> None:
    """Download the named files (name -> size in bytes) below `uri` into the folder `into`, and nothing else.

    Raises RegistryError for a name outside the folder, a pickle, or a file that does not arrive.
    """
    # 1) Refuse bad names before anything is fetched: they come from the store, which others can write to.
    for name in files:
        try:
            storage.inside(into, name)
        except InputError as error:
            raise RegistryError(f"{uri}: names a file outside its folder: {error}") from None
        if named_like_pickle(name):
            raise RegistryError(f"{uri}/{name}: is a pickle; it is not downloaded")
    # 2) Download, once the disk has room for all of it.
    storage.require_free_space(into, sum(files.values()))
    with mlflow_errors(tracking.uri):
        repository = get_artifact_repository(uri, tracking_uri=tracking.uri)
        for name in files:
            repository.download_artifacts(name, dst_path=str(into))  # type: ignore[no-untyped-call]
    # 3) Check what arrived: all files are there, and none is a pickle under a harmless name.
    for name in files:
        if not storage.inside(into, name).is_file():
            raise RegistryError(f"{uri}/{name}: did not arrive")
    if found := pickles(into, files):
        raise RegistryError(f"{uri}/{found[0]}: is a pickle; it is not kept")


@contextmanager
def run_files(tracking: Tracking, run_id: str, names: Iterable[str]) -> Iterator[Path]:
    """A temporary folder that holds the named artifacts of a run."""
    with mlflow_errors(tracking.uri):
        root = str(tracking.client.get_run(run_id).info.artifact_uri)
    with tempfile.TemporaryDirectory() as folder:
        download(tracking, root, dict.fromkeys(names, 0), Path(folder))
        yield Path(folder)


def download_verified(
    tracking: Tracking, uri: str, digests: Mapping[str, str], into: Path, beside: Collection[str] = ()
) -> None:
    """Download exactly the files of `digests` (name -> SHA-256) and check each. Raises LostFilesError on a difference.

    `beside`: names of further files that may lie below `uri`; they are not downloaded.
    """
    # 1) Compare the stored names with the recorded ones: a missing or unknown file costs no download.
    others = {*beside, REGISTERED_MODEL_META_FILE_NAME} - set(digests)  # MLflow leaves that where it loads a version
    stored = {name: size for name, size in stored_files(tracking, uri).items() if name not in others}
    if odd := _odd_name(stored, digests):
        raise LostFilesError(f"{uri}/{odd}")
    # 2) Download, and compare the content with the recorded digests.
    download(tracking, uri, stored, into)
    if odd := difference(into, digests):
        raise LostFilesError(f"{uri}/{odd}")


def difference(folder: Path, digests: Mapping[str, str]) -> str | None:
    """Find the first file of a folder that is not as recorded, and how it differs; None where all are."""
    # Names first: hashing large weights is the slow part.
    found = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    if odd := _odd_name(found, digests):
        return odd
    for name, digest in digests.items():
        if (seen := of_file(folder / name)) != digest:
            return f"{name}: has SHA-256 {seen[:12]}…, recorded is {digest[:12]}…"
    return None


def _odd_name(found: Iterable[str], recorded: Iterable[str]) -> str | None:
    found, recorded = set(found), set(recorded)
    missing, unknown = sorted(recorded - found), sorted(found - recorded)
    if missing:
        return f"{missing[0]}: is missing"
    return f"{unknown[0]}: is not recorded" if unknown else None
