"""Which checkpoints of whole models vLLM can take in the place of the base model's weights.

vLLM would keep the old values of a tensor that is missing, and says nothing of one that it has no use for. So a
checkpoint must have all of the base model's parameters, under the names and in the shapes of the base's own files.
"""

from __future__ import annotations

import json
import math
from functools import cached_property
from pathlib import Path

from openrl.checkpoints.full import MODEL_FILE, is_full
from openrl.checkpoints.tensor_file import read_header
from openrl.errors import BadRequest

_INDEX = "model.safetensors.index.json"
Shapes = dict[str, tuple[int, ...]]


class Wholes:
    """`parameters` of the base model in `folder`, each counted once (F4)."""

    def __init__(self, folder: Path, parameters: int) -> None:
        self._folder = folder
        self._parameters = parameters

    def misfit(self, folder: Path) -> str:
        """Why a checkpoint's weights cannot be taken; "" if they can."""
        if not is_full(folder):
            return "it is no whole model"
        try:
            found = read_header(folder / MODEL_FILE).shapes()
        except BadRequest as error:
            return error.message
        unlike = next((name for name, shape in found.items() if self._base.get(name) != shape), None)
        if unlike is not None:
            return f"the base model's files have {unlike!r} in another shape or under another name"
        count = sum(map(math.prod, found.values()))
        return "" if count == self._parameters else f"it has {count} of {self._parameters} parameters"

    @cached_property
    def _base(self) -> Shapes:
        """Of the base model's own files."""
        index, shapes = self._folder / _INDEX, Shapes()
        if index.is_file():
            names = set(json.loads(index.read_text())["weight_map"].values())
        else:
            names = {file.name for file in self._folder.glob("*.safetensors")}
        for name in sorted(names):
            shapes |= read_header(self._folder / name).shapes()
        return shapes
