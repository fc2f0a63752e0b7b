"""Accepted requests in the store: from acceptance to expiry."""

from __future__ import annotations

import sqlite3

from openrl.store.records import RequestState, RequestTimes, StoredRequest
from openrl.types import Op, RequestId, SessionId


def insert(db: sqlite3.Connection, request: StoredRequest) -> bool:
    """Insert a request; False if its id (made from scope and seq) was accepted before (4.7)."""
    cursor = db.execute(
        "INSERT INTO requests (id, scope, seq, op, state, content_type, payload, error, category, accepted_at, done_at)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING",
        (
            request.id,
            request.scope,
            request.seq,
            request.op,
            request.state,
            request.content_type,
            request.payload,
            request.error,
            request.category,
            request.accepted_at,
            request.done_at,
        ),
    )
    return cursor.rowcount == 1


def finish(
    db: sqlite3.Connection,
    request: RequestId,
    *,
    result_type: str,
    result: bytes,
    dispatched_at: float,
    started_at: float,
    done_at: float,
    keep_payload: bool,
) -> None:
    """Store a result. `keep_payload`: the request changed its run, so a crash before the next snapshot replays it."""
    db.execute(
        "UPDATE requests SET state = ?, result_type = ?, result = ?, dispatched_at = ?, started_at = ?, done_at = ?,"
        " payload = CASE WHEN ? THEN payload ELSE x'' END WHERE id = ?",
        (RequestState.DONE, result_type, result, dispatched_at, started_at, done_at, keep_payload, request),
    )


def fail(
    db: sqlite3.Connection,
    request: RequestId,
    *,
    error: str,
    category: str,
    dispatched_at: float | None,
    started_at: float | None,
    done_at: float,
    keep_payload: bool,
) -> None:
    """Store a failure; it may come before the request reached a worker."""
    db.execute(
        "UPDATE requests SET state = ?, error = ?, category = ?, dispatched_at = ?, started_at = ?, done_at = ?,"
        " payload = CASE WHEN ? THEN payload ELSE x'' END WHERE id = ?",
        (RequestState.FAILED, error, category, dispatched_at, started_at, done_at, keep_payload, request),
    )


def get(db: sqlite3.Connection, request: RequestId) -> StoredRequest | None:
    row = db.execute("SELECT * FROM requests WHERE id = ?", (request,)).fetchone()
    return None if row is None else _request(row)


def queued(db: sqlite3.Connection) -> list[StoredRequest]:
    """All requests that have not ended, in the order in which they were accepted."""
    return [
        _request(row) for row in db.execute("SELECT * FROM requests WHERE state = 'queued' ORDER BY accepted_at, seq")
    ]


def ended_seqs(db: sqlite3.Connection, scope: str, from_seq: int) -> list[int]:
    """Numbers at or after `from_seq` that ended already, such as one refused while an earlier one was missing."""
    rows = db.execute(
        "SELECT seq FROM requests WHERE scope = ? AND seq >= ? AND state != 'queued' ORDER BY seq", (scope, from_seq)
    )
    return [row["seq"] for row in rows]


def journal(db: sqlite3.Connection, scope: str, after_seq: int) -> list[StoredRequest]:
    """What a run did after its snapshot, in order: ended requests whose payload was kept."""
    rows = db.execute(
        "SELECT * FROM requests WHERE scope = ? AND seq > ? AND state != 'queued' AND payload != x'' ORDER BY seq",
        (scope, after_seq),
    )
    return [_request(row) for row in rows]


def journal_bytes(db: sqlite3.Connection, scope: str) -> int:
    row = db.execute(
        "SELECT coalesce(sum(length(payload)), 0) FROM requests WHERE scope = ? AND state != 'queued'", (scope,)
    ).fetchone()
    return int(row[0])


def expire(db: sqlite3.Connection, before: float) -> int:
    """Delete requests that ended before `before`; those still needed for a replay lose only their result."""
    db.execute(
        "UPDATE requests SET result = NULL, result_type = NULL"
        " WHERE done_at < ? AND payload != x'' AND result IS NOT NULL",
        (before,),
    )
    return db.execute("DELETE FROM requests WHERE done_at < ? AND payload = x''", (before,)).rowcount


def times(db: sqlite3.Connection, session: SessionId) -> list[RequestTimes]:
    """All requests of a session, of its runs and of its samplers that the store still has, in order of acceptance."""
    rows = db.execute(
        "SELECT id, scope, seq, op, state, error, accepted_at, dispatched_at, started_at, done_at FROM requests"
        " WHERE scope = ? OR (scope > ? AND scope < ?) ORDER BY accepted_at, seq",
        (session, f"{session}:", f"{session};"),  # ';' follows ':'
    )
    return [
        RequestTimes(
            id=RequestId(row["id"]),
            scope=row["scope"],
            seq=row["seq"],
            op=Op(row["op"]),
            state=RequestState(row["state"]),
            error=row["error"],
            accepted_at=row["accepted_at"],
            dispatched_at=row["dispatched_at"],
            started_at=row["started_at"],
            done_at=row["done_at"],
        )
        for row in rows
    ]


def _request(row: sqlite3.Row) -> StoredRequest:
    return StoredRequest(
        id=RequestId(row["id"]),
        scope=row["scope"],
        seq=row["seq"],
        op=Op(row["op"]),
        state=RequestState(row["state"]),
        content_type=row["content_type"],
        payload=row["payload"],
        result_type=row["result_type"],
        result=row["result"],
        error=row["error"],
        category=row["category"],
        accepted_at=row["accepted_at"],
        done_at=row["done_at"],
        dispatched_at=row["dispatched_at"],
        started_at=row["started_at"],
    )
