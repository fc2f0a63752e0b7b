"""Adapters that vLLM holds: loaded under names and numbers that are never used twice, unloaded when out of use.

A number used again would be served from the prefix cache of the weights that it stood for before. `AdapterRef.key` is
unique for its content, so it is the name; numbers only grow, also over vLLM's restarts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from openrl.backends.vllm.process import Frame
from openrl.checkpoints.peft import ADAPTER_FILE, CONFIG_FILE, HEAD_NAME, read_config
from openrl.errors import BadRequest
from openrl.types import AdapterRef

_FIRST_NUMBER = 2  # the child's own probe has 1


@dataclass(frozen=True, slots=True)
class Traits:
    """What decides whether vLLM can have a checkpoint: an adapter, or a whole model that fits."""

    rank: int
    head: bool
    whole: bool = False


def traits(folder: Path) -> Traits | None:
    """Of the adapter in a folder; None where there is none that can be read."""
    try:
        rank = read_config(folder / CONFIG_FILE)["r"]
        with safe_open(folder / ADAPTER_FILE, framework="np") as opened:
            head = any(f".{HEAD_NAME}." in key for key in opened.keys())  # noqa: SIM118 -- no mapping
    except (BadRequest, SafetensorError, OSError):
        return None
    return Traits(rank, head)


class Shelf:
    """Which adapters the child has, least recently used first. Pure bookkeeping: it answers with frames to send."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: OrderedDict[str, tuple[int, Path]] = OrderedDict()
        self._next = _FIRST_NUMBER

    def __len__(self) -> int:
        return len(self._held)

    def place(self, ref: AdapterRef, in_use: Set[str]) -> tuple[int, list[Frame]] | None:
        """An adapter's number, and what to send first. None while all places are taken by keys `in_use`."""
        frames = self._sweep(in_use | {ref.key})
        if ref.key not in self._held:
            idle = [key for key in self._held if key not in in_use]
            if len(self._held) >= self._limit and not idle:
                return None
            if len(self._held) >= self._limit:
                frames.append(self._drop(idle[0]))
            self._held[ref.key] = self._next, ref.folder
            frames.append({"op": "adapter", "id": self._next, "name": ref.key, "folder": str(ref.folder.absolute())})
            self._next += 1
        self._held.move_to_end(ref.key)
        return self._held[ref.key][0], frames

    def clear(self) -> None:
        """The child is gone, and all that it held."""
        self._held.clear()

    def lost(self, number: int) -> str | None:
        """The child could not load this one; its key."""
        key = next((key for key, (held, _) in self._held.items() if held == number), None)
        if key is not None:
            del self._held[key]
        return key

    def _sweep(self, keep: Set[str]) -> list[Frame]:
        """Let go of those whose checkpoint is gone: nobody can ask for them again."""
        gone = [key for key, (_, folder) in self._held.items() if key not in keep and not folder.exists()]
        return [self._drop(key) for key in gone]

    def _drop(self, key: str) -> Frame:
        number, _ = self._held.pop(key)
        return {"op": "forget", "id": number}
