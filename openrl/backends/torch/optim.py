"""AdamW as training-semantics 3.1 has it: float32 state, every hyperparameter read anew on each step (O1-O8)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from openrl.types import AdamParams

_PIECE = 1 << 12


def adamw_(theta: Tensor, grad: Tensor, m: Tensor, v: Tensor, t: int, adam: AdamParams) -> float:
    """Update theta, m and v, all flat [P], in place as step number `t` (from 1); returns the norm of `grad`.

    `grad` is the undivided sum (G1) and is left scaled by the clip. A norm that is not finite changes nothing (O8);
    the caller must look at it.
    """
    norm = global_norm(grad)
    if not math.isfinite(norm):
        return norm
    if adam.grad_clip_norm > 0:
        grad.mul_(min(1.0, adam.grad_clip_norm / (norm + 1e-6)))
    # torch's own kernel does the rest in one pass over memory. The optimizer object lives for one step only, so that no
    # hyperparameter can carry over (O3); what lasts is theta, m, v and t.
    parameter = torch.nn.Parameter(theta, requires_grad=False)
    parameter.grad = grad
    optimizer = torch.optim.AdamW(
        [parameter],
        lr=adam.learning_rate,
        betas=(adam.beta1, adam.beta2),
        eps=adam.eps,
        weight_decay=adam.weight_decay,
        fused=True,
    )
    step = torch.tensor(t - 1, dtype=torch.float32, device=theta.device)
    optimizer.state[parameter] = {"step": step, "exp_avg": m, "exp_avg_sq": v}
    optimizer.step()
    return norm


def global_norm(grad: Tensor) -> float:
    """L2 norm of a flat gradient; infinite or NaN exactly if one of its entries is."""
    # A piece at a time: on a CPU one float32 sum over a hundred million squares is a hundredth too small.
    whole = len(grad) - len(grad) % _PIECE
    pieces = torch.linalg.vector_norm(grad[:whole].view(-1, _PIECE), dim=1).double()
    norm = math.hypot(float(torch.linalg.vector_norm(pieces)), float(torch.linalg.vector_norm(grad[whole:])))
    if not math.isfinite(norm):  # squares may overflow float32 where the entries do not
        norm = float(torch.linalg.vector_norm(grad, dtype=torch.float64))
    return norm
