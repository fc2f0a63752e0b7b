"""The linear layers of a model folder, without loading the model: shapes from the headers of its safetensors files."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from openrl.checkpoints.peft import HEAD_NAME
from openrl.checkpoints.tensor_file import read_header, read_tensor
from openrl.errors import ModelError
from openrl.models.info import weight_files
from openrl.types import Array

EMBEDDING = "model.embed_tokens"
_WEIGHT = ".weight"


@dataclass(frozen=True)
class Layers:
    """The layers of one model folder; what is read is kept."""

    folder: Path

    def shapes(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) by layer name; a head that is not stored has the embedding's. Raises ModelError for a
        folder without embeddings."""
        found = {name: shape for name, (_, shape) in self._stored.items()}
        if EMBEDDING not in found:
            raise ModelError(f"{self.folder} has no {EMBEDDING}{_WEIGHT}; this is not a language model we can serve.")
        found.setdefault(HEAD_NAME, found[EMBEDDING])
        return found

    def weight(self, layer: str) -> Array:
        """A layer's weight in float32 [outputs, inputs]."""
        stored = layer if layer in self._stored else EMBEDDING
        return read_tensor(self._stored[stored][0], f"{stored}{_WEIGHT}")

    @property
    def has_head(self) -> bool:
        """Whether the files hold a weight for the head; else it can only be the embeddings."""
        return HEAD_NAME in self._stored

    @cached_property
    def _stored(self) -> dict[str, tuple[Path, tuple[int, int]]]:
        found: dict[str, tuple[Path, tuple[int, int]]] = {}
        for path in weight_files(self.folder):
            for name, shape in read_header(path).shapes().items():
                if name.endswith(_WEIGHT) and len(shape) == 2:
                    found[name.removesuffix(_WEIGHT)] = path, (shape[0], shape[1])
        return found
