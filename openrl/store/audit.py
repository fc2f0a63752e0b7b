"""The audit log: who did what to which session, run and checkpoint. Written in the transaction that does it."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Mapping
from typing import Any

from openrl.store.records import AuditEntry
from openrl.types import RunId, SessionId


def write(
    db: sqlite3.Connection,
    event: str,
    *,
    session: SessionId | None = None,
    run: RunId | None = None,
    path: str | None = None,
    purpose: str | None = None,
    **details: Any,
) -> None:
    """Add an entry. `event` is `<resource>_<action>`, such as `checkpoint_delete`; `path` is a `tinker://` path;
    `purpose` says what a checkpoint was read for; None among the details is left out."""
    known = {name: value for name, value in details.items() if value is not None}
    db.execute(
        "INSERT INTO audit (at, event, session_id, run_id, path, purpose, details) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (time.time(), event, session, run, path, purpose, json.dumps(known)),
    )


def between(db: sqlite3.Connection, start: float, end: float, resource: str | None) -> list[AuditEntry]:
    """Entries with start <= time < end, oldest first; `resource` keeps those whose event begins with it."""
    rows = db.execute(
        "SELECT * FROM audit WHERE at >= ? AND at < ? AND (? IS NULL OR substr(event, 1, length(?)) = ?)"
        " ORDER BY at, id",
        (start, end, resource, prefix := f"{resource}_", prefix),
    )
    return [_entry(row) for row in rows]


def _entry(row: sqlite3.Row) -> AuditEntry:
    details: Mapping[str, Any] = json.loads(row["details"])
    return AuditEntry(
        at=row["at"],
        event=row["event"],
        session_id=row["session_id"],
        run_id=row["run_id"],
        path=row["path"],
        purpose=row["purpose"],
        details=details,
    )
