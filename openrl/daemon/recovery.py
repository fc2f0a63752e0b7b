"""Snapshots and replay: how a run survives the end of the process that held its weights.

A run's state is its newest snapshot plus the accepted requests after it, whose payloads stay in the store until a
snapshot covers them. Training is deterministic up to float reordering, so replaying them gives the run back: after a
crash of a worker, a kill of the daemon, or a suspension. Results of replayed requests are not touched.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from openrl.backends.base import TrainItem
from openrl.checkpoints import layout
from openrl.checkpoints.commit import CheckpointFolders
from openrl.daemon import absent
from openrl.daemon.codec import Codec
from openrl.daemon.custom_losses import CustomLosses
from openrl.daemon.runs import RunHandle
from openrl.daemon.work import LoadState, OptimStep, Train
from openrl.errors import BackendFault, BadRequest
from openrl.store import checkpoints, requests, retired, runs
from openrl.store.db import Database
from openrl.store.records import Checkpoint, StoredRequest
from openrl.workers import messages
from openrl.workers.protocol import Worker

log = logging.getLogger(__name__)


async def _room_for_any(_handle: RunHandle, _worker: Worker) -> None:
    return None


class Recovery:
    """Brings runs onto devices and off them."""

    def __init__(self, db: Database, folders: CheckpointFolders, codec: Codec, losses: CustomLosses) -> None:
        self._db = db
        self._folders = folders
        self._codec = codec
        self._losses = losses
        # What has to leave a device before a run comes onto it (F6).
        self.make_room: Callable[[RunHandle, Worker], Awaitable[None]] = _room_for_any

    async def bring(self, handle: RunHandle, worker: Worker) -> None:
        """Make sure that the run's state is on `worker`. Raises `OpenRLError` if it cannot be brought back."""
        if handle.worker is worker:
            return
        await self.make_room(handle, worker)
        if handle.snapshot_folder is not None:
            source = self._folders.absolute(handle.snapshot_folder)
            await worker.call(messages.Load(handle.id, source, optimizer=True))
        else:
            await worker.call(messages.CreateRun(handle.id, handle.run.spec))
        # Without a snapshot number 0 counts too: a run that was made from a checkpoint began with loading it.
        covered = -1 if handle.snapshot_folder is None else handle.snapshot_seq
        journal = await self._db.run(lambda db: requests.journal(db, handle.id, covered))
        if journal:
            log.info(
                "replaying %d requests of %s after its snapshot at %d", len(journal), handle.id, handle.snapshot_seq
            )
        for request in journal:
            await self._replay(handle, worker, request)
        handle.worker = worker

    async def _replay(self, handle: RunHandle, worker: Worker, request: StoredRequest) -> None:
        work = await asyncio.to_thread(self._codec.decode_work, request.op, request.content_type, request.payload)
        match await self._losses.resolve(handle.run.session_id, work):
            case Train(payload, backward, program):
                item = TrainItem(request.id, handle.id, payload, backward, program)
                results = await worker.call(messages.TrainPass((item,)))
                assert isinstance(results, dict)
                if isinstance(error := results[request.id], Exception):
                    raise BackendFault(f"request {request.id} worked before and failed in its replay: {error}")
            case OptimStep(adam):
                try:
                    await worker.call(messages.OptimStep(handle.id, adam))
                except BadRequest:  # a non-finite gradient: it failed the first time too, and cleared the gradient
                    log.info("optim_step %s failed in its replay as it did before", request.id)
            case LoadState(path, optimizer):
                folder = await self._db.run(lambda db: retired.loaded_from(db, request.id))
                source = self._folders.absolute(folder or (await find_checkpoint(self._db, path)).folder)
                await worker.call(messages.Load(handle.id, source, optimizer=optimizer))
            case _:
                raise BackendFault(f"request {request.id} ({request.op}) cannot be replayed")

    async def snapshot(self, handle: RunHandle, worker: Worker) -> None:
        """Write down the run's state as it is after its last ended request, pending gradients included."""
        seq = handle.queue.next_seq - 1
        folder = layout.new_snapshot_folder(handle.id, seq)
        began = time.monotonic()
        staged = await asyncio.to_thread(self._folders.stage, folder)
        await worker.call(messages.Save(handle.id, staged, optimizer=True, gradients=True))
        await asyncio.to_thread(self._folders.commit_plain, staged, folder)
        await self._db.run(lambda db: runs.set_snapshot(db, handle.id, str(folder), seq))
        old = handle.snapshot_folder
        handle.snapshot_folder, handle.snapshot_seq, handle.snapshot_at = str(folder), seq, time.monotonic()
        handle.snapshot_took = handle.snapshot_at - began
        if old is not None:
            await asyncio.to_thread(self._folders.remove, old)

    async def suspend(self, handle: RunHandle) -> None:
        """Take a run off its device, keeping its state on disk; the next request brings it back."""
        worker = handle.worker
        if worker is None or not worker.alive or handle.in_hand:
            return
        handle.in_hand = True
        try:
            if handle.dirty:
                await self.snapshot(handle, worker)
            await worker.call(messages.DropRun(handle.id))
            handle.worker = None
        finally:
            handle.in_hand = False

    def remove_stray_snapshots(self, handle: RunHandle) -> None:
        """Remove snapshots that a crash left between writing the new one and removing the old one."""
        for folder in self._folders.snapshots(handle.id):
            if folder != handle.snapshot_folder:
                self._folders.remove(str(Path(folder)))


async def find_checkpoint(db: Database, path: str) -> Checkpoint:
    """A checkpoint by its `tinker://` path. Raises BadRequest for a malformed one, NotFound."""
    address = layout.parse(path)
    checkpoint = await db.run(lambda connection: checkpoints.get(connection, str(address)))
    if checkpoint is None or (checkpoint.expires_at is not None and checkpoint.expires_at < time.time()):
        raise absent.checkpoint(path)
    return checkpoint
