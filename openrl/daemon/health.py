"""Whether the server can do its work right now, for those who decide where to send it (readiness)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from sqlite3 import Error

from openrl.daemon.models import Model, ModelPool
from openrl.store.db import Database
from openrl.store.probe import touch

_REMEMBER_SECONDS = 2.0  # an answer of the store: asking needs no key, so it must not become a load
_STORE_SECONDS = 2.0  # a store that answers no sooner is taken for stuck


@dataclass(frozen=True, slots=True)
class Readiness:
    """`reasons` is empty when work is taken and can be done. `models`: state by served name."""

    reasons: tuple[str, ...]
    models: Mapping[str, str]


class Health:
    """Looks at models, store and shutdown when asked; owns nothing but the store's last answer."""

    def __init__(self, db: Database, pool: ModelPool, stopping: Callable[[], bool]) -> None:
        self._db = db
        self._pool = pool
        self._stopping = stopping
        self._store_at = -_REMEMBER_SECONDS
        self._store_writes = True
        self._asking: asyncio.Task[bool] | None = None

    async def readiness(self) -> Readiness:
        """Never raises, and answers within seconds."""
        models = {status.name: state(self._pool.find(status.name)) for status in self._pool.statuses()}
        reasons: list[str] = []
        if self._stopping():
            reasons.append("stopping")
        elif not await self.store_writes():
            reasons.append("the store cannot write")
        listed = [model for model in self._pool.models.values() if model.listed]
        if not any(map(_can_serve, listed)) and (listed or self._pool.allowed is None):
            reasons.append("no model is ready")
        return Readiness(tuple(reasons), models)

    async def store_writes(self) -> bool:
        """Whether a commit reaches the disk: tried, at most every other second, however many ask."""
        if time.monotonic() - self._store_at < _REMEMBER_SECONDS:
            return self._store_writes
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask())
            self._asking.add_done_callback(self._answered)
        return await asyncio.shield(self._asking)

    async def _ask(self) -> bool:
        try:
            async with asyncio.timeout(_STORE_SECONDS):
                await self._db.run(touch)
        except (Error, TimeoutError):
            return False
        return True

    def _answered(self, task: asyncio.Task[bool]) -> None:
        self._asking = None
        self._store_at = time.monotonic()
        self._store_writes = not task.cancelled() and task.exception() is None and task.result()


def _can_serve(model: Model) -> bool:
    return model.serving and state(model) != "restarting"


def state(model: Model) -> str:
    """A model's state in a word; a dead worker shows before its supervisor has noticed."""
    if model.state == "ready" and (model.worker is None or not model.worker.alive):
        return "restarting"
    return model.state
