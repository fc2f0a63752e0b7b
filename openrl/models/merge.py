"""An adapter merged into its base model: a Hugging Face folder that is the trained function and needs nothing else.

Runs for `openrl checkpoints export`, shard by shard, so that no more than one file of the model is in memory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from openrl.checkpoints.peft import ALPHA, HEAD_NAME, AdapterFolder
from openrl.errors import ModelError
from openrl.models import linear
from openrl.models.hub_cache import tokenizer_files
from openrl.models.info import weight_files
from openrl.types import Array

_INDEX = "model.safetensors.index.json"
_HEAD, _EMBEDDING = f"{HEAD_NAME}.weight", f"{linear.EMBEDDING}.weight"
_TIED = "tie_word_embeddings"


def merge(base: Path, adapter: AdapterFolder, into: Path) -> None:
    """Write W + (32 / r) B A, added in float32 and cast to the model's dtype (A16), for every adapted layer.

    A trained head of a tied model is written as a weight of its own, with the embeddings as they are (A9).
    Raises ModelError if a layer is not in the base model's files.
    """
    deltas = _Deltas(adapter)
    untie = HEAD_NAME in adapter.layers and _is_tied(base)
    for path in weight_files(base):
        tensors = load_file(path)
        if untie:
            tensors.pop(_HEAD, None)  # a copy of the embeddings that transformers does not read
            if _EMBEDDING in tensors:
                tensors[_HEAD] = tensors[_EMBEDDING].clone()
        merged = {name: deltas.add_to(name, weight) for name, weight in tensors.items()}
        save_file(merged, into / path.name, metadata={"format": "pt"})
    if deltas.left:
        raise ModelError(f"{base} has no weights of {sorted(deltas.left)[0]!r}, which the adapter changes.")
    _write_beside(base, into, untie=untie)


class _Deltas:
    """What is to be added to each weight; `left` are the layers whose weight has not come yet."""

    def __init__(self, adapter: AdapterFolder) -> None:
        self._adapter = adapter
        self._scale = ALPHA / adapter.spec.rank
        self._layers = frozenset(adapter.layers)
        self.left = set(self._layers)

    def add_to(self, name: str, weight: Tensor) -> Tensor:
        layer, expert = linear.adapted_as(name.removesuffix(".weight"))
        if layer not in self._layers:
            return weight
        self.left.discard(layer)
        a, b = (_one(self._adapter.tensors[f"{layer}.lora_{factor}"], expert) for factor in "AB")
        return (weight.float() + self._scale * (b.float() @ a.float())).to(weight.dtype)


def _one(factor: Array, expert: int) -> Tensor:
    """A factor, or an expert's own in a stack, whose first is everyone's if there is but one (A10)."""
    tensor = torch.from_numpy(factor)
    return tensor if tensor.ndim == 2 else tensor[expert if len(tensor) > 1 else 0]


def _is_tied(base: Path) -> bool:
    """Whether the head shares the embeddings. Configs that leave it open have their family's default: then it shows in
    whether the head is stored."""
    config = _read(base / "config.json")
    stated = config.get("text_config", config).get(_TIED, config.get(_TIED))
    return not linear.Layers(base).has_head if stated is None else bool(stated)


def _write_beside(base: Path, into: Path, *, untie: bool) -> None:
    """Config, tokenizer and index; of an untied model with the head's new place."""
    for path in tokenizer_files(base):
        shutil.copyfile(path, into / path.name)
    if (base / _INDEX).is_file():
        _write(into / _INDEX, _index(_read(base / _INDEX), untie=untie))
    if untie:
        config = _read(into / "config.json")
        _write(into / "config.json", _untied(config))


def _index(index: dict[str, Any], *, untie: bool) -> dict[str, Any]:
    names: dict[str, str] = dict(index["weight_map"])
    if untie:
        names[_HEAD] = names[_EMBEDDING]
    return {**index, "weight_map": names}


def _untied(config: Mapping[str, Any]) -> dict[str, Any]:
    changed = {**config, _TIED: False}
    if "text_config" in config:
        changed["text_config"] = {**config["text_config"], _TIED: False}
    return changed


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
