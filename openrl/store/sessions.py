"""Sessions in the store."""

from __future__ import annotations

import json
import sqlite3

from openrl.store.records import Session, SessionState
from openrl.types import SessionId


def insert(db: sqlite3.Connection, session: Session, idempotency_key: str | None) -> SessionId:
    """Insert a session; a retry under the same key gives the first one's id back (2.4)."""
    if idempotency_key is not None:
        row = db.execute("SELECT id FROM sessions WHERE idempotency_key = ?", (idempotency_key,)).fetchone()
        if row is not None:
            return SessionId(row["id"])
    db.execute(
        "INSERT INTO sessions (id, state, created_at, last_seen, sdk_version, tags, user_metadata, project_id,"
        " display_name, idempotency_key) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            session.id,
            session.state,
            session.created_at,
            session.last_seen,
            session.sdk_version,
            json.dumps(session.tags),
            json.dumps(dict(session.user_metadata)),
            session.project_id,
            session.display_name,
            idempotency_key,
        ),
    )
    return session.id


def touch(db: sqlite3.Connection, session: SessionId, state: SessionState, last_seen: float) -> None:
    db.execute("UPDATE sessions SET state = ?, last_seen = ? WHERE id = ?", (state, last_seen, session))


def finish(db: sqlite3.Connection, session: SessionId, reason: str, detail: str | None) -> None:
    """Mark a session finished; the first reason wins (2.6)."""
    db.execute(
        "UPDATE sessions SET state = ?, finish_reason = ?, finish_detail = ? WHERE id = ? AND state != ?",
        (SessionState.FINISHED, reason, detail, session, SessionState.FINISHED),
    )


def all_sessions(db: sqlite3.Connection) -> list[Session]:
    return [_session(row) for row in db.execute("SELECT * FROM sessions ORDER BY created_at")]


def _session(row: sqlite3.Row) -> Session:
    return Session(
        id=SessionId(row["id"]),
        state=SessionState(row["state"]),
        created_at=row["created_at"],
        last_seen=row["last_seen"],
        sdk_version=row["sdk_version"],
        tags=tuple(json.loads(row["tags"])),
        user_metadata=json.loads(row["user_metadata"]),
        project_id=row["project_id"],
        display_name=row["display_name"],
    )
