"""Registered versions: one model a target, `<name>-<12 hex>`, with the aliases `candidate`, `champion`, `previous`.

Registering uploads a draft folder with the files that make it an MLflow model (loaded by `pyfunc_model.py`); fetching
and resolving a `models:/` address download it again and check every file. A server that still runs an old target keeps
that target's champion.
"""

import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mlflow.exceptions import MlflowException
from mlflow.utils.uri import append_to_uri_path

from .. import storage
from ..errors import FormatError, InputError, OwnershipError, RegistryError
from ..fingerprint import of_bytes, of_file, of_json, short
from ..masking import masked
from ..progress import say
from ..specdec.target_settings import TargetSettings
from .artifacts import difference, download, download_verified, file_digests, stored_files
from .connect import Tracking, all_pages, mlflow_errors, whole_number
from .lineage import (
    CLUSTERS_NAME,
    CONTENT_TAG,
    DRAFT_TAG,
    LINEAGE_TAG,
    Lineage,
    Version,
    as_version,
    clusters_file,
    get_version,
)

if TYPE_CHECKING:
    from mlflow.models import ModelSignature

CANDIDATE, CHAMPION, PREVIOUS = "candidate", "champion", "previous"
TARGET_TAG = "draftforge.target_fingerprint"
TARGET_NAME_TAG = "draftforge.target_name"
TARGET_VARIABLE = "DRAFTFORGE_TARGET_MODEL"
DRAFT = "draft"
"""The draft's folder among the artifacts of the MLflow model."""
PARAMETERS = ("max_new_tokens", "temperature", "draft_tokens", "seed")
"""Parameters of the MLflow model's signature."""
MODEL_FILE, CODE_FILE = "MLmodel", "draftforge_model.py"
_CODE = """\
import warnings

from mlflow.models import set_model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # MLflow asks for type hints; the signature says what the model reads
    from draftforge.registry.pyfunc_model import DraftModel

set_model(DraftModel())
"""
_ADDRESS = re.compile(r"models:/(?P<name>[^/@:.][^/@:]*)(?:/(?P<number>\d{1,9})|@(?P<alias>[\w-]+))")


class TargetEntry(NamedTuple):
    """One registered model, which holds the versions of one target."""

    name: str
    fingerprint: str
    target_name: str
    champion: int | None


def model_name(tracking: Tracking, target_fingerprint: str) -> str:
    """The registered model that belongs to a target (its fingerprint, or at least its first 12 hex digits)."""
    if not re.fullmatch(r"[0-9a-f]{12,64}", target_fingerprint):
        raise InputError(f"target {target_fingerprint}: must be a fingerprint, 12 to 64 hex digits")
    return f"{tracking.settings.model}-{short(target_fingerprint)}"


@contextmanager
def alias_lock(tracking: Tracking, name: str) -> Iterator[None]:
    """Let one process of this host at a time move a model's aliases. Other hosts are only seen by re-reading."""
    with storage.lock(tracking.lock_folder / f"{name}.lock", timeout_seconds=60, what="another promotion or rollback"):
        yield


def register_version(
    tracking: Tracking,
    run_id: str,
    folder: Path,
    lineage: Lineage,
    train_clusters: Iterable[str],
    target: TargetSettings | None = None,
) -> Version:
    """Upload a draft folder into the run, register it under its target and call it `candidate`.

    `target`: where the target lies, for those who load the version as an MLflow model.

    The same draft (same files) is registered once; again, the version that exists comes back, unless files of its own
    are gone from the store: then they are uploaded again, as a new version.
    """
    # 1) The record, with the digest of every file.
    clusters = clusters_file(train_clusters)
    update = {"files": file_digests(folder), "clusters_digest": of_bytes(clusters)}
    lineage = Lineage.model_validate(lineage.model_dump() | update)
    name = model_name(tracking, lineage.target_fingerprint)
    with alias_lock(tracking, name):
        # 2) The version that has these files already, if its store still has them too; else a new one.
        with mlflow_errors(tracking.uri):
            _ensure_model(tracking, name, lineage)
        same = same_content(tracking, name, lineage.content)
        version = next((known for known in same if _holds_files(tracking, known)), None)
        if version is None:
            if same:
                say(f"{same[-1].reference}: its files are gone from the registry: the draft is registered again")
            to = f"drafts/{lineage.family}-{lineage.step:06d}-{short(lineage.content)}"
            to += f"-{len(same) + 1}" if same else ""  # apart from remains
            version = _upload(tracking, run_id, folder, to, lineage, clusters, target)
        # 3) What is champion already is no candidate.
        if aliases(tracking, name).get(CHAMPION) != version.number:
            with mlflow_errors(tracking.uri):
                tracking.client.set_registered_model_alias(name, CANDIDATE, str(version.number))
    return version


def _ensure_model(tracking: Tracking, name: str, lineage: Lineage) -> None:
    # One model a target. An existing one is shared, unless its 12 hex digits are those of another target.
    tags = {TARGET_TAG: lineage.target_fingerprint, TARGET_NAME_TAG: lineage.target_name}
    try:
        words = f"Drafts for {lineage.target_name}, target {short(lineage.target_fingerprint)}"
        tracking.client.create_registered_model(name, tags=tags, description=words)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
        found = tracking.client.get_registered_model(name).tags.get(TARGET_TAG)
        if found != lineage.target_fingerprint:
            raise RegistryError(
                f"{name}: belongs to target {found}, not {lineage.target_fingerprint}; set another registry.model"
            ) from None


def same_content(tracking: Tracking, name: str, content: str) -> list[Version]:
    """Every version of a registered model that has these files on record, oldest first."""
    return _tagged(tracking, name, CONTENT_TAG, content)


def same_draft(tracking: Tracking, version: Version) -> list[Version]:
    """Every version of this draft for its target, oldest first, whatever plan it is served with."""
    return _tagged(tracking, version.name, DRAFT_TAG, version.lineage.draft)


def registered_draft(tracking: Tracking, target_fingerprint: str, files: Mapping[str, str]) -> Version | None:
    """Version of a target with these files, its plan aside (name -> SHA-256): the champion, else the newest, if any."""
    name = model_name(tracking, target_fingerprint)
    found = _tagged(tracking, name, DRAFT_TAG, of_json(dict(files)))
    served = aliases(tracking, name).get(CHAMPION)
    return next((one for one in found if one.number == served), found[-1] if found else None)


def _tagged(tracking: Tracking, name: str, tag: str, value: str) -> list[Version]:
    """Versions with a tag of their files' digest, oldest first. What others gave the tag is said, and left out."""
    with mlflow_errors(tracking.uri):
        found = tracking.client.search_model_versions(f"name = '{name}' and tags.`{tag}` = '{value}'")
    versions: list[Version] = []
    for record in found:
        try:
            version = as_version(record)
        except RegistryError as error:
            say(f"{error}; it does not count")
            continue
        if {CONTENT_TAG: version.lineage.content, DRAFT_TAG: version.lineage.draft}[tag] == value:
            versions.append(version)
        else:
            say(f"{version.reference}: its tag {tag} is not that of its files; it does not count")
    return sorted(versions, key=lambda version: version.number)


def _holds_files(tracking: Tracking, version: Version) -> bool:
    """Whether the store has every file of a version; what lies outside the store is said, and is not there.

    Raises TrackingError where the store does not answer.
    """
    try:
        return missing_file(tracking, version) is None
    except RegistryError as error:
        say(f"{version.reference}: {error}; it does not count")
        return False


def missing_file(tracking: Tracking, version: Version) -> str | None:
    """Name of the first file of a version that its store no longer has; None: all are there.

    Raises TrackingError where the store does not answer.
    """
    missing = sorted(set(version.lineage.files) - set(stored_files(tracking, version.source)))
    return missing[0] if missing else None


def _upload(
    tracking: Tracking,
    run_id: str,
    folder: Path,
    to: str,
    lineage: Lineage,
    clusters: bytes,
    target: TargetSettings | None,
) -> Version:
    """Upload a draft and create its version. Files go first, the version last: a version that exists is complete."""
    client, name = tracking.client, model_name(tracking, lineage.target_fingerprint)
    # Artifacts of the run: the draft, what makes it an MLflow model, its lineage, its hashed training clusters.
    with tempfile.TemporaryDirectory() as beside, tempfile.TemporaryDirectory() as apart:
        lineage = lineage.model_copy(update={"beside": wrap(Path(beside), lineage, target)})
        record, path = lineage.model_dump_json(indent=2), Path(apart) / CLUSTERS_NAME
        path.write_bytes(clusters)
        with mlflow_errors(tracking.uri):
            client.log_artifacts(run_id, str(folder), to)
            client.log_artifacts(run_id, beside, to)
            client.log_text(run_id, record, f"{lineage.folder}/lineage.json")
            client.log_artifact(run_id, str(path), lineage.folder)
    # The version itself, with the lineage as a tag and what people look for as tags of their own.
    tags = {
        LINEAGE_TAG: lineage.model_dump_json(),
        CONTENT_TAG: lineage.content,
        DRAFT_TAG: lineage.draft,
        TARGET_TAG: lineage.target_fingerprint,
        "draftforge.mix": lineage.mix_fingerprint,
        "draftforge.capture": lineage.capture_fingerprint,
        "draftforge.counts": lineage.counts_digest,
        "draftforge.family": lineage.family,
        "draftforge.step": str(lineage.step),
    }
    plan = lineage.plan
    how = "" if plan is None else f", tree {plan.tree_name}" if plan.tree_name else f", K = {plan.draft_tokens}"
    words = f"{lineage.family} for {lineage.target_name}, step {lineage.step}{how}"
    with mlflow_errors(tracking.uri):
        source: str = append_to_uri_path(client.get_run(run_id).info.artifact_uri, to)  # type: ignore[no-untyped-call]
        created = client.create_model_version(name, source, run_id=run_id, tags=tags, description=words)
    return as_version(created)


def aliases(tracking: Tracking, name: str) -> dict[str, int]:
    """Alias -> version number of a registered model; empty when there is no such model."""
    try:
        with mlflow_errors(tracking.uri):
            found = tracking.client.get_registered_model(name).aliases
    except RegistryError:
        return {}
    return {alias: whole_number(number, f"{name}@{alias}: version") for alias, number in found.items()}


def champion(tracking: Tracking, target_fingerprint: str) -> Version | None:
    """The champion of exactly this target, if it has one."""
    return by_alias(tracking, target_fingerprint, CHAMPION)


def by_alias(tracking: Tracking, target_fingerprint: str, alias: str) -> Version | None:
    """The version that an alias of this target names, if any."""
    name = model_name(tracking, target_fingerprint)
    # No such alias is no error here: `require` makes one of it.
    number = aliases(tracking, name).get(alias)
    if number is None:
        return None
    # The name holds 12 digits of the fingerprint only: check the whole of it.
    version = get_version(tracking, f"{name}/{number}")
    if not version.lineage.target_fingerprint.startswith(target_fingerprint):
        raise RegistryError(
            f"{version.uri}: is for target {version.lineage.target_fingerprint}, not for {target_fingerprint}"
        )
    return version


def targets(tracking: Tracking) -> list[TargetEntry]:
    """Every target that drafts were registered for."""
    search = partial(tracking.client.search_registered_models, f"name LIKE '{tracking.settings.model}-%'", 100, None)
    entries: list[TargetEntry] = []
    for model in all_pages(tracking, search):
        if fingerprint := model.tags.get(TARGET_TAG):  # models without our tag belong to others
            number = model.aliases.get(CHAMPION)
            version = whole_number(number, f"{model.name}@{CHAMPION}: version") if number else None
            entries.append(TargetEntry(model.name, fingerprint, model.tags.get(TARGET_NAME_TAG, ""), version))
    return sorted(entries)


def fetch(
    tracking: Tracking,
    target_fingerprint: str,
    out: Path,
    alias: str = CHAMPION,
    add: Callable[[Path, Version], None] = lambda folder, version: None,
) -> Version:
    """Download the champion of exactly this target into `out`: all files, each verified, or nothing.

    `add`: write into the folder what is to stand beside them.
    """
    # Look at the folder before the network, and at the registry before anything is written.
    out = out.absolute()
    refuse_occupied(out)
    version = require(tracking, target_fingerprint, alias)
    with storage.new_folder(out) as folder:
        download_verified(tracking, version.source, version.lineage.files, folder, version.lineage.beside)
        add(folder, version)
    return version


def refuse_occupied(out: Path) -> None:
    """Raise OwnershipError where something is that a fetch would overwrite."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OwnershipError(f"{out}: exists and is not empty; name a new folder")


def require(tracking: Tracking, target_fingerprint: str, alias: str) -> Version:
    """The version that an alias of this target names. Raises RegistryError, which lists what can be fetched instead."""
    version = by_alias(tracking, target_fingerprint, alias)
    if version is None:
        known = [f"{entry.target_name} ({short(entry.fingerprint)})" for entry in targets(tracking) if entry.champion]
        listed = "targets with a champion: " + ", ".join(known) if known else "no target has a champion"
        other = None if alias == CANDIDATE else by_alias(tracking, target_fingerprint, CANDIDATE)
        if other is not None:
            listed = f"version {other.number} is its candidate, which `--alias {CANDIDATE}` fetches; {listed}"
        raise RegistryError(f"target {short(target_fingerprint)}: has no {alias} in the registry; {listed}")
    return version


def latest_champion(tracking: Tracking) -> Version | None:
    """Newest champion of any target, from which the draft of a changed target is warm-started."""
    found: list[tuple[int, str]] = []
    for entry in targets(tracking):
        if entry.champion is not None:
            with mlflow_errors(tracking.uri):
                record = tracking.client.get_model_version(entry.name, str(entry.champion))
            made = whole_number(record.creation_timestamp, f"{entry.name}/{entry.champion}: its time")
            found.append((made, f"{entry.name}/{entry.champion}"))
    return get_version(tracking, max(found)[1]) if found else None


def is_models_uri(text: str) -> bool:
    """Whether a recipe's model is an address in the registry."""
    return text.startswith("models:/")


def resolve_models_uri(tracking: Tracking, uri: str, folder: Path, afresh: bool = False) -> Path:
    """Download `models:/name/version` or `models:/name@alias` below `folder`; the local copy.

    Drafts of ours are verified against their recorded digests, a copy that is here already too: a damaged one is
    downloaded again. Other models (a fine-tuned target) are taken as they are, without pickles; what MLflow's
    transformers flavour spreads over folders is put into one. `afresh`: download even where a sound copy is here,
    to see what the registry itself holds.
    """
    # 1) Which version is it, and where do its files lie?
    match = _ADDRESS.fullmatch(uri)
    if match is None:
        raise InputError(f"{uri}: must read models:/name/version or models:/name@alias")
    name, number, alias = match["name"], match["number"], match["alias"]
    with mlflow_errors(tracking.uri):
        if alias is not None:
            number = str(_aliased(tracking, name, alias))
        record = tracking.client.get_model_version(name, number)
        source = tracking.client.get_model_version_download_uri(name, number)
    # 2) A copy that is here is used, if it is sound.
    identity = short(of_json([masked(tracking.uri, {}), source, record.creation_timestamp]))
    local = storage.inside(folder, f"{name}-{number}-{identity}")
    lineage = as_version(record).lineage if LINEAGE_TAG in (record.tags or {}) else None
    digests = None if lineage is None else lineage.files
    if local.is_dir() and not afresh:
        damage = None if digests is None else difference(local, digests)
        if damage is None:
            return local
        say(f"{local}/{damage}; downloading it again")
    # 3) Download it: all files, or nothing.
    with storage.new_folder(local) as beside:
        if lineage is not None:
            download_verified(tracking, source, lineage.files, beside, lineage.beside)
        else:
            _download_foreign(tracking, source, beside)
    return local


def _aliased(tracking: Tracking, name: str, alias: str) -> int:
    known = tracking.client.get_registered_model(name).aliases
    if alias not in known:
        listed = ", ".join(sorted(known)) or "none"
        raise RegistryError(f"models:/{name}@{alias}: no such alias; {name} has: {listed}")
    return whole_number(known[alias], f"{name}@{alias}: version")


def _download_foreign(tracking: Tracking, source: str, into: Path) -> None:
    # Take all files of the model, pickles refused.
    files = stored_files(tracking, source)
    if not files:
        raise RegistryError(f"{source}: holds no files")
    download(tracking, source, files, into)
    # MLflow's transformers flavour has the model and the tokenizer in two folders: put them into one, as loaders
    # expect.
    if not (into / "config.json").exists() and (into / "model" / "config.json").is_file():
        for part in (into / "components" / "tokenizer", into / "model"):
            for path in sorted(part.glob("*")):
                path.replace(into / path.name)


def wrap(folder: Path, lineage: Lineage, target: TargetSettings | None) -> dict[str, str]:
    """Write the two files that make a draft an MLflow model into a folder of their own; name -> SHA-256.

    `target`: where the draft's target lies, for whoever loads the model without naming it. FormatError where the draft
    has a file of such a name.
    """
    from mlflow.models import Model
    from mlflow.pyfunc import add_to_model

    # The wrapper's files may not replace files of the draft.
    for name in (MODEL_FILE, CODE_FILE):
        if name in lineage.files:
            raise FormatError(f"{name}: the name of a file that the registry puts beside a draft's own")
    # The target's address is a default that the caller may override at loading.
    recorded = None if target is None else target.model_dump(mode="json", exclude_defaults=True)
    config = {"recorded_target": recorded, "target": None}  # only keys that are here can be set at loading
    # The same draft gives the same file: no time, and an identity made of its content.
    model = Model(utc_time_created="1970-01-01 00:00:00", model_uuid=lineage.content[:32], signature=signature())
    add_to_model(  # type: ignore[no-untyped-call]
        model,
        loader_module="mlflow.pyfunc.model",
        model_config=config,
        model_code_path=CODE_FILE,
        artifacts={DRAFT: {"path": ".", "uri": "."}},
    )
    model.save(str(folder / MODEL_FILE))
    (folder / CODE_FILE).write_text(_CODE)
    return {name: of_file(folder / name) for name in (MODEL_FILE, CODE_FILE)}


def signature() -> "ModelSignature":
    """MLflow signature: one column of prompts or conversations, and the decoding parameters.

    Without `draft_tokens` the plan among the version's files says how much is drafted.
    """
    from mlflow.models import ModelSignature
    from mlflow.types import DataType, ParamSchema, ParamSpec, Schema
    from mlflow.types.schema import AnyType, ColSpec

    # Types and defaults in the order of PARAMETERS.
    kinds = (DataType.long, DataType.double, DataType.long, DataType.long)
    defaults: tuple[Any, ...] = (128, 0.0, None, 0)
    params = [ParamSpec(name, kind, value) for name, kind, value in zip(PARAMETERS, kinds, defaults, strict=True)]
    column = ColSpec(AnyType())  # type: ignore[no-untyped-call]
    return ModelSignature(inputs=Schema([column]), params=ParamSchema(params))
