"""The read side: lists, searches, traces, audit and bills, as the store has them."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from datetime import UTC, date, datetime, timedelta

from openrl.codec import as_text
from openrl.daemon import absent
from openrl.daemon.billing import device_use, storage_bills, usage_events
from openrl.daemon.sessions import Sessions
from openrl.daemon.work import Bill, StorageBill
from openrl.errors import BadRequest
from openrl.settings import BillingSettings
from openrl.store import audit, checkpoints, requests, runs, samplers, sessions, usage
from openrl.store.db import Database
from openrl.store.records import (
    AuditEntry,
    RequestTimes,
    Run,
    RunPage,
    RunSummary,
    Session,
    SessionContent,
    SessionFilter,
    SessionPage,
)
from openrl.types import CheckpointKind, RunId, SessionId

MAX_BILL_DAYS = 14


class Records:
    """Answers the REST calls about what is and was. Pages are newest first."""

    def __init__(self, db: Database, held: Sessions, prices: BillingSettings) -> None:
        self._db = db
        self._sessions = held
        self.prices = prices

    # -- runs --

    async def run(self, run: RunId) -> RunSummary:
        """Raises NotFound."""

        def read(db: sqlite3.Connection) -> RunSummary | None:
            found = runs.get(db, run)
            return None if found is None else _summary(db, found, time.time())

        found = await self._db.run(read)
        if found is None:
            raise absent.run(run)
        return found

    async def runs(self, limit: int, offset: int, project: str | None, owner: str | None = None) -> RunPage:
        """A page of runs, of one project and one owner if they are given."""

        def read(db: sqlite3.Connection) -> RunPage:
            now = time.time()
            page = [_summary(db, run, now) for run in runs.newest(db, limit, offset, project, owner)]
            return RunPage(page, runs.count(db, project, owner))

        return await self._db.run(read)

    # -- sessions --

    async def sessions(self, limit: int, offset: int, owner: str | None = None) -> list[SessionId]:
        return await self._db.run(lambda db: sessions.newest_ids(db, limit, offset, owner))

    async def session(self, session: SessionId) -> SessionContent:
        """Raises NotFound."""
        held = self._sessions.get(session)

        def read(db: sqlite3.Connection) -> SessionContent:
            return SessionContent(held, runs.ids_of_session(db, session), samplers.ids_of_session(db, session))

        return await self._db.run(read)

    async def search(self, wanted: SessionFilter, limit: int) -> SessionPage:
        """A page of sessions that match."""

        def read(db: sqlite3.Connection) -> SessionPage:
            found: list[Session] = []
            for session in sessions.find(db, wanted):
                if _has(session, wanted):
                    found.append(session)
                if len(found) > limit:
                    break
            return SessionPage([sessions.summary(db, session) for session in found[:limit]], len(found) > limit)

        return await self._db.run(read)

    async def assign_project(self, session: SessionId, project: str) -> None:
        """Move a session with all that is its own. Raises NotFound."""
        await self._sessions.assign_project(session, project)

    async def trace(self, session: SessionId) -> list[RequestTimes]:
        """The requests of a session, in order of acceptance. Raises NotFound."""
        self._sessions.get(session)
        return await self._db.run(lambda db: requests.times(db, session))

    # -- audit and bills --

    async def audit(self, resource: str | None, day: date | None, owner: str | None = None) -> list[AuditEntry]:
        """The entries of one UTC day (default: today) about one kind of resource, or all, and of one owner, or all."""
        start = datetime.combine(day or datetime.now(UTC).date(), datetime.min.time(), UTC)
        end = start + timedelta(days=1)
        return await self._db.run(lambda db: audit.between(db, start.timestamp(), end.timestamp(), resource, owner))

    async def bill(self, starting_on: datetime, ending_before: datetime, owner: str | None = None) -> Bill:
        """Use by the hour, of one owner or all.

        Raises BadRequest unless both are whole UTC hours, in order, at most 14 days apart.
        """
        now = time.time()
        start, end = _window(starting_on, ending_before, now)

        def read(db: sqlite3.Connection) -> tuple[list[usage.Usage], list[usage.Stored], list[Session | None]]:
            used = usage.between(db, start, end, owner)
            known = [sessions.get(db, identity) for identity in {row.session_id for row in used}]
            return used, usage.stored_between(db, start, end, owner), known

        used, stored, known = await self._db.run(read)
        events = await asyncio.to_thread(usage_events, used, stored, start, min(end, now), self.prices)
        metadata = {session.id: session.user_metadata for session in known if session is not None}
        return Bill(events, device_use(used), metadata)

    async def storage(self, project: str | None, owner: str | None = None) -> list[StorageBill]:
        """What checkpoints take now, by project and owner."""
        return storage_bills(await self._db.run(lambda db: usage.stored_now(db, project, owner)), self.prices)


def _summary(db: sqlite3.Connection, run: Run, now: float) -> RunSummary:
    return RunSummary(
        run,
        last_training=checkpoints.last_of_kind(db, run.id, CheckpointKind.TRAINING, now),
        last_sampler=checkpoints.last_of_kind(db, run.id, CheckpointKind.SAMPLER, now),
    )


def _has(session: Session, wanted: SessionFilter) -> bool:
    given = session.user_metadata
    return all(key in given and as_text(given[key]) == value for key, value in wanted.metadata.items())


def _window(starting_on: datetime, ending_before: datetime, now: float) -> tuple[int, int]:
    start, end = starting_on.timestamp(), ending_before.timestamp()
    for name, value in (("starting_on", start), ("ending_before", end)):
        if value % usage.HOUR:
            raise BadRequest(f"{name} is not a whole UTC hour.", "An example: 2026-07-13T00:00:00Z.")
    if start > now:
        raise BadRequest("starting_on is in the future.")
    if not 0 < end - start <= MAX_BILL_DAYS * 86400:
        raise BadRequest(f"ending_before must be after starting_on, by at most {MAX_BILL_DAYS} days.")
    return int(start), int(end)
