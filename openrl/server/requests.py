"""What routes do with a request before they call the daemon: read the body, decode it, wait without leaking."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from starlette.requests import Request

from openrl.codec import decode_json
from openrl.daemon.daemon import Daemon
from openrl.daemon.work import Raw
from openrl.errors import BadRequest, TooLarge, Unauthorized
from openrl.server.credentials import Credentials
from openrl.settings import ServerSettings
from openrl.wire.bodies import JSON
from openrl.wire.compression import inflate

T = TypeVar("T")
P = ParamSpec("P")

MAX_PAGE = 1000  # rows in one answer
OFF_LOOP_BYTES = 64 * 1024  # from here on, encoding and decoding would hold up the event loop


def daemon_of(request: Request) -> Daemon:
    return request.app.state.daemon


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


def query_choice(request: Request, name: str, legal: Sequence[str]) -> str:
    """One of some words from the query; the first is the default. Raises BadRequest."""
    given = request.query_params.get(name, legal[0])
    if given not in legal:
        raise BadRequest(f"{name} must be one of {', '.join(legal)}, got {given!r}")
    return given


def check_scope(request: Request) -> None:
    """One user owns all, so what is owned and what is accessible are the same (8.9)."""
    query_choice(request, "access_scope", ("owned", "accessible"))


def page_of(request: Request, limit: int = 20) -> tuple[int, int]:
    """Limit and offset of a list; `limit` is the default. Raises BadRequest."""
    check_scope(request)
    return query_int(request, "limit", limit, 1, MAX_PAGE), query_int(request, "offset", 0, 0, 1 << 40)


def check_access_token(request: Request, token: str) -> None:
    """A token that stands for another account's right to read weights. One account owns all of a server, so only its
    own key or one of its tokens opens anything. Raises Unauthorized, which never repeats the token."""
    try:
        credentials: Credentials = request.app.state.credentials
        credentials.check(token)
    except Unauthorized:
        raise Unauthorized(
            "the weights access token is neither this server's API key nor one of its tokens.",
            "Leave it out: all weights of this server are readable with its own key.",
        ) from None


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """`work`'s result, or None as soon as the client hangs up; nothing of it runs on afterwards."""
    working = asyncio.create_task(work)
    hung_up = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({working, hung_up}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        hung_up.cancel()
        await asyncio.gather(working, hung_up, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
