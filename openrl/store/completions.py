"""How the clones of a sampler learn what ended: the order in which its requests ended, and the clones' own numbers."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

from openrl.store.records import Completion, RequestState
from openrl.types import RequestId, SamplerId

CLONE_SPAN = 1_000_000_000  # a clone's requests have the numbers from clone * CLONE_SPAN on (6.2)


def next_clone(db: sqlite3.Connection, sampler: SamplerId) -> int:
    """A number that no other clone of this sampler has had: 1, 2, ... (0 is the original; T23)."""
    row = db.execute("UPDATE samplers SET clones = clones + 1 WHERE id = ? RETURNING clones", (sampler,)).fetchone()
    return int(row["clones"])


def after(db: sqlite3.Connection, sampler: SamplerId, clone: int, number: int, limit: int) -> list[Completion]:
    """Requests of one clone that ended after completion `number`, in the order in which they ended."""
    rows = db.execute(
        "SELECT id, completion, state, length(result) AS size FROM requests"
        " WHERE scope = ? AND seq / 1000000000 = ? AND completion IS NOT NULL AND completion > ?"
        " ORDER BY completion LIMIT ?",
        (sampler, clone, number, limit),
    )
    return [
        Completion(row["completion"], RequestId(row["id"]), row["state"] == RequestState.FAILED, row["size"])
        for row in rows
    ]


def forget_results(db: sqlite3.Connection, sampler: SamplerId, ids: Iterable[RequestId]) -> None:
    """Give up the bytes of results that their client says it has; ids of others are ignored."""
    db.executemany(
        "UPDATE requests SET result = NULL, result_type = NULL WHERE id = ? AND scope = ? AND state = 'done'",
        [(request, sampler) for request in ids],
    )
