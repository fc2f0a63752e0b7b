"""Keys and values of stored prompt beginnings, in blocks of tokens beside the rectangle, and prefill that starts there.

`openrl.backends.common.prefix_cache` says which block holds what. A prefill reads the blocks of each row's beginning,
computes the rest, and fills blocks for prompts to come, all within the attention layers' own calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openrl.backends.common.prefix_cache import BLOCK, Claim
from openrl.backends.common.slots import spans
from openrl.backends.torch.kv import KVCache, KVShape, View

_FIRST_BLOCKS = 64


class Blocks:
    """Keys and values [1 + count, heads, BLOCK, head_dim] of every layer, made at first need.

    Block 0 is all zeros and stands where a row has no block: a masked column still meets its attention weight.
    """

    def __init__(self, shape: KVShape) -> None:
        self._shape = shape
        self.count = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    @property
    def device(self) -> torch.device:
        return self._shape.device

    def reserve(self, count: int, most: int) -> None:
        """Make room for blocks 1..`count`; grows by doubling, up to `most`."""
        if count <= self.count:
            return
        larger = max(count, min(most, max(_FIRST_BLOCKS, 2 * self.count)))
        layers = self._shape.layers
        if not self.keys:
            self.keys, self.values = [self._empty(1)] * layers, [self._empty(1)] * layers
        for side in (self.keys, self.values):
            for layer, old in enumerate(side):  # one by one, so that old and new lie side by side for one tensor only
                new = self._empty(1 + larger)
                new[: len(old)] = old
                side[layer] = new
        self.count = larger

    def clear(self) -> None:
        """Give all memory back."""
        self.keys, self.values, self.count = [], [], 0

    def _empty(self, count: int) -> Tensor:
        s = self._shape
        return torch.zeros(count, s.heads, BLOCK, s.head_dim, dtype=s.dtype, device=s.device)


class Filling:
    """Blocks to be copied from rows of keys and values [rows, heads, tokens, head_dim], whole blocks of them.

    `claims` are (row, blocks of the sequence that stand before the row's first token, claim).
    """

    def __init__(self, blocks: Blocks, claims: Sequence[tuple[int, int, Claim]]) -> None:
        places = [(row, c.first - before + i, b) for row, before, c in claims for i, b in enumerate(c.blocks)]
        self._blocks = blocks
        self._places = torch.tensor(places, device=blocks.device).unbind(1) if places else None

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Copy one layer's."""
        if self._places is None:
            return
        rows, places, ids = self._places
        whole = keys.shape[2] // BLOCK
        for side, source in ((self._blocks.keys, keys), (self._blocks.values, values)):
            grid = source[:, :, : whole * BLOCK].unflatten(2, (whole, BLOCK))
            side[layer][ids] = grid[rows, :, places]


def fill(blocks: Blocks, cache: KVCache, claims: Sequence[tuple[int, Claim]]) -> None:
    """Store what slots hold from column 0 on, as (slot, claim) says."""
    filling = Filling(blocks, [(slot, 0, claim) for slot, claim in claims])
    for layer, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
        filling.write(layer, keys, values)


def restore(blocks: Blocks, cache: KVCache, slot: int, ids: Sequence[int]) -> None:
    """Copy stored blocks to the beginning of a slot."""
    index = torch.tensor(ids, device=blocks.device)
    for stored, side in ((blocks.keys, cache.keys), (blocks.values, cache.values)):
        for layer, tensor in enumerate(side):
            columns = tensor[slot, :, : len(ids) * BLOCK].unflatten(1, (len(ids), BLOCK))
            columns.copy_(stored[layer][index].transpose(0, 1))


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a prefill: the stored blocks that it begins with, and the slots, ascending, that get it all."""

    blocks: Sequence[int]
    slots: Sequence[int]

    @property
    def start(self) -> int:
        """Tokens that are stored, and so the position of the first that is computed."""
        return len(self.blocks) * BLOCK


@dataclass(frozen=True, slots=True)
class _Copy:
    """Rows to be copied to slots; `rows` is as long as `slots`, or 1 for all of them."""

    rows: slice
    slots: slice
    start: int


class PrefillView(View):
    """Rows of prompts side by side: each attends to its stored beginning and to itself, and is copied to its slots.

    The columns attended over are `past`, those of the longest stored beginning with zeros after shorter ones, and then
    the new tokens. Without any stored beginning they are the new tokens alone.
    """

    def __init__(self, cache: KVCache, blocks: Blocks, rows: Sequence[Row], filling: Filling) -> None:
        self._cache = cache
        self._blocks = blocks
        self._filling = filling
        self._copies = _copies(rows)
        most = max(len(row.blocks) for row in rows)
        self.past = most * BLOCK
        table = [[*row.blocks, *[0] * (most - len(row.blocks))] for row in rows]
        self._table = torch.tensor(table, device=blocks.device) if most else None

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Take keys and values [rows, heads, tokens, head_dim] of the new tokens; returns those of all columns."""
        self._filling.write(layer, key, value)
        if self._table is not None:
            key = self._joined(self._blocks.keys[layer], self._table, key)
            value = self._joined(self._blocks.values[layer], self._table, value)
        for copy in self._copies:
            self._store(copy, self._cache.keys[layer], key)
            self._store(copy, self._cache.values[layer], value)
        return key, value

    def _joined(self, stored: Tensor, table: Tensor, new: Tensor) -> Tensor:
        rows, heads, tokens, dim = new.shape
        joined = new.new_empty(rows, heads, self.past + tokens, dim)
        joined[:, :, : self.past].unflatten(2, (-1, BLOCK)).copy_(stored[table].transpose(1, 2))
        joined[:, :, self.past :] = new
        return joined

    def _store(self, copy: _Copy, side: Tensor, columns: Tensor) -> None:
        slots, start = side[copy.slots], copy.start
        rows = columns[copy.rows]
        stop = min(start + columns.shape[2] - self.past, self._cache.length)  # padding need not be stored
        if start:
            slots[:, :, :start] = rows[:, :, :start]
        slots[:, :, start:stop] = rows[:, :, self.past : self.past + stop - start]


def _copies(rows: Sequence[Row]) -> list[_Copy]:
    """As few as there can be: one row to a run of slots, or a run of rows to a run of slots."""
    found: list[_Copy] = []
    for number, row in enumerate(rows):
        for slots in spans(row.slots):
            new = _Copy(slice(number, number + 1), slots, row.start)
            if found and _continues(found[-1], new):
                last = found.pop()
                new = _Copy(slice(last.rows.start, number + 1), slice(last.slots.start, slots.stop), row.start)
            found.append(new)
    return found


def _continues(last: _Copy, new: _Copy) -> bool:
    """Whether both together are one slot for each row."""
    paired = all(c.rows.stop - c.rows.start == c.slots.stop - c.slots.start for c in (last, new))
    return paired and (last.rows.stop, last.slots.stop, last.start) == (new.rows.start, new.slots.start, new.start)
