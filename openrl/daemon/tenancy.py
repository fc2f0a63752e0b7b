"""The daemon as one caller may see it: the one place that keeps owners apart.

The HTTP layer has nothing but this; what is not here cannot be called. Methods are named as those of the daemon and its
parts, and raise for what belongs to someone else exactly what they raise for what does not exist (`absent`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrl.custom_loss import LossProgram
from openrl.daemon import absent
from openrl.daemon.checkpoint_life import Page
from openrl.daemon.copying import InProject, InSession
from openrl.daemon.uploads import Uploads
from openrl.daemon.work import (
    Bill,
    Finished,
    LoadState,
    ModelStatus,
    NewRun,
    NewSession,
    Pending,
    Raw,
    StorageBill,
    Work,
)
from openrl.errors import NotFound, OpenRLError
from openrl.keys.principal import Principal, may_read
from openrl.settings import BillingSettings
from openrl.store.records import (
    AuditEntry,
    Checkpoint,
    Completion,
    Run,
    RunPage,
    RunSummary,
    Sampler,
    SessionContent,
    SessionFilter,
    SessionPage,
)
from openrl.types import CheckpointKind, Op, RequestId, RunId, SamplePayload, SamplerId, SessionId

if TYPE_CHECKING:
    from openrl.checkpoints.incoming import Announcement
    from openrl.daemon.daemon import Daemon


class Guard:
    """What is a caller's own, and what it may read. An administrator may everything."""

    def __init__(self, daemon: Daemon, principal: Principal) -> None:
        self.daemon = daemon
        self.principal = principal

    @property
    def owner_filter(self) -> str | None:
        """Whose things a list shows: None, all, to an administrator."""
        return None if self.principal.is_admin else self.principal.owner

    def own(self, identity: str, absence: Callable[[str], OpenRLError]) -> None:
        """Raise `absence` unless a session, or what an id that begins with a session's names, is the caller's."""
        if not self.principal.is_admin and not self.principal.sees(self.daemon.owner_of(identity)):
            raise absence(identity)

    def own_session(self, session: SessionId) -> None:
        self.own(session, absent.session)

    def own_run(self, run: RunId) -> None:
        self.own(run, absent.run)

    def own_sampler(self, sampler: SamplerId) -> None:
        self.own(sampler, absent.sampler)

    async def readable(self, path: str, reader: str | None = None) -> Checkpoint:
        """A checkpoint that the caller, or `reader`, may read: own or published. Raises NotFound, BadRequest."""
        found = await self.daemon.checkpoint(path)
        if not may_read(reader or self.principal.reader, found.owner, public=found.public):
            raise absent.checkpoint(path)
        return found

    async def own_checkpoint(self, path: str) -> Checkpoint:
        """A checkpoint that the caller may change. Raises NotFound, BadRequest."""
        found = await self.daemon.checkpoint(path)
        if not self.principal.sees(found.owner):
            raise absent.checkpoint(path)
        return found

    def key(self, idempotency_key: str | None) -> str | None:
        """An idempotency key in its owner's own space: two owners that send the same one mean two things."""
        return idempotency_key and f"{self.principal.owner}/{idempotency_key}"


class Tenant:
    """The daemon for one caller. Raises `OpenRLError`s, as the daemon does."""

    def __init__(self, daemon: Daemon, principal: Principal) -> None:
        self._daemon = daemon
        self._guard = Guard(daemon, principal)
        self.principal = principal

    @property
    def rest(self) -> TenantRecords:
        return TenantRecords(self._guard)

    @property
    def life(self) -> TenantCheckpoints:
        return TenantCheckpoints(self._guard)

    @property
    def clients(self) -> TenantClients:
        return TenantClients(self._guard)

    @property
    def losses(self) -> TenantLosses:
        return TenantLosses(self._guard)

    @property
    def uploads(self) -> Uploads:
        """Which takes the owner with each call, and knows only what is theirs."""
        return self._daemon.uploads

    # -- the server --

    def models(self) -> list[ModelStatus]:
        return self._daemon.models()

    def status(self) -> dict[str, Any]:
        """The server's picture; of sessions and runs only the caller's own."""
        picture = self._daemon.status()
        if self._guard.owner_filter is not None:
            seen = self.principal.sees
            for kind in ("sessions", "runs"):
                picture[kind] = [entry for entry in picture[kind] if seen(self._daemon.owner_of(entry["id"]))]
            for model in picture["models"]:
                for kind in ("sessions", "runs"):
                    model["now"][kind] = [entry for entry in model["now"][kind] if seen(self._daemon.owner_of(entry))]
        return picture

    # -- sessions and runs --

    async def create_session(self, new: NewSession, idempotency_key: str | None) -> SessionId:
        owned = replace(new, owner=self.principal.owner)
        return await self._daemon.create_session(owned, self._guard.key(idempotency_key))

    async def heartbeat(self, session: SessionId) -> None:
        self._guard.own_session(session)
        await self._daemon.heartbeat(session)

    async def finish_session(self, session: SessionId, reason: str, detail: str | None) -> None:
        self._guard.own_session(session)
        await self._daemon.finish_session(session, reason, detail)

    def run(self, run: RunId) -> Run:
        self._guard.own_run(run)
        return self._daemon.run(run)

    async def create_run(self, new: NewRun, raw: Raw) -> RequestId:
        self._guard.own_session(new.session_id)
        return await self._daemon.create_run(new, raw)

    async def load_run(
        self,
        session: SessionId,
        model_seq_id: int,
        load: LoadState,
        base_model: str | None,
        user_metadata: Mapping[str, Any],
        raw: Raw,
    ) -> RequestId:
        self._guard.own_session(session)
        if not self.principal.is_admin or load.reader is not None:
            await self._guard.readable(load.path, load.reader)
        return await self._daemon.load_run(session, model_seq_id, load, base_model, user_metadata, raw)

    async def submit(self, run: RunId, seq: int, op: Op, work: Work | OpenRLError, raw: Raw) -> RequestId:
        self._guard.own_run(run)
        return await self._daemon.submit(run, seq, op, work, raw)

    async def unload(self, run: RunId, raw: Raw) -> RequestId:
        self._guard.own_run(run)
        return await self._daemon.unload(run, raw)

    def reader_for(self, run: str, path: str) -> str | None:
        """As whom a run reads a checkpoint for an administrator; None: as its own owner, as for anybody else."""
        owner_of = self._daemon.owner_of
        return self.principal.reader if self.principal.is_admin and owner_of(run) != owner_of(path) else None

    # -- samples and results --

    async def create_sampler(
        self, session: SessionId, seq: int, base_model: str | None, model_path: str | None
    ) -> SamplerId:
        self._guard.own_session(session)
        if model_path is not None and not self.principal.is_admin:
            await self._guard.readable(model_path)
        return await self._daemon.create_sampler(session, seq, base_model, model_path)

    def sampler(self, sampler: SamplerId) -> Sampler:
        self._guard.own_sampler(sampler)
        return self._daemon.sampler(sampler)

    async def submit_sample(self, sampler: SamplerId, seq: int, payload: SamplePayload, raw: Raw) -> RequestId:
        self._guard.own_sampler(sampler)
        return await self._daemon.submit_sample(sampler, seq, payload, raw)

    async def wait(self, request: RequestId, timeout: float) -> Finished | Pending:
        self._guard.own(request, absent.request)
        return await self._daemon.wait(request, timeout)

    async def checkpoint(self, path: str) -> Checkpoint:
        return await self._guard.readable(path)


class TenantClients:
    """The clients of one's samplers."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._clients = guard.daemon.clients

    async def join(self, sampler: SamplerId) -> int:
        self._guard.own_sampler(sampler)
        return await self._clients.join(sampler)

    async def cancel(self, request: RequestId) -> None:
        """What is not the caller's is left alone, as what does not exist is (4.6)."""
        if self._guard.principal.sees(self._guard.daemon.owner_of(request)):
            await self._clients.cancel(request)

    async def retrieved(self, sampler: SamplerId, requests: Sequence[RequestId]) -> None:
        """Who may only look cannot let go of results."""
        self._guard.own_sampler(sampler)
        await self._clients.retrieved(sampler, requests if self._guard.principal.can_work else ())

    async def completions(self, sampler: SamplerId, clone: int, after: int, timeout: float) -> list[Completion]:
        self._guard.own_sampler(sampler)
        return await self._clients.completions(sampler, clone, after, timeout)


class TenantLosses:
    """One's custom losses."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._losses = guard.daemon.losses

    @property
    def served(self) -> bool:
        return self._losses.served

    async def create(self, session: SessionId, seq: int, loss: LossProgram | OpenRLError, raw: Raw) -> RequestId:
        self._guard.own_session(session)
        return await self._losses.create(session, seq, loss, raw)


class TenantRecords:
    """Lists and bills of what is one's own. `everyone`: an administrator's lists hold what is others', too."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._rest = guard.daemon.rest

    @property
    def prices(self) -> BillingSettings:
        return self._rest.prices

    def _whose(self, everyone: bool) -> str | None:
        return self._guard.owner_filter if everyone else self._guard.principal.owner

    async def run(self, run: RunId) -> RunSummary:
        self._guard.own_run(run)
        return await self._rest.run(run)

    async def runs(self, limit: int, offset: int, project: str | None, *, everyone: bool) -> RunPage:
        return await self._rest.runs(limit, offset, project, self._whose(everyone))

    async def sessions(self, limit: int, offset: int, *, everyone: bool) -> list[SessionId]:
        return await self._rest.sessions(limit, offset, self._whose(everyone))

    async def session(self, session: SessionId) -> SessionContent:
        self._guard.own_session(session)
        return await self._rest.session(session)

    async def search(self, wanted: SessionFilter, limit: int) -> SessionPage:
        if (only := self._guard.owner_filter) is not None:
            wanted = replace(wanted, owners=(only,) if wanted.owners is None or only in wanted.owners else ())
        return SessionPage([], more=False) if wanted.owners == () else await self._rest.search(wanted, limit)

    async def assign_project(self, session: SessionId, project: str) -> None:
        self._guard.own_session(session)
        await self._rest.assign_project(session, project)

    async def audit(self, resource: str | None, day: date | None) -> list[AuditEntry]:
        return await self._rest.audit(resource, day, self._guard.owner_filter)

    async def bill(self, starting_on: datetime, ending_before: datetime) -> Bill:
        return await self._rest.bill(starting_on, ending_before, self._guard.owner_filter)

    async def storage(self, project: str | None) -> list[StorageBill]:
        return await self._rest.storage(project, self._guard.owner_filter)


class TenantCheckpoints:
    """One's checkpoints, and the published ones of others to read."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._life = guard.daemon.life

    async def page(self, limit: int, offset: int, hidden: Collection[CheckpointKind] = ()) -> Page:
        return await self._life.page(limit, offset, hidden, self._guard.owner_filter)

    async def of_run(self, run: RunId, hidden: Collection[CheckpointKind] = ()) -> Page:
        """Of a run without a session, whose checkpoints were found on disk, the checkpoints say whose it is."""
        principal, owner = self._guard.principal, self._guard.daemon.owner_of(run)
        if owner is not None and not principal.sees(owner):
            raise absent.run(run)
        page = await self._life.of_run(run, hidden)
        if not all(principal.sees(checkpoint.owner) for checkpoint in page.checkpoints):
            raise absent.run(run)
        return page

    async def find(self, path: str) -> Checkpoint:
        return await self._guard.readable(path)

    async def announcement(self, path: str) -> Announcement:
        return await self._life.announcement((await self._guard.readable(path)).path)

    def folder(self, folder: str) -> Path:
        """Of a checkpoint that was found before."""
        return self._life.folder(folder)

    def files(self, checkpoint: Checkpoint) -> list[Path]:
        return self._life.files(checkpoint)

    def hold(self, folder: str) -> AbstractContextManager[None]:
        return self._life.hold(folder)

    async def publish(self, path: str, public: bool) -> None:
        await self._life.publish((await self._guard.own_checkpoint(path)).path, public)

    async def set_ttl(self, path: str, ttl: int | None) -> None:
        await self._life.set_ttl((await self._guard.own_checkpoint(path)).path, ttl)

    async def delete(self, path: str) -> None:
        """Idempotent for what was the caller's; whose a deleted checkpoint was, its run's session says."""
        try:
            await self._guard.own_checkpoint(path)
        except NotFound:
            self._guard.own(path, absent.checkpoint)
        await self._life.delete(path)

    async def copy(self, source: str, into: InProject | InSession, ttl: int | None, reader: str | None) -> str:
        """`reader` is whose right to read the source is used, if not the caller's."""
        if reader is not None or not self._guard.principal.is_admin:
            await self._guard.readable(source, reader)
        if isinstance(into, InSession):
            self._guard.own_session(into.session)
        else:
            key = self._guard.key(into.idempotency_key)
            into = replace(into, owner=self._guard.principal.owner, idempotency_key=key)
        return await self._life.copying.copy(source, into, ttl)

    async def adopt(self, folder: str) -> Checkpoint:
        return await self._life.copying.adopt(folder)
