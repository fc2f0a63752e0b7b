"""The API keys of a server, running or not.

As with checkpoints, a running server makes the changes itself, so that they count at once; without one, we own the
data folder for as long as the command takes.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from openrl import apikey
from openrl.instance import InUse, owning
from openrl.keys.file import read_keys
from openrl.keys.key import Key, Quotas, describe, make, revocable
from openrl.settings import Resolved
from openrl.store import keys as store
from openrl.store.reading import Connection, changing, transaction
from openrl_cli.reach import Server


class Cabinet(ABC):
    """Where keys are kept."""

    @abstractmethod
    def create(self, key: Key, quotas: Quotas) -> dict[str, Any]:
        """Make a key like this draft; `api_key` of the answer is the only time that it is told."""

    @abstractmethod
    def all(self) -> list[dict[str, Any]]: ...

    @abstractmethod
    def revoke(self, identity: str) -> dict[str, Any]: ...


class OwnCabinet(Cabinet):
    """No server runs: we own the data folder."""

    def __init__(self, db: Connection, keys_file: Path | None) -> None:
        self._db = db
        self._file = keys_file

    def create(self, key: Key, quotas: Quotas) -> dict[str, Any]:
        text, made = make(key.owner, key.scopes, quotas, key.expires_at, key.note)
        with transaction(self._db):
            store.insert(self._db, made)
        return {"api_key": text, **describe(made)}

    def all(self) -> list[dict[str, Any]]:
        return [describe(key) for key in self._keys()]

    def _keys(self) -> list[Key]:
        filed = [] if self._file is None else read_keys(self._file)
        return [*filed, *store.all_keys(self._db)]

    def revoke(self, identity: str) -> dict[str, Any]:
        key = revocable(self._keys(), identity)
        key = key if key.revoked_at is not None else replace(key, revoked_at=time.time())
        with transaction(self._db):
            store.revoke(self._db, key, key.revoked_at or 0.0)
        return describe(key)


class ServedCabinet(Cabinet):
    """A server runs: it makes the changes, and ends at once what hangs on a revoked key."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def create(self, key: Key, quotas: Quotas) -> dict[str, Any]:
        limits = {
            "runs": quotas.runs,
            "tokens_per_day": quotas.tokens_per_day,
            "checkpoint_bytes": quotas.checkpoint_bytes,
        }
        wanted = {"owner": key.owner, "scopes": sorted(key.scopes), "expires_at": key.expires_at, "note": key.note}
        return self._server.call("POST", "keys", wanted | limits)

    def all(self) -> list[dict[str, Any]]:
        return self._server.call("GET", "keys")["keys"]

    def revoke(self, identity: str) -> dict[str, Any]:
        return self._server.call("DELETE", f"keys/{identity}")


@contextmanager
def open_cabinet(resolved: Resolved, url: str | None, ca: Path | None) -> Generator[Cabinet]:
    """The keys of the server at `url`, else those of the data folder, with a server running on it or without."""
    data_dir = resolved.settings.data_dir
    if url is not None:
        yield ServedCabinet(Server(url, resolved.api_key or apikey.api_key(data_dir), ca=ca))
        return
    try:
        with owning(data_dir), changing(data_dir) as db:
            yield OwnCabinet(db, resolved.settings.server.keys_file)
    except InUse as used:
        if not used.url:
            raise
        key = resolved.api_key or apikey.api_key(data_dir)
        yield ServedCabinet(Server(used.url, key, data_dir=data_dir, ca=ca))
