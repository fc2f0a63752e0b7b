"""Sessions: opened, kept alive by heartbeats, finished by the client, or expired until the next sign of life."""

from __future__ import annotations

import secrets
import sqlite3
import time
from dataclasses import replace

from openrl.daemon import absent
from openrl.daemon.work import NewSession
from openrl.errors import Gone, NotFound
from openrl.store import audit, sessions
from openrl.store.db import Database
from openrl.store.records import Session, SessionState
from openrl.types import SessionId


class Sessions:
    """All sessions by id."""

    def __init__(self, db: Database, timeout: float) -> None:
        self._db = db
        self._timeout = timeout
        self._sessions: dict[SessionId, Session] = {}

    def restore(self, found: list[Session]) -> None:
        """Take the sessions from the store; a restart is no silence of theirs."""
        now = time.time()
        for session in found:
            self._sessions[session.id] = replace(session, last_seen=now)

    async def create(self, new: NewSession, idempotency_key: str | None) -> SessionId:
        now = time.time()
        session = Session(
            id=SessionId(secrets.token_hex(8)),
            state=SessionState.ACTIVE,
            created_at=now,
            last_seen=now,
            sdk_version=new.sdk_version,
            tags=new.tags,
            user_metadata=new.user_metadata or {},
            project_id=new.project_id,
            display_name=new.display_name,
            owner=new.owner,
        )

        def write(db: sqlite3.Connection) -> SessionId:
            identity = sessions.insert(db, session, idempotency_key)
            if identity == session.id:
                audit.write(
                    db,
                    "session_create",
                    session=identity,
                    project_id=session.project_id,
                    sdk_version=session.sdk_version,
                )
            return identity

        identity = await self._db.run(write)
        self._sessions.setdefault(identity, session)
        return identity

    def active(self, session: SessionId) -> Session:
        """A session that may start new work. Raises NotFound, also once it is finished (2.6)."""
        found = self.get(session)
        if found.state is SessionState.FINISHED:
            raise NotFound(f"session {session!r} is finished.", "Open a new ServiceClient.")
        self._seen(found)
        return found

    async def heartbeat(self, session: SessionId) -> None:
        """Raises NotFound; Gone once the session is finished, which ends the client's loop quietly."""
        found = self.get(session)
        if found.state is SessionState.FINISHED:
            raise Gone(f"session {session!r} is finished.")
        seen = self._seen(found)
        await self._db.run(lambda db: sessions.touch(db, session, seen.state, seen.last_seen))

    async def finish(self, session: SessionId, reason: str, detail: str | None) -> None:
        """Idempotent; the first reason wins."""
        self.get(session)

        def write(db: sqlite3.Connection) -> None:
            if sessions.finish(db, session, reason, detail):
                audit.write(db, "session_finish", session=session, reason=reason, detail=detail)

        await self._db.run(write)
        self._sessions[session] = replace(self.get(session), state=SessionState.FINISHED)

    def get(self, session: SessionId) -> Session:
        """Raises NotFound."""
        found = self._sessions.get(session)
        if found is None:
            raise absent.session(session)
        return found

    def owner_of(self, identity: str) -> str | None:
        """Whose a session is, or a run, sampler, request or `tinker://` path: all their ids begin with a session's.
        None if there is no such session."""
        found = self._sessions.get(SessionId(identity.removeprefix("tinker://").partition(":")[0]))
        return None if found is None else found.owner

    async def assign_project(self, session: SessionId, project: str) -> None:
        """Move a session, and with it its runs and samplers, into a project; also when it is finished."""
        before = self.get(session).project_id

        def write(db: sqlite3.Connection) -> None:
            sessions.set_project(db, session, project)
            audit.write(db, "project_session_assign", session=session, project_id=project, before=before)

        await self._db.run(write)
        self._sessions[session] = replace(self.get(session), project_id=project)

    async def expire_silent(self) -> list[SessionId]:
        """Mark sessions that have been silent too long as expired; returns those that were active until now."""
        expired = [self._sessions[identity] for identity in self.silent()]

        def write(db: sqlite3.Connection) -> None:
            for session in expired:
                sessions.touch(db, session.id, session.state, session.last_seen)
                audit.write(db, "session_expire", session=session.id)

        if expired:
            await self._db.run(write)
        return [session.id for session in expired]

    def is_finished(self, session: SessionId) -> bool:
        return self._sessions[session].state is SessionState.FINISHED

    def silent(self) -> list[SessionId]:
        """Mark sessions that have been silent too long as expired; returns those that were active until now."""
        limit = time.time() - self._timeout
        expired = [s for s in self._sessions.values() if s.state is SessionState.ACTIVE and s.last_seen < limit]
        for session in expired:
            self._sessions[session.id] = replace(session, state=SessionState.EXPIRED)
        return [session.id for session in expired]

    def state_of(self, session: SessionId) -> SessionState:
        """Raises NotFound."""
        return self.get(session).state

    def noticed(self, session: SessionId) -> None:
        """Its client asked for something: a sign of life, though none that need outlast a restart. Unknown and finished
        sessions stay as they are."""
        found = self._sessions.get(session)
        if found is not None and found.state is not SessionState.FINISHED:
            self._seen(found)

    def _seen(self, session: Session) -> Session:
        alive = replace(session, state=SessionState.ACTIVE, last_seen=time.time())
        self._sessions[session.id] = alive
        return alive
