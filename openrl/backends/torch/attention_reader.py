"""Attention as training runs it, read out of transformers' modules, for the way that it goes on a device."""

from __future__ import annotations

from typing import Any

from openrl.backends.torch.layout import Layout
from openrl.backends.torch.model import CausalLM
from openrl.backends.torch.norms import Norm
from openrl.backends.torch.packed_attention import PackedAttention
from openrl.backends.torch.rope import Rope
from openrl.backends.torch.scratch import Scratch
from openrl.backends.torch.train_attention import Attention, GridAttention
from openrl.backends.torch.train_cores import BlockCore, Core, FusedCore
from openrl.backends.torch.train_kernels import way_of


class AttentionReader:
    """Of one model, all of whose layers go the same way."""

    def __init__(self, model: CausalLM, scratch: Scratch) -> None:
        backbone: Any = model.backbone
        first, self._config, self._scratch = backbone.layers[0].self_attn, model.config, scratch
        self._softcap: float | None = getattr(first, "attn_logit_softcapping", None)
        self._way, self._varlen = way_of(model.device, model.dtype, first.head_dim, self._softcap)

    def read(self, module: Any, kind: str | None) -> Attention:
        """A layer's attention; `kind` is the layer's, where a family has several."""
        window: int | None = self._config.sliding_window if self._slides(kind) else None
        heads, kv_heads, size = self._config.num_attention_heads, self._config.num_key_value_heads, module.head_dim
        q_norm, k_norm = (Norm.of(getattr(module, n)) if hasattr(module, n) else None for n in ("q_norm", "k_norm"))
        if self._varlen is not None:
            return PackedAttention(
                heads, kv_heads, size, q_norm, k_norm, window, module.scaling, self._varlen, self._scratch
            )
        core = self._core(heads // kv_heads, kv_heads, module.scaling, window)
        return GridAttention(heads, kv_heads, size, q_norm, k_norm, core, self._scratch)

    def rope(self, tables: Rope, layout: Layout) -> Rope:
        """Rotary embeddings as the layers want them, from those of positions."""
        return tables.at(layout.packed.positions) if self._way == "packed" else tables

    def _slides(self, kind: str | None) -> bool:
        return kind in (None, "sliding_attention") and hasattr(self._config, "sliding_window")

    def _core(self, group: int, kv_heads: int, scale: float, window: int | None) -> Core:
        if self._way == "fused":
            return FusedCore(kv_heads, group, scale, window)
        return BlockCore(kv_heads, group, scale, window, self._softcap, self._scratch)
