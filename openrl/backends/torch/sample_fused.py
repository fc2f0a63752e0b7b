"""The backbone as sampling runs it: the sums of transformers' modules, in as few and as large operations as can be.

Between products everything is float32; products with base weights are in the compute dtype. That is faster than
transformers' modules, which convert back and forth, and nearer to float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from openrl.backends.torch.kv import KVCache, View
from openrl.backends.torch.lora import Segment
from openrl.backends.torch.masks import Mask
from openrl.backends.torch.model import CausalLM
from openrl.backends.torch.packed import Packing
from openrl.backends.torch.sample_attention import Attention, PromptAttention, StepAttention
from openrl.backends.torch.sample_experts import Experts
from openrl.backends.torch.sample_factors import DOWN, GATE_UP, OUT, QKV, AdapterFactors, LowRank
from openrl.backends.torch.sample_layers import JointProduct, Layer, Norm, read_layers

Tables = dict[str, tuple[Tensor, Tensor]]


class FusedBackbone:
    """Runs a model's backbone. Raises `UnknownLayout` on construction."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        self._layers = layers = read_layers(model)
        self._dtype = model.dtype
        self._routing = model.routing
        thin = torch.float32 if model.device.type == "cpu" else model.dtype
        self._adapters = AdapterFactors(layers.layers, model.dtype, thin)
        half = layers.head_dim // 2
        scales = [layers.scale] * layers.heads + [1.0] * layers.kv_heads
        self._scales = torch.tensor(scales, device=model.device)[:, None]
        self._signs = self._scales * torch.tensor([-1.0] * half + [1.0] * half, device=model.device)

    @property
    def packing(self) -> Packing:
        """What copies of the weights products run from."""
        return self._layers.packing

    def prompt(self, ids: Tensor, positions: Tensor, mask: Mask, view: View) -> Tensor:
        """See `Backbone`."""
        rows, tokens = ids.shape
        attend = PromptAttention(self._layers, rows, mask, view, self._dtype)
        states = self._run(ids.flatten(), positions.expand(rows, tokens).flatten(), attend, tokens)
        return states.view(rows, tokens, -1)

    def step(self, ids: Tensor, positions: Tensor, cache: KVCache, columns: int, mask: Mask) -> Tensor:
        """See `Backbone`."""
        attend = StepAttention(self._layers, cache, positions, columns, mask)
        return self._run(ids, positions, attend, times=1)

    def _run(self, ids: Tensor, positions: Tensor, attend: Attention, times: int) -> Tensor:
        """Each row of the routing's segments stands for `times` rows."""
        layers = self._layers
        adapters = self._adapters.of(self._routing.segments, times)
        rows = [Segment(times * s.start, times * s.stop, s.adapter) for s in self._routing.segments]
        segments = rows or [Segment(0, len(ids), None)]
        x = layers.embed(ids).float()
        tables = {kind: self._table(cos, sin) for kind, (cos, sin) in layers.angles(positions).items()}
        for index, layer in enumerate(layers.layers):
            if self._model.fetch is not None:
                self._model.fetch(index)
            heads = self._heads(index, layer, layer.attention_norm(x), tables[layer.kind], adapters)
            attended = attend(index, layer.kind, heads)
            self._add(x, layer.out, attended, layer.after_attention, adapters, index, OUT)
            self._add_mlp(x, layer, adapters, index, segments)
        return layers.norm(x).to(self._dtype)

    def _add_mlp(
        self, x: Tensor, layer: Layer, adapters: LowRank | None, index: int, segments: Sequence[Segment]
    ) -> None:
        """Add what a layer's MLP says to the float32 residual x in place."""
        mlp, normed = layer.mlp, layer.mlp_norm(x)
        if isinstance(mlp, Experts):
            y = mlp(normed, segments)
            x.add_(y if layer.after_mlp is None else layer.after_mlp(y))
            return
        gate_up = self._product(mlp.gate_up, normed, adapters, index, GATE_UP)
        gate, up = gate_up.float().chunk(2, -1)
        self._add(x, mlp.down, mlp.activation(gate).mul_(up), layer.after_mlp, adapters, index, DOWN)

    def _table(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Factors of a head and of its halves exchanged, [N, query and key heads, head_dim]."""
        return cos[:, None] * self._scales, sin[:, None] * self._signs

    def _heads(
        self, index: int, layer: Layer, x: Tensor, table: tuple[Tensor, Tensor], adapters: LowRank | None
    ) -> Tensor:
        """Queries (scaled), keys and values [N, heads, head_dim], the first two turned to their positions."""
        qkv = self._product(layer.qkv, x, adapters, index, QKV).float()
        heads = qkv.view(len(x), -1, self._layers.head_dim)
        turning = heads[:, : len(self._scales)]
        if layer.head_norm is not None:
            turning.copy_(layer.head_norm(turning))
        exchanged = turning.view(len(x), len(self._scales), 2, -1).flip(2).view(turning.shape)
        turning.mul_(table[0]).addcmul_(exchanged, table[1])
        return heads

    def _product(self, joint: JointProduct, x: Tensor, adapters: LowRank | None, layer: int, place: int) -> Tensor:
        """A joint product with its adapters, in float32 or the compute dtype, of x [N, in] in either."""
        narrow = x.to(self._dtype)
        y = joint.run(narrow)
        if adapters is None:
            return y
        y = y.float()
        self._adapt(y, x, narrow, adapters, layer, place)
        return y

    def _adapt(self, y: Tensor, x: Tensor, narrow: Tensor, adapters: LowRank, layer: int, place: int) -> None:
        """Add what the adapters say of x, which is `narrow` in the compute dtype, to float32 y in place."""
        adapters.add(y, narrow if adapters.dtype is self._dtype else x.to(adapters.dtype), layer, place)

    def _add(
        self,
        x: Tensor,
        joint: JointProduct,
        inner: Tensor,
        norm: Norm | None,
        adapters: LowRank | None,
        layer: int,
        place: int,
    ) -> None:
        """Add a product of `inner` with its adapters, normed if there is a norm, to the float32 residual x in place."""
        if norm is not None:
            x.add_(norm(self._product(joint, inner, adapters, layer, place).float()))
            return
        narrow = inner.to(self._dtype)
        x.add_(joint.run(narrow))
        if adapters is not None:
            self._adapt(x, inner, narrow, adapters, layer, place)
