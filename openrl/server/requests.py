"""What routes do with a request before they call the daemon: read the body, decode it, wait without leaking."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from starlette.requests import Request

from openrl.codec import decode_json
from openrl.daemon.daemon import Daemon
from openrl.daemon.tenancy import Tenant
from openrl.daemon.work import Raw
from openrl.errors import BadRequest, InvalidToken, TooLarge, Unauthorized
from openrl.keys.principal import Principal
from openrl.server.credentials import Credentials
from openrl.settings import ServerSettings
from openrl.wire.bodies import JSON
from openrl.wire.compression import inflate

T = TypeVar("T")
P = ParamSpec("P")

MAX_PAGE = 1000  # rows in one answer
OFF_LOOP_BYTES = 64 * 1024  # from here on, encoding and decoding would hold up the event loop


def principal_of(request: Request) -> Principal:
    """Whom the call comes from. Not for routes that need no key."""
    return request.state.principal


def daemon_of(request: Request) -> Tenant:
    """The daemon as the caller may see it: what is someone else's does not exist there."""
    return Tenant(bare_daemon(request), principal_of(request))


def bare_daemon(request: Request) -> Daemon:
    """The daemon itself: for routes of the server as a whole, and for those behind a signed URL."""
    return request.app.state.daemon


def credentials_of(request: Request) -> Credentials:
    return request.app.state.credentials


def settings_of(request: Request) -> ServerSettings:
    return request.app.state.settings


async def off_loop(size: int, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`call(*args)`, in a thread if it works on more than 64 kB."""
    if size > OFF_LOOP_BYTES:
        return await asyncio.to_thread(call, *args, **kwargs)
    return call(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Received:
    """A request's body. With `error` it is only the beginning of one that is too large."""

    raw: Raw
    error: TooLarge | None = None


async def receive_body(request: Request) -> Received:
    """The whole body, decompressed; or how it begins, if it is larger than the server takes."""
    content_type = request.headers.get("content-type", JSON)
    parts: list[bytes] = []
    try:
        async for part in request.stream():
            parts.append(part)  # one by one: what came before an error is wanted
    except TooLarge as error:
        return Received(Raw(content_type, b"".join(parts)), error)
    return await _decompress(request, Raw(content_type, b"".join(parts)))


async def _decompress(request: Request, raw: Raw) -> Received:
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding in ("identity", ""):
        return Received(raw)
    if encoding != "zstd":
        raise BadRequest(f"Content-Encoding {encoding!r} is not served; legal: zstd, identity")
    limit = settings_of(request).max_body_bytes
    body = await asyncio.to_thread(inflate, raw.body, limit)
    error = TooLarge(f"the decompressed body is over {limit} bytes") if len(body) > limit else None
    return Received(Raw(raw.content_type, body), error)


async def read_raw(request: Request) -> Raw:
    """The whole body. Raises `TooLarge`."""
    received = await receive_body(request)
    if received.error is not None:
        raise received.error
    return received.raw


async def read_json(request: Request, kind: type[T]) -> T:
    """The body as a message. An empty body counts as `{}`, since some calls carry none."""
    raw = await read_raw(request)
    return await off_loop(len(raw.body), decode_json, kind, raw.body or b"{}")


def query_int(request: Request, name: str, default: int, low: int, high: int) -> int:
    """A whole number from the query; above `high` counts as `high`. Raises BadRequest."""
    given = request.query_params.get(name)
    if given is None:
        return default
    try:
        value = int(given)
    except ValueError:
        value = low - 1
    if value < low:
        raise BadRequest(f"{name} must be a whole number of at least {low}, got {given!r}")
    return min(value, high)


def query_number(request: Request, name: str, default: float) -> float:
    """A number from the query. Raises BadRequest."""
    given = request.query_params.get(name)
    try:
        value = default if given is None else float(given)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BadRequest(f"{name} must be a number, got {given!r}")
    return value


def query_choice(request: Request, name: str, legal: Sequence[str]) -> str:
    """One of some words from the query; the first is the default. Raises BadRequest."""
    given = request.query_params.get(name, legal[0])
    if given not in legal:
        raise BadRequest(f"{name} must be one of {', '.join(legal)}, got {given!r}")
    return given


def check_scope(request: Request) -> bool:
    """Whether everything is wanted that the caller may read, rather than what it owns (8.9). Raises BadRequest."""
    return query_choice(request, "access_scope", ("owned", "accessible")) == "accessible"


def page_of(request: Request, limit: int = 20) -> tuple[int, int]:
    """Limit and offset of a list; `limit` is the default. Raises BadRequest."""
    check_scope(request)
    return query_int(request, "limit", limit, 1, MAX_PAGE), query_int(request, "offset", 0, 0, 1 << 40)


def reader_of(request: Request, token: str) -> str:
    """As whom a weights access token lets read: it is another account's API key, or one of its tokens (7.3).

    Raises Unauthorized, which never repeats the token.
    """
    try:
        return credentials_of(request).principal(token).reader
    except Unauthorized:
        raise Unauthorized(
            "the weights access token is neither an API key of this server nor one of its tokens.",
            "Leave it out for weights that your own key may read, and for published ones.",
        ) from None


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """`work`'s result, or None as soon as the client hangs up; nothing of it runs on afterwards.

    Raises InvalidToken as soon as the caller's key is good no more, so that nobody hangs on after that.
    """
    working = asyncio.create_task(work)
    hung_up = asyncio.create_task(_disconnected(request))
    try:
        with credentials_of(request).ring.holding(principal_of(request).key, working.cancel):
            await asyncio.wait({working, hung_up}, return_when=asyncio.FIRST_COMPLETED)
        if working.cancelled():
            raise InvalidToken("the key of this call has been revoked or has expired.")
        return working.result() if working.done() else None
    finally:
        working.cancel()
        hung_up.cancel()
        await asyncio.gather(working, hung_up, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
