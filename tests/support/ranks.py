"""Training over several processes on a CPU, for tests."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from openrl.backends.base import BackendSpec
from openrl.backends.torch.device import choose
from openrl.backends.torch.distributed.opening import open_team
from openrl.backends.torch.distributed.trainer import SpreadTrainer
from openrl.backends.torch.model import CausalLM


@dataclass
class Ranks:
    """An opened base model. `lost` collects why the ranks were lost."""

    model: CausalLM
    trainer: SpreadTrainer
    lost: list[str] = field(default_factory=list[str])

    @property
    def pids(self) -> list[int]:
        """Of the processes besides this one."""
        return self.trainer.team.followers.pids


@contextmanager
def open_ranks(
    folder: Path,
    *,
    ranks: int = 2,
    whole: bool = False,
    device: str = "cpu",
    dtype: str = "float32",
    timeout: float = 60.0,
) -> Generator[Ranks]:
    """A model's folder opened by this process and others; closed at the end."""
    lost: list[str] = []
    spec = BackendSpec(folder, device, dtype, ranks, 64, 8, 4096, name="tiny/model", devices=ranks, lost=lost.append)
    opened = open_team(spec, choose(device, dtype, ranks), whole=whole, timeout=timeout)
    try:
        yield Ranks(opened.model, opened.trainer, lost)
    finally:
        opened.trainer.team.close()
