"""Custom losses in the store: the body that brought each, to be read again as it was read then."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from openrl.types import SessionId


@dataclass(frozen=True, slots=True)
class StoredLoss:
    """`body` is a `create_custom_loss` request that was accepted."""

    id: str
    session_id: SessionId
    body: bytes
    created_at: float


def insert(db: sqlite3.Connection, loss: StoredLoss) -> None:
    """Insert a loss; one that is there stays as it is."""
    db.execute(
        "INSERT INTO custom_losses (id, session_id, body, created_at) VALUES (?, ?, ?, ?) ON CONFLICT (id) DO NOTHING",
        (loss.id, loss.session_id, loss.body, loss.created_at),
    )


def get(db: sqlite3.Connection, identity: str) -> StoredLoss | None:
    row = db.execute("SELECT * FROM custom_losses WHERE id = ?", (identity,)).fetchone()
    if row is None:
        return None
    return StoredLoss(row["id"], SessionId(row["session_id"]), row["body"], row["created_at"])
