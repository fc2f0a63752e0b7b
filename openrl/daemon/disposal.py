"""Taking checkpoints away: the name goes at once, the files as soon as nobody needs them any more."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from typing import Any

from openrl.checkpoints.commit import CheckpointFolders
from openrl.store import audit, retired
from openrl.store.db import Database
from openrl.store.records import Checkpoint

log = logging.getLogger(__name__)


class Disposal:
    """Owns the folders that no checkpoint names any more.

    A folder is needed by samplers and replays (`retired.is_needed`), and by whoever reads it at the moment.
    """

    def __init__(self, db: Database, folders: CheckpointFolders) -> None:
        self._db = db
        self._folders = folders

    async def discard(self, checkpoint: Checkpoint, event: str, **details: Any) -> None:
        """Forget a checkpoint; `event` is what the audit log calls it. It cannot be found from here on."""
        now = time.time()

        def write(db: sqlite3.Connection) -> None:
            retired.bury(db, checkpoint, now)
            audit.write(db, event, run=checkpoint.run_id, path=checkpoint.path, **details)

        await self._db.run(write)
        await self.free(checkpoint.folder)

    async def free(self, folder: str) -> bool:
        """Remove the files of a retired folder if nobody needs them; False if someone does."""
        if self._folders.is_held(folder) or await self._db.run(lambda db: retired.is_needed(db, folder)):
            await asyncio.to_thread(self._folders.withdraw, folder)
            return False
        await asyncio.to_thread(self._folders.remove, folder)
        await self._db.run(lambda db: retired.forget(db, folder))
        return True

    async def sweep(self) -> None:
        """Try again what could not go when it was retired."""
        for folder in await self._db.run(retired.folders):
            try:
                if await self.free(folder):
                    log.info("the files of deleted checkpoint %s are gone", folder)
            except OSError as error:
                log.warning("the files of deleted checkpoint %s cannot be removed: %s", folder, error)
