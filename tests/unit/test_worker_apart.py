"""The worker's loop beside a sampler that works in a process of its own: it sleeps, feeds, shares time and tells."""

from __future__ import annotations

import queue
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import pytest

from openrl.backends.base import Backend, SampleBackend, SampleJob, Spent, TrainBackend
from openrl.errors import OpenRLError
from openrl.types import (
    DeviceReport,
    ModelInfo,
    RequestId,
    SampledSequence,
    SampleOutput,
    SamplerReport,
)
from openrl.workers.loop import Loop
from openrl.workers.messages import FromWorker, Kind, Returned, Sampled, SamplerNews, Span, ToWorker, Turns, Woken
from support.loops import Clock, Inbox, Training, sample, train


class Elsewhere:
    """Draws each sample in `seconds`, `rows` at a time, while nobody looks; puts a `Woken` into the inbox then."""

    def __init__(self, clock: Clock, inbox: Inbox, rows: int, seconds: float) -> None:
        self._clock = clock
        self._inbox = inbox
        self._rows = rows
        self._seconds = seconds
        self._jobs: list[tuple[float, SampleJob]] = []
        self._spent: list[Spent] = []
        self.steps = 0
        self.most = 0
        self.report = SamplerReport("vLLM", "ready", "cpu", 0)

    @property
    def busy(self) -> bool:
        return any(at <= self._clock.now for at, _ in self._jobs)

    @property
    def active(self) -> list[RequestId]:
        return [job.request for _, job in self._jobs][: self._rows]

    @property
    def waiting(self) -> int:
        return max(0, len(self._jobs) - self._rows)

    def add(self, job: SampleJob) -> None:
        self._jobs.append((self._clock.now + self._seconds, job))
        self._inbox.put(self._clock.now + self._seconds, Woken())
        self.most = max(self.most, len(self._jobs))

    def cancel(self, request: RequestId) -> None:
        self._jobs = [entry for entry in self._jobs if entry[1].request != request]

    def step(self) -> list[tuple[RequestId, SampleOutput | OpenRLError]]:
        self.steps += 1
        done = [job for at, job in self._jobs if at <= self._clock.now]
        self._jobs = [(at, job) for at, job in self._jobs if at > self._clock.now]
        rows = tuple(job.request for job in done)
        self._spent.append(Spent(self._clock.now - self._seconds, self._seconds, rows, 4))
        self.report = SamplerReport("vLLM", "ready", "cpu", self.steps // 3)
        one = SampledSequence(np.zeros(4, np.int32), np.zeros(4, np.float32), "length")
        return [(job.request, SampleOutput((one,))) for job in done]

    def spent(self) -> list[Spent]:
        spent, self._spent = self._spent, []
        return spent


@dataclass
class Story:
    """What the loop sent, and when."""

    clock: Clock
    sampled: dict[str, Sampled] = field(default_factory=dict[str, Sampled])
    at: dict[str | int, float] = field(default_factory=dict["str | int", float])
    spans: list[Span] = field(default_factory=list[Span])
    news: list[SamplerReport] = field(default_factory=list[SamplerReport])

    def take(self, message: FromWorker) -> None:
        match message:
            case Sampled(request):
                self.sampled[request], self.at[request] = message, self.clock.now
            case Returned(number):
                self.at[number] = self.clock.now
            case Turns(spans):
                self.spans += spans
            case SamplerNews(report):
                self.news.append(report)
            case _:
                raise AssertionError(message)


def tell(
    clock: Clock, *arrivals: tuple[float, ToWorker], rows: int = 2, seconds: float = 3.0
) -> tuple[Story, Elsewhere]:
    inbox = Inbox(clock, [(clock.now + at, message) for at, message in arrivals])
    sampler = Elsewhere(clock, inbox, rows, seconds)
    training = cast("TrainBackend", Training(clock, 2.0))
    report = DeviceReport("x", "x", "x", 1, 0)
    backend = Backend(ModelInfo(10, 10, 8, 1, "x"), report, training, cast("SampleBackend", sampler), sampler)
    story = Story(clock)
    Loop(backend, cast("queue.SimpleQueue[ToWorker | None]", inbox), story.take, rows).run()
    return story, sampler


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for name in ("time", "perf_counter", "monotonic"):
        monkeypatch.setattr(f"openrl.workers.loop.time.{name}", lambda: clock.now)
    return clock


def test_the_loop_sleeps_until_it_is_woken(clock: Clock) -> None:
    """A turn for each piece of news and none in between, also while others wait for rows."""
    story, sampler = tell(clock, *[(0.0, sample(f"s{i}:1")) for i in range(6)], rows=2)
    assert len(story.sampled) == 6
    assert sampler.steps <= 6
    assert sampler.most == 2, "whoever waits is put in a fair order until rows are free"


def test_training_goes_on_meanwhile(clock: Clock) -> None:
    """The pass takes what it takes alone; a sample that ended is handed out between two micro-batches."""
    start = clock.now
    story, _ = tell(clock, (0.0, train(1, 5, "t")), (0.0, sample("s:1")))
    assert story.at[1] - start == pytest.approx(10.0)
    assert story.at["s:1"] - start == pytest.approx(4.0)


def test_its_time_is_shared_among_who_had_it(clock: Clock) -> None:
    story, _ = tell(clock, (0.0, sample("a:1")), (0.0, sample("b:1")))
    assert [story.sampled[name].watch.seconds for name in ("a:1", "b:1")] == pytest.approx([1.5, 1.5])
    spans = [span for span in story.spans if span.kind is Kind.SAMPLE]
    assert sum(span.seconds for span in spans) == pytest.approx(3.0)


def test_the_daemon_hears_how_it_is_at_the_start_and_when_that_changes(clock: Clock) -> None:
    story, _ = tell(clock, *[(10.0 * i, sample(f"s{i}:1")) for i in range(4)])
    assert [report.restarts for report in story.news] == [0, 1]
