"""The part of a decoder layer that is each token's own, in training: what a layer asks of it, and the dense one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from openrl.backends.torch.activations import Activation
from openrl.backends.torch.joint import Casts, Detour, Joint
from openrl.backends.torch.lora import Segment
from openrl.backends.torch.scratch import Scratch

ROWS = 512  # taken at once where several operations follow one another: these stay in a CPU's cache


class MlpKept(Protocol):
    """What the way back needs of one run."""

    @property
    def chosen(self) -> Tensor | None:
        """The experts that each token went to, where there are some: a layer that is computed again goes to the same,
        although rounding might have chosen otherwise between two that are all but equal."""
        ...


@dataclass(frozen=True, slots=True)
class Entry:
    """What comes with the tokens. `exact` makes them in float32, as they were before they were rounded; `chosen` is
    that of an earlier run."""

    segments: Sequence[Segment]
    casts: Casts
    slot: str
    exact: Callable[[], Tensor]
    chosen: Tensor | None


class Mlp(Protocol):
    """Takes the normed stream of each token and gives what is added to it; `MlpKept` is an implementation's own."""

    def leaves(self, segments: Sequence[Segment]) -> list[Tensor]:
        """The factors that `back` returns gradients for, in that order."""
        ...

    def run(self, x: Tensor, entry: Entry) -> tuple[Tensor, MlpKept]:
        """[tokens, H] for x [tokens, H], in scratch memory that the entry's slot names."""
        ...

    def back(self, dy: Tensor, kept: MlpKept, x: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
        """dL/dx in scratch memory, and the gradients of `leaves`. `x` makes the input again. What was kept is
        overwritten."""
        ...


@dataclass(slots=True)
class _Kept:
    gate_up_detours: list[Detour]
    down_detours: list[Detour]
    gate_up: Tensor
    chosen: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """down(activation(gate(x)) * up(x)), with gate and up as one product."""

    gate_up: Joint
    activation: Activation
    down: Joint
    scratch: Scratch

    def leaves(self, segments: Sequence[Segment]) -> list[Tensor]:
        """See `Mlp`."""
        return [*self.gate_up.leaves(segments), *self.down.leaves(segments)]

    def run(self, x: Tensor, entry: Entry) -> tuple[Tensor, _Kept]:
        """See `Mlp`."""
        slot = entry.slot
        into, out = (joint.detours(entry.segments, entry.casts) for joint in (self.gate_up, self.down))
        gate_up = self.gate_up.run(x, into, self.scratch, self._take(f"gate up {slot}", x, self.gate_up.outputs))
        gate, up = gate_up.chunk(2, dim=1)
        product = self.activation.run(gate, self._take("activated", gate)).mul_(up)
        y = self.down.run(product, out, self.scratch, self._take(f"mlp {slot}", x))
        return y, _Kept(into, out, gate_up)

    def back(self, dy: Tensor, kept: MlpKept, x: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
        """See `Mlp`."""
        assert isinstance(kept, _Kept)
        gate, up = kept.gate_up.chunk(2, dim=1)
        d_product = self.down.back(dy, kept.down_detours, self._take("d activated", dy, gate.shape[1]))
        product = self._activation_back(d_product, gate, up)
        of_down = self.down.factors(dy, product, kept.down_detours)
        dx = self.gate_up.back(kept.gate_up, kept.gate_up_detours, self._take("d normed", dy))
        of_gate_up = self.gate_up.factors(kept.gate_up, x(), kept.gate_up_detours) if kept.gate_up_detours else []
        return dx, [*of_gate_up, *of_down]

    def _activation_back(self, d_product: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        """From the gradient of activation(gate) * up to those of gate and up, in their place; returns that product."""
        product = self._take("activated", gate)
        for start in range(0, len(gate), ROWS):
            part = slice(start, start + ROWS)
            d, g, u = d_product[part], gate[part], up[part]
            passed = self.activation.run(g, self._take("passed", g))
            torch.mul(passed, u, out=product[part])
            d_passed = torch.mul(d, u, out=self._take("d passed", g))
            torch.mul(d, passed, out=u)
            self.activation.back(d_passed, g, out=g)
        return product

    def _take(self, name: str, like: Tensor, columns: int | None = None) -> Tensor:
        """Scratch memory for a value of each token."""
        return self.scratch.take(name, (len(like), columns or like.shape[1]), like.dtype)
