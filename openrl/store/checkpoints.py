"""Checkpoints in the store: an index over the folders on disk, which are the truth."""

from __future__ import annotations

import json
import sqlite3

from openrl.store.records import Checkpoint
from openrl.store.runs import decode_spec, encode_spec
from openrl.types import CheckpointKind, RunId


def put(db: sqlite3.Connection, checkpoint: Checkpoint) -> None:
    """Insert a checkpoint, or point its name at a new folder."""
    db.execute(
        "INSERT OR REPLACE INTO checkpoints (path, run_id, kind, name, folder, base_model, spec, size_bytes,"
        " created_at, expires_at, user_metadata, ephemeral) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
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
        ),
    )


def get(db: sqlite3.Connection, path: str) -> Checkpoint | None:
    row = db.execute("SELECT * FROM checkpoints WHERE path = ?", (path,)).fetchone()
    return None if row is None else _checkpoint(row)


def all_checkpoints(db: sqlite3.Connection) -> list[Checkpoint]:
    return [_checkpoint(row) for row in db.execute("SELECT * FROM checkpoints ORDER BY created_at")]


def ephemeral(db: sqlite3.Connection, run: RunId) -> list[Checkpoint]:
    """A run's unnamed sampler checkpoints."""
    rows = db.execute("SELECT * FROM checkpoints WHERE run_id = ? AND ephemeral", (run,))
    return [_checkpoint(row) for row in rows]


def delete(db: sqlite3.Connection, path: str) -> None:
    db.execute("DELETE FROM checkpoints WHERE path = ?", (path,))


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
    )
