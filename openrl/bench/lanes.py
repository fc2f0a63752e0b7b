"""What the device did in a stretch of time, as the server recorded it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from openrl.bench.served import Door

_REPORTED_S = 0.6  # after which the server has heard of every turn


@dataclass(frozen=True, slots=True)
class Span:
    """Turns of one kind ("train", "sample", ...) close together, from `start` to `end`, in Unix seconds.

    The device worked for `seconds` of it; its longest turn took `longest`.
    """

    start: float
    end: float
    seconds: float
    longest: float
    kind: str


@dataclass(frozen=True, slots=True)
class Lanes:
    """Spans between `began` and `ended`, in order."""

    began: float
    ended: float
    spans: tuple[Span, ...]

    @property
    def busy(self) -> float:
        """The share of the time in which the device worked."""
        return sum(span.seconds for span in self.spans) / (self.ended - self.began)

    def longest(self, kind: str) -> float:
        """Seconds of the longest turn of a kind."""
        return max((span.longest for span in self.spans if span.kind == kind), default=0.0)


def recorded(door: Door, began: float, ended: float) -> Lanes:
    """What the device of the model did between two moments; waits until the server has heard of all of it."""
    time.sleep(max(0.0, ended + _REPORTED_S - time.time()))
    with door.http() as client:
        answer = client.get("device_lanes", params={"since": began})
    answer.raise_for_status()
    names = ("start", "end", "seconds", "longest", "kind")
    spans = [Span(**{name: span[name] for name in names}) for span in answer.json()["models"][door.model]]
    return Lanes(began, ended, tuple(span for span in spans if began <= span.start and span.end <= ended))
