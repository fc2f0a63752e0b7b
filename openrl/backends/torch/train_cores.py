"""The heart of attention in training, from queries, keys and values by head: in blocks on a CPU, fused on a GPU.

In blocks, scores are never held whole: the way back computes them again, so memory grows with the tokens and not with
their square, and a sliding window or a soft cap costs nothing. Query heads that share a key head are rows of one
product. On a CPU this is two to three times as fast as PyTorch's fused kernel; products are in the compute dtype, sums
over blocks in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from openrl.backends.torch.memory_plan import SCORE_CELLS
from openrl.backends.torch.scratch import Scratch

_QUERIES = 128  # positions a block: smaller ones waste less above the diagonal, larger ones make better products
_TOKENS = 1024  # that short sequences are taken together up to
_LENGTHS = 8  # different numbers of keys that the blocks of a sequence have: each is a kernel of its own to make
_MaskKey = tuple[int, int, int, torch.dtype]
_SOFTMAX_BACK = torch.ops.aten._softmax_backward_data.out


@dataclass(frozen=True, slots=True)
class Heads:
    """Rotated queries [N, length * group, d] and keys, and values [N, length, d]; N runs over sequences and key heads.

    Of gradients, keys and values may be float32.
    """

    q: Tensor
    k: Tensor
    v: Tensor


class Core(Protocol):
    """Causal attention."""

    def run(self, h: Heads) -> Tensor:
        """The result, of the queries' shape; good until the next call."""
        ...

    def back(self, h: Heads, d_out: Tensor) -> Heads:
        """The gradients of queries, keys and values, likewise."""
        ...


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
class BlockCore:
    """A block of queries at a time. `window` and `softcap` as families with these have them."""

    kv_heads: int
    group: int
    scale: float
    window: int | None
    softcap: float | None
    scratch: Scratch
    _masks: dict[_MaskKey, Tensor] = field(default_factory=dict[_MaskKey, Tensor])

    def run(self, h: Heads) -> Tensor:
        """See `Core`."""
        out = self.scratch.take("attended", tuple(h.q.shape), h.q.dtype)
        for block in self._blocks(h):
            p = self._scores(h, block)[0]
            torch.bmm(p, h.v[block.part, block.keys], out=out[block.part, self._rows(block)])
        return out

    def back(self, h: Heads, d_out: Tensor) -> Heads:
        """See `Core`."""
        take = self.scratch.take
        dq = take("d q", tuple(h.q.shape), h.q.dtype)
        dk, dv = (take(name, tuple(h.k.shape), torch.float32).zero_() for name in ("d k", "d v"))
        for b in self._blocks(h):
            rows, keys = self._rows(b), b.keys
            p, slope = self._scores(h, b)
            d_ob = d_out[b.part, rows]
            dv[b.part, keys].add_(torch.bmm(p.transpose(1, 2), d_ob))
            dp = take("d scores", tuple(p.shape), p.dtype)
            torch.bmm(d_ob, h.v[b.part, keys].transpose(1, 2), out=dp)
            ds = _SOFTMAX_BACK(dp, p, -1, p.dtype, grad_input=dp)
            if slope is not None:
                ds.mul_(slope)
            dq_b = dq[b.part, rows]
            torch.baddbmm(dq_b, ds, h.k[b.part, keys], beta=0, alpha=self.scale, out=dq_b)
            dk[b.part, keys].add_(torch.bmm(ds.transpose(1, 2), h.q[b.part, rows]), alpha=self.scale)
        return Heads(dq, dk, dv)

    def _blocks(self, h: Heads) -> Iterator[_Block]:
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

    def _scores(self, h: Heads, b: _Block) -> tuple[Tensor, Tensor | None]:
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


@dataclass(frozen=True, slots=True)
class FusedCore:
    """PyTorch's kernels, which on a GPU are made for the whole of it. They know no soft cap."""

    kv_heads: int
    group: int
    scale: float
    window: int | None

    def run(self, h: Heads) -> Tensor:
        """See `Core`."""
        return self._rows(self._attend(*self._split(h)))

    def back(self, h: Heads, d_out: Tensor) -> Heads:
        """See `Core`."""
        inputs = [t.requires_grad_() for t in self._split(h)]
        with torch.enable_grad():
            out = self._attend(*inputs)
        dq, dk, dv = torch.autograd.grad(out, inputs, self._by_query_head(d_out))
        return Heads(self._rows(dq), dk.flatten(0, 1), dv.flatten(0, 1))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = self._mask(k.shape[2], k.device)
        return functional.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=self.scale, enable_gqa=self.group > 1
        )

    def _mask(self, length: int, device: torch.device) -> Tensor | None:
        if self.window is None or length <= self.window:
            return None
        positions = torch.arange(length, device=device)
        distance = positions[:, None] - positions
        return (distance >= 0) & (distance < self.window)

    def _split(self, h: Heads) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [sequences, heads, length, d]; fresh tensors."""
        k, v = (t.detach().unflatten(0, (-1, self.kv_heads)) for t in (h.k, h.v))
        return self._by_query_head(h.q), k, v

    def _by_query_head(self, q: Tensor) -> Tensor:
        """[N, length * group, d] as [sequences, heads, length, d]."""
        grid = q.unflatten(1, (-1, self.group)).unflatten(0, (-1, self.kv_heads))
        return grid.transpose(2, 3).flatten(1, 2).detach()

    def _rows(self, heads: Tensor) -> Tensor:
        """The way back from that."""
        grid = heads.unflatten(1, (self.kv_heads, self.group)).transpose(2, 3)
        return grid.flatten(0, 1).flatten(1, 2)
