"""MLflow's webhooks: signed as MLflow signs them, and nothing that is not."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import pytest
from mlflow.webhooks import delivery as mlflow_delivery

from draftforge.errors import InputError
from draftforge.pipeline import watch
from draftforge.pipeline.watch import (
    DELIVERY,
    SIGNATURE,
    TIMESTAMP,
    Receiver,
    listening,
    matches,
    secret_of,
    watched_alias,
)

SECRET = "not a real secret"
MOVED = {
    "entity": "model_version_alias",
    "action": "created",
    "timestamp": "2026-01-01T00:00:00+00:00",
    "data": {"name": "assistant", "alias": "production", "version": "7"},
}


class Server:
    def __init__(self) -> None:
        self.asked = 0
        self.receiver = Receiver(SECRET, lambda event: matches(event, "assistant", "production"), self._ask)
        self.port = 0

    def _ask(self) -> None:
        self.asked += 1

    def post(self, body: bytes, headers: dict[str, str]) -> int:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("POST", "/", body, headers)
            return connection.getresponse().status
        finally:
            connection.close()


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    with listening(found.receiver, "127.0.0.1", 0) as found.port:
        yield found


def signed(body: bytes, delivery: str = "d1", at: float | None = None, secret: str = SECRET) -> dict[str, str]:
    """Headers as MLflow's own code makes them."""
    stamp = str(int(time.time() if at is None else at))
    mark = mlflow_delivery._generate_hmac_signature(secret, delivery, stamp, body.decode())
    return {SIGNATURE: mark, TIMESTAMP: stamp, DELIVERY: delivery}


def test_an_alias_that_moved_asks_for_a_retraining_once(server: Server) -> None:
    body = json.dumps(MOVED).encode()
    assert server.post(body, signed(body)) == 202
    assert server.post(body, signed(body)) == 204  # the same delivery again
    assert server.asked == 1


@pytest.mark.parametrize(
    "change",
    [
        {"entity": "model_version", "action": "created"},
        {"action": "deleted"},
        {"data": {"name": "assistant", "alias": "staging", "version": "7"}},
        {"data": {"name": "another", "alias": "production", "version": "7"}},
        {"data": None},
    ],
)
def test_other_events_are_heard_and_left(change: dict[str, Any], server: Server) -> None:
    body = json.dumps(MOVED | change).encode()
    assert server.post(body, signed(body)) == 204 and server.asked == 0


def test_what_is_not_signed_rightly_is_refused(server: Server) -> None:
    body = json.dumps(MOVED).encode()
    assert server.post(body, {}) == 401
    assert server.post(body, signed(body, secret="another")) == 401
    assert server.post(body + b" ", signed(body)) == 401
    for name in (SIGNATURE, TIMESTAMP, DELIVERY):
        headers = signed(body)
        del headers[name]
        assert server.post(body, headers) == 401
    assert server.post(body, signed(body) | {DELIVERY: "d2"}) == 401  # the signature covers the id
    assert server.post(body, signed(body, at=time.time() - 301)) == 401
    assert server.post(body, signed(body, at=time.time() + 330)) == 401
    assert server.asked == 0
    assert server.post(b"{", signed(b"{", "d3")) == 400
    assert server.post(b"[]", signed(b"[]", "d4")) == 204


def test_bodies_have_a_limit_and_a_length(server: Server) -> None:
    large = b"x" * (watch.MOST_BYTES + 1)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
        raw.sendall(f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {len(large)}\r\n\r\n".encode())
        assert b" 413 " in raw.recv(100)  # before any of it was read
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
        raw.sendall(b"POST / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 411 " in raw.recv(100)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 501 " in raw.recv(100)


def test_a_silent_client_holds_up_nobody(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps(MOVED).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
        raw.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nab")
        assert server.post(body, signed(body)) == 202


def test_many_at_once_ask_once_each(server: Server) -> None:
    body = json.dumps(MOVED).encode()
    statuses: list[int] = []
    threads = [
        threading.Thread(target=lambda: statuses.append(server.post(body, signed(body, "same")))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(statuses) == [202] + [204] * 7 and server.asked == 1


def test_mlflow_itself_is_heard(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A delivery by MLflow's own sender."""
    from mlflow.entities.webhook import Webhook, WebhookAction, WebhookEntity, WebhookEvent

    monkeypatch.setenv("MLFLOW_WEBHOOK_ALLOWED_SCHEMES", "http")
    monkeypatch.setenv("MLFLOW_WEBHOOK_ALLOW_PRIVATE_IPS", "true")
    event = WebhookEvent(WebhookEntity.MODEL_VERSION_ALIAS, WebhookAction.CREATED)
    hook = Webhook("id", "name", f"http://127.0.0.1:{server.port}/", [event], 0, 0, secret=SECRET)
    session = mlflow_delivery._create_webhook_session()
    payload: Any = {"name": "assistant", "alias": "production", "version": "8"}
    assert mlflow_delivery._send_webhook_request(hook, payload, event, session).status_code == 202
    assert server.asked == 1


def test_without_a_secret_or_an_alias_nothing_listens() -> None:
    assert secret_of({watch.SECRET_VARIABLE: "s"}) == "s"
    with pytest.raises(InputError, match="DRAFTFORGE_WEBHOOK_SECRET: is not set"):
        secret_of({})
    assert watched_alias("models:/assistant@production") == ("assistant", "production")
    for model in ("models:/assistant/3", "./folder", "owner/name@production"):
        with pytest.raises(InputError, match="must be models:/NAME@ALIAS"):
            watched_alias(model)


def test_a_taken_port_is_one_line(server: Server) -> None:
    said = rf"--webhook {server.port}: cannot listen on 127.0.0.1:{server.port} \("
    with pytest.raises(InputError, match=said), listening(server.receiver, "127.0.0.1", server.port):
        pass
