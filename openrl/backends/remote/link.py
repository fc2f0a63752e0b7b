"""The way to one remote: an HTTP client, the key it wants, and knowing at any moment whether it answers.

A call is tried once here; whether and when again is for those to decide who know what the call means. What this module
adds to a client is that no call waits on a dead connection for long: while calls are under way the remote is asked for
a sign of life every few seconds, over a connection of its own, and when it gives none, all of them end with `Away`.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from urllib.parse import urlsplit

import httpcore

from openrl.backends.remote import sockets
from openrl.backends.remote.body import Body, Passing
from openrl.backends.remote.calls import API, Call, Headers
from openrl.backends.remote.token import Token
from openrl.remotes import Remote

log = logging.getLogger(__name__)

BOOT = b"x-openrl-boot"  # another value: the remote was started anew
_CONNECT_S = 10.0
_WRITE_S = 30.0  # without a byte taken
_PING_S = 5.0  # between signs of life while calls are under way
_PING_TIMES = 1.6  # as long a sign of life may take, two in turn before the remote counts as away: it may be busy
_IDLE_PINGS = 6  # with nothing under way, only every sixth
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 5.0  # between signs of life while there are none
_SMALL = 4 << 20  # bytes: an answer up to here is read whole, so that a connection that breaks in it costs nothing
_PING = Call("GET", "/api/v1/healthz", b"/api/v1/healthz", ())

# A gateway's words for "what is behind me does not answer", and a server's that starts or stops.
AWAY_STATUSES = frozenset({502, 503, 504, *range(520, 531)})
_FAULTS = (
    httpcore.NetworkError,
    httpcore.TimeoutException,
    httpcore.ProtocolError,
    httpcore.ProxyError,
    OSError,
)
_NEVER_SENT = (httpcore.ConnectError, httpcore.ConnectTimeout, httpcore.PoolTimeout)

MakePool = Callable[[bool], sockets.Pool]  # whether to keep connections


class Away(Exception):
    """No answer. `sent`: the remote may have had all of the request, and may have acted on it."""

    def __init__(self, reason: str, *, sent: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.sent = sent


@dataclass(slots=True)
class Reply:
    """An answer as it came, not decompressed, names of headers in lower case. `rest` is what of it comes after
    `content`, if it is too large to be held; whoever has the reply must `close` it then."""

    status: int
    headers: Headers
    content: bytes
    rest: AsyncIterator[bytes] | None = None
    response: httpcore.Response | None = None

    def header(self, name: bytes) -> str:
        return next((value.decode("latin-1") for key, value in self.headers if key == name), "")

    async def close(self) -> None:
        if self.response is not None:
            await self.response.aclose()


@dataclass(frozen=True, slots=True)
class State:
    """`since` in seconds since the epoch: when this state began. `error`: the last one, also when it is over."""

    connected: bool
    since: float
    error: str


class Link:
    """Calls to one remote. Started and stopped on the loop that uses it."""

    def __init__(
        self,
        remote: Remote,
        base_url: Callable[[], str],
        token: Token,
        *,
        pool: MakePool | None = None,
        ping_s: float = _PING_S,
        explain: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`base_url`: where the remote is just now, since a tunnel may move. `explain`: what is wrong with the tunnel,
        if something is. `pool` is for tests."""
        self.remote = remote
        self.name = label(remote)
        self.url = base_url
        self._explain = explain
        self.token = token
        self._ping_s = ping_s
        self._make = pool or (lambda keep: sockets.pool(base_url(), remote.ca_file, keep=keep))
        # Long polls have a pool of their own: a pool walks over all its connections for each call.
        self._pools = {False: self._make(True), True: self._make(True)}
        self._pings = self._make(False)
        self._left: set[asyncio.Task[None]] = set()  # pools that were given up, until they are closed
        self._under_way: set[asyncio.Timeout] = set()
        self._up = asyncio.Event()
        self._doubt = asyncio.Event()
        self._heard_at = time.monotonic()
        self._boot = ""
        self._watch: asyncio.Task[None] | None = None
        self.state = State(True, time.time(), "")
        self.stopping = False
        self.returned: Callable[[], None] = lambda: None  # told when the remote may have forgotten what it accepted
        self._up.set()

    @property
    def has_name(self) -> bool:
        """Whether the user knows it by its name, rather than by a URL."""
        return self.name == self.remote.name

    def start(self) -> None:
        self._watch = asyncio.create_task(self._keep_watch())

    def let_go(self) -> None:
        """This server is about to stop: end everything that is under way as if the remote were away, for good."""
        self.stopping = True
        if self._watch is not None:
            self._watch.cancel()
        self._is_down("this server is stopping")

    async def stop(self) -> None:
        tasks = [*self._left, *([self._watch] if self._watch else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for pool in (*self._pools.values(), self._pings):
            await pool.aclose()

    # -- one try --

    async def send(self, call: Call, body: Body | Passing, read_s: float, *, poll: bool = False) -> Reply:
        """Send a call and read the answer, or its beginning if it is large. Raises Away, and Broken for a body that
        will never be whole. `read_s` is how long the remote may be silent; `poll` keeps long polls apart from the rest.
        """
        key = await self.token.get()
        reply = await self._try(call, body, key, read_s, poll)
        again = reply.status == HTTPStatus.UNAUTHORIZED and isinstance(body, Body)
        if again and (renewed := await self.token.renewed(key)):
            await reply.close()
            reply = await self._try(call, body, renewed, read_s, poll)
        return reply

    def suspect(self) -> None:
        """Ask for a sign of life at once."""
        self._doubt.set()

    async def wait_up(self, timeout: float) -> bool:
        """Whether the remote answers, now or within `timeout` seconds."""
        if self._up.is_set() or timeout <= 0 or self.stopping:
            return self._up.is_set()
        try:
            async with asyncio.timeout(timeout):
                await self._up.wait()
        except TimeoutError:
            return False
        return True

    async def _try(self, call: Call, body: Body | Passing, key: str, read_s: float, poll: bool) -> Reply:
        # What lies elsewhere (tokenizers, signed URLs) needs no key, and may be asked for by callers without one.
        request = _request(self.url(), call, body, key if call.path.startswith(API) else "", read_s)
        limit = asyncio.timeout(None)  # falls due when the watch finds the remote away
        self._under_way.add(limit)
        try:
            async with limit:
                reply = await _exchange(self._pools[poll], request)
        except TimeoutError:
            raise Away(self.state.error or "no sign of life", sent=True) from None
        except _FAULTS as error:
            self._doubt.set()
            if isinstance(error, httpcore.ReadTimeout | httpcore.WriteTimeout):
                self._leave_pools()
            raise Away(_words(error), sent=not isinstance(error, _NEVER_SENT)) from None
        finally:
            self._under_way.discard(limit)
        self._hear(reply)
        return reply

    @property
    def under_way(self) -> int:
        """How many calls the remote has not answered."""
        return len(self._under_way)

    @property
    def boot(self) -> str:
        """Which life of the remote was heard last; "" if it does not say."""
        return self._boot

    def _hear(self, reply: Reply) -> None:
        if reply.status in AWAY_STATUSES:
            self._doubt.set()
        else:
            self._heard_at = time.monotonic()
        boot = reply.header(BOOT)
        if boot and boot != self._boot:
            known, self._boot = self._boot, boot
            if known:
                log.info("the remote %s was started anew", self.name)
                self.returned()

    def _leave_pools(self) -> None:
        """Make new connections from now on: on a network that changed, all idle ones are as dead as the one that was
        tried. What is under way on the old ones may end."""
        for poll, pool in self._pools.items():
            self._pools[poll] = self._make(True)
            task = asyncio.create_task(_close_later(pool))
            self._left.add(task)
            task.add_done_callback(self._left.discard)

    # -- the watch --

    async def _keep_watch(self) -> None:
        wait, silent = self._ping_s, 0
        while True:
            doubted = await _happens(self._doubt, wait)
            self._doubt.clear()
            silent += 1
            if not doubted and self._up.is_set() and not self._is_due(silent):
                continue
            silent = 0
            error = await self._ping()
            if error and self._up.is_set():
                error = await self._ping()
            if error is None:
                self._is_up()
                wait = self._ping_s
            else:
                wait = _FIRST_WAIT_S if self._up.is_set() else min(2 * wait, _LONGEST_WAIT_S)
                self._is_down(self._explain() or error)

    def _is_due(self, silent: int) -> bool:
        heard = time.monotonic() - self._heard_at < self._ping_s
        return not heard and (bool(self._under_way) or silent >= _IDLE_PINGS)

    async def _ping(self) -> str | None:
        """What is wrong, if the remote gives no sign of life."""
        seconds = self._ping_s * _PING_TIMES
        try:
            async with asyncio.timeout(seconds):
                request = _request(self.url(), _PING, Body(b""), "", seconds)
                reply = await _exchange(self._pings, request)
        except TimeoutError:
            return f"no sign of life within {seconds:g} s"
        except _FAULTS as error:
            return _words(error)
        await reply.close()
        if reply.status in AWAY_STATUSES:
            return f"its gateway answers with status {reply.status}"
        self._hear(reply)
        return None

    def _is_up(self) -> None:
        if self._up.is_set():
            return
        log.warning("the remote %s answers again, after %.0f s", self.name, time.time() - self.state.since)
        self.state = State(True, time.time(), self.state.error)
        self._up.set()
        if not self._boot:  # it does not say whether it is still the same
            self.returned()

    def _is_down(self, error: str) -> None:
        if not self._up.is_set():
            self.state = State(False, self.state.since, error)
            return
        if not self.stopping:
            log.warning("the remote %s (%s) is away: %s; calls to it are kept", self.name, self.url(), error)
        self.state = State(False, time.time(), error)
        self._up.clear()
        self._leave_pools()
        for limit in [*self._under_way]:
            if limit.when() is None:
                limit.reschedule(0)  # in the past: at once


def label(remote: Remote) -> str:
    """A remote's name, or a word made from its URL, that can stand in a path."""
    if "://" not in remote.name:
        return remote.name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", remote.name.partition("://")[2])


@lru_cache(maxsize=16)
def _origin(base_url: str) -> tuple[bytes, bytes, int | None, bytes, bytes]:
    """Scheme, host, port, value of `Host`, and the path before ours."""
    parts = urlsplit(base_url)
    host = (parts.hostname or "").encode("idna")
    netloc = b"[%s]" % host if b":" in host else host
    named = netloc if parts.port is None else b"%s:%d" % (netloc, parts.port)
    return parts.scheme.encode(), host, parts.port, named, parts.path.rstrip("/").encode()


def _request(base_url: str, call: Call, body: Body | Passing, key: str, read_s: float) -> httpcore.Request:
    scheme, host, port, named, prefix = _origin(base_url)
    url = httpcore.URL(scheme=scheme, host=host, port=port, target=prefix + call.target)
    headers = [(b"host", named), *call.headers]
    if key:
        headers.append((b"x-api-key", key.encode()))
    size = body.final_size
    if size is None:
        headers.append((b"transfer-encoding", b"chunked"))
    elif size or call.method not in ("GET", "HEAD", "DELETE"):
        headers.append((b"content-length", str(size).encode()))
    timeout = {"connect": _CONNECT_S, "write": _WRITE_S, "read": read_s, "pool": _WRITE_S}
    content = b"" if size == 0 else body.read()
    extensions = {"timeout": timeout}
    return httpcore.Request(call.method, url, headers=headers, content=content, extensions=extensions)


async def _exchange(pool: sockets.Pool, request: httpcore.Request) -> Reply:
    response = await pool.handle_async_request(request)
    headers = tuple((name.lower(), value) for name, value in response.headers)
    assert isinstance(response.stream, AsyncIterable)
    parts = aiter(response.stream)
    held: list[bytes] = []
    size = 0
    try:
        async for part in parts:
            held.append(part)
            size += len(part)
            if size > _SMALL:
                return Reply(response.status, headers, b"".join(held), parts, response)
    except BaseException:
        await response.aclose()
        raise
    await response.aclose()
    return Reply(response.status, headers, b"".join(held))


async def _close_later(pool: sockets.Pool) -> None:
    try:
        await asyncio.sleep(60)
    finally:
        await pool.aclose()


async def _happens(event: asyncio.Event, seconds: float) -> bool:
    """Whether an event is set within some seconds."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _words(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return f"{type(error).__name__}: {text}" if len(text) < 12 else text
