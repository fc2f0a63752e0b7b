"""Frozen weights, however they are held: whole, or in a form that they are made from each time a product needs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from openrl.backends.torch.nf4 import Nf4Linear, Nf4Stack

Linear = nn.Linear | Nf4Linear


HELD = "held_jointly"  # attribute of the first of some layers, where the `Weight` of them all is made elsewhere


class Weight(Protocol):
    """A frozen weight [out, in] of a device."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def device(self) -> torch.device: ...

    def dense(self) -> Tensor:
        """All of it, in the compute dtype; to be read only, and good until another weight is asked for."""
        ...


@dataclass(frozen=True, slots=True)
class Whole:
    """A weight that lies in memory as it is computed with."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """See `Weight`."""
        return self.tensor.shape[0], self.tensor.shape[1]

    @property
    def device(self) -> torch.device:
        """See `Weight`."""
        return self.tensor.device

    def dense(self) -> Tensor:
        """See `Weight`."""
        return self.tensor


def stacked(linears: Sequence[Linear], columns: Sequence[slice]) -> Weight:
    """The weights of layers one above the other; whole ones keep views of that memory."""
    quantised = in_four_bits(linears)
    if quantised:
        return Nf4Stack(quantised)
    held: Weight | None = getattr(linears[0], HELD, None)
    if held is not None:
        return held
    weight = linears[0].weight.detach()
    if len(linears) > 1:
        weight = torch.cat([linear.weight.detach() for linear in linears])
        for linear, part in zip(linears, columns, strict=True):
            linear.weight.data = weight[part]
    return Whole(weight)


def in_four_bits(linears: Sequence[Linear]) -> list[Nf4Linear]:
    """The layers, if their weights are; a model has them in one way."""
    return [linear for linear in linears if isinstance(linear, Nf4Linear)]
