"""Frozen projections of one input as one product, with the adapters of each segment of rows, there and back.

The low-rank products of an adapter's projections are joint too. Everything is computed in the dtype of the input; the
factors are float32, and so are their gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from openrl.backends.torch.lora import Segment


@dataclass(frozen=True, slots=True)
class Share:
    """One projection's part of a segment's low-rank product: its columns of it and of the output, and B^T [r, out]."""

    low: slice
    columns: slice
    up: Tensor


@dataclass(slots=True)
class Detour:
    """A segment's adapter in a joint product: A of all its projections [sum of r, in], in the compute dtype.

    `low` [rows, sum of r] is scale A x, once it has been computed.
    """

    rows: slice
    scale: float
    a: Tensor
    shares: list[Share]
    low: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Joint:
    """Projections by the names that adapters know them by; `weight` [sum of out, in]."""

    names: tuple[str, ...]
    weight: Tensor
    bias: Tensor | None
    columns: tuple[slice, ...]

    @classmethod
    def of(cls, names: Sequence[str], linears: Sequence[nn.Linear]) -> Joint:
        """Lays the weights one above the other; the layers keep views of that memory."""
        ends = [0]
        for linear in linears:
            ends.append(ends[-1] + linear.out_features)
        columns = tuple(slice(a, b) for a, b in itertools.pairwise(ends))
        weight = linears[0].weight.detach()
        if len(linears) > 1:
            weight = torch.cat([linear.weight.detach() for linear in linears])
            for linear, part in zip(linears, columns, strict=True):
                linear.weight.data = weight[part]
        return cls(tuple(names), weight, _joint_bias(linears), columns)

    @property
    def outputs(self) -> int:
        return self.weight.shape[0]

    def leaves(self, segments: Sequence[Segment]) -> list[Tensor]:
        """The factors A, B of each segment and projection in turn: the order in which `back` returns gradients."""
        pairs = (pair for s in segments for pair in self._pairs(s))
        return [factor for _, a, b in pairs for factor in (a, b)]

    def detours(self, segments: Sequence[Segment], dtype: torch.dtype) -> list[Detour]:
        """The segments' adapters cast to the compute dtype; those that leave all of these projections alone are not
        there."""
        found: list[Detour] = []
        for s in segments:
            pairs = list(self._pairs(s))
            if not pairs or s.adapter is None:
                continue
            shares: list[Share] = []
            at = 0
            for columns, a, b in pairs:
                shares.append(Share(slice(at, at + len(a)), columns, transposed(b, dtype)))
                at += len(a)
            joined = torch.cat([a.detach() for _, a, _ in pairs]).to(dtype)
            found.append(Detour(slice(s.start, s.stop), s.adapter.scale, joined, shares))
        return found

    def run(self, x: Tensor, detours: Sequence[Detour], out: Tensor | None = None) -> Tensor:
        """x W^T + b + scale B A x for x [rows, in]; leaves the low-rank products in the detours."""
        y = torch.mm(x, self.weight.t(), out=out)
        if self.bias is not None:
            y.add_(self.bias)
        for d in detours:
            d.low = torch.mm(x[d.rows], d.a.t()).mul_(d.scale)
            for share in d.shares:
                y[d.rows, share.columns].addmm_(d.low[:, share.low], share.up)
        return y

    def back(
        self, dy: Tensor, x: Tensor | None, detours: Sequence[Detour], *, inputs: bool, out: Tensor | None = None
    ) -> tuple[Tensor | None, list[Tensor]]:
        """dL/dx, if `inputs`, and the float32 gradients of the factors. `x` may be None where there are no detours."""
        dx = torch.mm(dy, self.weight, out=out) if inputs else None
        gradients: list[Tensor] = []
        for d in detours:
            assert x is not None
            assert d.low is not None
            rows = dy[d.rows]
            parts = [torch.mm(rows[:, share.columns], share.up.t()) for share in d.shares]
            d_low = (torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]).mul_(d.scale)
            da = torch.mm(d_low.t(), x[d.rows]).float()
            for share in d.shares:
                gradients.append(da[share.low])
                gradients.append(torch.mm(d.low[:, share.low].t(), rows[:, share.columns]).t().float())
            if dx is not None:
                dx[d.rows].addmm_(d_low, d.a)
        return dx, gradients

    def _pairs(self, s: Segment) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Columns, A and B of the projections that a segment's adapter has."""
        if s.adapter is not None:
            for name, columns in zip(self.names, self.columns, strict=True):
                if name in s.adapter.a:
                    yield columns, s.adapter.a[name], s.adapter.b[name]


def transposed(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous transposed copy of a factor."""
    return weight.detach().t().to(dtype, memory_format=torch.contiguous_format)


def _joint_bias(linears: Sequence[nn.Linear]) -> Tensor | None:
    biases: list[Tensor | None] = [linear.bias for linear in linears]
    if all(bias is None for bias in biases):
        return None
    zeros = [linear.weight.new_zeros(linear.out_features) for linear in linears]
    return torch.cat([zero if bias is None else bias.detach() for bias, zero in zip(biases, zeros, strict=True)])
