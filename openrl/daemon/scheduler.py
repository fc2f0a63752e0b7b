"""The loop around the planner: whenever something changed, see what can go, and send it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from openrl.daemon.execute import Executor, Member, all_of
from openrl.daemon.models import ModelPool
from openrl.daemon.planner import Batch, Ready, order, plan
from openrl.daemon.recovery import Recovery
from openrl.daemon.runs import MUTATING, RunHandle, Runs
from openrl.daemon.tasks import Tasks
from openrl.daemon.train_lane import InHand, TrainLane
from openrl.errors import BackendFault, OpenRLError, WorkerDied
from openrl.types import LoraSpec, Op, SessionId

log = logging.getLogger(__name__)

_LEAST_PAUSE = 19  # between snapshots of a run, in times of what one took
_MAX_CRASHES = 2  # a request in hand at this many deaths of a worker is taken for their cause


class Scheduler:
    """Owns which batches are under way."""

    def __init__(
        self,
        runs: Runs,
        pool: ModelPool,
        executor: Executor,
        recovery: Recovery,
        weight: Callable[[SessionId], float],
        *,
        budget: int,
        snapshot_seconds: float,
    ) -> None:
        self._runs = runs
        self._pool = pool
        self._executor = executor
        self._recovery = recovery
        self._weight = weight
        self._budget = budget
        self._snapshot_seconds = snapshot_seconds
        self._lanes: dict[str, TrainLane] = {}
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
            self._refuse_unserved()
            ready = self._ready()
            self._sync(ready, self._pool.models)
            devices = [self.lane(model.name).device() for model in self._pool.models.values() if model.open]
            if not {head.model for head in ready} <= {device.model for device in devices}:
                self._pool.listener.changed()  # a model that is not loaded has work
            for batch in plan(ready, devices, self._budget):
                patience = self.lane(batch.model).patience(batch, {head.run for head in ready})
                if patience:
                    asyncio.get_running_loop().call_later(patience, self.wake)
                else:
                    self._dispatch(batch)

    async def stop(self, grace: float) -> None:
        """Dispatch nothing more; wait for the batches under way."""
        self._stopping = True
        self.wake()
        await self._batches.drain(grace)
        await self._batches.cancel()

    def lane(self, model: str) -> TrainLane:
        """Training's side of a served model's device."""
        return self._lanes.setdefault(model, TrainLane(model, self._budget))

    def queue(self, model: str) -> list[Ready]:
        """The heads of runs that wait for a model's device, in the order in which they would go now."""
        ready = [head for head in self._ready() if head.model == model]
        self._sync(ready, [model])
        return list(order(ready, self.lane(model).device(), self._budget))

    def _sync(self, ready: list[Ready], models: Iterable[str]) -> None:
        for name in models:
            waiting = {head.session for head in ready if head.model == name}
            self.lane(name).sync(waiting, self._weight)

    def _refuse_unserved(self) -> None:
        """Let the requests fail whose models are not served any more."""
        for handle in self._runs.all():
            if handle.queue.head() is not None and not handle.in_hand:
                try:
                    self._pool.find(handle.run.base_model)
                except OpenRLError as error:
                    handle.in_hand = True
                    self._batches.start(self._refuse(handle, error))

    def _ready(self) -> list[Ready]:
        """Heads that can go now, of models that are served."""
        ready: list[Ready] = []
        for handle in self._runs.all():
            head = handle.queue.head()
            if head is None or handle.in_hand or not self._pool.serves(handle.run.base_model):
                continue
            ready.append(
                Ready(
                    run=handle.id,
                    session=handle.run.session_id,
                    request=head.id,
                    op=head.op,
                    tokens=head.tokens,
                    model=self._pool.find(handle.run.base_model).name,
                    served=handle.served,
                    alone=head.crashes > 0,
                )
            )
        return ready

    def _dispatch(self, batch: Batch) -> None:
        self._turn += 1
        members: list[Member] = []
        for ready in batch.members:
            handle = self._runs.get(ready.run)
            head = handle.queue.head()
            assert head is not None
            handle.in_hand, handle.served = True, self._turn
            members.append((handle, head))
        self._pool.models[batch.model].claim()
        in_hand = self.lane(batch.model).begin(batch, members)
        self._batches.start(self._carry_out(in_hand), lambda error: self._fault(in_hand, error))

    async def _carry_out(self, in_hand: InHand) -> None:
        model, members = self._pool.models[in_hand.batch.model], in_hand.members
        ended = False  # stays so at a bug of ours: the runs are then not taken up again before `_fault` has failed them
        try:
            worker = await model.ready_worker(claimed=True)
            assert model.info is not None
            weight = sum(self._weight(session) for session in in_hand.batch.underway.sessions)
            await self._executor.run(members, worker, model.info, weight, lambda: self._free(in_hand))
            model.crashes = 0
            await all_of(self._settle(in_hand, member) for member in members)
            ended = True
        except WorkerDied as error:
            await self._after_crash(members, error)
            ended = True
        except OpenRLError as error:  # the model cannot be served at all
            for handle, entry in members:
                if handle.queue.head() is entry:
                    await self._executor.fail(handle, entry, error)
            ended = True
        finally:
            model.release()
            self.lane(in_hand.batch.model).end(in_hand)
            if ended:
                self._release(in_hand)
            self.wake()

    def _free(self, in_hand: InHand) -> None:
        """The device has done its part of a batch: the next can go while this one's results are committed."""
        if not in_hand.batch.underway.alone:
            self.lane(in_hand.batch.model).free(in_hand)
            self.wake()

    async def _settle(self, in_hand: InHand, member: Member) -> None:
        """What is left to do for a run once its request has ended; it need not wait for the others of its batch."""
        handle, entry = member
        await self._snapshot_if_due(handle, entry.op)
        del in_hand.held[handle.id]
        handle.in_hand = False
        self.wake()

    def _release(self, in_hand: InHand) -> None:
        """Let go of the runs that have not been let go of one by one."""
        for handle, _ in in_hand.held.values():
            handle.in_hand = False
        in_hand.held.clear()

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
        """Bound what a crash has to replay: after a load at once, else after a step when enough time has passed.

        A whole model is gigabytes. So it is written down at most a twentieth of the time, and a load not at all: it
        can be replayed from its checkpoint, which is kept for that.
        """
        if op not in MUTATING or handle.worker is None:
            return
        age = time.monotonic() - handle.snapshot_at
        due = op is Op.OPTIM_STEP and age > max(self._snapshot_seconds, _LEAST_PAUSE * handle.snapshot_took)
        if due or (op is Op.LOAD_STATE and isinstance(handle.run.spec, LoraSpec)):
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

    def _fault(self, in_hand: InHand, error: BaseException) -> None:
        """A bug of ours in the middle of a batch: whoever waits for it hears so."""
        fault = BackendFault(f"internal error: {type(error).__name__}: {error}", "The server's log has the traceback.")
        self._batches.start(self._fail_all(in_hand, fault))

    async def _fail_all(self, in_hand: InHand, fault: BackendFault) -> None:
        for handle, entry in list(in_hand.held.values()):
            if handle.queue.head() is entry:
                await self._executor.fail(handle, entry, fault)
        self._release(in_hand)
        self.wake()
