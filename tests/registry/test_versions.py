"""Registered versions: registered once, one model a target; what is fetched or resolved is what was recorded."""

import contextlib
import dataclasses
import json
import os
import pickle
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from mlflow.store.artifact.http_artifact_repo import HttpArtifactRepository

import draftforge.registry
from draftforge.errors import (
    DiskFullError,
    DraftforgeError,
    FormatError,
    InputError,
    MissingFileError,
    OwnershipError,
    RegistryError,
    TrackingError,
)
from draftforge.fingerprint import of_file
from draftforge.registry import artifacts, versions
from draftforge.registry.champion_alias import move_champion
from draftforge.registry.connect import Tracking, whole_number
from draftforge.registry.lineage import LINEAGE_TAG, Lineage, Version
from draftforge.registry.versions import (
    CANDIDATE,
    CHAMPION,
    TARGET_TAG,
    aliases,
    by_alias,
    champion,
    fetch,
    is_models_uri,
    model_name,
    resolve_models_uri,
    targets,
)

Register = Callable[..., Version]
MakeDraft = Callable[..., Path]
TARGET, OTHER = "a" * 64, "b" * 64


@pytest.fixture
def crowned(tracking: Tracking, register: Register) -> Version:
    """A version that is champion of TARGET."""
    version = register("one")
    move_champion(tracking, version.name, None, version.number, "promote", "test")
    return version


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_one_model_a_target(tracking: Tracking, register: Register) -> None:
    first, second = register("one"), register("two", OTHER)
    assert first.name == f"{tracking.settings.model}-{'a' * 12}" and second.name.endswith("-" + "b" * 12)
    assert (first.number, second.number) == (1, 1)
    assert [entry.fingerprint for entry in targets(tracking)] == [TARGET, OTHER]
    with pytest.raises(InputError, match="12 to 64 hex"):
        model_name(tracking, "../evil")


def test_same_draft_is_registered_once(tracking: Tracking, register: Register) -> None:
    first, second, again = register("one"), register("two"), register("one", step=99)
    assert again == first and second.number == 2 and first.lineage.step == 60
    assert aliases(tracking, first.name) == {CANDIDATE: 1}


@pytest.mark.parametrize("gone", ["model.safetensors", "."])
def test_a_draft_whose_files_are_gone_is_registered_again(
    tracking: Tracking, register: Register, tmp_path: Path, gone: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first = register("one")
    path = stored(first) / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    again = register("one")
    assert again.number == 2 and aliases(tracking, first.name) == {CANDIDATE: 2}
    assert f"{first.reference}: its files are gone" in capsys.readouterr().err
    assert fetch(tracking, TARGET, tmp_path / "out", alias=CANDIDATE) == again
    assert register("one") == again


def test_versions_of_others_with_the_same_tags_bar_no_registration(
    tracking: Tracking, register: Register, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = register("one")
    lineage, mine = (
        first.lineage,
        {versions.CONTENT_TAG: first.lineage.content, versions.DRAFT_TAG: first.lineage.draft},
    )
    other = lineage.model_copy(update={"files": {"config.json": "0" * 64}})
    for tags in ({}, {LINEAGE_TAG: "{}"}, *({LINEAGE_TAG: one.model_dump_json()} for one in (other, lineage))):
        tracking.client.create_model_version(first.name, f"file://{tmp_path}/place", tags=mine | tags)
    assert register("one") == first
    assert versions.registered_draft(tracking, TARGET, lineage.files) is not None
    said = " ".join(capsys.readouterr().err.split())
    for words in ("/2: has no tag", "/3: tag", "/4: its tag draftforge.content is not that of its files"):
        assert f"{first.name}{words}" in said
    # The last one says the very files, and lies outside the store.
    shutil.rmtree(stored(first))
    assert register("one").number == 6
    assert "/5: file://" in " ".join(capsys.readouterr().err.split())


def test_a_store_that_does_not_answer_registers_nothing(
    tracking: Tracking, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = register("one")

    def refuse(*_: object) -> None:
        raise TrackingError("no answer")

    monkeypatch.setattr(versions, "stored_files", refuse)
    with pytest.raises(TrackingError):
        register("one")
    assert [one.number for one in versions.same_content(tracking, first.name, first.lineage.content)] == [1]


def test_registered_champion_does_not_become_candidate(
    tracking: Tracking, crowned: Version, register: Register
) -> None:
    assert aliases(tracking, crowned.name) == {CHAMPION: 1}
    assert register("one") == crowned
    assert aliases(tracking, crowned.name) == {CHAMPION: 1}


def test_model_that_belongs_to_another_target(tracking: Tracking, register: Register) -> None:
    tracking.client.create_registered_model(model_name(tracking, TARGET), tags={TARGET_TAG: "a" * 12 + "f" * 52})
    with pytest.raises(RegistryError, match="belongs to target"):
        register("one")


def test_bad_draft_folders(register: Register, make_draft: MakeDraft, tmp_path: Path) -> None:
    folder = make_draft("one")
    (folder / "away.json").symlink_to("/etc/hostname")
    with pytest.raises(InputError, match="must stay inside"):
        register("one")
    with pytest.raises(MissingFileError, match="no such folder"):
        artifacts.file_digests(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FormatError, match="is empty"):
        artifacts.file_digests(tmp_path / "empty")


def test_fetch_gives_the_same_files(
    tracking: Tracking, crowned: Version, make_draft: MakeDraft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert champion(tracking, TARGET) == crowned == champion(tracking, TARGET[:12])
    assert fetch(tracking, TARGET, tmp_path / "out") == crowned
    assert contents(tmp_path / "out") == contents(make_draft("one"))
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    fetch(tracking, TARGET, Path("empty"))
    assert contents(tmp_path / "empty") == contents(make_draft("one"))


def test_an_experiment_that_a_server_made_over_the_database_bars_no_fetch(
    tracking: Tracking, crowned: Version, tmp_path: Path
) -> None:
    made = tracking.client.create_experiment(f"served-{tmp_path.name}", artifact_location="mlflow-artifacts:/1")
    assert fetch(tracking, TARGET, tmp_path / "out") == crowned
    tracking.client.delete_experiment(made)
    assert fetch(tracking, TARGET, tmp_path / "again") == crowned


def test_fetch_refuses_an_occupied_folder(tracking: Tracking, crowned: Version, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    for out in (tmp_path / "out", tmp_path / "out" / "mine.txt"):
        with pytest.raises(OwnershipError, match="not empty"):
            fetch(tracking, TARGET, out)
    assert contents(tmp_path / "out") == {"mine.txt": b"mine"}


def test_fetch_of_another_target_says_which_exist(
    tracking: Tracking, crowned: Version, register: Register, tmp_path: Path
) -> None:
    register("two", OTHER)
    known = re.escape(f"targets with a champion: target-aa ({'a' * 12})")
    named = "version 1 is its candidate, which `--alias candidate` fetches"
    with pytest.raises(RegistryError, match=f"bbbbbbbbbbbb: has no champion in the registry; {named}; {known}$"):
        fetch(tracking, OTHER, tmp_path / "out")
    near = "a" * 12 + "9" * 52
    with pytest.raises(RegistryError, match="is for target aaaa"):
        fetch(tracking, near, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert fetch(tracking, OTHER, tmp_path / "out", alias=CANDIDATE).number == 1


def test_fetch_from_an_empty_registry(tracking: Tracking, tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match="no target has a champion"):
        fetch(tracking, TARGET, tmp_path / "out")
    assert champion(tracking, TARGET) is None and by_alias(tracking, TARGET, CANDIDATE) is None


def stored(version: Version) -> Path:
    """The folder on disk behind a version of the local store."""
    return Path(version.source.removeprefix("file://"))


def test_changed_missing_and_added_files_are_refused(tracking: Tracking, crowned: Version, tmp_path: Path) -> None:
    config = stored(crowned) / "config.json"
    original = config.read_bytes()
    config.write_bytes(original.replace(b"one", b"two"))
    with pytest.raises(RegistryError, match=r"config\.json: has SHA-256"):
        fetch(tracking, TARGET, tmp_path / "out")
    config.unlink()
    with pytest.raises(RegistryError, match=r"config\.json: is missing"):
        fetch(tracking, TARGET, tmp_path / "out")
    config.write_bytes(original)
    (stored(crowned) / "extra.json").write_text("{}")
    with pytest.raises(RegistryError, match=r"extra\.json: is not recorded"):
        fetch(tracking, TARGET, tmp_path / "out")
    assert list(tmp_path.glob("*out*")) == []


def test_names_from_the_registry_stay_inside(
    tracking: Tracking, crowned: Version, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"../../evil.json": 1}
    record = crowned.lineage.model_copy(update={"files": {"../../evil.json": "0" * 64}})
    tracking.client.set_model_version_tag(crowned.name, "1", LINEAGE_TAG, record.model_dump_json())
    monkeypatch.setattr(artifacts, "stored_files", lambda *_: names)
    with pytest.raises(RegistryError, match="outside its folder"):
        fetch(tracking, TARGET, tmp_path / "out")


def test_too_little_disk_is_said_first(
    tracking: Tracking, crowned: Version, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts, "stored_files", lambda *_: dict.fromkeys(crowned.lineage.files, 1 << 60))
    with pytest.raises(DiskFullError, match="needed"):
        fetch(tracking, TARGET, tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Bomb:
    """Unpickling this makes a folder."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self._marker),)


_unpickled: list[str] = []
_watching = False


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if _watching and event == "pickle.find_class":
        _unpickled.append(str(arguments))


@pytest.fixture
def no_unpickling() -> Iterator[None]:
    """Fail if anything in the process unpickles a class meanwhile; the interpreter itself reports it."""
    global _watching
    if _audit not in _hooks:
        sys.addaudithook(_audit)
        _hooks.append(_audit)
    _unpickled.clear()
    _watching = True
    yield
    _watching = False
    assert _unpickled == []


_hooks: list[Callable[..., None]] = []


@pytest.mark.parametrize("name", ["weights.pt", "deep/x.PTH", "innocent.json"])
@pytest.mark.usefixtures("no_unpickling")
def test_pickles_are_not_registered(register: Register, make_draft: MakeDraft, tmp_path: Path, name: str) -> None:
    path = make_draft("one") / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    with pytest.raises(FormatError, match="is a pickle"):
        register("one")
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("name", ["weights.pt", "innocent.json"])
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.usefixtures("no_unpickling")
def test_pickles_are_not_fetched(
    tracking: Tracking, crowned: Version, tmp_path: Path, name: str, recorded: bool
) -> None:
    bomb = stored(crowned) / name
    bomb.write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    if recorded:
        files = crowned.lineage.files | {name: of_file(bomb)}
        record = Lineage.model_validate(crowned.lineage.model_dump() | {"files": files})
        tracking.client.set_model_version_tag(crowned.name, "1", LINEAGE_TAG, record.model_dump_json())
    with pytest.raises(RegistryError, match="is a pickle" if recorded else "is not recorded"):
        fetch(tracking, TARGET, tmp_path / "out")
    assert not (tmp_path / "exploded").exists() and not (tmp_path / "out").exists()


def test_the_watch_sees_an_unpickling(tmp_path: Path, no_unpickling: None) -> None:
    pickle.loads(pickle.dumps(Bomb(tmp_path / "exploded")))  # noqa: S301
    assert (tmp_path / "exploded").exists() and len(_unpickled) == 1
    _unpickled.clear()


def test_sources_call_nothing_that_unpickles() -> None:
    folder = Path(str(draftforge.registry.__file__)).parent
    for path in folder.glob("*.py"):
        text = path.read_text()
        assert not re.search(r"(import|from) (pickle|cloudpickle|torch|joblib|dill)|torch\.load|load_model", text), path


def test_safetensors_whose_length_looks_like_a_pickle(tmp_path: Path) -> None:
    header = b'{"__metadata__":{}}'.ljust(0x0480)
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert set(artifacts.file_digests(tmp_path)) == {"model.safetensors"}


def test_drafts_by_number_and_alias(tracking: Tracking, register: Register, tmp_path: Path) -> None:
    version = register("one")
    by_number = resolve_models_uri(tracking, version.uri, tmp_path / "models")
    by_alias = resolve_models_uri(tracking, f"models:/{version.name}@candidate", tmp_path / "models")
    assert by_number == by_alias and by_number.name.startswith(f"{version.name}-1-")
    assert json.loads((by_number / "config.json").read_text()) == {"word": "one"}


@pytest.mark.parametrize("damage", ["changed", "missing", "added"])
def test_damaged_local_copy_is_downloaded_again(
    tracking: Tracking,
    register: Register,
    tmp_path: Path,
    damage: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
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
    monkeypatch.setattr(versions, "download_verified", None)  # a sound copy is not downloaded again
    assert resolve_models_uri(tracking, version.uri, tmp_path) == place
    assert {path.name: path.read_bytes() for path in place.glob("*.*")} == sound
    (said,) = capsys.readouterr().err.splitlines()
    assert str(place) in said and said.endswith("; downloading it again")


@pytest.mark.parametrize("uri", ["models:/m", "models:/m/latest", "models:/../1", "models:/a/b/1"])
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
    empty = f"{tracking.client.get_experiment(tracking.experiment_id).artifact_location}/nothing"
    record = tracking.client.create_model_version(uri.split("/")[1], empty)
    with pytest.raises(RegistryError, match="holds no files"):
        resolve_models_uri(tracking, f"models:/{record.name}/{record.version}", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "source",
    [
        "file://{place}",
        "{place}",
        "file://{own}/../../place",
        "http://127.0.0.1:9/x",
        "mlflow-artifacts://h/1",
        "{own}/x?y/../../place",
        *("gs://b/x", "sftp://127.0.0.1:9/x", "r2://b@a/x", "b2://b/x", "abfss://c@a.dfs.core.windows.net/x"),
    ],
)
def test_a_source_outside_the_store_is_refused_before_a_byte_is_copied(
    tracking: Tracking, tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place := tmp_path / "place").mkdir()
    (place / "config.json").write_text("{}")
    own = tracking.client.get_experiment(tracking.experiment_id).artifact_location.removeprefix("file://")
    name = foreign(tracking, {"config.json": "{}"}).split("/")[1]
    record = tracking.client.create_model_version(name, source.format(place=place, own=own))
    uri, models = f"models:/{name}/{record.version}", tmp_path / "models"
    with monkeypatch.context() as patch:
        patch.setattr(artifacts, "_walk", lambda *_: pytest.fail("was looked into"))
        patch.setattr(artifacts, "get_artifact_repository", lambda *_, **__: pytest.fail("was opened"))
        with pytest.raises(DraftforgeError, match=r"outside the store's own places|must be a valid http"):
            resolve_models_uri(tracking, uri, models)
    assert not models.is_dir() or list(models.iterdir()) == []
    if source == "file://{place}":
        settings = tracking.settings.model_copy(update={"artifact_roots": [str(tmp_path)]})
        trusting = dataclasses.replace(tracking, settings=settings)
        assert (resolve_models_uri(trusting, uri, models) / "config.json").is_file()


def test_a_source_that_names_a_version_is_of_the_same_store(
    tracking: Tracking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow would ask its default store, and make one in the current folder."""
    monkeypatch.chdir(tmp_path)
    uri = foreign(tracking, {"config.json": "{}"})
    assert list(artifacts.stored_files(tracking, uri)) == ["config.json"]
    run = tracking.client.get_model_version(*uri.removeprefix("models:/").split("/")).run_id
    assert list(artifacts.stored_files(tracking, f"runs:/{run}/model")) == ["config.json"]
    for other in (
        "models://profile@databricks/a/1",
        f"runs://profile@databricks/{run}/model",
        "models:/",
        "models:/a/1",
    ):
        with pytest.raises(DraftforgeError):
            artifacts.stored_files(tracking, other)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", ["", "x", "-1", "1.0", "1e3", "²", "9" * 5000, "253402300800000", None])
def test_a_number_of_the_store_that_is_none_is_named(number: Any) -> None:
    with pytest.raises(RegistryError, match=r"^m@champion: version: .{0,90}: must be a number"):
        whole_number(number, "m@champion: version")
    assert whole_number("17", "") == whole_number(17, "") == 17


def test_a_file_of_another_size_is_refused_and_removed(tracking: Tracking, crowned: Version, tmp_path: Path) -> None:
    sizes, into = artifacts.stored_files(tracking, crowned.source), tmp_path / "into"
    known, name = {name: sizes[name] for name in crowned.lineage.files}, min(crowned.lineage.files)
    into.mkdir()
    artifacts.download(tracking, crowned.source, known, into)
    assert contents(into).keys() == known.keys()
    with pytest.raises(RegistryError, match=f"{name}: has {known[name]} bytes, the store says {known[name] + 1}"):
        artifacts.download(tracking, crowned.source, known | {name: known[name] + 1}, into)
    assert not contents(into)


class Endless(BaseHTTPRequestHandler):
    """A server that never stops sending."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            while True:
                self.wfile.write(bytes(1 << 16))

    def log_message(self, format: str, *args: Any) -> None: ...


def test_a_server_sends_no_more_than_it_declares(
    tracking: Tracking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        uri = f"http://127.0.0.1:{server.server_port}/api/2.0/mlflow-artifacts/artifacts/1"
        monkeypatch.setattr(artifacts, "_repository", lambda *_: HttpArtifactRepository(uri))  # type: ignore[no-untyped-call]
        with pytest.raises(RegistryError, match=r"config\.json: is longer than the 5 bytes that the store declares"):
            artifacts.download(tracking, uri, {"config.json": 5}, tmp_path)
        server.shutdown()
    assert list(tmp_path.iterdir()) == []


def test_a_record_that_is_too_large_is_not_read(tracking: Tracking, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tracking.client.create_run(tracking.experiment_id).info
    tracking.client.log_text(run.run_id, "x" * 2000, "decisions/one.json")
    with artifacts.run_files(tracking, run.run_id, ["decisions/one.json"]) as folder:
        assert (folder / "decisions" / "one.json").stat().st_size == 2000
    monkeypatch.setattr(artifacts, "MOST_RECORD_BYTES", 1000)
    with (
        pytest.raises(RegistryError, match=r"one\.json: has 2\.00 kB; records of up to 1\.00 kB are read"),
        artifacts.run_files(tracking, run.run_id, ["decisions/one.json"]),
    ):
        pass


def test_a_place_that_is_no_address_is_refused(tracking: Tracking) -> None:
    """MLflow's own store registers none, but a server may name one."""
    with pytest.raises(RegistryError, match=r"^http://\[::1/x: its place is no address"):
        artifacts._repository(tracking, "http://[::1/x")
