"""What a request may ask of its prompt beside the logprobs of its own tokens: those of tokens it names, and draws.

Both are read off the same logits that score the prompt, part by part, by whichever engine has them. The state at row r
is that of prompt token r, so it tells of token r + 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from openrl.backends.common.uniforms import uniforms
from openrl.types import AltTokens, Cells, FloatArray

_UINT64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Asked:
    """Cells of a window of rows: their `places` among all that a request names, and row and token id of each."""

    places: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]


class Targets:
    """Logprobs of the ids that a request names; `cells` fills up and has the layout of the request's."""

    def __init__(self, wanted: Cells) -> None:
        self._rows = wanted.rows()
        self._ids = wanted.values
        self.cells = replace(wanted, values=np.zeros(len(wanted.values), np.float32))

    def asked(self, start: int, stop: int) -> Asked:
        """What is named in rows `start`..`stop`, rows counted from `start`; cells of -1 are left out and stay 0."""
        low, high = np.searchsorted(self._rows, [start, stop])
        places = low + np.flatnonzero(self._ids[low:high] >= 0)
        return Asked(places, self._rows[places] - start, self._ids[places].astype(np.int64))

    def put(self, asked: Asked, logprobs: FloatArray) -> None:
        """The logprobs of `asked`, float32 [cells]."""
        self.cells.values[asked.places] = logprobs


class Alternatives:
    """`k` draws at every prompt token but the first, at `temperature`; `drawn` fills up."""

    def __init__(self, tokens: int, k: int, temperature: float, seed: int) -> None:
        self.temperature = temperature
        self._seeds = np.array([(seed + i) & _UINT64 for i in range(k)], np.uint64)
        self.drawn = AltTokens(np.zeros((tokens - 1, k), np.int64), np.zeros((tokens - 1, k), np.float32))

    def uniforms(self, start: int, stop: int) -> npt.NDArray[np.float64]:
        """The random numbers [rows, k] of the draws at rows `start`..`stop`."""
        # By the position that is drawn, as samples are: those go on where the prompt ends, so no number comes twice.
        return uniforms(self._seeds[None], np.arange(start + 1, stop + 1)[:, None])

    def put(self, start: int, ids: npt.NDArray[np.int64], logprobs: FloatArray) -> None:
        """What was drawn at the rows from `start` on, [rows, k], and its logprobs at temperature 1."""
        self.drawn.ids[start : start + len(ids)] = ids
        self.drawn.logprobs[start : start + len(ids)] = logprobs
