"""The DPO loss: Rafailov et al., "Direct Preference Optimization" (arXiv:2305.18290), equation 7.

    loss = -log sigmoid(beta * ((log p(chosen) - log ref(chosen)) - (log p(rejected) - log ref(rejected))))

`p` is the policy, `ref` the model it started from. beta * (log p - log ref) is the implicit reward of an answer: DPO
raises that of the chosen answer over that of the rejected one.

Alone it cares for the difference only: both answers may become unlikely, and what the model writes may be a third
thing. So the chosen answer's own negative logprob a token is added, as in Pang et al., "Iterative Reasoning
Preference Optimization" (arXiv:2404.19733).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from tinker import types


def answer_logprobs(data: Sequence[types.Datum], rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Logprobs of whole answers, (pairs, 2), from a row of logprobs a token for each datum.

    `data` go chosen, rejected, chosen, rejected, ...; their `weights` are 1 on the tokens of the answer, else 0.
    """
    sums = [(row * datum.loss_fn_inputs["weights"].to_torch()).sum() for datum, row in zip(data, rows, strict=True)]
    return torch.stack(sums).reshape(-1, 2)


def dpo_loss(policy: torch.Tensor, reference: torch.Tensor, beta: float) -> torch.Tensor:
    """Mean loss over pairs; `policy` and `reference` are logprobs of answers, (pairs, 2): chosen, rejected."""
    rewards = beta * (policy - reference)
    return -F.logsigmoid(rewards[:, 0] - rewards[:, 1]).mean()


def chosen_nll(policy: torch.Tensor, data: Sequence[types.Datum]) -> torch.Tensor:
    """Mean over pairs of the chosen answers' negative logprob a token; `policy` and `data` as above."""
    lengths = torch.stack([datum.loss_fn_inputs["weights"].to_torch().sum() for datum in data[::2]])
    return -(policy[:, 0] / lengths).mean()


def measures(policy: torch.Tensor, reference: torch.Tensor, beta: float) -> dict[str, float]:
    """Implicit rewards of the chosen and the rejected answers, their margin, and the share of pairs they rank right.

    A tie counts half: before the first step, when the policy is the reference, all are ties.
    """
    chosen, rejected = (beta * (policy - reference)).detach().unbind(dim=1)
    right = (chosen > rejected).float() + 0.5 * (chosen == rejected).float()
    return {
        "accuracy": float(right.mean()),
        "reward_margin": float((chosen - rejected).mean()),
        "reward_chosen": float(chosen.mean()),
        "reward_rejected": float(rejected.mean()),
    }
