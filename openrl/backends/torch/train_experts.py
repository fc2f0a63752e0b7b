"""A mixture of experts in training, there and back.

Each expert is a joint product for gate and up and one for down, with the adapters of its rows; the factor that experts
share (A10) gets the sum of what they say. A token's weight for an expert multiplies the input of down, which comes to
the same as multiplying its output, and leaves the weight's gradient as a product of values that are at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openrl.backends.torch.activations import Activation
from openrl.backends.torch.experts import Dispatch, Mixture, Names, Router
from openrl.backends.torch.joint import Cast, Detour, Joint, Share
from openrl.backends.torch.lora import Adapter, Segment
from openrl.backends.torch.scratch import Scratch
from openrl.backends.torch.train_mlp import ROWS, Entry, MlpKept
from openrl.backends.torch.weights import Weight, Whole


@dataclass(frozen=True, slots=True)
class Expert:
    """Gate and up as one product, and down."""

    gate_up: Joint
    down: Joint


def expert_joints(mixture: Mixture, held: Mapping[str, Sequence[Weight]] | None = None) -> tuple[Expert, ...]:
    """A mixture's experts; their weights are views of its own, or those `held` under the names of its two tensors."""
    held = held or {
        "gate_up_proj": [Whole(weight) for weight in mixture.gate_up],
        "down_proj": [Whole(weight) for weight in mixture.down],
    }
    names, inner = mixture.names, mixture.down.shape[2]
    columns = slice(0, inner), slice(inner, 2 * inner)
    whole = (slice(0, mixture.down.shape[1]),)
    return tuple(
        Expert(
            Joint((names.gate, names.up), held["gate_up_proj"][e], None, columns),
            Joint((names.down,), held["down_proj"][e], None, whole),
        )
        for e in range(mixture.experts)
    )


@dataclass(frozen=True, slots=True)
class Stack:
    """An adapter's factors in one joint product of all experts, in the compute dtype.

    `down` [1 or E, sum of r, in]; of each projection its name, its columns of the low-rank product and of the output,
    and B^T [1 or E, r, out].
    """

    adapter: Adapter
    down: Tensor
    ups: tuple[tuple[str, slice, slice, Tensor], ...]

    @classmethod
    def of(cls, joint: Joint, adapter: Adapter, dtype: torch.dtype) -> Stack | None:
        """None where the adapter leaves these projections alone."""
        downs: list[Tensor] = []
        ups: list[tuple[str, slice, slice, Tensor]] = []
        at = 0
        for name, columns in zip(joint.names, joint.columns, strict=True):
            if name in adapter.a:
                a, b = adapter.a[name].detach(), adapter.b[name].detach()
                downs.append(a)
                ups.append((name, slice(at, at + a.shape[1]), columns, b.mT.to(dtype).contiguous()))
                at += a.shape[1]
        return cls(adapter, torch.cat(downs, 1).to(dtype), tuple(ups)) if downs else None

    def detour(self, expert: int, rows: slice) -> Detour:
        """The adapter on its way through one expert's product."""
        shares = tuple(Share(low, columns, up[_own(up, expert)]) for _, low, columns, up in self.ups)
        return Detour(rows, self.adapter.scale, Cast(self.down[_own(self.down, expert)], shares))

    def zeros(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Gradients of A and B of each projection to add to."""
        pairs = ((name, self.adapter.a[name], self.adapter.b[name]) for name, *_ in self.ups)
        return {name: (torch.zeros_like(a), torch.zeros_like(b)) for name, a, b in pairs}


def _own(factors: Tensor, expert: int) -> int:
    """An expert's place in a stack, which has one for all where it is shared."""
    return expert if len(factors) > 1 else 0


@dataclass(slots=True)
class _Passage:
    """One expert's rows, and the adapters on them with their segments, in each of the two products."""

    expert: int
    rows: slice
    gate_up: list[tuple[int, Detour]]
    down: list[tuple[int, Detour]]


@dataclass(slots=True)
class _Kept:
    stacks: list[tuple[Stack | None, Stack | None]]  # by segment: in gate and up, and in down
    passages: list[_Passage]
    dispatch: Dispatch
    logits: Tensor
    chosen: Tensor
    weights: Tensor
    gate_up: Tensor


@dataclass(frozen=True, slots=True)
class ExpertMlp:
    """Implements `Mlp`."""

    router: Router
    experts: tuple[Expert, ...]
    names: Names
    activation: Activation
    scratch: Scratch

    def leaves(self, segments: Sequence[Segment]) -> list[Tensor]:
        """See `Mlp`. Any expert stands for the stack: its products have the stack's names."""
        one = self.experts[0]
        return [*one.gate_up.leaves(segments), *one.down.leaves(segments)]

    def run(self, x: Tensor, entry: Entry) -> tuple[Tensor, _Kept]:
        """See `Mlp`. Factors are cast here, not in `casts`: stacks are large, and each layer's is used once a pass."""
        segments, slot = entry.segments, entry.slot
        logits = self.router.logits(entry.exact())
        chosen = self.router.choose(logits) if entry.chosen is None else entry.chosen
        weights = self.router.weights(logits, chosen)
        dispatch = Dispatch.of(chosen, len(self.experts), segments)
        stacks = [self._stacks(s.adapter, x.dtype) for s in segments]
        passages = list(self._passages(dispatch, stacks))
        rows = self._gathered("rows", x, dispatch)
        gate_up = self._take(f"gate up {slot}", rows, self.experts[0].gate_up.outputs)
        for p in passages:
            detours = [detour for _, detour in p.gate_up]
            self.experts[p.expert].gate_up.run(rows[p.rows], detours, self.scratch, gate_up[p.rows])
        gate, up = gate_up.chunk(2, dim=1)
        inner = self.activation.run(gate, self._take("activated", gate)).mul_(up).mul_(dispatch.spread(weights))
        out = self._take("expert out", rows)
        for p in passages:
            detours = [detour for _, detour in p.down]
            self.experts[p.expert].down.run(inner[p.rows], detours, self.scratch, out[p.rows])
        y = self._take(f"mlp {slot}", x).copy_(dispatch.summed(out))
        return y, _Kept(stacks, passages, dispatch, logits, chosen, weights, gate_up)

    def back(self, dy: Tensor, kept: MlpKept, x: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
        """See `Mlp`."""
        assert isinstance(kept, _Kept)
        gradients = [[stack.zeros() if stack else {} for stack in pair] for pair in kept.stacks]
        dispatch, gate_up = kept.dispatch, kept.gate_up
        d_out = self._gathered("d expert out", dy, dispatch)
        d_inner = self._take("d activated", gate_up, gate_up.shape[1] // 2)
        for p in kept.passages:
            detours = [detour for _, detour in p.down]
            self.experts[p.expert].down.back(d_out[p.rows], detours, d_inner[p.rows])
        inner, d_weights = self._inner_back(d_inner, gate_up, dispatch.spread(kept.weights))
        for p in kept.passages:
            for segment, detour in p.down:
                found = self.experts[p.expert].down.factors(d_out[p.rows], inner[p.rows], [detour])
                _add(gradients[segment][1], p.expert, found)
        rows = self._gathered("rows", x(), dispatch)
        d_rows = self._take("expert out", rows)
        for p in kept.passages:
            joint = self.experts[p.expert].gate_up
            joint.back(gate_up[p.rows], [detour for _, detour in p.gate_up], d_rows[p.rows])
            for segment, detour in p.gate_up:
                _add(gradients[segment][0], p.expert, joint.factors(gate_up[p.rows], rows[p.rows], [detour]))
        dx = dispatch.summed(d_rows).add_(self.router.back(dispatch.collected(d_weights), kept.logits, kept.chosen))
        return self._take("d normed", dy).copy_(dx), _flat(gradients)

    def _inner_back(self, d_inner: Tensor, gate_up: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """From the gradient of weight * activation(gate) * up to those of gate and up, in their place; returns that
        product, and the gradients [rows] of the weights."""
        gate, up = gate_up.chunk(2, dim=1)
        inner = self._take("activated", d_inner)
        d_weights = torch.empty(len(d_inner), dtype=torch.float32, device=d_inner.device)
        for start in range(0, len(gate), ROWS):
            part = slice(start, start + ROWS)
            d, g, u, w = d_inner[part], gate[part], up[part], weights[part]
            passed = self.activation.run(g, self._take("passed", g))
            torch.mul(passed, u, out=inner[part])
            d_weights[part] = torch.linalg.vecdot(d.float(), inner[part].float())
            inner[part].mul_(w)
            d.mul_(w)
            d_passed = torch.mul(d, u, out=self._take("d passed", g))
            torch.mul(d, passed, out=u)
            self.activation.back(d_passed, g, out=g)
        return inner, d_weights

    def _stacks(self, adapter: Adapter | None, dtype: torch.dtype) -> tuple[Stack | None, Stack | None]:
        if adapter is None:
            return None, None
        one = self.experts[0]
        return Stack.of(one.gate_up, adapter, dtype), Stack.of(one.down, adapter, dtype)

    def _passages(self, dispatch: Dispatch, stacks: Sequence[tuple[Stack | None, Stack | None]]) -> Sequence[_Passage]:
        found: list[_Passage] = []
        for expert, rows, visits in dispatch.visits():
            into, out = (
                [(v.segment, stack.detour(expert, v.rows)) for v in visits if (stack := stacks[v.segment][side])]
                for side in range(2)
            )
            found.append(_Passage(expert, rows, into, out))
        return found

    def _gathered(self, name: str, x: Tensor, dispatch: Dispatch) -> Tensor:
        """The rows of `dispatch` of values [tokens, H]."""
        out = self.scratch.take(name, (len(dispatch.tokens), x.shape[1]), x.dtype)
        return torch.index_select(x, 0, dispatch.tokens, out=out)

    def _take(self, name: str, like: Tensor, columns: int | None = None) -> Tensor:
        return self.scratch.take(name, (len(like), columns or like.shape[1]), like.dtype)


def _add(gradients: dict[str, tuple[Tensor, Tensor]], expert: int, found: Sequence[Tensor]) -> None:
    """Add an expert's gradients of A and B of each projection."""
    for (of_a, of_b), a, b in zip(gradients.values(), found[::2], found[1::2], strict=True):
        of_a[_own(of_a, expert)].add_(a)
        of_b[_own(of_b, expert)].add_(b)


def _flat(gradients: Sequence[Sequence[dict[str, tuple[Tensor, Tensor]]]]) -> list[Tensor]:
    """In the order of `leaves`: gate and up of all segments, then down of all."""
    return [factor for side in range(2) for pair in gradients for both in pair[side].values() for factor in both]
