"""Checkpoints on their way out: deleted paths, folders whose files still have to go, and who may yet read them."""

from __future__ import annotations

import sqlite3

from openrl.store import checkpoints
from openrl.store.records import Checkpoint, SessionState
from openrl.types import RequestId


def retire(db: sqlite3.Connection, folder: str, now: float) -> None:
    """No checkpoint names the folder from now on."""
    db.execute("INSERT OR IGNORE INTO retired_folders (folder, retired_at) VALUES (?, ?)", (folder, now))


def bury(db: sqlite3.Connection, checkpoint: Checkpoint, now: float) -> None:
    """Forget a checkpoint, but remember that there was one, and retire its folder."""
    checkpoints.delete(db, checkpoint.path)
    db.execute("INSERT OR REPLACE INTO deleted_checkpoints (path, deleted_at) VALUES (?, ?)", (checkpoint.path, now))
    retire(db, checkpoint.folder, now)


def was_deleted(db: sqlite3.Connection, path: str) -> bool:
    return db.execute("SELECT 1 FROM deleted_checkpoints WHERE path = ?", (path,)).fetchone() is not None


def folders(db: sqlite3.Connection) -> list[str]:
    """Retired folders whose files are still there."""
    return [row["folder"] for row in db.execute("SELECT folder FROM retired_folders ORDER BY retired_at")]


def forget(db: sqlite3.Connection, folder: str) -> None:
    """The files of a retired folder are gone."""
    db.execute("DELETE FROM retired_folders WHERE folder = ?", (folder,))


def note_load(db: sqlite3.Connection, request: RequestId, folder: str) -> None:
    """A load took its weights from `folder`."""
    db.execute("INSERT OR REPLACE INTO loaded_folders (request_id, folder) VALUES (?, ?)", (request, folder))


def loaded_from(db: sqlite3.Connection, request: RequestId) -> str | None:
    row = db.execute("SELECT folder FROM loaded_folders WHERE request_id = ?", (request,)).fetchone()
    return None if row is None else row["folder"]


def is_needed(db: sqlite3.Connection, folder: str) -> bool:
    """Whether a folder's files are still wanted: by a sampler whose session is active or that has samples waiting, or
    by a run that would load from it again if it had to be brought back."""
    drawn = db.execute(
        "SELECT 1 FROM samplers JOIN sessions ON sessions.id = session_id WHERE folder = ? AND (sessions.state = ?"
        " OR EXISTS (SELECT 1 FROM requests WHERE scope = samplers.id AND requests.state = 'queued'))",
        (folder, SessionState.ACTIVE),
    )
    loaded = db.execute(
        "SELECT 1 FROM loaded_folders JOIN requests ON requests.id = request_id WHERE folder = ? AND payload != x''",
        (folder,),
    )
    return drawn.fetchone() is not None or loaded.fetchone() is not None


def tidy(db: sqlite3.Connection, before: float) -> None:
    """Drop loads that no replay will repeat, and memories of what was deleted before `before`."""
    db.execute("DELETE FROM deleted_checkpoints WHERE deleted_at < ?", (before,))
    db.execute(
        "DELETE FROM loaded_folders WHERE NOT EXISTS"
        " (SELECT 1 FROM requests WHERE requests.id = request_id AND payload != x'')"
    )
