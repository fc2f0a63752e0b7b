"""The sampling side of the worker's loop: feeds the sampler from the backlog, times it, and reports what ended.

The sampler itself serves first come, first served; so it gets samples only when they can begin soon, and who is next
is decided at the last moment.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from openrl.backends.base import Apart, SampleBackend, SampleJob
from openrl.errors import BackendFault, OpenRLError
from openrl.types import RequestId, SampleOutput, session_of
from openrl.workers.backlog import Backlog
from openrl.workers.messages import Kind, Sampled, Stopwatch
from openrl.workers.recorder import Recorder

log = logging.getLogger(__name__)

Finished = list[tuple[RequestId, SampleOutput | OpenRLError]]


class SampleLane:
    """Owns the sampler. `rows` are the sequences that it decodes together; `apart` is the sampler again, if it works
    in a process of its own."""

    def __init__(
        self,
        sampler: SampleBackend,
        rows: int,
        send: Callable[[Sampled], None],
        recorder: Recorder,
        apart: Apart | None = None,
    ) -> None:
        self._sampler = sampler
        self._apart = apart
        self._rows = rows
        self._send = send
        self._recorder = recorder
        self._backlog = Backlog()
        self._watches: dict[RequestId, Stopwatch] = {}
        self._newcomers: set[RequestId] = set()

    @property
    def busy(self) -> bool:
        """Whether `turn` has work."""
        return (bool(self._backlog) and self._room > 0) or self._sampler.busy

    @property
    def expectant(self) -> bool:
        """Whether a session waits that has had nothing yet."""
        return bool(self._newcomers)

    def add(self, job: SampleJob) -> None:
        """Queue a sample."""
        self._watches[job.request] = Stopwatch()
        if self._backlog.add(job):
            self._newcomers.add(job.request)

    def cancel(self, request: RequestId) -> None:
        """Give a sample up, whether it waits or runs."""
        if self._watches.pop(request, None) is not None:
            self._newcomers.discard(request)
            self._backlog.end(request, None)
            self._sampler.cancel(request)

    def turn(self) -> float:
        """One turn of the sampler; returns its seconds in this process."""
        self._feed()
        if not self._sampler.busy:
            return 0.0
        began_at, start = time.time(), time.perf_counter()
        finished = self._guarded(self._sampler.step, None) or []
        seconds = time.perf_counter() - start
        if self._apart is None:
            self._share(began_at, seconds, [*self._sampler.active, *(request for request, _ in finished)])
        for spent in self._apart.spent() if self._apart is not None else ():
            self._share(spent.began_at, spent.seconds, [*spent.rows], spent.steps)
        for request, result in finished:
            self._finish(request, result)
        return seconds

    def _feed(self) -> None:
        """Hand over samples as long as rows are free for them."""
        while self._backlog and self._room > 0:
            job = self._backlog.take()
            self._recorder.begun(job.request)
            self._guarded(lambda job=job: self._sampler.add(job), job.request)

    @property
    def _room(self) -> int:
        """Sequences that could begin now."""
        return self._rows - len(self._sampler.active) - self._sampler.waiting

    def _share(self, began_at: float, seconds: float, sharers: list[RequestId], steps: int = 1) -> None:
        """Divide a turn, in which each drew `steps` tokens, among the sequences that took part in it."""
        for request in sharers:
            if request in self._watches:
                self._watches[request].add(began_at, seconds / len(sharers))
        self._newcomers.difference_update(sharers)
        for _ in range(steps):
            self._backlog.drawn(sharers)
        rows = Counter(map(session_of, sharers))
        sessions = {session: seconds * count / len(sharers) for session, count in rows.items()}
        self._recorder.turn(Kind.SAMPLE, began_at, seconds, sessions, len(sharers))

    def _guarded(self, action: Callable[[], Finished | None], request: RequestId | None) -> Finished | None:
        """Run a sampler call; its fault fails `request`, or everything in the sampler when the fault has no owner."""
        try:
            return action()
        except OpenRLError as error:
            self._fail(request, error)
        except Exception as error:  # noqa: BLE001 - a fault of the backend becomes an answer
            self._fail(request, fault(error))
        return None

    def _fail(self, request: RequestId | None, error: OpenRLError) -> None:
        for doomed in [request] if request is not None else self._backlog.begun():
            self._sampler.cancel(doomed)
            self._finish(doomed, error)

    def _finish(self, request: RequestId, result: SampleOutput | OpenRLError) -> None:
        self._newcomers.discard(request)
        self._backlog.end(request, None if isinstance(result, OpenRLError) else result)
        self._send(Sampled(request, result, self._watches.pop(request, Stopwatch())))


def fault(error: Exception) -> BackendFault:
    """A backend's crash as an answer; the log has the traceback."""
    log.error("the backend failed", exc_info=error)
    return BackendFault(f"the backend failed: {type(error).__name__}: {error}", "The worker's log has the traceback.")
