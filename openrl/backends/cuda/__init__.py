"""The PyTorch engine on an NVIDIA GPU to train, and vLLM to sample where it is installed or named."""

from __future__ import annotations

from dataclasses import replace

import torch

from openrl.backends.base import Backend, BackendSpec
from openrl.backends.torch.backend import open_backend as open_torch
from openrl.backends.vllm.attach import attach, training_half
from openrl.backends.vllm.plan import training_share
from openrl.errors import ModelError


def open_backend(spec: BackendSpec) -> Backend:
    """Open the engine on the first GPU, and vLLM. Raises ModelError where PyTorch sees none, or vLLM cannot start."""
    if not torch.cuda.is_available():
        raise ModelError(
            "backend 'cuda' was asked for, but PyTorch sees no GPU.",
            "Check `nvidia-smi` and that torch is a CUDA build, or use --backend cpu.",
        )
    _check_devices(spec)
    before = _free_bytes()
    backend = attach(open_torch(training_half(spec, "cuda")), spec)
    if backend.apart is not None and spec.vllm is not None:
        # What training took beyond its share would be missing when vLLM has to start again.
        torch.cuda.set_per_process_memory_fraction(training_share(spec.vllm, backend.report.device))
    free = _free_bytes()  # for the daemon, which decides whether another base model fits beside this one
    # Of several GPUs the first stands for all: a whole model has to fit into their memory together.
    held = max(1, before - free) * spec.devices
    report = replace(backend.report, device_bytes=held, device_free_bytes=free * spec.devices)
    return replace(backend, report=report)


def _check_devices(spec: BackendSpec) -> None:
    """Raises ModelError unless there are as many GPUs as are asked for, and vLLM's is the first one or none of them."""
    there = torch.cuda.device_count()
    if spec.devices > there:
        raise ModelError(
            f"engine.devices is {spec.devices}, but PyTorch sees {there} GPU{'' if there == 1 else 's'}.",
            f"Take --devices {there}, or check CUDA_VISIBLE_DEVICES.",
        )
    if spec.vllm is not None and spec.vllm.gpu is not None and 0 < spec.vllm.gpu < spec.devices:
        raise ModelError(
            f"engine.vllm_gpu is {spec.vllm.gpu}, one of the {spec.devices} GPUs (0-{spec.devices - 1}) that train.",
            "vLLM shares the first of them, or has one beside them: leave --vllm-gpu away, or take another number.",
        )


def _free_bytes() -> int:
    """Memory of the GPU that nobody has."""
    return torch.cuda.mem_get_info()[0]
