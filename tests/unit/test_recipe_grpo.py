"""The arithmetic of GRPO, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tinker import types

from openrl_recipes.shared.client import adam, count_tokens, decayed, shifted, supervised_batch
from openrl_recipes.shared.grpo import Rollout, advantages, is_mixed, policy_gradient_batch, watch


def rollout(reward: float, tokens: list[int], logprobs: list[float], prompt: list[int] | None = None) -> Rollout:
    return Rollout([1, 2, 3] if prompt is None else prompt, tokens, logprobs, "", reward)


GROUP = [rollout(1.0, [7, 8], [-0.5, -1.0]), rollout(0.0, [9], [-2.0]), rollout(0.0, [9], [-2.0])]


def values(datum: types.Datum, name: str) -> list[float]:
    return [float(value) for value in datum.loss_fn_inputs[name].to_numpy()]


def test_advantages_are_rewards_less_the_groups_mean_and_not_divided_by_its_deviation() -> None:
    assert advantages(GROUP) == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert advantages([rollout(0.5, [7], [-1.0])] * 4) == [0.0] * 4


def test_a_group_is_mixed_if_its_rewards_differ() -> None:
    assert is_mixed(GROUP)
    assert not is_mixed(GROUP[1:])


def test_a_datum_predicts_the_completion_and_nothing_of_the_prompt() -> None:
    datum = shifted([1, 2, 3], [7, 8], weights=[0.5, 0.25])
    assert datum.model_input.to_ints() == [1, 2, 3, 7]
    assert values(datum, "target_tokens") == [2, 3, 7, 8]
    assert values(datum, "weights") == [0, 0, 0.5, 0.25]


def test_the_weights_of_a_supervised_batch_make_the_summed_loss_a_mean_over_its_answers() -> None:
    batch = supervised_batch([([1, 2], [3]), ([1], [4, 5, 6])])
    assert [values(datum, "weights") for datum in batch] == [[0, 0.25], [0.25, 0.25, 0.25]]
    assert count_tokens(batch) == 2 + 3


def test_a_policy_gradient_batch_has_every_rollout_with_its_advantage_a_sampled_token() -> None:
    other = [rollout(1.0, [5], [-0.25], prompt=[4]), rollout(0.0, [6], [-0.75], prompt=[4])]
    batch = policy_gradient_batch([GROUP, other])
    assert len(batch) == 5
    assert values(batch[0], "advantages") == pytest.approx([0, 0, 2 / 3 / 6, 2 / 3 / 6])  # 6 sampled tokens in all
    assert values(batch[0], "logprobs") == pytest.approx([0, 0, -0.5, -1.0])
    assert values(batch[3], "advantages") == pytest.approx([0.5 / 6])
    assert sum(sum(values(datum, "advantages")) for datum in batch[1:3]) == pytest.approx(-2 / 3 / 6)


def test_gspo_gets_the_mask_of_its_ratio() -> None:
    batch = policy_gradient_batch([GROUP], sequence_ratio=True)
    assert values(batch[0], "sequence_ratio_mask") == [0, 0, 1, 1]
    assert "sequence_ratio_mask" not in policy_gradient_batch([GROUP])[0].loss_fn_inputs


def test_watch_compares_the_logprobs_of_sampler_and_trainer_at_the_sampled_tokens_alone() -> None:
    trained = output([-9.0, -9.0, -0.4, -1.2], [-9.0, -9.0, -2.0], [-9.0, -9.0, -2.4])
    seen = watch([GROUP], trained)
    moved = np.array([-0.1, 0.2, 0.0, 0.4])  # sampler less trainer: -.5+.4, -1+1.2, -2+2, -2+2.4
    assert seen["kl_v1"] == pytest.approx(moved.sum() / 4)
    assert seen["kl_v2"] == pytest.approx((0.01 + 0.04 + 0.16) / 4 / 2)
    assert seen["entropy"] == pytest.approx((0.5 + 1.0 + 2.0 + 2.0) / 4)
    assert seen["completion_tokens"] == pytest.approx(4 / 3)


def test_the_learning_rate_warms_up_then_falls_to_a_tenth() -> None:
    shares = [decayed(step, 10) for step in range(10)]
    assert shares[0] == pytest.approx(0.5)
    assert shares[1] == pytest.approx(0.91)
    assert shares[1:] == sorted(shares[1:], reverse=True)
    assert decayed(10, 10) == pytest.approx(0.1)
    assert adam(1e-3).grad_clip_norm == 1.0


def output(*rows: list[float]) -> types.ForwardBackwardOutput:
    """What the trainer answers: a row of logprobs a datum."""
    tensors: list[dict[str, Any]] = [
        {"logprobs": types.TensorData(data=row, dtype="float32", shape=[len(row)])} for row in rows
    ]
    return types.ForwardBackwardOutput(loss_fn_output_type="x", loss_fn_outputs=tensors, metrics={})
