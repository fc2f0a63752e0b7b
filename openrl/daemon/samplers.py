"""Samplers: what each points at, and the samples under way. They need no order: a sampler's weights never change."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from openrl.backends.base import SampleJob
from openrl.daemon import absent
from openrl.daemon.codec import Codec
from openrl.daemon.futures import Futures, request_id
from openrl.daemon.ledger import note_sample, sampled_tokens
from openrl.daemon.models import ModelPool
from openrl.daemon.quotas import Quotas
from openrl.daemon.sample_counts import SampleCounts
from openrl.daemon.shares import Entitlements
from openrl.daemon.tasks import Tasks
from openrl.daemon.timing import Timing
from openrl.daemon.work import Raw
from openrl.errors import BackendFault, Busy, Cancelled, NotReady, OpenRLError, WorkerDied
from openrl.store import audit, samplers
from openrl.store.db import Database
from openrl.store.records import Sampler, SessionState
from openrl.types import AdapterRef, Op, RequestId, SampleOutput, SamplePayload, SamplerId, SessionId, session_of
from openrl.validation import check_sample
from openrl.workers.messages import Stopwatch

log = logging.getLogger(__name__)

_MAX_TRIES = 3  # times a sample is drawn again because its worker died


def sampler_id(session: SessionId, seq: int) -> SamplerId:
    """The id of a session's sampler number `seq`; by convention of the wire."""
    return SamplerId(f"{session}:sample:{seq}")


class Samplers:
    """All samplers by id."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._samplers: dict[SamplerId, Sampler] = {}

    def add(self, sampler: Sampler) -> None:
        self._samplers[sampler.id] = sampler

    async def create(self, sampler: Sampler) -> SamplerId:
        """Commit a sampler; a retry gets the same id."""

        def write(db: sqlite3.Connection) -> bool:
            new = samplers.insert(db, sampler)
            if new and sampler.model_path is not None:
                audit.write(
                    db,
                    "checkpoint_read",
                    session=sampler.session_id,
                    path=sampler.model_path,
                    purpose="sample",
                    sampler_id=sampler.id,
                )
            return new

        if await self._db.run(write):
            self.add(sampler)
        return sampler.id

    def get(self, sampler: SamplerId) -> Sampler:
        """Raises NotFound."""
        found = self._samplers.get(sampler)
        if found is None:
            raise absent.sampler(sampler)
        return found

    def __len__(self) -> int:
        return len(self._samplers)

    def __contains__(self, sampler: SamplerId) -> bool:
        return sampler in self._samplers


@dataclass(frozen=True, slots=True)
class _Drawing:
    """A sample that can still be cancelled."""

    sampler: Sampler
    payload: SamplePayload
    task: asyncio.Task[None]
    timing: Timing


class Sampling:
    """The samples under way: straight to the worker, which batches continuously and sees to it that sessions share."""

    def __init__(
        self,
        held: Samplers,
        pool: ModelPool,
        futures: Futures,
        codec: Codec,
        checkpoints: Path,
        max_inflight: int,
        quotas: Quotas,
        entitlements: Entitlements,
    ) -> None:
        self._samplers = held
        self._pool = pool
        self._futures = futures
        self._codec = codec
        self._checkpoints = checkpoints
        self._max_inflight = max_inflight
        self._quotas = quotas
        self._entitlements = entitlements
        self.counts = SampleCounts()
        self._tasks = Tasks()
        self._drawing: dict[RequestId, _Drawing] = {}
        self._resting: dict[RequestId, _Drawing] = {}  # those of silent sessions

    @property
    def inflight(self) -> int:
        return len(self._tasks)

    async def submit(self, sampler: Sampler, seq: int, payload: SamplePayload, raw: Raw) -> RequestId:
        """Accept a sample; raises BadRequest, Busy (429: the SDK slows down) or NotReady."""
        model = await self._pool.admit(sampler.base_model)
        if model.failed is not None:
            raise model.failed
        if model.info is None:
            raise NotReady(f"model {model.name} is still being prepared ({model.detail}).")
        check_sample(payload, model.info)
        identity = request_id(sampler.id, seq)
        self._check_room(sampler.session_id)
        refused = self._quotas.reserve_sample(sampler.session_id, identity, payload)
        if await self._futures.accept(sampler.id, seq, Op.SAMPLE, raw):
            if refused is None:
                self.start(sampler, identity, payload)
            else:  # once accepted, so that its end has a number, which the poller goes by
                await self._futures.fail(identity, refused)
        elif not self._futures.is_pending(identity):
            self._quotas.release(identity)
        return identity

    def _check_room(self, session: SessionId) -> None:
        """Raises Busy for a session that has too much under way."""
        counts = self.counts.sessions()
        held, sessions = counts.get(session, 0), len(counts.keys() | {session})
        if self._entitlements.too_many_samples(held, self.inflight, sessions, self._max_inflight):
            raise Busy(f"{self.inflight} samples are under way, {held} of this session.", "Try again in a second.")

    def start(self, sampler: Sampler, request: RequestId, payload: SamplePayload) -> None:
        """Draw an accepted sample in the background, also one from before a restart."""
        if self._pool.serves(sampler.base_model):
            self.counts.add(request, self._pool.find(sampler.base_model).name)
        timing = Timing()
        work = self._draw(sampler, request, payload, timing)
        task = self._tasks.start(work, lambda error: self._fault(request, error))
        self._drawing[request] = _Drawing(sampler, payload, task, timing)

    async def attend(self, state_of: Callable[[SessionId], SessionState]) -> None:
        """Draw for nobody who is gone: samples of silent sessions leave the device until there is a sign of life, and
        those of finished sessions fail."""
        for request in [*self._drawing, *self._resting]:
            match state_of(session_of(request)):
                case SessionState.FINISHED:
                    await self.cancel(request, "because its session is finished")
                case SessionState.EXPIRED:
                    self._rest(request)
                case SessionState.ACTIVE:
                    self._resume(request)

    def _rest(self, request: RequestId) -> None:
        drawing = self._drawing.pop(request, None)
        if drawing is not None:
            drawing.task.cancel()  # which cancels it in the worker
            self.counts.end(request)
            self._resting[request] = drawing

    def _resume(self, request: RequestId) -> None:
        drawing = self._resting.get(request)
        if drawing is not None and drawing.task.done():
            del self._resting[request]
            self.start(drawing.sampler, request, drawing.payload)

    async def withdraw(self, model: str) -> None:
        """Take back the samples that a model's sampler has not begun: they wait until the model can be used again."""
        waiting = [request for held in self.counts.at(model).values() for request in held.waiting]
        tasks = [self._drawing[request].task for request in waiting if request in self._drawing]
        for request in waiting:
            self._rest(request)
        await asyncio.gather(*tasks, return_exceptions=True)
        for request in waiting:
            self._resume(request)

    async def cancel(self, request: RequestId, reason: str = "by its client") -> None:
        """Stop drawing a sample, whether it waits or runs, and let it fail. One that has ended, and any other id, is
        left alone: to cancel is no more than to say that nobody waits (4.6)."""
        drawing = self._drawing.pop(request, None) or self._resting.pop(request, None)
        if drawing is None:
            return
        drawing.task.cancel()  # which cancels it in the worker
        self.counts.end(request)
        timing = drawing.timing
        await self._futures.fail(
            request,
            Cancelled(f"the sample was cancelled {reason}."),
            dispatched_at=timing.dispatched_at,
            started_at=timing.started_at,
        )

    async def stop(self) -> None:
        """Drop what is under way; it is in the store and starts again with the next daemon."""
        await self._tasks.cancel()

    async def _draw(self, sampler: Sampler, request: RequestId, payload: SamplePayload, timing: Timing) -> None:
        adapter = None
        if sampler.folder is not None:
            adapter = AdapterRef(key=sampler.folder, folder=self._checkpoints / sampler.folder)
        job = SampleJob(request, payload, adapter, self._entitlements.weight(sampler.session_id))
        output = await self._outcome(sampler, job, timing)
        if isinstance(output, OpenRLError):
            await self._futures.fail(
                request, output, dispatched_at=timing.dispatched_at, started_at=timing.watch.started_at
            )
            return
        content_type, body = self._codec.encode_result(Op.SAMPLE, output)
        await self._futures.finish(
            request,
            content_type,
            body,
            dispatched_at=timing.dispatched_at,
            started_at=timing.started_at,
            effect=lambda db: note_sample(db, sampler, payload, output, timing),
        )
        self._quotas.spent(sampler.session_id, sampled_tokens(payload, output))

    async def _outcome(self, sampler: Sampler, job: SampleJob, timing: Timing) -> SampleOutput | OpenRLError:
        """Once this has returned it is too late to cancel."""
        try:
            return await self._try(sampler, job, timing)
        except OpenRLError as error:
            return error
        finally:
            self._drawing.pop(job.request, None)
            self.counts.end(job.request)

    async def _try(self, sampler: Sampler, job: SampleJob, timing: Timing) -> SampleOutput:
        tries = 0
        while True:
            try:
                model = self._pool.find(sampler.base_model)
                worker = await model.ready_worker()
                timing.dispatched_at = timing.sent_at = time.time()
                timing.watch = Stopwatch()
                model.claim()
                try:
                    output = await worker.sample(job, timing.watch)
                finally:
                    model.release()
                model.crashes = 0
                return output
            except WorkerDied:
                tries += 1
                if tries >= _MAX_TRIES:
                    raise
                self.counts.again(job.request)
                log.warning("sample %s is drawn again: its worker died", job.request)

    def _fault(self, request: RequestId, error: BaseException) -> None:
        """A bug of ours: whoever waits for the sample hears so."""
        fault = BackendFault(f"internal error: {type(error).__name__}: {error}", "The server's log has the traceback.")
        self._tasks.start(self._futures.fail(request, fault))
