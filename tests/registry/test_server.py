"""The same flow through real MLflow servers, on SQLite and on PostgreSQL: REST answers differ from the database's."""

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow_server import SCRIPT, mlflow_server
from postgres import PASSWORD, postgres

from draftforge.errors import RegistryError, TrackingError
from draftforge.registry.champion_alias import decisions, history, promote, rollback
from draftforge.registry.connect import Tracking, open_tracking
from draftforge.registry.gate import Decision
from draftforge.registry.lineage import Version, holdout_overlap
from draftforge.registry.listing import listing
from draftforge.registry.settings import RegistrySettings
from draftforge.registry.tracking import start_run
from draftforge.registry.versions import CHAMPION, PREVIOUS, aliases, fetch, resolve_models_uri, targets

pytestmark = pytest.mark.slow
Register = Callable[..., Version]
TARGET = "a" * 64


@pytest.fixture(scope="session")
def postgres_uri() -> Iterator[str]:
    """A database on a PostgreSQL server."""
    with postgres() as uri:
        yield uri


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def server(
    request: pytest.FixtureRequest, shared_tracking: Tracking, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """An MLflow server over the session's database or PostgreSQL, that keeps artifacts itself."""
    store = shared_tracking.uri if request.param == "sqlite" else request.getfixturevalue("postgres_uri")
    with mlflow_server(store, tmp_path_factory.mktemp("server")) as url:
        yield url


@pytest.fixture
def tracking(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Tracking:
    """The server as the pipeline opens it, under a prefix of the test's own; `register` uses it too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    prefix = "".join(letter for letter in request.node.originalname if letter.isalnum())
    settings = RegistrySettings(model=prefix, experiment="served", connect_seconds=30)
    return open_tracking(settings, tmp_path)


def crown(tracking: Tracking, version: Version, compared: Version | None) -> None:
    reference = None if compared is None else compared.reference
    assert promote(tracking, Decision(promote=True, reasons=["better"], compared=reference), version).promote


def test_the_flow_through_a_server(
    tracking: Tracking, register: Register, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with start_run(tracking, "demo") as run:
        run.log_params({"steps": 3})
        run.sink().log(1, {"tau": 2.0, "loss": float("nan")})
        run.log_input("mix", tmp_path, "1" * 64)
    with start_run(tracking, "demo", run_id=run.id) as run:
        run.sink().log(1, {"tau": 2.0})
    assert len(tracking.client.get_metric_history(run.id, "tau")) == 1
    one = register("one", clusters=("a",))
    two = register("two", clusters=("b",), parent=one.reference)
    assert register("one") == one and (one.number, two.number) == (1, 2)
    assert one.source.startswith("mlflow-artifacts:")
    assert holdout_overlap(tracking, two, ["a", "x"]) == 1
    crown(tracking, one, None)
    crown(tracking, two, one)
    with pytest.raises(RegistryError, match="lost a race"):
        promote(tracking, Decision(promote=True, reasons=["x"]), one)
    (decision,) = decisions(tracking, two)
    assert decision.reasons == ["better"] and decision.compared == one.reference
    (listed,) = listing(tracking).targets
    assert [(alias, version.reference) for alias, version in listed.by_alias()] == [
        (CHAMPION, two.reference),
        (PREVIOUS, one.reference),
    ]
    assert fetch(tracking, TARGET, tmp_path / "out") == two
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"word": "two"}
    assert (tmp_path / "out" / "nested" / "chat_template.jinja").is_file()
    assert (resolve_models_uri(tracking, "models:/" + one.reference, tmp_path / "m") / "config.json").is_file()
    assert rollback(tracking, TARGET) == one and aliases(tracking, one.name) == {CHAMPION: 1}
    assert len(history(tracking, one.name)) == 3 and targets(tracking)[0].champion == 1
    with pytest.raises(RegistryError, match="has no champion in the registry; targets with a champion: target-aa"):
        fetch(tracking, "b" * 64, tmp_path / "none")
    assert capfd.readouterr() == ("", "")


def attempt(tracking: Tracking, rival: Version, compared: str, start: Any, outcomes: Any) -> None:
    """Promote in a process of its own, as soon as all are ready."""
    start.wait(60)
    try:
        promote(tracking, Decision(promote=True, reasons=["better"], compared=compared), rival)
        outcomes.put("won")
    except RegistryError as error:
        outcomes.put(str(error))


def test_two_processes_that_race_have_one_winner(tracking: Tracking, register: Register) -> None:
    """On one host, where the lock is shared; each process makes connections of its own."""
    champion, *rivals = (register(word) for word in ("one", "two", "three"))
    crown(tracking, champion, None)
    fork = multiprocessing.get_context("fork")
    start, outcomes = fork.Barrier(2), fork.SimpleQueue()
    racers = [
        fork.Process(target=attempt, args=(tracking, rival, champion.reference, start, outcomes)) for rival in rivals
    ]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(120)
    said = [outcomes.get() for _ in rivals]
    assert said.count("won") == 1 and sum("lost a race" in line for line in said) == 1, said
    known = aliases(tracking, champion.name)
    assert known[CHAMPION] in (2, 3) and known[PREVIOUS] == 1
    assert [event["to"] for event in history(tracking, champion.name)] == [1, known[CHAMPION]]


def test_a_version_is_an_mlflow_model_there_too(tracking: Tracking, register: Register) -> None:
    info = mlflow.models.get_model_info(register("one").uri)
    assert info.signature is not None and "python_function" in info.flavors
    assert {param.name for param in info.signature.params} >= {"max_new_tokens", "temperature"}


def test_a_password_is_never_shown(postgres_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tracking = open_tracking(RegistrySettings(tracking_uri=postgres_uri), tmp_path)  # the database, with no server
    assert PASSWORD not in repr(tracking)
    wrong = postgres_uri.replace(PASSWORD, "wr0ng")
    with pytest.raises(TrackingError, match="password authentication failed") as raised:
        open_tracking(RegistrySettings(tracking_uri=wrong), tmp_path)
    assert "wr0ng" not in str(raised.value)


@pytest.mark.parametrize(
    ("store", "words"),
    [
        ("", "must name the database"),
        ("postgresql://u:p@h/d", "must begin with postgresql+psycopg"),
        ("x", "sqlite:///"),
    ],
)
def test_the_script_refuses_what_it_cannot_serve(store: str, words: str, tmp_path: Path) -> None:
    env = os.environ | {"MLFLOW_BACKEND_STORE_URI": store, "PYTHON": sys.executable}
    ended = subprocess.run([str(SCRIPT), str(tmp_path)], env=env, capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0 and ended.stdout == ""
    assert len(ended.stderr.splitlines()) == 1 and words in ended.stderr
