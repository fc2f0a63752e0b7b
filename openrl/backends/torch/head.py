"""The output head in training: logprobs, losses and the way back, a chunk of logits at a time.

Full logits [positions, V] are the largest tensor of a pass and are never held whole. Whole datums are put through
the head together as long as their logits fit a buffer; since a datum's loss needs nothing but its own logprobs, the
gradient is taken while the chunk's probabilities are still there, and nothing is computed twice. Only a datum longer
than the buffer has its logits computed again on the way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from openrl.backends.common.spans import Judge, Span, groups, judge_group, padded_targets, pieces
from openrl.backends.torch.joint import transposed
from openrl.backends.torch.lora import Adapter, Segment, add_lora
from openrl.backends.torch.memory_plan import HEAD_CELLS
from openrl.backends.torch.model import CausalLM
from openrl.backends.torch.scratch import Scratch
from openrl.checkpoints.peft import HEAD_NAME


@dataclass(slots=True)
class HeadGradient:
    """What comes back: `hidden` [M, H] in the compute dtype; by adapter `id`, float32 sums for the head's A and B."""

    hidden: Tensor
    factors: dict[int, tuple[Tensor, Tensor]]
    touched: bool = False  # False: every gradient is exactly zero


class Head:
    """Scores positions and differentiates what the judge says of them; keeps its buffer between calls."""

    def __init__(self, model: CausalLM, buffer_elements: int = HEAD_CELLS) -> None:
        self._model = model
        self._rows = max(1, buffer_elements // model.vocab_size)
        self._scratch = Scratch(model.device)

    def run(
        self,
        x: Tensor,
        spans: Sequence[Span[Adapter]],
        judge: Judge,
        *,
        backward: bool,
        into: Tensor | None = None,
    ) -> HeadGradient:
        """Score the hidden states x [M, H] (detached) of `spans` laid end to end; differentiate if `backward`.

        The head's own gradient is added to `into`, float32 [V, H], where that is given.
        """
        gradient = HeadGradient(torch.zeros_like(x) if backward else x.new_empty(0), {})
        for first, last, start in groups(spans, self._rows):
            group = spans[first:last]
            cut = pieces(start, group, self._rows)
            targets = torch.from_numpy(padded_targets(group)).to(x.device)
            scored = [self._score(x[lo:hi], targets[lo - start : hi - start], s) for lo, hi, s in cut]
            lp = torch.cat([logprobs for _, logprobs in scored]).cpu().numpy()
            g = judge_group(group, first, lp, judge)
            if not backward or not g.any():
                continue
            gradient.touched = True
            grads = torch.from_numpy(g).to(x.device)
            for lo, hi, segments in cut:
                rows, part = x[lo:hi], slice(lo - start, hi - start)
                # The buffer still holds the last piece scored; earlier pieces of a long datum are scored again.
                p = scored[0][0] if len(cut) == 1 else self._score(rows, targets[part], segments)[0]
                push = self._push(rows, p, targets[part], grads[part], segments, gradient.factors, into)
                gradient.hidden[lo:hi] = push
        return gradient

    def clear(self) -> None:
        """Give the buffers back."""
        self._scratch.clear()

    def _score(self, x: Tensor, targets: Tensor, segments: tuple[Segment, ...]) -> tuple[Tensor, Tensor]:
        """Probabilities float32 [m, V], in the buffer, and logprobs of the targets float32 [m, K] (L6)."""
        out = self._take("logits", len(x), torch.float32)
        z = self._cap(add_lora(self._model.project(x, out), x.float(), HEAD_NAME, segments))
        highest = z.amax(dim=1, keepdim=True)
        chosen = z.gather(1, targets)
        p = torch.softmax(z, dim=1, out=out)
        # log-sum-exp from the softmax just computed: the likeliest token's probability is at least 1 / V.
        return p, chosen - (highest - p.amax(dim=1, keepdim=True).log())

    def _cap(self, z: Tensor) -> Tensor:
        """Caps logits in place as the family does, and keeps the slope of that for the way back."""
        cap = self._model.softcap
        if cap is None:
            return z
        z.div_(cap).tanh_()
        slope = self._take("slope", len(z), self._model.dtype)
        torch.mul(z, z, out=slope).neg_().add_(1)
        return z.mul_(cap)

    def _push(
        self,
        x: Tensor,
        p: Tensor,
        targets: Tensor,
        g: Tensor,
        segments: tuple[Segment, ...],
        factors: dict[int, tuple[Tensor, Tensor]],
        into: Tensor | None,
    ) -> Tensor:
        """dL/dx [m, H] from g = dL/dlp [m, K] (L9); adds to the gradients of the head's adapters, and its own."""
        live = g.ne(0).any(dim=1).nonzero().squeeze(1)
        dx = torch.zeros_like(x)
        if live.numel() == 0:
            return dx
        dz = self._logit_gradient(p, targets, g, live)
        if into is not None:
            _add_outer(into, dz, x[live])
        dx_live = dz @ self._model.head
        for s in segments:
            lo, hi = torch.searchsorted(live, torch.tensor([s.start, s.stop], device=live.device)).tolist()
            if hi > lo and s.adapter is not None and HEAD_NAME in s.adapter.a:
                rows = slice(lo, hi)
                dx_live[rows] += _head_factors(s.adapter, x[live[rows]], dz[rows], factors)
        return dx.index_copy_(0, live, dx_live)

    def _logit_gradient(self, p: Tensor, targets: Tensor, g: Tensor, live: Tensor) -> Tensor:
        """dL/dz of the live rows, [live, V] in the compute dtype: sum over k of g_k (1[v = x_k] - p_v).

        Overwrites p.
        """
        p.mul_(-g.sum(dim=1, keepdim=True)).scatter_add_(1, targets, g)
        if self._model.softcap is not None:
            p.mul_(self._take("slope", len(p), self._model.dtype))
        if len(live) == len(p) and p.dtype is self._model.dtype:
            return p
        dz = self._take("dz", len(live), self._model.dtype)
        at = 0
        for lo, hi in _runs(live):  # a run is converted as it is copied; an index would make a float32 copy first
            dz[at : at + hi - lo] = p[lo:hi]
            at += hi - lo
        return dz

    def _take(self, name: str, rows: int, dtype: torch.dtype) -> Tensor:
        return self._scratch.take(name, (rows, self._model.vocab_size), dtype)


def _runs(rows: Tensor) -> list[tuple[int, int]]:
    """Ascending row numbers as (first, last + 1) of neighbours."""
    numbers = rows.cpu().numpy()
    cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
    starts, stops = np.concatenate([[0], cuts]), np.concatenate([cuts, [len(numbers)]])
    return [(int(numbers[a]), int(numbers[b - 1]) + 1) for a, b in zip(starts, stops, strict=True)]


def _add_outer(into: Tensor, dz: Tensor, x: Tensor) -> None:
    """Float32 into [V, H] += dz^T x, of dz [m, V] and x [m, H] in the compute dtype."""
    if dz.dtype is into.dtype:
        into.addmm_(dz.t(), x)
    else:
        into.add_(dz.t() @ x)


def _head_factors(adapter: Adapter, x: Tensor, dz: Tensor, factors: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
    """Add a segment's gradients of the head's A and B to `factors`; returns its part of dL/dx."""
    a, up = adapter.a[HEAD_NAME].to(x.dtype), transposed(adapter.b[HEAD_NAME], x.dtype)
    low = (x @ a.t()).mul_(adapter.scale)
    d_low = (dz @ up.t()).mul_(adapter.scale)
    if id(adapter) not in factors:  # B lies transposed, as its parts come, so that they need not be copied first
        zeros = torch.zeros_like(a, dtype=torch.float32), torch.zeros_like(up, dtype=torch.float32).t()
        factors[id(adapter)] = zeros
    of_a, of_b = factors[id(adapter)]
    of_a.add_(d_low.t() @ x)
    of_b.t().add_(low.t() @ dz)
    return d_low @ a
