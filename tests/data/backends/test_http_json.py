"""Hostile replies of a server: without end, trickling, unpacking to gigabytes, nested deeper than a parser goes."""

import gzip
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from draftforge.data.backends.http_json import JsonServer
from draftforge.errors import EngineError

Write = Callable[[BaseHTTPRequestHandler], object]
Serve = Callable[[Write, dict[str, str]], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a server that answers each request with these headers and what `write` writes."""
    servers: list[ThreadingHTTPServer] = []

    def start(write: Write, headers: dict[str, str]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                with suppress(OSError):
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


def test_a_reply_within_the_limits_is_read(serve: Serve) -> None:
    packed = gzip.compress(b'{"a": [1, 2]}')
    headers = {"Content-Encoding": "gzip", "Content-Length": str(len(packed))}
    assert asked(serve(lambda handler: handler.wfile.write(packed), headers)) == {"a": [1, 2]}


def endless(handler: BaseHTTPRequestHandler) -> None:
    while True:
        handler.wfile.write(b" " * 10_000)


def trickling(handler: BaseHTTPRequestHandler) -> None:
    stopped = threading.Event()
    while not stopped.wait(0.02):
        handler.wfile.write(b" ")


@pytest.mark.parametrize("packed", [False, True])
def test_a_reply_without_end_is_not_read_on(serve: Serve, packed: bool) -> None:
    bomb = gzip.compress(bytes(50_000_000))
    url = (
        serve(lambda handler: handler.wfile.write(bomb), {"Content-Encoding": "gzip"}) if packed else serve(endless, {})
    )
    with pytest.raises(EngineError, match=r"unusable reply \(the reply has more than 1\.00 kB\) \(1 tries\)"):
        asked(url)


def test_a_reply_that_trickles_ends_with_its_time(serve: Serve) -> None:
    with pytest.raises(EngineError, match="the reply is not complete in time"):
        asked(serve(trickling, {}), seconds=0.5)


def test_a_deep_reply_is_unusable(serve: Serve) -> None:
    with pytest.raises(EngineError, match=r"unusable reply .*nested deeper than 100 levels"):
        asked(serve(lambda handler: handler.wfile.write(b"[" * 400 + b"]" * 400), {}))
