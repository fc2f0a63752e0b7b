"""What a request may ask of its prompt beside the logprobs of its own tokens: those of tokens it names, and draws.

Both are read off the same logits that score the prompt, part by part. The state at row r is that of prompt token r, so
it tells of token r + 1.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from openrl.backends.torch.draw import draw_repeatedly, uniforms
from openrl.types import AltTokens, Cells

_UINT64 = (1 << 64) - 1


class Targets:
    """Logprobs of the ids that a request names; `cells` fills up and has the layout of the request's."""

    def __init__(self, wanted: Cells) -> None:
        self._rows = wanted.rows()
        self._ids = wanted.values
        self.cells = replace(wanted, values=np.zeros(len(wanted.values), np.float32))

    def fill(self, start: int, logits: Tensor, total: Tensor) -> None:
        """Take logits [M, V] of the rows from `start` on and their log-sums [M, 1]; cells of -1 stay 0."""
        low, high = np.searchsorted(self._rows, [start, start + len(logits)])
        places = low + np.flatnonzero(self._ids[low:high] >= 0)
        if not places.size:
            return
        rows = torch.from_numpy(self._rows[places] - start).to(logits.device)
        ids = torch.from_numpy(self._ids[places]).to(logits.device)
        self.cells.values[places] = (logits[rows, ids] - total[rows, 0]).cpu().numpy()


class Alternatives:
    """`k` draws at every prompt token but the first; `drawn` fills up."""

    def __init__(self, tokens: int, k: int, temperature: float, seed: int) -> None:
        self._temperature = temperature
        self._seeds = np.array([(seed + i) & _UINT64 for i in range(k)], np.uint64)
        self.drawn = AltTokens(np.zeros((tokens - 1, k), np.int64), np.zeros((tokens - 1, k), np.float32))

    def fill(self, start: int, logits: Tensor, total: Tensor) -> None:
        """Take logits [M, V] of the rows from `start` on and their log-sums [M, 1]."""
        stop = start + len(logits)
        # By the position that is drawn, as samples are: those go on where the prompt ends, so no number comes twice.
        u = uniforms(self._seeds[None], np.arange(start + 1, stop + 1)[:, None])
        ids = draw_repeatedly(logits, self._temperature, torch.from_numpy(u).to(logits.device))
        self.drawn.ids[start:stop] = ids.cpu().numpy()
        self.drawn.logprobs[start:stop] = (logits.gather(-1, ids) - total).cpu().numpy()
