"""Between adapter folders on disk and adapters on a device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from openrl.backends.common.lora import LoraShape
from openrl.backends.common.run_files import adapter_arrays
from openrl.backends.torch.lora import Adapter
from openrl.checkpoints.peft import AdapterFolder, read_adapter
from openrl.types import Array


def load_adapter(folder: Path, shapes: dict[str, LoraShape], device: torch.device) -> Adapter:
    """Read a PEFT folder as an adapter of the model whose layers are `shapes`; float32, without gradient.

    Raises `BadRequest` when the files are missing or damaged, or do not fit the model (C3). Call
    `Adapter.freeze` on the result for sampling.
    """
    return to_adapter(read_adapter(folder), shapes, device)


def to_adapter(read: AdapterFolder, shapes: dict[str, LoraShape], device: torch.device) -> Adapter:
    """An adapter from a folder already read. Raises `BadRequest` naming the first layer that does not fit."""
    arrays = adapter_arrays(read, shapes)
    a = {layer: torch.tensor(pair[0], device=device) for layer, pair in arrays.items()}
    b = {layer: torch.tensor(pair[1], device=device) for layer, pair in arrays.items()}
    return Adapter(read.spec, a, b)


def to_numpy(tensors: Mapping[str, Tensor]) -> dict[str, Array]:
    """Host copies (views where they are on the host already), C-contiguous."""
    return {name: np.ascontiguousarray(tensor.detach().cpu().numpy()) for name, tensor in tensors.items()}
