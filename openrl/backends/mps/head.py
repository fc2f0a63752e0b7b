"""The output head in training: logprobs, losses and the way back, a chunk of logits at a time, in MLX.

Full logits [positions, V] are the largest tensor of a pass and are never held whole. Whole datums are put through
the head together as long as their logits fit a budget; since a datum's loss needs nothing but its own logprobs, the
gradient is taken while the chunk's logits are still there. Only a datum longer than that has its logits computed again
on the way back. The losses are numpy's; the way back is written by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from openrl.backends.common.spans import Judge, Span, groups, judge_group, padded_targets, pieces
from openrl.backends.mps.lora import Adapter, Segment
from openrl.backends.mps.memory import HEAD_CELLS
from openrl.backends.mps.model import MlxModel
from openrl.checkpoints.peft import HEAD_NAME
from openrl.types import Array, FloatArray


@dataclass(slots=True)
class HeadGradient:
    """What comes back: `hidden` [M, H] in the compute dtype, None where it is exactly zero; by adapter `id`, float32
    sums for the head's A and B. `sink`: see `Head.run`."""

    hidden: mx.array | None = None
    factors: dict[int, tuple[mx.array, mx.array]] = field(default_factory=dict[int, "tuple[mx.array, mx.array]"])
    sink: Callable[[mx.array, mx.array], None] | None = None


@dataclass(frozen=True, slots=True)
class _Scored:
    """Rows [lo, hi) of the positions after scoring; float32 logits z [m, V], log-sum-exp [m, 1], logprobs [m, K]."""

    z: mx.array
    total: mx.array
    logprobs: mx.array


class Head:
    """Scores positions and differentiates what the judge says of them."""

    def __init__(self, model: MlxModel, cells: int = HEAD_CELLS) -> None:
        self._model = model
        self._rows = max(1, cells // model.vocab_size)

    def run(
        self,
        x: mx.array,
        spans: Sequence[Span[Adapter]],
        judge: Judge,
        *,
        backward: bool,
        sink: Callable[[mx.array, mx.array], None] | None = None,
    ) -> HeadGradient:
        """Score the hidden states x [M, H] of `spans` laid end to end; differentiate if `backward`.

        `sink` is for a head that is trained itself: it is given dL/dz float32 [m, V] and the rows of x [m, H] that it
        belongs to, piece by piece.
        """
        gradient = HeadGradient(sink=sink)
        parts: list[mx.array] = []
        for first, last, start in groups(spans, self._rows):
            group = spans[first:last]
            cut = pieces(start, group, self._rows)
            targets = padded_targets(group)
            scored, lp = self._score_all(x, cut, targets, start)
            g = judge_group(group, first, lp, judge)
            if not backward:
                continue
            for lo, hi, segments in cut:
                part = slice(lo - start, hi - start)
                if not g[part].any():
                    parts.append(mx.zeros_like(x[lo:hi]))
                    continue
                # A lone piece is still held; those of a long datum are scored again.
                held = scored or self._score(x[lo:hi], targets[part], segments)
                parts.append(self._push(x[lo:hi], held, targets[part], g[part], segments, gradient))
                mx.eval(parts[-1], list(gradient.factors.values()))
                gradient.hidden = x  # not zero; the parts are put together below
        if gradient.hidden is not None:
            gradient.hidden = mx.concatenate(parts)
        return gradient

    def _score_all(
        self, x: mx.array, cut: list[tuple[int, int, tuple[Segment, ...]]], targets: Array, start: int
    ) -> tuple[_Scored | None, FloatArray]:
        """All pieces' logprobs float32 [m, K] on the host; the piece itself if it is the only one."""
        logprobs: list[FloatArray] = []
        scored: _Scored | None = None
        for lo, hi, segments in cut:
            scored = self._score(x[lo:hi], targets[lo - start : hi - start], segments)
            logprobs.append(np.array(scored.logprobs))
        return (scored if len(cut) == 1 else None), np.concatenate(logprobs)

    def _score(self, x: mx.array, targets: Array, segments: tuple[Segment, ...]) -> _Scored:
        """Logits in float32, and logprobs of the targets from them (L6)."""
        z = self._model.logits(x, segments)
        total = mx.logsumexp(z, axis=1, keepdims=True)
        logprobs = mx.take_along_axis(z, mx.array(targets), axis=1) - total
        mx.eval(z, total, logprobs)
        return _Scored(z, total, logprobs)

    def _push(
        self,
        x: mx.array,
        scored: _Scored,
        targets: Array,
        g: FloatArray,
        segments: tuple[Segment, ...],
        gradient: HeadGradient,
    ) -> mx.array:
        """dL/dx [m, H] from g = dL/dlp [m, K] (L9); adds to the head's LoRA gradients. Rows without g cost nothing."""
        live = np.flatnonzero(g.any(axis=1))
        whole = len(live) == len(g)
        at = mx.array(live)
        z, total, x_live = (scored.z, scored.total, x) if whole else (scored.z[at], scored.total[at], x[at])
        dz = self._logit_gradient(z, total, targets[live], g[live])
        dx = self._model.project_back(dz)
        if gradient.sink is not None:
            gradient.sink(dz, x_live)
        dz = dz.astype(x.dtype)
        parts: list[mx.array] = []
        for s in segments:
            lo, hi = (int(row) for row in np.searchsorted(live, [s.start, s.stop]))
            part = dx[lo:hi]
            if hi > lo and s.adapter is not None and HEAD_NAME in s.adapter.a:
                part = part + _head_factors(s.adapter, x_live[lo:hi], dz[lo:hi], gradient.factors)
            parts.append(part)
        dx = mx.concatenate(parts)
        return dx if whole else mx.zeros_like(x).at[at].add(dx)

    def _logit_gradient(self, z: mx.array, total: mx.array, targets: Array, g: FloatArray) -> mx.array:
        """dL/dz float32 [live, V]: sum over k of g_k (1[v = x_k] - p_v), times the slope of the cap."""
        dz = mx.exp(z - total) * mx.array(-g.sum(axis=1, keepdims=True))
        rows = mx.broadcast_to(mx.arange(len(g))[:, None], g.shape)
        dz = dz.at[rows, mx.array(targets)].add(mx.array(g))
        cap = self._model.softcap
        return dz if cap is None else dz * (1 - mx.square(z / cap))


def _head_factors(
    adapter: Adapter, x: mx.array, dz: mx.array, factors: dict[int, tuple[mx.array, mx.array]]
) -> mx.array:
    """Add a segment's gradients of the head's A and B to `factors`; returns its part of dL/dx."""
    a, b = adapter.a[HEAD_NAME].astype(x.dtype), adapter.b[HEAD_NAME].astype(x.dtype)
    low = (x @ a.T) * adapter.scale
    d_low = (dz @ b) * adapter.scale
    of_a, of_b = (d_low.T @ x).astype(mx.float32), (dz.T @ low).astype(mx.float32)
    if id(adapter) in factors:
        before = factors[id(adapter)]
        of_a, of_b = before[0] + of_a, before[1] + of_b
    factors[id(adapter)] = of_a, of_b
    return d_low @ a
