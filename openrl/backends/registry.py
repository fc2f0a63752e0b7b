"""Backend names and where their code is. Imported by the daemon, so nothing heavy is imported here."""

from __future__ import annotations

import importlib
import importlib.util
import platform
import sys
from collections.abc import Callable

from openrl.backends.base import Backend, BackendSpec
from openrl.backends.quantize import check_installed
from openrl.errors import ModelError

BACKENDS = {"cpu": "openrl.backends.cpu", "cuda": "openrl.backends.cuda", "mps": "openrl.backends.mps"}
RUN_CUSTOM_LOSSES = frozenset({"cpu", "cuda"})  # backends that run clients' graphs, which are PyTorch
# Packages without which a backend cannot start, by import name, and how to install them.
_NEEDS = {
    "cpu": (("torch", "transformers"), "Run: pip install torch transformers"),
    "cuda": (("torch", "transformers"), "Run: pip install torch transformers"),
    "mps": (("mlx", "mlx_lm"), "Run: pip install 'openrl[mps]'. It is made for Apple Silicon and also runs on Linux."),
}


def check_backend(name: str, quantize: str = "none") -> None:
    """Raise ModelError if this version cannot serve with backend `name`, and bases held so, on this machine."""
    if name == "remote":
        return  # it needs nothing here
    if name != "auto" and name not in BACKENDS:
        raise ModelError(f"unknown backend {name!r}.", f"Legal: auto, {', '.join(BACKENDS)}.")
    chosen = choices(name)[0]
    packages, hint = _NEEDS[chosen]
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ModelError(f"backend {chosen!r} needs packages that are not installed: {', '.join(missing)}.", hint)
    if quantize != "none":
        _check_quantize(chosen, quantize)


def _check_quantize(backend: str, quantize: str) -> None:
    if backend == "mps":
        raise ModelError(
            f"engine.quantize {quantize!r} is for the PyTorch engine; here backend 'auto' is 'mps'.",
            "MLX trains over bases that are quantised already: serve one of those, such as mlx-community/NAME-4bit.",
        )
    check_installed(quantize)


def choices(name: str) -> tuple[str, ...]:
    """The backends that a name may come to mean here: `auto` is mps on Apple Silicon, else cuda or cpu."""
    if name != "auto":
        return (name,)
    return ("mps",) if _is_apple_silicon() else ("cpu", "cuda")


def opener(name: str) -> Callable[[BackendSpec], Backend]:
    """The `open_backend` of a backend; called in a worker process. `auto` is the best that is there."""
    check_backend(name)
    possible = choices(name)
    name = "cuda" if "cuda" in possible and "cpu" in possible and _has_cuda() else possible[0]
    return importlib.import_module(BACKENDS[name]).open_backend


def runs_custom_losses(name: str) -> bool:
    """Whether a backend, or with `auto` each that may be chosen, runs custom losses (protocol 5.9)."""
    return RUN_CUSTOM_LOSSES.issuperset(choices(name))


def _is_apple_silicon() -> bool:
    return sys.platform == "darwin" and platform.machine() == "arm64"


def _has_cuda() -> bool:
    from torch import cuda

    return cuda.is_available()
