"""Rotary embeddings in training, there and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from openrl.backends.torch.scratch import Scratch


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embeddings: float32 [positions, 1, head_dim] to multiply by, and for the halves that change places, on the
    way there and back. Of tokens end to end (`at`) it is [tokens, 1, head_dim]."""

    cos: Tensor
    sin: Tensor
    sin_back: Tensor
    swap: Tensor

    @classmethod
    def of(cls, cos: Tensor, sin: Tensor, length: int) -> Rope:
        """From transformers' tables [positions, head_dim]; the positions up to `length` that they lack are padding."""
        cos, sin = (functional.pad(table.float(), (0, 0, 0, length - len(table)))[:, None] for table in (cos, sin))
        low, high = sin.chunk(2, dim=-1)
        there, back = torch.cat([-low, high], dim=-1), torch.cat([high, -low], dim=-1)
        return cls(cos, there, back, torch.tensor([1, 0], device=cos.device))

    def at(self, positions: Tensor) -> Rope:
        """Of tokens at these positions, int64 [tokens]."""
        return Rope(self.cos[positions], self.sin[positions], self.sin_back[positions], self.swap)

    def turn(self, x: Tensor, positions: slice, scratch: Scratch, *, back: bool = False) -> Tensor:
        """x [..., positions, heads, head_dim], contiguous float32, rotated in place; or the gradient of that."""
        swapped = scratch.take("rope", tuple(x.shape), torch.float32)
        halves = (-1, 2, x.shape[-1] // 2)
        torch.index_select(x.view(halves), 1, self.swap, out=swapped.view(halves))
        sin = self.sin_back if back else self.sin
        return x.mul_(self.cos[positions]).addcmul_(swapped, sin[positions])
