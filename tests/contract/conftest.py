"""Tiny models, built once for all contract tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from openrl.backends.torch.train import Trainer
from support import tiny
from support.reference import Reference
from support.training import ENGINES, Held, open_trainer, trainer


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`model_folder(family, tied=True)` gives the folder of a tiny random model, built at first need."""
    built: dict[tuple[str, bool], Path] = {}

    def folder(family: str, *, tied: bool = True) -> Path:
        if (family, tied) not in built:
            built[family, tied] = tiny.build(tmp_path_factory.mktemp(family), family, tied=tied)
        return built[family, tied]

    return folder


@pytest.fixture(scope="session")
def references(model_folder: Callable[..., Path]) -> Callable[..., Reference]:
    """`references(family, tied=True)` gives the float64 reference on that model."""
    opened: dict[tuple[str, bool], Reference] = {}

    def reference(family: str, *, tied: bool = True) -> Reference:
        if (family, tied) not in opened:
            opened[family, tied] = Reference(model_folder(family, tied=tied))
        return opened[family, tied]

    return reference


@pytest.fixture
def llama(model_folder: Callable[..., Path]) -> Trainer:
    """A float32 trainer on the tiny llama."""
    return trainer(model_folder("llama"))


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """A backend that trains on this machine; tests that ask for it run on each."""
    return request.param


@pytest.fixture
def opened(engine: str) -> Callable[..., Held]:
    """`opened(folder, dtype="float32", max_batch_tokens=256)` opens a trainer of the backend."""
    return partial(open_trainer, engine)
