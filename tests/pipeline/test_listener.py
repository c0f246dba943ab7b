"""Hostile peers of a listener: many at once, slow ones, and ones that break off."""

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from draftforge.pipeline import listener
from draftforge.pipeline.listener import Handler, listening_on


class Echo(Handler):
    """Answers with the body that it was sent."""

    def do_POST(self) -> None:  # noqa: N802  http.server's name
        self.answer(200, self.rfile.read(int(self.headers["Content-Length"])), "text/plain")

    def do_PUT(self) -> None:  # noqa: N802  http.server's name
        raise ConnectionResetError("the peer went away")


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(listener, "MOST_CONNECTIONS", 3)
    with listening_on(Echo, "127.0.0.1", 0, "--listen 127.0.0.1:0") as port:
        yield port


def connected(port: int, data: bytes = b"") -> socket.socket:
    found = socket.create_connection(("127.0.0.1", port), timeout=60)
    found.sendall(data)
    return found


def answered(port: int) -> bytes:
    with connected(port, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi") as peer:
        try:
            return b"".join(iter(lambda: peer.recv(1000), b""))
        except ConnectionResetError:
            return b""


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_only_so_many_connections_are_open_at_once(port: int) -> None:
    before = threading.active_count()
    idle = [connected(port) for _ in range(3)]
    until(lambda: threading.active_count() == before + 3)
    extra = [connected(port) for _ in range(20)]
    for peer in extra:
        assert peer.recv(10) == b""  # closed, and no thread began
    assert threading.active_count() == before + 3
    for peer in (*idle, *extra):
        peer.close()
    until(lambda: threading.active_count() == before)
    assert answered(port).endswith(b"\r\n\r\nhi")


@pytest.mark.slow
def test_a_connection_ends_after_its_time_however_it_trickles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "REQUEST_SECONDS", 0.5)
    with listening_on(Echo, "127.0.0.1", 0, "--listen 127.0.0.1:0") as port:
        with connected(port, b"POST / HTTP/1.1\r\nX: ") as peer, pytest.raises(ConnectionError):
            while True:  # each byte comes long before the next read would be over time
                peer.sendall(b"x")
                time.sleep(0.02)
        monkeypatch.setattr(listener, "REQUEST_SECONDS", 60.0)
        assert answered(port).endswith(b"\r\n\r\nhi")


def test_a_broken_peer_is_one_line(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    with connected(port, b"PUT / HTTP/1.1\r\nHost: x\r\n\r\n") as peer:
        assert peer.recv(10) == b""
    said = ""
    while "\n" not in said:
        said += capsys.readouterr().err
        time.sleep(0.01)
    assert said.splitlines() == ["listen: 127.0.0.1: ConnectionResetError: the peer went away"]
