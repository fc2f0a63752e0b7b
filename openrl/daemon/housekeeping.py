"""What happens by the clock: silent sessions, finished sessions, missing requests, old results, old checkpoints."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

from openrl.checkpoints.commit import CheckpointFolders
from openrl.daemon.checkpoint_life import CheckpointLife
from openrl.daemon.execute import Executor
from openrl.daemon.recovery import Recovery
from openrl.daemon.runs import RunHandle, Runs
from openrl.daemon.samplers import Sampling
from openrl.daemon.sessions import Sessions
from openrl.errors import OpenRLError, WorkerDied
from openrl.settings import DaemonSettings
from openrl.store import requests, runs
from openrl.store.db import Database
from openrl.store.records import RunState
from openrl.workers import messages

log = logging.getLogger(__name__)

_EVERY_SECONDS = 5.0


class Housekeeping:
    """Runs beside the scheduler; touches a run only when nobody has it in hand."""

    def __init__(
        self,
        db: Database,
        sessions: Sessions,
        runs: Runs,
        sampling: Sampling,
        executor: Executor,
        recovery: Recovery,
        folders: CheckpointFolders,
        life: CheckpointLife,
        settings: DaemonSettings,
    ) -> None:
        self._db = db
        self._sessions = sessions
        self._runs = runs
        self._sampling = sampling
        self._executor = executor
        self._recovery = recovery
        self._folders = folders
        self._life = life
        self._settings = settings

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_SECONDS)
            await self.once()

    async def once(self) -> None:
        """One round; also called by tests."""
        for session in await self._sessions.expire_silent():
            log.info("session %s has been silent; its runs leave the device", session)
            for handle in self._runs.of_session(session):
                await self._suspend(handle)
        await self._sampling.attend(self._sessions.state_of)
        for handle in self._runs.all():
            await self._check_gap(handle)
            if handle.run.state is RunState.LIVE and self._sessions.is_finished(handle.run.session_id):
                await self._close(handle)
        before = time.time() - self._settings.result_ttl
        await self._db.run(lambda db: requests.expire(db, before))
        await self._life.expire(remember=self._settings.result_ttl)

    async def _suspend(self, handle: RunHandle) -> None:
        try:
            await self._recovery.suspend(handle)
        except (OpenRLError, OSError) as error:
            log.warning("run %s stays on its device: %s", handle.id, error)

    async def _check_gap(self, handle: RunHandle) -> None:
        """A request that never arrives breaks the run rather than being skipped: its gradient would be missing (O7).

        The clock runs only while something waits behind the hole (O10).
        """
        if not handle.queue.has_gap:
            handle.gap_since = None
            return
        now = time.monotonic()
        handle.gap_since = handle.gap_since or now
        if now - handle.gap_since > self._settings.gap_timeout:
            reason = f"request {handle.queue.next_seq} never arrived, while later ones wait for it."
            await self._executor.break_run(handle, reason)

    async def _close(self, handle: RunHandle) -> None:
        """The client said that it is done: once nothing waits, the run's memory and snapshot go; checkpoints stay."""
        if handle.in_hand or len(handle.queue):
            return
        if handle.worker is not None and handle.worker.alive:
            with suppress(WorkerDied):  # or it was put to sleep in between: the run is off its device in any case
                await handle.worker.call(messages.DropRun(handle.id))
        handle.worker = None
        handle.set_state(RunState.CLOSED)
        await self._db.run(lambda db: runs.close(db, handle.id))
        if handle.snapshot_folder is not None:
            await asyncio.to_thread(self._folders.remove, handle.snapshot_folder)
            handle.snapshot_folder = None
        await self._life.discard_ephemeral(handle.id)
