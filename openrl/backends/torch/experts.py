"""A mixture of experts, read out of transformers' module: who goes where, and in which order experts see tokens.

Nothing is dropped for want of capacity: that would couple a token to its neighbours (B2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openrl.backends.torch.lora import Segment
from openrl.errors import ModelError


@dataclass(frozen=True, slots=True)
class Names:
    """Of a mixture's stacks, as adapters know them (A15)."""

    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses `active` experts for each token. `weight` float32 [E, H]; `renormalised`: the weights of the chosen ones
    sum to 1."""

    weight: Tensor
    active: int
    renormalised: bool

    def logits(self, x: Tensor) -> Tensor:
        """Float32 [tokens, E] for float32 x [tokens, H]."""
        return torch.mm(x, self.weight.t())

    def choose(self, logits: Tensor) -> Tensor:
        """The likeliest experts of each token, int64 [tokens, active]."""
        return torch.topk(logits, self.active, dim=-1).indices

    def weights(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """How much each of the chosen counts, float32 [tokens, active]: a softmax over all, or over these alone, which
        is what renormalising comes to."""
        if self.renormalised:
            return torch.softmax(logits.gather(1, chosen), dim=-1)
        return torch.softmax(logits, dim=-1).gather(1, chosen)

    def back(self, d_weights: Tensor, logits: Tensor, chosen: Tensor) -> Tensor:
        """dL/dx, float32 [tokens, H], of `weights` of `logits`. The choice itself has no gradient."""
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            weights = self.weights(leaf, chosen)
        (d_logits,) = torch.autograd.grad(weights, leaf, d_weights)
        return torch.mm(d_logits, self.weight)


@dataclass(frozen=True, slots=True)
class Mixture:
    """`gate_up` [E, 2 inner, H], gate first, and `down` [E, H, inner], as the module has them."""

    names: Names
    router: Router
    gate_up: Tensor
    down: Tensor

    @property
    def experts(self) -> int:
        return len(self.gate_up)


def read_mixture(module: Any, name: str) -> Mixture:
    """Of a module with `gate` and `experts`; `name` is that of the latter. Raises `ModelError` for another layout."""
    gate, experts = module.gate, module.experts
    gate_up: Tensor = experts.gate_up_proj.detach()
    down: Tensor = experts.down_proj.detach()
    count, hidden = gate.weight.shape
    if gate_up.shape != (count, 2 * down.shape[2], hidden) or down.shape[:2] != (count, hidden):
        raise ModelError(
            f"{name} holds tensors of shapes {tuple(gate_up.shape)} and {tuple(down.shape)}: not known here."
        )
    router = Router(gate.weight.detach().float(), int(gate.top_k), bool(gate.norm_topk_prob))
    return Mixture(Names(f"{name}.w1", f"{name}.w3", f"{name}.w2"), router, gate_up, down)


@dataclass(frozen=True, slots=True)
class Visit:
    """Tokens of one segment at one expert: `rows` of the order, counted from the expert's first one."""

    segment: int
    rows: slice


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Tokens in the order of experts: each token once for each of its experts, and those of an expert as they came, so
    that rows of a segment are neighbours.

    `tokens` int64 [rows] says whose each row is and `places` which row each token's choice got, [tokens * active].
    """

    tokens: Tensor
    places: Tensor
    order: Tensor
    active: int
    counts: list[list[int]]  # by segment and expert

    @classmethod
    def of(cls, chosen: Tensor, experts: int, segments: Sequence[Segment]) -> Dispatch:
        """For the choice [tokens, active] of tokens that `segments` cover."""
        order = torch.argsort(chosen.flatten(), stable=True)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        found = [torch.bincount(chosen[s.start : s.stop].flatten(), minlength=experts) for s in segments]
        counts: list[list[int]] = torch.stack(found).tolist()
        active = chosen.shape[1]
        return cls(order.div(active, rounding_mode="floor"), places, order, active, counts)

    def visits(self) -> Iterator[tuple[int, slice, list[Visit]]]:
        """Experts that have tokens, with their rows of the order and these rows' segments."""
        start = 0
        for expert in range(len(self.counts[0])):
            stop, visits = start, list[Visit]()
            for segment, counts in enumerate(self.counts):
                if counts[expert]:
                    visits.append(Visit(segment, slice(stop - start, stop - start + counts[expert])))
                    stop += counts[expert]
            if stop > start:
                yield expert, slice(start, stop), visits
            start = stop

    def spread(self, weights: Tensor) -> Tensor:
        """Weights [tokens, active] as a column of the rows [rows, 1]."""
        return weights.flatten()[self.order, None]

    def collected(self, column: Tensor) -> Tensor:
        """The way back: [tokens, active] of a value [rows] of each row."""
        return column[self.places].view(-1, self.active)

    def summed(self, rows: Tensor) -> Tensor:
        """The sum over each token's experts of [rows, H], in float32 and always in the same order: [tokens, H]."""
        return rows[self.places].view(-1, self.active, rows.shape[1]).sum(1, dtype=torch.float32)
