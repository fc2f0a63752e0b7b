"""The worked numbers of training-semantics 1.3-1.9: values and g, by definition and by autograd on the reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from openrl.losses import LOSSES, Loss, evaluate
from openrl.types import Array
from support import reference

Z = torch.tensor(
    [[2, 1, 0, -1], [0.5, 1.5, -0.5, 0], [0, 0, 1, 2], [1, 1, 1, 1], [-1, 0, 3, 0.5], [0.2, -0.3, 0.7, 1.1]],
    dtype=torch.float64,
)
X = np.array([0, 1, 2, 3, 0, 1])
Q = np.array([-0.85, -1.0, -1.0, -1.435, -5.8, -1.7], dtype=np.float32)
A = np.array([1, -1, -2, 0.5, 1, 1], dtype=np.float32)
# The same datum with its first two positions as a prompt (1.7, 1.8).
PROMPT_Q = np.array([0, 0, -1, -1.435, -5.8, -1.7], dtype=np.float32)
PROMPT_A = np.array([0, 0, -2, 0.5, 1, 1], dtype=np.float32)
PROMPT_MASK = np.array([0, 0, 1, 1, 1, 1], dtype=np.float32)
ONES = np.ones(6, dtype=np.float32)


def logprobs(targets: Array, rows: int = 6) -> Array:
    """Float32 logprobs of the fixture's logits."""
    every = torch.log_softmax(Z[:rows], dim=1)
    picked = every.gather(1, torch.from_numpy(targets).reshape(rows, -1))
    return picked.reshape(targets.shape).float().numpy()


def check(
    name: str, inputs: Mapping[str, Array], config: Mapping[str, Any], total: float, g: Any, lp: Array | None = None
) -> Loss:
    """Value and gradient by the definition, and by autograd on an independent expression."""
    inputs = {"target_tokens": X, **inputs}
    lp = logprobs(inputs["target_tokens"], len(inputs["target_tokens"])) if lp is None else lp
    found = evaluate(name, lp, inputs, config)
    assert found.total == pytest.approx(total, abs=3e-6)
    assert found.grad.dtype == np.float32
    np.testing.assert_allclose(found.grad, np.array(g), atol=2e-6)
    leaf = torch.tensor(lp, dtype=torch.float64, requires_grad=True)
    expected = reference.loss(name, leaf, inputs, config)
    (grad,) = torch.autograd.grad(expected, leaf)
    assert found.total == pytest.approx(float(expected.detach()), abs=1e-6)
    np.testing.assert_allclose(found.grad, grad.numpy(), atol=1e-6)
    return found


def rl(q: Array = Q, a: Array = A, **more: Array) -> dict[str, Array]:
    return {"logprobs": q, "advantages": a, **more}


def test_fixture_logprobs() -> None:
    """1.3."""
    expected = [-0.440190, -0.546006, -1.493812, -1.386294, -4.139925, -2.243069]
    np.testing.assert_allclose(logprobs(X), expected, atol=1e-6)


def test_cross_entropy() -> None:
    """1.4, and L3: a sum, not a mean; weights are real numbers."""
    w = np.array([0, 1, 1, 0.5, 1, 0], dtype=np.float32)
    check("cross_entropy", {"weights": w}, {}, 6.872890, -w)
    check("cross_entropy", {"weights": ONES}, {}, 10.249296, -ONES)
    check("cross_entropy", {}, {}, 10.249296, -ONES)  # absent weights are ones (1.2)
    check("cross_entropy", {"weights": -w}, {}, -6.872890, w)


def test_cross_entropy_rank_2() -> None:
    """1.4 top-K distillation."""
    w = np.array([[0.75, 0.25], [0, 0], [0.6, 0.4]], dtype=np.float32)
    x = np.array([[0, 1], [1, 3], [2, 2]])
    check("cross_entropy", {"target_tokens": x, "weights": w}, {}, 2.184001, -w)


def test_importance_sampling() -> None:
    """1.5: no clipping anywhere, and the gradient equals the token's term."""
    g = [-1.506532, 1.574588, 1.220591, -0.524956, -5.259705, -0.580963]
    check("importance_sampling", rl(), {}, -5.076975, g)


def test_importance_sampling_rank_2() -> None:
    """1.5 rank-2."""
    inputs = {
        "target_tokens": np.array([[0, 1], [1, 3], [2, 2]]),
        "logprobs": np.array([[-0.5, -1.4], [-0.6, -2.0], [-1.5, -1.5]], dtype=np.float32),
        "advantages": np.array([[1, -1], [0.5, 0], [0, -0.25]], dtype=np.float32),
    }
    g = [[-1.061635, 0.960607], [-0.527739, 0], [0, 0.251552]]
    check("importance_sampling", inputs, {}, -0.377215, g)


@pytest.mark.parametrize(
    ("config", "total", "g"),
    [
        ({}, -0.331330, [0, 1.574588, 0, -0.524956, 0, -0.580963]),
        ((0.5, 2.0), -1.817271, [-1.506532, 1.574588, 1.220591, -0.524956, 0, -0.580963]),
        ((0.9, 1.1), 0.068670, [0, 1.574588, 0, -0.524956, 0, -0.580963]),
    ],
)
def test_ppo(config: Any, total: float, g: list[float]) -> None:
    """1.6: tokens out of range keep their gradient where the unclipped term is the smaller."""
    check("ppo", rl(), bounds(config), total, g)


@pytest.mark.parametrize(
    ("config", "total", "g"),
    [
        ({}, 16.570674, [-1.506532, 1.574588, 1.220591, -0.524956, -4.0, -0.580963]),
        ((0.8, 1.2), 4.973030, [-1.2, 1.2, 1.6, -0.524956, -1.2, -0.8]),
    ],
)
def test_cispo(config: Any, total: float, g: list[float]) -> None:
    """1.6: clipping bounds the gradient and never removes it; the ratio is not differentiated."""
    check("cispo", rl(), bounds(config), total, g)


@pytest.mark.parametrize(
    ("beta", "total", "g"),
    [
        (None, 4.074477, [-0.979509, 1.022700, 1.975309, -0.497565, -0.916996, -1.027153]),
        (0.05, 4.074477, [-0.979509, 1.022700, 1.975309, -0.497565, -0.916996, -1.027153]),
        (0.01, 4.001056, [-0.995902, 1.004540, 1.995062, -0.499513, -0.983399, -1.005431]),
        (0.5, 4.900463, [-0.795095, 1.226997, 1.753094, -0.475647, -0.169963, -1.271534]),
    ],
)
def test_dro(beta: float | None, total: float, g: list[float]) -> None:
    """1.7."""
    check("dro", rl(), {} if beta is None else {"beta": beta}, total, g)


def test_dro_penalises_prompts_unless_weights_say_no() -> None:
    """1.7, the trap: A = 0 does not silence DRO, `weights` = 0 does (exactly, L7)."""
    lp = logprobs(X)
    inputs = {"target_tokens": X, **rl(PROMPT_Q, PROMPT_A)}
    found = evaluate("dro", lp, inputs, {})
    assert found.total == pytest.approx(4.183240, abs=2e-6)
    assert found.grad[0] == pytest.approx(-0.022009, abs=1e-6)
    masked = evaluate("dro", lp, {**inputs, "weights": PROMPT_MASK}, {})
    assert masked.grad[:2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("name", "total"), [("importance_sampling", -5.145031), ("ppo", -0.705918), ("cispo", 16.767249), ("dro", 4.183240)]
)
def test_prompt_variant(name: str, total: float) -> None:
    """1.7, last line."""
    found = evaluate(name, logprobs(X), {"target_tokens": X, **rl(PROMPT_Q, PROMPT_A)}, {})
    assert found.total == pytest.approx(total, abs=3e-6)


@pytest.mark.parametrize(
    ("config", "total", "g"),
    [
        ((0.8, 1.2), -0.591453, [0, 0, 2.365814, -0.591453, -1.182907, -1.182907]),
        ({}, -0.591453, [0, 0, 2.365814, -0.591453, -1.182907, -1.182907]),
        ((0.8, 1.1), -0.384186, [0, 0, 2.365814, 0, 0, 0]),
    ],
)
def test_gspo(config: Any, total: float, g: list[float]) -> None:
    """1.8: one ratio for the sequence."""
    check("gspo", rl(PROMPT_Q, PROMPT_A, sequence_ratio_mask=PROMPT_MASK), bounds(config), total, g)


def test_gspo_masks() -> None:
    """1.8: the mask picks whose ratios are averaged, by zero or not zero; all tokens are summed."""
    check("gspo", rl(sequence_ratio_mask=ONES), {}, -0.324933, [0, 1.291689, 2.583378, 0, 0, 0])
    g = [-0.719361, 0, 0, -0.359681, -0.719361, -0.719361]
    for mask in ([0, 0, 1, 1, 0, 1], [0, 0, 2, 1, 0, 1]):
        check("gspo", rl(sequence_ratio_mask=np.array(mask, dtype=np.float32)), {}, -0.117764, g)


def test_custom_loss_surrogate() -> None:
    """1.9: what the client's own loss sends as weights, and the value the server answers."""
    w = np.array([0, 0.182002, 0.497937, 0.462098, 1.379975, 0.747690], dtype=np.float32)
    check("cross_entropy", {"weights": w}, {}, 8.873916, -w)


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "gspo"])
@pytest.mark.parametrize("bad", [np.inf, -np.inf])
def test_l7_zero_advantage_is_exact_zero_where_the_ratio_is_infinite(name: str, bad: float) -> None:
    """L7."""
    lp = logprobs(X)
    lp[0] = bad
    mask = np.array([0, 1, 1, 1, 1, 1], dtype=np.float32)
    inputs: dict[str, Array] = {"target_tokens": X, **rl(a=A * mask)}
    if name == "gspo":
        inputs["sequence_ratio_mask"] = mask
    found = evaluate(name, lp, inputs, {})
    assert found.finite
    assert found.grad[0] == 0.0
    rest = {key: value[1:] for key, value in inputs.items()}
    assert found.total == evaluate(name, lp[1:], rest, {}).total


def test_l7_zero_weight_is_exact_zero() -> None:
    """L7 for cross_entropy: padding of top-K targets has weight 0 and may have logprob -inf."""
    lp = logprobs(X)
    lp[2] = -np.inf
    w = np.array([1, 1, 0, 1, 1, 1], dtype=np.float32)
    found = evaluate("cross_entropy", lp, {"target_tokens": X, "weights": w}, {})
    assert found.finite
    assert found.grad[2] == 0.0


def test_l11_overflow_shows() -> None:
    """L11: a ratio that overflows is reported, not clamped; where PPO clips it anyway, it is finite."""
    q = Q.copy()
    q[0] = -2000
    assert not evaluate("importance_sampling", logprobs(X), {"target_tokens": X, **rl(q)}, {}).finite
    assert evaluate("ppo", logprobs(X), {"target_tokens": X, **rl(q)}, {}).finite
    assert not evaluate("ppo", logprobs(X), {"target_tokens": X, **rl(q, -A)}, {}).finite


def test_l11_counts_what_float32_cannot_hold() -> None:
    """L11: float32's exp overflows above 88.7; so does the float32 gradient here."""
    q = np.where(np.arange(6) == 3, -95.0, Q).astype(np.float32)
    assert not evaluate("importance_sampling", logprobs(X), {"target_tokens": X, **rl(q)}, {}).finite


def test_l16_thresholds_of_the_datum_override_the_config() -> None:
    """L16: shape [1] or [N]."""
    one = {"clip_low_threshold": np.array([0.5], np.float32), "clip_high_threshold": np.array([2.0], np.float32)}
    g = [-1.506532, 1.574588, 1.220591, -0.524956, 0, -0.580963]
    check("ppo", rl(**one), bounds((0.9, 1.1)), -1.817271, g)
    each = {key: np.repeat(value, 6) for key, value in one.items()}
    check("ppo", rl(**each), {}, -1.817271, g)


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "dro"])
def test_l17_weights_multiply_the_term(name: str) -> None:
    """L17."""
    w = np.array([0.5, 0, 2, 1, -1, 1], dtype=np.float32)
    inputs = {"target_tokens": X, **rl()}
    plain, weighted = (evaluate(name, logprobs(X), i, {}) for i in (inputs, {**inputs, "weights": w}))
    np.testing.assert_allclose(weighted.grad, plain.grad * w, rtol=1e-6)
    check(name, rl(weights=w), {}, weighted.total, plain.grad * w)


def test_tie_in_range_keeps_the_whole_gradient() -> None:
    """1.6: at r = 1 both branches of PPO are equal and the gradient is -r A, not half of it."""
    found = evaluate("ppo", logprobs(X), {"target_tokens": X, **rl(logprobs(X))}, {})
    np.testing.assert_allclose(found.grad, -A, rtol=1e-6)


@pytest.mark.parametrize("name", list(LOSSES))
def test_l5_metric_keys_have_one_colon(name: str) -> None:
    """L5, and 1.11: only sums, which survive the client's chunking."""
    inputs: dict[str, Array] = {"target_tokens": X, **rl(sequence_ratio_mask=ONES)}
    sums = evaluate(name, logprobs(X), inputs, {}).sums
    assert sums["tokens:sum"] == 6
    assert all(key.endswith(":sum") and key.count(":") == 1 for key in sums)


def test_clipped_tokens() -> None:
    """PPO's clip fraction counts the tokens that lost their gradient (tokens 0, 2 and 4 of 1.6)."""
    assert evaluate("ppo", logprobs(X), {"target_tokens": X, **rl()}, {}).sums["clipped_tokens:sum"] == 3


def bounds(config: Any) -> dict[str, float]:
    return dict(zip(("clip_low_threshold", "clip_high_threshold"), config, strict=True)) if config else {}
