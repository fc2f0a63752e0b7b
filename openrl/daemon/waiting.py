"""Why a request is not done yet, and where it stands, in the wire's queue states.

The SDK shows a reason only with a state other than `active`: for samples once a minute, for training after a quarter
of an hour. So `paused_capacity` is for what really waits for someone or something else; a request that has the device,
or waits only for others of its own session, is `active`.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from openrl.daemon.models import ModelPool
from openrl.daemon.runs import RunHandle, Runs
from openrl.daemon.samplers import Samplers, Sampling
from openrl.daemon.scheduler import Scheduler
from openrl.daemon.sessions import Sessions
from openrl.daemon.train_lane import InHand
from openrl.daemon.work import Pending
from openrl.errors import OpenRLError
from openrl.types import Op, RequestId, RunId, SamplerId, SessionId, session_of

_DOING = {
    Op.FORWARD: "trains",
    Op.FORWARD_BACKWARD: "trains",
    Op.OPTIM_STEP: "takes a step",
    Op.CREATE_RUN: "opens a run",
    Op.LOAD_STATE: "loads a checkpoint",
    Op.UNLOAD: "closes a run",
}
_ACTIVE = Pending("active", "")
_NAMED = 3  # sessions named in a reason; the others are counted


class Waiting:
    """Describes requests that are not done."""

    def __init__(
        self,
        pool: ModelPool,
        sessions: Sessions,
        runs: Runs,
        samplers: Samplers,
        scheduler: Scheduler,
        sampling: Sampling,
    ) -> None:
        self._pool = pool
        self._sessions = sessions
        self._runs = runs
        self._samplers = samplers
        self._scheduler = scheduler
        self._sampling = sampling

    def describe(self, request: RequestId) -> Pending:
        """What a client that polls is told."""
        scope = request.rpartition(":")[0]
        if RunId(scope) in self._runs:
            base_model = self._runs.get(RunId(scope)).run.base_model
        elif SamplerId(scope) in self._samplers:
            base_model = self._samplers.get(SamplerId(scope)).base_model
        else:
            return _ACTIVE
        try:
            model = self._pool.find(base_model)
        except OpenRLError as error:
            return Pending("paused_capacity", str(error))
        if model.state != "ready":
            return Pending("paused_capacity", f"model {model.name} is {model.state}: {model.detail}")
        if RunId(scope) in self._runs:
            return self._training(self._runs.get(RunId(scope)), request, model.name)
        return self._sample(request)

    def _training(self, handle: RunHandle, request: RequestId, model: str) -> Pending:
        head = handle.queue.head()
        if head is None:
            return Pending("active", f"request {handle.queue.next_seq} of this run has not arrived yet")
        ahead = int(request.rpartition(":")[2]) - head.seq
        if handle.in_hand:
            return Pending("active", f"{_requests(ahead)} of this run before it" if ahead else "")
        queue = self._scheduler.queue(model)
        position = next((i for i, other in enumerate(queue, 1) if other.run == handle.id), len(queue))
        before = {other.session for other in queue[: position - 1]}
        underway = self._scheduler.lane(model).underway
        before |= {session for batch in underway for session in batch.batch.underway.sessions}
        parts = [f"position {position} of {len(queue)}"]
        if ahead:
            parts.append(f"with {_requests(ahead)} of this run before it")
        doing = [self._doing(batch, handle.run.session_id) for batch in underway]
        reason = ", ".join(parts) + (f": {'; '.join(doing)}" if doing else "")
        return Pending("paused_capacity" if before - {handle.run.session_id} else "active", reason)

    def _sample(self, request: RequestId) -> Pending:
        place = self._sampling.counts.place(request)
        if place is None:
            return _ACTIVE
        reason = f"about position {place.position} of {place.waiting} waiting samples"
        if not place.others:
            return Pending("active", reason)
        return Pending("paused_capacity", f"{reason}: {self._names(place.others, session_of(request))} also sampling")

    def _doing(self, batch: InHand, reader: SessionId) -> str:
        """`session X trains (12 s)`"""
        does = _DOING.get(batch.batch.members[0].op, "saves a checkpoint")
        return f"{self._names(batch.batch.underway.sessions, reader)} {does} ({time.monotonic() - batch.since:.0f} s)"

    def _names(self, sessions: Collection[SessionId], reader: SessionId) -> str:
        """Those of the reader's own owner by name, the others by number."""
        owner = self._sessions.owner_of(reader)
        own = sorted(session for session in sessions if self._sessions.owner_of(session) == owner)
        parts = [", ".join(own[:_NAMED])] if own else []
        if unnamed := len(sessions) - len(own[:_NAMED]):
            parts.append(f"{unnamed} more" if own else f"{unnamed} of other owners")
        return f"{'session' if len(sessions) == 1 else 'sessions'} {' and '.join(parts)}"


def _requests(count: int) -> str:
    return f"{count} request{'' if count == 1 else 's'}"
