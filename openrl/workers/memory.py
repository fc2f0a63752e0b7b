"""Giving freed memory back to the system.

Tensors of ever new sizes leave holes in glibc's heap, which it keeps: a worker that trains on mixed lengths would grow
to several times what it uses. `malloc_trim` returns the holes; it takes a tenth of a second, so it waits for a quiet
moment.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable

_EVERY_SECONDS = 10.0


class Trimmer:
    """Trims the heap now and then, where the C library can (glibc)."""

    def __init__(self) -> None:
        self._trim = _malloc_trim()
        self._last = time.monotonic()

    def quiet(self) -> None:
        """Nothing else is to be done at this moment."""
        now = time.monotonic()
        if self._trim is not None and now - self._last > _EVERY_SECONDS:
            self._trim(0)
            self._last = time.monotonic()


def _malloc_trim() -> Callable[[int], int] | None:
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
