"""Taking over what an earlier daemon left, however it ended."""

from __future__ import annotations

import logging
import sqlite3

from openrl.checkpoints.commit import CheckpointFolders
from openrl.daemon.codec import Codec
from openrl.daemon.custom_losses import CustomLosses
from openrl.daemon.futures import Futures
from openrl.daemon.recovery import Recovery
from openrl.daemon.runs import Entry, Runs
from openrl.daemon.samplers import Samplers, Sampling
from openrl.daemon.sessions import Sessions
from openrl.errors import OpenRLError
from openrl.store import checkpoints, requests, retired, runs, samplers, sessions
from openrl.store.db import Database
from openrl.store.records import Checkpoint, StoredRequest
from openrl.types import Op, RunId, SamplerId

log = logging.getLogger(__name__)


async def restore(
    db: Database,
    folders: CheckpointFolders,
    codec: Codec,
    held_sessions: Sessions,
    held_runs: Runs,
    held_samplers: Samplers,
    futures: Futures,
    sampling: Sampling,
    recovery: Recovery,
    losses: CustomLosses,
) -> None:
    """Sessions, runs and samplers as they were; queued requests queued again; leftovers on disk removed."""
    await reconcile_checkpoints(db, folders)
    held_sessions.restore(await db.run(sessions.all_sessions))
    for sampler in await db.run(samplers.all_samplers):
        held_samplers.add(sampler)
    for stored in await db.run(runs.all_runs):
        handle = held_runs.restore(stored)
        for seq in await db.run(lambda c, s=stored: requests.ended_seqs(c, s.run.id, s.next_seq)):
            handle.queue.use_up(seq)
        recovery.remove_stray_snapshots(handle)
    for request in await db.run(requests.queued):
        futures.restore(request.id)
        try:
            await _requeue(request, codec, held_runs, held_samplers, sampling, losses)
        except OpenRLError as error:
            await futures.fail(request.id, error)
            if RunId(request.scope) in held_runs:  # its number is used up, or the run would wait for it (O5)
                held_runs.get(RunId(request.scope)).queue.use_up(request.seq)


async def _requeue(
    request: StoredRequest,
    codec: Codec,
    held_runs: Runs,
    held_samplers: Samplers,
    sampling: Sampling,
    losses: CustomLosses,
) -> None:
    if request.op is Op.SAMPLE:
        payload = codec.decode_sample(request.content_type, request.payload)
        sampling.start(held_samplers.get(SamplerId(request.scope)), request.id, payload)
        return
    handle = held_runs.get(RunId(request.scope))
    work = None
    if request.op is not Op.CREATE_RUN:
        work = codec.decode_work(request.op, request.content_type, request.payload)
        work = await losses.resolve(handle.run.session_id, work)
    handle.queue.push(request.seq, Entry(request.id, request.seq, request.op, work))


async def reconcile_checkpoints(db: Database, folders: CheckpointFolders) -> None:
    """Make the rows agree with the folders, which are the truth: a crash may fall between the two."""
    folders.remove_leftovers()
    doomed = set(await db.run(retired.folders))
    on_disk = {checkpoint.folder: checkpoint for checkpoint in folders.scan() if checkpoint.folder not in doomed}
    rows = {checkpoint.path: checkpoint for checkpoint in await db.run(checkpoints.all_checkpoints)}

    def write(connection: sqlite3.Connection) -> None:
        for row in rows.values():
            if row.folder not in on_disk:
                log.warning("checkpoint %s has lost its folder and is forgotten", row.path)
                checkpoints.delete(connection, row.path)
        for found in _newest(on_disk, rows):
            log.info("checkpoint %s is found on disk", found.path)
            checkpoints.put(connection, found)

    await db.run(write)


def _newest(on_disk: dict[str, Checkpoint], rows: dict[str, Checkpoint]) -> list[Checkpoint]:
    """Whole folders that no row names, for paths that have no row with a folder: the newest of each path."""
    candidates: dict[str, Checkpoint] = {}
    for found in sorted(on_disk.values(), key=lambda checkpoint: checkpoint.created_at):
        row = rows.get(found.path)
        if row is None or row.folder not in on_disk:
            candidates[found.path] = found
    return list(candidates.values())
