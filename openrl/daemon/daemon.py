"""The daemon's face: everything the HTTP layer may ask of it, in typed calls on one event loop.

It owns no state of its own but the list of parts; each part owns one thing (`docs/architecture.md` has the table).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sqlite3
import time
from collections.abc import Mapping
from typing import Any

from openrl.checkpoints.commit import CheckpointFolders
from openrl.checkpoints.layout import parse
from openrl.daemon.checkpoint_life import CheckpointLife
from openrl.daemon.checks import check_new_run, check_work, spec_of
from openrl.daemon.clients import Clients
from openrl.daemon.codec import Codec
from openrl.daemon.copying import Copying
from openrl.daemon.custom_losses import CustomLosses
from openrl.daemon.disposal import Disposal
from openrl.daemon.execute import Executor
from openrl.daemon.full_runs import FullRuns
from openrl.daemon.futures import Futures, request_id
from openrl.daemon.health import Health
from openrl.daemon.housekeeping import Housekeeping
from openrl.daemon.keys import Keys
from openrl.daemon.metrics import Metrics
from openrl.daemon.models import ModelPool
from openrl.daemon.quotas import Quotas
from openrl.daemon.records import Records
from openrl.daemon.recovery import Recovery, find_checkpoint
from openrl.daemon.residents import Residents
from openrl.daemon.runs import Entry, RunHandle, Runs, new_run
from openrl.daemon.samplers import Samplers, Sampling, sampler_id
from openrl.daemon.saving import Saving, check_drawable, check_loadable
from openrl.daemon.scheduler import Scheduler
from openrl.daemon.sessions import Sessions
from openrl.daemon.shares import Entitlements
from openrl.daemon.start import restore
from openrl.daemon.status import Status
from openrl.daemon.uploads import Uploads
from openrl.daemon.waiting import Waiting
from openrl.daemon.wind_down import wind_down
from openrl.daemon.work import Finished, LoadState, ModelStatus, NewRun, NewSession, Pending, Raw, Unload, Work
from openrl.errors import BadRequest, NotReady, OpenRLError
from openrl.settings import Settings
from openrl.store import audit
from openrl.store import runs as run_store
from openrl.store.db import Database
from openrl.store.records import Checkpoint, Run, RunState, Sampler
from openrl.types import Op, RequestId, RunId, SamplePayload, SamplerId, SessionId, session_of

log = logging.getLogger(__name__)


class Daemon:
    """Sessions, runs, samplers, queues and futures. Raises `OpenRLError`s; never hangs a caller."""

    def __init__(self, settings: Settings, pool: ModelPool, codec: Codec, *, custom_losses: bool = True) -> None:
        """`custom_losses`: whether the backend of the pool's workers runs them."""
        self._settings = settings
        self._codec = codec
        self._pool = pool
        self._db = Database(settings.data_dir / "openrl.sqlite")
        self._folders = CheckpointFolders(settings.data_dir / "checkpoints")
        limits = settings.daemon
        self._sessions = Sessions(self._db, limits.session_timeout)
        self.rest = Records(self._db, self._sessions, settings.billing)
        self._runs = Runs()
        self.keys = Keys(self._db, settings.server.keys_file)
        self.quotas = Quotas(self._db, self.keys.ring, self._sessions, self._runs)
        self._samplers = Samplers(self._db)
        self._futures = Futures(self._db)
        self.losses = CustomLosses(self._db, codec, self._futures, self._sessions, served=custom_losses)
        self._recovery = Recovery(self._db, self._folders, codec, self.losses)
        self.full = FullRuns(self._runs, self._sessions, pool, self._recovery.suspend)
        self._recovery.make_room = self.full.make_room
        disposal = Disposal(self._db, self._folders)
        copying = Copying(self._db, self._folders, self._sessions, self._runs)
        copying.check_room = self.quotas.check_room
        self.life = CheckpointLife(self._db, self._folders, self._runs, disposal, copying)
        self.uploads = Uploads(
            settings.data_dir, self._db, self._folders, self._sessions, self._runs, pool, copying, limits
        )
        self.uploads.check_room = self.quotas.check_room
        saving = Saving(self._db, self._folders, disposal, self._samplers, pool, self.quotas)
        executor = Executor(codec, self._futures, self._recovery, saving)
        executor.spent = self.quotas.spent
        entitlements = Entitlements(self._sessions, settings.sharing)
        self._scheduler = Scheduler(
            self._runs,
            pool,
            executor,
            self._recovery,
            entitlements.weight,
            budget=settings.engine.max_batch_tokens,
            snapshot_seconds=limits.snapshot_seconds,
        )
        self._sampling = Sampling(
            self._samplers,
            pool,
            self._futures,
            codec,
            self._folders.root,
            limits.max_inflight_samples,
            self.quotas,
            entitlements,
        )
        self.overview = Status(pool, self._sessions, self._runs, self._scheduler, self._sampling, entitlements)
        waiting = Waiting(pool, self._sessions, self._runs, self._samplers, self._scheduler, self._sampling)
        self._futures.describe = waiting.describe
        self.clients = Clients(self._db, self._samplers, self._sampling)
        self.clients.noticed = self._sessions.noticed
        self._futures.ended = self._ended
        self._housekeeping = Housekeeping(
            self._db,
            self._sessions,
            self._runs,
            self._sampling,
            executor,
            self._recovery,
            self._folders,
            self.life,
            limits,
        )
        self.residents = Residents(pool, self._runs, self._sampling, self._recovery, self._db, settings.engine)
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self._wound_down = False
        self.health = Health(self._db, pool, lambda: self._stopping)
        watched = (self._db, pool, self._runs, self._samplers, self._sampling, self.health)
        self.metrics = Metrics(*watched, settings.data_dir)

    # -- life --

    async def start(self) -> None:
        """Take over what an earlier daemon left, start the workers, and go on with what was queued."""
        self._pool.listener.usable = self._scheduler.wake
        self._pool.listener.turns = self.overview.note
        await self.keys.load()
        await self.residents.readmit()
        await restore(
            self._db,
            self._folders,
            self._codec,
            self._sessions,
            self._runs,
            self._samplers,
            self._futures,
            self._sampling,
            self._recovery,
            self.losses,
        )
        await self.quotas.load()
        self.clients.open()
        living = (self._housekeeping.run(), self.residents.run(), self.uploads.keep_tidy(), self.keys.watch())
        self._tasks = [asyncio.create_task(part) for part in (self._scheduler.run(), *living)]
        self._scheduler.wake()

    def refuse_work(self) -> None:
        """Take no new work from now on; results are still given out."""
        self._stopping = True

    def begin_stop(self) -> None:
        """Refuse new work and let go of everyone who waits; they ask again once there is a daemon again."""
        self.refuse_work()
        self._futures.stop()
        self.clients.stop()
        self.uploads.stop()

    async def wind_down(self, seconds: float) -> None:
        """Let the operations in hand end, write down every run's state and end the workers, within about `seconds`.

        Calls are answered meanwhile, and the results of what ends are given out; then those who wait are let go.
        """
        self.refuse_work()
        for task in self._tasks[1:]:  # housekeeping; the scheduler sees to its own end
            task.cancel()
        await wind_down(self._sampling, self._scheduler, self._runs, self._recovery, self._pool, seconds)
        self.begin_stop()
        self._wound_down = True

    async def stop(self) -> None:
        """Wind down if that is not done yet, and close the store."""
        if not self._wound_down:
            self.begin_stop()
            await self.wind_down(self._settings.daemon.shutdown_grace)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._db.close()

    async def abandon(self) -> None:
        """Leave as a kill would, writing nothing more: for tests of what a kill leaves behind."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._sampling.stop()
        await self._scheduler.stop(0)
        await self._pool.close()
        self._db.close()

    # -- sessions --

    async def create_session(self, new: NewSession, idempotency_key: str | None) -> SessionId:
        """Open a session; a retry under the same key gets the same one."""
        self._check_running()
        return await self._sessions.create(new, idempotency_key)

    async def heartbeat(self, session: SessionId) -> None:
        """Raises NotFound, or Gone when the session is finished."""
        await self._sessions.heartbeat(session)

    async def finish_session(self, session: SessionId, reason: str, detail: str | None) -> None:
        """The client is done; idempotent."""
        await self._sessions.finish(session, reason, detail)

    # -- models --

    def models(self) -> list[ModelStatus]:
        """An entry for each served name and alias."""
        return self._pool.statuses()

    # -- runs --

    def run(self, run: RunId) -> Run:
        """Raises NotFound."""
        return self._runs.get(run).run

    async def create_run(self, new: NewRun, raw: Raw) -> RequestId:
        """Accept a create_model, idempotent by (session, model_seq_id). Bad content fails the future.

        Raises NotFound for an unknown session, BadRequest for an unknown base model.
        """
        self._check_running()
        session = self._sessions.active(new.session_id)
        model = await self._pool.admit(new.base_model)
        spec = spec_of(new, secrets.randbits(31) if new.seed is None else new.seed)
        refused = check_new_run(new, spec, model.info)
        run = new_run(session, new.model_seq_id, new.base_model, spec, new.user_metadata)
        return await self._accept_run(run, Op.CREATE_RUN, None, raw, refused)

    async def load_run(
        self,
        session: SessionId,
        model_seq_id: int,
        load: LoadState,
        base_model: str | None,
        user_metadata: Mapping[str, Any],
        raw: Raw,
    ) -> RequestId:
        """The session-addressed `load_weights` (7.3): makes run `{session}:train:{model_seq_id}` from a checkpoint."""
        self._check_running()
        opened = self._sessions.active(session)
        checkpoint = await find_checkpoint(self._db, load.path)
        model = await self._pool.admit(checkpoint.base_model)
        if base_model is not None and await self._pool.admit(base_model) is not model:
            raise BadRequest(
                f"base_model is {base_model!r}, but {load.path} was trained on {checkpoint.base_model!r}.",
                "Leave base_model out, or name the checkpoint's own.",
            )
        check_loadable(checkpoint, load)
        run = new_run(opened, model_seq_id, checkpoint.base_model, checkpoint.spec, user_metadata)
        return await self._accept_run(run, Op.LOAD_STATE, load, raw, None)

    async def _accept_run(
        self, run: Run, op: Op, work: Work | None, raw: Raw, refused: OpenRLError | None
    ) -> RequestId:
        """Making a run is its request number 0."""
        with self.quotas.opening(run) as exceeded, self.full.opening(run) as taken:
            return await self._accept_opening(run, op, work, raw, refused or exceeded or taken)

    async def _accept_opening(
        self, run: Run, op: Op, work: Work | None, raw: Raw, refused: OpenRLError | None
    ) -> RequestId:
        def effect(db: sqlite3.Connection) -> None:
            if refused is None:
                run_store.insert(db, run)
                audit.write(db, "run_create", session=run.session_id, run=run.id, base_model=run.base_model)

        if await self._futures.accept(run.id, 0, op, raw, refused, effect) and refused is None:
            handle = self._runs.add(run)
            handle.queue.push(0, Entry(request_id(run.id, 0), 0, op, work))
            self._scheduler.wake()
        return request_id(run.id, 0)

    async def submit(self, run: RunId, seq: int, op: Op, work: Work | OpenRLError, raw: Raw) -> RequestId:
        """Accept one request of a run, idempotent by (run, seq) whatever the body says (4.7).

        `work` may be an error: the request is then stored as failed and uses its seq up (O5, O6). Content is checked
        here too, against the model, and a bad one is stored as failed. Raises only NotFound (unknown run or finished
        session), BadRequest (seq < 1) and NotReady (stopping).
        """
        self._check_running()
        handle = self._runs.get(run)
        self._sessions.active(handle.run.session_id)
        if seq < 1:
            raise BadRequest(f"seq_id is {seq}; the numbers of a run start at 1.")
        work = await self._with_program(handle.run.session_id, work)
        refused = await self._refusal(handle, seq, work)
        if await self._futures.accept(run, seq, op, raw, refused):
            if refused is None:
                assert not isinstance(work, OpenRLError)
                handle.queue.push(seq, Entry(request_id(run, seq), seq, op, work))
            else:
                await self._use_up(handle, seq)
            self._scheduler.wake()
        elif not self._futures.is_pending(request_id(run, seq)):
            self.quotas.release(request_id(run, seq))
        return request_id(run, seq)

    async def _with_program(self, session: SessionId, work: Work | OpenRLError) -> Work | OpenRLError:
        try:
            return work if isinstance(work, OpenRLError) else await self.losses.resolve(session, work)
        except OpenRLError as error:
            return error

    async def _refusal(self, handle: RunHandle, seq: int, work: Work | OpenRLError) -> OpenRLError | None:
        """Why a request will not be run, if so."""
        if isinstance(work, OpenRLError):
            return work
        if handle.run.state in (RunState.BROKEN, RunState.CLOSED):
            return BadRequest(
                f"run {handle.id} is {handle.run.state}: {handle.run.reason or 'it was unloaded'}.",
                "Create a training client from its newest checkpoint.",
            )
        if seq < handle.queue.next_seq:
            return BadRequest(f"seq_id {seq} is in the past; the run is at {handle.queue.next_seq} (O8).")
        try:
            await check_work(work, (await self._pool.admit(handle.run.base_model)).info)
            self.full.claim(handle)
            self.quotas.reserve(handle.run.owner, request_id(handle.id, seq), work)
        except OpenRLError as error:
            return error
        return None

    async def _use_up(self, handle: RunHandle, seq: int) -> None:
        before = handle.queue.next_seq
        handle.queue.use_up(seq)
        if (after := handle.queue.next_seq) != before:
            await self._db.run(lambda db: run_store.set_cursor(db, handle.id, after, time.time()))

    async def unload(self, run: RunId, raw: Raw) -> RequestId:
        """Accept an `unload_model` that carries no seq_id (L2): it takes the run's next free one. Raises NotFound."""
        waiting = self._runs.get(run).queue.waiting()
        seq = waiting[-1].seq + 1 if waiting else self._runs.get(run).queue.next_seq
        return await self.submit(run, seq, Op.UNLOAD, Unload(), raw)

    # -- samplers --

    async def create_sampler(
        self, session: SessionId, seq: int, base_model: str | None, model_path: str | None
    ) -> SamplerId:
        """Open a sampling session, idempotent by (session, seq). Raises NotFound, BadRequest."""
        self._check_running()
        self._sessions.active(session)
        folder = None
        if model_path is not None:
            checkpoint = await find_checkpoint(self._db, model_path)
            check_drawable(checkpoint)
            base_model, folder = base_model or checkpoint.base_model, checkpoint.folder
            if await self._pool.admit(base_model) is not await self._pool.admit(checkpoint.base_model):
                raise BadRequest(f"base_model is {base_model!r}, but {model_path} is of {checkpoint.base_model!r}.")
        if base_model is None:
            raise BadRequest("create_sampling_session needs base_model or model_path.")
        await self._pool.admit(base_model)
        sampler = Sampler(sampler_id(session, seq), session, base_model, model_path, folder, time.time())
        return await self._samplers.create(sampler)

    def sampler(self, sampler: SamplerId) -> Sampler:
        """Raises NotFound."""
        return self._samplers.get(sampler)

    async def submit_sample(self, sampler: SamplerId, seq: int, payload: SamplePayload, raw: Raw) -> RequestId:
        """Accept a sample, idempotent by (sampler, seq). Raises BadRequest (content), NotFound, Busy, NotReady."""
        self._check_running()
        held = self._samplers.get(sampler)
        self._sessions.active(held.session_id)
        return await self._sampling.submit(held, seq, payload, raw)

    # -- futures and checkpoints --

    def owner_of(self, identity: str) -> str | None:
        """Whose a session, run, sampler, request or `tinker://` path is; None if its session is not known."""
        return self._sessions.owner_of(identity)

    def _ended(self, request: RequestId) -> None:
        self.clients.tell(request)
        self.quotas.release(request)

    async def wait(self, request: RequestId, timeout: float) -> Finished | Pending:
        """Wait on an event until the request ends or `timeout` seconds pass. Raises Gone for an unknown id."""
        self._sessions.noticed(session_of(request))
        return await self._futures.wait(request, timeout)

    async def checkpoint(self, path: str) -> Checkpoint:
        """Raises NotFound, BadRequest for a malformed path."""
        return await find_checkpoint(self._db, str(parse(path)))

    def status(self) -> dict[str, Any]:
        """A JSON-ready picture of the server: models, runs, queue, device."""
        return self.overview.picture()

    def _check_running(self) -> None:
        if self._stopping:
            raise NotReady("the server is stopping.", "It takes up its work again when it is started.")
