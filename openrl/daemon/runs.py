"""Runs in memory: what each waits for, where its weights are, and how far its newest snapshot reaches."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from openrl.daemon import absent
from openrl.daemon.run_queue import RunQueue
from openrl.daemon.timing import Timing
from openrl.daemon.work import Train, Work
from openrl.store.records import Run, RunState, Session
from openrl.store.runs import StoredRun
from openrl.types import Op, RequestId, RunId, SessionId, TrainSpec
from openrl.workers.protocol import Worker

# Requests that change a run's state: after a crash they are replayed from the newest snapshot on.
MUTATING = frozenset({Op.FORWARD_BACKWARD, Op.OPTIM_STEP, Op.LOAD_STATE})


@dataclass(slots=True)
class Entry:
    """A request that waits for its turn or has it. `work` None: create the adapter itself (number 0 of a run)."""

    id: RequestId
    seq: int
    op: Op
    work: Work | None
    crashes: int = 0  # times it was in hand when a worker died
    timing: Timing = field(default_factory=Timing)

    @property
    def tokens(self) -> int:
        """Tokens of a training pass, 0 for anything else."""
        return sum(len(d.tokens) for d in self.work.payload.data) if isinstance(self.work, Train) else 0


@dataclass(slots=True)
class RunHandle:
    """A run as the daemon holds it. Its weights are on `worker` while that lives; else only in snapshot and journal."""

    run: Run
    queue: RunQueue[Entry]
    snapshot_folder: str | None = None
    snapshot_seq: int = 0
    snapshot_at: float = field(default_factory=time.monotonic)
    snapshot_took: float = 0.0  # seconds that the newest one took
    worker: Worker | None = None
    in_hand: bool = False  # a batch, a suspension: nobody else may touch the run
    served: int = 0  # the turn in which it last had the device
    gap_since: float | None = None

    @property
    def id(self) -> RunId:
        return self.run.id

    def set_state(self, state: RunState, reason: str = "") -> None:
        self.run = replace(self.run, state=state, reason=reason)

    @property
    def dirty(self) -> bool:
        """Whether a crash would have something to replay."""
        return self.queue.next_seq - 1 > self.snapshot_seq


class Runs:
    """All runs by id."""

    def __init__(self) -> None:
        self._handles: dict[RunId, RunHandle] = {}

    def add(self, run: Run) -> RunHandle:
        handle = RunHandle(run, RunQueue(0))
        self._handles[run.id] = handle
        return handle

    def restore(self, stored: StoredRun) -> RunHandle:
        """Take a run from the store; it is on no device yet."""
        handle = RunHandle(
            stored.run,
            RunQueue(stored.next_seq),
            snapshot_folder=stored.snapshot_folder,
            snapshot_seq=stored.snapshot_seq,
        )
        self._handles[stored.run.id] = handle
        return handle

    def get(self, run: RunId) -> RunHandle:
        """Raises NotFound."""
        handle = self._handles.get(run)
        if handle is None:
            raise absent.run(run)
        return handle

    def __contains__(self, run: RunId) -> bool:
        return run in self._handles

    def all(self) -> list[RunHandle]:
        return list(self._handles.values())

    def of_session(self, session: SessionId) -> list[RunHandle]:
        return [handle for handle in self._handles.values() if handle.run.session_id == session]


def new_run(session: Session, number: int, base_model: str, spec: TrainSpec, metadata: Mapping[str, Any]) -> Run:
    """A run as it is before its creation is accepted; it is its session's owner's."""
    now = time.time()
    return Run(
        id=RunId(f"{session.id}:train:{number}"),
        session_id=session.id,
        base_model=base_model,
        spec=spec,
        state=RunState.CREATING,
        user_metadata=metadata,
        created_at=now,
        last_request_at=now,
        owner=session.owner,
    )
