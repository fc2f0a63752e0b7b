"""The protocols a backend implements: synchronous, single-threaded, dataclasses in, numpy out.

A backend owns the accelerator for one base model and lives in a worker process (`openrl.workers.loop` drives it).
`TrainBackend.train_pass` is a generator so that the loop can take sampler steps between micro-batches without
threads; `SampleBackend.step` is one turn of continuous batching.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from openrl.custom_loss import LossProgram
from openrl.errors import OpenRLError
from openrl.types import (
    AdamParams,
    AdapterRef,
    DeviceReport,
    LoraSpec,
    ModelInfo,
    OptimOutput,
    RequestId,
    RunId,
    SampleOutput,
    SamplePayload,
    TrainOutput,
    TrainPayload,
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
    """Owns adapters, gradients and optimizer state of the runs it holds."""

    def create(self, run: RunId, spec: LoraSpec) -> None:
        """Make a fresh adapter (A1-A7); creating an existing run replaces it."""
        ...

    def drop(self, run: RunId) -> None:
        """Forget a run and free its memory; unknown runs are ignored."""
        ...

    def train_pass(self, items: tuple[TrainItem, ...]) -> Iterator[dict[RequestId, TrainOutput | OpenRLError]]:
        """Forward (and backward) over all items together, yielding after each micro-batch.

        Each yield holds what was finished since the last one; every item appears exactly once over the whole pass.
        An item that failed (`BadRequest` for a non-finite result, L11; `OutOfMemory`) adds nothing to its run's
        gradient (G6), and the others are not disturbed. Raises only for faults of the backend itself.
        """
        ...

    def optim_step(self, run: RunId, adam: AdamParams) -> OptimOutput:
        """One AdamW step from the accumulated gradient, which becomes zero (O1-O9). Raises `BadRequest` on O8."""
        ...

    def save(self, run: RunId, into: Path, *, optimizer: bool, gradients: bool) -> None:
        """Write `adapter_config.json` and `adapter_model.safetensors` (A14, A15) into an existing empty folder.

        With `optimizer`: also `optimizer.safetensors` (m, v and t; O11). With `gradients`: also
        `gradients.safetensors`, the accumulator, when it is not zero. Changes no state (C2).
        """
        ...

    def load(self, run: RunId, source: Path, *, optimizer: bool) -> None:
        """Replace a run's weights by a checkpoint's, the accumulator by zero (G10) or by the saved gradients.

        With `optimizer` m, v and t come from the folder too (`BadRequest` if it has none, C3); without, they become
        zero. `gradients.safetensors` is read only together with `optimizer`. A run that does not exist is created with
        the checkpoint's LoRA spec; for one that does, a mismatch of rank or modules is a `BadRequest` (C3).
        Bit-exact (C4).
        """
        ...


class SampleBackend(Protocol):
    """Continuous batching over samplers that differ only in their adapter."""

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


@dataclass(frozen=True, slots=True)
class Backend:
    """An opened backend: both halves over one copy of the base weights."""

    info: ModelInfo
    report: DeviceReport
    train: TrainBackend
    sample: SampleBackend
