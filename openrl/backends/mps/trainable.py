"""What a training run keeps on the device: its adapter, the gradient accumulator and Adam's moments.

Each is one flat float32 array, with the adapter's tensors as views into it, so that a step is a handful of operations
whatever the number of layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import mlx.core as mx
import numpy as np

from openrl.backends.common.work import stepped
from openrl.backends.mps.lora import Adapter
from openrl.backends.mps.optim import adamw
from openrl.types import AdamParams, Array, OptimOutput


class Trainable:
    """One run's state (training-semantics 2 and 3.4). `gradient`, `m` and `v` are None while they are zero."""

    def __init__(self, adapter: Adapter) -> None:
        named = dict(adapter.parameters())
        self.shapes: dict[str, tuple[int, ...]] = {name: tensor.shape for name, tensor in named.items()}
        self.theta = self.flat(named)
        self.adapter = Adapter(adapter.spec, dict(adapter.a), dict(adapter.b))
        self._renew()
        self.gradient: mx.array | None = None
        self.m: mx.array | None = None
        self.v: mx.array | None = None
        self.t = 0

    def flat(self, named: Mapping[str, mx.array]) -> mx.array:
        """One array of tensors by parameter name; those not named are zero."""
        parts = [
            named[name].reshape(-1) if name in named else mx.zeros(math.prod(shape))
            for name, shape in self.shapes.items()
        ]
        whole = mx.concatenate(parts)
        mx.eval(whole)
        return whole

    def views(self, flat: mx.array) -> dict[str, mx.array]:
        """The parts of a flat array by parameter name, `<layer>.lora_A` and `<layer>.lora_B`."""
        ends = np.cumsum([math.prod(shape) for shape in self.shapes.values()])
        parts = mx.split(flat, [int(end) for end in ends[:-1]])
        return {name: part.reshape(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def arrays(self, flat: mx.array | None) -> dict[str, Array]:
        """Host copies of the same, C-contiguous; None is zeros."""
        if flat is None:
            return {name: np.zeros(shape, np.float32) for name, shape in self.shapes.items()}
        return {name: np.array(part) for name, part in self.views(flat).items()}

    def joined(self, total: mx.array | None, gradients: Mapping[str, mx.array]) -> mx.array:
        """See `openrl.backends.common.work.Accumulator`."""
        part = self.flat(gradients)
        if total is None:
            return part
        total = total + part
        mx.eval(total)
        return total

    def give(self, gradient: mx.array) -> None:
        """G += a flat gradient (G1)."""
        self.gradient = gradient if self.gradient is None else self.gradient + gradient
        mx.eval(self.gradient)

    def step(self, adam: AdamParams) -> OptimOutput:
        """One AdamW step, after which G = 0; a G that is zero already counts as such (G9).

        A gradient that is not finite is dropped and nothing else changes (O8): `BadRequest`.
        """
        norm = self._decay_only(adam) if self.gradient is None and self.m is None else self._adamw(adam)
        output = stepped(norm, adam)
        self.t += 1
        return output

    def restore(self, m: Mapping[str, Array], v: Mapping[str, Array], t: int) -> None:
        """Take Adam's state from tensors by parameter name, of the parameters' shapes."""
        self.m, self.v = (self.flat({name: mx.array(x) for name, x in part.items()}) for part in (m, v))
        self.t = t

    def _adamw(self, adam: AdamParams) -> float:
        zeros = mx.zeros_like(self.theta)
        gradient, m, v = (zeros if part is None else part for part in (self.gradient, self.m, self.v))
        self.gradient = None
        theta, m, v, norm = adamw(self.theta, gradient, m, v, self.t + 1, adam)
        if math.isfinite(norm):
            self.theta, self.m, self.v = theta, m, v
            self._renew()
        return norm

    def _decay_only(self, adam: AdamParams) -> float:
        """A step before any gradient: all moments are and stay zero."""
        if adam.weight_decay:
            self.theta = self.theta * (1 - adam.learning_rate * adam.weight_decay)
            self._renew()
        return 0.0

    def _renew(self) -> None:
        """Make the adapter's tensors parts of `theta`."""
        views = self.views(self.theta)
        mx.eval(views)
        for name in self.adapter.a:
            self.adapter.a[name], self.adapter.b[name] = views[f"{name}.lora_A"], views[f"{name}.lora_B"]
