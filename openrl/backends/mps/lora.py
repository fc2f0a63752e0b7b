"""LoRA adapters on a shared, frozen base: W' = W + (alpha / r) B A, alpha = 32 (A1), in MLX.

As in the PyTorch engine, every adapted linear layer is wrapped once, and one `Routing` object that all wrapped layers
share says which adapter each row of a batch uses, so that rows of many adapters go through one forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from openrl.backends.common import lora
from openrl.backends.common.lora import LoraShape, layer_names, layer_seed
from openrl.checkpoints.peft import ALPHA, HEAD_NAME
from openrl.types import FloatArray, LoraSpec


@dataclass(slots=True, eq=False, weakref_slot=True)
class Adapter:
    """One adapter's weights by layer name: A float32 [r, in] and B float32 [out, r].

    `frozen` holds what sampling multiplies by, (scale A)^T [in, r] and B^T [r, out] in the model's dtype; training
    casts anew on each pass, since A and B move.
    """

    spec: LoraSpec
    a: dict[str, mx.array]
    b: dict[str, mx.array]
    frozen: dict[str, tuple[mx.array, mx.array]] | None = None

    @property
    def scale(self) -> float:
        return ALPHA / self.spec.rank

    def factors(self, name: str, dtype: mx.Dtype) -> tuple[mx.array, mx.array] | None:
        """(scale A)^T [in, r] and B^T [r, out] in `dtype`; None where this adapter leaves the layer alone."""
        if self.frozen is not None:
            return self.frozen.get(name)
        if name not in self.a:
            return None
        return (self.a[name] * self.scale).astype(dtype).T, self.b[name].astype(dtype).T

    def parameters(self) -> Iterator[tuple[str, mx.array]]:
        """All trainable tensors under stable names, `<layer>.lora_A` and `<layer>.lora_B`, in layer order."""
        for name in self.a:
            yield f"{name}.lora_A", self.a[name]
            yield f"{name}.lora_B", self.b[name]

    def freeze(self, dtype: mx.Dtype) -> Adapter:
        """An adapter for sampling only. The head's factors stay float32, as its logits do (L6)."""
        frozen: dict[str, tuple[mx.array, mx.array]] = {}
        for name in self.a:
            factors = self.factors(name, mx.float32 if name == HEAD_NAME else dtype)
            assert factors is not None
            frozen[name] = mx.contiguous(factors[0]), mx.contiguous(factors[1])
        mx.eval(list(frozen.values()))
        return Adapter(self.spec, {}, {}, frozen)


def fresh_adapter(spec: LoraSpec, shapes: dict[str, LoraShape]) -> Adapter:
    """B = 0 and A uniform on ±1/sqrt(in) (A2), each layer from a generator of its own (A4).

    Bit for bit what the PyTorch engine makes of the same seed.
    """
    a: dict[str, mx.array] = {}
    b: dict[str, mx.array] = {}
    for name in layer_names(spec, shapes):
        shape = shapes[name]
        uniform = _uniform(layer_seed(spec.seed, name), spec.rank, shape.inputs)
        a[name] = mx.array((uniform * 2 - 1) * np.float32(shape.inputs**-0.5))
        b[name] = mx.zeros((shape.outputs, spec.rank), dtype=mx.float32)
    mx.eval(a, b)
    return Adapter(spec, a, b)


def _uniform(seed: int, rows: int, columns: int) -> FloatArray:
    """Uniform on [0, 1): the lower 24 bits of each number of a Mersenne twister, as PyTorch's generator on the CPU."""
    twister = np.random.RandomState(seed % 2**32)
    bits = twister.randint(0, 2**32, (rows, columns), dtype=np.uint32)
    return (bits & 0xFFFFFF).astype(np.float32) * np.float32(2**-24)


Segment = lora.Segment[Adapter]
Routing = lora.Routing[Adapter]


class LoraLinear(nn.Module):
    """A frozen linear layer plus the adapters that the routing names for each row of its input [rows, ..., in]."""

    def __init__(self, base: nn.Module, name: str, routing: Routing) -> None:
        super().__init__()
        self.base = base
        self.name = name
        self.routing = routing

    def __call__(self, x: mx.array) -> mx.array:
        base: Any = self.base
        if x.dtype == mx.float32:
            return add_lora(base(x), x, self.name, self.routing.segments)
        delta = lora_delta(x, self.name, self.routing.segments, base.weight.shape[0])
        if delta is None:
            return base(x)
        # Base and adapters are one sum that is rounded once: added to a rounded product, half of what a young adapter
        # has learnt would be lost in bf16.
        if "scales" in base:
            return (base(x.astype(mx.float32)) + delta).astype(x.dtype)
        return mx.addmm(delta + base.bias if "bias" in base else delta, x, base.weight.T)


def lora_delta(x: mx.array, name: str, segments: tuple[Segment, ...], outputs: int) -> mx.array | None:
    """scale B A x [rows, ..., outputs], each segment of rows with its own adapter; None where no row has any."""
    parts: list[mx.array] = []
    adapted = False
    for s in segments:
        factors = s.adapter.factors(name, x.dtype) if s.adapter is not None else None
        x_s = x[s.start : s.stop]
        if factors is None:
            parts.append(mx.zeros((*x_s.shape[:-1], outputs), x.dtype))
        else:
            adapted = True
            parts.append(x_s @ factors[0] @ factors[1])
    if not adapted:
        return None
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)


def add_lora(y: mx.array, x: mx.array, name: str, segments: tuple[Segment, ...]) -> mx.array:
    """y + scale B A x, each segment of rows with its own adapter. y [rows, ..., out], x [rows, ..., in].

    Products are in the dtype of x, save that those of frozen factors are in the factors' own.
    """
    parts: list[mx.array] = []
    adapted = False
    for s in segments:
        factors = s.adapter.factors(name, x.dtype) if s.adapter is not None else None
        whole = s.start == 0 and s.stop == y.shape[0]
        y_s, x_s = (y, x) if whole else (y[s.start : s.stop], x[s.start : s.stop])
        if factors is not None:
            adapted = True
            y_s = mx.addmm(y_s, x_s @ factors[0], factors[1])
        parts.append(y_s)
    if not adapted:
        return y
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)
