"""What the daemon knows of a worker, wherever the device is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from openrl.backends.base import SampleJob
from openrl.types import DeviceReport, ModelInfo, RequestId, SampleOutput
from openrl.workers.messages import OpResult, Progress, Stopwatch, WorkerOp


class Worker(Protocol):
    """One opened model. Calls raise `WorkerDied` when the worker ends with the call in hand."""

    async def start(self, on_progress: Callable[[Progress], None]) -> tuple[ModelInfo, DeviceReport]:
        """Prepare and open the model; raises `OpenRLError` when it cannot be served."""
        ...

    async def call(self, op: WorkerOp, watch: Stopwatch | None = None) -> OpResult:
        """Run one operation; operations run in the order of the calls. Raises the operation's `OpenRLError`.

        However it ends, `watch` then tells when it had the device.
        """
        ...

    async def sample(self, job: SampleJob, watch: Stopwatch | None = None) -> SampleOutput:
        """Draw one job; many may be under way. Cancelling the task cancels the job. `watch`: as for `call`."""
        ...

    def cancel(self, request: RequestId) -> None:
        """Stop drawing a job; its `sample` call then never returns a result."""
        ...

    async def ended(self) -> None:
        """Wait until the worker is gone, for whatever reason."""
        ...

    @property
    def alive(self) -> bool: ...

    async def close(self) -> None:
        """Let the operation in hand end, then end the worker."""
        ...
