"""Metered use in the store: sums by the hour, and for how long which bytes were stored."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from openrl.keys.principal import LOCAL_OWNER
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
    owner: str = LOCAL_OWNER


@dataclass(frozen=True, slots=True)
class Stored:
    """Bytes that were stored from `from_at` on; `to_at` None: they still are."""

    base_model: str
    project_id: str
    size_bytes: int
    from_at: float
    to_at: float | None
    owner: str = LOCAL_OWNER


@dataclass(frozen=True, slots=True)
class ProjectStorage:
    """What a project's checkpoints take on disk now."""

    project_id: str
    count: int
    size_bytes: int
    owner: str = LOCAL_OWNER


def add(db: sqlite3.Connection, session: SessionId, base_model: str, amounts: Mapping[Kind, float], now: float) -> None:
    """Add to the sums of the hour that holds `now`."""
    hour = int(now) // HOUR * HOUR
    db.executemany(
        "INSERT INTO usage (hour, session_id, base_model, kind, amount) VALUES (?, ?, ?, ?, ?)"
        " ON CONFLICT DO UPDATE SET amount = amount + excluded.amount",
        [(hour, session, base_model, kind, float(amount)) for kind, amount in amounts.items() if amount],
    )


def between(db: sqlite3.Connection, start: float, end: float, owner: str | None = None) -> list[Usage]:
    """Sums of the hours that began in [start, end), oldest hour first; `owner` narrows to one."""
    rows = db.execute(
        "SELECT usage.*, coalesce(sessions.project_id, ?) AS project, coalesce(sessions.owner, ?) AS owner FROM usage"
        " LEFT JOIN sessions ON sessions.id = usage.session_id WHERE hour >= ? AND hour < ?"
        " AND (? IS NULL OR coalesce(sessions.owner, ?) = ?) ORDER BY hour",
        (DEFAULT_PROJECT, LOCAL_OWNER, start, end, owner, LOCAL_OWNER, owner),
    )
    return [
        Usage(
            hour=row["hour"],
            session_id=SessionId(row["session_id"]),
            project_id=row["project"],
            base_model=row["base_model"],
            kind=Kind(row["kind"]),
            amount=row["amount"],
            owner=row["owner"],
        )
        for row in rows
    ]


def tokens_by_owner(db: sqlite3.Connection, start: float) -> dict[str, float]:
    """Tokens trained, read as prompts and drawn since the hour that began at `start`."""
    rows = db.execute(
        "SELECT coalesce(sessions.owner, ?) AS owner, sum(amount) AS tokens FROM usage"
        " LEFT JOIN sessions ON sessions.id = usage.session_id WHERE hour >= ? AND kind IN (?, ?, ?) GROUP BY 1",
        (LOCAL_OWNER, start, Kind.TRAIN, Kind.PREFILL, Kind.SAMPLE),
    )
    return {row["owner"]: row["tokens"] for row in rows}


def stored_between(db: sqlite3.Connection, start: float, end: float, owner: str | None = None) -> list[Stored]:
    """Spans of stored bytes that touch [start, end); `owner` narrows to one."""
    rows = db.execute(
        "SELECT storage.*, coalesce(sessions.project_id, ?) AS project FROM storage"
        " LEFT JOIN runs ON runs.id = storage.run_id LEFT JOIN sessions ON sessions.id = runs.session_id"
        " WHERE (storage.to_at IS NULL OR storage.to_at > ?) AND storage.from_at < ?"
        " AND (? IS NULL OR storage.owner = ?)",
        (DEFAULT_PROJECT, start, end, owner, owner),
    )
    return [
        Stored(row["base_model"], row["project"], row["size_bytes"], row["from_at"], row["to_at"], row["owner"])
        for row in rows
    ]


def stored_now(db: sqlite3.Connection, project: str | None, owner: str | None = None) -> list[ProjectStorage]:
    """Checkpoints on disk by project and owner, those that only samplers use included; both narrow to one."""
    rows = db.execute(
        "SELECT coalesce(sessions.project_id, ?) AS project, count(*) AS count, sum(checkpoints.size_bytes) AS bytes,"
        " checkpoints.owner AS owner"
        " FROM checkpoints LEFT JOIN runs ON runs.id = checkpoints.run_id"
        " LEFT JOIN sessions ON sessions.id = runs.session_id"
        " WHERE (? IS NULL OR coalesce(sessions.project_id, ?) = ?) AND (? IS NULL OR checkpoints.owner = ?)"
        " GROUP BY 1, 4 ORDER BY 1, 4",
        (DEFAULT_PROJECT, project, DEFAULT_PROJECT, project, owner, owner),
    )
    return [ProjectStorage(row["project"], row["count"], row["bytes"], row["owner"]) for row in rows]
