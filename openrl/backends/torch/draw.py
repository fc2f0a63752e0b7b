"""Drawing tokens for a batch whose rows differ in temperature, top-k, top-p and seed (S1-S3, S11-S13).

The random numbers are those of `openrl.backends.common.uniforms`, one for each sequence's seed and position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from openrl.backends.common.uniforms import RowKnobs, UInt64Array, uniforms

_BLOCK = 256  # entries of a distribution that are summed as one in the first half of the inverse CDF, at most
_LEAST_BLOCK = 32
_FIRST_SORT = 64  # how many of the most likely tokens top-p sorts before it resorts to more
_NO_TOP_P = 2.0  # above any mass, so that top-p keeps everything
_ROUNDING = 1e-6  # of float32 logprobs: masses this close to top-p have reached it


@dataclass(frozen=True, slots=True)
class Truncation:
    """Rows with top-k or top-p: `rows` int64 [M], `top_k` int64 [M], `top_p` float64 [M] (above 1 keeps all)."""

    rows: Tensor
    top_k: Tensor
    top_p: Tensor


@dataclass(frozen=True, slots=True)
class Knobs:
    """How the rows of a batch draw. `temperature` is float32 [R, 1], 1 where a row is greedy or where none differs."""

    seeds: UInt64Array
    temperature: Tensor | None  # None: 1 in every row
    greedy: Tensor | None  # bool [R]; None: no row is
    all_greedy: bool
    truncation: Truncation | None
    top: int  # how many of the most likely tokens to report


def stack(rows: Sequence[RowKnobs], vocab: int, device: torch.device) -> Knobs:
    """Vectors on the device for a batch of rows."""
    greedy = [row.temperature == 0 for row in rows]
    heat = [row.temperature or 1.0 for row in rows]
    plain = all(t == 1.0 for t in heat)
    return Knobs(
        seeds=np.array([row.seed for row in rows], np.uint64),
        temperature=None if plain else torch.tensor(heat, dtype=torch.float32, device=device)[:, None],
        greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
        all_greedy=all(greedy),
        truncation=_truncation(rows, vocab, device),
        top=max(row.top for row in rows),
    )


def _truncation(rows: Sequence[RowKnobs], vocab: int, device: torch.device) -> Truncation | None:
    cut = [i for i, row in enumerate(rows) if row.cuts(vocab)]
    if not cut:
        return None
    top_k = [rows[i].top_k if 0 < rows[i].top_k < vocab else vocab for i in cut]
    top_p = [rows[i].top_p if rows[i].top_p < 1 else _NO_TOP_P for i in cut]
    return Truncation(
        rows=torch.tensor(cut, device=device),
        top_k=torch.tensor(top_k, device=device),
        top_p=torch.tensor(top_p, dtype=torch.float64, device=device),
    )


@dataclass(frozen=True, slots=True)
class Drawn:
    """`tokens` int64 [R], `logprobs` float32 [R]; with `Knobs.top`: `top_ids`, `top_logprobs` [R, top], descending."""

    tokens: Tensor
    logprobs: Tensor
    top_ids: Tensor | None
    top_logprobs: Tensor | None


def draw(logits: Tensor, knobs: Knobs, positions: npt.NDArray[np.int64]) -> Drawn:
    """Draw one token a row from float32 logits [R, V], which are overwritten; `positions` [R] are those of the tokens.

    Logprobs are of log_softmax(z / temperature) before top-k and top-p (S1, S2), at temperature 1 for greedy rows (S3).
    """
    best = None if knobs.greedy is None else _argmax(logits)
    if knobs.temperature is not None:
        # The maximum goes first: a tiny temperature would otherwise overflow.
        logits.sub_(logits.amax(-1, keepdim=True)).div_(knobs.temperature)
    weights, mass = _weights(logits, overwrite=not knobs.top and knobs.truncation is None)
    total = mass.sum(-1, keepdim=True)
    left = weights, mass
    if knobs.truncation is not None:
        left = _truncated(weights, mass, logits, total, knobs.truncation)
    if best is not None and knobs.all_greedy:
        tokens = best
    else:
        tokens = _invert(*left, torch.from_numpy(uniforms(knobs.seeds, positions)).to(logits.device))
        if best is not None and knobs.greedy is not None:
            tokens = torch.where(knobs.greedy, best, tokens)
    chosen = _logprobs(weights, total, tokens[:, None])[:, 0]
    if not knobs.top:
        return Drawn(tokens, chosen, None, None)
    top = logits.topk(knobs.top, -1)
    first = _logprobs(weights, total, top.indices[:, :1])
    return Drawn(tokens, chosen, top.indices, top.values - top.values[:, :1] + first)


def draw_repeatedly(logits: Tensor, temperature: float, u: Tensor) -> Tensor:
    """Draw k tokens a row, with replacement and nothing cut away, from float32 logits [R, V], which stay as they are.

    `u` is float64 [R, k] in [0, 1); the tokens are int64 [R, k].
    """
    if temperature == 0:
        return _argmax(logits)[:, None].expand(u.shape)
    weights, mass = _weights((logits - logits.amax(-1, keepdim=True)).div_(temperature), overwrite=True)
    return torch.stack([_invert(weights, mass, column) for column in u.unbind(1)], 1)


def _argmax(z: Tensor) -> Tensor:
    """The first of the largest entries of each row of [R, V]: by blocks, since on a CPU plain maxima are ten times as
    fast as those that say where they are."""
    vocab = z.shape[-1]
    whole = vocab // _BLOCK * _BLOCK
    if not whole:
        return z.argmax(-1)
    maxima = z[:, :whole].unflatten(-1, (-1, _BLOCK)).amax(-1)
    if whole < vocab:
        maxima = torch.cat([maxima, z[:, whole:].amax(-1, keepdim=True)], -1)
    places = (maxima.argmax(-1, keepdim=True) * _BLOCK + torch.arange(_BLOCK, device=z.device)).clamp_(max=vocab - 1)
    return places.gather(-1, z.gather(-1, places).argmax(-1, keepdim=True))[:, 0]


def _weights(scaled: Tensor, *, overwrite: bool) -> tuple[Tensor, Tensor]:
    """The softmax of [R, V] in blocks [R, blocks, block], zero past V, and the blocks' sums in float64 [R, blocks].

    The weights of a row add up to 1 only as nearly as float32 adds; so whoever needs the total takes that of the sums.
    `overwrite` puts them where `scaled` was: fresh memory of that size is slow to come by.
    """
    weights = torch.softmax(scaled, -1, out=scaled) if overwrite else scaled.softmax(-1)
    # Most vocabularies are made of blocks of some such size, and need not be copied to get there.
    block = math.gcd(weights.shape[1], _BLOCK)
    if block < _LEAST_BLOCK:
        block = _BLOCK
        weights = functional.pad(weights, (0, -weights.shape[1] % _BLOCK))
    return _blocks(weights, block)


def _blocks(weights: Tensor, block: int) -> tuple[Tensor, Tensor]:
    # A block's sum in float32 is as exact as its weights are; over all blocks it would not be.
    grid = weights.unflatten(-1, (-1, block))
    return grid, grid.sum(-1).double()


def _logprobs(weights: Tensor, total: Tensor, ids: Tensor) -> Tensor:
    """Float32 logprobs of tokens [R, n] that are likely enough for float32 to hold their weight."""
    return (weights.flatten(1).gather(-1, ids).double() / total).log().float()


def _truncated(
    weights: Tensor, mass: Tensor, scaled: Tensor, total: Tensor, truncation: Truncation
) -> tuple[Tensor, Tensor]:
    """Copies of `weights` and `mass` with what top-k and top-p cut away set to zero."""
    rows = truncation.rows
    everything = len(rows) == len(scaled)
    some, grid, sums = (scaled, weights, total) if everything else (scaled[rows], weights[rows], total[rows])
    flat = grid.flatten(1)
    log_total = some.amax(-1, keepdim=True) - (flat.amax(-1, keepdim=True).double() / sums).log().float()
    keep = kept(some - log_total, truncation.top_k, truncation.top_p)
    spare = flat.shape[1] - keep.shape[1]
    cut, cut_mass = _blocks(flat * (functional.pad(keep, (0, spare)) if spare else keep), weights.shape[-1])
    if everything:
        return cut, cut_mass
    return weights.index_copy(0, rows, cut), mass.index_copy(0, rows, cut_mass)


def _invert(weights: Tensor, mass: Tensor, u: Tensor) -> Tensor:
    """Inverse CDF in id order: the first token whose cumulative weight exceeds u times the total.

    Float64 sums over blocks first, then inside the block that was hit: the answer of one long cumulative sum, with
    far less of it.
    """
    block, rest = _find(mass, u * mass.sum(-1))
    inside = weights[torch.arange(len(weights), device=weights.device), block].double()
    offset, _ = _find(inside, rest)
    return block * weights.shape[-1] + offset


def _find(mass: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Index of the first entry of each row whose cumulative mass exceeds `target`, and the rest of the target there.

    Rounding can put the target at the very end; the last entry with any mass is taken then, never one without.
    """
    cumulative = mass.cumsum(-1)
    places = torch.arange(mass.shape[-1], device=mass.device)
    last = torch.where(mass > 0, places, 0).amax(-1)
    index = torch.minimum((cumulative <= target[:, None]).sum(-1), last)
    before = (cumulative - mass).gather(-1, index[:, None])[:, 0]
    return index, target - before


def kept(logprobs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Which tokens survive, bool [M, V]: the top_k most likely that are in the smallest prefix of mass >= top_p (S13).

    The mass is that of the whole distribution, as S13 words it; a server that renormalises after top-k would keep
    fewer tokens where both are set. Among equals, lower ids go first.
    """
    count, least = _prefix(logprobs, top_k, top_p)
    keep = logprobs >= least
    surplus = keep.sum(-1) - count
    if not bool(surplus.any()):
        return keep
    ties = logprobs == least
    quota = ties.sum(-1, keepdim=True) - surplus[:, None]
    return keep & ~(ties & (ties.cumsum(-1) > quota))


def _prefix(logprobs: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """How many tokens of each row survive ([M]), and the logprob of the least likely one of them ([M, 1])."""
    vocab = logprobs.shape[-1]
    width = min(_FIRST_SORT, vocab)
    while True:
        top = logprobs.topk(width, -1).values
        mass = top.double().exp().cumsum(-1)
        count = torch.minimum((mass < top_p[:, None] - _ROUNDING).sum(-1) + 1, top_k)
        if width == vocab or bool((count <= width).all()):
            break
        width = min(8 * width, vocab)
    count = count.clamp(max=vocab)
    return count, top.gather(-1, count[:, None] - 1)
