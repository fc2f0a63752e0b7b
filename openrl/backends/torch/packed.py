"""Base weights packed for the CPU: what a small batch spends most of its time on is bringing weights into shape.

oneDNN wants weights in blocks and, given plain rows, rearranges them in every product. Decoding multiplies few rows
by the same weights for ever, so a rearranged copy made once makes layers 1.3 to 1.8 times and the head twice as
fast, at the same precision. Training keeps using the plain weights, which its backward pass needs.
"""

from __future__ import annotations

from typing import Any

import psutil
import torch
from torch import Tensor, nn

from openrl.backends.torch.lora import LoraLinear
from openrl.backends.torch.model import CausalLM

_MEMORY_SHARE = 0.25  # of the free memory that the copies may take
_EXPECTED_ROWS = 8  # a hint for the layout; other batch sizes work as well

# What PyTorch's own compiler emits for linear layers; not documented, so looked up with care.
_OPS: Any = torch.ops.mkldnn


class PackedLinear(nn.Linear):
    """A frozen linear layer that computes from a packed copy; `weight` and `bias` are those of `base`."""

    def __init__(self, base: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self._packed = _packed(base.weight.detach())

    def forward(self, input: Tensor) -> Tensor:
        return _product(input, self._packed, self.bias)


def pack(model: CausalLM) -> bool:
    """Pack the head and the layers that carry adapters, if device, dtype and memory allow; whether it was done."""
    layers = [m for m in model.backbone.modules() if isinstance(m, LoraLinear) and not isinstance(m.base, PackedLinear)]
    size = model.head_wide.nbytes + sum(m.base.weight.nbytes for m in layers)
    if model.device.type != "cpu" or model.dtype is not torch.bfloat16 or not _supported():
        return False
    if size > _MEMORY_SHARE * psutil.virtual_memory().available:
        return False
    for layer in layers:
        layer.base = PackedLinear(layer.base)
    head = _packed(model.head_wide)
    model.project_packed = lambda hidden: _product(hidden, head, None)
    return True


def _packed(weight: Tensor) -> Tensor:
    return _OPS._reorder_linear_weight(weight, _EXPECTED_ROWS)


def _product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return _OPS._linear_pointwise(x, packed, bias, "none", [], "")


def _supported() -> bool:
    known = all(hasattr(_OPS, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))
    return known and torch.backends.mkldnn.is_available() and bool(_OPS._is_mkldnn_bf16_supported())
