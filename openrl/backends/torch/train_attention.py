"""Causal attention in training, there and back, a block of queries at a time.

Scores are never held whole: the way back computes them again, so memory grows with the tokens and not with their
square, and a sliding window or a soft cap costs nothing. Query heads that share a key head are rows of one product. On
a CPU this is two to three times as fast as PyTorch's fused kernel; products are in the compute dtype, sums over blocks
in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from openrl.backends.torch.grids import Grid
from openrl.backends.torch.memory_plan import SCORE_CELLS
from openrl.backends.torch.norms import Norm
from openrl.backends.torch.scratch import Scratch

_QUERIES = 64  # positions a block: smaller ones waste less above the diagonal, larger ones make better products
_TOKENS = 512  # that short sequences are taken together up to
_LENGTHS = 8  # different numbers of keys that the blocks of a sequence have: each is a kernel of its own to make
_MaskKey = tuple[int, int, int, torch.dtype]
_SOFTMAX_BACK = torch.ops.aten._softmax_backward_data.out


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embeddings: float32 [positions, 1, head_dim] to multiply by, and for the halves that change places, on the
    way there and back."""

    cos: Tensor
    sin: Tensor
    sin_back: Tensor
    swap: Tensor

    @classmethod
    def of(cls, cos: Tensor, sin: Tensor, length: int) -> Rope:
        """From transformers' tables [positions, head_dim]; the positions up to `length` that they lack are padding."""
        cos, sin = (functional.pad(table.float(), (0, 0, 0, length - len(table)))[:, None] for table in (cos, sin))
        low, high = sin.chunk(2, dim=-1)
        there, back = torch.cat([-low, high], dim=-1), torch.cat([high, -low], dim=-1)
        return cls(cos, there, back, torch.tensor([1, 0], device=cos.device))

    def turn(self, x: Tensor, scratch: Scratch, *, back: bool = False) -> Tensor:
        """x [sequences, positions, heads, head_dim], contiguous float32, rotated in place; or the gradient of that."""
        swapped = scratch.take("rope", tuple(x.shape), torch.float32)
        halves = (-1, 2, x.shape[-1] // 2)
        torch.index_select(x.view(halves), 1, self.swap, out=swapped.view(halves))
        length = x.shape[1]
        return x.mul_(self.cos[:length]).addcmul_(swapped, (self.sin_back if back else self.sin)[:length])


@dataclass(frozen=True, slots=True)
class _Heads:
    """Of a grid: rotated queries [N, length * group, d] and keys, and values [N, length, d]; N runs over sequences and
    key heads."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True, slots=True)
class _Block:
    """Queries lo..hi of a grid's heads `part`, over keys first..last; some of these a mask has to hide."""

    part: slice
    lo: int
    hi: int
    first: int
    last: int

    @property
    def keys(self) -> slice:
        return slice(self.first, self.last)


@dataclass(frozen=True, slots=True)
class CausalAttention:
    """One layer's attention. Norms are those of queries and keys, where a family has them."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    q_norm: Norm | None
    k_norm: Norm | None
    scratch: Scratch
    _masks: dict[_MaskKey, Tensor] = field(default_factory=dict[_MaskKey, Tensor])

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
            h = self._heads(grid.gather(qkv), grid, rope)
            o = self.scratch.take("attended", tuple(h.q.shape), qkv.dtype)
            for block in self._blocks(h):
                p = self._scores(h, block)[0]
                torch.bmm(p, h.v[block.part, block.keys], out=o[block.part, self._rows(block)])
            grid.scatter(self._to_tokens(o, grid).reshape(grid.sequences * grid.length, -1), out)

    def back(self, d_out: Tensor, qkv: Tensor, grids: Sequence[Grid], rope: Rope) -> Tensor:
        """dL/dqkv, in the memory of `qkv`."""
        for grid in grids:
            raw = grid.gather(qkv)
            h = self._heads(raw, grid, rope)
            d_o = self.scratch.take("d attended", tuple(h.q.shape), qkv.dtype)
            self._to_tokens(d_o, grid).copy_(grid.gather(d_out).view(self._token_shape(grid)))
            grid.scatter(self._projections_back(self._heads_back(h, d_o), raw, grid, rope), qkv)
        return qkv

    # ---- between tokens and heads ----

    def _heads(self, qkv: Tensor, grid: Grid, rope: Rope) -> _Heads:
        d, kv, n = self.head_dim, self.kv_heads, grid.sequences * self.kv_heads
        shape = (grid.sequences, grid.length, self.heads + kv, d)
        turned = self.scratch.take("turned", shape, torch.float32)
        turned.copy_(self._normed(qkv[:, : shape[2] * d].view(shape)))
        rope.turn(turned, self.scratch)
        q, k = turned.split([self.heads, kv], dim=2)
        v = qkv[:, shape[2] * d :].view(grid.sequences, grid.length, kv, d)
        return _Heads(
            self._by_head("q", q.unflatten(2, (kv, self.group)), qkv.dtype).view(n, -1, d),
            self._by_head("k", k, qkv.dtype).view(n, -1, d),
            self._by_head("v", v, qkv.dtype).view(n, -1, d),
        )

    def _by_head(self, name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
        """A contiguous copy of x [sequences, positions, key heads, ...] with positions and key heads in turn."""
        swapped = x.transpose(1, 2)
        return self.scratch.take(name, tuple(swapped.shape), dtype).copy_(swapped)

    def _projections_back(self, d: _Heads, raw: Tensor, grid: Grid, rope: Rope) -> Tensor:
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

    # ---- attention proper ----

    def _blocks(self, h: _Heads) -> Iterator[_Block]:
        """Blocks of few different sizes."""
        n, length, _ = h.k.shape
        step = _QUERIES * -(-length // (_QUERIES * _LENGTHS))
        for part in self._parts(n, length):
            for lo in range(0, length, _QUERIES):
                hi = min(lo + _QUERIES, length)
                first = 0 if self.window is None else max(0, (lo - self.window + 1) // _QUERIES * _QUERIES)
                yield _Block(part, lo, hi, first, hi if first else min(-(-hi // step) * step, length))

    def _parts(self, n: int, length: int) -> Iterator[slice]:
        """All heads in parts: sequences by powers of two while they are short, heads by a divisor where one is long."""
        cells = min(_QUERIES, length) * self.group * length
        if self.kv_heads * cells > SCORE_CELLS:
            fitting = max(1, SCORE_CELLS // cells)
            size = max(d for d in range(1, fitting + 1) if self.kv_heads % d == 0)
            yield from (slice(at, at + size) for at in range(0, n, size))
            return
        most = max(1, min(_TOKENS // length, SCORE_CELLS // (self.kv_heads * cells)))
        at, left = 0, n // self.kv_heads
        while left:
            size = 1 << (min(most, left).bit_length() - 1)
            yield slice(at * self.kv_heads, (at + size) * self.kv_heads)
            at, left = at + size, left - size

    def _rows(self, block: _Block) -> slice:
        return slice(block.lo * self.group, block.hi * self.group)

    def _scores(self, h: _Heads, b: _Block) -> tuple[Tensor, Tensor | None]:
        """Probabilities [n, queries * group, keys] in scratch memory; with a soft cap also its derivative."""
        q, k = h.q[b.part, self._rows(b)], h.k[b.part, b.keys]
        s = self.scratch.take("scores", (len(q), q.shape[1], k.shape[1]), q.dtype)
        torch.baddbmm(s, q, k.transpose(1, 2), beta=0, alpha=self.scale, out=s)
        slope = None
        if self.softcap is not None:
            s.div_(self.softcap).tanh_()
            slope = torch.mul(s, s, out=self.scratch.take("slope", tuple(s.shape), s.dtype)).neg_().add_(1)
            s.mul_(self.softcap)
        mask = self._mask(b, s)
        s.view(len(q), b.hi - b.lo, self.group, -1)[..., -mask.shape[-1] :].add_(mask)
        return torch.softmax(s, dim=-1, out=s), slope

    def _mask(self, b: _Block, like: Tensor) -> Tensor:
        """What hides keys from a block's queries, additive [queries, 1, last keys]: what stands before is visible."""
        cut = self.window is not None and b.hi - b.first > self.window
        rows, offset = b.hi - b.lo, b.lo - b.first if cut else 0
        key = (rows, offset, b.last - b.lo + offset, like.dtype)
        if key not in self._masks:
            queries = offset + torch.arange(rows, device=like.device)[:, None]
            keys = torch.arange(key[2], device=like.device)
            hidden = keys > queries
            if cut and self.window is not None:
                hidden |= keys <= queries - self.window
            mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
            self._masks[key] = mask.masked_fill_(hidden, float("-inf"))[:, None]
        return self._masks[key]

    def _heads_back(self, h: _Heads, d_o: Tensor) -> _Heads:
        take = self.scratch.take
        dq = take("d q", tuple(h.q.shape), h.q.dtype)
        dk, dv = (take(name, tuple(h.k.shape), torch.float32).zero_() for name in ("d k", "d v"))
        for b in self._blocks(h):
            rows, keys = self._rows(b), b.keys
            p, slope = self._scores(h, b)
            d_ob = d_o[b.part, rows]
            dv[b.part, keys].add_(torch.bmm(p.transpose(1, 2), d_ob))
            dp = take("d scores", tuple(p.shape), p.dtype)
            torch.bmm(d_ob, h.v[b.part, keys].transpose(1, 2), out=dp)
            ds = _SOFTMAX_BACK(dp, p, -1, p.dtype, grad_input=dp)
            if slope is not None:
                ds.mul_(slope)
            dq_b = dq[b.part, rows]
            torch.baddbmm(dq_b, ds, h.k[b.part, keys], beta=0, alpha=self.scale, out=dq_b)
            dk[b.part, keys].add_(torch.bmm(ds.transpose(1, 2), h.q[b.part, rows]), alpha=self.scale)
        return _Heads(dq, dk, dv)
