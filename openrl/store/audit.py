"""The audit log: who did what to which session, run and checkpoint. Written in the transaction that does it."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Mapping
from typing import Any

from openrl.keys.principal import LOCAL_OWNER
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
    """Add an entry, which belongs to the owner of the session or run, else of the checkpoint, that it happened to.

    `event` is `<resource>_<action>`, such as `checkpoint_delete`; `path` is a `tinker://` path; `purpose` says what a
    checkpoint was read for; None among the details is left out.
    """
    known = {name: value for name, value in details.items() if value is not None}
    root = session or (run or (path or "").removeprefix("tinker://")).partition(":")[0]
    db.execute(
        "INSERT INTO audit (at, event, session_id, run_id, path, purpose, details, owner) VALUES (?, ?, ?, ?, ?, ?, ?,"
        " coalesce((SELECT owner FROM sessions WHERE id = ?), (SELECT owner FROM checkpoints WHERE path = ?), ?))",
        (time.time(), event, session, run, path, purpose, json.dumps(known), root, path, LOCAL_OWNER),
    )


def between(
    db: sqlite3.Connection, start: float, end: float, resource: str | None, owner: str | None = None
) -> list[AuditEntry]:
    """Entries with start <= time < end, oldest first; `resource` keeps those whose event begins with it, `owner` those
    of what is theirs."""
    rows = db.execute(
        "SELECT * FROM audit WHERE at >= ? AND at < ? AND (? IS NULL OR substr(event, 1, length(?)) = ?)"
        " AND (? IS NULL OR owner = ?) ORDER BY at, id",
        (start, end, resource, prefix := f"{resource}_", prefix, owner, owner),
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
        owner=row["owner"],
    )
