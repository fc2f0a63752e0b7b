"""The run that trains all parameters, in PyTorch (`openrl.backends.common.full_train` keeps its place)."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import torch

from openrl.backends.base import TrainItem
from openrl.backends.common.full_files import Stored
from openrl.backends.common.full_memory import Need
from openrl.backends.common.work import Outcome, Work
from openrl.backends.torch.adapter_files import to_numpy
from openrl.backends.torch.custom_loss import loss_of
from openrl.backends.torch.full_files import read_into, write_gradients, write_model, write_optimizer
from openrl.backends.torch.full_memory import FullSizes, need
from openrl.backends.torch.full_model import FullModel, parameter_shapes
from openrl.backends.torch.full_pass import FullPass
from openrl.backends.torch.memory import free_memory, is_out_of_memory
from openrl.backends.torch.model import CausalLM
from openrl.errors import BadRequest
from openrl.types import AdamParams, Array, OptimOutput, RequestId


class TorchRun:
    """Implements `FullRun`: one model and its passes. `folder` is the base model's."""

    def __init__(self, base: CausalLM, folder: Path, max_batch_tokens: int) -> None:
        self.model = FullModel(folder, base)
        self.passes = FullPass(self.model, max_batch_tokens)
        self._folder = folder

    def train_pass(self, item: TrainItem) -> Iterator[dict[RequestId, Outcome]]:
        """A pass of this one item."""
        context = self.model.scorer.config.max_position_embeddings
        return self.passes.run(Work(item, self.model.state, loss_of(item), context))

    def step(self, adam: AdamParams) -> OptimOutput:
        """One AdamW step."""
        return self.model.step(adam)

    def save(self, into: Path, *, optimizer: bool, gradients: bool) -> None:
        """With `optimizer` the float32 masters (C4), else what is computed with."""
        state = self.model.state
        write_model(into, state.views(state.theta), torch.float32 if optimizer else self.model.dtype, self._folder)
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
        flat = state.gradient if state.gradient is not None else torch.zeros_like(state.theta)
        return to_numpy(state.views(flat.clone()))

    def parameters(self) -> dict[str, Array]:
        """A copy of the masters by name."""
        state = self.model.state
        return to_numpy(state.views(state.theta.clone()))


class TorchFull:
    """Implements `FullEngine` beside the model `base` in `folder`."""

    def __init__(self, base: CausalLM, folder: Path, max_batch_tokens: int) -> None:
        self._base = base
        self._folder = folder
        self._max_batch_tokens = max_batch_tokens

    def open(self) -> TorchRun:
        """A run that begins with the base model's weights."""
        return TorchRun(self._base, self._folder, self._max_batch_tokens)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters of the base model. Raises `BadRequest` where they cannot be trained."""
        if self._base.quantize != "none":
            raise BadRequest(
                f"the base model's weights are held in four bits (engine.quantize {self._base.quantize!r}), which "
                "cannot be trained themselves.",
                "Train LoRA (a rank of 1 or more), or serve without --quantize.",
            )
        if self._base.is_mixture:
            raise BadRequest(
                "the base model is a mixture of experts, of which only adapters are trained.",
                "Train LoRA (a rank of 1 or more): it reaches every expert.",
            )
        return parameter_shapes(self._base.config)

    def need(self) -> Need:
        """The memory that a run takes."""
        return need(FullSizes.of(self._base.config.to_dict(), self._base.dtype.itemsize), self._base.parameters)

    def free(self) -> int:
        """Bytes that may still be taken."""
        return free_memory(self._base.device)

    def release(self) -> None:
        """Give the memory of a run back."""
        gc.collect()
        if self._base.device.type == "cuda":
            torch.cuda.empty_cache()

    def is_out_of_memory(self, error: RuntimeError | MemoryError) -> bool:
        """Whether an allocation that failed is behind an error."""
        return is_out_of_memory(error)
