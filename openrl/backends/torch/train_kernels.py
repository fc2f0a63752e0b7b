"""Which way attention goes in training: packed or fused kernels of PyTorch's on a GPU, products in blocks elsewhere."""

from __future__ import annotations

import inspect
from typing import Literal, Protocol, cast

import torch
from torch import Tensor

Way = Literal["packed", "fused", "blocks"]

_HALVES = frozenset({torch.float16, torch.bfloat16})
_AMPERE = (8, 0)  # the first GPUs that flash attention is made for
_DATA_CENTRE = frozenset({(8, 0), (9, 0), (10, 0)})  # whose multiprocessors have room for the way back of any head
_WIDEST, _ROUND = 256, 8  # dimensions of a head: the most, and what they are a multiple of
_NARROW, _PADDED = 192, 224  # between these the way back needs more room than other GPUs have


class Varlen(Protocol):
    """Attention over sequences end to end, as `torch.nn.attention.varlen.varlen_attn` has it.

    Queries [tokens, heads, d], keys and values [tokens, key heads, d]; sequences end before the tokens
    `cu_seq_q[1:]`, int32 from 0 on. A query sees `window_size[0]` keys before its own (-1: all) and as many after it
    as the other number says.
    """

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        window_size: tuple[int, int],
        enable_gqa: bool,
    ) -> Tensor: ...


def way(
    device: str,
    dtype: torch.dtype,
    head_dim: int,
    softcap: float | None,
    *,
    capability: tuple[int, int] = (0, 0),
    varlen: bool = True,
) -> Way:
    """For a type of device (of that compute capability, if it is a GPU), a compute dtype and a family's attention.

    `varlen`: whether this PyTorch has attention over sequences end to end (see `torch_varlen`). A sliding window makes
    no difference: all ways know it.
    """
    if device == "cpu" or softcap is not None:
        return "blocks"
    made_for = device == "cuda" and capability >= _AMPERE and dtype in _HALVES
    return "packed" if varlen and made_for and _takes(head_dim, capability) else "fused"


def torch_varlen() -> Varlen | None:
    """PyTorch's own, from the release on in which it takes a scale, a window and grouped heads; made by NVIDIA's
    compiler only."""
    if torch.version.cuda is None:
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    return cast(Varlen, varlen_attn) if {"scale", "window_size", "enable_gqa"} <= known.keys() else None


def way_of(device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None) -> tuple[Way, Varlen | None]:
    """The way on a device that is there, and the kernel where it is "packed"."""
    if device.type != "cuda":
        return way(device.type, dtype, head_dim, softcap), None
    kernel, version = torch_varlen(), torch.cuda.get_device_capability(device)
    chosen = way("cuda", dtype, head_dim, softcap, capability=version, varlen=kernel is not None)
    return chosen, kernel if chosen == "packed" else None


def _takes(head_dim: int, capability: tuple[int, int]) -> bool:
    """Whether flash attention has kernels for heads of that size, there and back."""
    if head_dim > _WIDEST or head_dim % _ROUND:
        return False
    return not _NARROW < head_dim <= _PADDED or capability in _DATA_CENTRE
