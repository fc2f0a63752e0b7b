"""The worker's loop: training beside sampling on one device, in one thread.

Steps, saves and the like run one at a time in the order they came. Training passes are taken a micro-batch at a time;
where several are in hand, the one that has had least goes next. Between micro-batches the sampler gets its share of
the device: while both have work, whoever has had less time goes next, except that a newcomer's sample need not wait
for more than the micro-batch under way.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from openrl.backends.base import Backend
from openrl.errors import BackendFault, OpenRLError
from openrl.types import RunId, SamplerReport, SessionId, session_of
from openrl.workers.memory import Trimmer
from openrl.workers.messages import (
    AddSample,
    Call,
    CancelSample,
    CreateRun,
    DropRun,
    FromWorker,
    Kind,
    Load,
    OpResult,
    OptimStep,
    PassResult,
    Returned,
    SamplerNews,
    Save,
    Stopwatch,
    ToWorker,
    TrainPass,
    UseThreads,
    Woken,
    WorkerOp,
)
from openrl.workers.recorder import Recorder
from openrl.workers.sampling import SampleLane, fault

T = TypeVar("T")

_ROWS = 64
_ADVANCE_SECONDS = 1.0  # that sampling may be ahead of training when it goes next for a newcomer's sake


@dataclass(slots=True, eq=False)
class _Pass:
    """A training pass in progress. `had` is its time on the device over its weight, from where the others stood."""

    number: int
    op: TrainPass
    had: float
    steps: Iterator[PassResult] | None = None  # None until it begins
    results: PassResult = field(default_factory=PassResult)
    watch: Stopwatch = field(default_factory=Stopwatch)


class Loop:
    """Drives a backend from an inbox; answers through `send`. An inbox entry None means that the daemon is gone.

    `rows` are the sequences that the sampler decodes together.
    """

    def __init__(
        self,
        backend: Backend,
        inbox: queue.SimpleQueue[ToWorker | None],
        send: Callable[[FromWorker], None],
        rows: int = _ROWS,
    ) -> None:
        self._train = backend.train
        self._use_threads = backend.use_threads
        self._inbox = inbox
        self._send = send
        self._recorder = Recorder(send)
        self._apart = backend.apart
        self._told: SamplerReport | None = None
        self._samples = SampleLane(backend.sample, rows, send, self._recorder, backend.apart)
        self._calls: deque[Call] = deque()
        self._passes: list[_Pass] = []
        self._train_lead = 0.0  # seconds that training had more than sampling while both had work
        self._stopping = False
        self._trimmer = Trimmer()

    def run(self) -> None:
        """Work until told to stop."""
        self._tell_of_sampler()
        while True:
            self._read()
            if self._stopping and not self._passes:
                self._recorder.report(idle=True)
                return
            self._turn()

    def _read(self) -> None:
        """Take everything from the inbox; wait for something only when there is nothing to do."""
        idle = not (self._calls or self._passes or self._samples.busy or self._stopping)
        if idle and self._inbox.empty():
            self._recorder.report(idle=True)
            self._trimmer.quiet()
        while True:
            try:
                message = self._inbox.get(block=idle)
            except queue.Empty:
                return
            idle = False
            self._take(message)

    def _take(self, message: ToWorker | None) -> None:
        match message:
            case Call(number, TrainPass() as op):
                had = min((current.had for current in self._passes), default=0.0)
                self._passes.append(_Pass(number, op, had))
            case Call():
                self._calls.append(message)
            case AddSample(job):
                self._samples.add(job)
            case CancelSample(request):
                self._samples.cancel(request)
            case Woken():
                pass  # the sampler has become busy
            case UseThreads(threads):
                self._use_threads(threads)
            case _:
                self._stopping = True
                self._calls.clear()
                self._passes = [current for current in self._passes if current.steps is not None]

    def _turn(self) -> None:
        training = bool(self._calls or self._passes)
        sampling = self._samples.busy and not self._stopping
        if not (training and sampling):
            self._train_lead = 0.0
        if sampling and (not training or self._train_lead > 0 or self._hurry()):
            self._train_lead -= self._samples.turn()
        elif training:
            start = time.perf_counter()
            self._train_turn()
            self._train_lead += time.perf_counter() - start
        self._recorder.report(idle=False)
        self._tell_of_sampler()

    def _tell_of_sampler(self) -> None:
        """Tell the daemon when a sampler that works apart is no longer as it was."""
        if self._apart is not None and self._apart.report != self._told:
            self._told = self._apart.report
            self._send(SamplerNews(self._told))

    def _hurry(self) -> bool:
        """Whether sampling goes next although it has had its share. It is paid back: training then gets as much more
        later, and once sampling is too far ahead newcomers wait as everyone does. A sampler in another process waits
        for its next sequences with nothing to do, so it always is in a hurry."""
        hurried = self._samples.expectant or self._apart is not None
        return hurried and self._train_lead > -_ADVANCE_SECONDS

    def _train_turn(self) -> None:
        """One operation that is not a pass, or one micro-batch of a pass."""
        if self._calls:
            call = self._calls.popleft()
            watch = Stopwatch()
            result = _timed(watch, lambda: self._shielded(call.op))
            self._record(Kind.TRAIN if isinstance(call.op, OptimStep) else Kind.OTHER, watch, _runs(call.op))
            self._send(Returned(call.number, result, watch))
            return
        current = min(self._passes, key=lambda p: (p.had, -p.number))  # among equals the newest: it may be short
        turn = Stopwatch()
        ended = _timed(turn, lambda: self._micro_batch(current))
        current.watch.add(turn.started_at, turn.seconds)
        current.had += turn.seconds / current.op.weight
        self._record(Kind.TRAIN, turn, _runs(current.op))
        if ended is not None:
            self._passes.remove(current)
            self._send(Returned(current.number, ended, current.watch))

    def _record(self, kind: Kind, turn: Stopwatch, runs: list[RunId]) -> None:
        sessions: dict[SessionId, float] = {}
        for session in map(session_of, runs):
            sessions[session] = sessions.get(session, 0.0) + turn.seconds / len(runs)
        self._recorder.turn(kind, turn.started_at, turn.seconds, sessions, len(runs))

    def _micro_batch(self, current: _Pass) -> PassResult | OpenRLError | None:
        """Advance a pass; what it is answered with once it has ended."""
        try:
            if current.steps is None:
                current.steps = self._train.train_pass(current.op.items)
            current.results.update(next(current.steps))
            if len(current.results) < len(current.op.items):
                return None
            next(current.steps, None)  # nothing is left but its own end, which no other turn need come before
        except StopIteration:
            pass
        except OpenRLError as error:
            return error
        except Exception as error:  # noqa: BLE001 - a fault of the backend becomes an answer
            return fault(error)
        return current.results

    def _shielded(self, op: WorkerOp) -> OpResult | OpenRLError:
        try:
            return self._apply(op)
        except OpenRLError as error:
            return error
        except Exception as error:  # noqa: BLE001 - a fault of the backend becomes an answer
            return fault(error)

    def _apply(self, op: WorkerOp) -> OpResult:
        match op:
            case CreateRun(run, spec):
                self._train.create(run, spec)
            case DropRun(run):
                self._train.drop(run)
            case OptimStep(run, adam):
                return self._train.optim_step(run, adam)
            case Save(run, into, optimizer, gradients):
                self._train.save(run, into, optimizer=optimizer, gradients=gradients)
            case Load(run, source, optimizer):
                self._train.load(run, source, optimizer=optimizer)
            case TrainPass():
                raise BackendFault("a training pass is not a single operation")
        return None


def _runs(op: WorkerOp) -> list[RunId]:
    return [item.run for item in op.items] if isinstance(op, TrainPass) else [op.run]


def _timed(watch: Stopwatch, action: Callable[[], T]) -> T:
    began_at, start = time.time(), time.perf_counter()
    result = action()
    watch.add(began_at, time.perf_counter() - start)
    return result
