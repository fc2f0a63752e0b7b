"""The state of a run that trains all parameters, in MLX: float32 masters, gradient and moments (F3), by name.

Unlike an adapter's they are not one flat array: MLX's arrays are not changed in place, and a step that makes them anew
should hold no more than one of them twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import mlx.core as mx

from openrl.backends.common.work import stepped
from openrl.backends.mps.memory import is_out_of_memory
from openrl.backends.mps.optim import global_norm, update
from openrl.errors import BackendFault
from openrl.types import AdamParams, OptimOutput

Named = dict[str, mx.array]  # by parameter name


class FullState:
    """Training-semantics 2 and 3.4. `gradient`, `m` and `v` are None while they are zero; a name that a gradient lacks
    is zero, too. `changed` is told of each parameter that a step has changed."""

    def __init__(self, theta: Named, changed: Callable[[str], None]) -> None:
        self.theta = theta
        self.gradient: Named | None = None
        self.m: Named | None = None
        self.v: Named | None = None
        self.t = 0
        self._changed = changed

    @property
    def size(self) -> int:
        """The number of parameters."""
        return sum(tensor.size for tensor in self.theta.values())

    def joined(self, total: Named | None, gradients: Mapping[str, mx.array]) -> Named:
        """See `openrl.backends.common.work.Accumulator`."""
        total = {} if total is None else total
        for name, part in gradients.items():
            add(total, name, part)
        return total

    def give(self, gradient: Named) -> None:
        """G += a gradient, which is used up (G1)."""
        if self.gradient is None:
            self.gradient = gradient
            return
        for name in list(gradient):
            add(self.gradient, name, gradient.pop(name))

    def reset(self) -> None:
        """G, m, v and t become zero; theta stays."""
        self.gradient = self.m = self.v = None
        self.t = 0

    def step(self, adam: AdamParams) -> OptimOutput:
        """One AdamW step, after which G = 0; a G that is zero already counts as such (G9).

        A gradient that is not finite is dropped and nothing else changes (O8): `BadRequest`.
        """
        norm = self._decay_only(adam) if self.gradient is None and self.m is None else self._adamw(adam)
        output = stepped(norm, adam)
        self.t += 1
        return output

    def _adamw(self, adam: AdamParams) -> float:
        gradient = self.gradient or {}
        norm = math.hypot(*(global_norm(part) for part in gradient.values()))
        if not math.isfinite(norm):
            self.gradient = None
            return norm
        if self.m is None or self.v is None:
            self.m, self.v = self._zeros(), self._zeros()
        self.gradient = None
        for name in self.theta:
            part = gradient.pop(name, None)
            self._update(name, mx.zeros_like(self.theta[name]) if part is None else part, adam, norm)
        return norm

    def _update(self, name: str, part: mx.array, adam: AdamParams, norm: float) -> None:
        """One tensor's share of a step. Memory for it was counted; should there be none all the same, the run is lost,
        since some tensors have been changed already."""
        assert self.m is not None
        assert self.v is not None
        try:
            found = update(self.theta[name], part, self.m[name], self.v[name], self.t + 1, adam, norm)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise BackendFault(
                "the device ran out of memory in the middle of an optimizer step; the run was taken off it.",
                "Go on from its last checkpoint.",
            ) from error
        self.theta[name], self.m[name], self.v[name] = found
        self._changed(name)

    def _decay_only(self, adam: AdamParams) -> float:
        """A step before any gradient: all moments are and stay zero."""
        for name in self.theta if adam.weight_decay else ():
            self.theta[name] = self.theta[name] * (1 - adam.learning_rate * adam.weight_decay)
            mx.eval(self.theta[name])
            self._changed(name)
        return 0.0

    def _zeros(self) -> Named:
        zeros = {name: mx.zeros_like(tensor) for name, tensor in self.theta.items()}
        mx.eval(zeros)
        return zeros


def add(total: Named, name: str, part: mx.array) -> None:
    """Add to one name of a float32 gradient, at once, so that what was added can be let go of."""
    part = part.astype(mx.float32)
    total[name] = total[name] + part if name in total else part
    mx.eval(total[name])
