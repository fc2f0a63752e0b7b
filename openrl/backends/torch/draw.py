"""Drawing tokens for a batch whose rows differ in temperature, top-k, top-p and seed (S1-S3, S11-S13).

Random numbers are counter-based: the number for a token is a hash of its sequence's seed and its position, so no
sequence can disturb another's and a sequence that is computed anew draws the same tokens again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

UInt64Array = npt.NDArray[np.uint64]

_BLOCK = 256  # entries of a distribution that are summed as one in the first half of the inverse CDF
_FIRST_SORT = 1024  # how many of the most likely tokens top-p sorts before it resorts to more
_NO_TOP_P = 2.0  # above any mass, so that top-p keeps everything
_ROUNDING = 1e-6  # of float32 logprobs: masses this close to top-p have reached it
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


@dataclass(frozen=True, slots=True)
class RowKnobs:
    """One row's part of `Knobs`: `seed` in 0..2^64-1, the rest as in `SamplingParams`; `top` tokens to report."""

    seed: int
    temperature: float
    top_k: int
    top_p: float
    top: int


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
    cut = [i for i, row in enumerate(rows) if row.temperature and (row.top_p < 1 or 0 < row.top_k < vocab)]
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
    best = None if knobs.greedy is None else logits.argmax(-1)
    # The maximum goes first: a tiny temperature would otherwise overflow.
    scaled = logits.sub_(logits.amax(-1, keepdim=True))
    if knobs.temperature is not None:
        scaled.div_(knobs.temperature)
    weights, mass = _weights(scaled)
    log_total = mass.sum(-1, keepdim=True).log().float()
    if best is not None and knobs.all_greedy:
        tokens = best
    else:
        if knobs.truncation is not None:
            weights, mass = _truncated(weights, mass, scaled, log_total, knobs.truncation)
        u = torch.from_numpy(uniforms(knobs.seeds, positions)).to(logits.device)
        tokens = _invert(weights, mass, u)
        if best is not None and knobs.greedy is not None:
            tokens = torch.where(knobs.greedy, best, tokens)
    chosen = (scaled.gather(-1, tokens[:, None]) - log_total)[:, 0]
    if not knobs.top:
        return Drawn(tokens, chosen, None, None)
    top = scaled.topk(knobs.top, -1)
    return Drawn(tokens, chosen, top.indices, top.values - log_total)


def draw_repeatedly(logits: Tensor, temperature: float, u: Tensor) -> Tensor:
    """Draw k tokens a row, with replacement and nothing cut away, from float32 logits [R, V], which stay as they are.

    `u` is float64 [R, k] in [0, 1); the tokens are int64 [R, k].
    """
    if temperature == 0:
        return logits.argmax(-1, keepdim=True).expand(u.shape)
    weights, mass = _weights((logits - logits.amax(-1, keepdim=True)).div_(temperature))
    return torch.stack([_invert(weights, mass, column) for column in u.unbind(1)], 1)


def _weights(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """exp of [R, V] in blocks [R, blocks, _BLOCK], zero past V, and the blocks' sums in float64 [R, blocks]."""
    rows, vocab = scaled.shape
    width = -(-vocab // _BLOCK) * _BLOCK
    weights = scaled.new_empty(rows, width)
    weights[:, vocab:] = 0
    torch.exp(scaled, out=weights[:, :vocab])
    return _blocks(weights)


def _blocks(weights: Tensor) -> tuple[Tensor, Tensor]:
    # A block's sum in float32 is as exact as its weights are; over all blocks it would not be.
    grid = weights.unflatten(-1, (-1, _BLOCK))
    return grid, grid.sum(-1).double()


def _truncated(
    weights: Tensor, mass: Tensor, scaled: Tensor, log_total: Tensor, truncation: Truncation
) -> tuple[Tensor, Tensor]:
    """`weights` and `mass` with what top-k and top-p cut away set to zero."""
    rows = truncation.rows
    keep = kept(scaled[rows] - log_total[rows], truncation.top_k, truncation.top_p)
    flat = weights.flatten(1)
    flat[rows] *= functional.pad(keep, (0, flat.shape[1] - keep.shape[1]))
    mass[rows] = _blocks(flat[rows])[1]
    return weights, mass


def _invert(weights: Tensor, mass: Tensor, u: Tensor) -> Tensor:
    """Inverse CDF in id order: the first token whose cumulative weight exceeds u times the total.

    Float64 sums over blocks first, then inside the block that was hit: the answer of one long cumulative sum, with
    256 times less of it.
    """
    block, rest = _find(mass, u * mass.sum(-1))
    inside = weights[torch.arange(len(weights), device=weights.device), block].double()
    offset, _ = _find(inside, rest)
    return block * _BLOCK + offset


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
    above = logprobs > least
    ties = logprobs == least
    quota = count[:, None] - above.sum(-1, keepdim=True)
    return above | (ties & (ties.cumsum(-1) <= quota))


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
