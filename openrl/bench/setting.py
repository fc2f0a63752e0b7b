"""On what a benchmark ran: written beside its figures, without which they mean little."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path

import psutil

_PACKAGES = ("openrl", "tinker")
_TORCH, _MLX = ("torch", "transformers", "peft"), ("mlx", "mlx-lm")


def describe(model: str, threads: int, rank: int, dtype: str, *, mlx: bool = False) -> dict[str, str]:
    """The machine, the model and the versions, in the order in which they are shown."""
    packages = (*_PACKAGES, *(_MLX if mlx else _TORCH))
    return {
        "model": f"{model}, LoRA rank {rank}",
        "processor": _processor(),
        "threads": f"{threads} on each side, of {psutil.cpu_count(logical=True)} cores",
        "dtype": f"{dtype} on both sides" if mlx else f"server {dtype}, plain loops float32 and bf16",
        "versions": ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages),
    }


def _processor() -> str:
    """The processor's name where the system tells it, else its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
