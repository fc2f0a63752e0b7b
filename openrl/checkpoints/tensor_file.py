"""Safetensors files without torch: their headers, and tensors as float32 whatever float they are stored in.

The layout: 8 bytes of header length, a JSON header of name -> {dtype, shape, data_offsets}, then the data.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from openrl.errors import BadRequest
from openrl.types import Array

METADATA = "__metadata__"
_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_MAX_HEADER = 100 << 20  # as the safetensors library has it


@dataclass(frozen=True, slots=True)
class Header:
    """`entries` as in the file, metadata included; the tensors' bytes begin at `data_start`."""

    entries: Mapping[str, Any]
    data_start: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(entry["shape"]) for name, entry in self.entries.items() if name != METADATA}


def read_header(path: Path) -> Header:
    """Raises BadRequest if the file is missing or is no safetensors file."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MAX_HEADER:
                raise ValueError(f"a header of {length} bytes")
            return Header(json.loads(file.read(length)), 8 + length)
    except (OSError, ValueError, struct.error) as error:
        raise BadRequest(f"{path.name} is not a readable safetensors file: {error}.") from error


def encode_header(entries: Mapping[str, Any]) -> bytes:
    """Length and header, padded so that the data behind it stays aligned."""
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def read_float32(path: Path) -> dict[str, Array]:
    """All tensors of a file in float32. Raises BadRequest for other than floats, and for a damaged file."""
    header = read_header(path)
    return {name: _read(path, header, name) for name in header.entries if name != METADATA}


def read_tensor(path: Path, name: str) -> Array:
    """One tensor of a file in float32. Raises BadRequest as `read_float32`."""
    header = read_header(path)
    if name not in header.entries:
        raise BadRequest(f"{path.name} has no tensor {name!r}.")
    return _read(path, header, name)


def _read(path: Path, header: Header, name: str) -> Array:
    entry = header.entries[name]
    start, stop = entry["data_offsets"]
    with path.open("rb") as file:
        file.seek(header.data_start + start)
        return _float32(name, entry, file.read(stop - start))


def _float32(name: str, entry: Mapping[str, Any], data: bytes) -> Array:
    if entry["dtype"] not in _DTYPES:
        raise BadRequest(f"the tensor {name!r} is of type {entry['dtype']}; legal: {', '.join(_DTYPES)}.")
    try:
        stored = np.frombuffer(data, _DTYPES[entry["dtype"]]).reshape(entry["shape"])
    except ValueError as error:
        raise BadRequest(f"the tensor {name!r} is damaged: {error}.") from error
    if entry["dtype"] == "BF16":  # the upper half of a float32
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)
