"""The PyTorch backend on the processor, whatever accelerators there are; its sampler may be vLLM's build for CPUs."""

from __future__ import annotations

from openrl.backends.base import Backend, BackendSpec
from openrl.backends.torch.backend import open_backend as open_torch
from openrl.backends.vllm.attach import attach, training_half


def open_backend(spec: BackendSpec) -> Backend:
    """Open a model on the CPU. Raises `ModelError` if it cannot be used."""
    return attach(open_torch(training_half(spec, "cpu")), spec)
