"""The training half of the MLX backend: runs, their steps and their files, over one base model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import mlx.core as mx

from openrl.backends.base import TrainItem
from openrl.backends.common.run_files import adapter_arrays, check_match, optimizer_tensors, read_moments
from openrl.backends.common.work import LossFn, Outcome, Work
from openrl.backends.mps.lora import Adapter, fresh_adapter
from openrl.backends.mps.model import MlxModel
from openrl.backends.mps.passes import PassRunner
from openrl.backends.mps.trainable import Trainable
from openrl.checkpoints.peft import (
    GRADIENTS_FILE,
    OPTIMIZER_FILE,
    AdapterFolder,
    read_adapter,
    write_adapter,
    write_tensors,
)
from openrl.errors import BackendFault, BadRequest
from openrl.losses import Loss, evaluate
from openrl.types import AdamParams, Array, FloatArray, LoraSpec, OptimOutput, RequestId, RunId


class Trainer:
    """`TrainBackend` in MLX: many adapters over one base model, rows of several runs in one forward.

    `max_batch_tokens` bounds a micro-batch with its padding; `base_model` is the name written into adapter files.
    """

    def __init__(self, model: MlxModel, max_batch_tokens: int, base_model: str = "") -> None:
        self._model = model
        self._base_model = base_model
        self._passes = PassRunner(model, max_batch_tokens)
        self._runs: dict[RunId, Trainable] = {}

    def create(self, run: RunId, spec: LoraSpec) -> None:
        """Make a fresh adapter, in place of the run's old one if there is one."""
        self._runs[run] = Trainable(fresh_adapter(spec, self._model.shapes))

    def holds(self, run: RunId) -> bool:
        """Whether a run is here."""
        return run in self._runs

    def drop(self, run: RunId) -> None:
        """Forget a run."""
        if self._runs.pop(run, None) is not None:
            mx.clear_cache()

    def train_pass(self, items: tuple[TrainItem, ...]) -> Iterator[dict[RequestId, Outcome]]:
        """See `TrainBackend.train_pass`."""
        context = self._model.max_context
        return self._passes.run([Work(item, self._held(item.run), loss_of(item), context) for item in items])

    def optim_step(self, run: RunId, adam: AdamParams) -> OptimOutput:
        """One AdamW step from the accumulated gradient."""
        return self._held(run).step(adam)

    def save(self, run: RunId, into: Path, *, optimizer: bool, gradients: bool) -> None:
        """See `TrainBackend.save`. Everything is float32, bit for bit what the run holds (C4, A17)."""
        held = self._held(run)
        write_adapter(into, held.adapter.spec, held.arrays(held.theta), self._base_model)
        if optimizer:
            write_tensors(into / OPTIMIZER_FILE, optimizer_tensors(held.arrays(held.m), held.arrays(held.v), held.t))
        if gradients and held.gradient is not None:
            write_tensors(into / GRADIENTS_FILE, held.arrays(held.gradient))

    def load(self, run: RunId, source: Path, *, optimizer: bool) -> None:
        """See `TrainBackend.load`. All is read and checked before anything changes (C3)."""
        folder = read_adapter(source)
        loaded = Trainable(self._adapter(folder))
        held = self._runs.get(run)
        check_match(folder, folder.spec if held is None else held.adapter.spec, self._model.shapes)
        if optimizer:
            moments = read_moments(source, loaded.shapes)
            loaded.restore(moments.m, moments.v, moments.t)
            if moments.gradients is not None:
                loaded.give(loaded.flat({name: mx.array(part) for name, part in moments.gradients.items()}))
        self._runs[run] = loaded

    def gradients(self, run: RunId) -> dict[str, Array]:
        """A copy of the accumulator G by parameter name, zeros included; for tests and debugging."""
        held = self._held(run)
        return held.arrays(held.gradient)

    def parameters(self, run: RunId) -> dict[str, Array]:
        """A copy of the adapter's tensors by name; for tests and debugging."""
        held = self._held(run)
        return held.arrays(held.theta)

    def _held(self, run: RunId) -> Trainable:
        if run not in self._runs:
            raise BackendFault(f"run {run!r} is not on this device.")
        return self._runs[run]

    def _adapter(self, folder: AdapterFolder) -> Adapter:
        arrays = adapter_arrays(folder, self._model.shapes)
        a = {layer: mx.array(pair[0]) for layer, pair in arrays.items()}
        return Adapter(folder.spec, a, {layer: mx.array(pair[1]) for layer, pair in arrays.items()})


def loss_of(item: TrainItem) -> LossFn:
    """What judges the datums of a request. Clients' own losses are PyTorch graphs, which the daemon keeps from here."""
    payload, custom = item.payload, item.program is not None

    def loss(lp: FloatArray, inputs: Mapping[str, Array]) -> Loss:
        if custom:
            raise BadRequest("the mps backend runs no custom losses.", "The client can compute them itself.")
        return evaluate(payload.loss_fn, lp, inputs, payload.loss_config)

    return loss
