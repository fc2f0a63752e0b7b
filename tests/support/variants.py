"""The backends that can be tried on this machine, as the contract's tests and docs/backends.md have them."""

from __future__ import annotations

import importlib.util
import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrl.backends import registry
from openrl.backends.base import Backend, BackendSpec, VllmSpec
from openrl.backends.torch.distributed.trainer import SpreadTrainer
from openrl.selftest import expected, models
from openrl.selftest.subject import Subject
from support.vllm import VARIABLE


@dataclass(frozen=True)
class Variant:
    """A backend in a dtype, with its own sampler or vLLM, on one device or several. `needs` is a package without which
    it is not tried."""

    name: str
    backend: str
    dtype: str
    needs: str = "torch"
    vllm: bool = False
    devices: int = 1

    @property
    def kind(self) -> str:
        """What decides about what is refused."""
        if self.vllm:
            return "vLLM"
        return self.backend if self.devices == 1 else "several devices"

    @property
    def available(self) -> bool:
        if self.backend not in registry.BACKENDS or importlib.util.find_spec(self.needs) is None:
            return False
        if self.vllm and not os.environ.get(VARIABLE):
            return False
        return self.backend != "cuda" or _has_cuda()

    def open(self, world: models.World, root: Path) -> Backend:
        """Small, so that passes have several micro-batches. Raises ModelError where the backend does not take it."""
        vllm = VllmSpec(root / "vllm", Path(os.environ[VARIABLE])) if self.vllm else None
        return registry.opener(self.backend)(
            BackendSpec(
                folder=world.folder,
                device="auto",
                dtype=self.dtype,
                threads=1,
                max_batch_tokens=64,
                max_sample_rows=16,
                max_kv_tokens=8192,
                prefix_cache_tokens=4096,
                name=f"selftest/{world.family}",
                sampler="vllm" if self.vllm else "engine",
                vllm=vllm,
                devices=self.devices,
            )
        )


VARIANTS = (
    Variant("cpu float32", "cpu", "float32"),
    Variant("cpu bfloat16", "cpu", "bfloat16"),
    Variant("mps float32", "mps", "float32", "mlx_lm"),
    Variant("mps bfloat16", "mps", "bfloat16", "mlx_lm"),
    Variant("cuda bfloat16", "cuda", "bfloat16"),
    Variant("cuda float32", "cuda", "float32"),
    Variant("cpu float32, vLLM", "cpu", "float32", vllm=True),
    Variant("cpu float32, 2 processes", "cpu", "float32", devices=2),
)


class Subjects:
    """Opens what tests ask for, once. `close` ends the processes of those that have some."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._worlds: dict[str, models.World] = {}
        self._opened: dict[tuple[str, str], Subject] = {}
        self._numbers = itertools.count()

    def get(self, variant: Variant, family: str) -> Subject:
        """Raises ModelError where the backend does not take the family."""
        if (variant.name, family) not in self._opened:
            world = self.world(family)
            number = next(self._numbers)
            if variant.devices > 1:  # a process can be in one group of devices at a time
                self._close_groups()
            backend = variant.open(world, self._root / f"opened-{number}")
            scratch = self._root / f"scratch-{number}"
            scratch.mkdir()
            known = expected.of(family)
            self._opened[variant.name, family] = Subject(variant.backend, backend, world, known, scratch)
        return self._opened[variant.name, family]

    def world(self, family: str) -> models.World:
        if family not in self._worlds:
            self._worlds[family] = models.build(self._root / family, family)
        return self._worlds[family]

    def close(self) -> None:
        for subject in self._opened.values():
            sampler: Any = subject.backend.sample
            if subject.backend.apart is not None:
                sampler.close()
        self._close_groups()

    def _close_groups(self) -> None:
        for key, subject in list(self._opened.items()):
            trainer = subject.backend.train
            if isinstance(trainer, SpreadTrainer):
                trainer.team.close()
                del self._opened[key]


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
