"""The training half of the PyTorch backend: runs, their steps and their files, over one base model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from openrl.backends.base import TrainItem
from openrl.backends.common.run_files import check_match, optimizer_tensors, read_moments
from openrl.backends.common.work import Outcome, Work
from openrl.backends.torch.adapter_files import to_adapter, to_numpy
from openrl.backends.torch.custom_loss import loss_of
from openrl.backends.torch.lora import fresh_adapter
from openrl.backends.torch.model import CausalLM
from openrl.backends.torch.passes import PassRunner
from openrl.backends.torch.trainable import Trainable
from openrl.checkpoints.peft import (
    GRADIENTS_FILE,
    OPTIMIZER_FILE,
    read_adapter,
    write_adapter,
    write_tensors,
)
from openrl.errors import BackendFault
from openrl.types import AdamParams, Array, LoraSpec, OptimOutput, RequestId, RunId


class Trainer:
    """`TrainBackend` on a device: many adapters, rows of several runs in one forward.

    `max_batch_tokens` bounds a micro-batch with its padding; `base_model` is the name written into adapter files.
    """

    def __init__(self, model: CausalLM, max_batch_tokens: int, base_model: str = "") -> None:
        self._model = model
        self._base_model = base_model
        self.passes = PassRunner(model, max_batch_tokens)
        self._runs: dict[RunId, Trainable] = {}

    def create(self, run: RunId, spec: LoraSpec) -> None:
        """Make a fresh adapter, in place of the run's old one if there is one."""
        self._runs[run] = Trainable(fresh_adapter(spec, self._model.shapes, self._model.device))

    def holds(self, run: RunId) -> bool:
        """Whether a run is here."""
        return run in self._runs

    def drop(self, run: RunId) -> None:
        """Forget a run."""
        self._runs.pop(run, None)

    def train_pass(self, items: tuple[TrainItem, ...]) -> Iterator[dict[RequestId, Outcome]]:
        """See `TrainBackend.train_pass`."""
        context = self._model.config.max_position_embeddings
        return self.passes.run([Work(item, self.trainable(item.run), loss_of(item), context) for item in items])

    def optim_step(self, run: RunId, adam: AdamParams) -> OptimOutput:
        """One AdamW step from the accumulated gradient."""
        return self.trainable(run).step(adam)

    def save(self, run: RunId, into: Path, *, optimizer: bool, gradients: bool) -> None:
        """See `TrainBackend.save`. Everything is float32, bit for bit what the run holds (C4, A17)."""
        held = self.trainable(run)
        write_adapter(into, held.adapter.spec, to_numpy(dict(held.adapter.parameters())), self._base_model)
        if optimizer:
            write_tensors(into / OPTIMIZER_FILE, _optimizer_tensors(held))
        if gradients and held.gradient is not None:
            write_tensors(into / GRADIENTS_FILE, to_numpy(held.views(held.gradient)))

    def load(self, run: RunId, source: Path, *, optimizer: bool) -> None:
        """See `TrainBackend.load`. All is read and checked before anything changes (C3)."""
        folder = read_adapter(source)
        loaded = Trainable(to_adapter(folder, self._model.shapes, self._model.device))
        held = self._runs.get(run)
        check_match(folder, folder.spec if held is None else held.adapter.spec, self._model.shapes)
        if optimizer:
            _restore(loaded, source)
        self._runs[run] = loaded

    def gradients(self, run: RunId) -> dict[str, Array]:
        """A copy of the accumulator G by parameter name, zeros included; for tests and debugging."""
        held = self.trainable(run)
        flat = held.gradient.clone() if held.gradient is not None else torch.zeros_like(held.theta)
        return to_numpy(held.views(flat))

    def parameters(self, run: RunId) -> dict[str, Array]:
        """A copy of the adapter's tensors by name; for tests and debugging."""
        held = self.trainable(run)
        return to_numpy(held.views(held.theta.clone()))

    def trainable(self, run: RunId) -> Trainable:
        """A run's state. Raises `BackendFault` if it is not here."""
        if run not in self._runs:
            raise BackendFault(f"run {run!r} is not on this device.")
        return self._runs[run]


def _optimizer_tensors(held: Trainable) -> dict[str, Array]:
    """m, v and t (O11); moments that are still zero are written as zeros."""
    m, v = (held.views(flat if flat is not None else torch.zeros_like(held.theta)) for flat in (held.m, held.v))
    return optimizer_tensors(to_numpy(m), to_numpy(v), held.t)


def _restore(loaded: Trainable, source: Path) -> None:
    """Give a loaded run the folder's m, v and t, and its accumulator if the folder has one."""
    views = loaded.views(loaded.theta)
    moments = read_moments(source, {name: tuple(view.shape) for name, view in views.items()})

    def tensors(arrays: Mapping[str, Array]) -> dict[str, Tensor]:
        return {name: torch.tensor(array, device=loaded.theta.device) for name, array in arrays.items()}

    loaded.restore(tensors(moments.m), tensors(moments.v), moments.t)
    if moments.gradients is not None:
        loaded.accumulate(tensors(moments.gradients))
