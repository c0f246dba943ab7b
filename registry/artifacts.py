"""Upload and download of draft folders as MLflow artifacts: allowed files and places, sizes, and SHA-256 checks of what
arrives.

No pickle travels: a file that is one by name or by its first bytes is refused, and nothing here ever loads one.
"""

import posixpath
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from mlflow.entities import FileInfo, ViewType
from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_TIMEOUT
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repo import ArtifactRepository
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.store.artifact.http_artifact_repo import HttpArtifactRepository
from mlflow.store.artifact.mlflow_artifacts_repo import MlflowArtifactsRepository
from mlflow.store.artifact.models_artifact_repo import REGISTERED_MODEL_META_FILE_NAME
from mlflow.utils.file_utils import local_file_uri_to_path
from mlflow.utils.rest_utils import augmented_raise_for_status, http_request
from mlflow.utils.uri import append_to_uri_path

from .. import storage
from ..errors import FormatError, InputError, LostFilesError, MissingFileError, RegistryError
from ..fingerprint import of_file
from ..http_replies import LEAST_BYTES_A_SECOND, extend_time, read_body
from ..masking import masked
from .connect import Tracking, mlflow_errors

PICKLE_SUFFIXES = (".bin", ".ckpt", ".dill", ".joblib", ".npy", ".npz", ".pickle", ".pkl", ".pt", ".pt2", ".pth")
MOST_RECORD_BYTES = 256 << 20
"""Largest record of a run (a decision, counts, hashed clusters) that is downloaded to be read."""
MOST_FILES, _DEEPEST, _PART_BYTES = 10_000, 20, 1 << 20
_MOST_BYTES, _MOST_ERROR_BYTES = 1 << 60, 1 << 20
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
    """Sizes of every file below an artifact address, by relative name. Raises RegistryError outside the store."""
    with mlflow_errors(tracking.uri):
        return _walk(_repository(tracking, uri))


def _walk(repository: ArtifactRepository) -> dict[str, int]:
    files: dict[str, int] = {}
    folders: list[str | None] = [None]
    for folder in folders:  # it grows
        for entry in repository.list_artifacts(folder):
            if entry.is_dir:
                folders.append(entry.path)
            else:
                files[entry.path] = _size(entry)
            if len(files) + len(folders) > MOST_FILES or entry.path.count("/") >= _DEEPEST:
                raise RegistryError(f"{entry.path}: more than {MOST_FILES} files, or folders deeper than {_DEEPEST}")
    return files


def _size(entry: FileInfo) -> int:
    """Declared bytes of a file, 0 of a folder. Raises RegistryError for what is no size: a server may send anything."""
    size = int(entry.file_size or 0)
    if not 0 <= size <= _MOST_BYTES:
        raise RegistryError(f"{entry.path}: size {str(size)[:40]}: must be 0 to {_MOST_BYTES} bytes")
    return size


def _repository(tracking: Tracking, uri: str) -> ArtifactRepository:
    """Open an artifact address. Raises RegistryError for one outside the store, before anything of it is read.

    Who can write to a registry can name any address as a version's source: a file of this machine, or a host that only
    this machine reaches.
    """
    client, settings = tracking.client, tracking.settings
    # 1) Where the store keeps its own: the experiment's place and those beside it; of a local database all, as it is
    #    its owner's. Those of experiments that a server made over it (`mlflow-artifacts:`) only that server opens.
    own = client.get_experiment(tracking.experiment_id)
    places = [str(own.artifact_location).rstrip("/").removesuffix(f"/{own.experiment_id}"), *settings.artifact_roots]
    roots = {_address(tracking, place) for place in places}
    if urlsplit(tracking.uri).scheme.startswith("sqlite"):
        for one in client.search_experiments(view_type=ViewType.ALL):
            with suppress(MlflowException):
                roots.add(_address(tracking, str(one.artifact_location)))
    # 2) Inside one of them: a file below the folder, another address on the same host or in the same bucket.
    try:
        address = _address(tracking, uri)
        is_own = any(_is_below(address, root) for root in roots)
    except ValueError as error:  # such as `http://[`, which anybody may have registered
        raise RegistryError(f"{masked(uri)}: its place is no address ({error})") from None
    if not is_own:
        raise RegistryError(
            f"{masked(uri)}: lies outside the store's own places ({masked(', '.join(sorted(roots)))}); "
            "nothing was copied; registry.artifact_roots names further ones that are to be trusted"
        )
    # 3) Only now is it opened: some stores connect at once, with the user's keys.
    return get_artifact_repository(address, tracking_uri=tracking.uri)


def _address(tracking: Tracking, uri: str) -> str:
    """The address that an artifact address leads to: `models:/` and `runs:/` name another one of this store, asked for
    here, as MLflow would ask whichever store is its default; local folders are absolute paths.

    Raises ValueError for one that names no place.
    """
    # 1) What a run, a logged model or a version of this store names, once.
    parts, client = urlsplit(uri), tracking.client
    if parts.scheme in ("runs", "models"):
        kind, name, _, rest = parts.scheme, *parts.path.removeprefix("/").partition("/")
        if parts.netloc or not name:
            raise ValueError("must be of this store")
        if kind == "runs":
            found = str(client.get_run(name).info.artifact_uri)
            uri = append_to_uri_path(found, rest) if rest else found  # type: ignore[no-untyped-call]
        else:
            found = client.get_model_version_download_uri(name, rest) if rest else _logged_model(tracking, name)
            uri = str(found)
        parts = urlsplit(uri)
        if parts.scheme in ("runs", "models"):
            raise ValueError(f"names {masked(uri)}, which names another one")
    # 2) What serves it.
    if parts.scheme == "mlflow-artifacts":
        return str(MlflowArtifactsRepository.resolve_uri(uri, tracking.uri))  # type: ignore[no-untyped-call]
    if parts.scheme in ("", "file"):
        return str(Path(local_file_uri_to_path(uri)).absolute())  # type: ignore[no-untyped-call]
    return uri


def _logged_model(tracking: Tracking, name: str) -> str:
    return str(tracking.client.get_logged_model(name).artifact_location)


def _is_below(address: str, root: str) -> bool:
    # A path of this disk may hold marks that mean something in an address.
    if address.startswith("/") or root.startswith("/"):
        is_plain = ".." not in Path(address).parts
        return is_plain and root.startswith("/") and Path(address).resolve().is_relative_to(Path(root).resolve())
    inside, outside = urlsplit(address), urlsplit(root)
    if ".." in PurePosixPath(unquote(inside.path)).parts:
        return False
    return bool(outside.netloc) and (inside.scheme, inside.netloc) == (outside.scheme, outside.netloc)


def download(tracking: Tracking, uri: str, files: Mapping[str, int], into: Path) -> None:
    """Download the named files (name -> size in bytes) below `uri` into the folder `into`, and nothing else.

    Raises RegistryError for an address outside the store, a name outside the folder, a pickle, or a file that does not
    arrive with its size; what had arrived is removed then.
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
    try:
        with mlflow_errors(tracking.uri):
            repository = _repository(tracking, uri)
            for name, size in files.items():
                if isinstance(repository, HttpArtifactRepository):
                    _download_from_server(repository, name, size, into / name)
                else:
                    repository.download_artifacts(name, dst_path=str(into))  # type: ignore[no-untyped-call]
        _check_arrived(uri, files, into)
    except BaseException:
        for name in files:
            (into / name).unlink(missing_ok=True)
        raise


def _check_arrived(uri: str, files: Mapping[str, int], into: Path) -> None:
    """Check that all files are there, of their sizes, and that none is a pickle under a harmless name."""
    for name, size in files.items():
        path = storage.inside(into, name)
        if not path.is_file():
            raise RegistryError(f"{uri}/{name}: did not arrive")
        if path.stat().st_size != size:
            raise RegistryError(f"{uri}/{name}: has {path.stat().st_size} bytes, the store says {size}")
    if found := pickles(into, files):
        raise RegistryError(f"{uri}/{found[0]}: is a pickle; it is not kept")


def _download_from_server(server: HttpArtifactRepository, name: str, size: int, path: Path) -> None:
    """Download a file of an MLflow server, of which MLflow itself would write whatever comes.

    Raises RegistryError for one that is longer than its declared size, requests.ConnectionError for one that trickles.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    left = size
    reply = http_request(server._host_creds, posixpath.join("/", name), "GET", stream=True)  # type: ignore[no-untyped-call]
    with reply, path.open("wb") as file:
        if reply.status_code != HTTPStatus.OK:  # what it says is read, and MLflow would read it without an end
            reply._content = read_body(reply, _MOST_ERROR_BYTES)
            augmented_raise_for_status(reply)  # type: ignore[no-untyped-call]
        extend_time(reply, MLFLOW_HTTP_REQUEST_TIMEOUT.get() + size / LEAST_BYTES_A_SECOND)  # type: ignore[no-untyped-call]
        for part in reply.iter_content(_PART_BYTES):
            left -= len(part)
            if left < 0:
                raise RegistryError(f"{name}: is longer than the {size} bytes that the store declares")
            file.write(part)


def run_place(tracking: Tracking, run_id: str) -> str:
    """Address of a run's artifacts, which is looked at before anything is listed, read or written there.

    Raises RegistryError where it lies outside the store: a stranger's run may name a folder of this machine, or a host
    that would be sent the user's keys.
    """
    with mlflow_errors(tracking.uri):
        place = str(tracking.client.get_run(run_id).info.artifact_uri)
        _repository(tracking, place)
    return place


def run_names(tracking: Tracking, run_id: str, folder: str) -> list[str]:
    """Names of what lies in a folder of a run's artifacts, sorted. Raises RegistryError as `run_place` does."""
    place = run_place(tracking, run_id)
    with mlflow_errors(tracking.uri):
        return sorted(entry.path for entry in _repository(tracking, place).list_artifacts(folder))


@contextmanager
def run_files(tracking: Tracking, run_id: str, names: Iterable[str]) -> Iterator[Path]:
    """A temporary folder that holds the named artifacts of a run."""
    root = run_place(tracking, run_id)
    with mlflow_errors(tracking.uri):
        sizes = _sizes(_repository(tracking, root), names)
    with tempfile.TemporaryDirectory() as folder:
        download(tracking, root, sizes, Path(folder))
        yield Path(folder)


def _sizes(repository: ArtifactRepository, names: Iterable[str]) -> dict[str, int]:
    """Declared sizes of records, by name. Raises RegistryError for one that is not there, or too large to be read."""
    names = list(names)
    sizes: dict[str, int] = {}
    for folder in {posixpath.dirname(name) for name in names}:
        sizes |= {entry.path: _size(entry) for entry in repository.list_artifacts(folder or None)}
    for name in names:
        if name not in sizes:
            raise RegistryError(f"{name}: is not in the store")
        if sizes[name] > MOST_RECORD_BYTES:
            found, most = storage.size_text(sizes[name]), storage.size_text(MOST_RECORD_BYTES)
            raise RegistryError(f"{name}: has {found}; records of up to {most} are read")
    return {name: sizes[name] for name in names}


def download_verified(
    tracking: Tracking, uri: str, digests: Mapping[str, str], into: Path, beside: Collection[str] = ()
) -> None:
    """Download exactly the files of `digests` (name -> SHA-256) and check each. Raises LostFilesError on a difference.

    `beside`: names of further files that may lie below `uri`; they are not downloaded.
    """
    # 1) Compare the stored names with the recorded ones: a missing or unknown file costs no download.
    others = {*beside, REGISTERED_MODEL_META_FILE_NAME} - set(digests)  # MLflow leaves that where it loads a version
    # Python leaves compiled code where MLflow loads a version from its own place.
    found = {name: size for name, size in stored_files(tracking, uri).items() if name not in others}
    stored = {name: size for name, size in found.items() if "__pycache__" not in name.split("/")}
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
