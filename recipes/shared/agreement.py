"""Do sampler and trainer agree? A look at the end of recipes that sample nothing while they train."""

from __future__ import annotations

from collections.abc import Sequence

import tinker
from tinker import types

from openrl_recipes.shared.grpo import Rollout, policy_gradient_batch, watch


def agreement(
    trainer: tinker.TrainingClient,
    policy: tinker.SamplingClient,
    prompts: Sequence[Sequence[int]],
    params: types.SamplingParams,
) -> dict[str, float]:
    """Sample each prompt from `policy`, the newest weights, and score what came with `trainer`: `grpo.watch` of both.

    `params` must be at temperature 1, for which alone the two compute the same logprobs.
    """
    futures = [policy.sample(types.ModelInput.from_ints(list(prompt)), 1, params) for prompt in prompts]
    groups: list[list[Rollout]] = []
    for prompt, future in zip(prompts, futures, strict=True):
        sequence = future.result().sequences[0]
        groups.append([Rollout(list(prompt), list(sequence.tokens), list(sequence.logprobs or []), "", 0.0)])
    return watch(groups, trainer.forward(policy_gradient_batch(groups), "importance_sampling").result())
