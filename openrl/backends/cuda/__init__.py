"""The PyTorch engine on an NVIDIA GPU to train, and vLLM to sample where it is installed or named."""

from __future__ import annotations

from dataclasses import replace

import torch

from openrl.backends.base import Backend, BackendSpec
from openrl.backends.torch.backend import open_backend as open_torch
from openrl.backends.vllm.attach import attach
from openrl.backends.vllm.plan import training_share
from openrl.errors import ModelError


def open_backend(spec: BackendSpec) -> Backend:
    """Open the engine on the first GPU, and vLLM. Raises ModelError where PyTorch sees none, or vLLM cannot start."""
    if not torch.cuda.is_available():
        raise ModelError(
            "backend 'cuda' was asked for, but PyTorch sees no GPU.",
            "Check `nvidia-smi` and that torch is a CUDA build, or use --backend cpu.",
        )
    before = _free_bytes()
    backend = attach(open_torch(replace(spec, device="cuda")), spec)
    if backend.apart is not None and spec.vllm is not None:
        # What training took beyond its share would be missing when vLLM has to start again.
        torch.cuda.set_per_process_memory_fraction(training_share(spec.vllm, backend.report.device))
    free = _free_bytes()  # for the daemon, which decides whether another base model fits beside this one
    report = replace(backend.report, device_bytes=max(1, before - free), device_free_bytes=free)
    return replace(backend, report=report)


def _free_bytes() -> int:
    """Memory of the GPU that nobody has."""
    return torch.cuda.mem_get_info()[0]
