"""Checkpoints under a run of their own: copies of others, and folders that `openrl checkpoints import` has laid."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from openrl.checkpoints import layout, manifest
from openrl.checkpoints.commit import CheckpointFolders
from openrl.checkpoints.layout import Address
from openrl.daemon.recovery import find_checkpoint
from openrl.daemon.runs import Runs
from openrl.daemon.sessions import Sessions
from openrl.daemon.work import NewSession
from openrl.errors import BadRequest
from openrl.keys.principal import LOCAL_OWNER
from openrl.store import adoption, audit
from openrl.store.db import Database
from openrl.store.records import Checkpoint, Session
from openrl.types import CheckpointKind, RunId, SessionId
from openrl.validation import check_ttl

CheckRoom = Callable[[str, int], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class InProject:
    """A copy in a session of its own. Sent again under the same key, it is the same copy (4.7)."""

    project: str | None
    idempotency_key: str | None
    owner: str = LOCAL_OWNER


@dataclass(frozen=True, slots=True)
class InSession:
    """A copy as run number `model_seq_id` of an open session, which also is what a retry is known by."""

    session: SessionId
    model_seq_id: int


async def _any_room(_owner: str, _size: int) -> None:
    return None


class Copying:
    """Makes runs that only hold a checkpoint and cannot be trained."""

    def __init__(self, db: Database, folders: CheckpointFolders, sessions: Sessions, runs: Runs) -> None:
        self._db = db
        self._folders = folders
        self._sessions = sessions
        self._runs = runs
        self._one_at_a_time = asyncio.Lock()  # so that a retry finds what its first try has made
        self.check_room: CheckRoom = _any_room  # whether an owner may keep so many bytes more

    async def copy(self, source: str, into: InProject | InSession, ttl: int | None) -> str:
        """The path of a copy with the same segment and name (7.5). It does not inherit expiry and publication.

        Raises BadRequest, NotFound (source or session).
        """
        check_ttl(ttl)
        checkpoint = await find_checkpoint(self._db, source)
        if checkpoint.kind is CheckpointKind.EXTERNAL:
            raise BadRequest(f"{source} holds external weights, which can only be downloaded.")
        async with self._one_at_a_time:
            run = await self._run_for(checkpoint, into)
            copied = str(Address(run, checkpoint.kind, checkpoint.name))
            if run not in self._runs:
                await self._copy(checkpoint, run, ttl)
            elif self._runs.get(run).run.reason != adoption.holds("copy", copied):
                raise BadRequest(f"run {run} exists.", "Take a model_seq_id that is not used yet.")
        if isinstance(into, InProject):
            await self._sessions.finish(SessionId(run.partition(":")[0]), "success", None)
        return copied

    async def _run_for(self, source: Checkpoint, into: InProject | InSession) -> RunId:
        if isinstance(into, InSession):
            self._sessions.active(into.session)
            return RunId(f"{into.session}:train:{into.model_seq_id}")
        new = NewSession("", ("copy",), None, into.project, f"copy of {source.path}", into.owner)
        key = into.idempotency_key and f"copy_weights:{into.idempotency_key}"
        return RunId(f"{await self._sessions.create(new, key)}:train:0")

    async def _copy(self, source: Checkpoint, run: RunId, ttl: int | None) -> None:
        now = time.time()
        owner = self._sessions.owner_of(run) or LOCAL_OWNER
        await self.check_room(owner, source.size_bytes)
        address = Address(run, source.kind, source.name)
        copy = replace(
            source,
            path=str(address),
            run_id=run,
            folder=str(layout.new_folder(address)),
            created_at=now,
            expires_at=None if ttl is None else now + ttl,
            ephemeral=False,
            public=False,
            owner=owner,
        )
        with self._folders.hold(source.folder):
            copy = await asyncio.to_thread(self._copy_files, source, copy)
        await self.take_in(copy, None, "copy", source=source.path)

    def _copy_files(self, source: Checkpoint, copy: Checkpoint) -> Checkpoint:
        staged = self._folders.stage(Path(copy.folder))
        for path in self._folders.absolute(source.folder).iterdir():
            if path.name != manifest.FILE:
                shutil.copyfile(path, staged / path.name)
        return self._folders.commit(staged, copy)

    async def adopt(self, folder: str) -> Checkpoint:
        """Take in a whole checkpoint folder that lies in place already, named relative to the checkpoints folder.

        Raises BadRequest if it is not one, or its run exists.
        """
        checkpoint = self._read(folder)
        if checkpoint.run_id in self._runs:
            raise BadRequest(f"{checkpoint.run_id} exists on this server.")
        session = adoption.finished_session(
            SessionId(checkpoint.run_id.partition(":")[0]),
            "import",
            f"import of {checkpoint.name}",
            owner=checkpoint.owner,
        )
        await self.take_in(checkpoint, session, "import")
        return checkpoint

    def _read(self, folder: str) -> Checkpoint:
        root = self._folders.root.resolve()
        try:
            place = (root / folder).resolve()
        except ValueError as error:  # a NUL in it
            raise BadRequest(f"folder {folder!r} is no path: {error}.") from error
        if not place.is_relative_to(root):
            raise BadRequest(f"folder {folder!r} lies outside of the checkpoints folder.")
        try:
            checkpoint = manifest.read(place)
        except ValueError as error:
            raise BadRequest(f"folder {folder!r} is no checkpoint: {error}.") from error
        if checkpoint.folder != folder or not folder.startswith(f"{checkpoint.run_id}/{checkpoint.kind}/"):
            raise BadRequest(f"folder {folder!r} says that it belongs at {checkpoint.folder!r}.")
        layout.parse(checkpoint.path)
        return checkpoint

    async def take_in(self, checkpoint: Checkpoint, session: Session | None, origin: str, **details: str) -> None:
        """Rows for a checkpoint whose folder is in place, under a run of its own; `session` if that is new, too."""
        run = adoption.holding_run(checkpoint, SessionId(checkpoint.run_id.partition(":")[0]), origin)

        def write(db: sqlite3.Connection) -> None:
            adoption.insert(db, session, run, checkpoint)
            audit.write(db, f"checkpoint_{origin}", session=run.session_id, run=run.id, path=checkpoint.path, **details)

        await self._db.run(write)
        if session is not None:
            self._sessions.restore([session])
        self._runs.add(run)
