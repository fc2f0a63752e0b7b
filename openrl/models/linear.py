"""The linear layers of a model folder, as the headers of its safetensors files tell; no weights are read."""

from __future__ import annotations

from pathlib import Path

from openrl.checkpoints.peft import HEAD_NAME
from openrl.checkpoints.tensor_file import read_header
from openrl.errors import ModelError
from openrl.models.info import weight_files

EMBEDDING = "model.embed_tokens"
_WEIGHT = ".weight"


def shapes(folder: Path) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) by layer name; a tied head has the embedding's. Raises ModelError for a folder without one."""
    found = _stored(folder)
    if EMBEDDING not in found:
        raise ModelError(f"{folder} has no {EMBEDDING}{_WEIGHT}; this is not a language model we can serve.")
    found.setdefault(HEAD_NAME, found[EMBEDDING])
    return found


def is_head_missing(folder: Path) -> bool:
    """Whether the files hold no weight for the head, so that it can only be the embeddings."""
    return HEAD_NAME not in _stored(folder)


def _stored(folder: Path) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for path in weight_files(folder):
        for name, shape in read_header(path).shapes().items():
            if name.endswith(_WEIGHT) and len(shape) == 2:
                found[name.removesuffix(_WEIGHT)] = (shape[0], shape[1])
    return found
