"""A mixture of experts as sampling runs it: the trainer's sums, so that both choose the same experts for a token.

Products with experts run from the model's own weights: packed copies of them would double the largest part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from openrl.backends.torch.experts import Dispatch, Mixture, Visit
from openrl.backends.torch.lora import Segment


@dataclass(frozen=True, slots=True)
class Experts:
    """A layer's mixture. `thin` is the dtype of low-rank products."""

    mixture: Mixture
    activation: Callable[[Tensor], Tensor]
    thin: torch.dtype

    def __call__(self, x: Tensor, segments: Sequence[Segment]) -> Tensor:
        """[N, H] of x [N, H], both float32; `segments` assign rows to adapters."""
        mixture, names = self.mixture, self.mixture.names
        logits = mixture.router.logits(x)  # in float32, lest sampler and trainer round their way to different experts
        x = x.to(mixture.down.dtype)
        chosen = mixture.router.choose(logits)
        dispatch = Dispatch.of(chosen, mixture.experts, segments)
        weights = dispatch.spread(mixture.router.weights(logits, chosen))
        rows = x[dispatch.tokens]
        out = torch.empty(rows.shape, dtype=torch.float32, device=x.device)
        inner = mixture.down.shape[2]
        for expert, part, visits in dispatch.visits():
            into = rows[part]
            gate_up = functional.linear(into, mixture.gate_up[expert]).float()
            gate, up = gate_up[:, :inner], gate_up[:, inner:]
            self._adapt(gate, into, names.gate, expert, visits, segments)
            self._adapt(up, into, names.up, expert, visits, segments)
            hidden = self.activation(gate).mul_(up).mul_(weights[part])
            narrow = hidden.to(x.dtype)
            y = out[part].copy_(functional.linear(narrow, mixture.down[expert]))
            self._adapt(y, narrow, names.down, expert, visits, segments)
        return dispatch.summed(out)

    def _adapt(
        self, y: Tensor, x: Tensor, name: str, expert: int, visits: Sequence[Visit], segments: Sequence[Segment]
    ) -> None:
        """Add what the adapters say of an expert's rows x to float32 y in place."""
        for visit in visits:
            adapter = segments[visit.segment].adapter
            if adapter is None:
                continue
            assert adapter.frozen is not None, "adapters are frozen before they sample"
            if name in adapter.frozen:
                down, up = (t[expert if len(t) > 1 else 0].to(self.thin) for t in adapter.frozen[name])
                y[visit.rows] += x[visit.rows].to(self.thin).mm(down).mm(up)
