"""What crosses the pipe between the daemon and a worker: pickled dataclasses, between two processes of one program."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from openrl.backends.base import SampleJob, TrainItem
from openrl.errors import OpenRLError
from openrl.types import (
    AdamParams,
    DeviceReport,
    LoraSpec,
    ModelInfo,
    ModelSpec,
    OptimOutput,
    RequestId,
    RunId,
    SampleOutput,
    TrainOutput,
)

# ---- what a worker is told once, at its start ----


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Everything a worker needs to prepare and open its model."""

    model: ModelSpec
    data_dir: Path
    backend: str
    dtype: str
    threads: int
    max_batch_tokens: int
    max_sample_rows: int
    max_kv_tokens: int


# ---- operations: one at a time, in order, each answered ----


@dataclass(frozen=True, slots=True)
class CreateRun:
    run: RunId
    spec: LoraSpec


@dataclass(frozen=True, slots=True)
class DropRun:
    run: RunId


@dataclass(frozen=True, slots=True)
class TrainPass:
    """Answered by `dict[RequestId, TrainOutput | OpenRLError]`, an entry for each item."""

    items: tuple[TrainItem, ...]


@dataclass(frozen=True, slots=True)
class OptimStep:
    """Answered by `OptimOutput`."""

    run: RunId
    adam: AdamParams


@dataclass(frozen=True, slots=True)
class Save:
    run: RunId
    into: Path
    optimizer: bool
    gradients: bool


@dataclass(frozen=True, slots=True)
class Load:
    run: RunId
    source: Path
    optimizer: bool


WorkerOp = CreateRun | DropRun | TrainPass | OptimStep | Save | Load
PassResult = dict[RequestId, TrainOutput | OpenRLError]
OpResult = PassResult | OptimOutput | None


# ---- daemon to worker ----


@dataclass(frozen=True, slots=True)
class Call:
    number: int
    op: WorkerOp


@dataclass(frozen=True, slots=True)
class AddSample:
    job: SampleJob


@dataclass(frozen=True, slots=True)
class CancelSample:
    request: RequestId


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave the loop after the operation in hand."""


ToWorker = WorkerSpec | Call | AddSample | CancelSample | Stop


# ---- worker to daemon ----


@dataclass(frozen=True, slots=True)
class Progress:
    """Preparing or loading the model; `done` and `total` are bytes or steps, total None when unknown."""

    stage: str
    done: int
    total: int | None


@dataclass(frozen=True, slots=True)
class Ready:
    info: ModelInfo
    report: DeviceReport


@dataclass(frozen=True, slots=True)
class Unusable:
    """The model cannot be served; the worker ends."""

    error: OpenRLError


@dataclass(slots=True)
class Stopwatch:
    """When work began on the device (seconds since the epoch; 0: not yet), and how many seconds of the device it had.

    Work that shares the device gets its share of each turn.
    """

    started_at: float = 0.0
    seconds: float = 0.0

    def add(self, began_at: float, seconds: float) -> None:
        self.started_at = self.started_at or began_at
        self.seconds += seconds

    def set(self, other: Stopwatch) -> None:
        self.started_at, self.seconds = other.started_at, other.seconds


@dataclass(frozen=True, slots=True)
class Returned:
    number: int
    result: OpResult | OpenRLError
    watch: Stopwatch


@dataclass(frozen=True, slots=True)
class Sampled:
    request: RequestId
    result: SampleOutput | OpenRLError
    watch: Stopwatch


FromWorker = Progress | Ready | Unusable | Returned | Sampled
