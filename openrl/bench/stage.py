"""What every part of the benchmark works with: the server under test, the plain sides, and how to tell progress."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import psutil

from openrl.bench.rounds import Side, Tick
from openrl.bench.served import Door
from openrl.bench.workload import FULL, Size, Workload

OURS = "openrl"
PLAIN = "plain float32"
BEST_PLAIN = "plain bf16"
MLX = "mlx-lm"


@dataclass(slots=True)
class Stage:
    """`server` is the process id of the server; `rounds` the number of rounds that count; `mlx` the dtype, as for
    `openrl serve`, of a server that computes with MLX, None of others."""

    door: Door
    server: int
    folder: Path
    vocabulary: int
    rank: int
    threads: int
    rounds: int
    tick: Tick
    size: Size = FULL
    mlx: str | None = None
    _plain: dict[str, Side] = field(default_factory=dict[str, Side])

    def workload(self, seed: int) -> Workload:
        return Workload(self.vocabulary, seed)

    def plain(self) -> dict[str, Side]:
        """The plain loops, made once. PyTorch: float32 with one sequence a forward, and bf16 with padded batches of 8;
        MLX: mlx-lm in the server's dtype."""
        if not self._plain and self.mlx is not None:
            from openrl.bench.plain_mlx import MlxLoop

            self._plain[MLX] = MlxLoop(self.folder, self.rank, self.mlx)
        elif not self._plain:
            import torch

            from openrl.bench.plain import PlainLoop

            self._plain[PLAIN] = PlainLoop(self.folder, self.rank, self.threads, torch.float32, batch=1)
            self._plain[BEST_PLAIN] = PlainLoop(self.folder, self.rank, self.threads, torch.bfloat16, batch=8)
        return self._plain

    def worker(self) -> psutil.Process:
        """The process that holds the model: the largest of the server's."""
        children = psutil.Process(self.server).children(recursive=True)
        return max(children, key=lambda process: process.memory_info().rss)
