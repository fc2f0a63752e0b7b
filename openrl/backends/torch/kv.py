"""The KV cache: one rectangle of slots a layer, written in place, and the views of it that a forward pass needs.

A slot holds one sequence from column 0, and live sequences fill slots 0, 1, ... without holes, so that decoding reads
plain slices. A view stands in for transformers' cache object: each attention layer gives it the new keys and values
and gets back those to attend over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openrl.backends.common.slots import LENGTH_BLOCK, Rectangle, spans


@dataclass(frozen=True, slots=True)
class KVShape:
    """What a model's cache needs to know: sizes, dtype and place."""

    layers: int
    heads: int  # key and value heads
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype, device: torch.device) -> KVShape:
        """From a transformers config of one of the supported families."""
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(config.num_hidden_layers, config.num_key_value_heads, head_dim, dtype, device)


class KVCache(Rectangle):
    """Keys and values [slots, heads, length, head_dim] of every layer, growing and shrinking with use."""

    def __init__(self, shape: KVShape, max_slots: int, max_tokens: int) -> None:
        super().__init__(max_slots, max_tokens)
        self._shape = shape
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    @property
    def device(self) -> torch.device:
        return self._shape.device

    def whole_blocks(self, length: int) -> int:
        """Columns to attend over for sequences of up to `length`: whole blocks, since products have kernels made for
        their sizes, which would else be made anew for each token."""
        return min(-(-length // LENGTH_BLOCK) * LENGTH_BLOCK, self.length)

    def clear(self) -> None:
        """Give all memory back."""
        self.keys, self.values, self.slots, self.length = [], [], 0, 0

    def _resize(self, slots: int, length: int, used_slots: int, used_length: int) -> None:
        """Layer by layer, so that old and new lie side by side for one tensor only."""
        if not self.keys:
            self.keys, self.values = [self._empty(0, 0)] * self._shape.layers, [self._empty(0, 0)] * self._shape.layers
        for side in (self.keys, self.values):
            for layer, old in enumerate(side):
                new = self._empty(slots, length)
                new[:used_slots, :, :used_length] = old[:used_slots, :, :used_length]
                side[layer] = new
        self.slots, self.length = slots, length

    def _empty(self, slots: int, length: int) -> Tensor:
        # Zeros, not garbage: a masked column still meets its attention weight, and 0 * NaN is NaN.
        s = self._shape
        return torch.zeros(slots, s.heads, length, s.head_dim, dtype=s.dtype, device=s.device)

    def copy(self, moves: Sequence[tuple[int, int]], length: int) -> None:
        """Copy the first `length` columns of slots to others, (from, to), as if all at once: a slot may be both."""
        if not moves:
            return
        src, dst = torch.tensor(moves, device=self.device).unbind(1)
        for side in (self.keys, self.values):
            for tensor in side:
                tensor[dst, :, :length] = tensor[src, :, :length]

    def spread(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copy the first `length` columns of one slot to others."""
        for slots in spans(targets):
            for side in (self.keys, self.values):
                for tensor in side:
                    tensor[slots, :, :length] = tensor[source : source + 1, :, :length]

    def wipe(self, slot: int) -> None:
        """Zero a slot that may hold non-finite values."""
        for tensor in (*self.keys, *self.values):
            tensor[slot].zero_()


class View:
    """What transformers asks of a cache where it makes no mask of its own beyond plain causality."""

    is_compileable = False

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0

    def get_query_offset(self, *_: Any, **__: Any) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, *_: Any, **__: Any) -> tuple[int, int]:
        return query_length, 0


class ChunkView(View):
    """Part of one prompt from position `start`: store in `slot` and attend to what is there up to it."""

    def __init__(self, cache: KVCache, slot: int, start: int) -> None:
        self._cache = cache
        self._slot = slot
        self._start = start

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store keys and values [1, heads, tokens, head_dim]; returns all columns up to the newest."""
        stop = self._start + key.shape[2]
        keys, values = (side[layer][self._slot : self._slot + 1] for side in (self._cache.keys, self._cache.values))
        keys[:, :, self._start : stop] = key
        values[:, :, self._start : stop] = value
        return keys[:, :, :stop], values[:, :, :stop]


class DecodeView(View):
    """One token for each of the first slots, at `positions` [rows]; attend over the first `length` columns."""

    def __init__(self, cache: KVCache, positions: Tensor, length: int) -> None:
        self._cache = cache
        self._rows = torch.arange(len(positions), device=positions.device)
        self._positions = positions
        self._length = length

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store keys and values [rows, heads, 1, head_dim]; returns views of the columns in use."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self._rows, :, self._positions] = key[:, :, 0]
        values[self._rows, :, self._positions] = value[:, :, 0]
        rows = len(key)
        return keys[:rows, :, : self._length], values[:rows, :, : self._length]
