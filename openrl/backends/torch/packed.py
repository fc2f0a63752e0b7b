"""Products with frozen weights, packed for the CPU where that pays: a small batch spends its time bringing weights in.

oneDNN wants bf16 weights in blocks and, given plain rows, rearranges them in every product. Decoding multiplies few
rows by the same weights for ever, so a rearranged copy made once makes layers 1.3 to 1.8 times as fast, at the same
precision. FBGEMM multiplies float32 by float16 weights into float32 sums: for the head (L6), and for the layers of a
model that computes in float32, half the bytes and up to four times as fast for a few rows. That is for weights that
float16 holds, as it does those that came from bf16. Training keeps the plain weights, which its backward pass needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.nn import functional

from openrl.backends.torch.model import CausalLM
from openrl.backends.torch.weights import Weight

Product = Callable[[Tensor], Tensor]  # x [rows, in] -> x W^T + b [rows, out]

_MEMORY_SHARE = 0.25  # of the free memory that the copies may take
_EXPECTED_ROWS = 8  # a hint for the layout; other batch sizes work as well
_ROWS = 4096  # of a weight that are looked at together
# Half of float16's least step, which values too small for its full precision (below 6e-5) are rounded to. Float32 sums
# of weights of usual size are off by as much.
_LEAST_HALF_STEP = 2.0**-25

# What PyTorch's own compiler emits for linear layers, and what its dynamic quantization runs; not documented as an
# interface, so looked up with care.
_MKLDNN: Any = torch.ops.mkldnn
_QUANTIZED: Any = torch.ops.quantized


class Packing(Enum):
    """The copies that products run from: oneDNN's in the weights' dtype, FBGEMM's in float16 for float32 products."""

    NONE = 0
    ONEDNN = 1
    FBGEMM = 2


def product(weight: Tensor, bias: Tensor | None, packing: Packing) -> Product:
    """The product with a weight [out, in], for a packing that `packing_for` allowed."""
    if packing is Packing.ONEDNN:
        packed = _MKLDNN._reorder_linear_weight(weight, _EXPECTED_ROWS)
        run = _MKLDNN._linear_pointwise.default
        return lambda x: run(x, packed, bias, "none", [], "")
    if packing is Packing.FBGEMM:
        packed = _QUANTIZED.linear_prepack_fp16(weight.float(), None if bias is None else bias.float())
        run = _QUANTIZED.linear_dynamic_fp16.default
        return lambda x: run(x, packed)
    return lambda x: functional.linear(x, weight, bias)


def made(weight: Weight, bias: Tensor | None) -> Product:
    """The product with a weight that is made anew each time."""
    return lambda x: functional.linear(x, weight.dense(), bias)


def packing_for(model: CausalLM, weights: Sequence[Tensor]) -> Packing:
    """How to pack these weights of the backbone, if device, dtype, values and free memory allow it."""
    if model.device.type != "cpu" or model.fetch is not None or not _is_room(2 * sum(w.numel() for w in weights)):
        return Packing.NONE
    if model.dtype is torch.bfloat16 and _onednn_packs():
        return Packing.ONEDNN
    if model.dtype is torch.float32 and _fbgemm_packs() and all(fits_float16(w) for w in weights):
        return Packing.FBGEMM
    return Packing.NONE


def pack_head(model: CausalLM) -> bool:
    """Give a model a packed output head, if device, values and free memory allow it; whether it has one now."""
    if model.project_packed is None:
        packing = _head_packing(model)
        if packing is not Packing.NONE:
            model.project_packed = product(model.head_wide, None, packing)
    return model.project_packed is not None


def _head_packing(model: CausalLM) -> Packing:
    head = model.head_wide
    if model.device.type != "cpu":
        return Packing.NONE
    if _fbgemm_packs() and _is_room(2 * head.numel()) and fits_float16(head):
        return Packing.FBGEMM
    worth_it = model.dtype is torch.bfloat16 and _onednn_packs() and _is_room(head.nbytes)
    return Packing.ONEDNN if worth_it else Packing.NONE


def fits_float16(weight: Tensor) -> bool:
    """Whether float16 holds the values, all but the last digits of those too small to matter."""
    return all(
        bool(((part.half().float() - part).abs() <= _LEAST_HALF_STEP).all()) for part in weight.float().split(_ROWS)
    )


def _is_room(size: int) -> bool:
    return size <= _MEMORY_SHARE * psutil.virtual_memory().available


def _onednn_packs() -> bool:
    known = all(hasattr(_MKLDNN, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))
    return known and torch.backends.mkldnn.is_available() and bool(_MKLDNN._is_mkldnn_bf16_supported())


@cache
def _fbgemm_packs() -> bool:
    """Whether this PyTorch has FBGEMM, which is there for x86 only."""
    if not all(hasattr(_QUANTIZED, name) for name in ("linear_prepack_fp16", "linear_dynamic_fp16")):
        return False
    try:
        _QUANTIZED.linear_prepack_fp16(torch.zeros(1, 1), None)
    except RuntimeError:
        return False
    return True
