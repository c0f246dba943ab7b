"""Hostile replies of a server: without end, trickling, unpacking to gigabytes, nested deeper than a parser goes."""

import gzip
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import requests
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from draftforge.data import read_limits
from draftforge.data.backends.http_json import JsonServer, key_in
from draftforge.errors import EngineError, InputError
from draftforge.http_replies import BoundedAdapter, bounded_session, extend_time, read_body
from draftforge.registry.connect import quick_requests

Write = Callable[[BaseHTTPRequestHandler], object]
Serve = Callable[[Write, dict[str, str]], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a server that answers each request with these headers and what `write` writes."""
    servers: list[ThreadingHTTPServer] = []

    def start(write: Write, headers: dict[str, str]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                with suppress(OSError):
                    self.send_response(200)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    if write is not trickling_headers:
                        self.end_headers()
                    write(self)

            def log_message(self, format: str, *args: Any) -> None: ...

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def asked(url: str, seconds: float = 60.0, most_bytes: int = 1000) -> Any:
    return JsonServer("capture.backend.url", url, None, seconds, 0, most_bytes).get("/x", lambda reply: reply)


@pytest.mark.parametrize("key", ["topsecret\n", "top secret", "topsecr€t"])
def test_a_key_that_no_header_takes_is_not_shown(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("ENGINE", key)
    with pytest.raises(InputError, match="ENGINE must hold one word of ASCII") as caught:
        key_in("ENGINE", "capture.backend.api_key_env")
    assert "top" not in str(caught.value)


def test_a_reply_within_the_limits_is_read(serve: Serve) -> None:
    packed = gzip.compress(b'{"a": [1, 2]}')
    headers = {"Content-Encoding": "gzip", "Content-Length": str(len(packed))}
    assert asked(serve(lambda handler: handler.wfile.write(packed), headers)) == {"a": [1, 2]}


def test_a_reply_of_many_objects_is_no_answer(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_limits, "MOST_CONTAINERS", 10)
    url = serve(lambda handler: handler.wfile.write(b"[[],[],[],[],[],[],[],[],[],[]]"), {"Connection": "close"})
    with pytest.raises(EngineError, match="has more than 10 objects and lists"):
        asked(url)


def test_one_reply_at_a_time_is_made_into_objects(serve: Serve) -> None:
    url = serve(lambda handler: handler.wfile.write(b"[]"), {"Content-Length": "2"})
    server, both = JsonServer("capture.backend.url", url, None, 60.0, 0, 1000), threading.Barrier(2)
    met: list[bool] = []

    def read(reply: Any) -> None:
        with suppress(threading.BrokenBarrierError):
            both.wait(0.3)
            met.append(True)

    threads = [threading.Thread(target=server.get, args=("/x", read)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not met


def endless(handler: BaseHTTPRequestHandler) -> None:
    while True:
        handler.wfile.write(b" " * 10_000)


def trickling(handler: BaseHTTPRequestHandler) -> None:
    stopped = threading.Event()
    while not stopped.wait(0.02):
        handler.wfile.write(b" ")


def trickling_headers(handler: BaseHTTPRequestHandler) -> None:
    handler.flush_headers()
    trickling(handler)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_a_reply_without_end_is_not_read_on(serve: Serve, packed: bool) -> None:
    bomb = gzip.compress(bytes(50_000_000))
    url = (
        serve(lambda handler: handler.wfile.write(bomb), {"Content-Encoding": "gzip"}) if packed else serve(endless, {})
    )
    with pytest.raises(EngineError, match=r"unusable reply \(the reply has more than 1\.00 kB\) \(1 tries\)"):
        asked(url)


@pytest.mark.slow
@pytest.mark.parametrize("write", [trickling, trickling_headers])
def test_a_reply_that_trickles_ends_with_its_time(serve: Serve, write: Write) -> None:
    with pytest.raises(EngineError, match=r"no reply \(timed out\) \(1 tries\)"):
        asked(serve(write, {}), seconds=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("write", [trickling, trickling_headers, endless])
def test_mlflow_takes_bounded_replies(serve: Serve, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    for adapter in (BoundedAdapter, *BoundedAdapter.__subclasses__()):
        monkeypatch.setattr(adapter, "most_bytes", 1000)
    said = r"has more than 1\.00 kB" if write is endless else "timed out"
    with quick_requests(60 if write is endless else 1), pytest.raises(MlflowException, match=said):
        MlflowClient(serve(write, {})).get_experiment("1")


def test_a_download_has_more_time_by_its_size(serve: Serve) -> None:
    with bounded_session() as session, session.get(serve(trickling, {}), stream=True, timeout=60) as reply:
        extend_time(reply, 0.3)
        with pytest.raises(requests.ConnectionError, match="timed out"):
            read_body(reply, 1000)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (None, "connection refused"),
        (socket.gaierror(-2, "Name or service not known"), "unknown host"),
        (TimeoutError(), "timed out"),
        (OSError(113, "No route to host"), "No route to host"),
    ],
)
def test_no_connection_is_told_in_a_few_words(
    error: OSError | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: Any, **options: Any) -> Any:
        assert error is not None
        raise error

    if error is not None:
        monkeypatch.setattr(socket, "getaddrinfo", fails)
    with pytest.raises(
        EngineError, match=rf"^capture\.backend\.url: 127\.0\.0\.1:9: no reply \({says}\) \(1 tries\); the"
    ):
        asked("http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("sent", "says"), [(b"", "connection lost"), (b"Content-Length: 9\r\n\r\n{", "connection lost")]
)
def test_a_lost_connection_is_told_in_a_few_words(sent: bytes, says: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            with listening.accept()[0] as peer:
                peer.recv(1000)
                peer.sendall(b"HTTP/1.1 200 OK\r\n" * bool(sent) + sent)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(EngineError, match=rf"no reply \({says}\)"):
            asked(f"http://127.0.0.1:{listening.getsockname()[1]}")


def test_a_server_that_says_nothing_timed_out() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        pytest.raises(EngineError, match=r"no reply \(timed out\)"),
    ):
        asked(f"http://127.0.0.1:{listening.getsockname()[1]}", seconds=0.05)


def test_a_deep_reply_is_unusable(serve: Serve) -> None:
    with pytest.raises(EngineError, match=r"unusable reply .*nested deeper than 100 levels"):
        asked(serve(lambda handler: handler.wfile.write(b"[" * 400 + b"]" * 400), {}))
