"""The schema as a numbered list of functions, each applied once."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable


def m001_initial(db: sqlite3.Connection) -> None:
    """Sessions, runs, samplers, requests, checkpoints."""
    for statement in _INITIAL:
        db.execute(statement)


MIGRATIONS: list[Callable[[sqlite3.Connection], None]] = [m001_initial]


def migrate(db: sqlite3.Connection) -> None:
    """Bring a database to the newest schema. Raises RuntimeError if it was written by a newer OpenRL."""
    version: int = db.execute("PRAGMA user_version").fetchone()[0]
    if version > len(MIGRATIONS):
        raise RuntimeError(
            f"the data folder was written by a newer OpenRL (schema {version}, this one knows {len(MIGRATIONS)}); "
            "upgrade OpenRL or choose another --data-dir"
        )
    for number, migration in enumerate(MIGRATIONS[version:], version + 1):
        db.execute("BEGIN IMMEDIATE")
        migration(db)
        db.execute(f"PRAGMA user_version = {number}")
        db.execute("COMMIT")


_INITIAL = (
    """CREATE TABLE sessions (
        id TEXT PRIMARY KEY, state TEXT NOT NULL, created_at REAL NOT NULL, last_seen REAL NOT NULL,
        sdk_version TEXT NOT NULL, tags TEXT NOT NULL, user_metadata TEXT NOT NULL,
        project_id TEXT, display_name TEXT, idempotency_key TEXT UNIQUE, finish_reason TEXT, finish_detail TEXT
    ) STRICT""",
    """CREATE TABLE runs (
        id TEXT PRIMARY KEY, session_id TEXT NOT NULL REFERENCES sessions(id), base_model TEXT NOT NULL,
        spec TEXT NOT NULL, state TEXT NOT NULL, user_metadata TEXT NOT NULL, created_at REAL NOT NULL,
        last_request_at REAL NOT NULL, reason TEXT NOT NULL,
        next_seq INTEGER NOT NULL, snapshot_folder TEXT, snapshot_seq INTEGER NOT NULL
    ) STRICT""",
    """CREATE TABLE samplers (
        id TEXT PRIMARY KEY, session_id TEXT NOT NULL REFERENCES sessions(id), base_model TEXT NOT NULL,
        model_path TEXT, folder TEXT, created_at REAL NOT NULL
    ) STRICT""",
    # `payload` stays while the request is queued, and after that while a crash would need it to be replayed: until a
    # snapshot of its run covers it. An empty payload therefore means "nothing to run or to replay".
    """CREATE TABLE requests (
        id TEXT PRIMARY KEY, scope TEXT NOT NULL, seq INTEGER NOT NULL, op TEXT NOT NULL, state TEXT NOT NULL,
        content_type TEXT NOT NULL, payload BLOB NOT NULL, result_type TEXT, result BLOB, error TEXT, category TEXT,
        accepted_at REAL NOT NULL, started_at REAL, done_at REAL
    ) STRICT""",
    "CREATE INDEX requests_by_scope ON requests (scope, seq)",
    "CREATE INDEX requests_queued ON requests (state) WHERE state = 'queued'",
    "CREATE INDEX requests_done ON requests (done_at) WHERE done_at IS NOT NULL",
    """CREATE TABLE checkpoints (
        path TEXT PRIMARY KEY, run_id TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, folder TEXT NOT NULL,
        base_model TEXT NOT NULL, spec TEXT NOT NULL, size_bytes INTEGER NOT NULL, created_at REAL NOT NULL,
        expires_at REAL, user_metadata TEXT NOT NULL, ephemeral INTEGER NOT NULL
    ) STRICT""",
    "CREATE INDEX checkpoints_by_run ON checkpoints (run_id, created_at)",
)
