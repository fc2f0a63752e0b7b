"""Helpers around a run that trains all parameters of a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from openrl.backends.base import Backend, BackendSpec
from openrl.backends.cpu import open_backend
from openrl.backends.torch.full_train import FullTrainer
from openrl.backends.torch.model import open_model
from openrl.backends.torch.train import Trainer
from openrl.backends.torch.training import Training
from openrl.types import FullSpec, RunId
from support.training import RUN

FULL = FullSpec()


def training(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    max_batch_tokens: int = 256,
    make_room: Callable[[], None] = lambda: None,
) -> Training:
    """Both kinds of runs over a tiny model on the CPU, in one thread."""
    torch.set_num_threads(1)
    base = open_model(folder, torch.device("cpu"), dtype)
    full = FullTrainer(base, folder, max_batch_tokens, "tiny/model", make_room)
    return Training(Trainer(base, max_batch_tokens, "tiny/model"), full)


def full_run(folder: Path, dtype: torch.dtype = torch.float32, max_batch_tokens: int = 256) -> Training:
    """The same with the run `RUN`, which trains all parameters."""
    held = training(folder, dtype, max_batch_tokens)
    held.create(RUN, FULL)
    return held


def backend(folder: Path, dtype: str = "float32", run: RunId = RUN) -> Backend:
    """A whole backend with such a run."""
    opened = open_backend(BackendSpec(folder, "cpu", dtype, 1, 256, 8, 4096, name="tiny/model"))
    opened.train.create(run, FULL)
    return opened
