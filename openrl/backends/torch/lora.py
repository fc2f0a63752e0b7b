"""LoRA adapters on a shared, frozen base: W' = W + (alpha / r) B A, alpha = 32 (A1).

Every adapted linear layer of the base is wrapped once. Which adapter a row of a batch uses is said by one `Routing`
object that all wrapped layers share, so that rows of many adapters go through one forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from openrl.backends.common import lora
from openrl.backends.common.lora import LoraShape, layer_names, layer_seed
from openrl.backends.torch.weights import Linear
from openrl.checkpoints.peft import ALPHA, HEAD_NAME
from openrl.types import LoraSpec


@dataclass(slots=True, eq=False, weakref_slot=True)
class Adapter:
    """One adapter's weights by layer name: A float32 [r, in] and B float32 [out, r], of experts stacks of such (A10).

    `frozen` holds what sampling multiplies by, (scale A)^T [in, r] and B^T [r, out] in the model's dtype; training
    casts anew on each pass, since A and B move.
    """

    spec: LoraSpec
    a: dict[str, Tensor]
    b: dict[str, Tensor]
    frozen: dict[str, tuple[Tensor, Tensor]] | None = None

    @property
    def scale(self) -> float:
        return ALPHA / self.spec.rank

    def pair(self, name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """A and B of a layer in the compute dtype, or None where this adapter leaves the layer alone."""
        if name not in self.a:
            return None
        return self.a[name].to(dtype), self.b[name].to(dtype)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """All trainable tensors under stable names, `<layer>.lora_A` and `<layer>.lora_B`, in layer order."""
        for name in self.a:
            yield f"{name}.lora_A", self.a[name]
            yield f"{name}.lora_B", self.b[name]

    def freeze(self, dtype: torch.dtype) -> Adapter:
        """An adapter for sampling only. The head's factors stay float32, as its logits do (L6)."""

        def cast(name: str) -> tuple[Tensor, Tensor]:
            kind = torch.float32 if name == HEAD_NAME else dtype
            return (self.a[name].detach() * self.scale).to(kind).mT, self.b[name].detach().to(kind).mT

        return Adapter(self.spec, {}, {}, {name: cast(name) for name in self.a})


def fresh_adapter(spec: LoraSpec, shapes: dict[str, LoraShape], device: torch.device) -> Adapter:
    """B = 0 and A uniform on ±1/sqrt(in) (A2), each layer from a generator of its own (A4)."""
    a: dict[str, Tensor] = {}
    b: dict[str, Tensor] = {}
    for name in layer_names(spec, shapes):
        size_a, size_b = shapes[name].factors(spec.rank)
        generator = torch.Generator().manual_seed(layer_seed(spec.seed, name))
        uniform = torch.rand(size_a, generator=generator, dtype=torch.float32)
        a[name] = ((uniform * 2 - 1) * shapes[name].inputs ** -0.5).to(device)
        b[name] = torch.zeros(size_b, dtype=torch.float32, device=device)
    return Adapter(spec, a, b)


Segment = lora.Segment[Adapter]
Routing = lora.Routing[Adapter]


class LoraLinear(nn.Module):
    """A frozen linear layer plus the adapters that the routing names for each row of its input [rows, ..., in]."""

    def __init__(self, base: Linear, name: str, routing: Routing) -> None:
        super().__init__()
        self.base = base
        self.name = name
        self.routing = routing

    def forward(self, x: Tensor) -> Tensor:
        segments = self.routing.segments
        # Training goes one way with a graph and without, so that `forward` gives the numbers of `forward_backward` (G5)
        # whatever the sampler has made of the base layer.
        if not any(s.adapter is not None and s.adapter.frozen is None for s in segments):
            return add_lora(self.base(x), x, self.name, segments)
        adapted = [s for s in segments if s.adapter is not None and self.name in s.adapter.a]
        factors = [t for s in adapted if s.adapter for t in (s.adapter.a[self.name], s.adapter.b[self.name])]
        return _RoutedLora.apply(x, self.base, tuple(adapted), *factors)


def add_lora(y: Tensor, x: Tensor, name: str, segments: tuple[Segment, ...]) -> Tensor:
    """y += scale B A x in place, each segment of rows with its own adapter; returns y. Without autograd.

    y [rows, ..., out] contiguous, x [rows, ..., in].
    """
    for s in segments:
        if s.adapter is None:
            continue
        if s.adapter.frozen is not None:
            _add_frozen(y, x, s, s.adapter.frozen.get(name))
        elif pair := s.adapter.pair(name, x.dtype):
            _add(y, x, s, *pair)
    return y


def _add_frozen(y: Tensor, x: Tensor, s: Segment, factors: tuple[Tensor, Tensor] | None) -> None:
    """As `_add`, in as few operations as can be: with one row, each costs as much as the product it prepares."""
    if factors is None:
        return
    if y.shape[0] != s.stop - s.start:
        x, y = x[s.start : s.stop], y[s.start : s.stop]
    down, up = factors
    y.view(-1, y.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]).mm(down), up)


def _add(y: Tensor, x: Tensor, s: Segment, a: Tensor, b: Tensor) -> Tensor:
    """Add one segment's scale B A x to y in place; returns scale A x."""
    low = functional.linear(_rows(x, s), a).mul_(_scale(s))
    y[s.start : s.stop].view(-1, y.shape[-1]).addmm_(low, b.t())
    return low


def _rows(t: Tensor, s: Segment) -> Tensor:
    """A segment's rows with all but the last dimension flattened."""
    return t[s.start : s.stop].reshape(-1, t.shape[-1])


class _RoutedLora(torch.autograd.Function):
    """Frozen linear layer plus adapters as one node, so that products accumulate in place and no sum is a copy.

    Takes the float32 factors A, B of each segment in turn and computes in the dtype of x; their gradients come back
    in float32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, base: Linear, segments: tuple[Segment, ...], *factors: Tensor) -> Tensor:
        y = functional.linear(x, base.weight, base.bias)
        cast = [t.to(x.dtype) for t in factors]
        lows = [_add(y, x, s, a, b) for s, a, b in zip(segments, cast[::2], cast[1::2], strict=True)]
        ctx.base, ctx.segments = base, segments
        ctx.save_for_backward(x, *cast, *lows)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy = grads[0].contiguous()
        x, *saved = ctx.saved_tensors
        count = len(ctx.segments)
        cast, lows = saved[: 2 * count], saved[2 * count :]
        dx = torch.matmul(dy, ctx.base.weight) if ctx.needs_input_grad[0] else None
        factors: list[Tensor] = []
        for s, a, b, low in zip(ctx.segments, cast[::2], cast[1::2], lows, strict=True):
            dy_s = _rows(dy, s)
            d_low = torch.mm(dy_s, b).mul_(_scale(s))
            factors.append(torch.mm(d_low.t(), _rows(x, s)).float())
            factors.append(torch.mm(dy_s.t(), low).float())
            if dx is not None:
                dx[s.start : s.stop].view(-1, dx.shape[-1]).addmm_(d_low, a)
        return dx, None, None, *factors


def _scale(s: Segment) -> float:
    assert s.adapter is not None
    return s.adapter.scale
