"""The checkpoints of a data folder, with a server running on it or without.

Looking needs no one's leave: SQLite lets us read beside a server. Changing is the owner's right. While a server runs it
is the owner, and we ask it over REST; else we own the folder for as long as the command takes.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from openrl import apikey
from openrl.checkpoints.commit import CheckpointFolders
from openrl.checkpoints.layout import parse
from openrl.errors import NotFound
from openrl.instance import InUse, owning
from openrl.settings import Resolved
from openrl.store import adoption, audit, checkpoints, retired
from openrl.store.checkpoints import Filter
from openrl.store.reading import Connection, changing, reading, transaction
from openrl.store.records import Checkpoint
from openrl.types import SessionId
from openrl_cli.reach import Server


class Shelf(ABC):
    """What commands do with checkpoints."""

    def __init__(self, db: Connection, data_dir: Path) -> None:
        self._db = db
        self.folders = CheckpointFolders(data_dir / "checkpoints")

    def all(self) -> list[Checkpoint]:
        """Newest first; without ephemeral and expired ones."""
        return checkpoints.newest(self._db, Filter(time.time()))

    def find(self, path: str) -> Checkpoint:
        """Raises BadRequest for a malformed path, NotFound."""
        found = checkpoints.get(self._db, str(parse(path)))
        if found is None or (found.expires_at is not None and found.expires_at <= time.time()):
            raise NotFound(f"checkpoint {path} does not exist here.", "See: openrl checkpoints list")
        return found

    @abstractmethod
    def delete(self, checkpoint: Checkpoint) -> None:
        """Forget a checkpoint. Its bytes stay while a sampler or a run needs them, until a server sees them unused."""

    @abstractmethod
    def adopt(self, checkpoint: Checkpoint) -> None:
        """Take in a folder that lies in place."""


class OwnShelf(Shelf):
    """No server runs: we own the folder."""

    def delete(self, checkpoint: Checkpoint) -> None:
        with transaction(self._db):
            retired.bury(self._db, checkpoint, time.time())
            audit.write(self._db, "checkpoint_delete", run=checkpoint.run_id, path=checkpoint.path)
        if retired.is_needed(self._db, checkpoint.folder):
            self.folders.withdraw(checkpoint.folder)
            return
        self.folders.remove(checkpoint.folder)
        retired.forget(self._db, checkpoint.folder)

    def adopt(self, checkpoint: Checkpoint) -> None:
        session = adoption.finished_session(
            SessionId(checkpoint.run_id.partition(":")[0]), "import", f"import of {checkpoint.name}"
        )
        with transaction(self._db):
            adoption.insert(self._db, session, adoption.holding_run(checkpoint, session.id, "import"), checkpoint)
            audit.write(self._db, "checkpoint_import", session=session.id, run=checkpoint.run_id, path=checkpoint.path)


class ServedShelf(Shelf):
    """A server runs at `url`: it makes the changes."""

    def __init__(self, db: Connection, data_dir: Path, server: Server) -> None:
        super().__init__(db, data_dir)
        self._server = server

    def delete(self, checkpoint: Checkpoint) -> None:
        address = f"{checkpoint.run_id}/checkpoints/{checkpoint.kind}/{checkpoint.name}"
        self._server.call("DELETE", f"training_runs/{address}")

    def adopt(self, checkpoint: Checkpoint) -> None:
        self._server.call("POST", "checkpoints/adopt", {"folder": checkpoint.folder})


@contextmanager
def open_shelf(resolved: Resolved) -> Generator[Shelf]:
    """The shelf of a data folder. Raises InUse while another command has it, or a server is just starting."""
    data_dir = resolved.settings.data_dir
    try:
        with owning(data_dir), changing(data_dir) as db:
            yield OwnShelf(db, data_dir)
    except InUse as used:
        if not used.url:
            raise
        key = resolved.api_key or apikey.api_key(data_dir)
        with reading(data_dir) as db:
            yield ServedShelf(db, data_dir, Server(used.url, key, data_dir=data_dir))
