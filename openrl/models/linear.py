"""The linear layers of a model folder, without loading the model: shapes from the headers of its safetensors files.

A mixture's experts come as `w1`, `w3` and `w2` of all of them together, as adapters have them (A10).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from openrl.checkpoints.peft import HEAD_NAME, LoraShape, expert_shapes
from openrl.checkpoints.tensor_file import read_header, read_tensor
from openrl.errors import ModelError
from openrl.models.info import weight_files
from openrl.types import Array

EMBEDDING = "model.embed_tokens"
_WEIGHT = ".weight"
_EXPERT = re.compile(r"(?P<experts>.+\.mlp\.experts)\.(?P<number>\d+)\.(?P<leaf>(gate|up|down)_proj)")
_STACKS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


@dataclass(frozen=True)
class Layers:
    """The layers of one model folder; what is read is kept."""

    folder: Path

    def shapes(self) -> dict[str, LoraShape]:
        """Sizes by layer name; a head that is not stored has the embedding's. Raises ModelError for a folder without
        embeddings."""
        if EMBEDDING not in self._stored:
            raise ModelError(f"{self.folder} has no {EMBEDDING}{_WEIGHT}; this is not a language model we can serve.")
        found: dict[str, LoraShape] = {}
        experts: dict[str, int] = {}
        for name, (_, (outputs, inputs)) in self._stored.items():
            if expert := _EXPERT.fullmatch(name):
                experts[expert["experts"]] = max(experts.get(expert["experts"], 0), int(expert["number"]) + 1)
            else:
                found[name] = LoraShape(inputs, outputs)
        for place, count in experts.items():
            inner, hidden = self._stored[f"{place}.0.gate_proj"][1]
            found |= {f"{place}.{leaf}": shape for leaf, shape in expert_shapes(count, hidden, inner).items()}
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


def adapted_as(layer: str) -> tuple[str, int]:
    """The name under which adapters know a layer of the files, and which expert it is of (0 where there are none)."""
    expert = _EXPERT.fullmatch(layer)
    return (f"{expert['experts']}.{_STACKS[expert['leaf']]}", int(expert["number"])) if expert else (layer, 0)
