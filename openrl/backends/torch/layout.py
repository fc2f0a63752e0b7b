"""The sequences of a micro-batch as attention takes them, laid out at first need: end to end, or in grids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from openrl.backends.torch.grids import Grid, arrange, rounded


@dataclass(frozen=True, slots=True)
class Packed:
    """Sequences end to end: they end before the tokens `ends[1:]`, int32 [sequences + 1] from 0 on; `positions`, int64
    [tokens], are the tokens' places in theirs."""

    ends: Tensor
    positions: Tensor
    longest: int


class Layout:
    """Of sequences of `lengths`, all tokens of which lie end to end."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self._lengths = lengths
        self._device = device

    @property
    def width(self) -> int:
        """Positions that any of the ways needs, padding included."""
        return rounded(max(self._lengths))

    @cached_property
    def grids(self) -> list[Grid]:
        """In rectangles of sequences of like length, longest first."""
        return arrange(self._lengths, self._device)

    @cached_property
    def packed(self) -> Packed:
        """As they are."""
        ends = np.cumsum([0, *self._lengths], dtype=np.int32)
        positions = np.concatenate([np.arange(length) for length in self._lengths])
        return Packed(
            torch.from_numpy(ends).to(self._device), torch.from_numpy(positions).to(self._device), max(self._lengths)
        )
