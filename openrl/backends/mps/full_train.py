"""The run that trains all parameters, in MLX (`openrl.backends.common.full_train` keeps its place), and memory for
whole models."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx

from openrl.backends.base import TrainItem
from openrl.backends.common.full_files import Shapes, Stored
from openrl.backends.common.full_memory import Need
from openrl.backends.common.work import Outcome, Work
from openrl.backends.mps.full_files import host, read_into, write_gradients, write_model, write_optimizer
from openrl.backends.mps.full_model import FullModel
from openrl.backends.mps.full_pass import FullPass
from openrl.backends.mps.memory import free_memory, is_out_of_memory
from openrl.backends.mps.model import MlxModel
from openrl.backends.mps.train import loss_of
from openrl.backends.mps.whole import shapes_of
from openrl.types import AdamParams, Array, OptimOutput, RequestId

_TOKENS = 512  # of the micro-batch that must fit


class MlxRun:
    """Implements `FullRun`: one model and its passes. `folder` is the base model's."""

    def __init__(self, base: MlxModel, folder: Path, max_batch_tokens: int) -> None:
        self.model = FullModel(base, folder)
        self.passes = FullPass(self.model, max_batch_tokens)
        self._folder = folder

    def train_pass(self, item: TrainItem) -> Iterator[dict[RequestId, Outcome]]:
        """A pass of this one item."""
        return self.passes.run(Work(item, self.model.state, loss_of(item), self.model.scorer.max_context))

    def step(self, adam: AdamParams) -> OptimOutput:
        """One AdamW step."""
        return self.model.state.step(adam)

    def save(self, into: Path, *, optimizer: bool, gradients: bool) -> None:
        """With `optimizer` the float32 masters (C4), else what is computed with."""
        state = self.model.state
        write_model(into, state.theta, mx.float32 if optimizer else self.model.dtype, self._folder)
        if optimizer:
            write_optimizer(into, state)
        if gradients:
            write_gradients(into, state)

    def load(self, stored: Stored) -> None:
        """Replace the whole state."""
        read_into(self.model, stored)

    def gradients(self) -> dict[str, Array]:
        """A copy of the accumulator by name, zeros included."""
        state = self.model.state
        held = state.gradient or {}
        return {name: host(held.get(name, mx.zeros(like.shape))) for name, like in state.theta.items()}

    def parameters(self) -> dict[str, Array]:
        """A copy of the masters by name."""
        return {name: host(tensor) for name, tensor in self.model.state.theta.items()}


class _Memory:
    """What both kinds of whole models ask of the device."""

    def free(self) -> int:
        """Bytes that may still be taken."""
        return free_memory()

    def release(self) -> None:
        """Give the memory of what was let go of back."""
        gc.collect()
        mx.clear_cache()

    def is_out_of_memory(self, error: RuntimeError | MemoryError) -> bool:
        """Whether an allocation that failed is behind an error."""
        return is_out_of_memory(error)


class MlxFull(_Memory):
    """Implements `FullEngine` beside the model `base` in `folder`."""

    def __init__(self, base: MlxModel, folder: Path, max_batch_tokens: int) -> None:
        self._base = base
        self._folder = folder
        self._max_batch_tokens = max_batch_tokens

    def open(self) -> MlxRun:
        """A run that begins with the base model's weights."""
        return MlxRun(self._base, self._folder, self._max_batch_tokens)

    def shapes(self) -> Shapes:
        """The parameters of the base model. Raises `BadRequest` where they cannot be trained."""
        return shapes_of(self._base, self._folder)

    def need(self) -> Need:
        """The memory that a run takes."""
        plan = self._base.memory_plan
        rest = max(plan.needed(1, _TOKENS, keep=False) + plan.gradients(), plan.step())
        return Need.of(self._base.parameters, self._base.dtype.size, rest)


class MlxRoom(_Memory):
    """Implements `Room` for models of the shape of `model`."""

    def __init__(self, model: MlxModel) -> None:
        self._model = model

    def needed(self) -> int:
        """Bytes of a model once it is open: its weights, and the head's float32 copy where there is one."""
        wide = self._model.head_wide
        extra = 0 if wide is None or wide is self._model.head.weight else wide.nbytes
        return self._model.parameters * self._model.dtype.size + extra
