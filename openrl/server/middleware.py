"""What every request passes before the routes: request id and access log, host check, API key, body limit.

Plain ASGI: starlette's `BaseHTTPMiddleware` would put a task and a queue between the client and each long poll.
"""

from __future__ import annotations

import ipaddress
import logging
import time
import uuid
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openrl.errors import TooLarge, Unauthorized
from openrl.server.credentials import Credentials, InvalidToken
from openrl.server.errors import refusal
from openrl.server.signing import SIGNED, Signer
from openrl.telemetry.logs import bound

access_log = logging.getLogger("openrl.access")
log = logging.getLogger("openrl.server")

HUB = "/hf/"  # the hub look-alike

CLIENT_CLOSED = 499  # for the log only: the client hung up before an answer


class AccessLog:
    """Gives each request an id, logs one line for it, and turns a crash into a 500: the HTTP edge.

    Logged are method, path, status and time; never headers or bodies, which hold keys and tokens (T52).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex[:12]
        status = 0
        started = time.monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
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
    level = logging.DEBUG if scope["path"].endswith("/healthz") else logging.INFO
    values = (scope["method"], scope["path"], status, seconds * 1000, request_id)
    access_log.log(level, "%s %s %d %.1f ms [%s]", *values)


class HostCheck:
    """Keeps web pages out. A page may reach a loopback port through a name of its own that resolves to 127.0.0.1
    (DNS rebinding), or by a cross-origin call; the first shows in `Host`, the second in `Origin`.
    """

    def __init__(self, app: ASGIApp, bound_to: str) -> None:
        self._app = app
        self._loopback = is_loopback(bound_to)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._problem(Headers(scope=scope)) if scope["type"] == "http" else None
        if problem is None:
            await self._app(scope, receive, send)
        else:
            await refusal(problem, 403)(scope, receive, send)

    def _problem(self, headers: Headers) -> str | None:
        host = _host_name(f"//{headers.get('host', '')}")
        if self._loopback and not is_loopback(host):
            return f"Host {host!r} is refused; this server answers to localhost, 127.0.0.1 and [::1] only"
        origin = headers.get("origin")
        if (
            origin is not None
            and not is_loopback(_host_name(origin))
            and (self._loopback or _host_name(origin) != host)
        ):
            return f"Origin {origin!r} is refused; calls from web pages elsewhere are not served"
        return None


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


class ApiKey:
    """Asks for a key or token in `X-API-Key` on every path but `open_paths`; below `/signed/` for a signature instead.
    Below `/hf/` nothing is asked for: clients of a hub have no key to send, and nothing there is secret.

    A bad token is answered so that the SDK exchanges its key for a new one and repeats the call (T45).
    """

    def __init__(self, app: ASGIApp, credentials: Credentials, signer: Signer, open_paths: frozenset[str]) -> None:
        self._app = app
        self._credentials = credentials
        self._signer = signer
        self._open = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._refusal(scope) if scope["type"] == "http" else None
        await (answer or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        path: str = scope["path"]
        if path in self._open or path.startswith(HUB):
            return None
        if path.startswith(SIGNED):
            good = self._signer.check(path, scope["query_string"].decode("latin-1"))
            return None if good else refusal("this URL has expired or was not made here; ask for a new one", 403)
        try:
            self._credentials.check(Headers(scope=scope).get("x-api-key"))
        except InvalidToken as error:
            return refusal(str(error), 401, {"www-authenticate": 'Bearer error="invalid_token"'})
        except Unauthorized as error:
            return refusal(str(error), 401)
        return None


class BodyLimit:
    """Ends the reading of a body that is larger than `limit` bytes with `TooLarge`.

    A body that announces itself too large is cut after its first part: that much lets a route see whom it was for,
    so that the run's request can fail instead of leaving a hole.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        announced = int(length) if length.isdecimal() else 0
        read = 0

        async def limited() -> Message:
            nonlocal read
            if announced > self._limit and read:
                raise self._error(announced)
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._limit:
                raise self._error(read)
            return message

        await self._app(scope, limited, send)

    def _error(self, size: int) -> TooLarge:
        return TooLarge(f"the body is over {self._limit} bytes (at least {size}).", "Send less at a time.")
