"""The arithmetic of GRPO: groups of rollouts, advantages, datums, and what to watch (KL, entropy).

Group-relative advantages: DeepSeekMath (arXiv:2402.03300), without the division by the group's deviation (Dr. GRPO,
arXiv:2503.20783). KL estimators k1 and k2: Schulman, "Approximating KL divergence" (2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tinker import types

from openrl_recipes.shared.client import shifted


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled completion: the prompt's tokens, the sampled ones, their logprobs when sampled, text and reward."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    text: str
    reward: float


Group = Sequence[Rollout]


def is_mixed(group: Group) -> bool:
    """Whether the group's rewards differ. If they are all alike, so are the advantages, zero: it teaches nothing."""
    return len({rollout.reward for rollout in group}) > 1


def advantages(group: Group) -> list[float]:
    """Reward minus the group's mean reward, a rollout each.

    Not divided by the group's deviation: that would push the lone success at a hard question hardest of all, and a
    group whose rewards hardly differ as hard as any.
    """
    baseline = sum(rollout.reward for rollout in group) / len(group)
    return [rollout.reward - baseline for rollout in group]


def policy_gradient_batch(groups: Sequence[Group], *, sequence_ratio: bool = False) -> list[types.Datum]:
    """One datum a rollout, its advantage on every sampled token; in the order of the groups.

    Dividing by the number of sampled tokens turns the server's sum into a mean, which keeps the meaning of the clip.
    `sequence_ratio` adds what the loss `gspo` asks for: the tokens over which a sequence's ratio is taken.
    """
    total = sum(len(rollout.tokens) for group in groups for rollout in group)
    return [
        shifted(
            r.prompt,
            r.tokens,
            logprobs=r.logprobs,
            advantages=[advantage / total] * len(r.tokens),
            **({"sequence_ratio_mask": [1.0] * len(r.tokens)} if sequence_ratio else {}),
        )
        for group in groups
        for r, advantage in zip(group, advantages(group), strict=True)
    ]


def watch(groups: Sequence[Group], trained: types.ForwardBackwardOutput) -> dict[str, float]:
    """What to look at after each step: how far the trainer's logprobs of the rollouts are from the sampler's.

    `kl_v1` = mean(sampler - trainer), `kl_v2` = mean((sampler - trainer)^2) / 2, in nats a token; with rollouts of the
    newest weights both show numerical noise alone, with older ones the distance that the policy has moved. `entropy`
    = -mean(sampler's logprob) at temperature 1. `trained` is the pass over `policy_gradient_batch(groups)`.
    """
    rollouts = [rollout for group in groups for rollout in group]
    sampler = np.concatenate([np.asarray(r.logprobs) for r in rollouts])
    outputs = [output["logprobs"].to_numpy() for output in trained.loss_fn_outputs]
    trainer = np.concatenate([row[len(r.prompt) - 1 :] for r, row in zip(rollouts, outputs, strict=True)])
    moved = sampler - trainer
    return {
        "kl_v1": float(moved.mean()),
        "kl_v2": float((moved**2).mean() / 2),
        "entropy": float(-sampler.mean()),
        "completion_tokens": float(np.mean([len(r.tokens) for r in rollouts])),
    }
