"""AdamW in MLX: the table of training-semantics 3.1 to nine digits, and the same steps as PyTorch's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from openrl.errors import BadRequest
from openrl.types import AdamParams, LoraSpec

mx = pytest.importorskip("mlx.core", reason="MLX is not installed")

PLAIN = AdamParams(learning_rate=1e-3)
DECAY = AdamParams(learning_rate=1e-3, weight_decay=0.1, grad_clip_norm=1.0)
HALF = AdamParams(learning_rate=5e-4)
SLOW = AdamParams(learning_rate=1e-3, beta1=0.8, beta2=0.99)

CASES = {
    "plain": [
        (PLAIN, [3, -4], [0.999000, -1.999000]),
        (PLAIN, [0.6, 0.8], [0.998187471, -1.998482936]),
        (HALF, [0, 0], [0.997869367, -1.998280506]),
    ],
    "decay and clip": [
        (DECAY, [3, -4], [0.998900, -1.998800]),
        (DECAY, [0.3, 0.4], [0.997860817, -1.998331751]),
        (DECAY, [0, 0], [0.997025566, -1.997921785]),
    ],
    "changing betas": [(PLAIN, [3, -4], [0.999000, -1.999000]), (SLOW, [0.6, 0.8], [0.998789499, -1.998929833])],
}


def two_parameters() -> Any:
    """A run whose only trainable values are [1, -2]."""
    from openrl.backends.mps.lora import Adapter
    from openrl.backends.mps.trainable import Trainable

    return Trainable(Adapter(LoraSpec(1, 0), {"layer": mx.array([[1.0]])}, {"layer": mx.array([[-2.0]])}))


def give(run: Any, gradient: list[float]) -> None:
    a, b = gradient
    run.give(run.joined(None, {"layer.lora_A": mx.array([[a]]), "layer.lora_B": mx.array([[b]])}))


@pytest.mark.parametrize("case", list(CASES))
def test_o1_o7_table(case: str) -> None:
    """O1-O3, O7, through float32 state, with the gradient given in two parts (G1); a zero G needs none (G9)."""
    run = two_parameters()
    for adam, g, after in CASES[case]:
        if any(g):
            give(run, [g[0] / 2, g[1]])
            give(run, [g[0] / 2, 0.0])
        assert run.step(adam).metrics["grad_norm:mean"] == pytest.approx(math.hypot(*g))
        np.testing.assert_allclose(np.array(run.theta), after, atol=3e-7)
        assert float(run.adapter.a["layer"].item()) == float(run.theta[0].item())  # the adapter moves along
    assert run.t == len(CASES[case])


@pytest.mark.skipif(mx.default_device().type != mx.DeviceType.cpu, reason="float64 is the CPU's")
@pytest.mark.parametrize("case", list(CASES))
def test_o1_o7_table_to_nine_digits(case: str) -> None:
    """The step function in float64."""
    from openrl.backends.mps.optim import adamw

    theta, m, v = mx.array([1.0, -2.0], mx.float64), mx.zeros(2, mx.float64), mx.zeros(2, mx.float64)
    for t, (adam, g, after) in enumerate(CASES[case], start=1):
        theta, m, v, norm = adamw(theta, mx.array(g, mx.float64), m, v, t, adam)
        assert norm == pytest.approx(math.hypot(*g))
        np.testing.assert_allclose(np.array(theta), after, rtol=0, atol=1e-9)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_o8_non_finite_gradient_is_dropped(bad: float) -> None:
    """O8: theta, m, v and t stay, G is cleared, and the next step works."""
    run = two_parameters()
    give(run, [3.0, -4.0])
    run.step(PLAIN)
    before = np.array(run.theta), np.array(run.m), run.t
    give(run, [1.0, bad])
    with pytest.raises(BadRequest, match="not finite"):
        run.step(PLAIN)
    assert np.array_equal(np.array(run.theta), before[0])
    assert np.array_equal(np.array(run.m), before[1])
    assert run.t == before[2]
    give(run, [0.6, 0.8])
    run.step(PLAIN)
    np.testing.assert_allclose(np.array(run.theta), CASES["plain"][1][2], atol=3e-7)


def test_large_and_small_gradients() -> None:
    """Squares overflow float32 where the entries do not; O6: 1e-9 moves by 0.999 lr, and exact zeros stay."""
    run = two_parameters()
    give(run, [3e25, -4e25])
    clipped = run.step(AdamParams(grad_clip_norm=1.0))
    assert clipped.metrics["grad_norm:mean"] == pytest.approx(5e25, rel=1e-6)
    assert np.isfinite(np.array(run.theta)).all()
    other = two_parameters()
    give(other, [1e-9, 0.0])
    other.step(PLAIN)
    assert 1 - float(other.theta[0].item()) == pytest.approx(0.999e-3, rel=1e-4)
    assert float(other.theta[1].item()) == -2.0


def test_g9_step_without_any_gradient_counts_and_only_decays() -> None:
    """G9: not an error; t moves on."""
    run = two_parameters()
    run.step(AdamParams(learning_rate=0.1, weight_decay=0.5))
    assert run.t == 1
    np.testing.assert_allclose(np.array(run.theta), [0.95, -1.9], rtol=1e-6)
