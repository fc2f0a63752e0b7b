"""AdamW: the table of training-semantics 3.1, in float64 to nine digits and through a run's float32 state."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from openrl.backends.torch.lora import Adapter
from openrl.backends.torch.optim import adamw_, global_norm
from openrl.backends.torch.trainable import Trainable
from openrl.errors import BadRequest
from openrl.types import AdamParams, LoraSpec

PLAIN = AdamParams(learning_rate=1e-3)
DECAY = AdamParams(learning_rate=1e-3, weight_decay=0.1, grad_clip_norm=1.0)
HALF = AdamParams(learning_rate=5e-4)
SLOW = AdamParams(learning_rate=1e-3, beta1=0.8, beta2=0.99)

CASES = {
    "plain": [
        (PLAIN, [3, -4], [0.999000, -1.999000], [0.3, -0.4], [0.45, 0.8]),
        (PLAIN, [0.6, 0.8], [0.998187471, -1.998482936], [0.33, -0.28], [0.4455, 0.792]),
        (HALF, [0, 0], [0.997869367, -1.998280506], [0.297, -0.252], [0.423225, 0.7524]),
    ],
    "decay and clip": [
        (DECAY, [3, -4], [0.998900, -1.998800], [0.06, -0.08], [0.018, 0.032]),
        (DECAY, [0.3, 0.4], [0.997860817, -1.998331751], [0.084, -0.032], [0.0216, 0.0384]),
        (DECAY, [0, 0], [0.997025566, -1.997921785], [0.0756, -0.0288], [0.02052, 0.03648]),
    ],
    "changing betas": [
        (PLAIN, [3, -4], [0.999000, -1.999000], [0.3, -0.4], [0.45, 0.8]),
        (SLOW, [0.6, 0.8], [0.998789499, -1.998929833], [0.36, -0.16], [0.4491, 0.7984]),
    ],
}


def two_parameters() -> Trainable:
    """A run whose only trainable values are [1, -2]."""
    spec = LoraSpec(rank=1, seed=0)
    adapter = Adapter(spec, {"layer": torch.tensor([[1.0]])}, {"layer": torch.tensor([[-2.0]])})
    return Trainable(adapter)


def give(run: Trainable, gradient: list[float]) -> None:
    a, b = gradient
    run.accumulate({"layer.lora_A": torch.tensor([[a]]), "layer.lora_B": torch.tensor([[b]])})


@pytest.mark.parametrize("case", list(CASES))
def test_table_to_nine_digits(case: str) -> None:
    """O1-O3, O7 on the step function."""
    theta = torch.tensor([1.0, -2.0], dtype=torch.float64)
    m, v = torch.zeros_like(theta), torch.zeros_like(theta)
    for t, (adam, g, after, m_after, v_after) in enumerate(CASES[case], start=1):
        norm = adamw_(theta, torch.tensor(g, dtype=torch.float64), m, v, t, adam)
        assert norm == pytest.approx(math.hypot(*g))
        # The table's own digits: nine where it gives nine; clipped rows shift g by 2e-7 (O2).
        np.testing.assert_allclose(theta, after, rtol=0, atol=6e-10 if case == "plain" else 1e-9)
        np.testing.assert_allclose(m, m_after, rtol=1e-5, atol=1e-12)
        np.testing.assert_allclose(v, v_after, rtol=1e-5)


@pytest.mark.parametrize("case", list(CASES))
def test_table_through_a_run(case: str) -> None:
    """The same through float32 state, with the gradient given in two parts (G1); a zero G needs no gradient (G9)."""
    run = two_parameters()
    for adam, g, after, m_after, v_after in CASES[case]:
        if any(g):
            give(run, [g[0] / 2, g[1]])
            give(run, [g[0] / 2, 0.0])
        metrics = run.step(adam).metrics
        assert metrics["grad_norm:mean"] == pytest.approx(math.hypot(*g))  # before clipping
        assert metrics["lr:mean"] == adam.learning_rate
        assert all(key.count(":") == 1 for key in metrics)
        np.testing.assert_allclose(run.theta, after, atol=3e-7)
        np.testing.assert_allclose(run.m, m_after, rtol=1e-5, atol=1e-8)
        np.testing.assert_allclose(run.v, v_after, rtol=1e-5)
    assert run.t == len(CASES[case])


def test_g9_step_without_any_gradient_counts_and_only_decays() -> None:
    """G9: not an error; t moves on, so the next real step's bias correction knows of it."""
    run, other = two_parameters(), two_parameters()
    run.step(PLAIN)
    assert run.t == 1
    assert run.theta.tolist() == [1.0, -2.0]
    give(other, [0.0, 0.0])
    other.step(PLAIN)
    for one in (run, other):
        give(one, [3.0, -4.0])
        one.step(DECAY)
    assert run.theta.tolist() == other.theta.tolist()
    decayed = two_parameters()
    decayed.step(AdamParams(learning_rate=0.1, weight_decay=0.5))
    np.testing.assert_allclose(decayed.theta, [0.95, -1.9], rtol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_o8_non_finite_gradient_is_dropped(bad: float) -> None:
    """O8: theta, m, v and t stay, G is cleared, and the next step works."""
    run = two_parameters()
    give(run, [3.0, -4.0])
    run.step(PLAIN)
    assert run.m is not None
    before = (run.theta.clone(), run.m.clone(), run.t)
    give(run, [1.0, bad])
    with pytest.raises(BadRequest, match="not finite"):
        run.step(PLAIN)
    assert torch.equal(run.theta, before[0])
    assert torch.equal(run.m, before[1])
    assert run.t == before[2]
    give(run, [0.6, 0.8])
    run.step(PLAIN)
    np.testing.assert_allclose(run.theta, CASES["plain"][1][2], atol=3e-7)


def test_o8_on_the_first_step() -> None:
    """O8 before there are moments."""
    run = two_parameters()
    give(run, [math.nan, 0.0])
    with pytest.raises(BadRequest):
        run.step(PLAIN)
    assert (run.m, run.v, run.t) == (None, None, 0)


def test_large_finite_gradient_is_finite() -> None:
    """Squares overflow float32 where the entries do not; the norm is still right."""
    run = two_parameters()
    give(run, [3e25, -4e25])
    assert run.step(AdamParams(grad_clip_norm=1.0)).metrics["grad_norm:mean"] == pytest.approx(5e25, rel=1e-6)
    assert torch.isfinite(run.theta).all()


def test_o2_the_norm_of_very_many_parameters() -> None:
    """O2: to 1e-5 also of a hundred million of them, a whole model's; one float32 sum of the squares is off by 1e-2."""
    size = (1 << 26) + 3
    gradient = torch.full((size,), 0.3)
    gradient[-2:] = 300.0
    wanted = math.sqrt((size - 2) * 0.09 + 2 * 300.0**2)
    assert global_norm(gradient) == pytest.approx(wanted, rel=1e-5)
    assert global_norm(gradient[:5]) == pytest.approx(0.3 * math.sqrt(5))


def test_o6_small_gradients_move_by_lr_and_zeros_stay() -> None:
    """O6: with eps 1e-12 a gradient of 1e-9 moves its parameter by 0.999 lr; 0 / (0 + eps) is 0."""
    run = two_parameters()
    give(run, [1e-9, 0.0])
    run.step(PLAIN)
    assert 1 - float(run.theta[0]) == pytest.approx(0.999e-3, rel=1e-4)
    assert float(run.theta[1]) == -2.0


def test_o11_losing_t_would_show() -> None:
    """O11: m and v of plain step 2 with t reset to 0 make step 3 larger by 1.604562."""
    run = two_parameters()
    for adam, g, *_ in CASES["plain"][:2]:
        give(run, g)
        run.step(adam)
    assert run.m is not None
    assert run.v is not None
    steps = []
    for t in (2, 0):
        other = two_parameters()
        other.restore(other.views(run.m), other.views(run.v), t)
        other.step(PLAIN)
        steps.append(1 - float(other.theta[0]))
    assert steps[1] / steps[0] == pytest.approx(1.604562, rel=1e-4)
