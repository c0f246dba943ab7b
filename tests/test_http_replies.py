"""Replies of servers that send for ever: no more of them is taken than is needed, whatever their status."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from mlflow.utils.rest_utils import MlflowHostCreds, http_request

from draftforge import http_replies
from draftforge.errors import TrackingError
from draftforge.http_replies import bounded_session, read_body
from draftforge.registry import artifacts
from draftforge.registry.connect import mlflow_errors

MOST_SENT = 64 << 20


class Sending:
    """A server whose replies have a head and a body without an end."""

    def __init__(self) -> None:
        self.head, self.sent, self.asked = b"", 0, 0
        self.ended = threading.Event()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            with client:
                client.recv(65536)
                self.asked += 1
                try:
                    client.sendall(self.head + b"Content-Length: 99999999999\r\n\r\n")
                    while self.sent < MOST_SENT:
                        client.sendall(b"x" * (1 << 16))
                        self.sent += 1 << 16
                except OSError:
                    pass
            self.ended.set()

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def sending() -> Iterator[Sending]:
    server = Sending()
    yield server
    server.close()


@pytest.mark.parametrize("stream", [True, False])
def test_the_body_of_a_redirect_is_not_read(sending: Sending, stream: bool) -> None:
    """requests reads it whole, also where the redirect is not followed: gigabytes within the time of a reply."""
    sending.head = f"HTTP/1.1 302 Found\r\nLocation: {sending.address}/x\r\n".encode()
    with bounded_session() as session:
        reply = session.get(sending.address, timeout=30, allow_redirects=False, stream=stream)
        assert (reply.status_code, read_body(reply, 10)) == (302, b"")
    assert sending.ended.wait(30) and sending.sent < MOST_SENT


@pytest.mark.parametrize("kind", ["", "; charset=punycode", "; charset=utf-16"])
def test_no_encoding_is_guessed_or_taken_from_a_server(sending: Sending, kind: str) -> None:
    """A guess takes a minute for 32 megabytes, and punycode hours."""
    text = "é" * 1000
    sending.head = f"HTTP/1.1 200 OK\r\nContent-Type: text/plain{kind}\r\nX: ".encode()
    with bounded_session() as session:
        reply = session.get(sending.address, timeout=30, stream=True)
        reply._content = text.encode()
        assert reply.text == text
        reply.close()


def test_mlflow_follows_no_redirect(sending: Sending) -> None:
    """Each would begin anew with its time: thirty of them took an hour."""
    sending.head = f"HTTP/1.1 302 Found\r\nLocation: {sending.address}/x\r\n".encode()
    reply: Any = http_request(MlflowHostCreds(sending.address), "/y", "GET")  # type: ignore[no-untyped-call]
    assert (reply.status_code, sending.asked) == (302, 1)


def test_the_refusal_of_a_download_is_read_up_to_a_size(
    sending: Sending, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow reads all that a server says with an error."""
    monkeypatch.setattr(artifacts, "_MOST_ERROR_BYTES", 1000)
    sending.head = b"HTTP/1.1 404 Not Found\r\n"
    server: Any = SimpleNamespace(_host_creds=MlflowHostCreds(sending.address))  # type: ignore[no-untyped-call]
    with pytest.raises(TrackingError, match=r"the reply has more than 1\.00 kB"), mlflow_errors(sending.address):
        artifacts._download_from_server(server, "a", 1000, tmp_path / "a")
    assert sending.ended.wait(30) and sending.sent < MOST_SENT


def test_a_server_that_takes_a_little_now_and_then_ends_an_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece is taken within the timeout, all of them never."""
    monkeypatch.setattr(http_replies, "LEAST_BYTES_A_SECOND", 1e9)
    taken = 0
    with socket.create_server(("127.0.0.1", 0)) as server:

        def take() -> None:
            nonlocal taken
            with server.accept()[0] as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
                while part := client.recv(1 << 20):
                    taken += len(part)
                    time.sleep(0.02)

        threading.Thread(target=take, daemon=True).start()
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        with bounded_session() as session, pytest.raises(requests.RequestException, match="not taken in time"):
            session.put(address, data=(b"x" * (1 << 16) for _ in range(4096)), timeout=0.3)
    assert taken < 256 << 20
