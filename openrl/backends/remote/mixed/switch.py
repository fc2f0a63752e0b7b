"""Sends each request to its place: what is about a remote's run, sampler, future or checkpoint to that remote, new work
where its base model belongs, and all else to the app of this machine.

It stands behind all checks of the caller. A remote is used with one key, so whoever may work here may use all that this
key can reach there.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from openrl.backends.remote.app import link_picture
from openrl.backends.remote.calls import API
from openrl.backends.remote.forward import Forwarder, response
from openrl.backends.remote.link import Reply
from openrl.backends.remote.mixed import merging
from openrl.backends.remote.mixed.book import Book
from openrl.backends.remote.mixed.fields import Fields, Found
from openrl.backends.remote.mixed.incoming import Incoming, header, moved, nothing, with_header
from openrl.backends.remote.mixed.places import Places
from openrl.backends.remote.mixed.sides import Answer, ask_here, get_here, send_there
from openrl.codec import decode_json, encode_json
from openrl.errors import BadRequest, Forbidden, OpenRLError
from openrl.keys.principal import Principal
from openrl.server.errors import json_response, on_openrl_error
from openrl.server.middleware import HUB
from openrl.wire import proto
from openrl.wire.bodies import is_protobuf
from openrl.wire.compression import inflate

_HEAD = 256 << 10  # bytes of a body in protobuf in which its run must be found
_SHORT = 127
_KINDS = ("training_runs", "sessions", "samplers")  # whose paths go on with an id


class Switch:
    """An ASGI middleware, innermost. `forwarders` by the remote's name; `routes` from patterns to names."""

    def __init__(self, app: ASGIApp, forwarders: Mapping[str, Forwarder], routes: dict[str, str], book: Book) -> None:
        self._app = app
        self._forwarders = forwarders
        self._routes = routes
        self._book = book
        self._places = Places(app, forwarders, routes, book)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            await self._send(scope, receive, send)
        except OpenRLError as error:
            await (await on_openrl_error(Request(scope), error))(scope, receive, send)

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        name = path.removeprefix(API)
        if path.startswith(HUB):
            await self._hub(scope, receive, send)
        elif not path.startswith(API):
            await self._app(scope, receive, send)
        elif scope["method"] == "POST" and "/" not in name:
            await self._post(name, scope, Incoming(receive), send)
        elif (answer := await self._merged(name, scope, receive)) is not None:
            await answer(scope, receive, send)
        elif name.startswith(_KINDS) and "/" in name:
            await self._by_path(name.split("/"), scope, receive, send)
        else:
            await self._app(scope, receive, send)

    # -- answers from all places --

    async def _merged(self, name: str, scope: Scope, receive: Receive) -> Response | None:
        if scope["method"] == "POST" and name == "client/config":
            return await self._client_config(scope, receive)
        if scope["method"] != "GET":
            return None
        if name == "status":
            return await self._status(scope)
        if name == "get_server_capabilities":
            return json_response(await merging.capabilities(self._app, scope, self._forwarders, self._routes))
        if name in merging.LISTS:
            return json_response(await merging.merged_list(name, self._app, scope, self._forwarders, self._book))
        kind, _, identifier = name.partition("/")
        if kind != "sessions" or not self._book.counterparts(identifier):
            return None
        if (await get_here(self._app, scope, name)).status != HTTPStatus.OK:
            return None
        return json_response(await merging.session(self._app, scope, self._forwarders, self._book, identifier))

    async def _status(self, scope: Scope) -> Response:
        """This machine's picture, with how the connections are."""
        answer = await get_here(self._app, scope, "status")
        links = [link_picture(forward.link, forward.keeper) for forward in self._forwarders.values()]
        more = {"remotes": links, "routes": self._routes} if answer.status == HTTPStatus.OK else {}
        return json_response(answer.json() | more, answer.status)

    async def _client_config(self, scope: Scope, receive: Receive) -> Response:
        """Losses would have to be known in each place, and ids in bodies are replaced, which compression hides."""
        answer = await ask_here(self._app, scope, receive)
        content = answer.json()
        if answer.status == HTTPStatus.OK:
            content |= {"custom_loss_server_side": False, "proto_compress_fwdbwd": False}
        return json_response(content, answer.status)

    async def _hub(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Tokenizers of models that are not served here are those of a remote."""
        answer = await ask_here(self._app, scope, receive)
        for forward in self._forwarders.values():
            if answer.status != HTTPStatus.NOT_FOUND:
                break
            if forward.link.state.connected:
                answer = _whole(await forward.answer(Request(scope, nothing))) or answer
        await answer.replay(send)

    # -- places by what a path says --

    async def _by_path(self, parts: list[str], scope: Scope, receive: Receive, send: Send) -> None:
        kind, identifier, *rest = parts
        if kind == "sessions" and scope["method"] in ("POST", "PUT"):
            incoming = Incoming(receive)
            content = await incoming.all()
            if (await get_here(self._app, scope, f"sessions/{identifier}")).status == HTTPStatus.OK:  # the caller's own
                self._places.tell_counterparts(
                    identifier, scope["method"], lambda there: "/".join([kind, there, *rest]), lambda there: content
                )
            receive = incoming.receive
        place = await self._places.home(scope, kind, identifier)
        if place.remote is None:
            await self._app(scope, receive, send)
            return
        _check_may(scope)
        path = API + "/".join([kind, place.there, *rest])
        await send_there(self._forwarders[place.remote], moved(scope, path), receive, send)

    # -- places by what a body says --

    async def _post(self, name: str, scope: Scope, incoming: Incoming, send: Send) -> None:
        if name in ("forward", "forward_backward") and is_protobuf(header(scope, b"content-type")):
            await self._pass_of_run(scope, incoming, send)
            return
        content = await incoming.all()
        if name == "create_session":
            await self._create_session(content, scope, incoming, send)
            return
        try:
            fields = decode_json(Fields, content or b"{}")
        except BadRequest:
            fields = Fields()  # the app here says what is wrong with it
        if name == "session_heartbeat" and fields.session_id:
            self._places.tell_counterparts(fields.session_id, "POST", lambda there: name, _heartbeat)
        found = await self._places.target(name, scope, fields)
        if found is None:
            await self._app(scope, incoming.receive, send)
            return
        _check_may(scope)
        if isinstance(found, Reply):
            await response(found)(scope, incoming.receive, send)
        else:
            await self._to_remote(found, scope, incoming, send)

    async def _to_remote(self, found: Found, scope: Scope, incoming: Incoming, send: Send) -> None:
        if found.changes:
            content = encode_json(decode_json(dict[str, Any], incoming.so_far()) | found.changes)
            incoming.replace(content)
            scope = with_header(scope, b"content-length", str(len(content)))
        answer = await send_there(self._forwarders[found.remote], scope, incoming.receive, send)
        self._places.remember(found.remote, answer)

    async def _create_session(self, content: bytes, scope: Scope, incoming: Incoming, send: Send) -> None:
        answer = await ask_here(self._app, scope, incoming.receive)
        if answer.status == HTTPStatus.OK:
            self._book.made(answer.json()["session_id"], decode_json(dict[str, Any], content or b"{}"))
        await answer.replay(send)

    async def _pass_of_run(self, scope: Scope, incoming: Incoming, send: Send) -> None:
        """A training pass in protobuf, sent on while it comes. Its run is named at its beginning."""
        packed = header(scope, b"content-encoding").lower() == "zstd"

        def run_in(head: bytes) -> str | None:
            try:
                return proto.read_address(inflate(head, 4 * _HEAD) if packed else head).model_id
            except BadRequest:
                return None

        run = await incoming.until(run_in, _HEAD) or ""
        place = self._places.known(run)
        if place.remote is None:
            await self._app(scope, incoming.receive, send)
            return
        _check_may(scope)
        forward = self._forwarders[place.remote]
        if place.there != run:
            scope = await _renamed(scope, incoming, (run, place.there), forward.limit if packed else None)
        await send_there(forward, scope, incoming.receive, send)


def _heartbeat(session: str) -> bytes:
    return encode_json({"session_id": session, "type": "session_heartbeat"})


def _check_may(scope: Scope) -> None:
    """As the routes here do: who may only look may only look there."""
    principal: Principal = scope["state"]["principal"]
    if scope["method"] not in ("GET", "HEAD") and not principal.can_work:
        raise Forbidden("this call needs a key with scope use or admin.", "See: openrl keys create --scope ...")


def _whole(given: Response) -> Answer | None:
    """A response that succeeded and is whole."""
    if given.status_code != HTTPStatus.OK or not hasattr(given, "body"):
        return None
    return Answer(given.status_code, [*given.raw_headers], bytes(given.body))


async def _renamed(scope: Scope, incoming: Incoming, runs: tuple[str, str], packed: int | None) -> Scope:
    """The second run in the place of the first in the first field of a body in protobuf. A compressed body, of which
    `packed` bytes are taken at most, is sent on uncompressed."""
    old, new = map(_first_field, runs)
    content = incoming.so_far() if packed is None else inflate(await incoming.all(), packed)
    if not content.startswith(old):
        raise BadRequest("model_id must be the first field of the body.")
    if packed is not None:
        content = new + content[len(old) :]
        incoming.replace(content)
        return with_header(with_header(scope, b"content-encoding", None), b"content-length", str(len(content)))
    incoming.replace_beginning(old, new)
    length = header(scope, b"content-length")
    return with_header(scope, b"content-length", str(int(length) + len(new) - len(old))) if length else scope


def _first_field(name: str) -> bytes:
    """A string as field 1 of a message; its length takes one byte up to 127."""
    text = name.encode()
    if len(text) > _SHORT:
        raise BadRequest(f"model_id has {len(text)} bytes; at most {_SHORT} can be sent to a remote.")
    return b"\x0a" + bytes([len(text)]) + text
