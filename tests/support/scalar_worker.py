"""A hand-written worker whose "model" is one number a run, so that order, batching and recovery can be seen exactly.

A pass adds the sum of its tokens to the gradient; a step computes `weight = weight * 2 + gradient` (not commutative, so
a wrong order shows); saving writes the numbers as JSON.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from openrl.backends.base import SampleJob
from openrl.errors import BadRequest, OpenRLError, WorkerDied
from openrl.types import (
    DeviceReport,
    ModelInfo,
    OptimOutput,
    RequestId,
    RunId,
    SampledSequence,
    SampleOutput,
    TrainOutput,
)
from openrl.workers import messages
from openrl.workers.messages import OpResult, Progress, Stopwatch, WorkerOp

INFO = ModelInfo(vocab_size=1000, max_context=128, max_lora_rank=64, parameters=1, family="scalar")
POISON = 666  # a pass with this token fails the pass as a whole
SECONDS = 0.25  # of the device, that every operation and sample takes
BAD = 13  # a datum with this token fails its item


@dataclass
class Scalar:
    weight: int = 1
    gradient: int = 0
    steps: int = 0


@dataclass
class ScalarWorker:
    """`calls` is everything that reached the device. Set `hold` to stop operations until it is set again."""

    runs: dict[RunId, Scalar] = field(default_factory=dict)
    calls: list[WorkerOp] = field(default_factory=list)
    jobs: list[SampleJob] = field(default_factory=list)
    hold: asyncio.Event | None = None
    die_on: Callable[[WorkerOp], bool] = lambda op: False
    fail_start: OpenRLError | None = None

    def __post_init__(self) -> None:
        self._gone = asyncio.Event()
        self._started = False

    @property
    def alive(self) -> bool:
        return self._started and not self._gone.is_set()

    async def start(self, on_progress: Callable[[Progress], None]) -> tuple[ModelInfo, DeviceReport]:
        if self.fail_start is not None:
            raise self.fail_start
        on_progress(Progress("loading", 0, None))
        self._started = True
        return INFO, DeviceReport("scalar", "none", "int", 1, 0)

    async def call(self, op: WorkerOp, watch: Stopwatch | None = None) -> OpResult:
        self.calls.append(op)
        await self._turn(watch)
        if self.die_on(op):
            self.kill()
            raise WorkerDied("killed by the test")
        return self._apply(op)

    async def sample(self, job: SampleJob, watch: Stopwatch | None = None) -> SampleOutput:
        """Draws the sampler's weight as the only token."""
        self.jobs.append(job)
        await self._turn(watch)
        weight = 0
        if job.adapter is not None:
            weight = json.loads((job.adapter.folder / "scalar.json").read_text())["weight"]
        tokens = np.array([weight], np.int32)
        sequence = SampledSequence(tokens, np.zeros(1, np.float32), "length")
        return SampleOutput((sequence,) * job.payload.num_samples)

    def cancel(self, request: RequestId) -> None:
        return None

    async def ended(self) -> None:
        await self._gone.wait()

    def kill(self) -> None:
        self._gone.set()

    async def close(self, seconds: float) -> None:
        self._gone.set()

    async def _turn(self, watch: Stopwatch | None) -> None:
        await asyncio.sleep(0)
        if watch is not None:
            watch.add(time.time(), SECONDS)
        if self.hold is not None:
            await self.hold.wait()
        if self._gone.is_set():
            raise WorkerDied("killed by the test")

    def _apply(self, op: WorkerOp) -> OpResult:
        match op:
            case messages.CreateRun(run, _):
                self.runs[run] = Scalar()
            case messages.DropRun(run):
                self.runs.pop(run, None)
            case messages.TrainPass(items):
                return self._pass(items)
            case messages.OptimStep(run, _):
                scalar = self.runs[run]
                self.runs[run] = Scalar(scalar.weight * 2 + scalar.gradient, 0, scalar.steps + 1)
                return OptimOutput({"weight:sum": float(self.runs[run].weight)})
            case messages.Save(run, into, optimizer, gradients):
                state: dict[str, Any] = {"weight": self.runs[run].weight}
                state |= {"steps": self.runs[run].steps} if optimizer else {}
                state |= {"gradient": self.runs[run].gradient} if gradients else {}
                (into / "scalar.json").write_text(json.dumps(state))
            case messages.Load(run, source, optimizer):
                state = json.loads((source / "scalar.json").read_text())
                if not optimizer:
                    state = {"weight": state["weight"]}
                self.runs[run] = Scalar(**state)
        return None

    def _pass(self, items: tuple[Any, ...]) -> messages.PassResult:
        if any(POISON in datum.tokens for item in items for datum in item.payload.data):
            raise OpenRLError("poisoned pass")
        results: messages.PassResult = {}
        for item in items:
            total = sum(int(datum.tokens.sum()) for datum in item.payload.data)
            if any(BAD in datum.tokens for datum in item.payload.data):
                results[item.request] = BadRequest("a bad datum")
                continue
            if item.backward:
                self.runs[item.run].gradient += total
            logprobs = tuple(np.zeros(len(datum.tokens), np.float32) for datum in item.payload.data)
            results[item.request] = TrainOutput(logprobs, {"loss:sum": float(total)})
        return results
