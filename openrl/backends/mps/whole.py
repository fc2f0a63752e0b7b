"""Whole models other than the base, of its shape: one that trains (`full_model`), and those of its checkpoints.

mlx-lm may keep a family's weights under other names than its folder does, or change them as it loads them. A base
model is only trained whole where it does neither, so that checkpoints are what transformers opens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from openrl.backends.common.full_files import Shapes, shapes_in
from openrl.backends.mps.model import MlxModel, load_module, open_module
from openrl.checkpoints.full import MODEL_FILE
from openrl.checkpoints.peft import HEAD_NAME
from openrl.errors import BadRequest

Places = dict[str, tuple[Any, str]]  # of each weight, the module that has it and under which attribute
_HEAD_WEIGHT = f"{HEAD_NAME}.weight"
_COMPUTED = "rotary_emb.inv_freq"  # stored by old versions of transformers


def why_not_trained(model: MlxModel, folder: Path) -> str | None:
    """Why not all parameters of the base model in `folder` can be trained, if so."""
    if any(name.endswith(".scales") for name in model.tensors):
        return "its weights are quantised"
    stored = {name: shape for file in _files(folder) for name, shape in shapes_in(file).items()}
    if model.config["tie_word_embeddings"]:
        stored.pop(_HEAD_WEIGHT, None)
    stored = {name: shape for name, shape in stored.items() if not name.endswith(_COMPUTED)}
    for name in sorted({*stored, *model.tensors}):
        if stored.get(name) != model.tensors.get(name):
            return f"mlx-lm does not keep {name} as the model's folder does"
    if set(model.head) != {"weight"}:
        return "its output head has more than a weight"
    return None


def shapes_of(model: MlxModel, folder: Path) -> Shapes:
    """The parameters of a base model. Raises `BadRequest` with the reason where they cannot be trained."""
    if (why := why_not_trained(model, folder)) is not None:
        raise BadRequest(
            f"the mps backend cannot train all parameters of this model: {why}.", "Train LoRA: a rank of 1 or more."
        )
    return model.tensors


def places_of(module: Any) -> Places:
    """Where the weights of a module are, before or after its layers are wrapped."""
    modules = dict(cast("list[tuple[str, Any]]", module.named_modules()))
    named: Any = tree_flatten(module.parameters())
    found = [(name, *name.rpartition(".")[::2]) for name, _ in named]
    return {name: (modules[owner], leaf) for name, owner, leaf in found}


def stored_weights(folder: Path) -> dict[str, mx.array]:
    """A folder's weights by name, which are read when they are needed."""
    return {name: array for file in _files(folder) for name, array in read_lazily(file).items()}


def read_lazily(file: Path) -> dict[str, mx.array]:
    """The tensors of a file that was checked before; each is read when it is needed."""
    return cast("dict[str, mx.array]", mx.load(str(file)))


def open_beside(base: MlxModel, base_folder: Path, checkpoint: Path) -> MlxModel:
    """The model of a checkpoint, whose weights were found to fit. Nothing else of its folder counts: it may have come
    from another server."""
    module = load_module(base_folder, base.config)
    put(places_of(module), read_lazily(checkpoint / MODEL_FILE), base.dtype)
    return open_module(module, base.config, base.dtype, base.eos_ids)


def put(places: Places, weights: dict[str, mx.array], dtype: mx.Dtype) -> None:
    """Give a module weights, cast to a dtype and one at a time, in place of its own; they are used up."""
    for name, (owner, leaf) in places.items():
        weight = weights.pop(name).astype(dtype)
        mx.eval(weight)
        setattr(owner, leaf, weight)


def _files(folder: Path) -> list[Path]:
    """The weights that mlx-lm reads of a folder."""
    return sorted(folder.glob("model*.safetensors"))
