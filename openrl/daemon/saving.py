"""Saves and loads of a run: names, folders, and the rows that make them visible."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openrl.checkpoints import age
from openrl.checkpoints.commit import CheckpointFolders
from openrl.checkpoints.layout import Address, new_folder
from openrl.daemon import absent
from openrl.daemon.disposal import Disposal
from openrl.daemon.futures import Effect
from openrl.daemon.models import ModelPool
from openrl.daemon.quotas import Quotas
from openrl.daemon.recovery import find_checkpoint
from openrl.daemon.runs import RunHandle
from openrl.daemon.samplers import Samplers, sampler_id
from openrl.daemon.work import LoadState, SaveExternal, SaveSampler, SaveState
from openrl.errors import BadRequest, Conflict, QuotaExceeded
from openrl.keys.principal import may_read
from openrl.store import checkpoints, retired, samplers
from openrl.store.db import Database
from openrl.store.records import Checkpoint, Run, Sampler
from openrl.types import CheckpointKind, FullSpec, RequestId
from openrl.workers import messages
from openrl.workers.protocol import Worker


@dataclass(frozen=True, slots=True)
class Saved:
    """A written checkpoint: the answer, the rows to commit with it, and the folder that it replaces, if any."""

    answer: dict[str, Any]
    effect: Effect
    stale: str | None = None


class Saving:
    """Writes checkpoints whole: the folder first, then the row, then the result (C7)."""

    def __init__(
        self,
        db: Database,
        folders: CheckpointFolders,
        disposal: Disposal,
        held: Samplers,
        pool: ModelPool,
        quotas: Quotas,
    ) -> None:
        self._db = db
        self._folders = folders
        self._disposal = disposal
        self._samplers = held
        self._pool = pool
        self._quotas = quotas

    async def training(self, handle: RunHandle, worker: Worker, save: SaveState) -> Saved:
        """`save_weights`. Raises Conflict (C1)."""
        address = Address(handle.id, CheckpointKind.TRAINING, save.name)
        old = await self._taken(address, overwrite=save.overwrite)
        metadata, replaced = save.user_metadata or {}, 0 if old is None else old.size_bytes
        saved = await self._write(
            handle, worker, address, save.ttl_seconds, metadata, optimizer=True, replaced=replaced
        )
        stale = old.folder if old is not None else None
        return Saved({"path": saved.path}, _put(saved, stale), stale)

    async def sampler(self, handle: RunHandle, worker: Worker, save: SaveSampler) -> Saved:
        """`save_weights_for_sampler`, named or ephemeral. Raises Conflict (C1)."""
        if save.name is not None:
            address = Address(handle.id, CheckpointKind.SAMPLER, save.name)
            await self._taken(address, overwrite=False)
            saved = await self._write(handle, worker, address, save.ttl_seconds, save.user_metadata or {})
            return Saved({"path": saved.path}, _put(saved))
        return await self._ephemeral(handle, worker, save)

    async def external(self, handle: RunHandle, worker: Worker, save: SaveExternal) -> Saved:
        """`save_weights_external`: files to download, in PEFT's or Hugging Face's form. Raises Conflict (C1)."""
        address = Address(handle.id, CheckpointKind.EXTERNAL, save.name)
        await self._taken(address, overwrite=False)
        saved = await self._write(handle, worker, address, save.ttl_seconds, {}, recipients=save.recipients)
        return Saved({"path": saved.path, "size_bytes": saved.size_bytes}, _put(saved))

    async def _ephemeral(self, handle: RunHandle, worker: Worker, save: SaveSampler) -> Saved:
        """A snapshot that goes straight into a sampling session (6.7)."""
        assert save.sampler_seq is not None
        identity = sampler_id(handle.run.session_id, save.sampler_seq)
        if identity in self._samplers:
            raise BadRequest(f"sampling_session_seq_id {save.sampler_seq} is in use in this session.")
        address = Address(handle.id, CheckpointKind.SAMPLER, f"ephemeral-{save.sampler_seq}")
        saved = await self._write(handle, worker, address, save.ttl_seconds, {}, ephemeral=True)
        sampler = Sampler(
            id=identity,
            session_id=handle.run.session_id,
            base_model=handle.run.base_model,
            model_path=saved.path,
            folder=saved.folder,
            created_at=saved.created_at,
        )
        self._samplers.add(sampler)

        def effect(db: sqlite3.Connection) -> None:
            checkpoints.put(db, saved)
            samplers.insert(db, sampler)

        return Saved({"sampling_session_id": identity}, effect)

    async def remove_stale(self, folder: str) -> None:
        """Remove a replaced folder, unless a sampler still draws from it: its weights must not change (S15)."""
        await self._disposal.free(folder)

    async def load(self, handle: RunHandle, worker: Worker, request: RequestId, load: LoadState) -> Effect:
        """`load_weights`; raises NotFound, or BadRequest when the checkpoint does not fit the run (C3)."""
        checkpoint = await self._loadable(handle, load)
        source = self._folders.absolute(checkpoint.folder)
        with self._folders.hold(checkpoint.folder):
            await worker.call(messages.Load(handle.id, source, optimizer=load.optimizer))
        return lambda db: retired.note_load(db, request, checkpoint.folder)

    async def _loadable(self, handle: RunHandle, load: LoadState) -> Checkpoint:
        checkpoint = await find_checkpoint(self._db, load.path)
        if not may_read(load.reader or handle.run.owner, checkpoint.owner, public=checkpoint.public):
            raise absent.checkpoint(load.path)
        check_loadable(checkpoint, load)
        _check_same_kind(checkpoint, handle.run)
        if self._pool.find(checkpoint.base_model) is not self._pool.find(handle.run.base_model):
            raise BadRequest(
                f"checkpoint {load.path} was trained on {checkpoint.base_model!r}, this run on "
                f"{handle.run.base_model!r}.",
                "Load it into a run of the same base model.",
            )
        return checkpoint

    async def _taken(self, address: Address, *, overwrite: bool) -> Checkpoint | None:
        old = await self._db.run(lambda db: checkpoints.get(db, str(address)))
        if old is not None and not overwrite:
            raise Conflict(f"checkpoint {address} exists.", "Choose another name, or save with overwrite=True.")
        return old

    async def _write(
        self,
        handle: RunHandle,
        worker: Worker,
        address: Address,
        ttl: int | None,
        metadata: Mapping[str, str],
        *,
        optimizer: bool = False,
        ephemeral: bool = False,
        recipients: tuple[str, ...] = (),
        replaced: int = 0,
    ) -> Checkpoint:
        """`replaced`: bytes of the checkpoint whose place it takes. Raises QuotaExceeded."""
        owner = handle.run.owner
        await self._quotas.check_room(owner, 1, replaced=replaced)  # what has no chance costs no time on the device
        now = time.time()
        folder = new_folder(address)
        checkpoint = Checkpoint(
            path=str(address),
            run_id=handle.id,
            kind=address.kind,
            name=address.name,
            folder=str(folder),
            base_model=handle.run.base_model,
            spec=handle.run.spec,
            size_bytes=0,
            created_at=now,
            expires_at=None if ttl is None else now + ttl,
            user_metadata=dict(metadata),
            ephemeral=ephemeral,
            owner=owner,
        )
        staged = await asyncio.to_thread(self._folders.stage, folder)
        await worker.call(messages.Save(handle.id, staged, optimizer=optimizer, gradients=False))
        if recipients:
            await asyncio.to_thread(age.encrypt_files, staged, recipients)
        try:
            await self._quotas.check_room(owner, self._folders.size(staged), replaced=replaced)
        except QuotaExceeded:
            await asyncio.to_thread(self._folders.abandon, staged)
            raise
        return await asyncio.to_thread(self._folders.commit, staged, checkpoint)


def _put(saved: Checkpoint, stale: str | None = None) -> Effect:
    """A checkpoint's row, in place of the one that named the folder `stale`."""

    def write(db: sqlite3.Connection) -> None:
        checkpoints.put(db, saved)
        if stale is not None:
            retired.retire(db, stale, saved.created_at)

    return write


def _check_same_kind(checkpoint: Checkpoint, run: Run) -> None:
    """C3: an adapter cannot become a model's weights, nor the other way round."""
    whole = isinstance(checkpoint.spec, FullSpec)
    if whole == isinstance(run.spec, FullSpec):
        return
    holds, trains = ("all parameters", "a LoRA adapter") if whole else ("a LoRA adapter", "all parameters")
    raise BadRequest(
        f"checkpoint {checkpoint.path} holds {holds}; run {run.id} trains {trains}.",
        "Create a training client from the checkpoint: it will train what the checkpoint holds.",
    )


def check_loadable(checkpoint: Checkpoint, load: LoadState) -> None:
    """Raise BadRequest if a checkpoint lacks what is asked of it (C3)."""
    check_drawable(checkpoint)
    if load.optimizer and checkpoint.kind is not CheckpointKind.TRAINING:
        raise BadRequest(
            f"{load.path} is a sampler checkpoint and has no optimizer state.",
            "Load a checkpoint made by save_state, or load without the optimizer.",
        )


def check_drawable(checkpoint: Checkpoint) -> None:
    """Raise BadRequest for files that were only saved to be downloaded: they may be encrypted."""
    if checkpoint.kind is CheckpointKind.EXTERNAL:
        raise BadRequest(
            f"{checkpoint.path} holds external weights, which can only be downloaded.",
            "Load or sample from a checkpoint made by save_state or save_weights_for_sampler.",
        )
