"""Between folders on disk and a whole model in training, in MLX (`common.full_files` has the rest)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import mlx.core as mx
import numpy as np

from openrl.backends.common.full_files import Part, Stored, write_config, write_parts
from openrl.backends.mps.full_model import FullModel
from openrl.backends.mps.full_state import FullState, Named
from openrl.backends.mps.whole import read_lazily
from openrl.checkpoints.full import MODEL_FILE
from openrl.checkpoints.peft import GRADIENTS_FILE, OPTIMIZER_FILE

_KINDS = {mx.float32: "F32", mx.bfloat16: "BF16"}


def write_model(into: Path, theta: Mapping[str, mx.array], dtype: mx.Dtype, base: Path) -> None:
    """Write masters, cast to `dtype`, and what else belongs to the model, from the base model's folder."""
    write_parts(into / MODEL_FILE, [_part(name, tensor, dtype) for name, tensor in theta.items()])
    write_config(into, base, str(dtype).removeprefix("mlx.core."))


def write_optimizer(into: Path, state: FullState) -> None:
    """m, v and t (O11); moments that are still zero are written as zeros."""
    t = np.array(state.t, np.int64)
    parts = [Part("t", "I64", (), t.nbytes, lambda: _bytes(t))]
    for prefix, held in (("m", state.m), ("v", state.v)):
        parts += _parts(state, held or {}, f"{prefix}.")
    write_parts(into / OPTIMIZER_FILE, parts)


def write_gradients(into: Path, state: FullState) -> None:
    """The accumulator, unless it is zero."""
    if state.gradient is not None:
        write_parts(into / GRADIENTS_FILE, _parts(state, state.gradient, ""))


def read_into(model: FullModel, stored: Stored) -> None:
    """Replace a model's whole state: weights, and moments and gradient by the folder's or by zero (G10, O12)."""
    state = model.state
    state.reset()
    for name, tensor in _read(stored.model, state, ""):
        state.theta[name] = tensor
        model.put(name)
    if stored.optimizer is not None:
        state.m, state.v = (dict(_read(stored.optimizer, state, f"{prefix}.")) for prefix in "mv")
        state.t = int(read_lazily(stored.optimizer)["t"])
    if stored.gradients is not None:
        state.gradient = dict(_read(stored.gradients, state, ""))


def host(tensor: mx.array) -> np.ndarray:
    """A float32 copy for numpy."""
    return np.array(tensor.astype(mx.float32))


def _parts(state: FullState, held: Named, prefix: str) -> list[Part]:
    """Tensors of the parameters' shapes, zeros for those that are not there."""
    return [
        _part(f"{prefix}{name}", held[name] if name in held else mx.zeros(like.shape), mx.float32)
        for name, like in state.theta.items()
    ]


def _part(name: str, tensor: mx.array, dtype: mx.Dtype) -> Part:
    def data() -> memoryview:
        cast = tensor.astype(dtype)
        return _bytes(np.array(cast.view(mx.uint16) if dtype == mx.bfloat16 else cast))

    return Part(name, _KINDS[dtype], tuple(tensor.shape), tensor.size * dtype.size, data)


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _read(file: Path, state: FullState, prefix: str) -> Iterator[tuple[str, mx.array]]:
    """A file's tensors in float32, one at a time."""
    lazily = read_lazily(file)
    for name in state.theta:
        tensor = lazily.pop(f"{prefix}{name}").astype(mx.float32)
        mx.eval(tensor)
        yield name, tensor
