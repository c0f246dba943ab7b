"""`models:/` addresses become folders: ours verified, other people's without pickles, each downloaded once."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from draftforge.errors import InputError, RegistryError
from draftforge.registry import versions
from draftforge.registry.connect import Tracking
from draftforge.registry.lineage import Version
from draftforge.registry.versions import is_models_uri, resolve_models_uri

Register = Callable[..., Version]


def test_drafts_by_number_and_alias(tracking: Tracking, register: Register, tmp_path: Path) -> None:
    version = register("one")
    by_number = resolve_models_uri(tracking, version.uri, tmp_path / "models")
    by_alias = resolve_models_uri(tracking, f"models:/{version.name}@candidate", tmp_path / "models")
    assert by_number == by_alias and by_number.name.startswith(f"{version.name}-1-")
    assert json.loads((by_number / "config.json").read_text()) == {"word": "one"}


def test_spoiled_draft_is_refused(tracking: Tracking, register: Register, tmp_path: Path) -> None:
    version = register("one")
    (Path(version.source.removeprefix("file://")) / "config.json").write_text("{}")
    with pytest.raises(RegistryError, match="has SHA-256"):
        resolve_models_uri(tracking, version.uri, tmp_path / "models")
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.parametrize("damage", ["changed", "missing", "added"])
def test_damaged_local_copy_is_downloaded_again(
    tracking: Tracking, register: Register, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    version = register("one")
    place = resolve_models_uri(tracking, version.uri, tmp_path)
    sound = {path.name: path.read_bytes() for path in place.glob("*.*")}
    if damage == "changed":
        (place / "config.json").write_text('{"word": "two"}')
    elif damage == "missing":
        (place / "model.safetensors").unlink()
    else:
        (place / "generation_config.json").write_text("{}")
    capsys.readouterr()
    assert resolve_models_uri(tracking, version.uri, tmp_path) == place
    assert {path.name: path.read_bytes() for path in place.glob("*.*")} == sound
    (said,) = capsys.readouterr().err.splitlines()
    assert str(place) in said and said.endswith("; downloading it again")


def test_sound_local_copy_is_not_downloaded_again(
    tracking: Tracking, register: Register, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = register("one")
    place = resolve_models_uri(tracking, version.uri, tmp_path)
    monkeypatch.setattr(versions, "download_verified", None)
    assert resolve_models_uri(tracking, version.uri, tmp_path) == place


@pytest.mark.parametrize(
    "uri", ["models:/m", "models:/m/Production", "models:/m/latest", "models:/../1", "models:/a/b/1", "models:/m-abc"]
)
def test_addresses_that_name_no_version(tracking: Tracking, uri: str, tmp_path: Path) -> None:
    assert is_models_uri(uri) and not is_models_uri("./models")
    with pytest.raises((InputError, RegistryError)):
        resolve_models_uri(tracking, uri, tmp_path)


def test_missing_alias_lists_those_that_exist(tracking: Tracking, register: Register, tmp_path: Path) -> None:
    name = register("one").name
    with pytest.raises(RegistryError, match=r"no such alias; .* has: candidate"):
        resolve_models_uri(tracking, f"models:/{name}@champion", tmp_path)
    with pytest.raises(RegistryError, match="not found"):
        resolve_models_uri(tracking, f"models:/{name}/7", tmp_path)


def foreign(tracking: Tracking, files: dict[str, str]) -> str:
    """A model that somebody else registered, with these artifacts."""
    run = tracking.client.create_run(tracking.experiment_id)
    for name, text in files.items():
        tracking.client.log_text(run.info.run_id, text, f"model/{name}")
    name = f"{tracking.settings.model}-foreign"
    tracking.client.create_registered_model(name)
    source = f"{run.info.artifact_uri}/model"
    version = tracking.client.create_model_version(name, source, run_id=run.info.run_id)
    return f"models:/{name}/{version.version}"


def test_plain_target_is_downloaded_once(tracking: Tracking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = foreign(tracking, {"config.json": "{}", "model.safetensors": "w", "sub/x.txt": "x"})
    place = resolve_models_uri(tracking, uri, tmp_path)
    assert (place / "sub" / "x.txt").read_text() == "x"
    monkeypatch.setattr(versions, "download", None)
    assert resolve_models_uri(tracking, uri, tmp_path) == place


def test_transformers_flavour_becomes_one_folder(tracking: Tracking, tmp_path: Path) -> None:
    files = {"MLmodel": "flavors:", "model/config.json": "{}", "components/tokenizer/tokenizer.json": "[]"}
    place = resolve_models_uri(tracking, foreign(tracking, files), tmp_path)
    assert (place / "config.json").read_text() == "{}" and (place / "tokenizer.json").read_text() == "[]"


def test_foreign_pickles_and_empty_models(tracking: Tracking, tmp_path: Path) -> None:
    uri = foreign(tracking, {"python_model.pkl": "x", "config.json": "{}"})
    with pytest.raises(RegistryError, match="is a pickle"):
        resolve_models_uri(tracking, uri, tmp_path)
    record = tracking.client.create_model_version(uri.split("/")[1], "file:///nowhere/at/all")
    with pytest.raises(RegistryError, match="holds no files"):
        resolve_models_uri(tracking, f"models:/{record.name}/{record.version}", tmp_path)
    assert list(tmp_path.iterdir()) == []
