"""Attention in training over sequences end to end, by a kernel that takes them so: without padding or gathering.

Nothing of the way there is kept: the way back runs the kernel forward again under autograd, which then has what its
own way back needs, and gives it up again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from openrl.backends.torch.layout import Layout, Packed
from openrl.backends.torch.norms import Norm
from openrl.backends.torch.rope import Rope
from openrl.backends.torch.scratch import Scratch
from openrl.backends.torch.train_kernels import Varlen

_TOKENS = 4096  # whose float32 copies are held at a time
_QKV = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class PackedAttention:
    """Implements `Attention`; `rope` is that of tokens (`Rope.at`). Norms are those of queries and keys, where a family
    has them."""

    heads: int
    kv_heads: int
    head_dim: int
    q_norm: Norm | None
    k_norm: Norm | None
    window: int | None
    scale: float
    kernel: Varlen
    scratch: Scratch

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
        attended = self._attend(*self._turned(qkv, rope), layout.packed)
        out.copy_(attended.view(len(out), -1))

    def back(self, d_out: Tensor, qkv: Tensor, layout: Layout, rope: Rope) -> Tensor:
        """See `Attention`."""
        q, k, v = (t.detach().requires_grad_() for t in self._turned(qkv, rope))
        with torch.enable_grad():
            attended = self._attend(q, k, v, layout.packed)
        d_q, d_k, d_v = torch.autograd.grad(attended, (q, k, v), d_out.view(attended.shape))
        qk, values = self._split(qkv)
        for part in _parts(qkv):
            turned = self._floats(qk[part])
            turned[:, : self.heads], turned[:, self.heads :] = d_q[part], d_k[part]
            self._norms_back(rope.turn(turned, part, self.scratch, back=True), qk[part])
        values.copy_(d_v)
        return qkv

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, packed: Packed) -> Tensor:
        cut = self.window is not None and packed.longest > self.window
        return self.kernel(
            q,
            k,
            v,
            packed.ends,
            packed.ends,
            packed.longest,
            packed.longest,
            scale=self.scale,
            window_size=(self.window - 1 if cut and self.window is not None else -1, 0),
            enable_gqa=self.heads > self.kv_heads,
        )

    def _turned(self, qkv: Tensor, rope: Rope) -> _QKV:
        """Queries and keys, normed and turned, and values, each [tokens, heads, d] in memory of its own."""
        qk, v = self._split(qkv)
        take, count, d = self.scratch.take, len(qkv), self.head_dim
        q = take("q", (count, self.heads, d), qkv.dtype)
        k, values = (take(name, (count, self.kv_heads, d), qkv.dtype) for name in ("k", "v"))
        for part in _parts(qkv):
            turned = rope.turn(self._normed(qk[part]), part, self.scratch)
            q[part], k[part] = turned[:, : self.heads], turned[:, self.heads :]
        return q, k, values.copy_(v)

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """Views [tokens, heads, d] of queries with keys, and of values."""
        d, kv = self.head_dim, self.kv_heads
        qk, v = qkv.split([(self.heads + kv) * d, kv * d], dim=1)
        return qk.view(len(qkv), -1, d), v.view(len(qkv), -1, d)

    def _normed(self, qk: Tensor) -> Tensor:
        """Queries and keys [tokens, heads, d] after their norms, if there are some, in float32."""
        out = self._floats(qk)
        for norm, heads in self._norms():
            x = qk[:, heads]
            norm.apply(x, norm.scale(x), out[:, heads], self.scratch)
        return out if self.q_norm is not None else out.copy_(qk)

    def _norms_back(self, d_normed: Tensor, qk: Tensor) -> None:
        """Put the gradient of the heads `qk` in their place, given that of what `_normed` makes of them."""
        for norm, heads in self._norms():
            x = qk[:, heads]
            norm.back(d_normed[:, heads], x, norm.scale(x), x, self.scratch)
        if self.q_norm is None:
            qk.copy_(d_normed)

    def _norms(self) -> list[tuple[Norm, slice]]:
        if self.q_norm is None or self.k_norm is None:
            return []
        return [(self.q_norm, slice(None, self.heads)), (self.k_norm, slice(self.heads, None))]

    def _floats(self, like: Tensor) -> Tensor:
        return self.scratch.take("turned", tuple(like.shape), torch.float32)


def _parts(tokens: Tensor) -> Iterator[slice]:
    return (slice(at, at + _TOKENS) for at in range(0, len(tokens), _TOKENS))
