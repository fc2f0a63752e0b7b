"""Checkpoints in the store: an index over the folders on disk, which are the truth."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection
from dataclasses import dataclass

from openrl.store.records import Checkpoint
from openrl.store.runs import decode_spec, encode_spec
from openrl.types import CheckpointKind, RunId


@dataclass(frozen=True, slots=True)
class Filter:
    """Which checkpoints a list shows at the time `now`: none that has expired and none that is ephemeral."""

    now: float
    run: RunId | None = None
    hidden: Collection[CheckpointKind] = ()
    owner: str | None = None


def put(db: sqlite3.Connection, checkpoint: Checkpoint) -> None:
    """Insert a checkpoint, or point its name at a new folder."""
    db.execute(
        "INSERT OR REPLACE INTO checkpoints (path, run_id, kind, name, folder, base_model, spec, size_bytes,"
        " created_at, expires_at, user_metadata, ephemeral, public, owner)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            checkpoint.path,
            checkpoint.run_id,
            checkpoint.kind,
            checkpoint.name,
            checkpoint.folder,
            checkpoint.base_model,
            encode_spec(checkpoint.spec),
            checkpoint.size_bytes,
            checkpoint.created_at,
            checkpoint.expires_at,
            json.dumps(dict(checkpoint.user_metadata)),
            checkpoint.ephemeral,
            checkpoint.public,
            checkpoint.owner,
        ),
    )


def get(db: sqlite3.Connection, path: str) -> Checkpoint | None:
    row = db.execute("SELECT * FROM checkpoints WHERE path = ?", (path,)).fetchone()
    return None if row is None else _checkpoint(row)


def all_checkpoints(db: sqlite3.Connection) -> list[Checkpoint]:
    return [_checkpoint(row) for row in db.execute("SELECT * FROM checkpoints ORDER BY created_at")]


def newest(db: sqlite3.Connection, wanted: Filter, limit: int = -1, offset: int = 0) -> list[Checkpoint]:
    """A page of checkpoints, newest first; a limit of -1 is none."""
    where, values = _where(wanted)
    rows = db.execute(
        f"SELECT * FROM checkpoints WHERE {where} ORDER BY created_at DESC, path LIMIT ? OFFSET ?",
        (*values, limit, offset),
    )
    return [_checkpoint(row) for row in rows]


def count(db: sqlite3.Connection, wanted: Filter) -> int:
    where, values = _where(wanted)
    return int(db.execute(f"SELECT count(*) FROM checkpoints WHERE {where}", values).fetchone()[0])


def expired(db: sqlite3.Connection, now: float) -> list[Checkpoint]:
    return [_checkpoint(row) for row in db.execute("SELECT * FROM checkpoints WHERE expires_at <= ?", (now,))]


def ephemeral(db: sqlite3.Connection, run: RunId) -> list[Checkpoint]:
    """A run's unnamed sampler checkpoints."""
    rows = db.execute("SELECT * FROM checkpoints WHERE run_id = ? AND ephemeral", (run,))
    return [_checkpoint(row) for row in rows]


def set_expiry(db: sqlite3.Connection, path: str, expires_at: float | None) -> None:
    db.execute("UPDATE checkpoints SET expires_at = ? WHERE path = ?", (expires_at, path))


def set_public(db: sqlite3.Connection, path: str, public: bool) -> None:
    db.execute("UPDATE checkpoints SET public = ? WHERE path = ?", (public, path))


def last_of_kind(db: sqlite3.Connection, run: RunId, kind: CheckpointKind, now: float) -> Checkpoint | None:
    """A run's newest checkpoint of a kind, of those that have a name and have not expired."""
    row = db.execute(
        "SELECT * FROM checkpoints WHERE run_id = ? AND kind = ? AND NOT ephemeral"
        " AND (expires_at IS NULL OR expires_at > ?) ORDER BY created_at DESC LIMIT 1",
        (run, kind, now),
    ).fetchone()
    return None if row is None else _checkpoint(row)


def delete(db: sqlite3.Connection, path: str) -> None:
    db.execute("DELETE FROM checkpoints WHERE path = ?", (path,))


def _where(wanted: Filter) -> tuple[str, tuple[object, ...]]:
    marks = ", ".join("?" * len(wanted.hidden))
    where = f"NOT ephemeral AND (expires_at IS NULL OR expires_at > ?) AND kind NOT IN ({marks})"
    values = (wanted.now, *wanted.hidden)
    if wanted.run is not None:
        where, values = f"{where} AND run_id = ?", (*values, wanted.run)
    if wanted.owner is not None:
        where, values = f"{where} AND owner = ?", (*values, wanted.owner)
    return where, values


def bytes_of(db: sqlite3.Connection, owner: str) -> int:
    """What an owner's checkpoints take, those that only samplers use included."""
    row = db.execute("SELECT coalesce(sum(size_bytes), 0) FROM checkpoints WHERE owner = ?", (owner,)).fetchone()
    return int(row[0])


def _checkpoint(row: sqlite3.Row) -> Checkpoint:
    return Checkpoint(
        path=row["path"],
        run_id=RunId(row["run_id"]),
        kind=CheckpointKind(row["kind"]),
        name=row["name"],
        folder=row["folder"],
        base_model=row["base_model"],
        spec=decode_spec(row["spec"]),
        size_bytes=row["size_bytes"],
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        user_metadata=json.loads(row["user_metadata"]),
        ephemeral=bool(row["ephemeral"]),
        public=bool(row["public"]),
        owner=row["owner"],
    )
