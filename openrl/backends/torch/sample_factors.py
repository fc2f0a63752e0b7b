"""Adapters as sampling uses them, beside the joint products of the fused backbone.

For few rows on a CPU the factors of projections that share an input lie side by side, in float32 whatever the model
computes in: for products this small, float32 is several times as fast as bf16, whose kernels have more to prepare.
For many rows bf16 is faster, straight from `Adapter.frozen`. The values are the same.

What an adapter says is added to float32 sums in either case: in bf16 it would be lost wherever it is less than half a
step of what the base says, that is most of it while the adapter is young.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from openrl.backends.torch.lora import Adapter, Segment
from openrl.backends.torch.sample_layers import Dense, JointProduct, Layer

QKV, OUT, GATE_UP, DOWN = range(4)

_MANY_ROWS = 64  # where both ways took about equally long


class LowRank(Protocol):
    """The adapters of one batch, which take inputs of `dtype`."""

    @property
    def dtype(self) -> torch.dtype: ...

    def add(self, y: Tensor, x: Tensor, layer: int, joint: int) -> None:
        """y += scale B A x in place, for float32 y [rows, out] and x [rows, in] of a joint product of a layer."""
        ...


@dataclass(frozen=True, slots=True)
class Up:
    """B^T [r, out] of one projection: reads columns low..high of the joint low-rank product, adds to start..stop."""

    low: int
    high: int
    start: int
    stop: int
    weight: Tensor


@dataclass(frozen=True, slots=True)
class Factors:
    """One adapter's share of a joint product: (scale A)^T of its projections side by side, [in, sum of ranks].

    `whole`: there is one projection, so that nothing need be cut to size.
    """

    down: Tensor
    ups: tuple[Up, ...]
    whole: bool

    def add(self, y: Tensor, x: Tensor) -> None:
        low = x.mm(self.down)
        if self.whole:
            _add_product(y, low, self.ups[0].weight)
            return
        for up in self.ups:
            _add_product(y[:, up.start : up.stop], low[:, up.low : up.high], up.weight)


Frozen = dict[str, tuple[Tensor, Tensor]]
# Of each layer, in the order of QKV, OUT, GATE_UP and DOWN; the last two are not there where experts are.
LayerJoints = tuple[JointProduct, ...]
LayerFactors = tuple["Factors | None", ...]


class AdapterFactors:
    """Makes and remembers the factors of adapters, for as long as these live. `dtype` is that of `Adapter.frozen`,
    `thin` the one for few rows."""

    def __init__(self, layers: Sequence[Layer], dtype: torch.dtype, thin: torch.dtype) -> None:
        self._joints: list[LayerJoints] = [_joints(layer) for layer in layers]
        self._dtype = dtype
        self._thin = thin
        self._made: WeakKeyDictionary[Adapter, tuple[LayerFactors, ...]] = WeakKeyDictionary()

    def of(self, segments: Sequence[Segment], times: int = 1) -> LowRank | None:
        """The adapters of a batch, None where it has none; each row of `segments` stands for `times` rows."""
        used = [(slice(times * s.start, times * s.stop), s.adapter) for s in segments if s.adapter is not None]
        if not used:
            return None
        if self._thin is not self._dtype and times * segments[-1].stop >= _MANY_ROWS:
            return _ManyRows([(rows, _frozen(adapter)) for rows, adapter in used], self._joints, self._dtype)
        if len(segments) == 1:
            return _AllRows(self._of(used[0][1]), self._thin)
        return _FewRows([(rows, self._of(adapter)) for rows, adapter in used], self._thin)

    def _of(self, adapter: Adapter) -> tuple[LayerFactors, ...]:
        if adapter not in self._made:
            self._made[adapter] = tuple(self._layer(_frozen(adapter), joints) for joints in self._joints)
        return self._made[adapter]

    def _layer(self, frozen: Frozen, joints: LayerJoints) -> LayerFactors:
        return tuple(self._joint(frozen, joint) for joint in joints)

    def _joint(self, frozen: Frozen, joint: JointProduct) -> Factors | None:
        downs: list[Tensor] = []
        ups: list[Up] = []
        low = 0
        for part in joint.parts:
            if part.name in frozen:
                down, up = frozen[part.name]
                downs.append(down)
                ups.append(Up(low, low + len(up), part.start, part.stop, up.to(self._thin).contiguous()))
                low += len(up)
        if not downs:
            return None
        return Factors(torch.cat(downs, 1).to(self._thin), tuple(ups), whole=len(joint.parts) == 1)


def _joints(layer: Layer) -> LayerJoints:
    mlp = (layer.mlp.gate_up, layer.mlp.down) if isinstance(layer.mlp, Dense) else ()
    return (layer.qkv, layer.out, *mlp)


class _AllRows:
    """One adapter for all rows."""

    def __init__(self, layers: tuple[LayerFactors, ...], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._layers = layers

    def add(self, y: Tensor, x: Tensor, layer: int, joint: int) -> None:
        factors = self._layers[layer][joint]
        if factors is not None:
            factors.add(y, x)


class _FewRows:
    """Several adapters, each with some rows."""

    def __init__(self, groups: Sequence[tuple[slice, tuple[LayerFactors, ...]]], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._groups = groups

    def add(self, y: Tensor, x: Tensor, layer: int, joint: int) -> None:
        for rows, layers in self._groups:
            factors = layers[layer][joint]
            if factors is not None:
                factors.add(y[rows], x[rows])


class _ManyRows:
    """Any adapters, projection by projection, as they are frozen."""

    def __init__(
        self, groups: Sequence[tuple[slice, Frozen]], joints: Sequence[LayerJoints], dtype: torch.dtype
    ) -> None:
        self.dtype = dtype
        self._groups = groups
        self._joints = joints

    def add(self, y: Tensor, x: Tensor, layer: int, joint: int) -> None:
        for rows, frozen in self._groups:
            for part in self._joints[layer][joint].parts:
                if part.name in frozen:
                    down, up = frozen[part.name]
                    _add_product(y[rows, part.start : part.stop], x[rows].mm(down), up)


def _add_product(y: Tensor, low: Tensor, up: Tensor) -> None:
    if y.dtype is low.dtype:
        y.addmm_(low, up)
    else:
        y.add_(low.mm(up))


def _frozen(adapter: Adapter) -> Frozen:
    assert adapter.frozen is not None, "adapters are frozen before they sample"
    return adapter.frozen
