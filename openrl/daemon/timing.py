"""When a request got where: noted on its way, stored with its end."""

from __future__ import annotations

from dataclasses import dataclass, field

from openrl.workers.messages import Stopwatch


@dataclass(slots=True)
class Timing:
    """Seconds since the epoch, 0 for what has not happened: handed to its worker; sent to the device, once its run is
    there; and how it fared on the device."""

    dispatched_at: float = 0.0
    sent_at: float = 0.0
    watch: Stopwatch = field(default_factory=Stopwatch)

    @property
    def started_at(self) -> float:
        """When it began to run, as the worker says, else when it was sent; never before it was dispatched."""
        return max(self.watch.started_at or self.sent_at, self.dispatched_at)
