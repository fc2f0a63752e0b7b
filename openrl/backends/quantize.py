"""Bases whose weights are held in few bits: what has to be installed for it, asked without importing any of it."""

from __future__ import annotations

import importlib.util

from openrl.errors import ModelError

_PACKAGES = ("accelerate", "bitsandbytes")


def check_installed(quantize: str) -> None:
    """Raises ModelError, with what to run, where a package is missing; "none" needs none."""
    missing = [package for package in _PACKAGES if importlib.util.find_spec(package) is None]
    if quantize != "none" and missing:
        raise ModelError(
            f"engine.quantize {quantize!r} needs packages that are not installed: {', '.join(missing)}.",
            "Run: pip install 'openrl[quantize]'",
        )
