"""The doctor names what is missing and how to mend it, and changes nothing."""

import json
import re
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

import draftforge
from draftforge.pipeline import doctor
from draftforge.pipeline.doctor import Check, Gpu

H100 = Gpu("H100", (9, 0), 78e9, 80e9)


def test_the_minimums_are_those_of_the_package() -> None:
    assert draftforge.__file__ is not None
    project = tomllib.loads((Path(draftforge.__file__).parent / "pyproject.toml").read_text())["project"]
    required = [*project["dependencies"], *project["optional-dependencies"]["deepspeed"]]
    matches = [re.fullmatch(r"([a-z]+)>=([\d.]+)", text) for text in required]
    stated = {match[1]: match[2] for match in matches if match}
    assert {name: stated[name] for name in doctor.MINIMUM} == doctor.MINIMUM
    assert project["requires-python"] == f">={doctor.PYTHON_MINIMUM}"


def test_old_and_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.9.1", "transformers": "5.17.0", "accelerate": "1.10", "peft": None, "mlflow": "3.10.1rc1"}
    monkeypatch.setattr(doctor, "installed", lambda name: versions.get(name))
    checks = {check.name: check for check in doctor.check_packages()}
    assert checks["torch"] == Check("torch", "FAIL", "2.9.1 (needs 2.11)", "pip install 'torch>=2.11'")
    assert checks["peft"].status == "FAIL" and checks["peft"].found == "not installed (needs 0.18)"
    assert [checks[name].status for name in ("transformers", "accelerate", "mlflow")] == ["OK", "OK", "OK"]
    assert checks["deepspeed"].status == "WARN" and checks["deepspeed"].remedy == "pip install 'draftforge[deepspeed]'"


@pytest.mark.parametrize(
    ("gpu", "status", "said"),
    [
        (H100, "OK", "H100, capability 9.0, 78.0 GB of 80.0 GB free"),
        (H100._replace(free_bytes=10e9), "WARN", "another process"),
        (Gpu("T4", (7, 5), 15e9, 16e9), "WARN", "no bfloat16"),
    ],
)
def test_gpus(gpu: Gpu, status: str, said: str) -> None:
    check = doctor.check_gpu(0, gpu)
    assert (check.name, check.status) == ("cuda:0", status)
    assert said in f"{check.found} {check.remedy}"


def test_torch_is_loaded_in_part_where_no_driver_is_and_a_broken_one_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "gpu_driver", lambda: False)
    gpus, (check,) = doctor.check_cuda()
    assert (gpus, check.status) == ([], "OK") and check.found.startswith("no device")
    # A library that is none, and no torch at all: its import says why.
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_python.so").write_text("cut off")
    monkeypatch.setitem(sys.modules, "torch", None)
    for spec in (ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py")), None):
        monkeypatch.setattr(doctor, "find_spec", lambda _, spec=spec: spec)
        (check,) = doctor.check_cuda()[1]
        assert check.status == "FAIL" and check.found.startswith("torch cannot be imported: ")


def test_the_engine_follows_devices_and_packages() -> None:
    assert doctor.check_engine([], "0.19").found.startswith("plain torch: one process, no CUDA")
    assert doctor.check_engine([H100], None).status == "FAIL"


def leave_free(monkeypatch: pytest.MonkeyPatch, gigabytes: float) -> None:
    class Usage:
        free = gigabytes * 1e9

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)


@pytest.mark.parametrize(("free_gb", "status"), [(50, "OK"), (3, "WARN"), (0.5, "FAIL")])
def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_gb: float, status: str) -> None:
    leave_free(monkeypatch, free_gb)
    assert doctor.check_disk(tmp_path / "not" / "yet").status == status
    assert not (tmp_path / "not").exists()


def test_a_work_folder_below_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert doctor.check_disk(tmp_path / "file" / "runs").status == "FAIL"


@pytest.fixture
def server() -> Iterator[str]:
    """A server on this machine whose answer is the first part of the path: /401/health answers 401."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(int(self.path.split("/")[1]))
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{http.server_address[1]}"
        http.shutdown()


@pytest.mark.parametrize(("code", "status"), [(200, "OK"), (302, "FAIL"), (401, "WARN"), (404, "FAIL")])
def test_a_tracking_server_that_answers(server: str, tmp_path: Path, code: int, status: str) -> None:
    assert doctor.check_tracking(f"{server}/{code}", tmp_path).status == status


@pytest.mark.parametrize(
    "uri",
    [
        "http://127.0.0.1:9",
        "postgresql://user:secret@127.0.0.1:9/db",
        "file:somewhere",
        "http://user:secret@127.0.0.1:x",
    ],
)
def test_a_tracking_store_that_does_not(uri: str, tmp_path: Path) -> None:
    check = doctor.check_tracking(uri, tmp_path)
    assert check.status == "FAIL" and check.remedy
    assert "secret" not in check.found


def test_a_broken_installation_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sqlalchemy.engine", None)
    check = doctor.check_tracking("sqlite:///x.db", tmp_path)
    assert check.status == "FAIL" and "sqlalchemy" in check.found


def test_the_default_store_needs_only_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    leave_free(monkeypatch, 50)
    check = doctor.check_tracking(None, tmp_path / "runs")
    assert (check.status, check.found) == ("OK", f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    assert not list(tmp_path.iterdir())


def test_json_and_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert doctor.doctor(tmp_path, as_json=True) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["ok"] is True
    names = {check["name"] for check in shown["checks"]}
    assert names >= {"python", "torch", "deepspeed", "cpu", "memory", "disk", "engine", "tracking"}
    assert doctor.doctor(tmp_path, "http://127.0.0.1:9", as_json=True) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_the_table_shows_text_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check = Check("deepspeed", "WARN", "not installed", "pip install 'draftforge[deepspeed]'")
    store = Check("tracking", "OK", f"sqlite:////{'folder/' * 30}mlflow.db")
    monkeypatch.setattr(doctor, "examine", lambda *_: [check, store])
    assert doctor.doctor(tmp_path) == 0
    shown = capsys.readouterr().out
    assert "draftforge[deepspeed]" in shown and "1 OK, 1 WARN, 0 FAIL" in shown
    assert store.found in shown  # not folded
