"""The worker's loop over a scripted device and a clock that only work moves: who gets which turn shows exactly."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from openrl.backends.base import Backend, SampleBackend, SampleJob, TrainBackend, TrainItem
from openrl.errors import OpenRLError
from openrl.types import (
    AdamParams,
    Datum,
    DeviceReport,
    ModelInfo,
    OptimOutput,
    RequestId,
    RunId,
    SampledSequence,
    SampleOutput,
    SamplePayload,
    SamplingParams,
    TrainOutput,
    TrainPayload,
)
from openrl.workers.loop import Loop
from openrl.workers.messages import (
    AddSample,
    Call,
    CancelSample,
    FromWorker,
    Returned,
    Sampled,
    Span,
    Stop,
    ToWorker,
    TrainPass,
    Turns,
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for name in ("perf_counter", "time", "monotonic"):
        monkeypatch.setattr(f"openrl.workers.loop.time.{name}", clock)
    return clock


class Samples:
    """A sampler with `rows` rows, first come first served; a turn draws a token for each row, however many."""

    def __init__(self, clock: Clock, rows: int, seconds: float) -> None:
        self._clock = clock
        self._limit = rows
        self._seconds = seconds
        self._waiting: list[tuple[SampleJob, int]] = []
        self._rows: list[tuple[SampleJob, int]] = []
        self.most_waiting = 0

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._rows)

    @property
    def active(self) -> list[RequestId]:
        return [job.request for job, _ in self._rows]

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def add(self, job: SampleJob) -> None:
        if job.payload.params.max_tokens == 0:
            raise OpenRLError("max_tokens is 0")
        self._waiting.append((job, job.payload.params.max_tokens or 1))

    def cancel(self, request: RequestId) -> None:
        self._waiting = [entry for entry in self._waiting if entry[0].request != request]
        self._rows = [entry for entry in self._rows if entry[0].request != request]

    def step(self) -> list[tuple[RequestId, SampleOutput | OpenRLError]]:
        self.most_waiting = max(self.most_waiting, len(self._waiting))
        while self._waiting and len(self._rows) < self._limit:
            self._rows.append(self._waiting.pop(0))
        self._clock.now += self._seconds
        turned = [(job, left - 1) for job, left in self._rows]
        self._rows = [entry for entry in turned if entry[1]]
        return [(job.request, _output(job.payload.params.max_tokens or 1)) for job, left in turned if not left]


def _output(tokens: int) -> SampleOutput:
    return SampleOutput((SampledSequence(np.zeros(tokens, np.int32), np.zeros(tokens, np.float32), "length"),))


class Training:
    """A pass has as many micro-batches as its first datum has tokens; a step takes five seconds, a save fails."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds

    def train_pass(self, items: tuple[TrainItem, ...]) -> Iterator[dict[RequestId, TrainOutput | OpenRLError]]:
        count = len(items[0].payload.data[0].tokens)
        for left in reversed(range(count)):
            self._clock.now += self._seconds
            yield {} if left else {item.request: TrainOutput((), {}) for item in items}

    def optim_step(self, run: RunId, adam: AdamParams) -> OptimOutput:
        self._clock.now += 5.0
        return OptimOutput({})

    def save(self, run: RunId, into: Path, *, optimizer: bool, gradients: bool) -> None:
        self._clock.now += 1.0
        raise OpenRLError("the disk is full")


class Inbox:
    """Messages that arrive at given times; the last of all is a stop."""

    def __init__(self, clock: Clock, arrivals: list[tuple[float, ToWorker]]) -> None:
        self._clock = clock
        self._arrivals = sorted(arrivals, key=lambda arrival: arrival[0])

    def empty(self) -> bool:
        return not self._arrivals or self._arrivals[0][0] > self._clock.now

    def get(self, block: bool) -> ToWorker:
        if self.empty():
            if not block:
                raise queue.Empty
            if not self._arrivals:
                return Stop()
            self._clock.now = self._arrivals[0][0]
        return self._arrivals.pop(0)[1]

    def put(self, at: float, message: ToWorker) -> None:
        self._arrivals = sorted([*self._arrivals, (at, message)], key=lambda arrival: arrival[0])


@dataclass
class Story:
    """What a loop sent, and when."""

    clock: Clock
    samples: Samples
    sent: list[FromWorker] = field(default_factory=list)
    at: dict[RequestId | int, float] = field(default_factory=dict)  # when each sample or call ended
    spans: list[Span] = field(default_factory=list)
    begun: list[RequestId] = field(default_factory=list)

    def take(self, message: FromWorker) -> None:
        self.sent.append(message)
        match message:
            case Turns(spans, begun):
                self.spans += spans
                self.begun += begun
            case Sampled(request):
                self.at[request] = self.clock.now
            case Returned(number):
                self.at[number] = self.clock.now
            case _:
                raise AssertionError(message)

    def order(self) -> list[RequestId | int]:
        return list(self.at)


def tell(
    clock: Clock, *arrivals: tuple[float, ToWorker], rows: int = 2, turn: float = 1.0, micro_batch: float = 2.0
) -> Story:
    """A loop's whole life: messages arrive so many seconds after its start, and it stops when all is done.

    `turn` and `micro_batch` are seconds of a turn of the sampler and of a micro-batch.
    """
    samples = Samples(clock, rows, turn)
    training = cast("TrainBackend", Training(clock, micro_batch))
    info = ModelInfo(10, 10, 8, 1, "x")
    backend = Backend(info, DeviceReport("x", "x", "x", 1, 0), training, cast("SampleBackend", samples))
    story = Story(clock, samples)
    inbox = Inbox(clock, [(clock.now + at, message) for at, message in arrivals])
    Loop(backend, cast("queue.SimpleQueue[ToWorker | None]", inbox), story.take, rows).run()
    return story


def sample(request: str, tokens: int = 1, *, prompt: int = 1, weight: float = 1.0) -> AddSample:
    payload = SamplePayload(np.zeros(prompt, np.int32), params=SamplingParams(max_tokens=tokens))
    return AddSample(SampleJob(RequestId(request), payload, None, weight))


def cancel(request: str) -> CancelSample:
    return CancelSample(RequestId(request))


def train(number: int, micro_batches: int, *runs: str, weight: float = 1.0) -> Call:
    tokens = np.zeros(micro_batches, np.int32)
    payload = TrainPayload((Datum(tokens, {}),), "cross_entropy")
    items = tuple(TrainItem(RequestId(f"{run}:{number}"), RunId(run), payload, True) for run in runs)
    return Call(number, TrainPass(items, weight))
