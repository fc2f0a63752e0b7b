"""Attention in training, there and back, between the projections of tokens and the heads of grids."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from openrl.backends.torch.grids import Grid
from openrl.backends.torch.layout import Layout
from openrl.backends.torch.norms import Norm
from openrl.backends.torch.rope import Rope
from openrl.backends.torch.scratch import Scratch
from openrl.backends.torch.train_cores import Core, Heads

_CELLS = 512


class Attention(Protocol):
    """One layer's attention, from the joint projection of tokens to what goes into the next."""

    @property
    def width(self) -> int:
        """Columns of queries, keys and values together."""
        ...

    @property
    def outputs(self) -> int:
        """Columns of the result."""
        ...

    def run(self, qkv: Tensor, layout: Layout, rope: Rope, out: Tensor) -> None:
        """From projections [tokens, width] into `out` [tokens, outputs]."""
        ...

    def back(self, d_out: Tensor, qkv: Tensor, layout: Layout, rope: Rope) -> Tensor:
        """dL/dqkv, in the memory of `qkv`."""
        ...


@dataclass(frozen=True, slots=True)
class GridAttention:
    """Attention in grids. Norms are those of queries and keys, where a family has them."""

    heads: int
    kv_heads: int
    head_dim: int
    q_norm: Norm | None
    k_norm: Norm | None
    core: Core
    scratch: Scratch

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads

    @property
    def width(self) -> int:
        """See `Attention`."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def outputs(self) -> int:
        """See `Attention`."""
        return self.heads * self.head_dim

    def run(self, qkv: Tensor, layout: Layout, rope: Rope, out: Tensor) -> None:
        """See `Attention`."""
        for grid in layout.grids:
            o = self.core.run(self._heads(grid.gather(qkv), grid, rope))
            grid.scatter(self._to_tokens(o, grid).reshape(grid.sequences * grid.length, -1), out)

    def back(self, d_out: Tensor, qkv: Tensor, layout: Layout, rope: Rope) -> Tensor:
        """See `Attention`."""
        for grid in layout.grids:
            raw = grid.gather(qkv)
            h = self._heads(raw, grid, rope)
            d_o = self.scratch.take("d attended", tuple(h.q.shape), qkv.dtype)
            self._to_tokens(d_o, grid).copy_(grid.gather(d_out).view(self._token_shape(grid)))
            grid.scatter(self._projections_back(self.core.back(h, d_o), raw, grid, rope), qkv)
        return qkv

    def _heads(self, qkv: Tensor, grid: Grid, rope: Rope) -> Heads:
        """Of a grid's projections [cells, width]."""
        qk, v = self._split(qkv, grid)
        qk = self._normed(qk.flatten(0, 1)).view(qk.shape)
        rows, length, kv, d = grid.sequences, grid.length, self.kv_heads, self.head_dim
        take = self.scratch.take
        q = take("q", (rows, kv, length, self.group, d), qkv.dtype)
        k, values = (take(name, (rows, kv, length, d), qkv.dtype) for name in ("k", "v"))
        for sequences, positions in _parts(grid):
            turned = self._floats(qk[sequences, positions])
            rope.turn(turned, positions, self.scratch)
            of_q, of_k = turned.split([self.heads, kv], dim=2)
            q[sequences, :, positions] = of_q.unflatten(2, (kv, self.group)).transpose(1, 2)
            k[sequences, :, positions] = of_k.transpose(1, 2)
        values.copy_(v.transpose(1, 2))
        return Heads(*(t.view(rows * kv, -1, d) for t in (q, k, values)))

    def _projections_back(self, d: Heads, raw: Tensor, grid: Grid, rope: Rope) -> Tensor:
        """Gradient of a grid's projections [cells, width] from that of its heads."""
        out = self.scratch.take("d qkv", (len(raw), self.width), raw.dtype)
        (d_qk, d_v), (qk, _) = self._split(out, grid), self._split(raw, grid)
        by_head = (grid.sequences, self.kv_heads, grid.length, self.head_dim)
        of_q = d.q.view(*by_head[:3], self.group, self.head_dim)
        of_k, of_v = d.k.view(by_head), d.v.view(by_head)
        for sequences, positions in _parts(grid):
            part = d_qk[sequences, positions]
            turned = self._floats(part, fill=False)
            dq, dk = turned.split([self.heads, self.kv_heads], dim=2)
            dq.unflatten(2, (self.kv_heads, self.group)).copy_(of_q[sequences, :, positions].transpose(1, 2))
            dk.copy_(of_k[sequences, :, positions].transpose(1, 2))
            part.copy_(rope.turn(turned, positions, self.scratch, back=True))
        d_v.copy_(of_v.transpose(1, 2))
        self._norms_back(d_qk.flatten(0, 1), qk.flatten(0, 1))
        return out

    def _split(self, qkv: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """Views [sequences, positions, heads, d] of queries with keys, and of values."""
        d, kv = self.head_dim, self.kv_heads
        shape = (grid.sequences, grid.length, -1, d)
        qk, v = qkv.split([(self.heads + kv) * d, kv * d], dim=1)
        return qk.view(shape), v.view(shape)

    def _floats(self, x: Tensor, *, fill: bool = True) -> Tensor:
        """A contiguous float32 tensor like x, in scratch memory."""
        turned = self.scratch.take("turned", tuple(x.shape), torch.float32)
        return turned.copy_(x) if fill else turned

    def _normed(self, qk: Tensor) -> Tensor:
        """Queries and keys [cells, heads, d] after their norms, if there are some."""
        if self.q_norm is None or self.k_norm is None:
            return qk
        out = self.scratch.take("normed heads", tuple(qk.shape), qk.dtype)
        for norm, heads in self._norms(self.q_norm, self.k_norm):
            x = qk[:, heads]
            norm.apply(x, norm.scale(x), out[:, heads], self.scratch)
        return out

    def _norms_back(self, d_qk: Tensor, qk: Tensor) -> None:
        """From the gradient of what `_normed` gave to that of its input, in place."""
        if self.q_norm is None or self.k_norm is None:
            return
        for norm, heads in self._norms(self.q_norm, self.k_norm):
            dy, x = d_qk[:, heads], qk[:, heads]
            norm.back(dy, x, norm.scale(x), dy, self.scratch)

    def _norms(self, q_norm: Norm, k_norm: Norm) -> tuple[tuple[Norm, slice], tuple[Norm, slice]]:
        return (q_norm, slice(None, self.heads)), (k_norm, slice(self.heads, None))

    def _token_shape(self, grid: Grid) -> tuple[int, ...]:
        return grid.sequences, grid.length, self.kv_heads, self.group, self.head_dim

    def _to_tokens(self, heads: Tensor, grid: Grid) -> Tensor:
        """Heads [N, length * group, d] as a view [sequences, length, key heads, group, d]."""
        return heads.view(grid.sequences, self.kv_heads, grid.length, self.group, self.head_dim).transpose(1, 2)


def _parts(grid: Grid) -> Iterator[tuple[slice, slice]]:
    """Sequences and positions of a grid, so many cells at a time that float32 copies stay in a CPU's cache."""
    sequences, positions = max(1, _CELLS // grid.length), min(grid.length, _CELLS)
    for first in range(0, grid.sequences, sequences):
        for start in range(0, grid.length, positions):
            yield slice(first, first + sequences), slice(start, min(start + positions, grid.length))
