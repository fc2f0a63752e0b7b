"""Sessions in the store, and what lists and searches ask of them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator

from openrl.store.records import DEFAULT_PROJECT, Session, SessionFilter, SessionState, SessionSummary
from openrl.types import SessionId


def insert(db: sqlite3.Connection, session: Session, idempotency_key: str | None) -> SessionId:
    """Insert a session; a retry under the same key gives the first one's id back (2.4)."""
    if idempotency_key is not None:
        row = db.execute("SELECT id FROM sessions WHERE idempotency_key = ?", (idempotency_key,)).fetchone()
        if row is not None:
            return SessionId(row["id"])
    db.execute(
        "INSERT INTO sessions (id, state, created_at, last_seen, sdk_version, tags, user_metadata, project_id,"
        " display_name, idempotency_key, owner) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
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
            session.owner,
        ),
    )
    return session.id


def touch(db: sqlite3.Connection, session: SessionId, state: SessionState, last_seen: float) -> None:
    db.execute("UPDATE sessions SET state = ?, last_seen = ? WHERE id = ?", (state, last_seen, session))


def finish(db: sqlite3.Connection, session: SessionId, reason: str, detail: str | None) -> bool:
    """Mark a session finished; the first reason wins (2.6). False if it was finished before."""
    cursor = db.execute(
        "UPDATE sessions SET state = ?, finish_reason = ?, finish_detail = ? WHERE id = ? AND state != ?",
        (SessionState.FINISHED, reason, detail, session, SessionState.FINISHED),
    )
    return cursor.rowcount == 1


def all_sessions(db: sqlite3.Connection) -> list[Session]:
    return [_session(row) for row in db.execute("SELECT * FROM sessions ORDER BY created_at")]


def get(db: sqlite3.Connection, session: SessionId) -> Session | None:
    row = db.execute("SELECT * FROM sessions WHERE id = ?", (session,)).fetchone()
    return None if row is None else _session(row)


def newest_ids(db: sqlite3.Connection, limit: int, offset: int, owner: str | None = None) -> list[SessionId]:
    """A page of sessions, newest first; `owner` narrows to one."""
    where, values = ("1", ()) if owner is None else ("owner = ?", (owner,))
    rows = db.execute(
        f"SELECT id FROM sessions WHERE {where} ORDER BY created_at DESC, id DESC LIMIT ? OFFSET ?",
        (*values, limit, offset),
    )
    return [SessionId(row["id"]) for row in rows]


def set_project(db: sqlite3.Connection, session: SessionId, project: str) -> None:
    db.execute("UPDATE sessions SET project_id = ? WHERE id = ?", (project, session))


def find(db: sqlite3.Connection, wanted: SessionFilter) -> Iterator[Session]:
    """Sessions that match all but the metadata, newest first; lazily, so that a page costs only what it looks at."""
    clauses, values = _where(db, wanted)
    rows = db.execute(f"SELECT * FROM sessions WHERE {clauses} ORDER BY created_at DESC, id DESC", values)
    return (_session(row) for row in rows)


def summary(db: sqlite3.Connection, session: Session) -> SessionSummary:
    row = db.execute(
        "SELECT count(*), coalesce(sum(size_bytes), 0) FROM checkpoints"
        " WHERE NOT ephemeral AND run_id IN (SELECT id FROM runs WHERE session_id = ?)",
        (session.id,),
    ).fetchone()
    return SessionSummary(session, row[0], row[1])


def _where(db: sqlite3.Connection, wanted: SessionFilter) -> tuple[str, list[object]]:
    clauses: list[str] = ["1"]
    values: list[object] = []

    def need(clause: str, *more: object) -> None:
        clauses.append(clause)
        values.extend(more)

    if wanted.session_id is not None or wanted.words:
        names = " AND ".join(["instr(casefold(coalesce(display_name, '')), ?)"] * len(wanted.words)) or "0"
        need(f"(id = ? OR ({names}))", wanted.session_id, *(word.casefold() for word in wanted.words))
    if wanted.projects is not None:
        marks = ", ".join("?" * len(wanted.projects))
        need(f"coalesce(project_id, ?) IN ({marks})", DEFAULT_PROJECT, *wanted.projects)
    if wanted.statuses is not None:
        states = [_status(state, reasons) for state, reasons in wanted.statuses]
        need(f"({' OR '.join(clause for clause, _ in states) or '0'})", *(v for _, vs in states for v in vs))
    if wanted.owners is not None:
        need(f"owner IN ({', '.join('?' * len(wanted.owners))})", *wanted.owners)
    if wanted.before is not None:
        at, identity = wanted.before
        last = get(db, SessionId(identity))  # its time is exact, the cursor's was rounded
        need("(created_at, id) < (?, ?)", at if last is None else last.created_at, identity)
    return " AND ".join(clauses), values


def _status(state: SessionState, reasons: tuple[str, ...]) -> tuple[str, tuple[object, ...]]:
    if not reasons:
        return "state = ?", (state,)
    return f"(state = ? AND finish_reason IN ({', '.join('?' * len(reasons))}))", (state, *reasons)


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
        finish_reason=row["finish_reason"],
        finish_detail=row["finish_detail"],
        owner=row["owner"],
    )
