"""Who trains all parameters of which base model: one run at a time on each copy (F6).

A run takes the place when it is made, or with its next request after it had lost it, and keeps it while its session
lives or it has work. A run of a session that is finished or has fallen silent makes way; its state is on disk, and it
goes on once the place is free again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager, suppress

from openrl.daemon.models import ModelPool
from openrl.daemon.runs import RunHandle, Runs
from openrl.daemon.sessions import Sessions
from openrl.errors import BadRequest, WorkerDied
from openrl.store.records import Run, RunState, SessionState
from openrl.types import FullSpec, RunId
from openrl.workers import messages
from openrl.workers.protocol import Worker

_OPEN = (RunState.CREATING, RunState.LIVE)
_WAIT_SECONDS = 0.05  # for whoever has a run in hand that is to make way


class FullRuns:
    """Owns the places. Runs that train LoRA adapters are none of its business."""

    def __init__(
        self, runs: Runs, sessions: Sessions, pool: ModelPool, suspend: Callable[[RunHandle], Awaitable[None]]
    ) -> None:
        """`suspend` writes a run down and takes it off its device."""
        self._runs = runs
        self._sessions = sessions
        self._pool = pool
        self._suspend = suspend
        self._places: dict[str, RunId] = {}  # by the model's name
        self._opening: dict[str, RunId] = {}  # runs on their way into the store

    @contextmanager
    def opening(self, run: Run) -> Generator[BadRequest | None]:
        """Why a new run cannot have the place, if so; if not, it has it from here on, once it is there."""
        if not isinstance(run.spec, FullSpec) or run.id in self._runs:
            yield None
            return
        model = self._model(run)
        taken = self._opening.get(model, run.id)
        if taken != run.id:
            yield _refusal(run, taken, run.base_model, same_owner=False)
            return
        if (holder := self.holder(model)) is not None:
            yield _refusal(run, holder.id, run.base_model, same_owner=holder.run.owner == run.owner)
            return
        self._opening[model] = run.id
        try:
            yield None
        finally:
            self._opening.pop(model, None)
            if run.id in self._runs:
                self._places[model] = run.id

    def claim(self, handle: RunHandle) -> None:
        """A run has a request: it needs the place. Raises `BadRequest` if another run has it."""
        if not isinstance(handle.run.spec, FullSpec):
            return
        model = self._model(handle.run)
        holder = self.holder(model)
        if holder is not None and holder is not handle:
            raise _refusal(handle.run, holder.id, model, same_owner=holder.run.owner == handle.run.owner)
        self._places[model] = handle.id

    def holder(self, model: str) -> RunHandle | None:
        """The run that has a model's place: by its claim, or after a restart, when there is none, who asked last."""
        keeping = [handle for handle in self._of(model) if self._keeps(handle)]
        placed = self._places.get(model)
        for handle in keeping:
            if handle.id == placed:
                return handle
        return max(keeping, key=lambda handle: (len(handle.queue) > 0, handle.run.last_request_at), default=None)

    async def make_room(self, handle: RunHandle, worker: Worker) -> None:
        """Take off `worker` whatever other run of the kind may be there, before `handle` comes onto it."""
        if not isinstance(handle.run.spec, FullSpec):
            return
        for other in self._of(self._model(handle.run)):
            if other is handle:
                continue
            while other.in_hand and other.worker is worker:  # it is being suspended at this moment
                await asyncio.sleep(_WAIT_SECONDS)
            if other.worker is worker and other.run.state in _OPEN and not self._is_finished(other):
                await self._suspend(other)
            elif other.run.state is not RunState.CLOSED:
                with suppress(WorkerDied):
                    await worker.call(messages.DropRun(other.id))
                other.worker = None

    def _of(self, model: str) -> list[RunHandle]:
        """All runs of the kind on a model."""
        handles = [handle for handle in self._runs.all() if isinstance(handle.run.spec, FullSpec)]
        return [handle for handle in handles if self._model(handle.run) == model]

    def _keeps(self, handle: RunHandle) -> bool:
        """Whether a run may keep the place if it has it."""
        if handle.run.state not in _OPEN:
            return False
        active = self._sessions.get(handle.run.session_id).state is SessionState.ACTIVE
        return active or len(handle.queue) > 0

    def _is_finished(self, handle: RunHandle) -> bool:
        return self._sessions.is_finished(handle.run.session_id)

    def _model(self, run: Run) -> str:
        """The name of a run's model; models that are not served any more have places of their own."""
        return self._pool.find(run.base_model).name if self._pool.serves(run.base_model) else run.base_model


def _refusal(run: Run, holder: RunId, model: str, *, same_owner: bool) -> BadRequest:
    """A run is named only to its own owner (docs/security.md)."""
    who = f"run {holder}" if same_owner else "a run of someone else"
    return BadRequest(
        f"{run.id} trains all parameters of {model}, and so does {who}; only one run of a base model can at a time.",
        "Unload that run or finish its session, or train LoRA (a rank of 1 or more), which any number of runs can.",
    )
