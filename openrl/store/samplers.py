"""Samplers in the store."""

from __future__ import annotations

import sqlite3

from openrl.store.records import Sampler
from openrl.types import SamplerId, SessionId


def insert(db: sqlite3.Connection, sampler: Sampler) -> bool:
    """Insert a sampler; False if it was there."""
    cursor = db.execute(
        "INSERT INTO samplers (id, session_id, base_model, model_path, folder, created_at) VALUES (?, ?, ?, ?, ?, ?)"
        " ON CONFLICT (id) DO NOTHING",
        (sampler.id, sampler.session_id, sampler.base_model, sampler.model_path, sampler.folder, sampler.created_at),
    )
    return cursor.rowcount == 1


def all_samplers(db: sqlite3.Connection) -> list[Sampler]:
    return [_sampler(row) for row in db.execute("SELECT * FROM samplers ORDER BY created_at")]


def ids_of_session(db: sqlite3.Connection, session: SessionId) -> list[SamplerId]:
    """A session's samplers, oldest first."""
    rows = db.execute("SELECT id FROM samplers WHERE session_id = ? ORDER BY created_at, id", (session,))
    return [SamplerId(row["id"]) for row in rows]


def _sampler(row: sqlite3.Row) -> Sampler:
    return Sampler(
        id=SamplerId(row["id"]),
        session_id=SessionId(row["session_id"]),
        base_model=row["base_model"],
        model_path=row["model_path"],
        folder=row["folder"],
        created_at=row["created_at"],
    )
