"""What a model folder says of itself without loading it: sizes, family, and whether it fits into memory."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from openrl.errors import ModelError, NoRoom
from openrl.types import ModelInfo

MAX_LORA_RANK = 256
_GIB = 1 << 30
RUNTIME = 1 * _GIB  # torch itself, activations of a small batch, KV cache, one adapter with its optimizer state
_BYTES = {"float32": 4, "bfloat16": 2, "auto": 4}  # auto may choose float32, so that is what must fit
# Of a weight in four bits: a scale of eight bits for each 64 of them, and one of 32 for each 256 scales.
_QUANTISED = {"nf4": (4 + 8 / 64 + 32 / (64 * 256)) / 8}
_PROJECTIONS = re.compile(r"\.layers\.\d+\..*_proj\.weight$")
_CGROUP = Path("/sys/fs/cgroup")


def describe(folder: Path) -> ModelInfo:
    """What requests are checked against, from `config.json` and the headers of the safetensors files.

    Raises ModelError if the folder holds no such model.
    """
    config = read_config(folder)
    sizes = {name: size for path in weight_files(folder) for name, size in _sizes(path).items()}
    try:
        return ModelInfo(
            vocab_size=int(config["vocab_size"]),
            max_context=int(config["max_position_embeddings"]),
            max_lora_rank=MAX_LORA_RANK,
            parameters=sum(sizes.values()),
            family=str(config["model_type"]),
            projections=sum(size for name, size in sizes.items() if _PROJECTIONS.search(name)),
        )
    except KeyError as error:
        raise ModelError(
            f"{folder / 'config.json'} has no {error}; this is not a language model we can serve."
        ) from None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder. Raises ModelError if there are none (pickles are never loaded)."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelError(
            f"{folder} has no .safetensors files.",
            "Weights in other formats (.bin, .pt) are never loaded, since a pickle can run code; "
            "convert them with save_pretrained(..., safe_serialization=True).",
        )
    return paths


def memory_needed(info: ModelInfo, dtype: str, quantize: str = "none") -> int:
    """Bytes that serving takes: the weights in `dtype` (float32, bfloat16 or auto), those of the layers' linear maps
    as `quantize` ("none" or "nf4") has them, and the runtime around them."""
    if quantize == "none":
        return info.parameters * _BYTES[dtype] + RUNTIME
    whole = (info.parameters - info.projections) * _BYTES[dtype]
    return whole + math.ceil(info.projections * _QUANTISED[quantize]) + RUNTIME


def available_memory() -> int:
    """Bytes that this process may still take: what the machine has free, or a container's limit leaves."""
    return min(psutil.virtual_memory().available, _cgroup_room())


def check_fits(name: str, info: ModelInfo, dtype: str, available: int, quantize: str = "none") -> None:
    """Raises NoRoom, with the numbers, if a model does not fit into `available` bytes."""
    needed = memory_needed(info, dtype, quantize)
    if needed <= available:
        return
    hint = "Serve a smaller model or free memory."
    if dtype != "bfloat16" and memory_needed(info, "bfloat16", quantize) <= available:
        hint = "With --dtype bfloat16 it would fit."
    raise NoRoom(
        f"{name} has {info.parameters / 1e6:,.0f} million weights and needs about {needed / _GIB:.1f} GiB in "
        f"{_types(dtype, quantize)}, but only {available / _GIB:.1f} GiB are free.",
        hint,
    )


def read_config(folder: Path) -> Mapping[str, Any]:
    """The text model's part of `config.json` (multimodal models nest it). Raises ModelError if it cannot be read."""
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}.") from error
    return config.get("text_config", config)


def _types(dtype: str, quantize: str) -> str:
    """What weights are held in, in words."""
    plain = "float32" if dtype == "auto" else dtype
    return plain if quantize == "none" else f"{quantize} and {plain}"


def _sizes(path: Path) -> dict[str, int]:
    """Weights of each tensor in a safetensors file: 8 bytes of header length, then a JSON header with shapes."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(length))
    except (struct.error, ValueError) as error:
        raise ModelError(f"{path} is not a safetensors file: {error}.") from error
    return {name: math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"}


def _cgroup_room() -> int:
    """What a container's memory limit leaves, in bytes; without a limit more than any machine has."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except OSError:
        return 1 << 62
    return 1 << 62 if limit == "max" else max(0, int(limit) - used + _reclaimable())


def _reclaimable() -> int:
    """Bytes of the container's page cache that the kernel drops when asked for more."""
    for line in (_CGROUP / "memory.stat").read_text().splitlines():
        if line.startswith("inactive_file "):
            return int(line.split()[1])
    return 0
