"""The output head in training: logprobs, losses and the way back, a chunk of logits at a time.

Full logits [positions, V] are the largest tensor of a pass and are never held whole. Whole datums are put through
the head together as long as their logits fit a buffer; since a datum's loss needs nothing but its own logprobs, the
gradient is taken while the chunk's probabilities are still there, and nothing is computed twice. Only a datum longer
than the buffer has its logits computed again on the way back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from openrl.backends.torch.lora import Adapter, Segment, add_lora
from openrl.backends.torch.model import CausalLM
from openrl.checkpoints.peft import HEAD_NAME
from openrl.types import Array, FloatArray

_BUFFER_ELEMENTS = 2**25  # 128 MiB of float32 logits


@dataclass(frozen=True, slots=True)
class Span:
    """One datum's part of the flattened positions: `length` rows with targets int64 [N, K]."""

    adapter: Adapter
    targets: Array

    @property
    def length(self) -> int:
        return self.targets.shape[0]


class Judge(Protocol):
    """Takes the logprobs [N, K] of datum `index` and returns dL/dlp float32 [N, K], or None where there is none."""

    def __call__(self, index: int, logprobs: FloatArray) -> FloatArray | None: ...


@dataclass(slots=True)
class HeadGradient:
    """What comes back: `hidden` [M, H] in the compute dtype; by adapter `id`, float32 sums for the head's A and B."""

    hidden: Tensor
    factors: dict[int, tuple[Tensor, Tensor]]
    touched: bool = False  # False: every gradient is exactly zero


class Head:
    """Scores positions and differentiates what the judge says of them; keeps its buffer between calls."""

    def __init__(self, model: CausalLM, buffer_elements: int = _BUFFER_ELEMENTS) -> None:
        self._model = model
        self._rows = max(1, buffer_elements // model.vocab_size)
        self._buffer: Tensor | None = None

    def run(self, x: Tensor, spans: Sequence[Span], judge: Judge, *, backward: bool) -> HeadGradient:
        """Score the hidden states x [M, H] (detached) of `spans` laid end to end; differentiate if `backward`."""
        gradient = HeadGradient(torch.zeros_like(x) if backward else x.new_empty(0), {})
        for first, last, start in self._groups(spans):
            group = spans[first:last]
            pieces = self._pieces(start, group)
            targets = _pad_targets(group, x.device)
            scored = [self._score(x[lo:hi], targets[lo - start : hi - start], s) for lo, hi, s in pieces]
            lp = torch.cat([logprobs for _, logprobs in scored]).cpu().numpy()
            g = _judge_group(group, first, lp, judge)
            if not backward or not g.any():
                continue
            gradient.touched = True
            grads = torch.from_numpy(g).to(x.device)
            for lo, hi, segments in pieces:
                rows, part = x[lo:hi], slice(lo - start, hi - start)
                # The buffer still holds the last piece scored; earlier pieces of a long datum are scored again.
                p = scored[0][0] if len(pieces) == 1 else self._score(rows, targets[part], segments)[0]
                gradient.hidden[lo:hi] = self._push(rows, p, targets[part], grads[part], segments, gradient.factors)
        return gradient

    def _groups(self, spans: Sequence[Span]) -> Iterator[tuple[int, int, int]]:
        """(first, last, start row) of runs of spans whose rows fit the buffer together, or of one that does not."""
        first = start = rows = 0
        for index, span in enumerate(spans):
            if rows and rows + span.length > self._rows:
                yield first, index, start
                first, start, rows = index, start + rows, 0
            rows += span.length
        if rows:
            yield first, len(spans), start

    def _pieces(self, start: int, group: Sequence[Span]) -> list[tuple[int, int, tuple[Segment, ...]]]:
        """(first row, last row, segments) of the parts of a group that fit the buffer."""
        total = sum(span.length for span in group)
        if total <= self._rows:
            return [(start, start + total, _segments(group))]
        adapter = group[0].adapter
        bounds = [(lo, min(lo + self._rows, total)) for lo in range(0, total, self._rows)]
        return [(start + lo, start + hi, (Segment(0, hi - lo, adapter),)) for lo, hi in bounds]

    def _score(self, x: Tensor, targets: Tensor, segments: tuple[Segment, ...]) -> tuple[Tensor, Tensor]:
        """Probabilities float32 [m, V], in the buffer, and logprobs of the targets float32 [m, K] (L6)."""
        out = self._take(x.shape[0])
        z = self._model.cap(add_lora(self._model.project(x, out), x.float(), HEAD_NAME, segments))
        highest, where = z.max(dim=1, keepdim=True)
        chosen = z.gather(1, targets)
        p = torch.softmax(z, dim=1, out=out)
        # log-sum-exp from the softmax just computed: the likeliest token's probability is at least 1 / V.
        return p, chosen - (highest - p.gather(1, where).log())

    def _push(
        self,
        x: Tensor,
        p: Tensor,
        targets: Tensor,
        g: Tensor,
        segments: tuple[Segment, ...],
        factors: dict[int, tuple[Tensor, Tensor]],
    ) -> Tensor:
        """dL/dx [m, H] from g = dL/dlp [m, K] (L9); adds to the head's LoRA gradients."""
        live = g.ne(0).any(dim=1).nonzero().squeeze(1)
        dx = torch.zeros_like(x)
        if live.numel() == 0:
            return dx
        dz = self._logit_gradient(x, p, targets, g, segments, live)
        dx_live = dz @ self._model.head
        for s in segments:
            lo, hi = torch.searchsorted(live, torch.tensor([s.start, s.stop], device=live.device)).tolist()
            if hi > lo and s.adapter is not None and HEAD_NAME in s.adapter.a:
                rows = slice(lo, hi)
                dx_live[rows] += _head_factors(s.adapter, x[live[rows]], dz[rows], factors)
        return dx.index_copy_(0, live, dx_live)

    def _logit_gradient(
        self, x: Tensor, p: Tensor, targets: Tensor, g: Tensor, segments: tuple[Segment, ...], live: Tensor
    ) -> Tensor:
        """dL/dz of the live rows, [live, V] in the compute dtype: sum over k of g_k (1[v = x_k] - p_v)."""
        everything = live.numel() == x.shape[0]
        p, targets, g = (p, targets, g) if everything else (p[live], targets[live], g[live])
        dz = p.mul_(-g.sum(dim=1, keepdim=True)).scatter_add_(1, targets, g)
        if self._model.softcap is not None:
            raw = add_lora(self._model.project(x), x.float(), HEAD_NAME, segments)[live]
            dz.mul_(1 - torch.tanh(raw / self._model.softcap) ** 2)
        return dz.to(x.dtype)

    def _take(self, rows: int) -> Tensor:
        """`rows` rows of the buffer, which is made at first need: fresh memory of that size is slow to come by."""
        if self._buffer is None or self._buffer.shape[0] < rows:
            self._buffer = torch.empty(rows, self._model.vocab_size, dtype=torch.float32, device=self._model.device)
        return self._buffer[:rows]


def _segments(group: Sequence[Span]) -> tuple[Segment, ...]:
    """Rows of a group by adapter; neighbours of one adapter are one segment."""
    segments: list[Segment] = []
    start = 0
    for span in group:
        stop = start + span.length
        if segments and segments[-1].adapter is span.adapter:
            start = segments.pop().start
        segments.append(Segment(start, stop, span.adapter))
        start = stop
    return tuple(segments)


def _pad_targets(group: Sequence[Span], device: torch.device) -> Tensor:
    """Targets of all spans [rows, largest K]; a smaller K is filled up with token 0, without gradient (L20)."""
    width = max(span.targets.shape[1] for span in group)
    padded = [np.pad(span.targets, ((0, 0), (0, width - span.targets.shape[1]))) for span in group]
    return torch.from_numpy(np.concatenate(padded)).to(device)


def _judge_group(group: Sequence[Span], first: int, lp: FloatArray, judge: Judge) -> FloatArray:
    """dL/dlp of a whole group, zeros for datums without one."""
    g = np.zeros_like(lp)
    start = 0
    for offset, span in enumerate(group):
        rows, k = slice(start, start + span.length), span.targets.shape[1]
        judged = judge(first + offset, lp[rows, :k])
        if judged is not None:
            g[rows, :k] = judged
        start += span.length
    return g


def _head_factors(adapter: Adapter, x: Tensor, dz: Tensor, factors: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
    """Add a segment's gradients of the head's A and B to `factors`; returns its part of dL/dx."""
    a, b = adapter.a[HEAD_NAME].to(x.dtype), adapter.b[HEAD_NAME].to(x.dtype)
    low = (x @ a.t()).mul_(adapter.scale)
    d_low = (dz @ b).mul_(adapter.scale)
    grads = (d_low.t() @ x).float(), (dz.t() @ low).float()
    if id(adapter) in factors:
        for total, part in zip(factors[id(adapter)], grads, strict=True):
            total.add_(part)
    else:
        factors[id(adapter)] = grads
    return d_low @ a
