"""HTTP replies of bounded time and size.

The timeout of requests is that of a single read: a server that sends a byte now and then, of headers too, would hold
its client for ever. Under `BoundedAdapter` it is the time of the whole reply.
"""

import http.client
import io
import math
import socket
import time
from collections.abc import Iterator
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from requests.auth import AuthBase
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import HTTPError, ReadTimeoutError

from .errors import one_line
from .storage import size_text

_PIECE_BYTES = 1 << 16
LEAST_BYTES_A_SECOND = 100_000
"""Least rate of what is uploaded or downloaded as a file, beside the time of a reply."""
_REASONS: list[tuple[tuple[type[BaseException], ...], str]] = [
    ((socket.gaierror,), "unknown host"),
    ((ConnectionRefusedError,), "connection refused"),
    ((TimeoutError, ReadTimeoutError, requests.Timeout), "timed out"),
    ((ConnectionResetError, BrokenPipeError, http.client.IncompleteRead), "connection lost"),
]


class UnusableError(ValueError):
    """A reply that is no answer to what was asked."""


class BearerAuth(AuthBase):
    """Sends the key and nothing else: without this, requests would send a password from the user's .netrc instead."""

    def __init__(self, key: str | None) -> None:
        self._key = key

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self._key is not None:
            request.headers["Authorization"] = f"Bearer {self._key}"
        return request


class _TimedReads(io.RawIOBase):
    """What a socket receives: each read waits for what is left of its timeout, which counts for all of them."""

    def __init__(self, sock: socket.socket, inner: io.RawIOBase) -> None:
        self._socket, self._inner = sock, inner
        wait = sock.gettimeout()
        self.until = math.inf if wait is None else time.monotonic() + wait
        """Time on the monotonic clock after which nothing is read."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if self.until < math.inf:
            left = self.until - time.monotonic()
            if left <= 0:
                raise TimeoutError("the reply is not complete in time")
            self._socket.settimeout(left)
        return self._inner.readinto(buffer)

    def fileno(self) -> int:
        return self._inner.fileno()

    def close(self) -> None:
        self._inner.close()
        super().close()


class _TimedResponse(http.client.HTTPResponse):
    """Reply whose status, headers and body come within the socket's timeout together."""

    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.reads = _TimedReads(sock, self.fp.detach())
        self.fp = io.BufferedReader(self.reads)


class _TimedSends:
    """Sending of a request, which the server takes within the socket's timeout and a least rate: the timeout alone is
    that of each piece, and a server that reads a little now and then would hold an upload for days."""

    sock: socket.socket
    _begun, _sent = math.inf, 0

    def putrequest(self, *args: Any, **kwargs: Any) -> Any:
        """Begin a request."""
        self._begun, self._sent = time.monotonic(), 0
        return super().putrequest(*args, **kwargs)  # type: ignore[misc]

    def send(self, data: Any) -> None:
        """Send a piece. Raises TimeoutError where all of them have taken too long."""
        super().send(data)  # type: ignore[misc]
        self._sent += len(data) if isinstance(data, bytes) else 0
        wait = self.sock.gettimeout()
        if wait is not None and time.monotonic() - self._begun > wait + self._sent / LEAST_BYTES_A_SECOND:
            raise TimeoutError("the request is not taken in time")


class _TimedConnection(_TimedSends, HTTPConnection):
    response_class = _TimedResponse


class _TimedSecureConnection(_TimedSends, HTTPSConnection):
    response_class = _TimedResponse


class _TimedPool(HTTPConnectionPool):
    ConnectionCls = _TimedConnection


class _TimedSecurePool(HTTPSConnectionPool):
    ConnectionCls = _TimedSecureConnection


class BoundedAdapter(HTTPAdapter):
    """Adapter of requests under which a reply's timeout is that of all of it, and its body has at most `most_bytes`.

    Of a streamed reply the caller reads the body (`read_body`), within the same time.
    """

    most_bytes = 256 << 20

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        """Make the connections' pools: timed ones."""
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = {"http": _TimedPool, "https": _TimedSecurePool}

    def proxy_manager_for(self, *args: Any, **kwargs: Any) -> Any:
        """Make the pools of connections to a proxy: timed ones."""
        manager = super().proxy_manager_for(*args, **kwargs)
        manager.pool_classes_by_scheme = {"http": _TimedPool, "https": _TimedSecurePool}
        return manager

    def send(self, request: requests.PreparedRequest, stream: bool = False, **kwargs: Any) -> requests.Response:  # type: ignore[override]
        """Send a request. Raises requests.ConnectionError for a reply that is too large, too."""
        reply = super().send(request, stream=True, **kwargs)
        # No other encoding: to guess one takes a second for each megabyte, and some that a server may name hours.
        reply.encoding = "utf-8"
        if reply.is_redirect:  # requests reads all of its body first, also where it is not followed
            reply.close()
            reply._content, reply._content_consumed = b"", True
        elif not stream:
            with reply:
                try:
                    reply._content = read_body(reply, self.most_bytes)
                except UnusableError as error:
                    raise requests.ConnectionError(str(error)) from None
        return reply


def extend_time(reply: requests.Response, seconds: float) -> None:
    """Let the body of a streamed reply come within so many seconds from now, where a `BoundedAdapter` has sent it."""
    reads = getattr(reply.raw._original_response, "reads", None)
    if isinstance(reads, _TimedReads):
        reads.until = time.monotonic() + seconds


def bounded_session() -> requests.Session:
    """A session of bounded replies."""
    session = requests.Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, BoundedAdapter())
    return session


def read_body(reply: requests.Response, most_bytes: int) -> bytes:
    """Read the body of a streamed reply, unpacked: at most so many bytes.

    Raises UnusableError for a larger one, requests.ConnectionError for one that is cut or not complete in time.
    """
    if reply._content is not False:  # of a redirect, which is not read
        return reply.content
    parts, size = [], 0
    try:
        # What has come is taken at once: a read of a whole piece would unpack all of it.
        while part := reply.raw.read1(_PIECE_BYTES, decode_content=True):
            size += len(part)
            if size > most_bytes:
                raise UnusableError(f"the reply has more than {size_text(most_bytes)}")
            parts.append(part)
    except HTTPError as error:
        raise requests.ConnectionError(error) from None
    return b"".join(parts)


def no_reply_reason(error: requests.RequestException) -> str:
    """Why no reply came, in a few words: requests and urllib3 wrap the cause in errors that quote each other."""
    causes = list(_causes(error))
    for kinds, words in _REASONS:
        if any(isinstance(one, kinds) for one in causes):
            return words
    # What the operating system says, such as "No route to host"; else what requests says.
    said = next((one.strerror for one in causes if isinstance(one, OSError) and one.strerror), None)
    return said or f"{type(error).__name__}: {one_line(error, 150)}"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and all that it wraps: as an argument, as urllib3's `reason`, or as what it was raised from."""
    waiting, seen = [error], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            inner = (*one.args, getattr(one, "reason", None), one.__cause__)
            waiting += [other for other in inner if isinstance(other, BaseException)]
