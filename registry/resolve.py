"""`models:/` addresses, of drafts or of targets, to local folders. What is here and sound is not downloaded again."""

import re
from pathlib import Path

from .. import storage
from ..errors import InputError, RegistryError
from ..fingerprint import of_json, short
from ..progress import say
from .artifacts import difference, download, download_verified, stored_files
from .connect import Tracking, mlflow_errors
from .lineage import LINEAGE_TAG, as_version
from .settings import redacted

_ADDRESS = re.compile(r"models:/(?P<name>[^/@:.][^/@:]*)(?:/(?P<number>\d+)|@(?P<alias>[\w-]+))")


def is_models_uri(text: str) -> bool:
    """Whether a recipe's model is an address in the registry."""
    return text.startswith("models:/")


def resolve_models_uri(tracking: Tracking, uri: str, folder: Path, afresh: bool = False) -> Path:
    """The local copy, below `folder`, of `models:/name/version` or `models:/name@alias`.

    Drafts of ours are verified against their recorded digests, a copy that is here already too: a damaged one is
    downloaded again. Other models (a fine-tuned target) are taken as they are, without pickles; what MLflow's
    transformers flavour spreads over folders is put into one. `afresh`: download even where a sound copy is here,
    to see what the registry itself holds.
    """
    match = _ADDRESS.fullmatch(uri)
    if match is None:
        raise InputError(f"{uri}: must read models:/name/version or models:/name@alias")
    name, number, alias = match["name"], match["number"], match["alias"]
    with mlflow_errors(tracking.uri):
        if alias is not None:
            number = str(_aliased(tracking, name, alias))
        record = tracking.client.get_model_version(name, number)
        source = tracking.client.get_model_version_download_uri(name, number)
    identity = short(of_json([redacted(tracking.uri), source, record.creation_timestamp]))
    place = storage.inside(folder, f"{name}-{number}-{identity}")
    lineage = as_version(record).lineage if LINEAGE_TAG in (record.tags or {}) else None
    digests = None if lineage is None else lineage.files
    if place.is_dir() and not afresh:
        damage = None if digests is None else difference(place, digests)
        if damage is None:
            return place
        say(f"{place}/{damage}; downloading it again")
    with storage.new_folder(place) as beside:
        if lineage is not None:
            download_verified(tracking, source, lineage.files, beside, lineage.beside)
        else:
            _download_foreign(tracking, source, beside)
    return place


def _aliased(tracking: Tracking, name: str, alias: str) -> int:
    known = tracking.client.get_registered_model(name).aliases
    if alias not in known:
        listed = ", ".join(sorted(known)) or "none"
        raise RegistryError(f"models:/{name}@{alias}: no such alias; {name} has: {listed}")
    return int(known[alias])


def _download_foreign(tracking: Tracking, source: str, into: Path) -> None:
    files = stored_files(tracking, source)
    if not files:
        raise RegistryError(f"{source}: holds no files")
    download(tracking, source, files, into)
    if not (into / "config.json").exists() and (into / "model" / "config.json").is_file():
        for part in (into / "components" / "tokenizer", into / "model"):
            for path in sorted(part.glob("*")):
                path.replace(into / path.name)
