"""The requests of the suite: the same tokens, weights and advantages on every machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from openrl.selftest.expected import Expected
from openrl.selftest.hashing import integers
from openrl.selftest.models import FIRST, VOCAB
from openrl.types import Array, Datum, SamplePayload, SamplingParams, TrainPayload

SEED = 5000  # of samples
LENGTHS = (5, 40, 17, 1, 22)  # several are longer than a sliding window, the shortest has no context at all
WIDTHS = ((9, 3), (12, 1), (4, 5))  # tokens of a datum and targets a position
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")
WIDE_LOSSES = ("cross_entropy", "importance_sampling")

# Ratios between policies that no rounding carries over a threshold (0.8, 1.2 and 4), and of whole sequences for GSPO.
_RATIOS = np.array([0.5, 0.7, 0.92, 1.08, 1.6, 5.0])
_SEQUENCE_RATIOS = (0.6, 0.95, 1.05, 2.0, 1.5)


def tokens(name: str, count: int) -> list[int]:
    """Ordinary tokens of the tiny models."""
    return integers(name, (count,), FIRST, VOCAB - 1).tolist()


PROMPT = tokens("prompt", 70)  # long enough to be cached, and to leave a sliding window


def _datum(name: str, length: int, width: int | None = None) -> Datum:
    shape = (length,) if width is None else (length, width)
    targets = integers(f"{name}/targets", shape, FIRST, VOCAB - 1)
    return Datum(np.array(tokens(name, length), np.int32), {"target_tokens": targets})


DATA = tuple(_datum(f"datum {i}", length) for i, length in enumerate(LENGTHS))
WIDE = tuple(_datum(f"wide {i}", length, width) for i, (length, width) in enumerate(WIDTHS))


def plain(data: Sequence[Datum] = DATA) -> TrainPayload:
    """Targets alone."""
    return TrainPayload(tuple(data), "cross_entropy")


def weighted(data: Sequence[Datum] = DATA) -> TrainPayload:
    """Cross-entropy with weights of both signs, and zeros."""
    return TrainPayload(tuple(_with(d, weights=_quarters("weights", d, -2, 5)) for d in data), "cross_entropy")


def payload(loss: str, expected: Expected) -> TrainPayload:
    """A request of a loss whose `logprobs` are near those of adapter "a", as after sampling from it."""
    if loss == "cross_entropy":
        return weighted()
    data = [_policy(d, lp, loss, i) for i, (d, lp) in enumerate(zip(DATA, expected.logprobs("a"), strict=True))]
    return TrainPayload(tuple(data), loss)


def wide(loss: str, expected: Expected) -> TrainPayload:
    """The same with several targets a position."""
    if loss == "cross_entropy":
        return weighted(WIDE)
    data = [_policy(d, lp, loss, i) for i, (d, lp) in enumerate(zip(WIDE, expected.wide_logprobs(), strict=True))]
    return TrainPayload(tuple(data), loss)


def broken(expected: Expected) -> TrainPayload:
    """Importance sampling with a ratio that overflows at one position whose advantage counts (L11)."""
    good = payload("importance_sampling", expected)
    one = good.data[1]
    logprobs, advantages = one.inputs["logprobs"].copy(), one.inputs["advantages"].copy()
    logprobs[7], advantages[7] = -900.0, 1.0
    data = (good.data[0], _with(one, logprobs=logprobs, advantages=advantages), *good.data[2:])
    return replace(good, data=data)


def _policy(datum: Datum, lp: Array, loss: str, index: int) -> Datum:
    name = f"{loss}/{datum.tokens.tobytes().hex()}"
    if loss == "gspo":
        # All of a sequence's tokens near one ratio; which is the exact mean does not matter, the margins are wide.
        ratios = np.full(lp.shape, _SEQUENCE_RATIOS[index]) + integers(name, lp.shape, -4, 4) / 100
    else:
        ratios = _RATIOS[integers(name, lp.shape, 0, len(_RATIOS) - 1)]
    old = np.round(lp - np.log(ratios), 4).astype(np.float32)
    inputs = _with(datum, logprobs=old, advantages=_quarters("advantages", datum, -6, 6))
    return _with(inputs, sequence_ratio_mask=np.ones(lp.shape, np.float32)) if loss == "gspo" else inputs


def _quarters(name: str, datum: Datum, low: int, high: int) -> Array:
    shape = datum.inputs["target_tokens"].shape
    return (integers(f"{name}/{datum.tokens.tobytes().hex()}", shape, low, high) / 4).astype(np.float32)


def _with(datum: Datum, **inputs: Array) -> Datum:
    return replace(datum, inputs={**datum.inputs, **inputs})


# ---- sampling ----


def greedy(prompt: Sequence[int], count: int, **changes: object) -> SamplePayload:
    """The likeliest tokens, with no stop; `changes` to `SamplingParams`."""
    params = replace(SamplingParams(max_tokens=count, temperature=0.0, stop=()), **changes)
    return SamplePayload(np.array(prompt, np.int32), params=params)


def draws(count: int, **changes: object) -> SamplePayload:
    """`count` tokens that may follow `PROMPT`, each drawn alone."""
    params = replace(SamplingParams(max_tokens=1, seed=SEED, stop=()), **changes)
    return SamplePayload(np.array(PROMPT, np.int32), count, params)


def same_beginning() -> list[SamplePayload]:
    """Requests of different lengths and without a seed that begin as `PROMPT` does."""
    free = replace(draws(1).params, seed=None, max_tokens=3)
    ends = [tokens(f"beside {i}", 3 + 5 * i) for i in range(3)]
    return [SamplePayload(np.array(PROMPT[:66] + end, np.int32), params=free) for end in ends]


def scored(prompt: Sequence[int] = PROMPT, **reports: object) -> SamplePayload:
    """A prompt whose tokens are scored; `reports` are further fields of `SamplePayload`."""
    plain_params = SamplingParams(max_tokens=1, temperature=0.5, seed=3, stop=())
    return replace(SamplePayload(np.array(prompt, np.int32), params=plain_params, prompt_logprobs=True), **reports)
