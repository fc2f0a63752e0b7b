"""Frozen projections of one input as one product, with the adapters of each segment of rows, there and back.

The low-rank products of an adapter's projections are joint too. Everything is computed in the dtype of the input; the
factors are float32, and so are their gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openrl.backends.torch.lora import Adapter, Segment
from openrl.backends.torch.scratch import Scratch
from openrl.backends.torch.weights import Linear, Weight, stacked


@dataclass(frozen=True, slots=True)
class Share:
    """One projection's part of a segment's low-rank product: its columns of it and of the output, and B^T [r, out]."""

    low: slice
    columns: slice
    up: Tensor


@dataclass(frozen=True, slots=True)
class Cast:
    """An adapter's factors in a joint product: A of all its projections [sum of r, in] and their shares."""

    a: Tensor
    shares: tuple[Share, ...]


class Casts:
    """Factors in the compute dtype, made at first need; good for one pass, during which adapters do not change."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._made: dict[tuple[int, str], Cast] = {}

    def of(self, joint: Joint, adapter: Adapter) -> Cast:
        """Those of a joint product."""
        key = (id(adapter), joint.names[0])
        if key not in self._made:
            self._made[key] = joint.cast(adapter, self._dtype)
        return self._made[key]


@dataclass(slots=True)
class Detour:
    """A segment's adapter on its way through a joint product.

    `low` [rows, sum of r] is scale A x, once it has been computed, and `d_low` the gradient of A x.
    """

    rows: slice
    scale: float
    cast: Cast
    low: Tensor | None = None
    d_low: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Joint:
    """Projections by the names that adapters know them by; `held` is their weight [sum of out, in]."""

    names: tuple[str, ...]
    held: Weight
    bias: Tensor | None
    columns: tuple[slice, ...]

    @classmethod
    def of(cls, names: Sequence[str], linears: Sequence[Linear]) -> Joint:
        """Lays the weights one above the other (see `stacked`)."""
        ends = [0]
        for linear in linears:
            ends.append(ends[-1] + linear.out_features)
        columns = tuple(slice(a, b) for a, b in itertools.pairwise(ends))
        return cls(tuple(names), stacked(linears, columns), _joint_bias(linears), columns)

    @property
    def outputs(self) -> int:
        return self.held.shape[0]

    @property
    def weight(self) -> Tensor:
        """All of the weight, in the compute dtype; good until another joint product's is asked for."""
        return self.held.dense()

    def leaves(self, segments: Sequence[Segment]) -> list[Tensor]:
        """The factors A, B of each segment and projection in turn: the order in which `factors` returns gradients."""
        pairs = (pair for s in segments if s.adapter is not None for pair in self._pairs(s.adapter))
        return [factor for _, a, b in pairs for factor in (a, b)]

    def detours(self, segments: Sequence[Segment], casts: Casts) -> list[Detour]:
        """The segments' adapters; those that leave all of these projections alone are not there."""
        found = [(s, s.adapter, casts.of(self, s.adapter)) for s in segments if s.adapter is not None]
        return [Detour(slice(s.start, s.stop), adapter.scale, cast) for s, adapter, cast in found if cast.shares]

    def cast(self, adapter: Adapter, dtype: torch.dtype) -> Cast:
        """An adapter's factors in a dtype."""
        shares: list[Share] = []
        downs = [torch.empty(0, self.held.shape[1], device=self.held.device)]
        at = 0
        for columns, a, b in self._pairs(adapter):
            shares.append(Share(slice(at, at + len(a)), columns, transposed(b, dtype)))
            downs.append(a.detach())
            at += len(a)
        return Cast(torch.cat(downs).to(dtype), tuple(shares))

    def run(self, x: Tensor, detours: Sequence[Detour], scratch: Scratch, out: Tensor | None = None) -> Tensor:
        """x W^T + b + scale B A x for x [rows, in]; leaves the low-rank products in the detours."""
        for d in detours:
            d.low = torch.mm(x[d.rows], d.cast.a.t()).mul_(d.scale)
        if detours and x.dtype is not torch.float32:
            y = self._summed_once(x, detours, scratch, out)
        else:
            y = torch.mm(x, self.weight.t(), out=out)
            for d in detours:
                assert d.low is not None
                for share in d.cast.shares:
                    y[d.rows, share.columns].addmm_(d.low[:, share.low], share.up)
        return y if self.bias is None else y.add_(self.bias)

    def _summed_once(self, x: Tensor, detours: Sequence[Detour], scratch: Scratch, out: Tensor | None) -> Tensor:
        """[x, low] times [W, B]^T: base and adapters in one sum, which is rounded once.

        Added to a product that is rounded already, what an adapter says is lost wherever it is less than half a step
        of bf16, that is most of it while the adapter is young.
        """
        width, lows = x.shape[1], [d.cast.a.shape[0] for d in detours]
        total = width + sum(lows)
        wide = scratch.take("wide input", (len(x), total), x.dtype)
        weight = scratch.take("wide weight", (self.outputs, total), x.dtype)
        wide[:, :width], weight[:, :width] = x, self.weight
        wide[:, width:], weight[:, width:] = 0, 0
        at = width
        for d, low in zip(detours, lows, strict=True):
            assert d.low is not None
            wide[d.rows, at : at + low] = d.low
            for share in d.cast.shares:
                weight[share.columns, at + share.low.start : at + share.low.stop] = share.up.t()
            at += low
        return torch.mm(wide, weight.t(), out=out)

    def back(self, dy: Tensor, detours: Sequence[Detour], out: Tensor) -> Tensor:
        """dL/dx into `out`; leaves the gradients of the low-rank products in the detours."""
        dx = torch.mm(dy, self.weight, out=out)
        self.back_low(dy, detours)
        for d in detours:
            assert d.d_low is not None
            dx[d.rows].addmm_(d.d_low, d.cast.a)
        return dx

    def back_low(self, dy: Tensor, detours: Sequence[Detour]) -> None:
        """The part of `back` that `factors` needs."""
        for d in detours:
            rows = dy[d.rows]
            parts = [torch.mm(rows[:, share.columns], share.up.t()) for share in d.cast.shares]
            d.d_low = (torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]).mul_(d.scale)

    def factors(self, dy: Tensor, x: Tensor, detours: Sequence[Detour]) -> list[Tensor]:
        """Float32 gradients of `leaves`, after `back` or `back_low`."""
        gradients: list[Tensor] = []
        for d in detours:
            assert d.low is not None
            assert d.d_low is not None
            da = torch.mm(d.d_low.t(), x[d.rows]).float()
            rows = dy[d.rows]
            for share in d.cast.shares:
                gradients.append(da[share.low])
                gradients.append(torch.mm(d.low[:, share.low].t(), rows[:, share.columns]).t().float())
        return gradients

    def _pairs(self, adapter: Adapter) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Columns, A and B of the projections that an adapter has."""
        for name, columns in zip(self.names, self.columns, strict=True):
            if name in adapter.a:
                yield columns, adapter.a[name], adapter.b[name]


def transposed(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous transposed copy of a factor."""
    return weight.detach().t().to(dtype, memory_format=torch.contiguous_format)


def _joint_bias(linears: Sequence[Linear]) -> Tensor | None:
    biases: list[Tensor | None] = [linear.bias for linear in linears]
    if all(bias is None for bias in biases):
        return None
    given = next(bias for bias in biases if bias is not None)
    zeros = [given.new_zeros(linear.out_features) for linear in linears]
    return torch.cat([zero if bias is None else bias.detach() for bias, zero in zip(biases, zeros, strict=True)])
