"""Helpers around a run that trains all parameters of a tiny model, on any engine."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from openrl.backends.base import Backend, BackendSpec
from openrl.backends.common.full_train import FullTrainer
from openrl.backends.common.training import Training
from openrl.backends.registry import opener
from openrl.backends.torch.full_train import TorchFull
from openrl.backends.torch.model import open_model
from openrl.backends.torch.train import Trainer
from openrl.types import FullSpec, RunId
from support.training import RUN

FULL = FullSpec()


def training(
    folder: Path,
    dtype: str = "float32",
    max_batch_tokens: int = 256,
    make_room: Callable[[], None] = lambda: None,
    engine: str = "cpu",
) -> Training:
    """Both kinds of runs over a tiny model, in one thread where the engine has any."""
    if engine == "cpu":
        torch.set_num_threads(1)
        base = open_model(folder, torch.device("cpu"), getattr(torch, dtype))
        whole = TorchFull(base, folder, max_batch_tokens)
        return Training(Trainer(base, max_batch_tokens, "tiny/model"), FullTrainer(whole, "tiny/model", make_room))
    import mlx.core as mx

    from openrl.backends.mps import full_train, memory, model, train

    memory.set_limits()
    opened = model.open_model(folder, getattr(mx, dtype))
    full = FullTrainer(full_train.MlxFull(opened, folder, max_batch_tokens), "tiny/model", make_room)
    return Training(train.Trainer(opened, max_batch_tokens, "tiny/model"), full)


def full_run(folder: Path, dtype: str = "float32", max_batch_tokens: int = 256, engine: str = "cpu") -> Training:
    """The same with the run `RUN`, which trains all parameters."""
    held = training(folder, dtype, max_batch_tokens, engine=engine)
    held.create(RUN, FULL)
    return held


def backend(folder: Path, dtype: str = "float32", run: RunId = RUN, engine: str = "cpu") -> Backend:
    """A whole backend with such a run."""
    opened = opener(engine)(BackendSpec(folder, "cpu", dtype, 1, 256, 8, 4096, name="tiny/model"))
    opened.train.create(run, FULL)
    return opened


def module(engine: str, name: str) -> Any:
    """A module of an engine, to change things in."""
    return import_module(f"openrl.backends.{'torch' if engine == 'cpu' else engine}.{name}")


def inside(held: Training) -> Any:
    """The engine's own object for the run, to look and to meddle in."""
    full: Any = held._full  # type: ignore[attr-defined]
    return full.held(RUN)
