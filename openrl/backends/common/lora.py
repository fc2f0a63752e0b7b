"""What LoRA adapters are on any engine: which layers carry them, what their first weights are, which rows use which."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from openrl.checkpoints.peft import LoraShape, modules_of
from openrl.types import LoraSpec

A = TypeVar("A")  # an engine's adapter


def layer_names(spec: LoraSpec, shapes: dict[str, LoraShape]) -> list[str]:
    """Layers that `spec` trains, in the model's order (4.2)."""
    wanted = modules_of(spec)
    return [name for name in shapes if name.rsplit(".", 1)[-1] in wanted]


def layer_seed(seed: int, name: str) -> int:
    """Seed of a layer's own generator (A4): other layers, and whether there are any, do not matter to it."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


@dataclass(frozen=True)  # no slots: engines make it through their alias, which Python 3.11 cannot do with them
class Segment(Generic[A]):
    """Rows [start, stop) of a batch belong to `adapter`."""

    start: int
    stop: int
    adapter: A | None


class Routing(Generic[A]):
    """Which rows of the current batch use which adapter; shared by all wrapped layers of a model."""

    def __init__(self) -> None:
        self.segments: tuple[Segment[A], ...] = ()

    @contextmanager
    def use(self, adapters: Sequence[A | None]) -> Generator[None]:
        """Route row i of the batch to `adapters[i]`. Rows of one adapter should be neighbours: a run is one product."""
        before, self.segments = self.segments, segments_of(adapters)
        try:
            yield
        finally:
            self.segments = before


def segments_of(adapters: Sequence[A | None]) -> tuple[Segment[A], ...]:
    """Runs of equal neighbours."""
    segments: list[Segment[A]] = []
    start = 0
    for stop in range(1, len(adapters) + 1):
        if stop == len(adapters) or adapters[stop] is not adapters[start]:
            segments.append(Segment(start, stop, adapters[start]))
            start = stop
    return tuple(segments)
