"""The run that trains all parameters: at most one on each copy of a base model (F6)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from openrl.backends.base import TrainItem
from openrl.backends.common.full_files import Shapes, Stored
from openrl.backends.common.full_memory import Need
from openrl.backends.common.work import Outcome
from openrl.errors import BackendFault, BadRequest, OutOfMemory
from openrl.types import AdamParams, Array, OptimOutput, RequestId, RunId


class FullRun(Protocol):
    """The run's model on the device."""

    def train_pass(self, item: TrainItem) -> Iterator[dict[RequestId, Outcome]]:
        """A pass of this one item."""
        ...

    def step(self, adam: AdamParams) -> OptimOutput:
        """One AdamW step over all parameters as one group (F2)."""
        ...

    def save(self, into: Path, *, optimizer: bool, gradients: bool) -> None:
        """See `TrainBackend.save`."""
        ...

    def load(self, stored: Stored) -> None:
        """Replace the whole state: weights, and moments and gradient by the folder's or by zero (G10, O12)."""
        ...

    def gradients(self) -> Mapping[str, Array]:
        """A copy of the accumulator by parameter name, zeros included."""
        ...

    def parameters(self) -> Mapping[str, Array]:
        """A copy of the float32 masters by name."""
        ...


class FullEngine(Protocol):
    """What an engine adds to the bookkeeping here."""

    def open(self) -> FullRun:
        """A run that begins with the base model's weights. May raise what `is_out_of_memory` knows."""
        ...

    def shapes(self) -> Shapes:
        """The parameters of the base model. Raises `BadRequest` where they cannot be trained."""
        ...

    def need(self) -> Need:
        """The memory that a run takes."""
        ...

    def free(self) -> int:
        """Bytes that may still be taken."""
        ...

    def release(self) -> None:
        """A run was let go of: give its memory back."""
        ...

    def is_out_of_memory(self, error: RuntimeError | MemoryError) -> bool:
        """Whether an allocation that failed is behind an error."""
        ...


class FullTrainer:
    """Implements `TrainBackend` for the one run, beside the base model, which stays as it is.

    `make_room` is asked for memory before a run is refused for want of it.
    """

    def __init__(self, engine: FullEngine, base_model: str = "", make_room: Callable[[], None] = lambda: None) -> None:
        self._engine = engine
        self._base_model = base_model
        self._make_room = make_room
        self._run: RunId | None = None
        self._model: FullRun | None = None

    def holds(self, run: RunId) -> bool:
        """Whether a run is the one on this device."""
        return run == self._run

    def create(self, run: RunId) -> None:
        """Begin with the base model's weights. Raises `BadRequest` if another run is here, `OutOfMemory`."""
        self._engine.shapes()
        self._open(run)

    def drop(self, run: RunId) -> None:
        """Forget the run and give its memory back; another one is left alone."""
        if not self.holds(run):
            return
        self._run = self._model = None
        self._engine.release()

    def train_pass(self, item: TrainItem) -> Iterator[dict[RequestId, Outcome]]:
        """The part of a pass that is this run's; it has at most one item."""
        return self.held(item.run).train_pass(item)

    def optim_step(self, run: RunId, adam: AdamParams) -> OptimOutput:
        """One AdamW step from the accumulated gradient (F2)."""
        held = self.held(run)
        try:
            return held.step(adam)
        except BackendFault:  # half a step was taken: nothing may go on from there, or be saved
            self.drop(run)
            raise
        except (RuntimeError, MemoryError) as error:
            if not self._engine.is_out_of_memory(error):
                raise
            raise OutOfMemory("the device has no memory for the optimizer's state; the step was not taken.") from None

    def save(self, run: RunId, into: Path, *, optimizer: bool, gradients: bool) -> None:
        """See `TrainBackend.save`: with `optimizer` the float32 masters (C4), else what is computed with."""
        self.held(run).save(into, optimizer=optimizer, gradients=gradients)

    def load(self, run: RunId, source: Path, *, optimizer: bool) -> None:
        """See `TrainBackend.load`. All is checked before anything changes (C3)."""
        held = self._model if self.holds(run) else None
        stored = Stored(source, self._engine.shapes(), optimizer=optimizer)
        (held or self._open(run)).load(stored)

    def gradients(self, run: RunId) -> Mapping[str, Array]:
        """A copy of the accumulator G by parameter name, zeros included; for tests and debugging."""
        return self.held(run).gradients()

    def parameters(self, run: RunId) -> Mapping[str, Array]:
        """A copy of the masters by name; for tests and debugging."""
        return self.held(run).parameters()

    def held(self, run: RunId) -> FullRun:
        """The run's model. Raises `BackendFault` if it is not here."""
        if not self.holds(run) or self._model is None:
            raise BackendFault(f"run {run!r} is not on this device.")
        return self._model

    def _open(self, run: RunId) -> FullRun:
        if self._run is not None and not self.holds(run):
            raise BadRequest(
                f"run {self._run} trains all parameters of {self._base_model or 'this model'}; only one can at a time.",
                "Unload it, or finish its session.",
            )
        self.drop(run)
        self._check_memory()
        try:
            self._model = self._engine.open()
        except (RuntimeError, MemoryError) as error:
            if not self._engine.is_out_of_memory(error):
                raise
            raise OutOfMemory("the device ran out of memory for a copy of the model to train.") from None
        self._run = run
        return self._model

    def _check_memory(self) -> None:
        wanted = self._engine.need()
        if wanted.total > self._engine.free():
            self._make_room()
        wanted.check(self._base_model, self._engine.free())
