"""Memory that comes again: temporaries of one layer are those of the next, so they are taken once a pass.

Fresh memory of a few megabytes costs a page fault for each 4 KiB, as much time as the elementwise operation that fills
it. What is taken here is good until the same name is asked for again, and never part of what the way back needs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Scratch:
    """Named buffers on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._held: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor with arbitrary content, which shares memory with earlier ones of that name and dtype."""
        size = math.prod(shape)
        held = self._held.get((name, dtype))
        if held is None or held.numel() < size:
            self._held.pop((name, dtype), None)  # the old memory is free before the new is asked for
            held = self._held[name, dtype] = torch.empty(size, dtype=dtype, device=self.device)
        return held[:size].view(shape)

    def clear(self) -> None:
        """Give all memory back."""
        self._held.clear()
