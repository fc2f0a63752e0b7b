"""What a device has left, and telling that it ran out from other failures."""

from __future__ import annotations

import torch

from openrl.models.info import available_memory

_WORDS = ("out of memory", "can't allocate memory", "not enough memory")


def is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """Whether PyTorch raised this because an allocation failed; on the CPU only the message tells."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return any(word in str(error).lower() for word in _WORDS)


def free_memory(device: torch.device) -> int:
    """Bytes that may still be taken on a device, counting what PyTorch holds there without using it."""
    if device.type != "cuda":
        return available_memory()
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
