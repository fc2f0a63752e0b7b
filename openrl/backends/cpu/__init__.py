"""The PyTorch backend on the processor, whatever accelerators there are."""

from __future__ import annotations

from dataclasses import replace

from openrl.backends.base import Backend, BackendSpec
from openrl.backends.torch.backend import open_backend as open_torch


def open_backend(spec: BackendSpec) -> Backend:
    """Open a model on the CPU. Raises `ModelError` if it cannot be used."""
    return open_torch(replace(spec, device="cpu"))
