"""Whether the store can still write: a full or read-only disk shows at a commit and nowhere else."""

from __future__ import annotations

import sqlite3


def touch(db: sqlite3.Connection) -> None:
    """Write the schema's number once more, which is a page of the log and changes nothing."""
    version: int = db.execute("PRAGMA user_version").fetchone()[0]
    db.execute(f"PRAGMA user_version = {version}")
