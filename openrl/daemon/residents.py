"""Carries out the plan of `residency`: loads models that have work, and puts others to sleep without losing theirs.

A model goes to sleep in order: it gets no new work, what it has in hand ends, samples that have not begun go back to
wait, its runs are written down, its worker ends. Whatever then asks for one of its runs brings it back by recovery.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterable
from contextlib import suppress

import psutil

from openrl.daemon.memory import gib
from openrl.daemon.models import Model, ModelPool
from openrl.daemon.recovery import Recovery
from openrl.daemon.residency import Phase, Plan, Resident, Rules, plan, thread_shares
from openrl.daemon.runs import Runs
from openrl.daemon.samplers import Sampling
from openrl.daemon.tasks import Tasks
from openrl.errors import BadRequest, ModelError, OpenRLError
from openrl.settings import EngineSettings
from openrl.store import runs as run_store
from openrl.store.db import Database

log = logging.getLogger(__name__)

_SOON_SECONDS = 0.5  # between two looks while somebody waits for memory
_LATER_SECONDS = 5.0
_LEAST_SECONDS = 0.02  # between two looks, whatever happens
_WORKING_SECONDS = 10.0  # without work, after which a model's CPU threads are the others'
_WAITING = frozenset({"asleep", "waiting"})


class Residents:
    """Owns the decision which models are in memory, and the turns that they take."""

    def __init__(
        self,
        pool: ModelPool,
        runs: Runs,
        sampling: Sampling,
        recovery: Recovery,
        db: Database,
        engine: EngineSettings,
    ) -> None:
        self._pool = pool
        self._runs = runs
        self._sampling = sampling
        self._recovery = recovery
        self._db = db
        self._rules = Rules(engine.model_turn_seconds, engine.model_idle_seconds)
        self._threads = engine.threads or psutil.cpu_count(logical=False) or 1
        self._changed = asyncio.Event()
        self._tasks = Tasks()
        pool.listener.changed = self._changed.set

    async def readmit(self) -> None:
        """Serve again what clients had chosen before a restart, as far as it may still be served."""
        for name in await self._db.run(run_store.base_models):
            with suppress(BadRequest):
                await self._pool.look_up(name)

    async def run(self) -> None:
        """Look whenever something changed, and by the clock, until cancelled."""
        for model in self._pool.models.values():
            if model.listed and model.info is None:
                self._pool.prepare(model)
        try:
            while True:
                self._changed.clear()
                self.look()
                await asyncio.sleep(_LEAST_SECONDS)
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._pace()):  # `wait_for` may swallow the cancelling (before 3.12)
                        await self._changed.wait()
        finally:
            await self._tasks.cancel()

    def look(self) -> None:
        """See who has work, and load and put to sleep what is to be."""
        self._decide_start()
        busy = self._note_work()
        now = time.monotonic()
        residents = [self._resident(model, model.name in busy) for model in self._pool.models.values()]
        capacity = self._pool.memory.capacity(sum(resident.held for resident in residents))
        planned = plan(residents, capacity, now, self._rules)
        for name in planned.too_large:
            self._refuse(self._pool.models[name], capacity)
        for name in planned.load:
            self._pool.load(self._pool.models[name])
        for name in planned.sleep:
            self._begin_sleep(self._pool.models[name])
        self._explain(residents, planned, capacity)
        self._share_threads(busy, now)

    # -- looking --

    def _pace(self) -> float:
        """Seconds until it is worth looking again, if nothing is told before."""
        models = self._pool.models.values()
        if not any(model.state in ("waiting", "suspending") for model in models):
            return min(_LATER_SECONDS, (self._rules.idle_seconds or math.inf) / 2)
        now = time.monotonic()
        ends = [model.awake_since + self._rules.turn_seconds - now for model in models if model.state == "ready"]
        return min([_SOON_SECONDS, *(max(0.0, end) for end in ends if end > -_LEAST_SECONDS)])

    def _decide_start(self) -> None:
        """Listed models are loaded at the start, in their order, as far as they fit; the others on their first use.

        A single one is loaded in any case, and so is one that does not fit even alone: to be told so at once.
        """
        listed = [model for model in self._pool.models.values() if model.listed]
        held = [(self._pool.held(model), self._pool.need(model)) for model in listed if model.at_start]
        capacity = self._pool.memory.capacity(sum(now for now, _ in held))
        free = capacity - sum(max(both) for both in held)
        for model in listed:
            if model.at_start is not None or model.info is None:
                continue
            need = self._pool.need(model)
            model.at_start = len(listed) == 1 or need <= free or need > capacity
            if model.at_start:
                free -= need
            else:
                self._pool.listener.postponed(model)

    def _note_work(self) -> set[str]:
        """Names of the models that have work, in hand or waiting; from when on they are waited for is noted."""
        busy = self._with_work()
        now = time.monotonic()
        for name in busy:
            model = self._pool.models[name]
            if model.state not in _WAITING:
                model.used_at, model.last_used = now, time.time()
            elif model.info is None:
                self._pool.prepare(model)
            elif model.wanted_since is None:
                model.wanted_since = now
        for model in self._pool.models.values():
            if model.state in _WAITING and model.name not in busy:  # whoever asked has given up
                model.state, model.detail, model.wanted_since = "asleep", "", None
        return busy

    def _with_work(self) -> set[str]:
        pool = self._pool
        waiting = {handle.run.base_model for handle in self._runs.all() if handle.queue.head() is not None}
        busy = {pool.find(name).name for name in waiting if pool.serves(name)}
        for model in pool.models.values():
            first = model.at_start and not model.loads and model.state in _WAITING
            if first or model.claims or self._sampling.counts.at(model.name):
                busy.add(model.name)
        return busy

    def _resident(self, model: Model, busy: bool) -> Resident:
        return Resident(
            name=model.name,
            phase=model.phase,
            need=self._pool.need(model),
            held=self._pool.held(model),
            wanted_since=model.wanted_since,
            busy=busy,
            awake_since=model.awake_since,
            used_at=model.used_at,
            load_seconds=model.load_seconds,
        )

    # -- doing --

    def _refuse(self, model: Model, capacity: int) -> None:
        """A model does not fit even alone. One that has been loaded before waits until it does: what it has accepted is
        not to be lost because another program takes the memory for a while."""
        try:
            assert model.info is not None  # its size is known
            self._pool.memory.check(model.name, model.info, capacity)
        except ModelError as error:
            if not model.loads:
                self._pool.fail(model, error)
            else:
                model.state, model.detail = "waiting", str(error)

    def _begin_sleep(self, model: Model) -> None:
        log.info("%s is put to sleep", model.name)
        self._pool.leave(model)  # at once, so that nothing new comes in between

        def failed(_: BaseException) -> None:  # a bug of ours; the model must not stay half asleep
            self._tasks.start(self._pool.unload(model))

        self._tasks.start(self._put_to_sleep(model), failed)

    async def _put_to_sleep(self, model: Model) -> None:
        worker = model.worker
        await self._sampling.withdraw(model.name)
        while model.claims:
            await asyncio.sleep(_LEAST_SECONDS)
        for handle in self._runs.all():
            if handle.worker is worker and worker is not None:
                try:
                    await self._recovery.suspend(handle)
                except (OpenRLError, OSError) as error:  # the journal still has what the snapshot would have held
                    log.warning("run %s could not be written down: %s", handle.id, error)
        await self._pool.unload(model)

    def _explain(self, residents: Iterable[Resident], planned: Plan, capacity: int) -> None:
        """Say what each model that waits is waiting for."""
        free = capacity - sum(resident.charge for resident in residents)
        holders = [resident.name for resident in residents if resident.phase is not Phase.ASLEEP]
        for model in self._pool.models.values():
            if model.state in _WAITING and model.wanted_since is not None and model.name not in planned.too_large:
                need = gib(self._pool.need(model))
                model.state = "waiting"
                model.detail = f"it needs {need}, of {gib(capacity)} {gib(max(0, free))} are free"
                if holders:
                    model.detail += f"; the turn of {' and '.join(holders)} comes first"

    def _share_threads(self, busy: set[str], now: float) -> None:
        """Divide the CPU threads among the models that work, or did a moment ago; the others keep what they had."""
        models = [model for model in self._pool.models.values() if model.phase is not Phase.ASLEEP]
        working = [
            model.name
            for model in models
            if model.name in busy or model.phase is Phase.OPENING or now - model.used_at < _WORKING_SECONDS
        ]
        for name, threads in thread_shares(working, self._threads).items():
            if self._pool.models[name].threads != threads:
                self._pool.use_threads(self._pool.models[name], threads)
