"""A stand-in of the Hugging Face hub's API on this machine: it takes repositories and commits, large files by LFS."""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from huggingface_hub import _commit_api, constants


class Hub:
    """What the stand-in was told, and what it answers."""

    def __init__(self) -> None:
        self.url = ""
        self.token = "hf_" + "a" * 34
        self.repositories: dict[str, dict[str, Any]] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.titles: list[str] = []
        self.cards: dict[str, dict[str, str]] = {"owner/model": {"license": "apache-2.0"}}
        """Metadata of the models that it knows."""
        self.blobs: dict[str, bytes] = {}
        self.down = False


@contextmanager
def hub_stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A running stand-in that huggingface_hub asks instead of the hub, with a token that may write."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            card = hub.cards.get(self.path.removeprefix("/api/models/"))
            if card is None:
                self.answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
            else:
                self.answer(200, {"id": self.path.removeprefix("/api/models/"), "cardData": card})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Authorization") != f"Bearer {hub.token}":
                self.answer(401, {"error": "Invalid username or password."})
            elif hub.down:
                self.answer(503, {"error": "back soon"})
            elif self.path == "/api/repos/create":
                asked = json.loads(body)
                name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
                if name in hub.repositories:
                    self.answer(409, {"url": f"{hub.url}/{name}"})
                else:
                    hub.repositories[name] = asked
                    self.answer(200, {"url": f"{hub.url}/{name}"})
            elif self.path.endswith("/preupload/main"):
                modes = [
                    {"path": one["path"], "shouldIgnore": False, "uploadMode": mode(one["path"])}
                    for one in json.loads(body)["files"]
                ]
                self.answer(200, {"files": modes})
            elif self.path.endswith("/info/lfs/objects/batch"):
                objects = [
                    {"oid": one["oid"], "size": one["size"], "actions": {"upload": {"href": f"{hub.url}/{one['oid']}"}}}
                    for one in json.loads(body)["objects"]
                ]
                self.answer(200, {"transfer": "basic", "objects": objects})
            elif self.path.endswith("/commit/main"):
                self.commit(self.path.split("/")[3:5], [json.loads(line) for line in body.splitlines()])
            else:
                self.answer(200, {})

        def do_PUT(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            assert hashlib.sha256(data).hexdigest() == self.path[1:]
            hub.blobs[self.path[1:]] = data
            self.answer(200, {})

        def commit(self, repository: list[str], lines: list[dict[str, Any]]) -> None:
            files = hub.files.setdefault("/".join(repository), {})
            for line in lines:
                value = line["value"]
                if line["key"] == "header":
                    hub.titles.append(value["summary"])
                elif line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                else:
                    files[value["path"]] = hub.blobs[value["oid"]]
            name = "/".join(repository)
            self.answer(200, {"commitUrl": f"{hub.url}/{name}/commit/{'c' * 40}", "commitOid": "c" * 40})

        def answer(self, status: int, value: object, headers: dict[str, str] | None = None) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            for name, text in (headers or {}).items():
                self.send_header(name, text)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Tests print nothing of it."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server, monkeypatch.context() as patch:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        patch.setattr(constants, "ENDPOINT", hub.url)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(_commit_api, "is_xet_available", lambda: False)
        patch.setenv("HF_TOKEN", hub.token)
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield hub
        finally:
            server.shutdown()


def mode(path: str) -> str:
    return "lfs" if path.endswith((".safetensors", ".gguf")) else "regular"
