"""RMS norms with a way back of their own: few passes over memory, and one rounding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openrl.backends.torch.scratch import Scratch

_CELLS = 1 << 18


@dataclass(frozen=True, slots=True)
class Norm:
    """y = x / rms(x) * gain over the last dimension, computed in float32 and rounded once; `gain` [H] is float32."""

    gain: Tensor
    eps: float

    @classmethod
    def of(cls, module: Any) -> Norm:
        """From a family's own module; Gemma's gain is 1 + weight."""
        weight: Tensor = module.weight.detach().float()
        if "Gemma" in type(module).__name__:
            return cls(weight + 1, module.eps)
        return cls(weight, module.variance_epsilon)

    def scale(self, x: Tensor) -> Tensor:
        """1 / rms(x), float32 [..., 1]: all that the way back needs besides x."""
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return norm.square_().div_(x.shape[-1]).add_(self.eps).rsqrt_()

    def apply(self, x: Tensor, scale: Tensor, out: Tensor, scratch: Scratch) -> Tensor:
        """y into `out`, which has x's shape."""
        for part in _parts(x):
            out[part] = _floats("norm", x[part], scratch).mul_(scale[part]).mul_(self.gain)
        return out

    def back(
        self, dy: Tensor, x: Tensor, scale: Tensor, out: Tensor, scratch: Scratch, plus: Tensor | None = None
    ) -> Tensor:
        """dL/dx, `plus` another gradient, into `out`, which may be dy or `plus`."""
        for part in _parts(x):
            inner = _floats("norm", dy[part], scratch).mul_(self.gain)
            unit = _floats("norm unit", x[part], scratch).mul_(scale[part])
            along = torch.linalg.vecdot(inner, unit).unsqueeze(-1).div_(-x.shape[-1])
            inner.addcmul_(unit, along).mul_(scale[part])
            if plus is not None:
                inner.add_(unit.copy_(plus[part]))
            out[part] = inner
        return out


def _floats(name: str, x: Tensor, scratch: Scratch) -> Tensor:
    """A float32 copy of x: an operation on two dtypes would make one too, in memory of its own."""
    return scratch.take(name, tuple(x.shape), torch.float32).copy_(x)


def _parts(x: Tensor) -> Iterator[slice]:
    """Parts of the first dimension whose float32 values stay in a CPU's cache from one pass to the next."""
    step = max(1, _CELLS // max(1, x[0].numel()))
    return (slice(start, start + step) for start in range(0, len(x), step))
