"""JSON over HTTP with retries: lost connections, timeouts, 408, 425, 429, 5xx and unusable replies are tried again.

The retry loop is our own. urllib3's `Retry` covers a request only until the reply's headers have come: it does not
repeat a request whose body is cut or is no answer, its waits cannot be ended, and it obeys a `Retry-After` of any
length.
"""

import os
import random
import threading
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import requests

from ...errors import DraftforgeError, EngineError, InputError, one_line
from ...http_replies import BearerAuth, UnusableError, bounded_session, no_reply_reason, read_body
from ...storage import parse_json
from ..read_limits import json_within

T = TypeVar("T")
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.5, 30.0
_CONNECT_SECONDS = 10.0
_MOST_ERROR_BYTES = 1 << 20
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
_RETRYABLE = frozenset({408, 425, 429, 500, 502, 503, 504})


class RefusedError(InputError):
    """The server will not do what it was asked."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class _RetryableError(Exception):
    def __init__(self, message: str, wait_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.wait_seconds = wait_seconds
        """Least wait before the next try (`Retry-After`)."""


class JsonServer:
    """HTTP client of one server for any number of threads, each with a connection of its own.

    `field`: the recipe's field that names the server, for error messages; `most_bytes`: of a reply.
    """

    def __init__(
        self, field: str, url: str, key: str | None, timeout_seconds: float, retries: int, most_bytes: int
    ) -> None:
        self._most_bytes = most_bytes
        self.name = f"{field}: {urlsplit(url).netloc}"
        self._url, self._auth, self._timeout, self._retries = url, BearerAuth(key), timeout_seconds, retries
        self._here = urlsplit(url).hostname in _LOOPBACK
        self._local = threading.local()
        self._closed = threading.Event()
        self._reading = threading.Lock()

    def close(self) -> None:
        """End waits between tries; nothing is tried again."""
        self._closed.set()

    def get(self, path: str, read: Callable[[Any], T]) -> T:
        """Request a path; returns what `read` makes of the reply.

        `read` raises UnusableError, KeyError, TypeError or ValueError for a useless reply. Raises EngineError after the
        last try, RefusedError for a 4xx.
        """
        return self._request("GET", path, None, lambda content: read(json_within(content.decode())))

    def post(self, path: str, body: Any, read: Callable[[Any], T], most_bytes: int = 1 << 62) -> T:
        """Request a path with a body, of a reply of at most `most_bytes`; see `get`."""
        return self._request("POST", path, body, lambda content: read(json_within(content.decode())), most_bytes)

    def get_text(self, path: str) -> str:
        """Request a path whose reply is text (UTF-8), not JSON; see `get`."""
        return self._request("GET", path, None, lambda content: content.decode())

    def _request(self, method: str, path: str, body: Any, read: Callable[[bytes], T], most_bytes: int = 1 << 62) -> T:
        for attempt in range(self._retries + 1):
            try:
                return self._try(method, path, body, read, min(most_bytes, self._most_bytes))
            except _RetryableError as error:
                # Doubling waits with jitter, or what the server asks for where that is longer.
                failure, wait = error, FIRST_WAIT_SECONDS * 2.0**attempt * (0.5 + random.random())
                wait = min(LONGEST_WAIT_SECONDS, max(wait, error.wait_seconds))
            # Sleep on the event, so that `close` ends the wait at once.
            if attempt == self._retries or self._closed.wait(wait):
                break
        raise EngineError(
            f"{self.name}: {failure} ({attempt + 1} tries); the same command goes on from what is finished"
        )

    def _try(self, method: str, path: str, body: Any, read: Callable[[bytes], T], most_bytes: int) -> T:
        # 1) A reply, whole and in time.
        try:
            with self._session().request(
                method,
                self._url + path,
                json=body,
                timeout=(_CONNECT_SECONDS, self._timeout),
                allow_redirects=False,  # the key is for this server
                stream=True,
            ) as reply:
                content = read_body(reply, most_bytes)
        except UnusableError as error:
            raise _RetryableError(f"unusable reply ({error})") from None
        except requests.RequestException as error:
            raise _RetryableError(f"no reply ({no_reply_reason(error)})") from None

        # 2) Its status.
        status = reply.status_code
        if status in _RETRYABLE:
            raise _RetryableError(f"status {status}{_error_message(content)}", _retry_after_seconds(reply))
        if status in (401, 403):
            raise RefusedError(f"{self.name}: wants a key (status {status}); see api_key_env", status)
        if status != 200:
            raise RefusedError(f"{self.name}{path}: status {status}{_error_message(content)}", status)

        # 3) Its content, of one reply at a time: as objects it takes many times its bytes.
        try:
            with self._reading:
                return read(content)
        # An error of ours is a verdict of `read` (such as a setting to change); only malformed replies are tried again.
        except DraftforgeError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise _RetryableError(f"unusable reply ({type(error).__name__}: {one_line(error, 150)})") from None

    def _session(self) -> requests.Session:
        if not hasattr(self._local, "session"):
            self._local.session = bounded_session()
            self._local.session.auth = self._auth
            self._local.session.trust_env = not self._here  # no proxy stands between this machine and itself
        session: requests.Session = self._local.session
        return session


def key_in(variable: str | None, field: str) -> str | None:
    """The key that an environment variable holds; None: none is named. Raises InputError where it is not set."""
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise InputError(f"{field}: the environment variable {variable} is not set")
    # What is refused in a header, its library quotes.
    if not key.isascii() or not key.isprintable() or " " in key:
        raise InputError(f"{field}: the environment variable {variable} must hold one word of ASCII, and no newline")
    return key


def _error_message(content: bytes) -> str:
    """The message of the server's error, in brackets, if it gives one that is not far too long."""
    if len(content) > _MOST_ERROR_BYTES:
        return ""
    try:
        error = parse_json(content)
        error = error.get("error", error)
        message = error.get("message") if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        return ""
    return f" ({one_line(ValueError(str(message)), 200)})" if message else ""


def _retry_after_seconds(reply: requests.Response) -> float:
    try:
        return float(reply.headers.get("Retry-After", 0))
    except ValueError:
        return 0.0
