"""AdamW as training-semantics 3.1 has it: float32 state, every hyperparameter read anew on each step (O1-O8)."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np

from openrl.types import AdamParams

_CHUNK = 1 << 12


def adamw(
    theta: mx.array, grad: mx.array, m: mx.array, v: mx.array, t: int, adam: AdamParams
) -> tuple[mx.array, mx.array, mx.array, float]:
    """theta, m and v, all flat [P], after step number `t` (from 1), and the norm of `grad`, the undivided sum (G1).

    A norm that is not finite leaves all as it was (O8); the caller must look at it.
    """
    norm = global_norm(grad)
    if not math.isfinite(norm):
        return theta, m, v, norm
    return *update(theta, grad, m, v, t, adam, norm), norm


def update(
    theta: mx.array, grad: mx.array, m: mx.array, v: mx.array, t: int, adam: AdamParams, norm: float
) -> tuple[mx.array, mx.array, mx.array]:
    """The same for tensors of one shape that may be a part of all parameters, whose gradient has a finite `norm`."""
    if adam.grad_clip_norm > 0:
        grad = grad * min(1.0, adam.grad_clip_norm / (norm + 1e-6))
    # One at a time: a graph of all of it would hold three more of them.
    m = m * adam.beta1 + grad * (1 - adam.beta1)
    mx.eval(m)
    v = v * adam.beta2 + mx.square(grad) * (1 - adam.beta2)
    mx.eval(v)
    del grad
    theta = theta * (1 - adam.learning_rate * adam.weight_decay)
    deviation = mx.sqrt(v) * (1 - adam.beta2**t) ** -0.5 + adam.eps
    theta = theta - (adam.learning_rate / (1 - adam.beta1**t)) * (m / deviation)
    mx.eval(theta)
    return theta, m, v


def global_norm(grad: mx.array) -> float:
    """L2 norm of a gradient; infinite or NaN exactly if one of its entries is. Sums of chunks add in float64."""
    grad = grad.reshape(-1)
    padded = mx.pad(grad, (0, -grad.size % _CHUNK)).reshape(-1, _CHUNK)
    squares = np.array(mx.square(padded).sum(axis=1)).astype(np.float64).sum()
    if math.isfinite(squares):
        return math.sqrt(squares)
    # Squares may overflow float32 where the entries do not.
    largest = float(mx.abs(grad).max())
    if not math.isfinite(largest) or bool(mx.isnan(grad).any()):
        return math.nan if bool(mx.isnan(grad).any()) else math.inf
    return largest * global_norm(grad / largest)
