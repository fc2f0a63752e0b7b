"""Weights in four bits: NF4 in blocks of 64 with their scales in eight bits (QLoRA), through bitsandbytes.

A weight is computed with in the compute dtype: it is made anew for each product, in memory that all layers share.
"""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from openrl.backends.quantize import check_installed
from openrl.backends.torch.scratch import Scratch
from openrl.checkpoints.peft import HEAD_NAME


class Nf4Linear(nn.Module):
    """A frozen linear layer whose weight [out, in] is held in four bits."""

    def __init__(self, linear: Any, dtype: torch.dtype, scratch: Scratch) -> None:
        """Takes over what bitsandbytes' own `Linear4bit` holds."""
        super().__init__()
        self.in_features: int = linear.in_features
        self.out_features: int = linear.out_features
        self.bias: Tensor | None = linear.bias
        self.scratch = scratch
        self.dtype = dtype
        self._packed: Tensor = linear.weight.data
        self._state = _flat(linear.weight.quant_state, dtype)
        self._library: Any = importlib.import_module("bitsandbytes.functional")

    @property
    def weight(self) -> Tensor:
        """[out, in] in the compute dtype; to be read only, and good until another weight is asked for."""
        return Nf4Stack([self]).dense()

    @property
    def held_bytes(self) -> int:
        """Bytes that the weight takes between products."""
        state = self._state
        scales = [state.absmax, state.offset, state.state2.absmax] if state.nested else [state.absmax]
        return self._packed.nbytes + sum(t.nbytes for t in scales)

    def write(self, out: Tensor) -> None:
        """The weight into contiguous `out` [out, in]."""
        flat = out.view(-1)
        if out.is_cuda:
            self._library.dequantize_4bit(self._packed, self._state, out=flat)
        else:  # where bitsandbytes has no kernel that writes into memory it is given
            flat.copy_(self._library.dequantize_4bit(self._packed, self._state).view(-1))

    def forward(self, x: Tensor) -> Tensor:
        """x W^T + b for x [..., in]."""
        return functional.linear(x, self.weight, self.bias)


class Nf4Stack:
    """The weights of layers one above the other; implements `Weight`."""

    def __init__(self, linears: Sequence[Nf4Linear]) -> None:
        self._linears = linears
        self._outputs = [linear.out_features for linear in linears]
        self.shape = (sum(self._outputs), linears[0].in_features)
        self.device = linears[0].scratch.device

    def dense(self) -> Tensor:
        """See `Weight`."""
        first = self._linears[0]
        with torch.inference_mode(False):  # the sampler's mode: what is allocated in it could be written in no other
            out = first.scratch.take("dense", self.shape, first.dtype)
        for linear, part in zip(self._linears, out.split(self._outputs), strict=True):
            linear.write(part)
        return out


def loading(dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Arguments for transformers' `from_pretrained`, which then quantises layer by layer as it reads them: embeddings,
    norms and head stay as they are. Raises `ModelError` without bitsandbytes."""
    check_installed("nf4")
    # Says at import that a kernel for its own layers, which we do not run, could not be downloaded.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=[HEAD_NAME],
    )
    return {"quantization_config": config, "device_map": {"": device}}


def is_quantised(linear: nn.Module) -> bool:
    """Whether a layer is one of bitsandbytes', as `from_pretrained` leaves it under `loading`."""
    return hasattr(getattr(linear, "weight", None), "quant_state")


def parameters(model: nn.Module) -> int:
    """Weights of a model; of those in four bits their number, not that of the bytes which hold them."""
    quantised = {id(m.weight): m for m in model.modules() if is_quantised(m)}
    sizes: list[int] = []
    for parameter in model.parameters():
        linear: Any = quantised.get(id(parameter))
        sizes.append(parameter.numel() if linear is None else linear.in_features * linear.out_features)
    return sum(sizes)


def _flat(state: Any, dtype: torch.dtype) -> Any:
    """The state of a quantised matrix as that of its values end to end, which it is as well.

    On a CPU bitsandbytes 0.50 reads wrong scales for a matrix whose rows do not consist of whole blocks.
    """
    flat = copy.copy(state)
    flat.shape = torch.Size([state.shape.numel()])
    flat.dtype = dtype
    return flat
