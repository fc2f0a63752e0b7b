"""Decoder layers as training runs them: the sums of transformers' modules with a way back written out.

What is kept of a layer for the way back is little, and what is cheap to compute again is not kept; of a layer that is
to save more memory nothing but its input is, and the whole of it computed again. Norms, activations and additions are
taken in few passes over memory that comes again (`Scratch`), where autograd would ask for fresh memory for each.

The residual stream is float32, one buffer that all layers add to, as the sampler has it: rounded to bf16 at every
addition it would be the largest part of what training's logprobs are off. What is kept of it is in the compute dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from openrl.backends.torch.joint import Casts, Detour, Joint
from openrl.backends.torch.layout import Layout
from openrl.backends.torch.lora import Segment
from openrl.backends.torch.norms import Norm
from openrl.backends.torch.rope import Rope
from openrl.backends.torch.scratch import Scratch
from openrl.backends.torch.train_attention import Attention
from openrl.backends.torch.train_mlp import Entry, Mlp, MlpKept


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch as layers see it: sequences end to end, rows of one adapter neighbours.

    With `keep` there is a way back; layers below `recomputed` then keep only their input for it.
    """

    segments: tuple[Segment, ...]
    casts: Casts
    layout: Layout
    keep: bool
    recomputed: int = 0

    def keeps(self, layer: int) -> bool:
        """Whether a layer keeps more than its input."""
        return self.keep and layer >= self.recomputed


@dataclass(slots=True)
class _Detours:
    """The adapters of attention's joint products."""

    qkv: list[Detour]
    out: list[Detour]


@dataclass(slots=True)
class _Kept:
    """What the way back needs of a layer. `attended` and `mlp_out` are the inputs of norms that only some families
    have."""

    detours: _Detours
    x: Tensor
    x_scale: Tensor
    qkv: Tensor
    heads: Tensor
    attended: Tensor | None
    h: Tensor
    h_scale: Tensor
    mlp: MlpKept
    mlp_out: Tensor | None


@dataclass(frozen=True, slots=True)
class TrainLayer:
    """One decoder layer. Norms that a family lacks are None."""

    index: int
    attention_norm: Norm
    qkv: Joint
    attention: Attention
    out: Joint
    after_attention: Norm | None
    mlp_norm: Norm
    mlp: Mlp
    after_mlp: Norm | None
    scratch: Scratch

    def leaves(self, segments: Sequence[Segment]) -> list[Tensor]:
        """The factors that `back` returns gradients for, in that order."""
        return [*self.qkv.leaves(segments), *self.out.leaves(segments), *self.mlp.leaves(segments)]

    def run(
        self, x: Tensor, stream: Tensor, batch: Batch, rope: Rope, *, keep: bool, chosen: Tensor | None = None
    ) -> tuple[Tensor, _Kept]:
        """The layer's output [tokens, H] for x [tokens, H], and what the way back needs.

        `stream` is x in float32, and is the output in float32 afterwards. With `keep` what is needed is this layer's
        own until it runs again; else only until some layer does. `chosen` is `MlpKept`'s when it does run again.
        """
        detours = _Detours(*(joint.detours(batch.segments, batch.casts) for joint in (self.qkv, self.out)))
        slot = str(self.index) if keep else "again"
        x_scale = self.attention_norm.scale(stream)
        normed = self._normed(self.attention_norm, stream, x_scale, x.dtype)
        qkv = self.qkv.run(normed, detours.qkv, self.scratch, self._take(f"qkv {slot}", x, self.qkv.outputs))
        heads = self._take(f"heads {slot}", x, self.attention.outputs)
        self.attention.run(qkv, batch.layout, rope, heads)
        attended = self.out.run(heads, detours.out, self.scratch, self._take(f"attended {slot}", x))
        h, attended = self._add(stream, attended, self.after_attention, f"h {slot}")
        h_scale = self.mlp_norm.scale(stream)
        normed = self._normed(self.mlp_norm, stream, h_scale, x.dtype)
        mlp_out, mlp = self.mlp.run(
            normed, Entry(batch.segments, batch.casts, slot, partial(self._exact, stream, h_scale), chosen)
        )
        y, mlp_out = self._add(stream, mlp_out, self.after_mlp, f"y {slot}")
        return y, _Kept(detours, x, x_scale, qkv, heads, attended, h, h_scale, mlp, mlp_out)

    def back(
        self, dy: Tensor, kept: _Kept, batch: Batch, rope: Rope, *, inputs: bool
    ) -> tuple[Tensor | None, list[Tensor]]:
        """dL/dx, if `inputs`, and the gradients of `leaves`. What was kept is overwritten."""
        d_h, of_mlp = self._mlp_back(dy, kept)
        d_attended = self._norm_back(d_h, kept.attended, self.after_attention, "d attended out")
        d_heads = self.out.back(d_attended, kept.detours.out, self._take("d heads", kept.heads))
        of_out = self.out.factors(d_attended, kept.heads, kept.detours.out)
        d_qkv = self.attention.back(d_heads, kept.qkv, batch.layout, rope)
        d_normed = None
        if inputs:
            d_normed = self.qkv.back(d_qkv, kept.detours.qkv, self._take("d normed", kept.x))
        else:
            self.qkv.back_low(d_qkv, kept.detours.qkv)
        of_qkv = self._factors(self.qkv, d_qkv, kept.detours.qkv, self.attention_norm, kept.x, kept.x_scale)
        if d_normed is not None:
            self.attention_norm.back(d_normed, kept.x, kept.x_scale, d_h, self.scratch, plus=d_h)
        return d_h if inputs else None, [*of_qkv, *of_out, *of_mlp]

    def _mlp_back(self, dy: Tensor, kept: _Kept) -> tuple[Tensor, list[Tensor]]:
        """dL/dh and the gradients of the MLP's factors."""
        d_out = self._norm_back(dy, kept.mlp_out, self.after_mlp, "d mlp out")
        d_normed, gradients = self.mlp.back(
            d_out, kept.mlp, lambda: self._normed(self.mlp_norm, kept.h, kept.h_scale, dy.dtype)
        )
        d_h = torch.empty_like(dy)
        self.mlp_norm.back(d_normed, kept.h, kept.h_scale, d_h, self.scratch, plus=dy)
        return d_h, gradients

    def _factors(
        self, joint: Joint, dy: Tensor, detours: Sequence[Detour], norm: Norm, x: Tensor, scale: Tensor
    ) -> list[Tensor]:
        """Gradients of the factors of a product whose input, a norm's output, was not kept."""
        return joint.factors(dy, self._normed(norm, x, scale, x.dtype), detours) if detours else []

    def _add(self, stream: Tensor, branch: Tensor, norm: Norm | None, name: str) -> tuple[Tensor, Tensor | None]:
        """Add a branch's output to the stream; returns the sum in the branch's dtype, and that output if a norm stands
        between: its way back needs it."""
        if norm is None:
            return branch.copy_(stream.add_(branch)), None
        out = norm.apply(branch, norm.scale(branch), self._take(name, branch), self.scratch)
        return out.copy_(stream.add_(out)), branch

    def _normed(self, norm: Norm, x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        return norm.apply(x, scale, self.scratch.take("normed", tuple(x.shape), dtype), self.scratch)

    def _exact(self, stream: Tensor, scale: Tensor) -> Tensor:
        """What goes into the MLP, in float32."""
        exact = self.scratch.take("exact", tuple(stream.shape), torch.float32)
        return self.mlp_norm.apply(stream, scale, exact, self.scratch)

    def _norm_back(self, dy: Tensor, x: Tensor | None, norm: Norm | None, name: str) -> Tensor:
        if norm is None or x is None:
            return dy
        return norm.back(dy, x, norm.scale(x), self._take(name, x), self.scratch)

    def _take(self, name: str, like: Tensor, columns: int | None = None) -> Tensor:
        """Scratch memory for a value of each token."""
        return self.scratch.take(name, (len(like), columns or like.shape[1]), like.dtype)


class RunLayer(torch.autograd.Function):
    """A `TrainLayer` as one node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stream: Tensor, layer: TrainLayer, batch: Batch, rope: Rope, *_: Tensor) -> Tensor:
        keeps = batch.keeps(layer.index)
        y, kept = layer.run(x, stream, batch, rope, keep=keeps)
        ctx.kept = kept if keeps else (x, kept.mlp.chosen)
        ctx.layer, ctx.batch, ctx.rope = layer, batch, rope
        # What is not kept is the next layer's memory: where it is to be recomputed, its input stays as a copy.
        return y.clone() if batch.keep and not keeps else y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        layer: TrainLayer = ctx.layer
        kept, ctx.kept = ctx.kept, None
        if isinstance(kept, tuple):
            # From the input as it was kept, rounded: gradients then differ by what their own rounding does.
            x, chosen = cast("tuple[Tensor, Tensor | None]", kept)
            kept = layer.run(x, widened(x, layer.scratch), ctx.batch, ctx.rope, keep=False, chosen=chosen)[1]
        dx, gradients = layer.back(grads[0], kept, ctx.batch, ctx.rope, inputs=ctx.needs_input_grad[0])
        return dx, None, None, None, None, *gradients


class RunNorm(torch.autograd.Function):
    """The last norm of tokens [tokens, H], of which `stream` is the float32 form, as one node."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stream: Tensor, norm: Norm, scratch: Scratch) -> Tensor:
        scale = norm.scale(stream)
        ctx.save_for_backward(x, scale)
        ctx.norm, ctx.scratch = norm, scratch
        return norm.apply(stream, scale, torch.empty_like(x), scratch)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        x, scale = ctx.saved_tensors
        return ctx.norm.back(grads[0], x, scale, torch.empty_like(x), ctx.scratch), None, None, None


def widened(x: Tensor, scratch: Scratch) -> Tensor:
    """A float32 copy of x in the scratch memory of the residual stream."""
    return scratch.take("stream", tuple(x.shape), torch.float32).copy_(x)
