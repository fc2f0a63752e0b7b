"""Frames over two pipes, and what becomes an answer instead of the end of the process."""

from __future__ import annotations

import json
import os
import struct
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO, TypeVar

_LENGTH = struct.Struct(">I")

Frame = dict[str, Any]
_T = TypeVar("_T")


class Link:
    """Frames over two pipes. Only one thread may send."""

    def __init__(self, inlet: BinaryIO, outlet: BinaryIO) -> None:
        self._inlet = inlet
        self._outlet = outlet

    def receive(self) -> Frame | None:
        """The next frame; None at the end."""
        head = self._inlet.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack(head)
        body = self._inlet.read(size)
        return json.loads(body) if len(body) == size else None

    def send(self, frame: Frame) -> None:
        body = json.dumps(frame).encode()
        self._outlet.write(_LENGTH.pack(len(body)) + body)
        self._outlet.flush()


def pipes() -> Link:
    """The pipes to the worker. vLLM and its libraries print to stdout: that goes to the log with stderr from now on."""
    inlet, outlet = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return Link(inlet, outlet)


def attempt(action: Callable[..., _T], *args: Any) -> tuple[_T | None, str]:
    """Do something that vLLM may fail at: what comes of it and "", or None and what vLLM says, which the log has, too.

    vLLM raises what it likes: its own errors have no class in common with those of torch, safetensors and pydantic
    that come through it. What one frame asks for must not end the others, so this is the one place that takes all.
    """
    try:
        return action(*args), ""
    except Exception as error:  # noqa: BLE001 -- see above
        traceback.print_exc()
        return None, f"{type(error).__name__}: {error}"
