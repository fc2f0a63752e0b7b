"""Sums over the whole store, for those who watch the server."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from openrl.store.usage import Kind


@dataclass(frozen=True, slots=True)
class Stock:
    """The checkpoints of one base model that are on disk."""

    base_model: str
    count: int
    size_bytes: int


def used(db: sqlite3.Connection, start: float, end: float) -> dict[tuple[str, Kind], float]:
    """Metered amounts by base model and kind, of the hours that began in [start, end)."""
    rows = db.execute(
        "SELECT base_model, kind, sum(amount) AS amount FROM usage WHERE hour >= ? AND hour < ? GROUP BY 1, 2",
        (start, end),
    )
    return {(row["base_model"], Kind(row["kind"])): row["amount"] for row in rows}


def stock(db: sqlite3.Connection) -> list[Stock]:
    """What is stored now."""
    rows = db.execute("SELECT base_model, count(*) AS n, sum(size_bytes) AS bytes FROM checkpoints GROUP BY 1")
    return [Stock(row["base_model"], row["n"], row["bytes"]) for row in rows]
