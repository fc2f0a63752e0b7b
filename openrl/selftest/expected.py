"""The right answers, computed once in float64 by `tests/contract/expect.py`, which also says how they came about."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from openrl.selftest.measures import Sketch
from openrl.types import Array

FILE = "expected.json"


@dataclass(frozen=True, slots=True)
class LossAnswer:
    """Of one request: `total` is the loss, `weight` the sum of |dL/dlp| over its targets, `norm` that of the gradient
    by the adapter, which `sketch` stands for."""

    total: float
    weight: float
    norm: float
    sketch: Sketch


@dataclass(frozen=True, slots=True)
class Drawn:
    """A greedy continuation: each of its tokens is likelier than all others by a clear margin."""

    prompt: list[int]
    tokens: list[int]
    logprobs: Array


class Expected:
    """One family's answers. Adapters go by name, "base" is none."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = raw

    def logprobs(self, adapter: str) -> list[Array]:
        """Of each datum's targets in `data.DATA`."""
        return [np.array(row) for row in self._raw["logprobs"][adapter]]

    def wide_logprobs(self) -> list[Array]:
        """Of the targets [N, K] in `data.WIDE`, under adapter "a"."""
        return [np.array(row) for row in self._raw["wide_logprobs"]]

    def loss(self, name: str) -> LossAnswer:
        """Of a loss under adapter "a", or of one of the other requests that `tests/contract/expect.py` names."""
        return LossAnswer(**self._raw["losses"][name])

    def full(self) -> LossAnswer | None:
        """Of `data.weighted()` by the base model's own parameters; None for a family whose names differ by version."""
        raw = self._raw["full"]
        return None if raw is None else LossAnswer(**raw)

    def steps(self) -> tuple[list[float], list[float]]:
        """Losses before each of three steps and after them, and what is `LossAnswer.weight` in each case."""
        return self._raw["steps"]["totals"], self._raw["steps"]["weights"]

    def greedy(self, adapter: str) -> Drawn:
        return _drawn(self._raw["greedy"][adapter])

    def until_eos(self) -> Drawn:
        """By the base model; ends with the end-of-sequence token."""
        return _drawn(self._raw["until_eos"])

    def prompt(self, adapter: str) -> Array:
        """Logprobs [N - 1] of all tokens of `data.PROMPT` but the first."""
        return np.array(self._raw["prompt"][adapter])

    def top(self, adapter: str) -> tuple[Array, Array]:
        """Ids and logprobs [N - 1, 3] of the likeliest tokens at each of these places."""
        return np.array(self._raw["top"][adapter]["ids"]), np.array(self._raw["top"][adapter]["logprobs"])

    def following(self, adapter: str) -> Array:
        """Logprobs [V] of what follows `data.PROMPT`."""
        return np.array(self._raw["following"][adapter])


def _drawn(raw: Mapping[str, Any]) -> Drawn:
    return Drawn(raw["prompt"], raw["tokens"], np.array(raw["logprobs"]))


@cache
def load() -> Mapping[str, Mapping[str, Any]]:
    """All families' answers as they are stored."""
    return json.loads(resources.files("openrl.selftest").joinpath(FILE).read_text())


def of(family: str) -> Expected:
    return Expected(load()[family])
