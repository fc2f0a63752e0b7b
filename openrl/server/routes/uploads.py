"""Our own: checkpoints between servers, for `openrl push` and `openrl pull` (docs/remote.md).

The server that has a checkpoint describes it and gives out its files; the one that gets it takes them in pieces.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from http import HTTPStatus
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from openrl.checkpoints.incoming import Announcement
from openrl.checkpoints.rope import Rope, whole
from openrl.codec import to_object
from openrl.daemon.uploads import Span, UploadState, WrongOffset
from openrl.errors import BadRequest, NotFound, OpenRLError
from openrl.server.errors import json_response, refusal
from openrl.server.ranges import download
from openrl.server.requests import daemon_of, principal_of, read_json, settings_of
from openrl.server.routes.checkpoints import path_of

MAX_PIECE_BYTES = 8 << 20  # what is lost at most where something between client and server buffers whole bodies
_BLOCK_BYTES = 1 << 20  # written at a time
_CONTENT_RANGE = re.compile(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15})")


# -- giving --


async def describe(request: Request) -> Response:
    """What a push announces elsewhere: all of the checkpoint but its bytes."""
    return json_response(to_object(await daemon_of(request).life.announcement(path_of(request))))


async def file(request: Request) -> Response:
    """The bytes of one file as they are on disk, whole or a range; 412 if they are not those that `If-Match` knows."""
    life, name = daemon_of(request).life, request.path_params["file"]
    checkpoint = await life.find(path_of(request))
    announced = await life.announcement(checkpoint.path)
    if name not in announced.files:
        raise NotFound(f"the checkpoint has no file {name!r}.", f"It has: {', '.join(announced.files)}.")
    digest = announced.files[name].sha256
    if request.headers.get("if-match", f'"{digest}"') != f'"{digest}"':
        return refusal(f"{name} was overwritten since", HTTPStatus.PRECONDITION_FAILED)
    content = Rope((whole(life.folder(checkpoint.folder) / name),))
    return download(request, content, name, digest, life.hold(checkpoint.folder))


# -- taking --


async def announce(request: Request) -> Response:
    """Begin an upload, or find it again: where it ended is in the answer."""
    announced = await read_json(request, Announcement)
    return _answer(request, await daemon_of(request).uploads.announce(_owner(request), announced))


async def show(request: Request) -> Response:
    return _answer(request, await daemon_of(request).uploads.state(_owner(request), request.path_params["upload"]))


async def receive(request: Request) -> Response:
    """A piece of a file; 416 with where to go on, if it does not begin there."""
    upload, name = request.path_params["upload"], request.path_params["file"]
    span = _span(request)
    try:
        blocks = _blocks(request)
        received = await daemon_of(request).uploads.receive(_owner(request), upload, name, span, blocks)
    except WrongOffset as error:
        content = {"detail": str(error), "received": error.received}
        return json_response(content, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
    return json_response({"received": received})


async def commit(request: Request) -> Response:
    """Check the files and make a checkpoint of them. Idempotent."""
    path = await daemon_of(request).uploads.commit(_owner(request), request.path_params["upload"])
    return json_response({"tinker_path": path})


async def drop(request: Request) -> Response:
    await daemon_of(request).uploads.drop(_owner(request), request.path_params["upload"])
    return Response(status_code=HTTPStatus.NO_CONTENT)


def _owner(request: Request) -> str:
    return principal_of(request).owner


def _answer(request: Request, state: UploadState) -> Response:
    files = state.upload.announced.files
    content: dict[str, Any] = {
        "upload_id": state.upload.id,
        "tinker_path": state.upload.path,
        "files": {name: {"size": files[name].size, "received": state.received[name]} for name in files},
        "max_piece_bytes": min(MAX_PIECE_BYTES, settings_of(request).max_body_bytes),
    }
    return json_response(content)


def _span(request: Request) -> Span:
    """`Content-Range: bytes FIRST-LAST/SIZE`. Raises BadRequest."""
    given = request.headers.get("content-range", "")
    match = _CONTENT_RANGE.fullmatch(given)
    if match is None:
        raise BadRequest(f"Content-Range is {given!r}; the form is: bytes FIRST-LAST/SIZE")
    first, last, size = map(int, match.groups())
    return Span(first, last + 1, size)


async def _blocks(request: Request) -> AsyncGenerator[bytes]:
    """The body in blocks of about 1 MiB; if it ends early (a client that hangs up or is too slow), what has come until
    then, and the error."""
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            parts.append(part)
            size += len(part)
            if size >= _BLOCK_BYTES:
                yield b"".join(parts)
                parts, size = [], 0
    except (ClientDisconnect, OpenRLError):
        if parts:
            yield b"".join(parts)
        raise
    if parts:
        yield b"".join(parts)
