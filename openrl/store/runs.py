"""Runs in the store, with what recovery needs: the cursor and the newest snapshot."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import asdict, dataclass

from openrl.store.records import DEFAULT_PROJECT, Run, RunState
from openrl.types import RunId, SessionId, TrainSpec, spec_from


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run's row: `next_seq` is the first request that has not ended; the snapshot holds the state after
    `snapshot_seq` (0 and None: the freshly created adapter)."""

    run: Run
    next_seq: int
    snapshot_folder: str | None
    snapshot_seq: int


def insert(db: sqlite3.Connection, run: Run) -> bool:
    """Insert a run; False if it was there."""
    cursor = db.execute(
        "INSERT INTO runs (id, session_id, base_model, spec, state, user_metadata, created_at, last_request_at, reason,"
        " next_seq, snapshot_folder, snapshot_seq, owner) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 0, NULL, 0, ?)"
        " ON CONFLICT (id) DO NOTHING",
        (
            run.id,
            run.session_id,
            run.base_model,
            encode_spec(run.spec),
            run.state,
            json.dumps(dict(run.user_metadata)),
            run.created_at,
            run.last_request_at,
            run.reason,
            run.owner,
        ),
    )
    return cursor.rowcount == 1


def base_models(db: sqlite3.Connection) -> list[str]:
    """Names of the base models of runs that are not over, and of samplers."""
    over = (RunState.BROKEN, RunState.CLOSED)
    rows = db.execute(
        "SELECT base_model FROM runs WHERE state NOT IN (?, ?) UNION SELECT base_model FROM samplers", over
    )
    return [str(row[0]) for row in rows]


def set_state(db: sqlite3.Connection, run: RunId, state: RunState, reason: str = "") -> None:
    db.execute("UPDATE runs SET state = ?, reason = ? WHERE id = ?", (state, reason, run))


def set_spec(db: sqlite3.Connection, run: RunId, spec: TrainSpec) -> None:
    db.execute("UPDATE runs SET spec = ? WHERE id = ?", (encode_spec(spec), run))


def set_cursor(db: sqlite3.Connection, run: RunId, next_seq: int, now: float) -> None:
    db.execute("UPDATE runs SET next_seq = ?, last_request_at = ? WHERE id = ?", (next_seq, now, run))


def set_snapshot(db: sqlite3.Connection, run: RunId, folder: str, seq: int) -> None:
    """Point at a new snapshot and let go of the payloads that it covers."""
    db.execute("UPDATE runs SET snapshot_folder = ?, snapshot_seq = ? WHERE id = ?", (folder, seq, run))
    db.execute(
        "UPDATE requests SET payload = x'' WHERE scope = ? AND seq <= ? AND state != 'queued' AND payload != x''",
        (run, seq),
    )


def close(db: sqlite3.Connection, run: RunId) -> None:
    """A run that is done: nothing of it will be replayed."""
    db.execute("UPDATE runs SET state = ?, snapshot_folder = NULL WHERE id = ?", (RunState.CLOSED, run))
    db.execute("UPDATE requests SET payload = x'' WHERE scope = ? AND state != 'queued' AND payload != x''", (run,))


def all_runs(db: sqlite3.Connection) -> list[StoredRun]:
    return [_stored(row) for row in db.execute("SELECT * FROM runs ORDER BY created_at")]


def get(db: sqlite3.Connection, run: RunId) -> Run | None:
    row = db.execute("SELECT * FROM runs WHERE id = ?", (run,)).fetchone()
    return None if row is None else _run(row)


def ids_of_session(db: sqlite3.Connection, session: SessionId) -> list[RunId]:
    """A session's runs, oldest first."""
    rows = db.execute("SELECT id FROM runs WHERE session_id = ? ORDER BY created_at, id", (session,))
    return [RunId(row["id"]) for row in rows]


_IN_PROJECT = (
    "(? IS NULL OR EXISTS (SELECT 1 FROM sessions WHERE sessions.id = runs.session_id"
    " AND coalesce(sessions.project_id, ?) = ?))"
)


def newest(db: sqlite3.Connection, limit: int, offset: int, project: str | None, owner: str | None = None) -> list[Run]:
    """A page of runs, newest first; `project` keeps those whose session is in it now, `owner` those of one."""
    where, values = _where(project, owner)
    rows = db.execute(
        f"SELECT * FROM runs WHERE {where} ORDER BY created_at DESC, id DESC LIMIT ? OFFSET ?", (*values, limit, offset)
    )
    return [_run(row) for row in rows]


def count(db: sqlite3.Connection, project: str | None, owner: str | None = None) -> int:
    where, values = _where(project, owner)
    return int(db.execute(f"SELECT count(*) FROM runs WHERE {where}", values).fetchone()[0])


def _where(project: str | None, owner: str | None) -> tuple[str, tuple[object, ...]]:
    where, values = _IN_PROJECT, (project, DEFAULT_PROJECT, project)
    return (where, values) if owner is None else (f"owner = ? AND {where}", (owner, *values))


def encode_spec(spec: TrainSpec) -> str:
    return json.dumps(asdict(spec))


def decode_spec(text: str) -> TrainSpec:
    return spec_from(json.loads(text))


def _stored(row: sqlite3.Row) -> StoredRun:
    return StoredRun(_run(row), row["next_seq"], row["snapshot_folder"], row["snapshot_seq"])


def _run(row: sqlite3.Row) -> Run:
    return Run(
        id=RunId(row["id"]),
        session_id=SessionId(row["session_id"]),
        base_model=row["base_model"],
        spec=decode_spec(row["spec"]),
        state=RunState(row["state"]),
        user_metadata=json.loads(row["user_metadata"]),
        created_at=row["created_at"],
        last_request_at=row["last_request_at"],
        reason=row["reason"],
        owner=row["owner"],
    )
