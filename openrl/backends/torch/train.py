"""The training half of the PyTorch backend: runs, their steps and their files, over one base model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from openrl.backends.base import TrainItem
from openrl.backends.torch.adapter_files import to_adapter, to_numpy
from openrl.backends.torch.custom_loss import loss_of
from openrl.backends.torch.lora import fresh_adapter, layer_names
from openrl.backends.torch.model import CausalLM
from openrl.backends.torch.passes import Outcome, PassRunner, Work
from openrl.backends.torch.trainable import Trainable
from openrl.checkpoints.peft import (
    GRADIENTS_FILE,
    OPTIMIZER_FILE,
    AdapterFolder,
    read_adapter,
    read_tensors,
    write_adapter,
    write_tensors,
)
from openrl.errors import BackendFault, BadRequest
from openrl.types import AdamParams, Array, LoraSpec, OptimOutput, RequestId, RunId


class Trainer:
    """`TrainBackend` on a device: many adapters, rows of several runs in one forward.

    `max_batch_tokens` bounds a micro-batch with its padding; `base_model` is the name written into adapter files.
    """

    def __init__(self, model: CausalLM, max_batch_tokens: int, base_model: str = "") -> None:
        self._model = model
        self._base_model = base_model
        self._passes = PassRunner(model, max_batch_tokens)
        self._runs: dict[RunId, Trainable] = {}

    def create(self, run: RunId, spec: LoraSpec) -> None:
        """Make a fresh adapter, in place of the run's old one if there is one."""
        self._runs[run] = Trainable(fresh_adapter(spec, self._model.shapes, self._model.device))

    def drop(self, run: RunId) -> None:
        """Forget a run."""
        self._runs.pop(run, None)

    def train_pass(self, items: tuple[TrainItem, ...]) -> Iterator[dict[RequestId, Outcome]]:
        """See `TrainBackend.train_pass`."""
        return self._passes.run([Work(item, self._held(item.run), loss_of(item)) for item in items])

    def optim_step(self, run: RunId, adam: AdamParams) -> OptimOutput:
        """One AdamW step from the accumulated gradient."""
        return self._held(run).step(adam)

    def save(self, run: RunId, into: Path, *, optimizer: bool, gradients: bool) -> None:
        """See `TrainBackend.save`. Everything is float32, bit for bit what the run holds (C4, A17)."""
        held = self._held(run)
        write_adapter(into, held.adapter.spec, to_numpy(dict(held.adapter.parameters())), self._base_model)
        if optimizer:
            write_tensors(into / OPTIMIZER_FILE, _optimizer_tensors(held))
        if gradients and held.gradient is not None:
            write_tensors(into / GRADIENTS_FILE, to_numpy(held.views(held.gradient)))

    def load(self, run: RunId, source: Path, *, optimizer: bool) -> None:
        """See `TrainBackend.load`. All is read and checked before anything changes (C3)."""
        folder = read_adapter(source)
        loaded = Trainable(to_adapter(folder, self._model.shapes, self._model.device))
        self._check_match(folder, self._runs.get(run))
        if optimizer:
            _restore(loaded, source)
        self._runs[run] = loaded

    def gradients(self, run: RunId) -> dict[str, Array]:
        """A copy of the accumulator G by parameter name, zeros included; for tests and debugging."""
        held = self._held(run)
        flat = held.gradient.clone() if held.gradient is not None else torch.zeros_like(held.theta)
        return to_numpy(held.views(flat))

    def parameters(self, run: RunId) -> dict[str, Array]:
        """A copy of the adapter's tensors by name; for tests and debugging."""
        held = self._held(run)
        return to_numpy(held.views(held.theta.clone()))

    def _held(self, run: RunId) -> Trainable:
        if run not in self._runs:
            raise BackendFault(f"run {run!r} is not on this device.")
        return self._runs[run]

    def _check_match(self, folder: AdapterFolder, held: Trainable | None) -> None:
        """A checkpoint fits a run of the same rank and layers; a new run takes both from the checkpoint."""
        spec = folder.spec if held is None else held.adapter.spec
        if folder.spec.rank != spec.rank:
            raise BadRequest(f"the checkpoint has LoRA rank {folder.spec.rank}; the run has rank {spec.rank}.")
        wanted = layer_names(spec, self._model.shapes)
        if set(folder.layers) != set(wanted):
            raise BadRequest(
                f"the checkpoint adapts {_describe(folder.layers)}; the run adapts {_describe(wanted)}.",
                "Create the run with the checkpoint's train_attn, train_mlp and train_unembed.",
            )


def _describe(layers: list[str]) -> str:
    leaves = sorted({name.rpartition(".")[2] for name in layers})
    return f"{len(layers)} layers ({', '.join(leaves)})"


def _optimizer_tensors(held: Trainable) -> dict[str, Array]:
    """m, v and t (O11); moments that are still zero are written as zeros."""
    tensors: dict[str, Array] = {"t": np.array(held.t, dtype=np.int64)}
    for prefix, flat in (("m", held.m), ("v", held.v)):
        views = held.views(flat if flat is not None else torch.zeros_like(held.theta))
        tensors |= {f"{prefix}.{name}": array for name, array in to_numpy(views).items()}
    return tensors


def _restore(loaded: Trainable, source: Path) -> None:
    """Give a loaded run the folder's m, v and t, and its accumulator if the folder has one."""
    if not (source / OPTIMIZER_FILE).exists():
        raise BadRequest(
            "the checkpoint has no optimizer state.", "Load its weights only, or use one made by save_state."
        )
    tensors = read_tensors(source / OPTIMIZER_FILE)
    names = loaded.views(loaded.theta)
    m, v = (_matching(tensors, f"{prefix}.", names, OPTIMIZER_FILE) for prefix in ("m", "v"))
    if "t" not in tensors:
        raise BadRequest(f"{OPTIMIZER_FILE} lacks the step count 't'.")
    loaded.restore(m, v, int(tensors["t"]))
    if (source / GRADIENTS_FILE).exists():
        loaded.accumulate(_matching(read_tensors(source / GRADIENTS_FILE), "", names, GRADIENTS_FILE))


def _matching(tensors: Mapping[str, Array], prefix: str, like: Mapping[str, Tensor], file: str) -> dict[str, Tensor]:
    """The tensors `prefix`+name for each name in `like`. Raises `BadRequest` for one that is missing or misshapen."""
    found: dict[str, Tensor] = {}
    for name, view in like.items():
        array = tensors.get(f"{prefix}{name}")
        if array is None or array.shape != tuple(view.shape):
            shape = "nothing" if array is None else array.shape
            raise BadRequest(f"{file} holds {shape} for {prefix}{name}; the adapter needs {tuple(view.shape)}.")
        found[name] = torch.tensor(array, device=view.device)
    return found
