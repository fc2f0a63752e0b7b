"""The PyTorch engine on an NVIDIA GPU, training and sampling alike; vLLM as the sampler is not in this version yet."""

from __future__ import annotations

from dataclasses import replace

import torch

from openrl.backends.base import Backend, BackendSpec
from openrl.backends.torch.backend import open_backend as open_torch
from openrl.errors import ModelError


def open_backend(spec: BackendSpec) -> Backend:
    """Open the engine on the first GPU. Raises ModelError where PyTorch sees none."""
    if not torch.cuda.is_available():
        raise ModelError(
            "backend 'cuda' was asked for, but PyTorch sees no GPU.",
            "Check `nvidia-smi` and that torch is a CUDA build, or use --backend cpu.",
        )
    return open_torch(replace(spec, device="cuda"))
