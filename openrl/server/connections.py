"""Connections that do not wait for ever: a limit on their number, and on the time and size of a request's head.

uvicorn holds a connection on which nothing arrives, or a header a minute, for as long as the client likes. What is
added here stands between the transport and uvicorn's own protocol, whichever of its two that is.
"""

from __future__ import annotations

import asyncio
import resource
from dataclasses import dataclass
from typing import Any, cast

from uvicorn.protocols.http.auto import AutoHTTPProtocol

_SPARE_FILES = 256  # for the store, workers, logs and checkpoints
_DRAINED = 4  # largest bodies, that are read to nowhere after their refusal, so that the client gets to read that
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 2\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of a client is borne; sizes in bytes."""

    connections: int
    head: int
    body: int
    head_seconds: float
    body_seconds: float
    send_seconds: float


def patient(limits: Limits) -> type[asyncio.Protocol]:
    """A protocol class for `uvicorn.Config(http=...)` that keeps these limits."""
    protocol: Any = AutoHTTPProtocol  # one of two, which have no type in common
    watch = _Watch(limits)

    class Patient(_Connection):
        def __init__(self, config: Any, server_state: Any, app_state: Any, _loop: Any = None) -> None:
            inner = protocol(config=config, server_state=server_state, app_state=app_state, _loop=_loop)
            super().__init__(inner, limits, watch)

    return Patient


class _Connection(asyncio.Protocol):
    """Passes everything on to uvicorn's protocol, and closes the connection of a client that asks too much patience.

    A request is under way from the end of its head until it is answered; what arrives at any other time belongs to a
    head, or to the rest of a body that was answered before its end. Both have to be whole within `head_seconds`.
    """

    def __init__(self, inner: Any, limits: Limits, watch: _Watch) -> None:
        self._inner = inner
        self._limits = limits
        self._watch = watch
        self._head = 0  # bytes since the last request was answered
        self._last: Any = None  # uvicorn's record of the newest request
        self.transport: asyncio.Transport
        self.head_since: float | None = None
        self.unsent = 0  # bytes of answers that the client had not taken when it was last looked at
        self.taken_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # other loops have transports of their own
        full = len(self._inner.connections) >= self._limits.connections
        self._inner.connection_made(transport)
        self.head_since = self.taken_at = self._watch.now()
        self._watch.add(self)
        if full:
            self.transport.write(_FULL)
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._inner.data_received(data)
        newest = self._inner.cycle
        if newest is not self._last:
            self._last = newest
            self._head = 0
        if newest is not None and not newest.response_complete:
            self._head = 0
            self.head_since = None
            return
        self._head += len(data)
        self.head_since = self.head_since or self._watch.now()
        unread_body = newest is not None and newest.more_body
        if unread_body:
            # Already answered, so nothing more is said: it would pass for the answer to the next request.
            if self._head > _DRAINED * self._limits.body:
                self.transport.close()
        elif self._head > self._limits.head:
            self.transport.write(_LARGE)
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.remove(self)
        self._inner.connection_lost(exc)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self.taken_at = self._watch.now()  # what was too much has gone, whatever is written next
        self._inner.resume_writing()


class _Watch:
    """Looks at all connections every now and then: cheaper than timers for each request of each."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._every = min(1.0, limits.head_seconds / 4, limits.send_seconds / 4)
        self._connections: set[_Connection] = set()
        self._next: asyncio.TimerHandle | None = None

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def add(self, connection: _Connection) -> None:
        self._connections.add(connection)
        if self._next is None:
            self._next = asyncio.get_running_loop().call_later(self._every, self._look)

    def remove(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        if not self._connections and self._next is not None:
            self._next.cancel()
            self._next = None

    def _look(self) -> None:
        self._next = asyncio.get_running_loop().call_later(self._every, self._look)
        now = self.now()
        for connection in list(self._connections):
            since = connection.head_since
            if since is not None and now - since > self._limits.head_seconds:
                connection.transport.close()
            self._check_taken(connection, now)

    def _check_taken(self, connection: _Connection, now: float) -> None:
        """Give up a client that takes nothing of what is sent to it. Closing would wait for it, so it is cut off."""
        unsent = connection.transport.get_write_buffer_size()
        if unsent == 0 or unsent < connection.unsent:
            connection.taken_at = now
        elif now - connection.taken_at > self._limits.send_seconds:
            connection.transport.abort()
        connection.unsent = unsent


def fitting_connections(wanted: int) -> int:
    """As many connections as the process may have open files for; raises its own limit as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(16, min(wanted, soft - _SPARE_FILES))
