"""LoRA adapters on a shared, frozen base: W' = W + (alpha / r) B A, alpha = 32 (A1).

Every adapted linear layer of the base is wrapped once. Which adapter a row of a batch uses is said by one `Routing`
object that all wrapped layers share, so that rows of many adapters go through one forward.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from openrl.types import LoraSpec

ALPHA = 32.0
ATTN_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_MODULES = ("gate_proj", "up_proj", "down_proj")
HEAD_NAME = "lm_head"


@dataclass(frozen=True, slots=True)
class LoraShape:
    """Input and output size of a layer that can carry an adapter."""

    inputs: int
    outputs: int


@dataclass(slots=True)
class Adapter:
    """One adapter's weights by layer name: A float32 [r, in] and B float32 [out, r].

    `compute` holds copies in the model's dtype for sampling; training casts anew on each pass, since A and B move.
    """

    spec: LoraSpec
    a: dict[str, Tensor]
    b: dict[str, Tensor]
    compute: dict[str, tuple[Tensor, Tensor]] | None = None

    @property
    def scale(self) -> float:
        return ALPHA / self.spec.rank

    def pair(self, name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """A and B of a layer in the compute dtype, or None where this adapter leaves the layer alone."""
        if self.compute is not None:
            return self.compute.get(name)
        if name not in self.a:
            return None
        return self.a[name].to(dtype), self.b[name].to(dtype)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """All trainable tensors under stable names, `<layer>.lora_A` and `<layer>.lora_B`, in layer order."""
        for name in self.a:
            yield f"{name}.lora_A", self.a[name]
            yield f"{name}.lora_B", self.b[name]

    def freeze(self, dtype: torch.dtype) -> Adapter:
        """This adapter with compute copies made once, for sampling."""
        self.compute = {n: (self.a[n].detach().to(dtype), self.b[n].detach().to(dtype)) for n in self.a}
        return self


def layer_names(spec: LoraSpec, shapes: dict[str, LoraShape]) -> list[str]:
    """Layers that `spec` trains, in the model's order (4.2)."""
    wanted: set[str] = set()
    wanted |= set(ATTN_MODULES) if spec.train_attn else set()
    wanted |= set(MLP_MODULES) if spec.train_mlp else set()
    wanted |= {HEAD_NAME} if spec.train_unembed else set()
    return [name for name in shapes if name.rsplit(".", 1)[-1] in wanted]


def fresh_adapter(spec: LoraSpec, shapes: dict[str, LoraShape], device: torch.device) -> Adapter:
    """B = 0 and A uniform on ±1/sqrt(in) (A2), each layer from a generator of its own (A4)."""
    a: dict[str, Tensor] = {}
    b: dict[str, Tensor] = {}
    for name in layer_names(spec, shapes):
        shape = shapes[name]
        digest = hashlib.sha256(f"{spec.seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        uniform = torch.rand(spec.rank, shape.inputs, generator=generator, dtype=torch.float32)
        a[name] = ((uniform * 2 - 1) * shape.inputs**-0.5).to(device).requires_grad_()
        b[name] = torch.zeros(shape.outputs, spec.rank, dtype=torch.float32, device=device).requires_grad_()
    return Adapter(spec, a, b)


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [start, stop) of a batch belong to `adapter`."""

    start: int
    stop: int
    adapter: Adapter | None


class Routing:
    """Which rows of the current batch use which adapter; shared by all wrapped layers of a model."""

    def __init__(self) -> None:
        self.segments: tuple[Segment, ...] = ()

    @contextmanager
    def use(self, adapters: Sequence[Adapter | None]) -> Iterator[None]:
        """Route row i of the batch to `adapters[i]`. Rows of one adapter should be neighbours: a run is one product."""
        before, self.segments = self.segments, _segments(adapters)
        try:
            yield
        finally:
            self.segments = before


def _segments(adapters: Sequence[Adapter | None]) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    start = 0
    for stop in range(1, len(adapters) + 1):
        if stop == len(adapters) or adapters[stop] is not adapters[start]:
            segments.append(Segment(start, stop, adapters[start]))
            start = stop
    return tuple(segments)


class LoraLinear(nn.Module):
    """A frozen linear layer plus the adapters that the routing names for each row of its input [rows, ..., in]."""

    def __init__(self, base: nn.Linear, name: str, routing: Routing) -> None:
        super().__init__()
        self.base = base
        self.name = name
        self.routing = routing

    def forward(self, x: Tensor) -> Tensor:
        return add_lora(self.base(x), x, self.name, self.routing.segments)


def add_lora(y: Tensor, x: Tensor, name: str, segments: tuple[Segment, ...]) -> Tensor:
    """y + scale B A x, each segment of rows with its own adapter. y [rows, ..., out], x [rows, ..., in]."""
    if all(s.adapter is None for s in segments):
        return y
    parts: list[Tensor] = []
    for s in segments:
        part = y if len(segments) == 1 else y[s.start : s.stop]
        pair = s.adapter.pair(name, x.dtype) if s.adapter is not None else None
        if s.adapter is not None and pair is not None:
            a, b = pair
            low = functional.linear(x[s.start : s.stop], a) * s.adapter.scale
            part = part + functional.linear(low, b)
        parts.append(part)
    return parts[0] if len(parts) == 1 else torch.cat(parts)
