"""What a case measures, and how far off a backend may be for its dtype (training-semantics, section 6)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from openrl.errors import ModelError
from openrl.selftest.hashing import signs
from openrl.types import Array

_DOTS = 2  # of a tensor with fixed random signs; their squares estimate its squared length


@dataclass(frozen=True, slots=True)
class Figure:
    """A distance from what is right, and the most that it may be."""

    what: str
    found: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.found <= self.limit  # false for NaN

    @property
    def share(self) -> float:
        """Of the limit, for a comparison of figures; infinite where nothing is tolerated or the figure is no number."""
        if self.ok:
            return self.found / self.limit if self.limit else 0.0
        return self.found / self.limit if self.limit and math.isfinite(self.found) else math.inf

    def __str__(self) -> str:
        if not self.limit:
            return f"{self.what}: {'yes' if self.ok else 'no'}"
        return f"{self.what}: {self.found:.2g}, at most {self.limit:.2g}"


def holds(what: str, true: bool) -> Figure:
    """A figure for what is either so or not."""
    return Figure(what, 0.0 if true else 1.0, 0.0)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Limits for a dtype. "Against the reference" is float64; "the same" is one backend in another batch (B1-B3)."""

    logprob: float  # against the reference, worst token
    mean: float  # the same, mean over tokens
    loss: float  # against the reference, for each unit of the loss's gradient by its logprobs
    gradient: float  # against the reference, ||dG|| / ||G||
    steps: float  # as `loss`, after steps of the optimizer
    same: float  # logprobs of the same tokens in another batch, worst token
    same_gradient: float
    agreement: float  # KL v2 between sampler and trainer (S14)
    other_draws: float  # share of seeded draws that may differ in another batch (S11)


TOLERANCES: Mapping[str, Tolerance] = MappingProxyType(
    {
        "float32": Tolerance(
            logprob=1e-4,
            mean=1e-5,
            loss=2e-5,
            gradient=1e-4,
            steps=2e-4,
            same=1e-5,
            same_gradient=1e-5,
            agreement=1e-8,
            other_draws=0.0,
        ),
        "bfloat16": Tolerance(
            logprob=0.2,
            mean=6e-2,
            loss=3e-2,
            gradient=0.1,
            steps=5e-2,
            same=5e-2,
            same_gradient=2e-2,
            agreement=1e-3,
            other_draws=0.25,
        ),
    }
)


def tolerance(dtype: str) -> Tolerance:
    """Raises `ModelError` for a dtype that has none."""
    if dtype not in TOLERANCES:
        raise ModelError(f"the self-test has no tolerances for {dtype}.", f"It knows {', '.join(TOLERANCES)}.")
    return TOLERANCES[dtype]


def far(what: str, found: Sequence[Array], wanted: Sequence[Array], limit: Tolerance) -> list[Figure]:
    """Figures for logprobs against the reference: their shapes, the worst and the mean token."""
    shapes = [np.shape(x) for x in found] == [np.shape(x) for x in wanted]
    if not shapes:
        return [holds(f"shapes of {what}", shapes)]
    gap = np.abs(flat(found) - flat(wanted))
    return [
        Figure(f"{what}, worst token", _most(gap), limit.logprob),
        Figure(f"{what}, mean", float(gap.mean()), limit.mean),
    ]


def apart(found: Sequence[Array], wanted: Sequence[Array]) -> float:
    """The largest difference between arrays of one shape; NaN if they are not, or hold one."""
    if [np.shape(x) for x in found] != [np.shape(x) for x in wanted]:
        return math.nan
    return _most(np.abs(flat(found) - flat(wanted)))


def flat(arrays: Sequence[Array]) -> Array:
    """All numbers as float64, end to end."""
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in arrays])


def _most(values: Array) -> float:
    return float(values.max()) if values.size else 0.0  # NaN if there is one


# ---- gradients ----


Sketch = Mapping[str, Sequence[float]]


def sketch(tensors: Mapping[str, Array]) -> dict[str, list[float]]:
    """A few numbers for each tensor from which a distance between two gradients can be told: dot products with random
    signs. They are linear: the sketch of a sum is the sum of the sketches."""
    return {name: [_dot(name, k, tensor) for k in range(_DOTS)] for name, tensor in tensors.items()}


def _dot(name: str, k: int, tensor: Array) -> float:
    return float(signs(f"{k}/{name}", tensor.size) @ np.asarray(tensor, np.float64).ravel())


def added(*sketches: Sketch) -> dict[str, list[float]]:
    """The sketch of a sum of gradients."""
    return {name: np.sum([one[name] for one in sketches], axis=0).tolist() for name in sketches[0]}


def off(what: str, gradient: Mapping[str, Array], wanted: Sketch, limit: float) -> list[Figure]:
    """Figures for a gradient against the sketch of the right one: ||dG|| / ||G||, to about a tenth of itself."""
    if gradient.keys() != wanted.keys():
        missing = sorted(wanted.keys() - gradient.keys()) or sorted(gradient.keys() - wanted.keys())
        return [holds(f"{what} has exactly the adapter's tensors, not so {missing[0]}", False)]
    found = sketch(gradient)
    gaps = {name: float(np.mean(np.square(np.subtract(found[name], wanted[name])))) for name in wanted}
    size = sum(float(np.mean(np.square(dots))) for dots in wanted.values())
    worst = max(gaps, key=lambda name: gaps[name])
    return [Figure(f"{what} (most in {worst})", math.sqrt(sum(gaps.values()) / size), limit)]


def distance(found: Mapping[str, Array], wanted: Mapping[str, Array]) -> float:
    """||found - wanted|| / ||wanted|| over all tensors together; NaN if they differ in names or shapes."""
    if found.keys() != wanted.keys() or any(found[n].shape != wanted[n].shape for n in wanted):
        return math.nan
    names = list(wanted)
    whole = flat([wanted[n] for n in names])
    gap, size = np.linalg.norm(flat([found[n] for n in names]) - whole), np.linalg.norm(whole)
    return float(gap / size) if size else float(gap)
