"""`openrl doctor` where MLX is the engine: it asks for that, and not for PyTorch."""

from __future__ import annotations

import pytest

from openrl_cli import checks
from openrl_cli.checks import State


@pytest.fixture(autouse=True)
def apple_silicon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openrl.backends.registry.choices", lambda _name: ("mps",))


def test_pytorch_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"mlx": "0.32.4", "mlx-lm": "0.32.2", "gguf": "0.19.0"}
    monkeypatch.setattr(checks, "_version", versions.get)
    assert checks.engines().state is State.OK
    del versions["mlx-lm"]
    assert checks.engines().advice == "pip install mlx-lm"


def test_the_accelerator_is_the_one_that_mlx_sees() -> None:
    pytest.importorskip("mlx")
    (found,) = checks.accelerator()
    assert (found.name, found.found) == ("accelerator", "cpu (mlx)") or found.state is State.OK
