"""Device seconds as the worker's loop measures them: who shares a turn shares its seconds, who waits has none."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from openrl.backends.base import Backend, SampleBackend, SampleJob, TrainBackend, TrainItem
from openrl.errors import OpenRLError
from openrl.types import (
    AdamParams,
    DeviceReport,
    ModelInfo,
    OptimOutput,
    RequestId,
    RunId,
    SampleOutput,
    SamplePayload,
    TrainOutput,
    TrainPayload,
)
from openrl.workers.loop import Loop
from openrl.workers.messages import AddSample, Call, FromWorker, OptimStep, Returned, Sampled, Save, Stop, TrainPass


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Samples:
    """Two rows; each job takes as many turns as its prompt has tokens; a turn takes a second."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: list[tuple[RequestId, int]] = []
        self._rows: list[tuple[RequestId, int]] = []

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._rows)

    @property
    def active(self) -> list[RequestId]:
        return [request for request, _ in self._rows]

    def add(self, job: SampleJob) -> None:
        self._waiting.append((job.request, len(job.payload.prompt)))

    def cancel(self, request: RequestId) -> None:
        raise AssertionError("nothing is cancelled here")

    def step(self) -> list[tuple[RequestId, SampleOutput | OpenRLError]]:
        while self._waiting and len(self._rows) < 2:
            self._rows.append(self._waiting.pop(0))
        self._clock.now += 1.0
        turned = [(request, left - 1) for request, left in self._rows]
        self._rows = [job for job in turned if job[1]]
        return [(request, SampleOutput(())) for request, left in turned if not left]


class Training:
    """A pass of three micro-batches of two seconds each, a step of five, a save that fails after one."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def train_pass(self, items: tuple[TrainItem, ...]) -> Iterator[dict[RequestId, TrainOutput | OpenRLError]]:
        for _ in range(3):
            self._clock.now += 2.0
            yield {}

    def optim_step(self, run: RunId, adam: AdamParams) -> OptimOutput:
        self._clock.now += 5.0
        return OptimOutput({})

    def save(self, run: RunId, into: Path, *, optimizer: bool, gradients: bool) -> None:
        self._clock.now += 1.0
        raise OpenRLError("the disk is full")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("openrl.workers.loop.time.perf_counter", clock)
    monkeypatch.setattr("openrl.workers.loop.time.time", clock)
    return clock


def work(clock: Clock, *messages: AddSample | Call) -> list[FromWorker]:
    """Everything that a loop sends while it does these, in order."""
    info = ModelInfo(10, 10, 8, 1, "x")
    training, samples = cast("TrainBackend", Training(clock)), cast("SampleBackend", Samples(clock))
    backend = Backend(info, DeviceReport("x", "x", "x", 1, 0), training, samples)
    inbox: queue.SimpleQueue[AddSample | Call | Stop | None] = queue.SimpleQueue()
    sent: list[FromWorker] = []

    def send(message: FromWorker) -> None:
        sent.append(message)
        if len(sent) == len(messages):
            inbox.put(Stop())

    for message in messages:
        inbox.put(message)
    Loop(backend, inbox, send).run()  # type: ignore[arg-type]  # it may get more than we send
    return sent


def sample(name: str, turns: int) -> AddSample:
    return AddSample(SampleJob(RequestId(name), SamplePayload(np.zeros(turns, np.int32)), None))


def test_samples_share_the_turns_that_they_have_rows_in(clock: Clock) -> None:
    """a and b share two turns, then b and c one, then c has one for itself; c waited until the third."""
    sent = work(clock, sample("a", 2), sample("b", 3), sample("c", 2))
    times = {m.request: (m.watch.started_at, m.watch.seconds) for m in sent if isinstance(m, Sampled)}
    assert times == {"a": (100.0, 1.0), "b": (100.0, 1.5), "c": (102.0, pytest.approx(1.5))}


def test_a_pass_has_the_seconds_of_its_micro_batches_and_not_of_the_samples_between(clock: Clock) -> None:
    item = TrainItem(RequestId("r"), RunId("run"), TrainPayload((), "cross_entropy"), True)
    sent = work(clock, Call(1, TrainPass((item,))), sample("a", 4))
    watch = next(m.watch for m in sent if isinstance(m, Returned))
    assert (watch.started_at, watch.seconds) == (100.0, 6.0)
    assert next(m.watch.seconds for m in sent if isinstance(m, Sampled)) == 4.0
    assert clock.now == 110.0


def test_single_operations_are_timed_also_when_they_fail(clock: Clock) -> None:
    step, save = OptimStep(RunId("run"), AdamParams()), Save(RunId("run"), Path(), True, False)
    sent = [m for m in work(clock, Call(1, step), Call(2, save)) if isinstance(m, Returned)]
    assert [(m.watch.started_at, m.watch.seconds) for m in sent] == [(100.0, 5.0), (105.0, 1.0)]
    assert isinstance(sent[1].result, OpenRLError)
