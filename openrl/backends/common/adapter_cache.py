"""The adapters that the sampler holds, by key: loaded on first use, forgotten least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Set
from typing import Any

from openrl.types import AdapterRef

_LIMIT = 16

# Reads an adapter into the engine's own form, ready for sampling. Raises `OpenRLError` if it cannot be loaded.
AdapterLoader = Callable[[AdapterRef], Any]


class AdapterCache:
    """Keeps up to `limit` adapters, more only while more are in use at once. Keys are never reused (AdapterRef)."""

    def __init__(self, load: AdapterLoader, limit: int = _LIMIT) -> None:
        self._load = load
        self._limit = limit
        self._held: OrderedDict[str, Any] = OrderedDict()

    def get(self, ref: AdapterRef, in_use: Set[str]) -> Any:
        """The engine's adapter; `in_use` are keys to keep. Raises `OpenRLError` if it cannot be loaded."""
        if ref.key not in self._held:
            self._held[ref.key] = self._load(ref)
        self._held.move_to_end(ref.key)
        self._trim(in_use | {ref.key})
        return self._held[ref.key]

    def _trim(self, in_use: Set[str]) -> None:
        idle = [key for key in self._held if key not in in_use]
        for key in idle[: max(0, len(self._held) - self._limit)]:
            del self._held[key]
