"""The inverse CDF by which samples are drawn, on the host, from a softmax whose blocks the device has summed (S11).

Float64 sums over blocks first, then inside the block that was hit: the answer of one long cumulative sum in id order,
with far less of it, and of the [rows, vocabulary] weights only one block a row is read.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray64 = npt.NDArray[np.float64]
Index = npt.NDArray[np.int64]


def invert(weights: npt.NDArray[np.float32], mass: FloatArray64, u: FloatArray64) -> Index:
    """The first token of each row whose cumulative weight exceeds u times the total, int64 [R].

    `weights` [R, blocks, size] in id order, `mass` [R, blocks] their sums by block, `u` [R] in [0, 1).
    """
    block, rest = _find(mass, u * mass.sum(-1))
    inside = weights[np.arange(len(weights)), block].astype(np.float64)
    offset, _ = _find(inside, rest)
    return block * weights.shape[-1] + offset


def _find(mass: FloatArray64, target: FloatArray64) -> tuple[Index, FloatArray64]:
    """Index of the first entry of each row whose cumulative mass exceeds `target`, and the rest of the target there.

    Rounding can put the target at the very end; the last entry with any mass is taken then, never one without.
    """
    cumulative = mass.cumsum(-1)
    last = np.where(mass > 0, np.arange(mass.shape[-1]), 0).max(-1)
    index = np.minimum((cumulative <= target[:, None]).sum(-1), last)
    rows = np.arange(len(mass))
    return index, target - (cumulative[rows, index] - mass[rows, index])
