"""Choosing device, threads and compute dtype, on purpose and with figures."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import psutil
import torch

from openrl.errors import ModelError

_SPEEDUP = 1.5  # bf16 costs precision; below this it is not worth it
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Compute:
    """Where and in what a model computes; `reason` says why that dtype."""

    device: torch.device
    dtype: torch.dtype
    threads: int
    reason: str


def choose(device: str, dtype: str, threads: int) -> Compute:
    """Resolve a spec's "auto"s. Sets torch's thread count. Raises `ModelError` for a device that is not there."""
    place = pick_device(device)
    torch.set_num_threads(threads or physical_cores())
    kind, reason = pick_dtype(dtype, place)
    return Compute(place, kind, torch.get_num_threads(), reason)


def pick_device(name: str) -> torch.device:
    """ "auto" is the first CUDA device if there is one, else the CPU."""
    cuda = torch.cuda.is_available()
    if name == "cpu" or (name == "auto" and not cuda):
        return torch.device("cpu")
    if name in ("auto", "cuda"):
        if not cuda:
            raise ModelError("device 'cuda' was asked for, but torch finds no CUDA device.", "Use 'cpu' or 'auto'.")
        return torch.device("cuda", 0)
    raise ModelError(f"unknown device {name!r}.", "Known: auto, cpu, cuda.")


def physical_cores() -> int:
    """Physical cores that this process may use; hyperthreads only get in each other's way in matrix products."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


def pick_dtype(name: str, device: torch.device) -> tuple[torch.dtype, str]:
    """The dtype and why. On a CPU "auto" measures: bf16 is emulated on many, several times faster on others."""
    if name in _DTYPES:
        return _DTYPES[name], "as configured"
    if name != "auto":
        raise ModelError(f"unknown dtype {name!r}.", "Known: auto, float32, bfloat16.")
    if device.type == "cuda":
        usable = torch.cuda.is_bf16_supported()
        return (torch.bfloat16, "the GPU supports bf16") if usable else (torch.float32, "the GPU lacks bf16")
    slow, fast = (_product_ms(dtype) for dtype in (torch.float32, torch.bfloat16))
    dtype = torch.bfloat16 if slow >= _SPEEDUP * fast else torch.float32
    return dtype, f"a matrix product took {slow:.1f} ms in float32 and {fast:.1f} ms in bf16"


def _product_ms(dtype: torch.dtype, repeats: int = 5) -> float:
    """Milliseconds for a product of 512 x 1024 and 1024 x 1024: the best of a few, so that noise counts less."""
    x, w = torch.ones(512, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        torch.nn.functional.linear(x, w)
        best = min(best, time.perf_counter() - start)
    return best * 1e3
