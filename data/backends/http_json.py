"""JSON over HTTP with patience: what a retry may mend is tried again after growing waits, what it cannot is said.

Lost connections, timeouts, 408, 425, 429, 5xx and replies that cannot be used are tried again.
"""

import random
import threading
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import requests
from requests.auth import AuthBase

from ...errors import DraftforgeError, EngineError, InputError, one_line

T = TypeVar("T")
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.5, 30.0
_CONNECT_SECONDS = 10.0
_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})


class UnusableError(ValueError):
    """A reply that is no answer to what was asked."""


class RefusedError(InputError):
    """The server will not do what it was asked."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class _AgainError(Exception):
    def __init__(self, said: str, wait_seconds: float = 0.0) -> None:
        super().__init__(said)
        self.wait_seconds = wait_seconds


class _Key(AuthBase):
    """The key and nothing else: without this, requests would send a password from the user's .netrc instead."""

    def __init__(self, key: str | None) -> None:
        self._key = key

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self._key is not None:
            request.headers["Authorization"] = f"Bearer {self._key}"
        return request


class JsonServer:
    """One server. `field`: the recipe's, for errors. Any thread may ask; each keeps a connection of its own."""

    def __init__(self, field: str, url: str, key: str | None, timeout_seconds: float, retries: int) -> None:
        self.name = f"{field}: {urlsplit(url).netloc}"
        self._url, self._auth, self._timeout, self._retries = url, _Key(key), timeout_seconds, retries
        self._own = threading.local()
        self._closed = threading.Event()

    def close(self) -> None:
        """End waits between tries; nothing is tried again."""
        self._closed.set()

    def get(self, path: str, use: Callable[[Any], T]) -> T:
        """What `use` makes of a reply. It raises UnusableError, KeyError, TypeError or ValueError for a useless one.

        Raises EngineError after the last try, RefusedError for a 4xx.
        """
        return self._patiently("GET", path, None, use)

    def post(self, path: str, body: Any, use: Callable[[Any], T]) -> T:
        """As `get`, with a body."""
        return self._patiently("POST", path, body, use)

    def _patiently(self, method: str, path: str, body: Any, use: Callable[[Any], T]) -> T:
        for attempt in range(self._retries + 1):
            try:
                return self._once(method, path, body, use)
            except _AgainError as error:
                said, wait = error, FIRST_WAIT_SECONDS * 2.0**attempt * (0.5 + random.random())
                wait = min(LONGEST_WAIT_SECONDS, max(wait, error.wait_seconds))
            if attempt == self._retries or self._closed.wait(wait):
                break
        raise EngineError(f"{self.name}: {said} ({attempt + 1} tries); the same command goes on from what is finished")

    def _once(self, method: str, path: str, body: Any, use: Callable[[Any], T]) -> T:
        try:
            reply = self._session().request(
                method,
                self._url + path,
                json=body,
                timeout=(_CONNECT_SECONDS, self._timeout),
                allow_redirects=False,  # the key is for this server
            )
        except requests.RequestException as error:
            raise _AgainError(f"no reply ({type(error).__name__}: {one_line(error, 150)})") from None
        if reply.status_code in _AGAIN:
            raise _AgainError(f"status {reply.status_code}{_said(reply)}", _asked_to_wait(reply))
        if reply.status_code in (401, 403):
            said = f"wants a key (status {reply.status_code}); see api_key_env"
            raise RefusedError(f"{self.name}: {said}", reply.status_code)
        if reply.status_code != 200:
            raise RefusedError(f"{self.name}{path}: status {reply.status_code}{_said(reply)}", reply.status_code)
        try:
            return use(reply.json())
        except DraftforgeError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _AgainError(f"unusable reply ({type(error).__name__}: {one_line(error, 150)})") from None

    def _session(self) -> requests.Session:
        if not hasattr(self._own, "session"):
            self._own.session = requests.Session()
            self._own.session.auth = self._auth
        session: requests.Session = self._own.session
        return session


def _said(reply: requests.Response) -> str:
    """What the server's error says, if it says something."""
    try:
        error = reply.json()
        error = error.get("error", error)
        message = error.get("message") if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        return ""
    return f" ({one_line(ValueError(str(message)), 200)})" if message else ""


def _asked_to_wait(reply: requests.Response) -> float:
    try:
        return float(reply.headers.get("Retry-After", 0))
    except ValueError:
        return 0.0
