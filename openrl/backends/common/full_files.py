"""Folders of a whole model in training, as far as they are the same on every engine (`openrl.checkpoints.full` has the
layout).

Tensors are written one by one, and read by the engine after all names and shapes were checked here: beside the model
there need never be more than one of them in memory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from openrl.checkpoints.full import EXTRA_FILES, MODEL_CONFIG, MODEL_FILE, check_full
from openrl.checkpoints.peft import GRADIENTS_FILE, OPTIMIZER_FILE
from openrl.checkpoints.tensor_file import METADATA, encode_header
from openrl.errors import BadRequest

Shapes = Mapping[str, tuple[int, ...]]  # of parameters, by name


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor to be written: its dtype in the words of the format ("F32", "BF16", "I64"), and its bytes on demand."""

    name: str
    kind: str
    shape: tuple[int, ...]
    size: int  # bytes
    data: Callable[[], memoryview]


def write_parts(file: Path, parts: Iterable[Part]) -> None:
    """A safetensors file, one tensor after the other."""
    entries: dict[str, Any] = {METADATA: {"format": "pt"}}
    at, parts = 0, list(parts)
    for part in parts:
        stop = at + part.size
        entries[part.name] = {"dtype": part.kind, "shape": list(part.shape), "data_offsets": [at, stop]}
        at = stop
    with file.open("wb") as out:
        out.write(encode_header(entries))
        for part in parts:
            out.write(part.data())


def write_config(into: Path, base: Path, dtype: str) -> None:
    """What belongs to a model beside its weights, from the base model's folder; `dtype` is what they are stored in."""
    config: dict[str, Any] = json.loads((base / MODEL_CONFIG).read_text())
    config.pop("torch_dtype", None)  # what older versions called it
    config["dtype"] = dtype
    (into / MODEL_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    for name in EXTRA_FILES:
        if (base / name).is_file():
            shutil.copyfile(base / name, into / name)


class Stored:
    """A checkpoint's folder that was found to fit: all names and shapes are right, so that reading cannot stop half
    way for want of a tensor (C3).

    `model`, `optimizer` (m.<name>, v.<name> and t) and `gradients` are its files; None are not to be read.
    """

    def __init__(self, source: Path, shapes: Shapes, *, optimizer: bool) -> None:
        """Raises `BadRequest` naming what does not fit."""
        check_model(source, shapes)
        self.model = source / MODEL_FILE
        self.optimizer = source / OPTIMIZER_FILE if optimizer else None
        self.gradients = source / GRADIENTS_FILE if optimizer and (source / GRADIENTS_FILE).exists() else None
        if self.optimizer is not None:
            if not self.optimizer.exists():
                raise BadRequest(
                    "the checkpoint has no optimizer state.", "Load its weights only, or use one made by save_state."
                )
            moments = {f"{prefix}.{name}": shape for prefix in "mv" for name, shape in shapes.items()}
            _check(self.optimizer, {**moments, "t": ()})
        if self.gradients is not None:
            _check(self.gradients, shapes)


def check_model(folder: Path, shapes: Shapes) -> None:
    """Raise `BadRequest` unless a folder holds a model with just these parameters."""
    check_full(folder)
    _check(folder / MODEL_FILE, shapes)


def shapes_in(file: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of a file's tensors. Raises `BadRequest` if it is missing or damaged."""
    if not file.is_file():
        raise BadRequest(f"the checkpoint has no {file.name}.")
    try:
        with safe_open(file, framework="np") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise BadRequest(f"{file.name} of the checkpoint cannot be read: {error}.") from error


def _check(file: Path, shapes: Shapes) -> None:
    """Raise `BadRequest` for the first tensor that is missing, too many or misshapen."""
    found = shapes_in(file)
    for name in sorted({*found, *shapes}):
        if found.get(name) != shapes.get(name):
            held, wanted = (s.get(name, "nothing") for s in (found, shapes))
            raise BadRequest(f"{file.name} holds {held} for {name!r}; this base model needs {wanted}.")
