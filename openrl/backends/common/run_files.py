"""The files of a training run, as far as they are the same on every engine: numpy in, numpy out, all checks made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from openrl.backends.common.lora import LoraShape, layer_names
from openrl.checkpoints.peft import GRADIENTS_FILE, OPTIMIZER_FILE, AdapterFolder, read_tensors
from openrl.errors import BadRequest
from openrl.types import Array, LoraSpec

Shapes = Mapping[str, tuple[int, ...]]  # of parameters, by name


@dataclass(frozen=True, slots=True)
class Moments:
    """Adam's state by parameter name, float32, and the accumulator if it was saved."""

    m: Mapping[str, Array]
    v: Mapping[str, Array]
    t: int
    gradients: Mapping[str, Array] | None


def adapter_arrays(read: AdapterFolder, shapes: Mapping[str, LoraShape]) -> dict[str, tuple[Array, Array]]:
    """float32 A and B of each layer of a folder, in the model's order; `shapes` are those of the model's layers.

    Raises `BadRequest` naming the first layer that does not fit the model (C3).
    """
    unknown = [layer for layer in read.layers if layer not in shapes]
    if unknown:
        raise BadRequest(f"the checkpoint adapts the layer {unknown[0]!r}, which the base model does not have.")
    found: dict[str, tuple[Array, Array]] = {}
    for layer in [layer for layer in shapes if layer in read.layers]:
        a, b = shapes[layer].factors(read.spec.rank)
        tensors = read.tensors
        found[layer] = _adapter_tensor(tensors, f"{layer}.lora_A", a), _adapter_tensor(tensors, f"{layer}.lora_B", b)
    return found


def check_match(folder: AdapterFolder, spec: LoraSpec, shapes: dict[str, LoraShape]) -> None:
    """A checkpoint fits a run of the same rank and layers, else `BadRequest` (C3)."""
    if folder.spec.rank != spec.rank:
        raise BadRequest(f"the checkpoint has LoRA rank {folder.spec.rank}; the run has rank {spec.rank}.")
    wanted = layer_names(spec, shapes)
    if set(folder.layers) != set(wanted):
        raise BadRequest(
            f"the checkpoint adapts {_describe(folder.layers)}; the run adapts {_describe(wanted)}.",
            "Create the run with the checkpoint's train_attn, train_mlp and train_unembed.",
        )


def optimizer_tensors(m: Mapping[str, Array], v: Mapping[str, Array], t: int) -> dict[str, Array]:
    """The content of `optimizer.safetensors` (O11)."""
    tensors: dict[str, Array] = {"t": np.array(t, dtype=np.int64)}
    for prefix, moments in (("m", m), ("v", v)):
        tensors |= {f"{prefix}.{name}": array for name, array in moments.items()}
    return tensors


def read_moments(source: Path, shapes: Shapes) -> Moments:
    """A folder's m, v and t, and its accumulator if it has one. Raises `BadRequest` for what is missing."""
    if not (source / OPTIMIZER_FILE).exists():
        raise BadRequest(
            "the checkpoint has no optimizer state.", "Load its weights only, or use one made by save_state."
        )
    tensors = read_tensors(source / OPTIMIZER_FILE)
    m, v = (_matching(tensors, f"{prefix}.", shapes, OPTIMIZER_FILE) for prefix in ("m", "v"))
    if "t" not in tensors:
        raise BadRequest(f"{OPTIMIZER_FILE} lacks the step count 't'.")
    gradients = None
    if (source / GRADIENTS_FILE).exists():
        gradients = _matching(read_tensors(source / GRADIENTS_FILE), "", shapes, GRADIENTS_FILE)
    return Moments(m, v, int(tensors["t"]), gradients)


def _matching(tensors: Mapping[str, Array], prefix: str, shapes: Shapes, file: str) -> dict[str, Array]:
    """The tensors `prefix`+name for each name in `shapes`."""
    found: dict[str, Array] = {}
    for name, shape in shapes.items():
        array = tensors.get(f"{prefix}{name}")
        if array is None or array.shape != tuple(shape):
            given = "nothing" if array is None else array.shape
            raise BadRequest(f"{file} holds {given} for {prefix}{name}; the adapter needs {tuple(shape)}.")
        found[name] = array
    return found


def _adapter_tensor(tensors: Mapping[str, Array], name: str, shape: tuple[int, ...]) -> Array:
    if name not in tensors:
        raise BadRequest(f"the checkpoint lacks the tensor {name!r}.")
    if tensors[name].shape != shape:
        raise BadRequest(f"the checkpoint's {name!r} has shape {tensors[name].shape}; this base model needs {shape}.")
    return tensors[name].astype(np.float32, copy=False)


def _describe(layers: list[str]) -> str:
    leaves = sorted({name.rpartition(".")[2] for name in layers})
    return f"{len(layers)} layers ({', '.join(leaves)})"
