"""Between adapter folders on disk and adapters on a device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from openrl.backends.torch.lora import Adapter, LoraShape
from openrl.checkpoints.peft import AdapterFolder, read_adapter
from openrl.errors import BadRequest
from openrl.types import Array


def load_adapter(folder: Path, shapes: dict[str, LoraShape], device: torch.device) -> Adapter:
    """Read a PEFT folder as an adapter of the model whose layers are `shapes`; float32, without gradient.

    Raises `BadRequest` when the files are missing or damaged, or do not fit the model (C3). Call
    `Adapter.freeze` on the result for sampling.
    """
    return to_adapter(read_adapter(folder), shapes, device)


def to_adapter(read: AdapterFolder, shapes: dict[str, LoraShape], device: torch.device) -> Adapter:
    """An adapter from a folder already read. Raises `BadRequest` naming the first layer that does not fit."""
    unknown = [layer for layer in read.layers if layer not in shapes]
    if unknown:
        raise BadRequest(f"the checkpoint adapts the layer {unknown[0]!r}, which the base model does not have.")
    a: dict[str, Tensor] = {}
    b: dict[str, Tensor] = {}
    for layer in (name for name in shapes if name in read.layers):
        shape, rank = shapes[layer], read.spec.rank
        a[layer] = _tensor(read.tensors, f"{layer}.lora_A", (rank, shape.inputs), device)
        b[layer] = _tensor(read.tensors, f"{layer}.lora_B", (shape.outputs, rank), device)
    return Adapter(read.spec, a, b)


def _tensor(tensors: Mapping[str, Array], name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    if name not in tensors:
        raise BadRequest(f"the checkpoint lacks the tensor {name!r}.")
    if tensors[name].shape != shape:
        raise BadRequest(f"the checkpoint's {name!r} has shape {tensors[name].shape}; this base model needs {shape}.")
    return torch.tensor(tensors[name].astype(np.float32, copy=False), device=device)


def to_numpy(tensors: Mapping[str, Tensor]) -> dict[str, Array]:
    """Host copies (views where they are on the host already), C-contiguous."""
    return {name: np.ascontiguousarray(tensor.detach().cpu().numpy()) for name, tensor in tensors.items()}
