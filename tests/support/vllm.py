"""vLLM as a sampler in tests: opened as a worker does it, waited for as the loop does, adapters as checkpoints."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from openrl.backends.base import Backend, BackendSpec, VllmSpec
from openrl.backends.cpu import open_backend
from openrl.backends.torch.adapter_files import to_numpy
from openrl.backends.torch.lora import Adapter
from openrl.checkpoints.peft import write_adapter
from openrl.types import AdapterRef, SampledSequence
from support import tiny
from support.apart import Driver
from support.sampling import Ask, World, log_softmax

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
    """A tiny model as `World` has it, its adapters as folders, and a backend whose sampler is the real vLLM. `wholes`
    are two checkpoints of all parameters, each with a twin of its own."""

    def __init__(self, folder: Path, family: str, python: Path, **changes: Any) -> None:
        self.reference = World(tiny.build(folder / "model", family, **changes), None)
        self.adapters = {name: write(one, folder / name) for name, one in self.reference.adapters.items()}
        self.wholes: dict[str, AdapterRef] = {}
        self.twins: dict[str, World] = {}
        for seed, name in enumerate(("whole-a", "whole-b"), start=10):
            at = tiny.build_uneven(folder / name, family, seed=seed, **changes)
            self.wholes[name] = AdapterRef(name, at)
            self.twins[name] = World(at, None)
        woken = threading.Event()
        self.scratch = folder / "scratch"
        self.backend: Backend = open_backend(spec(self.reference.folder, self.scratch, python, woken))
        self.sampler: Any = self.backend.sample
        self.driver = Driver(self.backend.sample, woken)

    def ref(self, name: str | None) -> AdapterRef | None:
        """What a sampler of this name draws from; None: the base model."""
        return None if name is None else self.adapters.get(name) or self.wholes[name]

    def logits(self, tokens: Sequence[int], name: str | None) -> np.ndarray[Any, Any]:
        """Logits [N, V] of a whole sequence under an adapter's, a whole model's or the base model's weights."""
        if name in self.twins:
            return self.twins[name].logits(tokens, None)
        return self.reference.logits(tokens, name)

    @property
    def taken(self) -> list[str]:
        """The whole models whose weights vLLM took, in its present life."""
        lines = (self.scratch / "vllm.log").read_text().splitlines()
        return [
            Path(line.split()[2][:-1]).name for line in lines if line.startswith("weights of /") and "taken" in line
        ]

    def kill(self) -> None:
        """End vLLM as the kernel would."""
        (process,) = [child for child in psutil.Process().children() if str(self.scratch) == child.cwd()]
        process.kill()

    def close(self) -> None:
        self.sampler.close()


def scaled(world: VllmWorld, ask: Ask, sequence: SampledSequence) -> np.ndarray[Any, Any]:
    """[T, V] log-probabilities at the request's temperature of what was drawn, before top-k and top-p."""
    tokens = ask.payload.prompt.tolist() + sequence.tokens.tolist()
    heat = ask.payload.params.temperature or 1.0
    return log_softmax(world.logits(tokens, ask.adapter)[len(ask.payload.prompt) - 1 : -1] / heat)


def check(world: VllmWorld, ask: Ask, sequence: SampledSequence, atol: float = 2e-4) -> None:
    table = scaled(world, ask, sequence)
    np.testing.assert_allclose(sequence.logprobs, table[np.arange(len(table)), sequence.tokens], atol=atol)


def draw(world: VllmWorld, asks: list[Ask]) -> list[tuple[SampledSequence, ...]]:
    pairs = [(ask.payload, world.ref(ask.adapter)) for ask in asks]
    return [output.sequences for output in world.driver.draw_all(pairs)]
