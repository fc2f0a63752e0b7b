"""The backbone in training: transformers' own forward, whose decoder layers are `TrainLayer`s while a micro-batch runs.

Embeddings, rotary tables and the order of layers stay with transformers; a sampler that shares the model meets the
layers as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from openrl.backends.common.lora import segments_of
from openrl.backends.torch.activations import Activation
from openrl.backends.torch.attention_reader import AttentionReader
from openrl.backends.torch.experts import read_mixture
from openrl.backends.torch.joint import Casts, Joint
from openrl.backends.torch.layout import Layout
from openrl.backends.torch.lora import Adapter, LoraLinear
from openrl.backends.torch.model import CausalLM
from openrl.backends.torch.norms import Norm
from openrl.backends.torch.rope import Rope
from openrl.backends.torch.scratch import Scratch
from openrl.backends.torch.train_attention import Attention
from openrl.backends.torch.train_experts import ExpertMlp, expert_joints
from openrl.backends.torch.train_layers import Batch, RunLayer, RunNorm, TrainLayer, widened
from openrl.backends.torch.train_mlp import DenseMlp, Mlp
from openrl.backends.torch.weights import HELD

Forward = Callable[..., Tensor]


class TrainBackbone:
    """Runs sequences laid end to end through a model's backbone."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        self._scratch = Scratch(model.device)
        self._attention = AttentionReader(model, self._scratch)
        self._batch: Batch | None = None
        self._stream = torch.empty(0)
        self._ropes: dict[int, tuple[Tensor, Rope]] = {}
        modules: Any = model.backbone
        kinds: Sequence[str] | None = getattr(model.config, "layer_types", None)
        # Masks are ours to make, and transformers makes none when it is given some.
        self._mask = dict.fromkeys(kinds) if kinds else torch.zeros(1, 1, 1, 1, device=model.device)
        for index, module in enumerate(modules.layers):
            layer = _read_layer(
                module,
                index,
                model.config,
                self._attention.read(module.self_attn, kinds[index] if kinds else None),
                self._scratch,
            )
            module.forward = self._layer(layer, module.forward)
        modules.norm.forward = self._norm(Norm.of(modules.norm), modules.norm.forward)

    def run(
        self, sequences: Sequence[Tensor], adapters: Sequence[Adapter], casts: Casts, *, recomputed: int = 0
    ) -> Tensor:
        """Last hidden states [tokens, H] of int64 token sequences, each with its adapter (neighbours, if the same).

        `casts` are those of the adapters as they are now. The first `recomputed` layers keep only their input for the
        way back.
        """
        lengths = [len(tokens) for tokens in sequences]
        rows = [adapter for adapter, length in zip(adapters, lengths, strict=True) for _ in range(length)]
        layout = Layout(lengths, self._model.device)
        self._batch = Batch(segments_of(rows), casts, layout, torch.is_grad_enabled(), recomputed)
        positions = torch.arange(max(lengths), device=self._model.device)[None]
        try:
            ids = torch.cat(list(sequences))[None]
            hidden = self._model.hidden(
                input_ids=ids, position_ids=positions, attention_mask=self._mask, use_cache=False
            )
            return hidden[0]
        finally:
            self._batch = None
            self._ropes.clear()

    def clear(self) -> None:
        """Give temporary memory back."""
        self._scratch.clear()

    def _layer(self, layer: TrainLayer, plain: Forward) -> Forward:
        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            batch = self._batch
            if batch is None:
                if self._model.fetch is not None:
                    self._model.fetch(layer.index)
                return plain(hidden_states, *args, **kwargs)
            cos, sin = kwargs["position_embeddings"]
            rope = self._rope(cos, sin, batch.layout)
            x = hidden_states[0]
            if layer.index == 0:
                self._stream = widened(x, self._scratch)
            y: Any = RunLayer.apply(x, self._stream, layer, batch, rope, *layer.leaves(batch.segments))
            return y[None]

        return forward

    def _norm(self, norm: Norm, plain: Forward) -> Forward:
        def forward(hidden_states: Tensor) -> Tensor:
            if self._batch is None:
                return plain(hidden_states)
            y: Any = RunNorm.apply(hidden_states[0], self._stream, norm, self._scratch)
            return y[None]

        return forward

    def _rope(self, cos: Tensor, sin: Tensor, layout: Layout) -> Rope:
        """Layers of one kind are given the same tables."""
        if id(cos) not in self._ropes:
            tables = Rope.of(cos[0], sin[0], layout.width)
            self._ropes[id(cos)] = (cos, self._attention.rope(tables, layout))
        return self._ropes[id(cos)][1]


def _read_layer(module: Any, index: int, config: Any, attention: Attention, scratch: Scratch) -> TrainLayer:
    projections = module.self_attn
    sandwich = hasattr(module, "pre_feedforward_layernorm")
    return TrainLayer(
        index=index,
        attention_norm=Norm.of(module.input_layernorm),
        qkv=_joint(projections.q_proj, projections.k_proj, projections.v_proj),
        attention=attention,
        out=_joint(projections.o_proj),
        after_attention=Norm.of(module.post_attention_layernorm) if sandwich else None,
        mlp_norm=Norm.of(module.pre_feedforward_layernorm if sandwich else module.post_attention_layernorm),
        mlp=_read_mlp(module.mlp, f"model.layers.{index}.mlp", config, scratch),
        after_mlp=Norm.of(module.post_feedforward_layernorm) if sandwich else None,
        scratch=scratch,
    )


def _read_mlp(module: Any, name: str, config: Any, scratch: Scratch) -> Mlp:
    activation = Activation.of(getattr(config, "hidden_activation", None) or config.hidden_act)
    if hasattr(module, "experts"):
        mixture, held = read_mixture(module, f"{name}.experts"), getattr(module.experts, HELD, None)
        return ExpertMlp(mixture.router, expert_joints(mixture, held), mixture.names, activation, scratch)
    return DenseMlp(_joint(module.gate_proj, module.up_proj), activation, _joint(module.down_proj), scratch)


def _joint(*layers: LoraLinear) -> Joint:
    return Joint.of([layer.name for layer in layers], [layer.base for layer in layers])
