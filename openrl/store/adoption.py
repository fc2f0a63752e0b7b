"""Checkpoints that no run of this server made: copies and imports. Each gets a run that cannot be trained."""

from __future__ import annotations

import sqlite3
import time
from dataclasses import replace

from openrl.keys.principal import LOCAL_OWNER
from openrl.store import checkpoints, runs, sessions
from openrl.store.records import Checkpoint, Run, RunState, Session, SessionState
from openrl.types import SessionId


def finished_session(
    identity: SessionId, origin: str, display_name: str, project: str | None = None, owner: str = LOCAL_OWNER
) -> Session:
    """A session that holds what came from elsewhere; nothing can be started in it. `origin` becomes its tag."""
    now = time.time()
    return Session(
        id=identity,
        state=SessionState.FINISHED,
        created_at=now,
        last_seen=now,
        sdk_version="",
        tags=(origin,),
        user_metadata={},
        project_id=project,
        display_name=display_name,
        finish_reason="success",
        owner=owner,
    )


def holding_run(checkpoint: Checkpoint, session: SessionId, origin: str) -> Run:
    """The run under whose id a copied or imported checkpoint is found."""
    now = time.time()
    return Run(
        id=checkpoint.run_id,
        session_id=session,
        base_model=checkpoint.base_model,
        spec=checkpoint.spec,
        state=RunState.CLOSED,
        user_metadata={},
        created_at=now,
        last_request_at=now,
        reason=holds(origin, checkpoint.path),
        owner=checkpoint.owner,
    )


def holds(origin: str, path: str) -> str:
    """Why such a run cannot be trained; also what it is known by."""
    return f"it only holds the {origin} {path}"


def insert(db: sqlite3.Connection, session: Session | None, run: Run, checkpoint: Checkpoint) -> None:
    """Write all three at once; without `session`, the run's own must be there."""
    if session is not None:
        sessions.insert(db, replace(session, state=SessionState.ACTIVE), None)
        sessions.finish(db, session.id, "success", None)
    runs.insert(db, run)
    checkpoints.put(db, checkpoint)
