"""The whole training half of an engine: adapters over the shared base, and the run that trains all of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from openrl.backends.base import TrainItem
from openrl.backends.common.work import Outcome
from openrl.checkpoints.full import is_full
from openrl.errors import BadRequest
from openrl.types import AdamParams, Array, FullSpec, LoraSpec, OptimOutput, RequestId, RunId, TrainSpec

Outcomes = Iterator[dict[RequestId, Outcome]]


class Part(Protocol):
    """What both kinds of trainers can do with a run that they hold (see `TrainBackend`)."""

    def holds(self, run: RunId) -> bool: ...

    def drop(self, run: RunId) -> None: ...

    def optim_step(self, run: RunId, adam: AdamParams) -> OptimOutput: ...

    def save(self, run: RunId, into: Path, *, optimizer: bool, gradients: bool) -> None: ...

    def load(self, run: RunId, source: Path, *, optimizer: bool) -> None: ...

    def gradients(self, run: RunId) -> Mapping[str, Array]: ...

    def parameters(self, run: RunId) -> Mapping[str, Array]: ...


class LoraPart(Part, Protocol):
    """Trains adapters, of many runs in one forward."""

    def create(self, run: RunId, spec: LoraSpec) -> None: ...

    def train_pass(self, items: tuple[TrainItem, ...]) -> Outcomes: ...


class FullPart(Part, Protocol):
    """Trains all parameters, of one run at a time (F6)."""

    def create(self, run: RunId) -> None: ...

    def train_pass(self, item: TrainItem) -> Outcomes: ...


class Training:
    """Implements `TrainBackend` by handing each run to the part that holds it."""

    def __init__(self, lora: LoraPart, full: FullPart) -> None:
        self._lora = lora
        self._full = full

    def create(self, run: RunId, spec: TrainSpec) -> None:
        """See `TrainBackend.create`."""
        if isinstance(spec, FullSpec):
            self._full.create(run)
            self._lora.drop(run)
        else:
            self._lora.create(run, spec)
            self._full.drop(run)

    def drop(self, run: RunId) -> None:
        """Forget a run."""
        self._lora.drop(run)
        self._full.drop(run)

    def train_pass(self, items: tuple[TrainItem, ...]) -> Outcomes:
        """Adapters together in one forward, then the whole model's run, whose weights are its own."""
        full = [item for item in items if self._full.holds(item.run)]
        lora = tuple(item for item in items if not self._full.holds(item.run))
        parts = [self._lora.train_pass(lora)] if lora else []
        return _one_after_another([*parts, *(self._full.train_pass(item) for item in full)])

    def optim_step(self, run: RunId, adam: AdamParams) -> OptimOutput:
        """See `TrainBackend.optim_step`."""
        return self._of(run).optim_step(run, adam)

    def save(self, run: RunId, into: Path, *, optimizer: bool, gradients: bool) -> None:
        """See `TrainBackend.save`."""
        self._of(run).save(run, into, optimizer=optimizer, gradients=gradients)

    def load(self, run: RunId, source: Path, *, optimizer: bool) -> None:
        """See `TrainBackend.load`; a run that is not here yet becomes what the checkpoint is of."""
        whole = is_full(source)
        if whole and self._lora.holds(run):
            raise BadRequest(
                "the checkpoint is of a run that trained all parameters; this run trains a LoRA adapter.",
                "Load it into a run of rank 0.",
            )
        into = self._full if whole or self._full.holds(run) else self._lora
        into.load(run, source, optimizer=optimizer)

    def gradients(self, run: RunId) -> dict[str, Array]:
        """A copy of the accumulator G by parameter name; for tests and debugging."""
        return dict(self._of(run).gradients(run))

    def parameters(self, run: RunId) -> dict[str, Array]:
        """A copy of a run's own tensors by name; for tests and debugging."""
        return dict(self._of(run).parameters(run))

    def _of(self, run: RunId) -> Part:
        return self._full if self._full.holds(run) else self._lora


def _one_after_another(parts: list[Outcomes]) -> Outcomes:
    for part in parts:
        yield from part
