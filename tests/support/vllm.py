"""vLLM as a sampler in tests: opened as a worker does it, waited for as the loop does, adapters as checkpoints."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from openrl.backends.base import Backend, BackendSpec, VllmSpec
from openrl.backends.cpu import open_backend
from openrl.backends.torch.adapter_files import to_numpy
from openrl.backends.torch.lora import Adapter
from openrl.checkpoints.peft import write_adapter
from openrl.types import AdapterRef
from support import tiny
from support.apart import Driver
from support.sampling import World

VARIABLE = "E2E_VLLM_PYTHON"


def vllm_python() -> Path:
    """The Python that has vLLM; tests that need it are skipped without."""
    given = os.environ.get(VARIABLE)
    if not given:
        pytest.skip(f"set {VARIABLE} to a Python that has vLLM, or run: make test-vllm")
    return Path(given)


def write(adapter: Adapter, into: Path) -> AdapterRef:
    """An adapter as a checkpoint's folder; its name is the key."""
    into.mkdir(parents=True)
    factors = {f"{layer}.lora_A": a for layer, a in adapter.a.items()}
    factors |= {f"{layer}.lora_B": b for layer, b in adapter.b.items()}
    write_adapter(into, adapter.spec, to_numpy(factors), "")
    return AdapterRef(into.name, into)


def spec(folder: Path, scratch: Path, python: Path, woken: threading.Event, **changes: Any) -> BackendSpec:
    """A small one on the CPU."""
    vllm = {name: changes.pop(name) for name in ("hang_seconds", "memory_fraction", "gpu") if name in changes}
    usual: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "max_batch_tokens": 512,
        "max_sample_rows": 8,
        "max_kv_tokens": 256,
        "prefix_cache_tokens": 256,
        "sampler": "vllm",
        "vllm": VllmSpec(scratch=scratch, python=python, **vllm),
        "wake": woken.set,
    }
    return BackendSpec(folder=folder, **{**usual, **changes})


class VllmWorld:
    """A tiny model as `World` has it, its adapters as folders, and a backend whose sampler is the real vLLM."""

    def __init__(self, folder: Path, family: str, python: Path, **changes: Any) -> None:
        self.reference = World(tiny.build(folder / "model", family, **changes), None)
        self.adapters = {name: write(one, folder / name) for name, one in self.reference.adapters.items()}
        woken = threading.Event()
        self.backend: Backend = open_backend(spec(self.reference.folder, folder / "scratch", python, woken))
        self.sampler: Any = self.backend.sample
        self.driver = Driver(self.backend.sample, woken)

    def close(self) -> None:
        self.sampler.close()
