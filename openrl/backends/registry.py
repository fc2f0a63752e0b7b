"""Backend names and where their code is. Imported by the daemon, so nothing heavy is imported here."""

from __future__ import annotations

import importlib
import importlib.util
import platform
import sys
from collections.abc import Callable

from openrl.backends.base import Backend, BackendSpec
from openrl.errors import ModelError

BACKENDS = {"cpu": "openrl.backends.cpu", "cuda": "openrl.backends.cuda"}
RUN_CUSTOM_LOSSES = frozenset({"cpu", "cuda"})  # backends that run clients' graphs, which are PyTorch
PLANNED = {
    "mps": "The MLX backend is not in this version yet; use --backend cpu.",
}


def check_backend(name: str) -> None:
    """Raise ModelError if this version cannot serve with backend `name`."""
    if name == "remote":
        return  # it needs nothing here
    if name in PLANNED:
        raise ModelError(f"backend {name!r} cannot be served.", PLANNED[name])
    if name != "auto" and name not in BACKENDS:
        raise ModelError(f"unknown backend {name!r}.", f"Legal: auto, {', '.join(BACKENDS)}.")
    if importlib.util.find_spec("torch") is None:
        raise ModelError("PyTorch is not installed, and the cpu and cuda backends need it.", "Run: pip install torch")


def opener(name: str) -> Callable[[BackendSpec], Backend]:
    """The `open_backend` of a backend; called in a worker process. `auto` is cuda where there is one, else cpu."""
    check_backend(name)
    if name == "auto":
        name = "cuda" if _has_cuda() else "cpu"
    return importlib.import_module(BACKENDS[name]).open_backend


def runs_custom_losses(name: str) -> bool:
    """Whether a backend, or with `auto` each that may be chosen, runs custom losses (protocol 5.9)."""
    return RUN_CUSTOM_LOSSES.issuperset(BACKENDS if name == "auto" else (name,))


def _has_cuda() -> bool:
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return False
    from torch import cuda

    return cuda.is_available()
