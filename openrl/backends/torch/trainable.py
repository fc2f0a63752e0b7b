"""What a training run keeps on the device: its weights, the gradient accumulator and Adam's moments.

Each is one flat float32 buffer, with the named tensors as views into it, so that a step is a handful of operations
whatever the number of layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from openrl.backends.common.work import stepped
from openrl.backends.torch.lora import Adapter
from openrl.backends.torch.optim import adamw_
from openrl.types import AdamParams, OptimOutput


class State:
    """One run's state (training-semantics 2 and 3.4). `gradient`, `m` and `v` are None while they are zero.

    `theta` float32 [P] holds the tensors of `shapes` end to end.
    """

    def __init__(self, theta: Tensor, shapes: Mapping[str, torch.Size]) -> None:
        self._shapes = dict(shapes)
        self.theta = theta
        self.gradient: Tensor | None = None
        self.m: Tensor | None = None
        self.v: Tensor | None = None
        self.t = 0
        self._spare: Tensor | None = None  # the accumulator's memory between steps

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The parts of a flat buffer by parameter name."""
        parts = flat.split([shape.numel() for shape in self._shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}

    def accumulate(self, gradients: Mapping[str, Tensor]) -> None:
        """G += gradients, by parameter name; those not named are zero (G1)."""
        if not gradients:
            return
        if self.gradient is None:
            self.gradient = self._zeros()
        views = self.views(self.gradient)
        for name, part in gradients.items():
            views[name].add_(part)

    def joined(self, total: Tensor | None, gradients: Mapping[str, Tensor]) -> Tensor:
        """A flat gradient, `total` changed in place or a new one, to which gradients by parameter name were added."""
        total = self.fresh() if total is None else total
        views = self.views(total)
        for name, part in gradients.items():
            views[name].add_(part)
        return total

    def fresh(self) -> Tensor:
        """A flat gradient of zeros, for `views` and later `give`."""
        return self._zeros()

    def give(self, gradient: Tensor) -> None:
        """G += a flat gradient, whose memory becomes this object's own."""
        if self.gradient is None:
            self.gradient = gradient
        else:
            self.gradient.add_(gradient)
            self._spare = gradient

    def take_back(self, gradient: Tensor) -> None:
        """A flat gradient that is not wanted after all: its memory serves the next one."""
        self._spare = gradient

    def step(self, adam: AdamParams) -> OptimOutput:
        """One AdamW step, after which G = 0; a G that is zero already counts as such (G9).

        A gradient that is not finite is dropped and nothing else changes (O8): `BadRequest`.
        """
        norm = self._decay_only(adam) if self.gradient is None and self.m is None else self._adamw(adam)
        output = stepped(norm, adam)
        self.t += 1
        return output

    def reset(self) -> None:
        """G, m, v and t become zero; theta stays."""
        self.gradient = self.m = self.v = None
        self.t = 0

    def restore(self, m: Mapping[str, Tensor], v: Mapping[str, Tensor], t: int) -> None:
        """Take Adam's state from tensors by parameter name, of the parameters' shapes."""
        self.m, self.v, self.t = torch.zeros_like(self.theta), torch.zeros_like(self.theta), t
        for flat, source in ((self.m, m), (self.v, v)):
            for name, view in self.views(flat).items():
                view.copy_(source[name])

    def _adamw(self, adam: AdamParams) -> float:
        gradient = self.gradient if self.gradient is not None else self._zeros()
        m = self.m if self.m is not None else torch.zeros_like(self.theta)
        v = self.v if self.v is not None else torch.zeros_like(self.theta)
        norm = adamw_(self.theta, gradient, m, v, self.t + 1, adam)
        self._spare, self.gradient = gradient, None
        if math.isfinite(norm):
            self.m, self.v = m, v
        return norm

    def _decay_only(self, adam: AdamParams) -> float:
        """A step before any gradient: all moments are and stay zero."""
        if adam.weight_decay:
            self.theta.mul_(1 - adam.learning_rate * adam.weight_decay)
        return 0.0

    def _zeros(self) -> Tensor:
        spare, self._spare = self._spare, None
        return spare.zero_() if spare is not None else torch.zeros_like(self.theta)


class Trainable(State):
    """The state of a run whose parameters are an adapter's, `<layer>.lora_A` and `<layer>.lora_B`."""

    def __init__(self, adapter: Adapter) -> None:
        named = dict(adapter.parameters())
        theta = torch.cat([tensor.detach().reshape(-1) for tensor in named.values()])
        super().__init__(theta, {name: tensor.shape for name, tensor in named.items()})
        leaves = {name: view.requires_grad_() for name, view in self.views(self.theta).items()}
        self.adapter = Adapter(
            adapter.spec,
            {name: leaves[f"{name}.lora_A"] for name in adapter.a},
            {name: leaves[f"{name}.lora_B"] for name in adapter.b},
        )
