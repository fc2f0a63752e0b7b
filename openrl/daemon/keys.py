"""API keys of a running server: made and revoked in the store, read from the keys file, at hand in memory."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from pathlib import Path

from openrl.errors import SettingsError
from openrl.keys.file import read_keys
from openrl.keys.key import Key, Quotas, make, revocable
from openrl.keys.principal import Scope
from openrl.keys.ring import Keyring
from openrl.store import keys
from openrl.store.db import Database

log = logging.getLogger(__name__)

_EVERY_SECONDS = 1.0


class Keys:
    """Owns the keys; `ring` is what calls are checked against. Without `file` there are none but the store's."""

    def __init__(self, db: Database, file: Path | None = None) -> None:
        self._db = db
        self._file = file
        self._read_as: tuple[int, ...] | None = None  # the file's stamp when it was read
        self.ring = Keyring()

    async def load(self) -> None:
        """Take the keys from store and file. Raises SettingsError for a file that cannot be read."""
        self.ring.put(*await self._db.run(keys.all_keys))
        if self._file is not None:
            self._read_as = _stamp(self._file)
            self.ring.set_filed(read_keys(self._file))

    async def create(
        self, owner: str, scopes: frozenset[Scope], quotas: Quotas, expires_at: float | None, note: str
    ) -> tuple[str, Key]:
        """A new key, which is told only now, and its record. Raises BadRequest."""
        text, key = make(owner, scopes, quotas, expires_at, note)
        await self._db.run(lambda db: keys.insert(db, key))
        self.ring.put(key)
        log.info("key %s of %s is made", key.id, key.owner)
        return text, key

    async def revoke(self, identity: str) -> Key:
        """End a key and all that hangs on it; idempotent. Raises NotFound, also for keys kept elsewhere."""
        key = revocable(self.ring.all(), identity)
        if key.revoked_at is None:
            key = replace(key, revoked_at=time.time())
            await self._db.run(lambda db: keys.revoke(db, key, key.revoked_at or 0.0))
            self.ring.put(key)
            log.info("key %s of %s is revoked", key.id, key.owner)
        return key

    async def watch(self) -> None:
        """By the clock: end what hangs on expired keys, and follow changes of the file."""
        while True:
            await asyncio.sleep(_EVERY_SECONDS)
            self.ring.end_dead()
            await self.follow_file()

    async def follow_file(self) -> None:
        """Read the file again if it has changed. One that cannot be read changes nothing: what was good stays good."""
        if self._file is None or (stamp := _stamp(self._file)) == self._read_as:
            return
        self._read_as = stamp
        try:
            found = await asyncio.to_thread(read_keys, self._file)
        except SettingsError as error:
            log.error("the keys stay as they were: %s", error)
            return
        self.ring.set_filed(found)
        log.info("the keys file has changed; it holds %d keys", len(found))


def _stamp(file: Path) -> tuple[int, ...] | None:
    """Changes when the content does, also where a link is moved to another file, as mounted secrets are."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
