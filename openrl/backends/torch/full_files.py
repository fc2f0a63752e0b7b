"""Between folders on disk and a whole model in training (`openrl.checkpoints.full` has the layout).

Tensors are written and read one by one: beside the model there is never more than one of them in memory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from openrl.backends.torch.full_model import FullModel
from openrl.backends.torch.trainable import State
from openrl.checkpoints.full import EXTRA_FILES, MODEL_CONFIG, MODEL_FILE, check_full
from openrl.checkpoints.peft import GRADIENTS_FILE, OPTIMIZER_FILE
from openrl.checkpoints.tensor_file import METADATA, encode_header
from openrl.errors import BadRequest

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}
Shapes = Mapping[str, torch.Size]


def write_model(into: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype, base: Path) -> None:
    """Write tensors, cast to `dtype`, and what else belongs to the model, from the base model's folder."""
    write_tensors(into / MODEL_FILE, tensors, dtype)
    config: dict[str, Any] = json.loads((base / MODEL_CONFIG).read_text())
    config.pop("torch_dtype", None)  # what older versions called it
    config["dtype"] = str(dtype).removeprefix("torch.")
    (into / MODEL_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    for name in EXTRA_FILES:
        if (base / name).is_file():
            shutil.copyfile(base / name, into / name)


def write_optimizer(into: Path, state: State) -> None:
    """m, v and t (O11); moments that are still zero are written as zeros."""
    tensors: dict[str, Tensor] = {"t": torch.tensor(state.t)}
    zeros = state.theta.new_zeros(()).expand(state.theta.shape)  # takes no memory
    for prefix, flat in (("m", state.m), ("v", state.v)):
        views = state.views(flat if flat is not None else zeros)
        tensors |= {f"{prefix}.{name}": view for name, view in views.items()}
    write_tensors(into / OPTIMIZER_FILE, tensors)


def write_gradients(into: Path, state: State) -> None:
    """The accumulator, unless it is zero."""
    if state.gradient is not None:
        write_tensors(into / GRADIENTS_FILE, state.views(state.gradient))


def write_tensors(file: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
    """A safetensors file of tensors, cast to `dtype` if that is given, one at a time."""
    entries: dict[str, Any] = {METADATA: {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        kind = dtype or tensor.dtype
        stop = at + tensor.numel() * kind.itemsize
        entries[name] = {"dtype": _NAMES[kind], "shape": list(tensor.shape), "data_offsets": [at, stop]}
        at = stop
    with file.open("wb") as out:
        out.write(encode_header(entries))
        for tensor in tensors.values():
            host = tensor.detach().to(dtype or tensor.dtype).cpu().contiguous()
            out.write(host.reshape(-1).view(torch.uint8).numpy().data)


def check_model(folder: Path, shapes: Shapes) -> None:
    """Raise `BadRequest` unless a folder holds a model with just these parameters."""
    check_full(folder)
    _check(folder / MODEL_FILE, shapes)


class Stored:
    """A checkpoint's folder that was found to fit: all names and shapes are right, so that reading cannot stop half
    way for want of a tensor (C3)."""

    def __init__(self, source: Path, shapes: Shapes, *, optimizer: bool) -> None:
        """Raises `BadRequest` naming what does not fit."""
        check_model(source, shapes)
        self._source = source
        self._optimizer = optimizer
        self._gradients = optimizer and (source / GRADIENTS_FILE).exists()
        if optimizer:
            if not (source / OPTIMIZER_FILE).exists():
                raise BadRequest(
                    "the checkpoint has no optimizer state.", "Load its weights only, or use one made by save_state."
                )
            moments = {f"{prefix}.{name}": shape for prefix in "mv" for name, shape in shapes.items()}
            _check(source / OPTIMIZER_FILE, {**moments, "t": torch.Size([])})
        if self._gradients:
            _check(source / GRADIENTS_FILE, shapes)

    def read_into(self, model: FullModel) -> None:
        """Replace a model's whole state: weights, and moments and gradient by the folder's or by zero (G10, O12)."""
        state = model.state
        state.reset()
        _read(self._source / MODEL_FILE, state.views(state.theta))
        if self._optimizer:
            state.m, state.v = torch.empty_like(state.theta), torch.empty_like(state.theta)
            for prefix, flat in (("m", state.m), ("v", state.v)):
                _read(self._source / OPTIMIZER_FILE, state.views(flat), f"{prefix}.")
            with _opened(self._source / OPTIMIZER_FILE) as file:
                state.t = int(file.get_tensor("t"))
        if self._gradients:
            gradient = state.fresh()
            _read(self._source / GRADIENTS_FILE, state.views(gradient))
            state.give(gradient)
        model.refresh()


@contextmanager
def _opened(file: Path) -> Generator[Any]:
    if not file.is_file():
        raise BadRequest(f"the checkpoint has no {file.name}.")
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise BadRequest(f"{file.name} of the checkpoint cannot be read: {error}.") from error


def _check(file: Path, shapes: Shapes) -> None:
    """Raise `BadRequest` for the first tensor that is missing, too many or misshapen."""
    with _opened(file) as opened:
        found = {name: torch.Size(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    for name in sorted({*found, *shapes}):
        if found.get(name) != shapes.get(name):
            held, wanted = (tuple(s[name]) if name in s else "nothing" for s in (found, shapes))
            raise BadRequest(f"{file.name} holds {held} for {name!r}; this base model needs {wanted}.")


def _read(file: Path, views: Mapping[str, Tensor], prefix: str = "") -> None:
    with _opened(file) as opened, torch.no_grad():
        for name, view in views.items():
            view.copy_(opened.get_tensor(f"{prefix}{name}"))
