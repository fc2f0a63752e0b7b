"""Attention in training, there and back, between the projections of tokens and the heads of grids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openrl.backends.torch.grids import Grid
from openrl.backends.torch.norms import Norm
from openrl.backends.torch.rope import Rope
from openrl.backends.torch.scratch import Scratch
from openrl.backends.torch.train_cores import Core, Heads


@dataclass(frozen=True, slots=True)
class CausalAttention:
    """One layer's attention. Norms are those of queries and keys, where a family has them."""

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
        """Columns of queries, keys and values together."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def outputs(self) -> int:
        """Columns of the result."""
        return self.heads * self.head_dim

    def run(self, qkv: Tensor, grids: Sequence[Grid], rope: Rope, out: Tensor) -> None:
        """Attention from projections [tokens, width] into `out` [tokens, outputs]."""
        for grid in grids:
            o = self.core.run(self._heads(grid.gather(qkv), grid, rope))
            grid.scatter(self._to_tokens(o, grid).reshape(grid.sequences * grid.length, -1), out)

    def back(self, d_out: Tensor, qkv: Tensor, grids: Sequence[Grid], rope: Rope) -> Tensor:
        """dL/dqkv, in the memory of `qkv`."""
        for grid in grids:
            raw = grid.gather(qkv)
            h = self._heads(raw, grid, rope)
            d_o = self.scratch.take("d attended", tuple(h.q.shape), qkv.dtype)
            self._to_tokens(d_o, grid).copy_(grid.gather(d_out).view(self._token_shape(grid)))
            grid.scatter(self._projections_back(self.core.back(h, d_o), raw, grid, rope), qkv)
        return qkv

    def _heads(self, qkv: Tensor, grid: Grid, rope: Rope) -> Heads:
        d, kv, n = self.head_dim, self.kv_heads, grid.sequences * self.kv_heads
        shape = (grid.sequences, grid.length, self.heads + kv, d)
        turned = self.scratch.take("turned", shape, torch.float32)
        turned.copy_(self._normed(qkv[:, : shape[2] * d].view(shape)))
        rope.turn(turned, self.scratch)
        q, k = turned.split([self.heads, kv], dim=2)
        v = qkv[:, shape[2] * d :].view(grid.sequences, grid.length, kv, d)
        return Heads(
            self._by_head("q", q.unflatten(2, (kv, self.group)), qkv.dtype).view(n, -1, d),
            self._by_head("k", k, qkv.dtype).view(n, -1, d),
            self._by_head("v", v, qkv.dtype).view(n, -1, d),
        )

    def _by_head(self, name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
        """A contiguous copy of x [sequences, positions, key heads, ...] with positions and key heads in turn."""
        swapped = x.transpose(1, 2)
        return self.scratch.take(name, tuple(swapped.shape), dtype).copy_(swapped)

    def _projections_back(self, d: Heads, raw: Tensor, grid: Grid, rope: Rope) -> Tensor:
        """Gradient of a grid's projections [cells, width] from that of its heads."""
        dim, kv, grid_shape = self.head_dim, self.kv_heads, (grid.sequences, self.kv_heads, grid.length)
        shape = (grid.sequences, grid.length, self.heads + kv, dim)
        turned = self.scratch.take("turned", shape, torch.float32)
        dq, dk = turned.split([self.heads, kv], dim=2)
        dq.unflatten(2, (kv, self.group)).copy_(d.q.view(*grid_shape, self.group, dim).transpose(1, 2))
        dk.copy_(d.k.view(*grid_shape, dim).transpose(1, 2))
        out = self.scratch.take("d qkv", (len(raw), self.width), raw.dtype)
        d_qk, d_v = out.split([shape[2] * dim, kv * dim], dim=1)
        d_qk.view(shape).copy_(rope.turn(turned, self.scratch, back=True))
        d_v.view(grid.sequences, grid.length, kv, dim).copy_(d.v.view(*grid_shape, dim).transpose(1, 2))
        self._norms_back(d_qk.view(shape), raw[:, : shape[2] * dim].view(shape))
        return out

    def _normed(self, qk: Tensor) -> Tensor:
        """Queries and keys [sequences, positions, heads, d] after their norms, if there are some."""
        if self.q_norm is None or self.k_norm is None:
            return qk
        out = self.scratch.take("normed heads", tuple(qk.shape), qk.dtype)
        for norm, heads in self._norms(self.q_norm, self.k_norm):
            x = qk[:, :, heads]
            norm.apply(x, norm.scale(x), out[:, :, heads])
        return out

    def _norms_back(self, d_qk: Tensor, qk: Tensor) -> None:
        """From the gradient of what `_normed` gave to that of its input, in place."""
        if self.q_norm is None or self.k_norm is None:
            return
        for norm, heads in self._norms(self.q_norm, self.k_norm):
            dy, x = d_qk[:, :, heads], qk[:, :, heads]
            norm.back(dy, x, norm.scale(x), dy, self.scratch)

    def _norms(self, q_norm: Norm, k_norm: Norm) -> tuple[tuple[Norm, slice], tuple[Norm, slice]]:
        return (q_norm, slice(None, self.heads)), (k_norm, slice(self.heads, None))

    def _token_shape(self, grid: Grid) -> tuple[int, ...]:
        return grid.sequences, grid.length, self.kv_heads, self.group, self.head_dim

    def _to_tokens(self, heads: Tensor, grid: Grid) -> Tensor:
        """Heads [N, length * group, d] as a view [sequences, length, key heads, group, d]."""
        return heads.view(grid.sequences, self.kv_heads, grid.length, self.group, self.head_dim).transpose(1, 2)
