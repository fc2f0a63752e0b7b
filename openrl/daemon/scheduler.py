"""The loop around the planner: whenever something changed, see what can go, and send it."""

from __future__ import annotations

import asyncio
import logging
import time

from openrl.daemon.execute import Executor, Member
from openrl.daemon.models import Model, ModelPool
from openrl.daemon.planner import Batch, Ready, plan
from openrl.daemon.recovery import Recovery
from openrl.daemon.runs import MUTATING, RunHandle, Runs
from openrl.daemon.tasks import Tasks
from openrl.errors import BackendFault, OpenRLError, WorkerDied
from openrl.types import Op

log = logging.getLogger(__name__)

_MAX_CRASHES = 2  # a request in hand at this many deaths of a worker is taken for their cause


class Scheduler:
    """Owns which batches are under way."""

    def __init__(
        self,
        runs: Runs,
        pool: ModelPool,
        executor: Executor,
        recovery: Recovery,
        *,
        budget: int,
        snapshot_seconds: float,
    ) -> None:
        self._runs = runs
        self._pool = pool
        self._executor = executor
        self._recovery = recovery
        self._budget = budget
        self._snapshot_seconds = snapshot_seconds
        self._changed = asyncio.Event()
        self._batches = Tasks()
        self._turn = 0
        self._stopping = False

    def wake(self) -> None:
        """Something changed: a request came, a batch ended, a model is ready."""
        self._changed.set()

    async def run(self) -> None:
        """Plan and dispatch until stopped."""
        while not self._stopping:
            await self._changed.wait()
            self._changed.clear()
            idle = [model.name for model in self._pool.models.values() if model.open and not model.busy]
            for batch in plan(self._ready(), idle, self._budget):
                self._dispatch(batch)

    async def stop(self, grace: float) -> None:
        """Dispatch nothing more; wait for the batches under way."""
        self._stopping = True
        self.wake()
        await self._batches.drain(grace)
        await self._batches.cancel()

    def _ready(self) -> list[Ready]:
        ready: list[Ready] = []
        for handle in self._runs.all():
            head = handle.queue.head()
            if head is None or handle.in_hand:
                continue
            try:
                model = self._pool.find(handle.run.base_model)
            except OpenRLError as error:
                handle.in_hand = True
                self._batches.start(self._refuse(handle, error))
                continue
            ready.append(
                Ready(handle.id, head.id, head.op, head.tokens, model.name, handle.served, alone=head.crashes > 0)
            )
        return ready

    def _dispatch(self, batch: Batch) -> None:
        model = self._pool.models[batch.model]
        model.busy = True
        self._turn += 1
        members: list[Member] = []
        for ready in batch.members:
            handle = self._runs.get(ready.run)
            head = handle.queue.head()
            assert head is not None
            handle.in_hand, handle.served = True, self._turn
            members.append((handle, head))
        self._batches.start(self._carry_out(model, members), lambda error: self._fault(members, error))

    async def _carry_out(self, model: Model, members: list[Member]) -> None:
        ended = False  # stays so at a bug of ours: the runs are then not taken up again before `_fault` has failed them
        try:
            worker = await model.ready_worker()
            assert model.info is not None
            await self._executor.run(members, worker, model.info)
            model.crashes = 0
            for handle, entry in members:
                await self._snapshot_if_due(handle, entry.op)
            ended = True
        except WorkerDied as error:
            await self._after_crash(members, error)
            ended = True
        except OpenRLError as error:  # the model cannot be served at all
            for handle, entry in members:
                await self._executor.fail(handle, entry, error)
            ended = True
        finally:
            model.busy = False
            if ended:
                self._release(members)
            self.wake()

    def _release(self, members: list[Member]) -> None:
        for handle, _ in members:
            handle.in_hand = False

    async def _after_crash(self, members: list[Member], error: WorkerDied) -> None:
        """What had not ended stays queued for the next worker, unless it seems to be what kills them."""
        for handle, entry in members:
            if handle.queue.head() is not entry:
                continue  # it had ended before the crash
            entry.crashes += 1
            if entry.crashes >= _MAX_CRASHES:
                log.error("request %s was in hand at %d crashes; it fails", entry.id, entry.crashes)
                await self._executor.fail(handle, entry, error)

    async def _snapshot_if_due(self, handle: RunHandle, op: Op) -> None:
        """Bound what a crash has to replay: after a load at once, else after a step when enough time has passed."""
        if op not in MUTATING or handle.worker is None:
            return
        age = time.monotonic() - handle.snapshot_at
        if op is Op.LOAD_STATE or (op is Op.OPTIM_STEP and age > self._snapshot_seconds):
            try:
                await self._recovery.snapshot(handle, handle.worker)
            except WorkerDied:
                raise
            except (OpenRLError, OSError) as error:  # a full disk, say: training goes on, a crash replays more
                handle.snapshot_at = time.monotonic()
                log.error("snapshot of %s failed: %s", handle.id, error)

    async def _refuse(self, handle: RunHandle, error: OpenRLError) -> None:
        """Fail everything that waits for a model that is not served any more."""
        while (head := handle.queue.head()) is not None:
            await self._executor.fail(handle, head, error)
        handle.in_hand = False

    def _fault(self, members: list[Member], error: BaseException) -> None:
        """A bug of ours in the middle of a batch: whoever waits for it hears so."""
        fault = BackendFault(f"internal error: {type(error).__name__}: {error}", "The server's log has the traceback.")
        self._batches.start(self._fail_all(members, fault))

    async def _fail_all(self, members: list[Member], fault: BackendFault) -> None:
        for handle, entry in members:
            if handle.queue.head() is entry:
                await self._executor.fail(handle, entry, fault)
        self._release(members)
        self.wake()
