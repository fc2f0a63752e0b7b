"""The schema as a numbered list of functions, each applied once."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable


def m001_initial(db: sqlite3.Connection) -> None:
    """Sessions, runs, samplers, requests, checkpoints."""
    for statement in _INITIAL:
        db.execute(statement)


def m002_metering(db: sqlite3.Connection) -> None:
    """When requests reached their worker; usage by the hour; how long which bytes were stored; the audit log; indices
    for lists that are read newest first."""
    for statement in _METERING:
        db.execute(statement)


def m003_checkpoint_life(db: sqlite3.Connection) -> None:
    """Published checkpoints; what was deleted; folders that still have to go; what runs loaded."""
    for statement in _CHECKPOINT_LIFE:
        db.execute(statement)


def m004_custom_losses(db: sqlite3.Connection) -> None:
    """Losses that clients made, for requests and replays that name them."""
    for statement in _CUSTOM_LOSSES:
        db.execute(statement)


def m005_completions(db: sqlite3.Connection) -> None:
    """The order in which a sampler's requests ended, and the numbers of its clones."""
    for statement in _COMPLETIONS:
        db.execute(statement)


def m006_owners(db: sqlite3.Connection) -> None:
    """API keys, and to whom things belong; what was there before belongs to the machine's owner."""
    for statement in _OWNERS:
        db.execute(statement)


MIGRATIONS: list[Callable[[sqlite3.Connection], None]] = [
    m001_initial,
    m002_metering,
    m003_checkpoint_life,
    m004_custom_losses,
    m005_completions,
    m006_owners,
]


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

_NOW = "((julianday('now') - 2440587.5) * 86400.0)"

_METERING = (
    "ALTER TABLE requests ADD COLUMN dispatched_at REAL",
    """CREATE TABLE usage (
        hour INTEGER NOT NULL, session_id TEXT NOT NULL, base_model TEXT NOT NULL, kind TEXT NOT NULL,
        amount REAL NOT NULL, PRIMARY KEY (hour, session_id, base_model, kind)
    ) STRICT, WITHOUT ROWID""",
    # Kept by triggers, so that no way of writing a checkpoint can forget it. A span without end is stored still.
    """CREATE TABLE storage (
        id INTEGER PRIMARY KEY, path TEXT NOT NULL, run_id TEXT NOT NULL, base_model TEXT NOT NULL,
        size_bytes INTEGER NOT NULL, from_at REAL NOT NULL, to_at REAL
    ) STRICT""",
    "CREATE INDEX storage_by_path ON storage (path, to_at)",
    "CREATE INDEX storage_by_end ON storage (to_at)",
    # An overwritten name (INSERT OR REPLACE) fires no delete trigger: the insert ends the old span as well.
    f"""CREATE TRIGGER checkpoint_stored AFTER INSERT ON checkpoints BEGIN
        UPDATE storage SET to_at = {_NOW} WHERE path = NEW.path AND to_at IS NULL;
        INSERT INTO storage (path, run_id, base_model, size_bytes, from_at)
        VALUES (NEW.path, NEW.run_id, NEW.base_model, NEW.size_bytes, max(
            NEW.created_at, coalesce((SELECT max(to_at) FROM storage WHERE path = NEW.path), 0)));
    END""",
    f"""CREATE TRIGGER checkpoint_removed AFTER DELETE ON checkpoints BEGIN
        UPDATE storage SET to_at = {_NOW} WHERE path = OLD.path AND to_at IS NULL;
    END""",
    "INSERT INTO storage (path, run_id, base_model, size_bytes, from_at)"
    " SELECT path, run_id, base_model, size_bytes, created_at FROM checkpoints",
    """CREATE TABLE audit (
        id INTEGER PRIMARY KEY, at REAL NOT NULL, event TEXT NOT NULL, session_id TEXT, run_id TEXT, path TEXT,
        purpose TEXT, details TEXT NOT NULL
    ) STRICT""",
    "CREATE INDEX audit_by_time ON audit (at)",
    "CREATE INDEX sessions_newest ON sessions (created_at DESC, id DESC)",
    "CREATE INDEX runs_newest ON runs (created_at DESC, id DESC)",
    "CREATE INDEX runs_by_session ON runs (session_id, created_at)",
    "CREATE INDEX samplers_by_session ON samplers (session_id, created_at)",
    "CREATE INDEX checkpoints_newest_of_run ON checkpoints (run_id, kind, created_at)",
)

_CHECKPOINT_LIFE = (
    "ALTER TABLE checkpoints ADD COLUMN public INTEGER NOT NULL DEFAULT 0",
    "CREATE INDEX checkpoints_newest ON checkpoints (created_at DESC, path)",
    "CREATE INDEX checkpoints_expiring ON checkpoints (expires_at) WHERE expires_at IS NOT NULL",
    # So that a delete whose first answer got lost is not told "unknown" when it is sent again (7.8).
    "CREATE TABLE deleted_checkpoints (path TEXT PRIMARY KEY, deleted_at REAL NOT NULL) STRICT",
    # Folders that no checkpoint names any more. Their files go once no sampler and no replay needs them.
    "CREATE TABLE retired_folders (folder TEXT PRIMARY KEY, retired_at REAL NOT NULL) STRICT",
    # The folder that a load took its weights from, so that its replay takes the same, whatever the name means by then.
    "CREATE TABLE loaded_folders (request_id TEXT PRIMARY KEY, folder TEXT NOT NULL) STRICT",
)

_CUSTOM_LOSSES = (
    """CREATE TABLE custom_losses (
        id TEXT PRIMARY KEY, session_id TEXT NOT NULL REFERENCES sessions(id), body BLOB NOT NULL,
        created_at REAL NOT NULL
    ) STRICT""",
)

_COMPLETIONS = (
    # Counters that outlive the rows they number: results expire, and a number must never come twice (T23, T41).
    "ALTER TABLE samplers ADD COLUMN clones INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE samplers ADD COLUMN completions INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE requests ADD COLUMN completion INTEGER",
    "CREATE INDEX requests_completed ON requests (scope, seq / 1000000000, completion) WHERE completion IS NOT NULL",
    # Kept by a trigger, so that no way of ending a sample can forget it.
    """CREATE TRIGGER sample_ended AFTER UPDATE OF state ON requests
    WHEN NEW.op = 'sample' AND OLD.state = 'queued' AND NEW.state <> 'queued' BEGIN
        UPDATE samplers SET completions = completions + 1 WHERE id = NEW.scope;
        UPDATE requests SET completion = (SELECT completions FROM samplers WHERE id = NEW.scope) WHERE id = NEW.id;
    END""",
)

_LOCAL = "TEXT NOT NULL DEFAULT 'local'"

_OWNERS = (
    f"ALTER TABLE sessions ADD COLUMN owner {_LOCAL}",
    f"ALTER TABLE runs ADD COLUMN owner {_LOCAL}",
    f"ALTER TABLE checkpoints ADD COLUMN owner {_LOCAL}",
    f"ALTER TABLE storage ADD COLUMN owner {_LOCAL}",
    f"ALTER TABLE audit ADD COLUMN owner {_LOCAL}",
    "CREATE INDEX sessions_of_owner ON sessions (owner, created_at DESC, id DESC)",
    "CREATE INDEX runs_of_owner ON runs (owner, created_at DESC, id DESC)",
    "CREATE INDEX checkpoints_of_owner ON checkpoints (owner, created_at DESC, path)",
    "DROP TRIGGER checkpoint_stored",
    f"""CREATE TRIGGER checkpoint_stored AFTER INSERT ON checkpoints BEGIN
        UPDATE storage SET to_at = {_NOW} WHERE path = NEW.path AND to_at IS NULL;
        INSERT INTO storage (path, run_id, base_model, size_bytes, owner, from_at)
        VALUES (NEW.path, NEW.run_id, NEW.base_model, NEW.size_bytes, NEW.owner, max(
            NEW.created_at, coalesce((SELECT max(to_at) FROM storage WHERE path = NEW.path), 0)));
    END""",
    # Of a key only its hash is kept. Scopes are separated by spaces.
    """CREATE TABLE keys (
        digest TEXT PRIMARY KEY, owner TEXT NOT NULL, scopes TEXT NOT NULL, note TEXT NOT NULL,
        created_at REAL NOT NULL, expires_at REAL, revoked_at REAL,
        max_runs INTEGER, max_tokens_per_day INTEGER, max_checkpoint_bytes INTEGER
    ) STRICT""",
)
