"""What happens to a checkpoint once it is saved: it is listed, published, given a lifetime, downloaded, deleted."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import sys
import time
from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from openrl.checkpoints import manifest
from openrl.checkpoints.commit import CheckpointFolders
from openrl.checkpoints.incoming import Announcement, check_announcement
from openrl.checkpoints.layout import parse
from openrl.daemon import absent
from openrl.daemon.copying import Copying
from openrl.daemon.disposal import Disposal
from openrl.daemon.recovery import find_checkpoint
from openrl.daemon.runs import Runs
from openrl.errors import NotFound
from openrl.store import audit, checkpoints, retired
from openrl.store.checkpoints import Filter
from openrl.store.db import Database
from openrl.store.records import Checkpoint
from openrl.types import CheckpointKind, RunId
from openrl.validation import check_ttl

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Page:
    """Checkpoints, newest first, and how many there are in all."""

    checkpoints: list[Checkpoint]
    total: int


class CheckpointLife:
    """Changes are committed to the store first, then written into the folder's manifest."""

    def __init__(
        self, db: Database, folders: CheckpointFolders, runs: Runs, disposal: Disposal, copying: Copying
    ) -> None:
        self._db = db
        self._folders = folders
        self._runs = runs
        self._disposal = disposal
        self.copying = copying

    # -- reading --

    async def page(
        self, limit: int, offset: int, hidden: Collection[CheckpointKind] = (), owner: str | None = None
    ) -> Page:
        """A page of all checkpoints, or an owner's; kinds that are `hidden` do not count either."""
        return await self._page(Filter(time.time(), None, hidden, owner), limit, offset)

    async def of_run(self, run: RunId, hidden: Collection[CheckpointKind] = ()) -> Page:
        """All checkpoints of a run. Raises NotFound for an unknown run that has none."""
        page = await self._page(Filter(time.time(), run, hidden), -1, 0)
        if not page.total and run not in self._runs:
            raise absent.run(run)
        return page

    async def _page(self, wanted: Filter, limit: int, offset: int) -> Page:
        def read(db: sqlite3.Connection) -> Page:
            return Page(checkpoints.newest(db, wanted, limit, offset), checkpoints.count(db, wanted))

        return await self._db.run(read)

    async def find(self, path: str) -> Checkpoint:
        """Raises BadRequest for a malformed path, NotFound, also once it has expired."""
        return await find_checkpoint(self._db, path)

    def folder(self, folder: str) -> Path:
        """Where a checkpoint's files are. Raises NotFound if they are gone, or only kept for who has them in use."""
        path = self._folders.absolute(folder)
        if not (path / manifest.FILE).is_file():
            raise NotFound("the checkpoint's files are gone: it was deleted, or its name overwritten.")
        return path

    def hold(self, folder: str) -> AbstractContextManager[None]:
        """Keep a folder's files for the time of the block, whatever happens to the checkpoint."""
        return self._folders.hold(folder)

    def files(self, checkpoint: Checkpoint) -> list[Path]:
        """A checkpoint's files, without our own manifest."""
        return sorted(path for path in self.folder(checkpoint.folder).iterdir() if path.name != manifest.FILE)

    async def announcement(self, path: str) -> Announcement:
        """What another server has to know to take the checkpoint over. Raises NotFound, and BadRequest for files that
        can only be downloaded."""
        found = await self.find(path)
        files = await asyncio.to_thread(manifest.read_files, self.folder(found.folder))
        announced = Announcement(
            found.path, found.kind, found.name, found.base_model, found.spec, files, found.user_metadata
        )
        check_announcement(announced, sys.maxsize)
        return announced

    # -- changing --

    async def delete(self, path: str) -> None:
        """Forget a checkpoint; its bytes go as soon as nobody needs them. Idempotent for a day, then NotFound."""
        address = str(parse(path))
        try:
            checkpoint = await self.find(address)
        except NotFound:
            if await self._db.run(lambda db: retired.was_deleted(db, address)):
                return
            raise
        await self._disposal.discard(checkpoint, "checkpoint_delete")

    async def publish(self, path: str, public: bool) -> None:
        """Mark a checkpoint public or private; idempotent."""
        checkpoint = await self.find(path)
        if checkpoint.public == public:
            return

        def write(db: sqlite3.Connection) -> None:
            checkpoints.set_public(db, checkpoint.path, public)
            event = "checkpoint_publish" if public else "checkpoint_unpublish"
            audit.write(db, event, run=checkpoint.run_id, path=checkpoint.path)

        await self._db.run(write)
        await self._describe(replace(checkpoint, public=public))

    async def set_ttl(self, path: str, ttl: int | None) -> None:
        """Let a checkpoint expire `ttl` seconds from now; None: never. Raises BadRequest outside of an hour to ten
        years."""
        check_ttl(ttl)
        checkpoint = await self.find(path)
        expires_at = None if ttl is None else time.time() + ttl

        def write(db: sqlite3.Connection) -> None:
            checkpoints.set_expiry(db, checkpoint.path, expires_at)
            audit.write(db, "checkpoint_ttl", run=checkpoint.run_id, path=checkpoint.path, ttl_seconds=ttl)

        await self._db.run(write)
        await self._describe(replace(checkpoint, expires_at=expires_at))

    async def _describe(self, checkpoint: Checkpoint) -> None:
        try:
            await asyncio.to_thread(self._folders.describe, checkpoint)
        except (OSError, ValueError) as error:  # the row counts; the manifest is for a store that is lost
            log.warning("the manifest of %s could not be updated: %s", checkpoint.path, error)

    # -- by the clock --

    async def discard_ephemeral(self, run: RunId) -> None:
        """Discard the unnamed sampler checkpoints of a run that is closed."""
        for checkpoint in await self._db.run(lambda db: checkpoints.ephemeral(db, run)):
            await self._disposal.discard(checkpoint, "checkpoint_delete", ephemeral=True)

    async def expire(self, remember: float) -> None:
        """Discard what has outlived its lifetime, and the files of what was discarded while someone needed them.

        `remember` is for how many seconds a deleted path is known as such.
        """
        now = time.time()
        for checkpoint in await self._db.run(lambda db: checkpoints.expired(db, now)):
            log.info("checkpoint %s has expired", checkpoint.path)
            await self._disposal.discard(checkpoint, "checkpoint_expire")
        await self._disposal.sweep()
        await self._db.run(lambda db: retired.tidy(db, now - remember))
