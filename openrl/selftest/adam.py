"""AdamW in float64, to hold a backend's steps against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from openrl.types import AdamParams, Array


@dataclass
class Adam:
    """Parameters and moments by name, stepped by the book (training-semantics 3.1) from a run's own gradients."""

    theta: dict[str, Array]
    m: dict[str, Array] = field(default_factory=dict[str, Array])
    v: dict[str, Array] = field(default_factory=dict[str, Array])
    t: int = 0

    def step(self, gradient: Mapping[str, Array], adam: AdamParams) -> float:
        """Returns the gradient's norm before it is clipped."""
        self.t += 1
        wide = {name: gradient[name].astype(np.float64) for name in self.theta}
        norm = float(np.sqrt(sum(np.square(g).sum() for g in wide.values())))
        clip = min(1.0, adam.grad_clip_norm / (norm + 1e-6)) if adam.grad_clip_norm > 0 else 1.0
        for name, g in wide.items():
            self._move(name, g * clip, adam)
        return norm

    def distance(self, found: Mapping[str, Array]) -> float:
        """The largest difference of a parameter."""
        return max(float(np.abs(found[name] - wanted).max()) for name, wanted in self.theta.items())

    def _move(self, name: str, g: Array, adam: AdamParams) -> None:
        m = self.m[name] = adam.beta1 * self.m.get(name, np.zeros(())) + (1 - adam.beta1) * g
        v = self.v[name] = adam.beta2 * self.v.get(name, np.zeros(())) + (1 - adam.beta2) * g * g
        root = np.sqrt(v / (1 - adam.beta2**self.t)) + adam.eps
        kept = self.theta[name] * (1 - adam.learning_rate * adam.weight_decay)
        self.theta[name] = kept - adam.learning_rate * (m / (1 - adam.beta1**self.t)) / root
