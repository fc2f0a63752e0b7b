"""The random numbers of samples, and what one row of a batch draws with; the same for every engine (S11, S12).

Random numbers are counter-based: the number for a token is a hash of its sequence's seed and its position, so no
sequence can disturb another's, a sequence that is computed anew draws the same tokens again, and engines that agree on
the distribution agree on the token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: UInt64Array, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position), from 53 bits of a splitmix64 hash of both. The two broadcast."""
    counters = _mix(seeds + _GOLDEN) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    return (_mix(counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: UInt64Array) -> UInt64Array:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class RowKnobs:
    """How one row draws: `seed` in 0..2^64-1, the rest as in `SamplingParams`; `top` most likely tokens to report."""

    seed: int
    temperature: float
    top_k: int
    top_p: float
    top: int

    def cuts(self, vocab: int) -> bool:
        """Whether top-k or top-p takes anything away."""
        return bool(self.temperature) and (self.top_p < 1 or 0 < self.top_k < vocab)
