"""Checkpoints that another server's user pushes here: announced, received piece by piece, checked, taken in.

An upload is known by its content and its owner, so a client that starts over finds what it has sent. The disk holds
all of its state; what is kept here is only who is writing at the moment.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from openrl.checkpoints import layout
from openrl.checkpoints.commit import CheckpointFolders
from openrl.checkpoints.incoming import Announcement, check_announcement, check_content
from openrl.checkpoints.layout import Address
from openrl.checkpoints.staging import Staging, Upload
from openrl.codec import encode_json
from openrl.daemon.copying import Copying
from openrl.daemon.execute import check_spec
from openrl.daemon.models import ModelPool
from openrl.daemon.runs import Runs
from openrl.daemon.sessions import Sessions
from openrl.daemon.work import NewSession
from openrl.errors import BadRequest, Busy, NotFound, NotReady, TooLarge
from openrl.settings import DaemonSettings
from openrl.store import checkpoints
from openrl.store.db import Database
from openrl.store.records import Checkpoint
from openrl.types import RunId, SessionId

log = logging.getLogger(__name__)

ORIGIN = "upload"
_MAX_OPEN = 16  # uploads of one owner at a time
_SPARE_BYTES = 512 << 20  # of the disk, that uploads leave free for runs and the store
_SWEEP_SECONDS = 600.0

CheckRoom = Callable[[str, int], Awaitable[None]]


class WrongOffset(BadRequest):
    """A piece does not begin where the file ends; `received` is where that is."""

    def __init__(self, name: str, received: int) -> None:
        super().__init__(f"{name} is here up to byte {received}; send from there.")
        self.received = received


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes [start, stop) of a file of `size` bytes."""

    start: int
    stop: int
    size: int


@dataclass(frozen=True, slots=True)
class UploadState:
    """An upload, and how many bytes of each file are here."""

    upload: Upload
    received: dict[str, int]


@dataclass(slots=True)
class _Writer:
    """Who may write to a file: the newest request for it. One that its client gave up may not know that yet."""

    newest: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


async def _any_room(_owner: str, _size: int) -> None:
    return None


class Uploads:
    """Owns the staging folder. `owner` is whose key it was; what is another's does not exist."""

    def __init__(
        self,
        data_dir: Path,
        db: Database,
        folders: CheckpointFolders,
        sessions: Sessions,
        runs: Runs,
        pool: ModelPool,
        copying: Copying,
        limits: DaemonSettings,
    ) -> None:
        self._staging = Staging(data_dir / "uploads")
        self._db = db
        self._folders = folders
        self._sessions = sessions
        self._runs = runs
        self._pool = pool
        self._copying = copying
        self._limits = limits
        self._writers: dict[tuple[str, str], _Writer] = {}
        self._announcing = asyncio.Lock()
        self._ending: dict[str, asyncio.Lock] = {}
        self._stopping = False
        self.check_room: CheckRoom = _any_room  # whether an owner may keep so many bytes more

    # -- what clients ask for --

    async def announce(self, owner: str, announced: Announcement) -> UploadState:
        """Begin an upload, or find it again as far as it came.

        Raises BadRequest, TooLarge (limits, disk), Busy (too many at a time), NotReady.
        """
        self._check_running()
        check_announcement(announced, self._limits.max_upload_bytes)
        await self._check_base(announced)
        identity = _identity(owner, announced)
        async with self._announcing:
            known = await self._known(identity, owner)
            if known is None:
                await self._check_limits(owner, announced)
                known = Upload(identity, owner, secrets.token_hex(4), announced)
                await asyncio.to_thread(self._staging.put, known)
                log.info("upload %s of %d bytes begins", identity, announced.size)
        return self._state(known)

    async def state(self, owner: str, identity: str) -> UploadState:
        """Raises NotFound."""
        return self._state(self._of(owner, identity))

    async def receive(self, owner: str, identity: str, name: str, span: Span, blocks: AsyncIterator[bytes]) -> int:
        """Append a piece to a file as it comes, also if it ends early; returns the bytes that are here now.

        Raises NotFound, WrongOffset, BadRequest (not the announced size; more bytes than the span has), NotReady.
        """
        upload = self._of(owner, identity)
        file = self._staging.file(upload, name)
        size = upload.announced.files[name].size
        if upload.path is not None:
            return size
        if span.size != size or not 0 <= span.start < span.stop <= size:
            raise BadRequest(
                f"{name} has {size} bytes; the piece is said to be {span.start}-{span.stop - 1}/{span.size}."
            )
        writer = self._writers.setdefault((identity, name), _Writer())
        writer.newest += 1
        mine = writer.newest
        async with writer.lock:
            received = self._staging.received(upload, name)
            if span.start != received:
                raise WrongOffset(name, received)
            handle = await asyncio.to_thread(file.open, "ab")
        try:
            await self._append(handle, writer, mine, span, blocks)
        finally:
            handle.close()
        return self._staging.received(upload, name)

    async def _append(
        self, handle: BinaryIO, writer: _Writer, mine: int, span: Span, blocks: AsyncIterator[bytes]
    ) -> None:
        left = span.stop - span.start
        async for block in blocks:
            left -= len(block)
            if left < 0:
                raise BadRequest(f"the body is longer than the {span.stop - span.start} bytes that Content-Range says.")
            self._check_running()
            async with writer.lock:
                if writer.newest != mine:
                    raise BadRequest("another request goes on with this file.")
                await asyncio.to_thread(_write, handle, block)

    async def commit(self, owner: str, identity: str) -> str:
        """Check what has come and make a checkpoint of it, in a session and run of its own; returns its path.

        Idempotent. Raises NotFound, or BadRequest for what is incomplete or damaged; a file that is not what was
        announced is dropped and can be sent again.
        """
        async with self._ending.setdefault(identity, asyncio.Lock()):
            self._check_running()
            upload = self._of(owner, identity)
            if upload.path is not None:
                return upload.path
            self._check_complete(upload)
            await self._check_base(upload.announced)
            await self.check_room(owner, upload.announced.size)
            await asyncio.to_thread(self._check_digests, upload)
            await asyncio.to_thread(check_content, self._staging.folder(upload), upload.announced)
            path = await self._take_in(upload)
            await asyncio.to_thread(self._staging.finish, replace(upload, path=path))
        self._forget(identity)
        log.info("upload %s is checkpoint %s", identity, path)
        return path

    async def drop(self, owner: str, identity: str) -> None:
        """Give up an upload and what has come of it. A checkpoint that it has become stays. Raises NotFound."""
        async with self._ending.setdefault(identity, asyncio.Lock()):
            self._of(owner, identity)
            await asyncio.to_thread(self._staging.remove, identity)
        self._forget(identity)

    # -- by the clock --

    def stop(self) -> None:
        """Let go of everyone who sends; they go on once there is a daemon again."""
        self._stopping = True

    async def keep_tidy(self) -> None:
        """Remove what nothing has been added to for a day, again and again."""
        while True:
            await self.sweep()
            await asyncio.sleep(_SWEEP_SECONDS)

    async def sweep(self) -> None:
        """One round; also called by tests."""
        for identity in await asyncio.to_thread(self._staging.idle, self._limits.upload_ttl):
            log.info("nothing was added to upload %s for long: it goes", identity)
            await asyncio.to_thread(self._staging.remove, identity)
            self._forget(identity)

    # -- parts --

    def _of(self, owner: str, identity: str) -> Upload:
        upload = self._staging.get(identity)
        if upload.owner != owner:
            raise NotFound("there is no such upload.")
        return upload

    async def _known(self, identity: str, owner: str) -> Upload | None:
        """An upload that is under way, or whose checkpoint is still here."""
        try:
            upload = self._of(owner, identity)
        except NotFound:
            return None
        if upload.path is None or await self._find(upload.path) is not None:
            return upload
        await asyncio.to_thread(self._staging.remove, identity)
        return None

    async def _find(self, path: str) -> Checkpoint | None:
        found = await self._db.run(lambda db: checkpoints.get(db, path))
        gone = found is not None and found.expires_at is not None and found.expires_at <= time.time()
        return None if gone else found

    def _state(self, upload: Upload) -> UploadState:
        files = upload.announced.files
        received = {name: self._staging.received(upload, name) for name in files}
        return UploadState(upload, received if upload.path is None else {name: d.size for name, d in files.items()})

    async def _check_base(self, announced: Announcement) -> None:
        info = (await self._pool.admit(announced.base_model)).info
        if info is not None:
            check_spec(announced.spec, info)

    async def _check_limits(self, owner: str, announced: Announcement) -> None:
        under_way = [one for one in await asyncio.to_thread(lambda: list(self._staging.all())) if one.path is None]
        mine = [one for one in under_way if one.owner == owner]
        if len(mine) >= _MAX_OPEN:
            raise Busy(f"{len(mine)} uploads of yours are under way already.", "End or drop one of them first.")
        await self.check_room(owner, announced.size + sum(one.announced.size for one in mine))
        free = await asyncio.to_thread(self._staging.free_bytes)
        room = free - await asyncio.to_thread(self._staging.missing_bytes) - _SPARE_BYTES
        if announced.size > room:
            raise TooLarge(
                f"the checkpoint has {announced.size} bytes; the server's disk has room for {max(room, 0)}.",
                "Delete checkpoints there (`openrl checkpoints prune`), or give it a larger disk.",
            )

    def _check_complete(self, upload: Upload) -> None:
        for name, digest in upload.announced.files.items():
            if (received := self._staging.received(upload, name)) != digest.size:
                raise BadRequest(f"{name} is not complete: {received} of {digest.size} bytes are here.")

    def _check_digests(self, upload: Upload) -> None:
        found = self._staging.digests(upload)
        for name, announced in upload.announced.files.items():
            if found[name] != announced:
                self._staging.drop_file(upload, name)
                raise BadRequest(
                    f"{name} is damaged: its SHA-256 here is {found[name].sha256}, announced was {announced.sha256}.",
                    "What came of it is dropped. Push again; if it fails again, the file at the source is damaged.",
                )

    async def _take_in(self, upload: Upload) -> str:
        announced = upload.announced
        new = NewSession("", ("push",), None, None, f"push of {announced.source}", upload.owner)
        session = await self._sessions.create(new, f"{ORIGIN}:{upload.id}:{upload.nonce}")
        address = Address(RunId(f"{session}:train:0"), announced.kind, announced.name)
        if address.run not in self._runs:
            checkpoint = await self._find(str(address)) or await asyncio.to_thread(self._lay, upload, address)
            await self._copying.take_in(checkpoint, None, ORIGIN, source=announced.source)
        await self._sessions.finish(SessionId(session), "success", None)
        return str(address)

    def _lay(self, upload: Upload, address: Address) -> Checkpoint:
        """The checkpoint's folder, in its place."""
        announced = upload.announced
        checkpoint = Checkpoint(
            path=str(address),
            run_id=address.run,
            kind=address.kind,
            name=address.name,
            folder=str(layout.new_folder(address)),
            base_model=announced.base_model,
            spec=announced.spec,
            size_bytes=announced.size,
            created_at=time.time(),
            expires_at=None,
            user_metadata=dict(announced.user_metadata),
            owner=upload.owner,
        )
        staged = self._folders.stage(Path(checkpoint.folder))
        self._staging.link(upload, staged)
        return self._folders.commit(staged, checkpoint)

    def _forget(self, identity: str) -> None:
        self._ending.pop(identity, None)
        for key in [key for key in self._writers if key[0] == identity]:
            del self._writers[key]

    def _check_running(self) -> None:
        if self._stopping:
            raise NotReady("the server is stopping.", "Go on once it is started again.")


def _identity(owner: str, announced: Announcement) -> str:
    """The same for the same checkpoint from the same owner."""
    files, metadata = dict(sorted(announced.files.items())), dict(sorted(announced.user_metadata.items()))
    content = encode_json([owner, replace(announced, files=files, user_metadata=metadata)])
    return hashlib.sha256(content).hexdigest()[:32]


def _write(handle: BinaryIO, block: bytes) -> None:
    handle.write(block)
    handle.flush()
