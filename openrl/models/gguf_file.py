"""A GGUF file: its metadata, where each tensor lies, and a tensor's numbers, some rows at a time.

The header is read here and not by `gguf.GGUFReader`, which keeps several numpy views for each string of a vocabulary:
10 s and 0.7 GB for Gemma 3's. What the packed numbers mean is `gguf`'s to say.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from openrl.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32  # of tensors, in bytes, where the file does not say otherwise
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TYPES = {int(kind): kind for kind in GGMLQuantizationType}

# Typed in part only; the arrays are ours to describe.
_dequantize = cast(Callable[[NDArray[Any], GGMLQuantizationType], NDArray[np.float32]], gguf.dequantize)


@dataclass(frozen=True, slots=True)
class Tensor:
    """`shape` in numpy's order: numbers of the last axis lie side by side; `offset` in bytes from the file's start."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        block, size = gguf.GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // block * size


class GgufFile:
    """An open GGUF file. Raises ModelError if it is none, or not whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise self.unusable(f"it cannot be read ({error})") from error
        header = _Header(self._bytes)
        try:
            self.metadata: Mapping[str, Any] = header.metadata()
            self.tensors: Mapping[str, Tensor] = {tensor.name: tensor for tensor in header.tensors()}
        except (struct.error, UnicodeDecodeError, ValueError) as error:
            raise self.unusable(str(error)) from error
        for tensor in self.tensors.values():
            if tensor.offset + tensor.rows * tensor.row_bytes > len(self._bytes):
                raise self.unusable(f"it ends before the weights {tensor.name} do; the file is not complete")

    def unusable(self, why: str, hint: str = "") -> ModelError:
        """The error that says why this file cannot be converted."""
        return ModelError(f"{self.path} cannot be converted: {why}.", hint)

    def read(self, name: str, rows: NDArray[np.intp]) -> NDArray[np.float32]:
        """The named rows of a tensor [len(rows), columns]; a vector counts as one row."""
        tensor = self.tensors[name]
        size = tensor.rows * tensor.row_bytes
        packed = np.frombuffer(self._bytes, np.uint8, size, tensor.offset).reshape(tensor.rows, -1)[rows]
        try:
            return _dequantize(packed, tensor.kind)
        except NotImplementedError as error:
            raise self.unusable(
                f"the weights {name} are packed as {tensor.kind.name}, which gguf cannot unpack"
            ) from error


class _Header:
    """Reads on from `self._at`."""

    def __init__(self, content: mmap.mmap) -> None:
        self._bytes = content
        self._at = 0

    def metadata(self) -> dict[str, Any]:
        if self._bytes[:4] != _MAGIC:
            raise ValueError("it is not a GGUF file")
        self._at = 4
        version = self._number("I")
        if version not in _VERSIONS:
            raise ValueError(f"it has version {version} of the format; known are {', '.join(map(str, _VERSIONS))}")
        self._tensors, entries = self._number("Q"), self._number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self._string()
            metadata[key] = self._value(self._number("I"))
        self._alignment = int(metadata.get("general.alignment", _ALIGNMENT))
        return metadata

    def tensors(self) -> list[Tensor]:
        """In the file's order. Their offsets in the header count from the end of the header, rounded up."""
        listed = [self._tensor() for _ in range(self._tensors)]
        start = -(-self._at // self._alignment) * self._alignment
        return [Tensor(name, shape, kind, start + offset) for name, shape, kind, offset in listed]

    def _tensor(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._string()
        shape = tuple(reversed([self._number("Q") for _ in range(self._number("I"))]))
        kind, offset = self._number("I"), self._number("Q")
        if kind not in _TYPES:
            raise ValueError(f"the weights {name} are packed in the unknown way {kind}; a newer gguf may know it")
        return name, shape, _TYPES[kind], offset

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack_from(f"<{form}", self._bytes, self._at)
        self._at += struct.calcsize(f"<{form}")
        return value

    def _string(self) -> str:
        length = self._number("Q")
        end = self._at + length
        if end > len(self._bytes):
            raise ValueError("it ends within its header")
        text = self._bytes[self._at : end].decode()
        self._at = end
        return text

    def _value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise ValueError(f"its header has a value of the unknown type {kind}")
        inner, count = self._number("I"), self._number("Q")
        if inner not in _NUMBERS:
            return [self._value(inner) for _ in range(count)]
        values = struct.unpack_from(f"<{count}{_NUMBERS[inner]}", self._bytes, self._at)
        self._at += count * struct.calcsize(f"<{_NUMBERS[inner]}")
        return list(values)
