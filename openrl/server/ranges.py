"""Downloads that can be taken up again: a rope of bytes as a streamed answer, whole or the part that `Range` names."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from openrl.checkpoints.rope import Rope

_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


def download(
    request: Request, rope: Rope, file_name: str, etag: str, while_sent: AbstractContextManager[None]
) -> Response:
    """The bytes of `rope` as a file; `etag` stands for its content. `while_sent` is entered around the sending.

    More than one range at a time is answered with the whole, as HTTP allows.
    """
    headers = {
        "accept-ranges": "bytes",
        "etag": f'"{etag}"',
        "content-disposition": f'attachment; filename="{file_name}"',
        "cache-control": "private, max-age=0",
    }
    start, stop, status = 0, rope.size, HTTPStatus.OK
    if wanted := _wanted(request, headers["etag"]):
        start, stop = _bounds(*wanted, rope.size)
        if start >= stop:
            headers["content-range"] = f"bytes */{rope.size}"
            return Response(status_code=HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, headers=headers)
        headers["content-range"] = f"bytes {start}-{stop - 1}/{rope.size}"
        status = HTTPStatus.PARTIAL_CONTENT
    headers["content-length"] = str(stop - start)
    if request.method == "HEAD":
        return Response(status_code=status, headers=headers, media_type="application/octet-stream")
    content = _stream(rope, start, stop, while_sent)
    return StreamingResponse(content, status, headers, media_type="application/octet-stream")


def _wanted(request: Request, etag: str) -> tuple[str, str] | None:
    """First and last byte as written, None for the whole: also when the content is not what `If-Range` knows."""
    match = _RANGE.fullmatch(request.headers.get("range", ""))
    if match is None or match[0] == "bytes=-" or request.headers.get("if-range", etag) != etag:
        return None
    return match[1], match[2]


def _bounds(first: str, last: str, size: int) -> tuple[int, int]:
    """Start and stop; `-500` is the last 500 bytes."""
    if not first:
        return max(size - int(last), 0), size
    return int(first), min(int(last) + 1, size) if last else size


async def _stream(rope: Rope, start: int, stop: int, while_sent: AbstractContextManager[None]) -> AsyncGenerator[bytes]:
    blocks = rope.read(start, stop)
    with while_sent:
        while block := await asyncio.to_thread(next, blocks, b""):
            yield block
