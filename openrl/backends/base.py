"""The protocols a backend implements: synchronous, single-threaded, dataclasses in, numpy out.

A backend owns the accelerator for one base model and lives in a worker process (`openrl.workers.loop` drives it).
`TrainBackend.train_pass` is a generator so that the loop can take sampler steps between micro-batches without
threads; `SampleBackend.step` is one turn of continuous batching.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from openrl.custom_loss import LossProgram
from openrl.errors import OpenRLError
from openrl.types import (
    AdamParams,
    AdapterRef,
    DeviceReport,
    ModelInfo,
    OptimOutput,
    RequestId,
    RunId,
    SampleOutput,
    SamplePayload,
    SamplerReport,
    TrainOutput,
    TrainPayload,
    TrainSpec,
)


@dataclass(frozen=True, slots=True)
class TrainItem:
    """One request's part in a pass. A pass holds at most one item of each run, so that each fails or counts alone."""

    request: RequestId
    run: RunId
    payload: TrainPayload
    backward: bool  # False: `forward`, which changes nothing (G5)
    program: LossProgram | None = None  # the loss, where the payload's `loss_fn` is "custom"


@dataclass(frozen=True, slots=True)
class SampleJob:
    """One `asample` on its way through the sampler; `adapter` None samples from the base model.

    `weight` is its session's when sessions share the device; backends need not look at it.
    """

    request: RequestId
    payload: SamplePayload
    adapter: AdapterRef | None
    weight: float = 1.0


class TrainBackend(Protocol):
    """Owns weights, gradients and optimizer state of the runs it holds: adapters, and at most one run that trains all
    parameters (F6)."""

    def create(self, run: RunId, spec: TrainSpec) -> None:
        """Make a fresh adapter (A1-A7), or a copy of the base model to train (F1), in place of the run if it exists.

        Raises `BadRequest` for a second run of the latter kind or where the backend has none, `OutOfMemory` with the
        numbers where it cannot fit.
        """
        ...

    def drop(self, run: RunId) -> None:
        """Forget a run and free its memory; unknown runs are ignored."""
        ...

    def train_pass(self, items: tuple[TrainItem, ...]) -> Iterator[dict[RequestId, TrainOutput | OpenRLError]]:
        """Forward (and backward) over all items together, yielding after each micro-batch.

        Each yield holds what was finished since the last one; every item appears exactly once over the whole pass.
        An item that failed (`BadRequest` for a non-finite result, L11, or a datum beyond the model's context;
        `OutOfMemory`) adds nothing to its run's gradient (G6), and the others are not disturbed. Raises only for faults
        of the backend itself.
        """
        ...

    def optim_step(self, run: RunId, adam: AdamParams) -> OptimOutput:
        """One AdamW step from the accumulated gradient, which becomes zero (O1-O9). Raises `BadRequest` on O8."""
        ...

    def save(self, run: RunId, into: Path, *, optimizer: bool, gradients: bool) -> None:
        """Write `adapter_config.json` and `adapter_model.safetensors` (A14, A15) into an existing empty folder; of a
        run that trains all parameters a whole model (F5), in float32 with `optimizer`, else in the compute dtype.

        With `optimizer`: also `optimizer.safetensors` (m, v and t; O11). With `gradients`: also
        `gradients.safetensors`, the accumulator, when it is not zero. Changes no state (C2).
        """
        ...

    def load(self, run: RunId, source: Path, *, optimizer: bool) -> None:
        """Replace a run's weights by a checkpoint's, the accumulator by zero (G10) or by the saved gradients.

        With `optimizer` m, v and t come from the folder too (`BadRequest` if it has none, C3); without, they become
        zero. `gradients.safetensors` is read only together with `optimizer`. A run that does not exist is created with
        the checkpoint's own spec; for one that does, a mismatch of kind, rank or modules is a `BadRequest` (C3).
        Bit-exact (C4).
        """
        ...


class SampleBackend(Protocol):
    """Continuous batching over samplers that differ only in their adapter; those of whole models (F5) beside them."""

    def add(self, job: SampleJob) -> None:
        """Queue a job. Raises `OpenRLError` if it can never run."""
        ...

    def cancel(self, request: RequestId) -> None:
        """Forget a job and free its rows; unknown ones are ignored."""
        ...

    def step(self) -> list[tuple[RequestId, SampleOutput | OpenRLError]]:
        """Take one turn (admit and prefill, or decode one token for every row); return the jobs that finished."""
        ...

    @property
    def busy(self) -> bool:
        """Whether `step` has work."""
        ...

    @property
    def active(self) -> list[RequestId]:
        """The request of each sequence that has a row now, one entry a row: who shares the device's time."""
        ...

    @property
    def waiting(self) -> int:
        """Sequences that were added and have not begun: the worker's loop adds more only when these are few, so that
        whoever waits can still be put in a fair order."""
        ...


@dataclass(frozen=True, slots=True)
class Spent:
    """Time that a sampler computed: for whom, one entry a sequence, and how many tokens each of these drew."""

    began_at: float  # seconds since the epoch
    seconds: float
    rows: tuple[RequestId, ...]
    steps: int


class Apart(Protocol):
    """What a sampler adds that draws in a process of its own. Its `step` only takes what has come: it is `busy` when
    something has, and then calls `BackendSpec.wake`, so that a loop without work need not ask."""

    @property
    def report(self) -> SamplerReport:
        """How it is."""
        ...

    def spent(self) -> list[Spent]:
        """What was computed since this was last asked."""
        ...


@dataclass(frozen=True, slots=True)
class VllmSpec:
    """How vLLM is to run. `scratch` is a folder of its own, emptied at its start; its log is there."""

    scratch: Path
    python: Path | None = None  # the interpreter that has it; None: this one
    memory_fraction: float | None = None  # of its GPU's memory; None: the usual one
    gpu: int | None = None  # None: training's
    hang_seconds: float = 120.0  # without a sign of life, after which it is started again


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """What a backend is opened with. `folder` is a Hugging Face folder with safetensors (see `openrl.models`)."""

    folder: Path
    device: str  # "auto", "cpu", "cuda"
    dtype: str  # "auto", "float32", "bfloat16"
    threads: int  # 0: as many as physical cores
    max_batch_tokens: int  # padded tokens in one training micro-batch
    max_sample_rows: int  # sequences decoded together
    max_kv_tokens: int  # tokens that the KV cache may hold over all rows
    prefix_cache_tokens: int = 16384  # tokens of earlier samples kept beside those, for prompts that begin with them
    name: str = ""  # served name of the base model, written into adapter files
    sampler: str = "engine"  # "auto", "engine", "vllm"
    vllm: VllmSpec | None = None  # how, if it is vLLM
    wake: Callable[[], None] = lambda: None  # to be called, from any thread, when a sampler that works apart has news
    report: Callable[[str], None] = lambda _: None  # told what is being loaded, if that takes long
    quantize: str = "none"  # how the base model's linear layers are held: "none" (in `dtype`), "nf4"
    devices: int = 1  # GPUs, or processes on a CPU, that train together
    lost: Callable[[str], None] = lambda _: None  # told, from any thread, why the backend can do nothing any more


@dataclass(frozen=True, slots=True)
class Backend:
    """An opened backend: both halves over one copy of the base weights."""

    info: ModelInfo
    report: DeviceReport
    train: TrainBackend
    sample: SampleBackend
    apart: Apart | None = None  # `sample`, if it works in a process of its own
    use_threads: Callable[[int], None] = lambda _: None  # told when its share of the CPU's threads changes
