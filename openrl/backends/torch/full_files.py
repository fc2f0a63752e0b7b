"""Between folders on disk and a whole model in training, in PyTorch (`common.full_files` has the rest)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from openrl.backends.common.full_files import Part, Stored, write_config, write_parts
from openrl.backends.torch.full_model import FullModel
from openrl.backends.torch.trainable import State
from openrl.checkpoints.full import MODEL_FILE
from openrl.checkpoints.peft import GRADIENTS_FILE, OPTIMIZER_FILE

_KINDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}


def write_model(into: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype, base: Path) -> None:
    """Write tensors, cast to `dtype`, and what else belongs to the model, from the base model's folder."""
    write_parts(into / MODEL_FILE, [_part(name, tensor, dtype) for name, tensor in tensors.items()])
    write_config(into, base, str(dtype).removeprefix("torch."))


def write_optimizer(into: Path, state: State) -> None:
    """m, v and t (O11); moments that are still zero are written as zeros."""
    tensors: dict[str, Tensor] = {"t": torch.tensor(state.t)}
    zeros = state.theta.new_zeros(()).expand(state.theta.shape)  # takes no memory
    for prefix, flat in (("m", state.m), ("v", state.v)):
        views = state.views(flat if flat is not None else zeros)
        tensors |= {f"{prefix}.{name}": view for name, view in views.items()}
    write_parts(into / OPTIMIZER_FILE, [_part(name, tensor, tensor.dtype) for name, tensor in tensors.items()])


def write_gradients(into: Path, state: State) -> None:
    """The accumulator, unless it is zero."""
    if state.gradient is not None:
        views = state.views(state.gradient)
        write_parts(into / GRADIENTS_FILE, [_part(name, view, view.dtype) for name, view in views.items()])


def read_into(model: FullModel, stored: Stored) -> None:
    """Replace a model's whole state: weights, and moments and gradient by the folder's or by zero (G10, O12)."""
    state = model.state
    state.reset()
    _read(stored.model, state.views(state.theta))
    if stored.optimizer is not None:
        state.m, state.v = torch.empty_like(state.theta), torch.empty_like(state.theta)
        for prefix, flat in (("m", state.m), ("v", state.v)):
            _read(stored.optimizer, state.views(flat), f"{prefix}.")
        with safe_open(stored.optimizer, framework="pt") as file:
            state.t = int(file.get_tensor("t"))
    if stored.gradients is not None:
        gradient = state.fresh()
        _read(stored.gradients, state.views(gradient))
        state.give(gradient)
    model.refresh()


def _part(name: str, tensor: Tensor, dtype: torch.dtype) -> Part:
    def data() -> memoryview:
        host = tensor.detach().to(dtype).cpu().contiguous()
        return host.reshape(-1).view(torch.uint8).numpy().data

    return Part(name, _KINDS[dtype], tuple(tensor.shape), tensor.numel() * dtype.itemsize, data)


def _read(file: Path, views: Mapping[str, Tensor], prefix: str = "") -> None:
    with safe_open(file, framework="pt") as opened, torch.no_grad():
        for name, view in views.items():
            view.copy_(opened.get_tensor(f"{prefix}{name}"))
