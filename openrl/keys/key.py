"""API keys as records: what is kept of one is its sha256, never the key itself.

A plain hash is enough: the keys that we make are 256 random bits, which nobody finds again by trying.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from openrl.errors import BadRequest, NotFound
from openrl.keys.principal import LOCAL_OWNER, OWNER_PATTERN, Principal, Scope

PREFIX = "tml-"  # the SDK takes no key without it
STRONG = re.compile(r"tml-[A-Za-z0-9_-]{32,}")

_ID_DIGITS = 12
_MAX_NOTE = 200


@dataclass(frozen=True, slots=True)
class Quotas:
    """What an owner may have at most; None is no limit."""

    runs: int | None = None  # open at the same time
    tokens_per_day: int | None = None  # trained, read as prompts and drawn, in a UTC day
    checkpoint_bytes: int | None = None  # stored at the same time

    def or_more(self, other: Quotas) -> Quotas:
        """The more generous of both, one by one."""
        return Quotas(
            _or_more(self.runs, other.runs),
            _or_more(self.tokens_per_day, other.tokens_per_day),
            _or_more(self.checkpoint_bytes, other.checkpoint_bytes),
        )


UNLIMITED = Quotas()


def _or_more(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else max(one, other)


@dataclass(frozen=True, slots=True)
class Key:
    """A key without the key. `digest` is the sha256 of the whole text, in hex. Times are seconds since the epoch."""

    digest: str
    owner: str
    scopes: frozenset[Scope]
    quotas: Quotas = UNLIMITED
    note: str = ""
    created_at: float = 0.0
    expires_at: float | None = None
    revoked_at: float | None = None
    source: Literal["machine", "store", "file"] = "store"

    @property
    def id(self) -> str:
        """What it is called in lists and logs; says nothing about the key."""
        return self.digest[:_ID_DIGITS]

    @property
    def principal(self) -> Principal:
        return Principal(self.owner, self.scopes, self.id)

    def is_live(self, now: float) -> bool:
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def make(owner: str, scopes: frozenset[Scope], quotas: Quotas, expires_at: float | None, note: str) -> tuple[str, Key]:
    """A new key and its record, not kept anywhere yet. Raises BadRequest for what cannot be."""
    text = PREFIX + secrets.token_urlsafe(32)  # 32 bytes are 43 characters
    key = Key(digest(text), owner, scopes, quotas, note, created_at=time.time(), expires_at=expires_at)
    check_key(key)
    if expires_at is not None and expires_at <= time.time():
        raise BadRequest("the expiry is in the past.", "Name a later time, or leave it out for a key without end.")
    return text, key


def revocable(known: list[Key], identity: str) -> Key:
    """The key of the store with an id. Raises NotFound that says where else a key is ended."""
    found = [key for key in known if key.id == identity]
    if not found:
        raise NotFound(f"key {identity!r} does not exist here.", "See: openrl keys list")
    if found[0].source != "store":
        where = "the keys file" if found[0].source == "file" else "the server's settings, or api_key in its data folder"
        raise NotFound(f"key {identity} is not kept in the store but in {where}.", "Remove it there.")
    return found[0]


def machine_key(key: str) -> Key:
    """The key that the server prints: it is the machine's owner and may do everything."""
    return Key(digest(key), LOCAL_OWNER, frozenset({Scope.ADMIN}), note="the machine's own key", source="machine")


def check_key(key: Key) -> None:
    """Raise BadRequest for a key that cannot be one, naming what is wrong."""
    if not OWNER_PATTERN.fullmatch(key.owner):
        raise BadRequest(
            f"owner is {key.owner!r}.", "An owner is up to 64 letters, digits, '.', '_', '@' and '-', as in alice."
        )
    if not key.scopes:
        raise BadRequest("scopes is empty.", f"Name one or more of: {', '.join(Scope)}.")
    if key.owner == LOCAL_OWNER and key.quotas != UNLIMITED:
        raise BadRequest(f"owner {LOCAL_OWNER!r} is the machine's own and has no quotas.", "Choose another owner.")
    for name in ("runs", "tokens_per_day", "checkpoint_bytes"):
        value: int | None = getattr(key.quotas, name)
        if value is not None and value < 0:
            raise BadRequest(f"{name} is {value}; a quota is a whole number of at least 0.")
    if len(key.note) > _MAX_NOTE:
        raise BadRequest(f"note has {len(key.note)} characters; at most {_MAX_NOTE} are kept.")


def scopes_of(names: Iterable[str]) -> frozenset[Scope]:
    """Raises BadRequest for a scope that does not exist."""
    given = tuple(names)
    legal: Collection[str] = tuple(Scope)
    unknown = [name for name in given if name not in legal]
    if unknown:
        raise BadRequest(f"scope {unknown[0]!r} does not exist; legal: {', '.join(legal)}.")
    return frozenset(Scope(name) for name in given)


def describe(key: Key) -> dict[str, Any]:
    """All that is kept of a key, ready for JSON; times in seconds since the epoch."""
    return {
        "id": key.id,
        "owner": key.owner,
        "scopes": sorted(key.scopes),
        "note": key.note,
        "source": key.source,
        "created_at": key.created_at,
        "expires_at": key.expires_at,
        "revoked_at": key.revoked_at,
        "runs": key.quotas.runs,
        "tokens_per_day": key.quotas.tokens_per_day,
        "checkpoint_bytes": key.quotas.checkpoint_bytes,
    }
