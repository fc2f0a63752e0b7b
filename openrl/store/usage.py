"""Metered use in the store: sums by the hour, and for how long which bytes were stored."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from openrl.store.records import DEFAULT_PROJECT
from openrl.types import SessionId

HOUR = 3600


class Kind(StrEnum):
    """What is metered; amounts are tokens, checkpoints or seconds."""

    PREFILL = "prefill"  # prompt tokens of samples, once for all sequences of a request
    SAMPLE = "sample"  # drawn tokens
    TRAIN = "train"  # tokens of forward and forward_backward
    CHECKPOINT = "checkpoint"  # checkpoints written
    TRAIN_SECONDS = "train_seconds"  # of the device, for passes and optimizer steps
    SAMPLE_SECONDS = "sample_seconds"  # of the device, shared among the sequences of each turn


@dataclass(frozen=True, slots=True)
class Usage:
    """The sum of one kind over an hour that began at `hour` (seconds since the epoch)."""

    hour: int
    session_id: SessionId
    project_id: str  # the session's project as it is now
    base_model: str
    kind: Kind
    amount: float


@dataclass(frozen=True, slots=True)
class Stored:
    """Bytes that were stored from `from_at` on; `to_at` None: they still are."""

    base_model: str
    project_id: str
    size_bytes: int
    from_at: float
    to_at: float | None


@dataclass(frozen=True, slots=True)
class ProjectStorage:
    """What a project's checkpoints take on disk now."""

    project_id: str
    count: int
    size_bytes: int


def add(db: sqlite3.Connection, session: SessionId, base_model: str, amounts: Mapping[Kind, float], now: float) -> None:
    """Add to the sums of the hour that holds `now`."""
    hour = int(now) // HOUR * HOUR
    db.executemany(
        "INSERT INTO usage (hour, session_id, base_model, kind, amount) VALUES (?, ?, ?, ?, ?)"
        " ON CONFLICT DO UPDATE SET amount = amount + excluded.amount",
        [(hour, session, base_model, kind, float(amount)) for kind, amount in amounts.items() if amount],
    )


def between(db: sqlite3.Connection, start: float, end: float) -> list[Usage]:
    """Sums of the hours that began in [start, end), oldest hour first."""
    rows = db.execute(
        "SELECT usage.*, coalesce(sessions.project_id, ?) AS project FROM usage"
        " LEFT JOIN sessions ON sessions.id = usage.session_id WHERE hour >= ? AND hour < ? ORDER BY hour",
        (DEFAULT_PROJECT, start, end),
    )
    return [
        Usage(
            hour=row["hour"],
            session_id=SessionId(row["session_id"]),
            project_id=row["project"],
            base_model=row["base_model"],
            kind=Kind(row["kind"]),
            amount=row["amount"],
        )
        for row in rows
    ]


def stored_between(db: sqlite3.Connection, start: float, end: float) -> list[Stored]:
    """Spans of stored bytes that touch [start, end)."""
    rows = db.execute(
        "SELECT storage.*, coalesce(sessions.project_id, ?) AS project FROM storage"
        " LEFT JOIN runs ON runs.id = storage.run_id LEFT JOIN sessions ON sessions.id = runs.session_id"
        " WHERE (storage.to_at IS NULL OR storage.to_at > ?) AND storage.from_at < ?",
        (DEFAULT_PROJECT, start, end),
    )
    return [Stored(row["base_model"], row["project"], row["size_bytes"], row["from_at"], row["to_at"]) for row in rows]


def stored_now(db: sqlite3.Connection, project: str | None) -> list[ProjectStorage]:
    """Checkpoints on disk by project, those that only samplers use included; `project` narrows to one."""
    rows = db.execute(
        "SELECT coalesce(sessions.project_id, ?) AS project, count(*) AS count, sum(checkpoints.size_bytes) AS bytes"
        " FROM checkpoints LEFT JOIN runs ON runs.id = checkpoints.run_id"
        " LEFT JOIN sessions ON sessions.id = runs.session_id"
        " WHERE ? IS NULL OR coalesce(sessions.project_id, ?) = ? GROUP BY 1 ORDER BY 1",
        (DEFAULT_PROJECT, project, DEFAULT_PROJECT, project),
    )
    return [ProjectStorage(row["project"], row["count"], row["bytes"]) for row in rows]
