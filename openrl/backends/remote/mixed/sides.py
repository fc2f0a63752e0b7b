"""The two kinds of places that a request can go to: the app of this machine, and the forwarders to remotes."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openrl.backends.remote.body import Body
from openrl.backends.remote.calls import API, Call, Headers
from openrl.backends.remote.forward import Forwarder
from openrl.backends.remote.link import Reply
from openrl.backends.remote.mixed.incoming import nothing
from openrl.codec import decode_json, encode_json
from openrl.errors import BadRequest

log = logging.getLogger(__name__)

_ASIDE_S = 5.0  # for what is asked of a remote beside its part in a list: the list is shown without it then
_JSON: Headers = ((b"content-type", b"application/json"),)


@dataclass(slots=True)
class Answer:
    """A whole answer of the app of this machine."""

    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list[tuple[bytes, bytes]])
    body: bytes = b""

    def json(self) -> dict[str, Any]:
        return decode_json(dict[str, Any], self.body)

    async def replay(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.body})


async def ask_here(app: ASGIApp, scope: Scope, receive: Receive) -> Answer:
    """What the app of this machine answers to a request."""
    answer = Answer()

    async def take(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status, answer.headers = message["status"], [*message.get("headers", [])]
        else:
            answer.body += message.get("body", b"")

    await app(scope, receive, take)
    return answer


async def get_here(app: ASGIApp, scope: Scope, path: str, query: str = "") -> Answer:
    """The same for a GET of a path of the API, on behalf of the caller of `scope`."""
    asked = {**scope, "method": "GET", "path": API + path, "raw_path": (API + path).encode()}
    return await ask_here(app, {**asked, "query_string": query.encode()}, nothing)


async def post_there(forward: Forwarder, path: str, body: dict[str, Any], headers: Headers = ()) -> Reply:
    """A call of ours to a remote; it is kept like those of clients, where it has a key."""
    target = (API + path).encode()
    call = Call("POST", API + path, target, (*_JSON, *headers))
    return await forward.whole(call, Body(encode_json(body)))


async def get_there(forward: Forwarder, path: str, query: str = "") -> dict[str, Any] | None:
    """What a remote says to a GET; None if it is away just now, or refuses."""
    if not forward.link.state.connected:
        return None
    target = f"{API}{path}{'?' + query if query else ''}".encode()
    try:
        async with asyncio.timeout(_ASIDE_S):
            reply = await forward.plain(Call("GET", API + path, target, ()), b"")
        if reply.status == HTTPStatus.OK and reply.rest is None:
            return decode_json(dict[str, Any], reply.content)
    except (TimeoutError, BadRequest):
        pass
    log.warning("the remote %s has no part in %s: it does not say", forward.link.name, path)
    return None


async def send_there(forward: Forwarder, scope: Scope, receive: Receive, send: Send) -> Any:
    """Pass a request on; returns the response, whose body is there unless it was streamed."""
    response = await forward.answer(Request(scope, receive))
    await response(scope, receive, send)
    return response
