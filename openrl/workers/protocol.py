"""What the daemon knows of a worker, wherever the device is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from openrl.backends.base import SampleJob
from openrl.types import DeviceReport, ModelInfo, RequestId, SampleOutput
from openrl.workers.messages import News, OpResult, Stopwatch, WorkerOp


class Worker(Protocol):
    """One opened model. Calls raise `WorkerDied` when the worker ends with the call in hand."""

    async def start(self, on_news: Callable[[News], None]) -> tuple[ModelInfo, DeviceReport]:
        """Prepare and open the model; raises `OpenRLError` when it cannot be served.

        `on_news` is told of the progress, and later, as long as the worker lives, of what the device does.
        """
        ...

    async def call(self, op: WorkerOp, watch: Stopwatch | None = None) -> OpResult:
        """Run one operation; they run in the order of the calls, save that training passes in hand take turns with
        each other and let everything else go first. Raises the operation's `OpenRLError`.

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

    async def close(self, seconds: float) -> None:
        """Let the operation in hand end, then end the worker; kill it if that takes more than `seconds`."""
        ...


@runtime_checkable
class Process(Protocol):
    """A worker that is a process of this machine, and so has memory to look at."""

    @property
    def pid(self) -> int | None:
        """None until it is started."""
        ...


@runtime_checkable
class Threaded(Protocol):
    """A worker that computes on CPU threads."""

    def use_threads(self, threads: int) -> None:
        """Use so many from now on; before its start: from the start on."""
        ...
