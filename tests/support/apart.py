"""Drives a sampler that works in a process of its own, as the worker's loop does."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from openrl.backends.base import SampleBackend, SampleJob
from openrl.errors import OpenRLError
from openrl.types import AdapterRef, RequestId, SampleOutput, SamplePayload


@dataclass
class Driver:
    """Serves a sampler that works in a process of its own: sleeps until it has news, as the worker's loop does."""

    sampler: SampleBackend
    woken: threading.Event
    turns: int = 0
    results: dict[str, SampleOutput | OpenRLError] = field(default_factory=dict[str, "SampleOutput | OpenRLError"])

    def add(self, name: str, payload: SamplePayload, adapter: AdapterRef | None = None) -> None:
        self.sampler.add(SampleJob(RequestId(name), payload, adapter))

    def until(self, *names: str, seconds: float = 300.0) -> None:
        """Take turns until these have ended."""
        deadline = time.monotonic() + seconds
        while not all(name in self.results for name in names):
            assert time.monotonic() < deadline, f"{names} did not end; ended: {list(self.results)}"
            if not self.sampler.busy:
                self.woken.wait(deadline - time.monotonic())
                self.woken.clear()
                continue
            self.turns += 1
            for request, result in self.sampler.step():
                assert request not in self.results
                self.results[request] = result

    def draw(self, payload: SamplePayload, adapter: AdapterRef | None = None) -> SampleOutput:
        """One request, to its end, which must be good."""
        return self.draw_all([(payload, adapter)])[0]

    def draw_all(self, asks: Sequence[tuple[SamplePayload, AdapterRef | None]]) -> list[SampleOutput]:
        names = [f"{len(self.results)}-{i}" for i in range(len(asks))]
        for name, (payload, adapter) in zip(names, asks, strict=True):
            self.add(name, payload, adapter)
        self.until(*names)
        outputs = [self.results[name] for name in names]
        for output in outputs:
            assert isinstance(output, SampleOutput), output
        return [output for output in outputs if isinstance(output, SampleOutput)]
