"""Drawing tokens with MLX for a batch whose rows differ in temperature, top-k, top-p and seed (S1-S3, S11-S13).

The device makes the softmax, cuts it and sums it by blocks; the host, which sees the same memory on Apple silicon,
finds each row's token in float64, which MLX's GPU lacks. Random numbers and search are those of
`openrl.backends.common`, so that a seed gives the tokens that the PyTorch engine draws from the same logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from openrl.backends.common.inverse import FloatArray64, Index, invert
from openrl.backends.common.uniforms import RowKnobs, uniforms
from openrl.types import FloatArray

_BLOCK = 256  # entries of a distribution that are summed as one
_FIRST_SORT = 64  # how many of the most likely tokens top-p looks at before it resorts to more
_NO_TOP_P = 2.0  # above any mass, so that top-p keeps everything
_ROUNDING = 1e-6  # of float32 logprobs: masses this close to top-p have reached it


@dataclass(frozen=True, slots=True)
class Drawn:
    """`tokens` int64 [R], `logprobs` float32 [R]; where asked for: `top_ids`, `top_logprobs` [R, top], descending."""

    tokens: Index
    logprobs: FloatArray
    top_ids: Index | None
    top_logprobs: FloatArray | None


@dataclass(frozen=True, slots=True)
class _Softmax:
    """The softmax of R rows in blocks [R, blocks, size], zero past the vocabulary, and the blocks' sums [R, blocks]."""

    weights: mx.array
    sums: mx.array

    @classmethod
    def of(cls, scaled: mx.array) -> _Softmax:
        return cls.blocked(mx.softmax(scaled, axis=-1, precise=True))

    @classmethod
    def blocked(cls, flat: mx.array) -> _Softmax:
        spare = -flat.shape[1] % _BLOCK
        padded = mx.pad(flat, [(0, 0), (0, spare)]) if spare else flat
        weights = mx.unflatten(padded, 1, (-1, _BLOCK))
        return cls(weights, weights.sum(-1))

    @property
    def mass(self) -> FloatArray64:
        return np.array(self.sums).astype(np.float64)

    def draw(self, u: FloatArray64) -> Index:
        """Tokens int64 [R, k] for `u` [R, k]."""
        weights, mass = np.asarray(self.weights), self.mass
        return np.stack([invert(weights, mass, column) for column in u.T], 1)

    def logprobs(self, ids: Index) -> FloatArray:
        """Float32 logprobs of tokens [R, n] that are likely enough for float32 to hold their weight."""
        weights = np.asarray(self.weights).reshape(len(ids), -1)
        taken = np.take_along_axis(weights, ids, 1).astype(np.float64)
        return np.log(taken / self.mass.sum(-1, keepdims=True)).astype(np.float32)


def draw(logits: mx.array, rows: Sequence[RowKnobs], positions: npt.NDArray[np.int64]) -> Drawn:
    """Draw one token a row from float32 logits [R, V]; `positions` [R] are those of the tokens.

    Logprobs are of log_softmax(z / temperature) before top-k and top-p (S1, S2), at temperature 1 for greedy rows (S3).
    """
    greedy = np.array([row.temperature == 0 for row in rows])
    scaled = _scaled(logits, [row.temperature or 1.0 for row in rows])
    softmax = _Softmax.of(scaled)
    top = max(row.top for row in rows)
    best = mx.argmax(logits, axis=-1) if greedy.any() else None
    first = mx.argsort(-scaled, axis=-1)[:, :top] if top else None
    mx.eval(softmax.weights, softmax.sums, *(x for x in (best, first) if x is not None))
    with np.errstate(all="ignore"):  # logits that are not finite give such logprobs, by which the sampler knows them
        if greedy.all():
            tokens = _index(best)
        else:
            u = uniforms(np.array([row.seed for row in rows], np.uint64), positions)
            tokens = _cut(softmax, scaled, rows).draw(u[:, None])[:, 0]
            tokens = np.where(greedy, _index(best), tokens) if best is not None else tokens
        logprobs = softmax.logprobs(tokens[:, None])[:, 0]
        if first is None:
            return Drawn(tokens, logprobs, None, None)
        return Drawn(tokens, logprobs, _index(first), _top_logprobs(softmax, scaled, first))


def draw_repeatedly(logits: mx.array, temperature: float, u: FloatArray64) -> Index:
    """Draw k tokens a row, with replacement and nothing cut away, from float32 logits [R, V], for `u` [R, k] in
    [0, 1); the tokens are int64 [R, k]."""
    if temperature == 0:
        return np.repeat(_index(mx.argmax(logits, axis=-1))[:, None], u.shape[1], 1)
    softmax = _Softmax.of(_scaled(logits, [temperature]))
    mx.eval(softmax.weights, softmax.sums)
    with np.errstate(all="ignore"):
        return softmax.draw(u)


def _scaled(logits: mx.array, temperatures: list[float]) -> mx.array:
    if all(t == 1.0 for t in temperatures):
        return logits
    # The maximum goes first: a tiny temperature would otherwise overflow.
    return (logits - logits.max(-1, keepdims=True)) / mx.array(temperatures, mx.float32)[:, None]


def _index(ids: mx.array | None) -> Index:
    assert ids is not None
    return np.array(ids).astype(np.int64)


def _top_logprobs(softmax: _Softmax, scaled: mx.array, ids: mx.array) -> FloatArray:
    """From the differences of logits, since small weights would lose digits."""
    values = np.array(mx.take_along_axis(scaled, ids, axis=-1))
    return values - values[:, :1] + softmax.logprobs(_index(ids[:, :1]))


# ---- top-k and top-p ----


def _cut(softmax: _Softmax, scaled: mx.array, rows: Sequence[RowKnobs]) -> _Softmax:
    """The softmax with what top-k and top-p cut away set to zero."""
    vocab = scaled.shape[-1]
    cut = [i for i, row in enumerate(rows) if row.cuts(vocab)]
    if not cut:
        return softmax
    top_k = np.array([rows[i].top_k if 0 < rows[i].top_k < vocab else vocab for i in cut])
    top_p = np.array([rows[i].top_p if rows[i].top_p < 1 else _NO_TOP_P for i in cut])
    index = mx.array(cut)
    some = scaled[index]
    keep = kept(some - mx.logsumexp(some, axis=-1, keepdims=True), top_k, top_p)
    everything = mx.ones(scaled.shape, mx.bool_)
    everything[index] = keep
    flat = mx.flatten(softmax.weights, 1)[:, :vocab]
    left = _Softmax.blocked(mx.where(everything, flat, 0.0))
    mx.eval(left.weights, left.sums)
    return left


def kept(logprobs: mx.array, top_k: npt.NDArray[Any], top_p: npt.NDArray[Any]) -> mx.array:
    """Which tokens survive, bool [M, V]: the top_k most likely that are in the smallest prefix of mass >= top_p (S13).

    The mass is that of the whole distribution, as S13 words it. Among equals, lower ids go first.
    """
    count, least = _prefix(logprobs, top_k, top_p)
    edge = mx.array(least)
    keep = logprobs >= edge
    surplus = np.array(keep.sum(-1)) - count
    if not surplus.any():
        return keep
    ties = logprobs == edge
    quota = ties.sum(-1, keepdims=True) - mx.array(surplus)[:, None]
    return keep & ~(ties & (mx.cumsum(ties.astype(mx.int32), axis=-1) > quota))


def _prefix(
    logprobs: mx.array, top_k: npt.NDArray[Any], top_p: npt.NDArray[Any]
) -> tuple[npt.NDArray[np.int64], FloatArray]:
    """How many tokens of each row survive ([M]), and the logprob of the least likely one of them ([M, 1])."""
    vocab = logprobs.shape[-1]
    width = min(_FIRST_SORT, vocab)
    while True:
        top = -np.sort(-np.array(mx.topk(logprobs, width, axis=-1)), -1)
        mass = np.exp(top.astype(np.float64)).cumsum(-1)
        count = np.minimum((mass < top_p[:, None] - _ROUNDING).sum(-1) + 1, top_k)
        if width == vocab or bool((count <= width).all()):
            break
        width = min(8 * width, vocab)
    count = np.minimum(count, vocab)
    return count, np.take_along_axis(top, count[:, None] - 1, 1)
