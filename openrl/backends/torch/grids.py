"""How the tokens of a micro-batch lie: end to end without padding, and in grids of like length for attention.

All but attention looks at each token alone, so the sequences of a micro-batch are laid end to end, [tokens, ...].
Attention takes them in grids [sequences, length] whose lengths are round: a CPU's products have kernels made for their
sizes, about a millisecond each, so few sizes must serve all sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Grid:
    """Sequences in a rectangle. They are rows `span` of the tokens, without padding, or else scattered.

    Scattered: tokens `rows` [n] lie in the places `cells` [n] of the flattened rectangle.
    """

    sequences: int
    length: int
    span: slice | None
    rows: Tensor
    cells: Tensor

    def gather(self, flat: Tensor) -> Tensor:
        """[tokens, C] to [sequences * length, C]; padding becomes zero."""
        if self.span is not None:
            return flat[self.span]
        grid = flat.new_zeros(self.sequences * self.length, flat.shape[1])
        return grid.index_copy_(0, self.cells, flat.index_select(0, self.rows))

    def scatter(self, grid: Tensor, flat: Tensor) -> None:
        """Write [sequences * length, C] into its tokens of [tokens, C]."""
        if self.span is not None:
            flat[self.span] = grid
        else:
            flat.index_copy_(0, self.rows, grid.index_select(0, self.cells))


def arrange(lengths: Sequence[int], device: torch.device) -> list[Grid]:
    """Grids for sequences that lie end to end, longest first."""
    starts = [0, *np.cumsum(lengths).tolist()]
    members: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        members.setdefault(rounded(length), []).append(index)
    return [_grid(width, members[width], lengths, starts, device) for width in sorted(members, reverse=True)]


def rounded(length: int) -> int:
    """The length of the grid that a sequence of `length` tokens goes to."""
    step = 16 if length <= 64 else 32 if length <= 256 else 64
    return -(-length // step) * step


def _grid(
    width: int, members: Sequence[int], lengths: Sequence[int], starts: Sequence[int], device: torch.device
) -> Grid:
    rows = np.concatenate([np.arange(starts[i], starts[i] + lengths[i]) for i in members])
    cells = np.concatenate([np.arange(k * width, k * width + lengths[i]) for k, i in enumerate(members)])
    first, last = int(rows[0]), int(rows[-1])
    full = len(rows) == width * len(members) and last - first + 1 == len(rows)
    span = slice(first, last + 1) if full else None
    return Grid(len(members), width, span, torch.from_numpy(rows).to(device), torch.from_numpy(cells).to(device))
