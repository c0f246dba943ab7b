"""HTTP listener of the webhook and of the metrics: bounded connections, threads and time.

Who connects is not known yet: a connection costs a thread, so there are few of them, and each is ended after its time,
however slowly it sends or reads.
"""

import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ..errors import InputError, one_line
from ..progress import say

MOST_CONNECTIONS = 16
"""Connections at once, a thread each; one more is closed as soon as it is there."""
REQUEST_SECONDS = 10.0
"""Time of a whole connection: request, answer, and every pause between."""
_POLL_SECONDS = 0.25


class Handler(BaseHTTPRequestHandler):
    """Handler that says nothing of itself, logs nothing, and closes the connection after one answer."""

    timeout = REQUEST_SECONDS
    server_version, sys_version = "draftforge", ""

    def answer(self, status: int, body: bytes = b"", kind: str = "") -> None:
        """Send a status and a body, and close the connection."""
        self.send_response(status)
        if kind:
            self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: what matters is said, and the rest is noise that anybody can make."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True  # open connections must not keep the process alive

    def __init__(self, address: tuple[str, int], handler: type[Handler], name: str) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self._name = name
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._ends: dict[socket.socket, float] = {}
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        self._ends[request] = time.monotonic() + REQUEST_SECONDS
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            del self._ends[request]
            self._free.release()

    def service_actions(self) -> None:
        """End connections whose time is over; their threads then read nothing more."""
        now = time.monotonic()
        for request, end in list(self._ends.items()):
            if now > end:
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say a broken connection, or a mistake in answering it, in one line."""
        error = sys.exc_info()[1]
        if error is not None:
            say(f"{self._name}: {client_address[0]}: {type(error).__name__}: {one_line(error)}")


@contextmanager
def listening_on(handler: type[Handler], address: str, port: int, option: str) -> Iterator[int]:
    """Serve requests in threads while the body runs; yields the port (0 takes a free one).

    Raises InputError, beginning with the option, where the address cannot be listened on.
    """
    try:
        server = _Server((address, port), handler, option.split()[0].lstrip("-"))
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(f"{option}: cannot listen on {address}:{port} ({reason})") from None
    thread = threading.Thread(target=server.serve_forever, args=(_POLL_SECONDS,), daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
