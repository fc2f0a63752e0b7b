"""Integers that are the same on every machine and with every version of numpy, which promises that of its own not."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import numpy.typing as npt

from openrl.types import FloatArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def integers(name: str, shape: tuple[int, ...], low: int, high: int) -> npt.NDArray[np.int64]:
    """Numbers from `low` to `high`, both included, spread evenly; `name` says which."""
    drawn = (_bits(name, math.prod(shape)) >> np.uint64(11)) % np.uint64(high - low + 1)
    return (drawn.astype(np.int64) + low).reshape(shape)


def fractions(name: str, shape: tuple[int, ...], most: int, of: int) -> FloatArray:
    """Multiples of 1/`of` within ±`most`/`of`. With `most` up to 256 and `of` a power of two, bf16 has them."""
    return (integers(name, shape, -most, most) / of).astype(np.float32)


def signs(name: str, count: int) -> npt.NDArray[np.float64]:
    """Plus and minus ones [count]."""
    return (integers(name, (count,), 0, 1) * 2 - 1).astype(np.float64)


def _bits(name: str, count: int) -> npt.NDArray[np.uint64]:
    """The splitmix64 sequence whose state begins as a hash of `name`."""
    state = np.frombuffer(hashlib.sha256(name.encode()).digest()[:8], "<u8")
    x = state + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
