"""The KV cache of the sampler in MLX: one rectangle of slots a layer, and blocks of what earlier requests computed.

A slot holds one sequence from column 0. Every layer keeps all columns, also one with a window: a rotating cache forgets
what prompts to come could begin with. MLX arrays are values, yet an update whose old value nobody else holds is done in
its place, so caches are evaluated at the end of each pass and nothing keeps views of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from openrl.backends.common.prefix_cache import BLOCK, Claim
from openrl.backends.common.slots import Rectangle, spans

_FIRST_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Key and value heads of a layer, and the sizes of a key and of a value."""

    heads: int
    key: int
    value: int


@dataclass(frozen=True, slots=True)
class KVShape:
    """What a model's cache needs to know."""

    layers: tuple[LayerShape, ...]
    dtype: mx.Dtype

    def empty(self, layer: int, rows: int, columns: int) -> tuple[mx.array, mx.array]:
        """Keys and values [rows, heads, columns, size] of one layer."""
        # Zeros, not garbage: a masked column still meets its attention weight, and 0 * NaN is NaN.
        s = self.layers[layer]
        sizes = (s.key, s.value)
        keys, values = (mx.zeros((rows, s.heads, columns, size), self.dtype) for size in sizes)
        return keys, values


class KVCache(Rectangle):
    """Keys and values [slots, heads, length, size] of every layer, growing and shrinking with use."""

    def __init__(self, shape: KVShape, max_slots: int, max_tokens: int) -> None:
        super().__init__(max_slots, max_tokens)
        self._shape = shape
        self.keys: list[mx.array] = []
        self.values: list[mx.array] = []

    def clear(self) -> None:
        """Give all memory back."""
        self.keys, self.values, self.slots, self.length = [], [], 0, 0

    def evaluate(self) -> None:
        """Compute what updates are pending."""
        mx.eval(self.keys, self.values)

    def _resize(self, slots: int, length: int, used_slots: int, used_length: int) -> None:
        """Layer by layer, so that old and new lie side by side for one layer only."""
        for layer in range(len(self._shape.layers)):
            keys, values = self._shape.empty(layer, slots, length)
            if self.slots:
                used_length = min(used_length, length)
                keys[:used_slots, :, :used_length] = self.keys[layer][:used_slots, :, :used_length]
                values[:used_slots, :, :used_length] = self.values[layer][:used_slots, :, :used_length]
            mx.eval(keys, values)
            if self.slots:
                self.keys[layer], self.values[layer] = keys, values
            else:
                self.keys.append(keys)
                self.values.append(values)
        self.slots, self.length = slots, length

    def copy(self, moves: Sequence[tuple[int, int]], length: int) -> None:
        """Copy the first `length` columns of slots to others, (from, to), as if all at once: a slot may be both."""
        if not moves:
            return
        src, dst = (mx.array(side) for side in zip(*moves, strict=True))
        for side in (self.keys, self.values):
            for layer in range(len(side)):
                side[layer][dst, :, :length] = side[layer][src, :, :length]
                mx.eval(side[layer])

    def spread(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copy the first `length` columns of one slot to others, given in ascending order."""
        for slots in spans(targets):
            for side in (self.keys, self.values):
                for layer in range(len(side)):
                    side[layer][slots, :, :length] = side[layer][source : source + 1, :, :length]
        self.evaluate()

    def wipe(self, slot: int) -> None:
        """Zero a slot that may hold non-finite values."""
        for side in (self.keys, self.values):
            for layer in range(len(side)):
                side[layer][slot] = mx.zeros_like(side[layer][slot])


class Blocks:
    """Keys and values [1 + count, heads, BLOCK, size] of every layer, made at first need.

    Block 0 is all zeros and stands where a row has no block.
    """

    def __init__(self, shape: KVShape) -> None:
        self._shape = shape
        self.count = 0
        self.keys: list[mx.array] = []
        self.values: list[mx.array] = []

    def reserve(self, count: int, most: int) -> None:
        """Make room for blocks 1..`count`; grows by doubling, up to `most`."""
        if count <= self.count:
            return
        larger = max(count, min(most, max(_FIRST_BLOCKS, 2 * self.count)))
        for layer in range(len(self._shape.layers)):
            keys, values = self._shape.empty(layer, 1 + larger, BLOCK)
            if self.count:
                keys[: 1 + self.count] = self.keys[layer]
                values[: 1 + self.count] = self.values[layer]
            mx.eval(keys, values)
            if self.count:
                self.keys[layer], self.values[layer] = keys, values
            else:
                self.keys.append(keys)
                self.values.append(values)
        self.count = larger

    def clear(self) -> None:
        """Give all memory back."""
        self.keys, self.values, self.count = [], [], 0

    def evaluate(self) -> None:
        """Compute what updates are pending."""
        mx.eval(self.keys, self.values)


class Filling:
    """Blocks to be copied from rows of keys and values [rows, heads, tokens, size], whole blocks of them.

    `claims` are (row, blocks of the sequence that stand before the row's first token, claim).
    """

    def __init__(self, blocks: Blocks, claims: Sequence[tuple[int, int, Claim]]) -> None:
        places = [(row, c.first - before + i, b) for row, before, c in claims for i, b in enumerate(c.blocks)]
        self._blocks = blocks
        self._places = [mx.array(side) for side in zip(*places, strict=True)] if places else None

    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        """Copy one layer's."""
        if self._places is None:
            return
        rows, places, ids = self._places
        whole = keys.shape[2] // BLOCK
        for side, source in ((self._blocks.keys, keys), (self._blocks.values, values)):
            grid = mx.unflatten(source[:, :, : whole * BLOCK], 2, (whole, BLOCK))
            side[layer][ids] = grid[rows, :, places]


def fill(blocks: Blocks, cache: KVCache, claims: Sequence[tuple[int, Claim]]) -> None:
    """Store what slots hold from column 0 on, as (slot, claim) says."""
    filling = Filling(blocks, [(slot, 0, claim) for slot, claim in claims])
    for layer, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
        filling.write(layer, keys, values)
    blocks.evaluate()


def joined(stored: mx.array, table: mx.array) -> mx.array:
    """Blocks `table` [rows, n] of one layer's `stored` as columns [rows, heads, n * BLOCK, size]."""
    return mx.flatten(stored[table].swapaxes(1, 2), 2, 3)


def restore(blocks: Blocks, cache: KVCache, slot: int, ids: Sequence[int]) -> None:
    """Copy stored blocks to the beginning of a slot."""
    table, columns = mx.array([ids]), len(ids) * BLOCK
    for stored, side in ((blocks.keys, cache.keys), (blocks.values, cache.values)):
        for layer in range(len(side)):
            side[layer][slot : slot + 1, :, :columns] = joined(stored[layer], table)
