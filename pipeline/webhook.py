"""MLflow's registry webhooks: a small server that believes signed events only, and says which of them matter.

MLflow signs `delivery id . timestamp . body` with HMAC-SHA256 and sends `v1,<base64>`. An event older or newer than
five minutes, or one that was seen before, is not acted on.
"""

import base64
import hashlib
import hmac
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ..errors import InputError
from ..progress import say

SECRET_VARIABLE = "DRAFTFORGE_WEBHOOK_SECRET"
SIGNATURE, TIMESTAMP, DELIVERY = "X-MLflow-Signature", "X-MLflow-Timestamp", "X-MLflow-Delivery-Id"
MOST_BYTES = 64 * 1024
_SKEW_SECONDS = 300.0
_REMEMBERED = 1000  # deliveries: more than five minutes of them
_PATIENCE_SECONDS = 10.0


def secret_of(environment: Mapping[str, str] = os.environ) -> str:
    """The webhook's secret. Raises InputError where there is none: anybody could ask for retrainings."""
    secret = environment.get(SECRET_VARIABLE, "")
    if not secret:
        raise InputError(f"{SECRET_VARIABLE}: is not set; it must hold the secret that the webhook was made with")
    return secret


def signature(secret: str, delivery: str, timestamp: str, body: bytes) -> str:
    """What MLflow puts into the header `X-MLflow-Signature`."""
    signed = f"{delivery}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.new(secret.encode(), signed, hashlib.sha256).digest()).decode()


def concerns(event: Any, name: str, alias: str) -> bool:
    """Whether an event says that `models:/name@alias` names a version anew."""
    if not isinstance(event, dict) or not isinstance(event.get("data"), dict):
        return False
    kind, data = (event.get("entity"), event.get("action")), event["data"]
    return kind == ("model_version_alias", "created") and (data.get("name"), data.get("alias")) == (name, alias)


def followed(model: str) -> tuple[str, str]:
    """Name and alias of a target that follows an alias. InputError for any other: no event could concern it."""
    name, at, alias = model.removeprefix("models:/").partition("@")
    if not (model.startswith("models:/") and at):
        raise InputError(f"--webhook: target.model {model}: must be models:/NAME@ALIAS; no event tells of another")
    return name, alias


class Receiver:
    """Checks deliveries; `accept` gives the HTTP status and acts on what concerns the target."""

    def __init__(self, secret: str, matters: Callable[[Any], bool], act: Callable[[], None]) -> None:
        self._secret, self._matters, self._act = secret, matters, act
        self._seen: deque[str] = deque(maxlen=_REMEMBERED)
        self._lock = threading.Lock()

    def accept(self, headers: Mapping[str, str], body: bytes) -> int:
        """202: acted on; 204: authentic, and nothing to do; 400: not JSON; 401: not authentic."""
        delivery, timestamp = headers.get(DELIVERY) or "", headers.get(TIMESTAMP) or ""
        wanted = signature(self._secret, delivery, timestamp, body)
        if not hmac.compare_digest(wanted.encode(), (headers.get(SIGNATURE) or "").encode()):
            return 401
        if not (timestamp.isdecimal() and abs(time.time() - int(timestamp)) <= _SKEW_SECONDS):
            return 401
        with self._lock:
            if delivery in self._seen:
                return 204
            self._seen.append(delivery)
        try:
            event = json.loads(body)
        except (ValueError, RecursionError):
            return 400
        if not self._matters(event):
            return 204
        say(f"webhook: {event['data']['name']} changed")
        self._act()
        return 202


@contextmanager
def listening(receiver: Receiver, address: str, port: int) -> Iterator[int]:
    """Serve deliveries meanwhile; yields the port (0 takes a free one). InputError where it cannot be had."""
    try:
        server = ThreadingHTTPServer((address, port), _handler(receiver))
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(f"--webhook {port}: cannot listen on {address}:{port} ({reason})") from None
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(receiver: Receiver) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _PATIENCE_SECONDS
        server_version, sys_version = "draftforge", ""

        def do_POST(self) -> None:
            length = self.headers.get("Content-Length") or ""
            if not length.isdecimal():
                self._answer(411)
            elif int(length) > MOST_BYTES:
                self._answer(413)
            else:
                body = self.rfile.read(int(length))
                self._answer(receiver.accept(self.headers, body))  # type: ignore[arg-type]

        def _answer(self, status: int) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True

        def log_message(self, format: str, *args: Any) -> None:
            """Deliveries that change something are said; the rest is noise that anybody can make."""

    return Handler
