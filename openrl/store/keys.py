"""API keys in the store: their hashes, whose they are, and what they are good for."""

from __future__ import annotations

import sqlite3

from openrl.keys.key import Key, Quotas
from openrl.keys.principal import Scope
from openrl.store import audit


def insert(db: sqlite3.Connection, key: Key) -> None:
    """Keep a new key, and note that in the audit log."""
    quotas = key.quotas
    db.execute(
        "INSERT INTO keys (digest, owner, scopes, note, created_at, expires_at, max_runs, max_tokens_per_day,"
        " max_checkpoint_bytes) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            key.digest,
            key.owner,
            " ".join(sorted(key.scopes)),
            key.note,
            key.created_at,
            key.expires_at,
            quotas.runs,
            quotas.tokens_per_day,
            quotas.checkpoint_bytes,
        ),
    )
    audit.write(db, "key_create", key=key.id, key_owner=key.owner, scopes=sorted(key.scopes))


def revoke(db: sqlite3.Connection, key: Key, now: float) -> None:
    """End a key for good; the first time counts."""
    ended = db.execute("UPDATE keys SET revoked_at = ? WHERE digest = ? AND revoked_at IS NULL", (now, key.digest))
    if ended.rowcount:
        audit.write(db, "key_revoke", key=key.id, key_owner=key.owner)


def all_keys(db: sqlite3.Connection) -> list[Key]:
    """Oldest first; revoked and expired ones included."""
    return [_key(row) for row in db.execute("SELECT * FROM keys ORDER BY created_at, digest")]


def any_live(db: sqlite3.Connection, now: float) -> bool:
    """Whether someone was given a key that is still good; also of a store from before keys."""
    if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'keys'").fetchone() is None:
        return False
    live = "SELECT 1 FROM keys WHERE revoked_at IS NULL AND (expires_at IS NULL OR expires_at > ?) LIMIT 1"
    return db.execute(live, (now,)).fetchone() is not None


def _key(row: sqlite3.Row) -> Key:
    return Key(
        digest=row["digest"],
        owner=row["owner"],
        scopes=frozenset(Scope(name) for name in row["scopes"].split()),
        quotas=Quotas(row["max_runs"], row["max_tokens_per_day"], row["max_checkpoint_bytes"]),
        note=row["note"],
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        revoked_at=row["revoked_at"],
    )
