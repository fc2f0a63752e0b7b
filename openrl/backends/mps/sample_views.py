"""What the layers of an mlx-lm model take for their caches in one forward pass of the sampler.

A view says at which positions the new tokens stand, stores their keys and values, gives back those to attend over, and
makes the mask that goes with them. mlx-lm asks no more of a cache within a forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from openrl.backends.common.prefix_cache import BLOCK
from openrl.backends.mps.sample_kv import Blocks, Filling, KVCache, joined

_NEVER = 1 << 30  # a position that no query reaches

Mask = mx.array | str | None


class Pass(Protocol):
    """One forward pass over all layers."""

    @property
    def offset(self) -> int | mx.array:
        """The position of the first new token: of all rows, or int32 [rows]."""
        ...

    def mask(self, count: int, window: int | None, *, explicit: bool) -> Mask:
        """Which columns the `count` new tokens see, as mlx-lm's attention takes it; `explicit`: as an array."""
        ...

    def update(self, layer: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store keys and values [rows, heads, tokens, size] of the new tokens; returns those of all columns."""
        ...


class View:
    """One layer's cache in a pass. `window` is that of the layer, for families that do not name it themselves."""

    def __init__(self, whole: Pass, layer: int, window: int | None) -> None:
        self._whole = whole
        self._layer = layer
        self._window = window
        self.offset = whole.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """See `Pass.update`."""
        return self._whole.update(self._layer, keys, values)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        """See `Pass.mask`."""
        return self._whole.mask(N, window_size or self._window, explicit=return_array)


@dataclass(frozen=True, slots=True)
class Layout:
    """What views must know of a model: each layer's window, and the axes that its masks need.

    Some families attend with their heads in groups, and masks have one more axis there.
    """

    windows: tuple[int | None, ...]
    grouped: bool = False

    def views(self, whole: Pass) -> list[View]:
        return [View(whole, layer, window) for layer, window in enumerate(self.windows)]

    def shown(self, mask: mx.array) -> mx.array:
        """A mask [rows, tokens, columns] with axes for heads."""
        return mx.expand_dims(mask, (1, 2) if self.grouped else 1)


def seen(queries: mx.array, keys: mx.array, window: int | None) -> mx.array:
    """Bool [rows, tokens, columns]: which positions `keys` [rows or 1, columns] the `queries` [rows, tokens] see."""
    q, k = queries[..., None], keys[:, None]
    mask = k <= q
    return mask if window is None else mask & (k > q - window)


class DecodePass:
    """One token for each of the first slots, at `positions` [rows]; attend over the first `columns` columns."""

    def __init__(self, cache: KVCache, layout: Layout, positions: list[int]) -> None:
        self._cache = cache
        self._layout = layout
        self._rows = mx.arange(len(positions))
        self._columns = max(positions) + 1
        self._even = min(positions) + 1 == self._columns
        self.offset = mx.array(positions, mx.int32)

    def mask(self, count: int, window: int | None, *, explicit: bool) -> Mask:
        """See `Pass`."""
        if self._even and not explicit and (window is None or self._columns <= window):
            return None
        return self._layout.shown(seen(self.offset[:, None], mx.arange(self._columns)[None], window))

    def update(self, layer: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """See `Pass`."""
        rows, cache = len(self._rows), self._cache
        cache.keys[layer][self._rows, :, self.offset] = keys[:, :, 0]
        cache.values[layer][self._rows, :, self.offset] = values[:, :, 0]
        return cache.keys[layer][:rows, :, : self._columns], cache.values[layer][:rows, :, : self._columns]


class ChunkPass:
    """Part of one prompt from position `start`: store in `slot` and attend to what is there up to it."""

    def __init__(self, cache: KVCache, layout: Layout, slot: int, start: int) -> None:
        self._cache = cache
        self._layout = layout
        self._slot = slot
        self.offset = start

    def mask(self, count: int, window: int | None, *, explicit: bool) -> Mask:
        """See `Pass`."""
        return _prompt_mask(self._layout, self.offset, count, window, explicit=explicit)

    def update(self, layer: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """See `Pass`."""
        stop = self.offset + keys.shape[2]
        row = slice(self._slot, self._slot + 1)
        all_keys, all_values = self._cache.keys, self._cache.values
        all_keys[layer][row, :, self.offset : stop] = keys
        all_values[layer][row, :, self.offset : stop] = values
        return all_keys[layer][row, :, :stop], all_values[layer][row, :, :stop]


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a prefill: the stored blocks that it begins with, its new tokens, and the slots that get it all."""

    blocks: Sequence[int]
    fresh: int
    slots: Sequence[int]

    @property
    def start(self) -> int:
        """Tokens that are stored, and so the position of the first that is computed."""
        return len(self.blocks) * BLOCK


class PromptPass:
    """Rows of prompts side by side: each attends to its stored beginning and to itself, and is copied to its slots.

    The columns attended over are `past`, those of the longest stored beginning with zeros after shorter ones, and then
    the new tokens. Without any stored beginning they are the new tokens alone. Padding stands behind a row's tokens,
    where causality hides it from them.
    """

    def __init__(self, cache: KVCache, blocks: Blocks, layout: Layout, rows: Sequence[Row], filling: Filling) -> None:
        self._cache = cache
        self._blocks = blocks
        self._layout = layout
        self._filling = filling
        most = max(len(row.blocks) for row in rows)
        self._past = most * BLOCK
        self._starts = mx.array([row.start for row in rows], mx.int32)
        self._table = mx.array([[*row.blocks, *[0] * (most - len(row.blocks))] for row in rows]) if most else None
        self._copies = _Copies.of(rows, self._past)
        self.offset: int | mx.array = self._starts if most else 0

    def mask(self, count: int, window: int | None, *, explicit: bool) -> Mask:
        """See `Pass`."""
        if self._table is None:
            return _prompt_mask(self._layout, 0, count, window, explicit=explicit)
        columns = mx.arange(self._past)[None]
        queries = self._starts[:, None] + mx.arange(count)
        stored = mx.where(columns < self._starts[:, None], columns, _NEVER)
        return self._layout.shown(seen(queries, mx.concatenate([stored, queries], axis=1), window))

    def update(self, layer: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """See `Pass`."""
        self._filling.write(layer, keys, values)
        if self._table is not None:
            keys = mx.concatenate([joined(self._blocks.keys[layer], self._table), keys], axis=2)
            values = mx.concatenate([joined(self._blocks.values[layer], self._table), values], axis=2)
        if self._copies is not None:
            self._copies.write(self._cache.keys[layer], keys)
            self._copies.write(self._cache.values[layer], values)
        return keys, values


@dataclass(frozen=True, slots=True)
class _Copies:
    """Which row goes to which slot, and which of its columns to which of the slot's, the first `width` of them."""

    rows: mx.array  # int [n]
    slots: mx.array  # int [n]
    columns: mx.array | None  # int [n, width]; None: each to its own
    width: int

    @classmethod
    def of(cls, rows: Sequence[Row], past: int) -> _Copies | None:
        pairs = [(number, slot) for number, row in enumerate(rows) for slot in row.slots]
        if not pairs:
            return None
        numbers, slots = zip(*pairs, strict=True)
        width = max(rows[n].start + rows[n].fresh for n in numbers)
        columns = None
        if past:
            at = np.arange(width)[None]
            starts = np.array([rows[n].start for n in numbers])[:, None]
            # Behind a row's own tokens anything finite will do: nobody sees it before it is written over.
            columns = mx.array(np.minimum(np.where(at < starts, at, past + at - starts), past + rows_width(rows) - 1))
        return cls(mx.array(numbers), mx.array(slots), columns, width)

    def write(self, side: mx.array, source: mx.array) -> None:
        """Copy columns of `source` [rows, heads, columns, size] into `side`, in place."""
        taken = source[self.rows]
        if self.columns is not None:
            taken = mx.take_along_axis(taken, self.columns[:, None, :, None], axis=2)
        side[self.slots, :, : self.width] = taken[:, :, : self.width]


def rows_width(rows: Sequence[Row]) -> int:
    """New tokens of the longest row, to which the others are padded."""
    return max(row.fresh for row in rows)


def _prompt_mask(layout: Layout, start: int, count: int, window: int | None, *, explicit: bool) -> Mask:
    """For tokens start..start+count-1 with all columns before them; broadcasts over rows."""
    if not explicit and (window is None or start + count <= window):
        return "causal" if count > 1 else None
    queries = mx.arange(start, start + count)[None]
    return layout.shown(seen(queries, mx.arange(start + count)[None], window))


class ProbePass:
    """Stores nothing and notes what each layer would store: for two rows at positions of their own."""

    def __init__(self) -> None:
        self.offset: Any = mx.array([0, 1], mx.int32)
        self.seen: dict[int, tuple[mx.array, mx.array]] = {}

    def mask(self, count: int, window: int | None, *, explicit: bool) -> Mask:
        """See `Pass`."""
        return None

    def update(self, layer: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """See `Pass`."""
        self.seen[layer] = keys, values
        return keys, values
