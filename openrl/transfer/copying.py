"""A checkpoint from one server to another, piece by piece, from where an earlier try ended.

Nothing is kept on this machine: the receiving server knows how far each file is, and checks every file's SHA-256
against what the sending server's manifest says before it makes a checkpoint of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Protocol

from openrl.checkpoints.incoming import Announcement
from openrl.checkpoints.layout import Address, parse
from openrl.codec import decode_json, to_object
from openrl.errors import BadRequest, Conflict, OpenRLError
from openrl.transfer.server import Server

PIECE_BYTES = 4 << 20
_SHOWN_BYTES = 128 << 10  # between two movements of a progress bar


class Progress(Protocol):
    """Who shows how a transfer goes."""

    def begin(self, announced: Announcement, received: Mapping[str, int]) -> None:
        """What will be moved, and how much of it is there already."""
        ...

    def moved(self, file: str, at: int) -> None:
        """So many bytes of a file are there."""
        ...

    def checking(self) -> None:
        """All bytes are there; the server checks them."""
        ...


@dataclass(frozen=True, slots=True)
class Moved:
    """What came of a transfer: the checkpoint's path on the other server, the bytes that were sent for it now, and
    those that were there from before."""

    path: str
    sent: int
    found: int


@dataclass(frozen=True, slots=True)
class _FileState:
    size: int
    received: int


@dataclass(frozen=True, slots=True)
class _UploadAnswer:
    upload_id: str
    tinker_path: str | None
    files: Mapping[str, _FileState]
    max_piece_bytes: int


@dataclass(frozen=True, slots=True)
class _Committed:
    tinker_path: str


@dataclass(frozen=True, slots=True)
class _Received:
    received: int


async def copy_checkpoint(
    source: Server, path: str, target: Server, progress: Progress, base_model: str | None = None
) -> Moved:
    """Move the checkpoint `path` of `source` to `target`, where its base model is served as `base_model` (None: under
    the same name). Raises OpenRLError; called again, it goes on where it ended.
    """
    announced = await source.json(Announcement, "GET", f"{_call(path)}/files")
    announced = replace(announced, base_model=base_model or announced.base_model)
    upload = await target.json(_UploadAnswer, "POST", "uploads", to_object(announced))
    found = sum(file.received for file in upload.files.values())
    progress.begin(announced, {name: file.received for name, file in upload.files.items()})
    if upload.tinker_path is not None:
        return Moved(upload.tinker_path, 0, found)
    transfer = _Transfer(source, target, announced, upload, progress)
    await transfer.send_all(upload)
    return Moved(await transfer.commit(), transfer.sent, found)


class _Transfer:
    """One upload under way."""

    def __init__(
        self, source: Server, target: Server, announced: Announcement, upload: _UploadAnswer, progress: Progress
    ) -> None:
        self._source = source
        self._target = target
        self._announced = announced
        self._place = f"uploads/{upload.upload_id}"
        self._piece = min(PIECE_BYTES, upload.max_piece_bytes)
        self._progress = progress
        self.sent = 0

    async def send_all(self, upload: _UploadAnswer) -> None:
        for name, file in upload.files.items():
            if file.received < file.size:
                await self._send(name, file.size, file.received)

    async def commit(self) -> str:
        """The path of the new checkpoint. A file that the server found damaged, as after a crash of its machine, is
        sent once more."""
        self._progress.checking()
        try:
            return await self._commit()
        except BadRequest:
            upload = await self._target.json(_UploadAnswer, "GET", self._place)
            if all(file.received == file.size for file in upload.files.values()):
                raise
        await self.send_all(upload)
        self._progress.checking()
        return await self._commit()

    async def _commit(self) -> str:
        return (await self._target.json(_Committed, "POST", f"{self._place}/commit")).tinker_path

    async def _send(self, name: str, size: int, at: int) -> None:
        """A file from byte `at` on; while a piece is sent, the next one is fetched."""
        ahead: asyncio.Task[bytes] | None = None
        try:
            piece = await self._read(name, size, at)
            while at < size:
                stop = at + len(piece)
                if stop < size:
                    ahead = asyncio.create_task(self._read(name, size, stop))
                at = await self._write(name, size, at, piece)
                if at < size:
                    piece = await ahead if ahead is not None and at == stop else await self._read(name, size, at)
        finally:
            if ahead is not None:
                ahead.cancel()
                with suppress(asyncio.CancelledError, OpenRLError):
                    await ahead

    async def _read(self, name: str, size: int, start: int) -> bytes:
        stop = min(start + self._piece, size)
        headers = {"range": f"bytes={start}-{stop - 1}", "if-match": f'"{self._announced.files[name].sha256}"'}
        place = f"{_call(self._announced.source)}/files/{name}"
        answer = await self._source.call("GET", place, headers=headers, legal=(HTTPStatus.PRECONDITION_FAILED,))
        if answer.status_code != HTTPStatus.PARTIAL_CONTENT or len(answer.content) != stop - start:
            raise Conflict(f"{self._announced.source} was overwritten while it was moved.", "Run the command again.")
        return answer.content

    async def _write(self, name: str, size: int, at: int, piece: bytes) -> int:
        """Send a piece; returns how far the file is then, which may be less or more than the piece's end."""

        def sent(count: int) -> None:
            self._progress.moved(name, at + count)

        headers = {
            "content-range": f"bytes {at}-{at + len(piece) - 1}/{size}",
            "content-length": str(len(piece)),
            "content-type": "application/octet-stream",
        }
        answer = await self._target.call(
            "PUT",
            f"{self._place}/files/{name}",
            headers=headers,
            content=lambda: _parts(piece, sent),
            legal=(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,),
        )
        received = decode_json(_Received, answer.content, f"the answer of {self._target.name}").received
        self.sent += max(received - at, 0)
        self._progress.moved(name, received)
        return received


async def _parts(piece: bytes, sent: Callable[[int], None]) -> AsyncGenerator[bytes]:
    for start in range(0, len(piece), _SHOWN_BYTES):
        part = piece[start : start + _SHOWN_BYTES]
        yield part
        sent(start + len(part))


def _call(path: str) -> str:
    """The REST path of a checkpoint. Raises BadRequest for a malformed `tinker://` path."""
    address: Address = parse(path)
    return f"training_runs/{address.run}/checkpoints/{address.kind}/{address.name}"
