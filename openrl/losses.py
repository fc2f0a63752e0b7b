"""The losses, by definition: float64 value and hand-written gradient of each (training-semantics 1.1-1.8).

A loss sees one datum: `lp`, the logprobs of its targets, and its inputs. It returns the plain sum over positions (L3)
and g = dL/dlp. Engines bring `lp` to the host, where it is due anyway as a result, call `evaluate` and push g
back through the model; so every engine computes the same loss, and there is one place where it is written down.

`LOSSES` says what each loss takes; requests are checked against it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from openrl.types import Array, FloatArray

Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]

THRESHOLDS = ("clip_low_threshold", "clip_high_threshold")
_NO_CONFIG: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class LossSpec:
    """What a loss takes (1.2). `required` and `optional` name inputs, `config` its settings with their defaults.

    All inputs have shape [N], or [N, K] where `rank2`; save for the thresholds, which are [1] or [N] (L16).
    """

    required: frozenset[str]
    optional: frozenset[str]
    config: Mapping[str, float] = field(default_factory=lambda: _NO_CONFIG)
    rank2: bool = False


@dataclass(frozen=True, slots=True)
class Loss:
    """Value of a datum's loss, `grad` = dL/dlp float32 of lp's shape, and its part of each metric `name:reduction`,
    which are summed over datums, or averaged where the name says `mean`."""

    total: float
    grad: FloatArray
    sums: Mapping[str, float]

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.total) and np.isfinite(self.grad).all())


@dataclass(frozen=True, slots=True)
class _Terms:
    """Per position: the loss term, its derivative by lp, and whether the ratio was clipped. Zeros where masked."""

    values: Float64
    grads: Float64
    clipped: Bool | None = None


def evaluate(name: str, lp: FloatArray, inputs: Mapping[str, Array], config: Mapping[str, float | str]) -> Loss:
    """The loss of one datum whose targets have logprobs `lp` ([N] or [N, K]).

    Overflow shows as a non-finite result (L11), never as a clamped one; `Loss.finite` is for the caller to check.
    """
    lp64 = lp.astype(np.float64)
    given = {key: value.astype(np.float64) for key, value in inputs.items() if key != "target_tokens"}
    settings = {**LOSSES[name].config, **{key: float(value) for key, value in config.items()}}
    # A position that counts for nothing contributes exact zeros even where lp is infinite: it is never computed (L7).
    live = _live(name, lp64.shape, given)
    with np.errstate(all="ignore"):
        terms = _DEFINITIONS[name](lp64, given, settings, live)
        grad = terms.grads.astype(np.float32)
    return Loss(float(terms.values.sum()), grad, _sums(lp64, given, live, terms))


def _live(name: str, shape: tuple[int, ...], given: Mapping[str, Array]) -> Bool:
    live = np.ones(shape, dtype=np.bool_)
    if "weights" in given:
        live &= given["weights"] != 0
    if "advantages" in given and name != "dro":  # DRO's penalty does not vanish with the advantage (1.7)
        live &= given["advantages"] != 0
    return live


def _sums(lp: Float64, given: Mapping[str, Float64], live: Bool, terms: _Terms) -> dict[str, float]:
    """Numerators and denominators; never means, which would not survive the client's chunking (1.11)."""
    sums = {"tokens:sum": float(live.sum())}
    if "logprobs" in given:
        sums["kl_sample_train_v1:sum"] = float((given["logprobs"] - lp)[live].sum())
    if terms.clipped is not None:
        sums["clipped_tokens:sum"] = float(terms.clipped.sum())
    return sums


def _weights(given: Mapping[str, Float64], live: Bool) -> Float64:
    """`weights` at the live positions; absent means ones. With an RL loss it multiplies the token's term (L17)."""
    return given["weights"][live] if "weights" in given else np.ones(int(live.sum()))


def _bounds(given: Mapping[str, Float64], config: Mapping[str, float], live: Bool) -> tuple[Float64, Float64]:
    """Lowest and highest ratio at the live positions; a datum's own values go before the config's (L16)."""

    def bound(key: str) -> Float64:
        value = given.get(key, np.asarray(config[key]))
        return np.broadcast_to(value, live.shape)[live]

    return bound(THRESHOLDS[0]), bound(THRESHOLDS[1])


def _spread(live: Bool, values: Float64, grads: Float64, clipped: Bool | None = None) -> _Terms:
    """Terms of the live positions put back in place, zeros elsewhere."""

    def full(part: Float64) -> Float64:
        out = np.zeros(live.shape)
        out[live] = part
        return out

    return _Terms(full(values), full(grads), clipped)


def _cross_entropy(lp: Float64, given: Mapping[str, Float64], config: Mapping[str, float], live: Bool) -> _Terms:
    """L = -sum w lp (1.4)."""
    w = _weights(given, live)
    return _spread(live, -w * lp[live], -w)


def _importance_sampling(lp: Float64, given: Mapping[str, Float64], config: Mapping[str, float], live: Bool) -> _Terms:
    """L = -sum r A with the gradient through r (1.5)."""
    term = -_weights(given, live) * _ratio(lp, given, live) * given["advantages"][live]
    return _spread(live, term, term)


def _ppo(lp: Float64, given: Mapping[str, Float64], config: Mapping[str, float], live: Bool) -> _Terms:
    """L = -sum min(r A, clamp(r) A) (1.6)."""
    return _clipped_surrogate(_ratio(lp, given, live), given, config, live)


def _cispo(lp: Float64, given: Mapping[str, Float64], config: Mapping[str, float], live: Bool) -> _Terms:
    """L = -sum sg(clamp(r)) lp A: clipping bounds the gradient but never removes it (1.6)."""
    ratio = _ratio(lp, given, live)
    bounded = np.clip(ratio, *_bounds(given, config, live))
    grad = -_weights(given, live) * bounded * given["advantages"][live]
    return _spread(live, grad * lp[live], grad, bounded != ratio)


def _dro(lp: Float64, given: Mapping[str, Float64], config: Mapping[str, float], live: Bool) -> _Terms:
    """L = -sum (lp A - beta/2 (lp - q)^2) at every position of non-zero weight (1.7)."""
    w, a, gap = _weights(given, live), given["advantages"][live], (lp - given["logprobs"])[live]
    beta = config["beta"]
    return _spread(live, -w * (lp[live] * a - 0.5 * beta * gap**2), w * (beta * gap - a))


def _gspo(lp: Float64, given: Mapping[str, Float64], config: Mapping[str, float], live: Bool) -> _Terms:
    """PPO's form with one ratio for the sequence, the geometric mean over the masked positions (1.8)."""
    inside = given["sequence_ratio_mask"] != 0
    ratio = np.exp((lp - given["logprobs"])[inside].mean())
    return _clipped_surrogate(np.full(int(live.sum()), ratio), given, config, live)


def _ratio(lp: Float64, given: Mapping[str, Float64], live: Bool) -> Float64:
    return np.exp((lp - given["logprobs"])[live])


def _clipped_surrogate(ratio: Float64, given: Mapping[str, Float64], config: Mapping[str, float], live: Bool) -> _Terms:
    w, a = _weights(given, live), given["advantages"][live]
    free, bounded = ratio * a, np.clip(ratio, *_bounds(given, config, live)) * a
    # In range both are equal and the gradient is the whole of -r A, hence <= (1.6).
    kept = free <= bounded
    return _spread(live, -w * np.minimum(free, bounded), np.where(kept, -w * free, 0.0), ~kept)


_Definition = Callable[[Float64, Mapping[str, Float64], Mapping[str, float], Bool], _Terms]

_DEFINITIONS: Mapping[str, _Definition] = MappingProxyType(
    {
        "cross_entropy": _cross_entropy,
        "importance_sampling": _importance_sampling,
        "ppo": _ppo,
        "cispo": _cispo,
        "dro": _dro,
        "gspo": _gspo,
    }
)

_RL = frozenset({"target_tokens", "logprobs", "advantages"})
_WEIGHTS = frozenset({"weights"})
_CLIPPED = _WEIGHTS | frozenset(THRESHOLDS)

LOSSES: Mapping[str, LossSpec] = MappingProxyType(
    {
        "cross_entropy": LossSpec(frozenset({"target_tokens"}), _WEIGHTS, rank2=True),
        "importance_sampling": LossSpec(_RL, _WEIGHTS, rank2=True),
        "ppo": LossSpec(_RL, _CLIPPED, {THRESHOLDS[0]: 0.8, THRESHOLDS[1]: 1.2}),
        "cispo": LossSpec(_RL, _CLIPPED, {THRESHOLDS[0]: 0.0, THRESHOLDS[1]: 4.0}),
        "dro": LossSpec(_RL, _WEIGHTS, {"beta": 0.05}),
        "gspo": LossSpec(_RL | {"sequence_ratio_mask"}, _CLIPPED, {THRESHOLDS[0]: 0.8, THRESHOLDS[1]: 1.2}),
    }
)
