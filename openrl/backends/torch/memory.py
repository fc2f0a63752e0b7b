"""Telling a device that ran out of memory from other failures."""

from __future__ import annotations

import torch

_WORDS = ("out of memory", "can't allocate memory", "not enough memory")


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether PyTorch raised this because an allocation failed; on the CPU only the message tells."""
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error).lower() for word in _WORDS)
