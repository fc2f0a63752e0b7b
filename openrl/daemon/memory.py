"""The memory that base models share: what one needs, what a worker holds, and how much there is for all together."""

from __future__ import annotations

from collections.abc import Callable

import psutil

from openrl.types import DeviceReport, ModelInfo
from openrl.workers.protocol import Process, Worker

_PLENTY = 1 << 62
_GIB = 1 << 30


class Memory:
    """By default there is no limit, and nothing needs any.

    A worker on a device with memory of its own reports how much of it is free, and from then on that counts; else it
    is the machine's. A `budget` of more than 0 bytes counts instead of either.
    """

    def __init__(
        self,
        budget: int = 0,
        needed: Callable[[ModelInfo], int] = lambda _: 0,
        available: Callable[[], int] = lambda: _PLENTY,
        check: Callable[[str, ModelInfo, int], None] = lambda *_: None,
    ) -> None:
        """`needed`: bytes of a model once it is loaded. `available`: bytes that the machine has free. `check` raises
        ModelError with the numbers if a model (name and info) does not fit into so many bytes."""
        self._budget = budget
        self._needed = needed
        self._available = available
        self._device: int | None = None  # bytes that models may have on a device of its own
        self.check = check

    def need(self, info: ModelInfo | None) -> int:
        """Bytes that a model takes once it is loaded; 0 while its size is not known."""
        return 0 if info is None else self._needed(info)

    def held(self, worker: Worker | None, report: DeviceReport | None) -> int:
        """Bytes that a worker has now: on its device, or of the machine's memory."""
        if report is not None and worker is not None and report.device_bytes:
            return report.device_bytes
        pid = worker.pid if isinstance(worker, Process) else None
        return resident(pid) if pid else 0

    def capacity(self, held: int) -> int:
        """Bytes for all models together; `held` is what their workers have of it."""
        if self._budget:
            return self._budget
        return self._available() + held if self._device is None else self._device

    def note(self, report: DeviceReport, others: int) -> None:
        """A worker has loaded its model and says what its device has left; `others` have so many bytes of it."""
        if report.device_bytes:
            self._device = report.device_free_bytes + report.device_bytes + others


def resident(pid: int) -> int:
    """Bytes of the machine's memory that a process and its children alone have.

    Pages that they share with files are left out: the system takes them back when it needs them.
    """
    try:
        process = psutil.Process(pid)
        infos = [one.memory_info() for one in (process, *process.children(recursive=True))]
    except psutil.Error:  # one ended a moment ago
        return 0
    return sum(max(0, info.rss - getattr(info, "shared", 0)) for info in infos)


def gib(size: int) -> str:
    """A size for a person."""
    return f"{size / _GIB:.1f} GiB"
