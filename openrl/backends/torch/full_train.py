"""The run that trains all parameters: at most one on each copy of a base model (F6)."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from openrl.backends.base import TrainItem
from openrl.backends.common.work import Outcome, Work
from openrl.backends.torch.adapter_files import to_numpy
from openrl.backends.torch.custom_loss import loss_of
from openrl.backends.torch.full_files import Stored, write_gradients, write_model, write_optimizer
from openrl.backends.torch.full_memory import FullSizes, need
from openrl.backends.torch.full_model import FullModel, parameter_shapes
from openrl.backends.torch.full_pass import FullPass
from openrl.backends.torch.memory import free_memory, is_out_of_memory
from openrl.backends.torch.model import CausalLM
from openrl.errors import BackendFault, BadRequest, OutOfMemory
from openrl.types import AdamParams, Array, OptimOutput, RequestId, RunId


class FullTrainer:
    """Implements `TrainBackend` for the one run, beside the model `base` in `folder`, which stays as it is.

    `make_room` is asked for memory before a run is refused for want of it.
    """

    def __init__(
        self,
        base: CausalLM,
        folder: Path,
        max_batch_tokens: int,
        base_model: str = "",
        make_room: Callable[[], None] = lambda: None,
    ) -> None:
        self._base = base
        self._folder = folder
        self._max_batch_tokens = max_batch_tokens
        self._base_model = base_model
        self._make_room = make_room
        self._run: RunId | None = None
        self._model: FullModel | None = None
        self._passes: FullPass | None = None

    def holds(self, run: RunId) -> bool:
        """Whether a run is the one on this device."""
        return run == self._run

    def create(self, run: RunId) -> None:
        """Begin with the base model's weights. Raises `BadRequest` if another run is here, `OutOfMemory`."""
        self._open(run)

    def drop(self, run: RunId) -> None:
        """Forget the run and give its memory back; another one is left alone."""
        if not self.holds(run):
            return
        self._run = self._model = self._passes = None
        gc.collect()
        if self._base.device.type == "cuda":
            torch.cuda.empty_cache()

    def train_pass(self, item: TrainItem) -> Iterator[dict[RequestId, Outcome]]:
        """The part of a pass that is this run's; it has at most one item."""
        model, passes = self._held(item.run)
        return passes.run(Work(item, model.state, loss_of(item)))

    def optim_step(self, run: RunId, adam: AdamParams) -> OptimOutput:
        """One AdamW step from the accumulated gradient (F2)."""
        model, _ = self._held(run)
        try:
            return model.step(adam)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory("the device has no memory for the optimizer's state; the step was not taken.") from None

    def save(self, run: RunId, into: Path, *, optimizer: bool, gradients: bool) -> None:
        """See `TrainBackend.save`: with `optimizer` the float32 masters (C4), else what is computed with."""
        model, _ = self._held(run)
        masters = model.state.views(model.state.theta)
        write_model(into, masters, torch.float32 if optimizer else model.dtype, self._folder)
        if optimizer:
            write_optimizer(into, model.state)
        if gradients:
            write_gradients(into, model.state)

    def load(self, run: RunId, source: Path, *, optimizer: bool) -> None:
        """See `TrainBackend.load`. All is checked before anything changes (C3)."""
        held = self._model if self.holds(run) else None
        stored = Stored(source, parameter_shapes(self._base.config), optimizer=optimizer)
        stored.read_into(held or self._open(run))

    def gradients(self, run: RunId) -> dict[str, Array]:
        """A copy of the accumulator G by parameter name, zeros included; for tests and debugging."""
        state = self._held(run)[0].state
        flat = state.gradient if state.gradient is not None else torch.zeros_like(state.theta)
        return to_numpy(state.views(flat.clone()))

    def parameters(self, run: RunId) -> dict[str, Array]:
        """A copy of the masters by name; for tests and debugging."""
        state = self._held(run)[0].state
        return to_numpy(state.views(state.theta.clone()))

    def _held(self, run: RunId) -> tuple[FullModel, FullPass]:
        if not self.holds(run) or self._model is None or self._passes is None:
            raise BackendFault(f"run {run!r} is not on this device.")
        return self._model, self._passes

    def _open(self, run: RunId) -> FullModel:
        if self._run is not None and not self.holds(run):
            raise BadRequest(
                f"run {self._run} trains all parameters of {self._base_model or 'this model'}; only one can at a time.",
                "Unload it, or finish its session.",
            )
        self.drop(run)
        self._check_memory()
        try:
            self._model = FullModel(self._folder, self._base)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory("the device ran out of memory for a copy of the model to train.") from None
        self._passes = FullPass(self._model, self._max_batch_tokens)
        self._run = run
        return self._model

    def _check_memory(self) -> None:
        sizes = FullSizes.of(self._base.config.to_dict(), self._base.dtype.itemsize)
        wanted = need(sizes, self._base.parameters)
        if wanted.total > free_memory(self._base.device):
            self._make_room()
        wanted.check(self._base_model, free_memory(self._base.device))
