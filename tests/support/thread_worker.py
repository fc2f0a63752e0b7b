"""A worker whose loop is the real one, in a thread, over a device that only takes time: for tests of daemon and worker
together. Messages are pickled and cross a socket, as they do between processes."""

from __future__ import annotations

import asyncio
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import numpy as np

from openrl.backends.base import Backend, SampleJob, TrainItem
from openrl.errors import OpenRLError
from openrl.types import (
    AdamParams,
    DeviceReport,
    LoraSpec,
    ModelInfo,
    OptimOutput,
    RequestId,
    RunId,
    SampledSequence,
    SampleOutput,
    TrainOutput,
)
from openrl.workers.local import LocalWorker
from openrl.workers.loop import Loop
from openrl.workers.messages import FromWorker, News, Prepared, Ready, ToWorker
from support.scalar_worker import INFO, Scalar


@dataclass
class Speed:
    """Seconds that things take. A turn or a micro-batch takes `*_turn`, and so much more for each row or token."""

    sample_turn: float = 0.0
    sample_row: float = 0.0
    train_turn: float = 0.0
    train_token: float = 0.0
    step: float = 0.0
    budget: int = 100  # tokens of a micro-batch
    rows: int = 8


@dataclass
class SlowTraining:
    """As `ScalarWorker` computes; `passes` are the numbers of items of each pass."""

    speed: Speed
    runs: dict[RunId, Scalar] = field(default_factory=dict)
    passes: list[int] = field(default_factory=list)

    def create(self, run: RunId, spec: LoraSpec) -> None:
        self.runs[run] = Scalar()

    def drop(self, run: RunId) -> None:
        self.runs.pop(run, None)

    def train_pass(self, items: tuple[TrainItem, ...]) -> Iterator[dict[RequestId, TrainOutput | OpenRLError]]:
        self.passes.append(len(items))
        left = sum(len(datum.tokens) for item in items for datum in item.payload.data)
        while left > self.speed.budget:
            time.sleep(self.speed.train_turn + self.speed.train_token * self.speed.budget)
            left -= self.speed.budget
            yield {}
        time.sleep(self.speed.train_turn + self.speed.train_token * left)
        yield {item.request: self._result(item) for item in items}

    def _result(self, item: TrainItem) -> TrainOutput:
        total = sum(int(datum.tokens.sum()) for datum in item.payload.data)
        if item.backward:
            self.runs[item.run].gradient += total
        logprobs = tuple(np.zeros(len(datum.tokens), np.float32) for datum in item.payload.data)
        return TrainOutput(logprobs, {"loss:sum": float(total)})

    def optim_step(self, run: RunId, adam: AdamParams) -> OptimOutput:
        time.sleep(self.speed.step)
        scalar = self.runs[run]
        self.runs[run] = Scalar(scalar.weight * 2 + scalar.gradient, 0, scalar.steps + 1)
        return OptimOutput({"weight:sum": float(self.runs[run].weight)})

    def save(self, run: RunId, into: Path, *, optimizer: bool, gradients: bool) -> None:
        (into / "scalar.json").write_text(json.dumps(vars(self.runs[run])))

    def load(self, run: RunId, source: Path, *, optimizer: bool) -> None:
        self.runs[run] = Scalar(**json.loads((source / "scalar.json").read_text()))


@dataclass
class SlowSampling:
    """First come, first served; each turn draws a token for each row, always token 7."""

    speed: Speed
    queued: list[tuple[SampleJob, int]] = field(default_factory=list)
    live: list[tuple[SampleJob, int]] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        return bool(self.queued or self.live)

    @property
    def active(self) -> list[RequestId]:
        return [job.request for job, _ in self.live]

    @property
    def waiting(self) -> int:
        return len(self.queued)

    def add(self, job: SampleJob) -> None:
        self.queued.append((job, job.payload.params.max_tokens or 1))

    def cancel(self, request: RequestId) -> None:
        self.queued = [entry for entry in self.queued if entry[0].request != request]
        self.live = [entry for entry in self.live if entry[0].request != request]

    def step(self) -> list[tuple[RequestId, SampleOutput | OpenRLError]]:
        free = self.speed.rows - len(self.live)
        self.live, self.queued = self.live + self.queued[:free], self.queued[free:]
        time.sleep(self.speed.sample_turn + self.speed.sample_row * len(self.live))
        turned = [(job, left - 1) for job, left in self.live]
        self.live = [entry for entry in turned if entry[1]]
        return [(job.request, _drawn(job)) for job, left in turned if not left]


def _drawn(job: SampleJob) -> SampleOutput:
    count = job.payload.params.max_tokens or 1
    sequence = SampledSequence(np.full(count, 7, np.int32), np.zeros(count, np.float32), "length")
    return SampleOutput((sequence,) * job.payload.num_samples)


class _Thread:
    """What `LocalWorker` asks of its process."""

    pid = 0

    def __init__(self, body: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=body, daemon=True, name="device")
        self._thread.start()

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        return 0

    def kill(self) -> None:
        return None


class ThreadWorker(LocalWorker):
    """`training` and `sampling` are the device, to look at."""

    def __init__(self, speed: Speed) -> None:
        super().__init__(cast("Any", None))
        self.speed = speed
        self.training = SlowTraining(speed)
        self.sampling = SlowSampling(speed)

    async def start(self, on_news: Callable[[News], None]) -> tuple[ModelInfo, DeviceReport]:
        self._loop = asyncio.get_running_loop()
        self._on_news = on_news
        self._opened: asyncio.Future[Ready | Prepared] = self._loop.create_future()
        ours, theirs = (Connection(end.detach()) for end in socket.socketpair())
        self._process = cast("Any", _Thread(lambda: self._device(theirs)))
        threading.Thread(target=self._pump_in, args=(ours,), daemon=True).start()
        threading.Thread(target=self._pump_out, args=(ours,), daemon=True).start()
        ready = await self._opened
        assert isinstance(ready, Ready)
        return ready.info, ready.report

    def use_threads(self, threads: int) -> None:
        """The device is no CPU."""

    def _device(self, connection: Connection) -> None:
        backend = Backend(INFO, DeviceReport("slow", "none", "int", 1, 0), self.training, self.sampling)
        inbox: queue.SimpleQueue[ToWorker | None] = queue.SimpleQueue()

        def read() -> None:
            while True:
                try:
                    inbox.put(connection.recv())
                except (EOFError, OSError):
                    inbox.put(None)
                    return

        threading.Thread(target=read, daemon=True).start()
        connection.send(Ready(backend.info, backend.report))
        send = cast("Callable[[FromWorker], None]", connection.send)
        Loop(backend, inbox, send, self.speed.rows).run()
        connection.close()
