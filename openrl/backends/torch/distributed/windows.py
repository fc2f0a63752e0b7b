"""Decoder layers whose weights are spread over the ranks, and come together just before a layer is computed.

Two windows, memory taken once for all, hold one layer each: even ones use the first, odd ones the second. While a layer
is computed in one, the next is gathered in the other. So nothing can run out of memory between ranks that wait for
each other, and a weight is a view that never moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from openrl.backends.torch.distributed.group import Group, GroupBroken, Pending

_ALIGNED = 64  # values: matrices begin at addresses that kernels like


class Windows:
    """This rank's parts of all layers, and the two layers that are whole at the moment.

    `load` and the calls that lead to it are collective: every rank must make the same ones, in the same order.
    """

    def __init__(self, group: Group, dtype: torch.dtype) -> None:
        self._group = group
        self._dtype = dtype
        self._shards: list[DTensor] = []
        self._buffers: list[Tensor] = []
        self._holds: list[int | None] = [None, None]
        self._pending: list[Pending | None] = [None, None]
        self._plan: list[int] = []  # layers that the micro-batch under way has yet to visit

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self._group.rank == 0

    @property
    def layers(self) -> int:
        return len(self._shards)

    @property
    def held_bytes(self) -> int:
        """Of layer weights, this rank's parts."""
        return sum(shard.to_local().nbytes for shard in self._shards)

    @property
    def window_bytes(self) -> int:
        """Of layer weights, those that are whole for the moment."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def reserve(self, layers: Sequence[Sequence[Sequence[Tensor]]]) -> None:
        """Take the windows' memory, for the largest of these layers, each as `adopt` will be given it."""
        size = max(self._layout(stacks)[2] for stacks in layers)
        self._buffers = [torch.zeros(size, dtype=self._dtype, device=self._group.device) for _ in range(2)]

    def adopt(self, stacks: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Take the next layer: on rank 0 its matrices, elsewhere any of their shapes, in stacks of one width. Returns
        a view [sum of rows, width] for each stack, which holds it after `load`."""
        shapes, starts, size = self._layout(stacks)
        flat = torch.zeros(size, dtype=self._dtype, device=self._group.device)
        if self.leads:
            for view, stack in zip(_views(flat, starts, shapes), stacks, strict=True):
                view.copy_(torch.cat([matrix.detach().to(flat.device) for matrix in stack]))
        buffer = self._buffers[len(self._shards) % 2]
        self._shards.append(self._group.shard(flat))
        return _views(buffer, starts, shapes)

    def _layout(self, stacks: Sequence[Sequence[Tensor]]) -> tuple[list[tuple[int, int]], list[int], int]:
        """Shapes and starts of the stacks in a flat tensor, and its length."""
        shapes = [(sum(len(matrix) for matrix in stack), stack[0].shape[1]) for stack in stacks]
        starts, size = list[int](), 0
        for shape in shapes:
            starts.append(size)
            size = _up(size + math.prod(shape), _ALIGNED)
        return shapes, starts, _up(size, self._group.size)

    # ---- one layer ----

    def load(self, layer: int, following: int | None = None) -> None:
        """Have a layer whole, until the next but one is; begin to gather the one that follows."""
        try:
            self._start(layer)
            self._await(layer % 2)
            if following is not None:
                self._start(following)
        except GroupBroken:
            self._plan.clear()  # nobody is left to visit layers with
            raise

    def _start(self, layer: int) -> None:
        slot = layer % 2
        if self._holds[slot] == layer:
            return
        self._await(slot)
        shard = self._shards[layer]
        self._holds[slot] = layer
        self._pending[slot] = self._group.gather(self._buffers[slot][: shard.shape[0]], shard)

    def _await(self, slot: int) -> None:
        pending, self._pending[slot] = self._pending[slot], None
        if pending is not None:
            pending.wait()

    # ---- a micro-batch ----

    def begin(self, *, backward: bool) -> None:
        """From now on layers are visited from the first to the last and, if `backward`, back to the first."""
        there = list(range(self.layers))
        self._plan = [*there, *reversed(there)] if backward else there

    def visit(self, layer: int) -> None:
        """Have a layer whole. Layers that were to come before it are loaded, too, since other ranks do."""
        if self._holds[layer % 2] == layer and layer not in self._plan[:1]:
            self._await(layer % 2)
            return
        while self._plan:
            following = self._plan.pop(0)
            self.load(following, self._plan[0] if self._plan else None)
            if following == layer:
                return
        raise ValueError(f"layer {layer} is not to be visited any more")

    def finish(self) -> None:
        """Visit what is left: other ranks may have more to do than this one, or have not failed."""
        while self._plan:
            following = self._plan.pop(0)
            self.load(following, self._plan[0] if self._plan else None)


@dataclass(frozen=True, slots=True)
class Spread:
    """A weight that is a view of a window (see `weights.Weight`)."""

    view: Tensor
    visit: Callable[[], None]

    @property
    def shape(self) -> tuple[int, int]:
        """See `Weight`."""
        return self.view.shape[0], self.view.shape[1]

    @property
    def device(self) -> torch.device:
        """See `Weight`."""
        return self.view.device

    def dense(self) -> Tensor:
        """See `Weight`."""
        self.visit()
        return self.view


def _views(flat: Tensor, starts: Sequence[int], shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    placed = zip(starts, shapes, strict=True)
    return [flat[start : start + math.prod(shape)].view(shape) for start, shape in placed]


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
