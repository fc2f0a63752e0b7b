"""What every request passes before the routes: request id and access log, host check, API key, limits.

Plain ASGI: starlette's `BaseHTTPMiddleware` would put a task and a queue between the client and each long poll.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openrl.errors import TooLarge, TooSlow, Unauthorized
from openrl.keys.principal import Principal
from openrl.server.connections import Limits
from openrl.server.credentials import Credentials
from openrl.server.errors import refusal, unauthorized
from openrl.server.signing import SIGNED, Signer, key_in
from openrl.telemetry.logs import bound

access_log = logging.getLogger("openrl.access")
log = logging.getLogger("openrl.server")

HUB = "/hf/"  # the hub look-alike

CLIENT_CLOSED = 499  # for the log only: the client hung up before an answer


class AccessLog:
    """Gives each request an id, logs one line for it, and turns a crash into a 500: the HTTP edge.

    Logged are method, path, status, time and the key's id; never headers or bodies, which hold keys and tokens (T52).
    Every answer says by `x-openrl-boot` which life of the server it is from: a proxy in front sees a restart by it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._boot = uuid.uuid4().hex[:12]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"{random.getrandbits(48):012x}"  # only to be told apart in the log; a UUID costs a system call
        status = 0
        started = time.monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                headers["x-openrl-boot"] = self._boot
            await send(message)

        try:
            with bound(http_id=request_id):
                await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            pass
        except Exception:  # the HTTP edge: a crash of one request must not be one of the server
            log.exception("%s %s failed [%s]", scope["method"], scope["path"], request_id)
            if status == 0:
                detail = f"internal error; the server's log has it under request {request_id}"
                await refusal(detail, 500)(scope, receive, send_with_id)
        finally:
            _log_access(scope, status or CLIENT_CLOSED, time.monotonic() - started, request_id)


def _log_access(scope: Scope, status: int, seconds: float, request_id: str) -> None:
    level = logging.DEBUG if scope["path"].endswith(("/healthz", "/readyz", "/metrics")) else logging.INFO
    principal: Principal | None = scope.get("state", {}).get("principal")
    key = principal.key if principal is not None and principal.key else "-"
    values = (scope["method"], scope["path"], status, seconds * 1000, request_id, key)
    access_log.log(level, "%s %s %d %.1f ms [%s] key %s", *values)


class HostCheck:
    """Keeps web pages out. A page may reach a loopback port through a name of its own that resolves to 127.0.0.1
    (DNS rebinding), or by a cross-origin call; the first shows in `Host`, the second in `Origin`, or where browsers
    leave that out in `Sec-Fetch-Site`. Nothing that a browser sends to another origin on purpose is served here.

    `names`: what clients may call the server, beside addresses and this machine's own names. None given: on a loopback
    address none, else any.
    """

    def __init__(self, app: ASGIApp, bound_to: str, names: Sequence[str] = ()) -> None:
        self._app = app
        self._loopback = is_loopback(bound_to)
        self._names = frozenset(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._problem(Headers(scope=scope)) if scope["type"] == "http" else None
        if problem is None:
            await self._app(scope, receive, send)
        else:
            await refusal(problem, 403)(scope, receive, send)

    def _problem(self, headers: Headers) -> str | None:
        given = headers.get("host", "")
        host = _host_name(f"//{given}")
        if not self._is_ours(host):
            return f"Host {host!r} is refused; this server answers to {self._legal()} only"
        origin = headers.get("origin")
        if origin is not None and not _same_place(origin, given):
            return f"Origin {origin!r} is refused; calls from web pages elsewhere are not served"
        site, mode = headers.get("sec-fetch-site", "none"), headers.get("sec-fetch-mode", "navigate")
        if site in ("cross-site", "same-site") and mode != "navigate":
            return f"a call from a web page elsewhere (Sec-Fetch-Site: {site}) is not served"
        return None

    def _is_ours(self, host: str) -> bool:
        if is_loopback(host) or host in self._names:
            return True
        return not self._loopback and bool(host) and (not self._names or _is_address(host))

    def _legal(self) -> str:
        ours = ["localhost", "127.0.0.1", "[::1]", *sorted(self._names)]
        return ", ".join(ours if self._loopback else [*ours, "addresses"])


def _same_place(origin: str, host: str) -> bool:
    """Whether a page comes from this server itself; the names of one machine count as one."""
    there, here = _place(origin), _place(f"//{host}")
    return there is not None and there == here


def _place(url: str) -> tuple[str, int | None] | None:
    """Host and port of a URL, None if it has none. A port that is left out is the scheme's, which Host does not say."""
    try:
        parts = urlsplit(url)
        name, port = parts.hostname, parts.port
    except ValueError:
        return None
    if not name:
        return None
    return "localhost" if is_loopback(name) else name, None if port in (80, 443) else port


def _host_name(url: str) -> str:
    """The host of a URL without port and brackets; empty if it has none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Whether a host name or address can only mean this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class OpenPaths:
    """Paths that need no key: these, and those below these prefixes."""

    exact: frozenset[str]
    below: tuple[str, ...]

    def __contains__(self, path: str) -> bool:
        return path in self.exact or path.startswith(self.below)


class ApiKey:
    """Finds out whom a call comes from, by the key or token in `X-API-Key` (or as a Bearer token, which is what
    Prometheus can send), and puts that into the request's state. Nothing is asked for on open paths; below `/signed/`
    a signature, of someone whose key is still good.
    """

    def __init__(self, app: ASGIApp, credentials: Credentials, signer: Signer, open_paths: OpenPaths) -> None:
        self._app = app
        self._credentials = credentials
        self._signer = signer
        self._open = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._refusal(scope) if scope["type"] == "http" else None
        await (answer or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        path: str = scope["path"]
        if path.startswith(SIGNED):
            good = self._is_signed(path, scope["query_string"].decode("latin-1"))
            return None if good else refusal("this URL has expired or was not made here; ask for a new one", 403)
        if path in self._open:
            return None
        try:
            principal = self._credentials.principal(_credential(Headers(scope=scope)))
        except Unauthorized as error:
            return unauthorized(error)
        scope.setdefault("state", {})["principal"] = principal
        return None

    def _is_signed(self, path: str, query: str) -> bool:
        key = key_in(query)
        return self._signer.check(path, query) and (not key or self._credentials.ring.find(key) is not None)


def _credential(headers: Headers) -> str | None:
    given = headers.get("x-api-key")
    if given is None and (bearer := headers.get("authorization", ""))[:7].lower() == "bearer ":
        return bearer[7:].strip()
    return given


class BodyLimit:
    """How much of a request is taken, and for how long its body is waited for.

    The reading of a body that is larger than `limits.body` bytes ends with `TooLarge`, of one that takes longer than
    `limits.body_seconds` with `TooSlow`. A body that announces itself too large is cut after its first part: that much
    lets a route see whom it was for, so that the run's request can fail instead of leaving a hole.
    """

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        size = sum(len(name) + len(value) + 4 for name, value in scope["headers"])  # with ": " and the line's end
        if size > self._limits.head:
            detail = f"the headers have {size} bytes; at most {self._limits.head} are taken"
            await refusal(detail, 431, {"connection": "close"})(scope, receive, send)
            return
        await self._app(scope, _Body(scope, receive, self._limits).receive, send)


class _Body:
    """One request's body on its way in."""

    def __init__(self, scope: Scope, receive: Receive, limits: Limits) -> None:
        length = Headers(scope=scope).get("content-length", "")
        self._announced = int(length) if length.isascii() and length.isdecimal() else 0
        self._receive = receive
        self._limits = limits
        self._end = asyncio.get_running_loop().time() + limits.body_seconds
        self._read = 0
        self._complete = False

    async def receive(self) -> Message:
        if self._complete:  # what comes now is that the client hangs up, whenever it does
            return await self._receive()
        if self._announced > self._limits.body and self._read:
            raise self._too_large(self._announced)
        try:
            async with asyncio.timeout_at(self._end):
                message = await self._receive()
        except TimeoutError:
            seconds = self._limits.body_seconds
            raise TooSlow(f"the body did not arrive within {seconds:g} s ({self._read} bytes did).") from None
        self._read += len(message.get("body", b""))
        self._complete = not message.get("more_body", False)
        if self._read > self._limits.body:
            raise self._too_large(self._read)
        return message

    def _too_large(self, size: int) -> TooLarge:
        return TooLarge(f"the body is over {self._limits.body} bytes (at least {size}).", "Send less at a time.")
