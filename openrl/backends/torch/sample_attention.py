"""Attention of the sampler: one query a row over the KV cache, or whole prompts.

Queries come scaled. Query heads that share a key head are taken as rows of one product, so that keys and values are
read once and never repeated.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from openrl.backends.torch.kv import KVCache
from openrl.backends.torch.masks import Mask
from openrl.backends.torch.sample_layers import Layers


class Attention(Protocol):
    """Takes a layer's number and kind and its heads, float32 [N, query, key and value heads, head_dim]; returns
    [N, query heads * head_dim] in the compute dtype."""

    def __call__(self, index: int, kind: str, heads: Tensor) -> Tensor: ...


class StepAttention:
    """One token for each of the first slots, at `positions` [N]: kept in the cache, which is attended over as far as
    `columns`. `mask` as made by `Masks.decode` for so many keys."""

    def __init__(self, layers: Layers, cache: KVCache, positions: Tensor, columns: int, mask: Mask) -> None:
        self._layers = layers
        self._cache = cache
        self._dtype = cache.keys[0].dtype
        self._columns = columns
        self._rows = len(positions)
        slots = torch.arange(self._rows * layers.kv_heads, device=positions.device).view(self._rows, -1)
        self._places = (slots * cache.length + positions[:, None],)  # of the new columns in a layer's flat cache
        # Fused kernels are best for few rows and on GPUs, where they are made for it; they know no soft cap.
        self._fused = layers.softcap is None and (self._rows == 1 or positions.is_cuda)
        self._masks = {kind: self._shaped(each) for kind, each in by_kind(mask).items()}

    def __call__(self, index: int, kind: str, heads: Tensor) -> Tensor:
        layers, rows = self._layers, self._rows
        keys, values = self._cache.keys[index], self._cache.values[index]
        new = heads[:, layers.heads :].to(self._dtype)
        keys.view(-1, layers.head_dim).index_put_(self._places, new[:, : layers.kv_heads])
        values.view(-1, layers.head_dim).index_put_(self._places, new[:, layers.kv_heads :])
        queries = heads[:, : layers.heads].to(self._dtype).reshape(rows * layers.kv_heads, -1, layers.head_dim)
        mask = self._masks[kind] if kind in self._masks else self._masks[""]
        return self._attend(queries, keys, values, mask).view(rows, -1)

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """For queries [N * key heads, queries of one key head, head_dim]."""
        keys, values = self._used(keys), self._used(values)
        if self._fused:
            q, k, v = (t.view(self._rows, self._layers.kv_heads, *t.shape[1:]) for t in (queries, keys, values))
            return functional.scaled_dot_product_attention(q, k, v, mask, scale=1.0)
        # In one piece: `bmm` would else copy the transposed keys, which is slower.
        scores = torch.bmm(queries, keys.contiguous().transpose(1, 2))
        if self._layers.softcap is not None:
            scores.div_(self._layers.softcap).tanh_().mul_(self._layers.softcap)
        if mask is not None:
            scores.add_(mask)
        return torch.bmm(scores.softmax(-1), values)

    def _used(self, side: Tensor) -> Tensor:
        """The columns in use of the rows' slots, [N * key heads, columns, head_dim]."""
        dim = self._layers.head_dim
        sizes = (self._rows * self._layers.kv_heads, self._columns, dim)
        return side.as_strided(sizes, (self._cache.length * dim, dim, 1))

    def _shaped(self, mask: Tensor | None) -> Tensor | None:
        if mask is None or self._fused:
            return mask
        return mask[:, 0].repeat_interleave(self._layers.kv_heads, 0)


class PromptAttention:
    """Rows of `tokens` tokens each; `view` keeps their keys and values and says what is attended over."""

    def __init__(self, layers: Layers, rows: int, mask: Mask, view: Any, dtype: torch.dtype) -> None:
        self._layers = layers
        self._rows = rows
        self._masks = by_kind(mask)
        self._view = view
        self._dtype = dtype

    def __call__(self, index: int, kind: str, heads: Tensor) -> Tensor:
        layers = self._layers
        grid = heads.to(self._dtype).unflatten(0, (self._rows, -1)).transpose(1, 2)
        queries, new_keys, new_values = grid.split([layers.heads, layers.kv_heads, layers.kv_heads], 1)
        keys, values = self._view.update(new_keys, new_values, index)
        mask = self._masks[kind] if kind in self._masks else self._masks[""]
        out = self._attend(queries, keys, values, mask)
        return out.transpose(1, 2).reshape(len(heads), -1)

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        times = self._layers.heads // self._layers.kv_heads
        keys, values = keys.repeat_interleave(times, 1), values.repeat_interleave(times, 1)
        cap = self._layers.softcap
        if cap is None:
            causal = mask is None and queries.shape[2] > 1
            return functional.scaled_dot_product_attention(queries, keys, values, mask, is_causal=causal, scale=1.0)
        scores = torch.matmul(queries, keys.transpose(2, 3)).div_(cap).tanh_().mul_(cap)
        if mask is not None:
            scores.add_(mask)
        return torch.matmul(scores.softmax(-1), values)


def by_kind(mask: Mask) -> dict[str, Tensor | None]:
    """Masks by kind of layer; under "" the one for all kinds."""
    return mask if isinstance(mask, dict) else {"": mask}
