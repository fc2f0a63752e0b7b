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
    groups = [[rollout] for rollout in sample_each(policy, prompts, params)]
    return watch(groups, trainer.forward(policy_gradient_batch(groups), "importance_sampling").result())


def sample_each(
    policy: tinker.SamplingClient, prompts: Sequence[Sequence[int]], params: types.SamplingParams
) -> list[Rollout]:
    """One completion a prompt, all requests in flight together; without text and reward, which nobody asks for."""
    futures = [policy.sample(types.ModelInput.from_ints(list(prompt)), 1, params) for prompt in prompts]
    sequences = [future.result().sequences[0] for future in futures]
    return [
        Rollout(list(prompt), list(sequence.tokens), list(sequence.logprobs or []), "", 0.0)
        for prompt, sequence in zip(prompts, sequences, strict=True)
    ]
