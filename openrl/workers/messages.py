"""What crosses the pipe between the daemon and a worker: pickled dataclasses, between two processes of one program."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from openrl.backends.base import SampleJob, TrainItem, VllmSpec
from openrl.errors import OpenRLError
from openrl.types import (
    AdamParams,
    DeviceReport,
    ModelInfo,
    ModelSpec,
    OptimOutput,
    RequestId,
    RunId,
    SampleOutput,
    SamplerReport,
    SessionId,
    TrainOutput,
    TrainSpec,
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
    prefix_cache_tokens: int = 16384
    sampler: str = "engine"
    vllm: VllmSpec | None = None
    load: bool = True  # False: only have the files fetched and converted
    quantize: str = "none"
    devices: int = 1


# ---- operations: one at a time, in order, each answered ----


@dataclass(frozen=True, slots=True)
class CreateRun:
    run: RunId
    spec: TrainSpec


@dataclass(frozen=True, slots=True)
class DropRun:
    run: RunId


@dataclass(frozen=True, slots=True)
class TrainPass:
    """Answered by `dict[RequestId, TrainOutput | OpenRLError]`, an entry for each item.

    Passes that are in hand at the same time take turns, micro-batch by micro-batch, in shares of their `weight`.
    """

    items: tuple[TrainItem, ...]
    weight: float = 1.0


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
class UseThreads:
    """How many CPU threads the worker may use from now on, since others work beside it, or no more."""

    threads: int


@dataclass(frozen=True, slots=True)
class Woken:
    """From within the worker: its sampler, which works in a process of its own, has news."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave the loop after the operation in hand."""


ToWorker = WorkerSpec | Call | AddSample | CancelSample | UseThreads | Woken | Stop


# ---- worker to daemon ----


@dataclass(frozen=True, slots=True)
class Progress:
    """Preparing or loading the model; `done` and `total` are bytes or steps, total None when unknown."""

    stage: str
    done: int
    total: int | None


@dataclass(frozen=True, slots=True)
class Prepared:
    """The model's files are here, which is all that was asked for; the worker ends."""


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


class Kind(StrEnum):
    """What a device can be busy with."""

    TRAIN = "train"  # passes and optimizer steps
    SAMPLE = "sample"
    OTHER = "other"  # making, loading and saving adapters


@dataclass(slots=True)
class Span:
    """A stretch of time, in seconds since the epoch, in which the device did one kind of thing.

    It may be made of several turns with gaps of milliseconds: `seconds` is how long the device worked in it, `longest`
    its longest turn. `sessions` says how many of the seconds each session had. `rows` is the most sequences that were
    drawn together, or runs that were trained together.
    """

    kind: Kind
    start: float
    end: float
    seconds: float
    longest: float
    turns: int
    rows: int
    sessions: dict[SessionId, float]


@dataclass(frozen=True, slots=True)
class Turns:
    """What the device did lately, and which samples have begun. Sent unasked, a few times a second."""

    spans: tuple[Span, ...]
    begun: tuple[RequestId, ...]


@dataclass(frozen=True, slots=True)
class SamplerNews:
    """A sampler that works in a process of its own has started, ended, or goes on otherwise than before."""

    report: SamplerReport


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


News = Progress | Turns | SamplerNews  # what a worker tells unasked
FromWorker = News | Prepared | Ready | Unusable | Returned | Sampled
