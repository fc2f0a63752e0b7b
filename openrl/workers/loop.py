"""The worker's loop: training beside sampling on one device, in one thread.

Operations run one at a time in the order they came. A training pass is taken a micro-batch at a time, and between
micro-batches the sampler gets its share of the device: while both have work, whoever has had less time goes next.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from openrl.backends.base import Backend
from openrl.errors import BackendFault, OpenRLError
from openrl.types import RequestId, SampleOutput
from openrl.workers.memory import Trimmer
from openrl.workers.messages import (
    AddSample,
    Call,
    CancelSample,
    CreateRun,
    DropRun,
    FromWorker,
    Load,
    OpResult,
    OptimStep,
    PassResult,
    Returned,
    Sampled,
    Save,
    Stopwatch,
    ToWorker,
    TrainPass,
    WorkerOp,
)

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class _Pass:
    """A training pass in progress."""

    number: int
    steps: Iterator[PassResult]
    results: PassResult
    watch: Stopwatch = field(default_factory=Stopwatch)


class Loop:
    """Drives a backend from an inbox; answers through `send`. An inbox entry None means that the daemon is gone."""

    def __init__(
        self, backend: Backend, inbox: queue.SimpleQueue[ToWorker | None], send: Callable[[FromWorker], None]
    ) -> None:
        self._train = backend.train
        self._sample = backend.sample
        self._inbox = inbox
        self._send = send
        self._calls: deque[Call] = deque()
        self._pass: _Pass | None = None
        self._sampling: dict[RequestId, Stopwatch] = {}
        self._train_lead = 0.0  # seconds that training had more than sampling while both had work
        self._stopping = False
        self._trimmer = Trimmer()

    def run(self) -> None:
        """Work until told to stop."""
        while True:
            self._read()
            if self._stopping and self._pass is None:
                return
            self._turn()

    def _read(self) -> None:
        """Take everything from the inbox; wait for something only when there is nothing to do."""
        idle = not (self._calls or self._pass or self._sample.busy or self._stopping)
        if idle and self._inbox.empty():
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
            case Call():
                self._calls.append(message)
            case AddSample(job):
                self._sampling[job.request] = Stopwatch()
                self._guarded_sample(lambda: self._sample.add(job), job.request)
            case CancelSample(request):
                self._sampling.pop(request, None)
                self._sample.cancel(request)
            case _:
                self._stopping = True
                self._calls.clear()

    def _turn(self) -> None:
        training = bool(self._calls or self._pass)
        sampling = self._sample.busy and not self._stopping
        if not (training and sampling):
            self._train_lead = 0.0
        start = time.perf_counter()
        if training and not (sampling and self._train_lead > 0):
            self._train_turn()
            self._train_lead += time.perf_counter() - start
        elif sampling:
            self._sample_turn()
            self._train_lead -= time.perf_counter() - start

    def _train_turn(self) -> None:
        """One micro-batch of the pass in hand, or one other operation."""
        if self._pass is None:
            call = self._calls.popleft()
            if isinstance(call.op, TrainPass):
                self._pass = _Pass(call.number, self._train.train_pass(call.op.items), {})
            else:
                self._answer(call.number, lambda: self._apply(call.op))
                return
        current = self._pass
        ended = _timed(current.watch, lambda: self._micro_batch(current))
        if ended is not None:
            self._pass = None
            self._send(Returned(current.number, ended, current.watch))

    def _micro_batch(self, current: _Pass) -> PassResult | OpenRLError | None:
        """Advance a pass; what it is answered with once it has ended."""
        try:
            current.results.update(next(current.steps))
        except StopIteration:
            return current.results
        except OpenRLError as error:
            return error
        except Exception as error:  # noqa: BLE001 - a fault of the backend becomes an answer
            return _fault(error)
        return None

    def _answer(self, number: int, action: Callable[[], OpResult]) -> None:
        watch = Stopwatch()
        self._send(Returned(number, _timed(watch, lambda: _shielded(action)), watch))

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

    def _sample_turn(self) -> None:
        turn = Stopwatch()
        finished = _timed(turn, lambda: self._guarded_sample(self._sample.step, None)) or []
        sharers = [*self._sample.active, *(request for request, _ in finished)]
        for request in sharers:
            if request in self._sampling:
                self._sampling[request].add(turn.started_at, turn.seconds / len(sharers))
        for request, result in finished:
            self._finish_sample(request, result)

    def _guarded_sample(
        self, action: Callable[[], list[tuple[RequestId, SampleOutput | OpenRLError]] | None], request: RequestId | None
    ) -> list[tuple[RequestId, SampleOutput | OpenRLError]] | None:
        """Run a sampler call; its fault fails `request`, or everything in the sampler when the fault has no owner."""
        try:
            return action()
        except OpenRLError as error:
            self._fail_samples(request, error)
        except Exception as error:  # noqa: BLE001 - a fault of the backend becomes an answer
            self._fail_samples(request, _fault(error))
        return None

    def _fail_samples(self, request: RequestId | None, error: OpenRLError) -> None:
        for doomed in [request] if request is not None else list(self._sampling):
            self._sample.cancel(doomed)
            self._finish_sample(doomed, error)

    def _finish_sample(self, request: RequestId, result: SampleOutput | OpenRLError) -> None:
        self._send(Sampled(request, result, self._sampling.pop(request, Stopwatch())))


def _timed(watch: Stopwatch, action: Callable[[], T]) -> T:
    began_at, start = time.time(), time.perf_counter()
    result = action()
    watch.add(began_at, time.perf_counter() - start)
    return result


def _shielded(action: Callable[[], OpResult]) -> OpResult | OpenRLError:
    try:
        return action()
    except OpenRLError as error:
        return error
    except Exception as error:  # noqa: BLE001 - a fault of the backend becomes an answer
        return _fault(error)


def _fault(error: Exception) -> BackendFault:
    log.error("the backend failed", exc_info=error)
    return BackendFault(f"the backend failed: {type(error).__name__}: {error}", "The worker's log has the traceback.")
