"""Adapters made elsewhere: what PEFT or a Tinker archive holds, brought into the form in which runs are saved.

Only what stays exactly the same function is taken. alpha is 32 here (A1), so another one is folded into B. Layers that
the adapter leaves alone, though its kind of layer is trained, get A = B = 0: they add nothing and have no gradient, so
they stay so in further training.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from openrl.checkpoints.peft import (
    ADAPTER_FILE,
    ALPHA,
    ARCHIVE_HEAD,
    ATTN_MODULES,
    CONFIG_FILE,
    EXPERT_MODULES,
    HEAD_NAME,
    MLP_MODULES,
    OPTIMIZER_FILE,
    PREFIX,
    SUFFIX,
    AdapterFolder,
    LoraShape,
    modules_of,
    spec_of,
    write_adapter,
    write_tensors,
)
from openrl.checkpoints.tensor_file import read_float32
from openrl.errors import BadRequest
from openrl.types import Array, LoraSpec

_EXPERT = re.compile(r".+\.mlp\.experts\.\d+\.(gate|up|down)_proj")
_BASE_COPY = re.compile(re.escape(PREFIX) + r"(?P<layer>lm_head|model\.embed_tokens)(\.base_layer)?\.weight")

# Keys of adapter_config.json that, when set, make another function of the same tensors.
_REFUSED: Mapping[str, str] = {
    "use_rslora": "rank-stabilised scaling (alpha / sqrt(r))",
    "use_dora": "DoRA (a magnitude vector beside A and B)",
    "modules_to_save": "fully trained modules",
    "rank_pattern": "different ranks for different layers",
    "alpha_pattern": "different alphas for different layers",
    "fan_in_fan_out": "transposed base weights",
    "lora_bias": "a bias on B",
    "layer_replication": "replicated layers",
    "target_parameters": "adapted parameters that are no linear layers",
    "trainable_token_indices": "trained token embeddings",
    "alora_invocation_tokens": "an adapter that is active only after some tokens",
    "use_qalora": "QA-LoRA",
}


class Base(Protocol):
    """What must be known of the base model."""

    def shapes(self) -> Mapping[str, LoraShape]:
        """Of its linear layers, by name, with a mixture's experts as `w1`, `w3` and `w2` (A10)."""
        ...

    def weight(self, layer: str) -> Array:
        """A layer's weight in float32."""
        ...


def read_foreign(folder: Path, base: Base, max_rank: int) -> AdapterFolder:
    """The adapter in `folder` for a base model, in float32, as a run with alpha 32 has it.

    Raises BadRequest, in words, for an adapter that cannot be had exactly or does not fit the model.
    """
    rank, alpha = _read_config(folder / CONFIG_FILE, max_rank)
    layers = base.shapes()
    stored = read_float32(folder / ADAPTER_FILE)
    for key in [key for key in stored if _BASE_COPY.fullmatch(key)]:
        _check_copy(key, stored.pop(key), base)
    given = {_name(key): tensor for key, tensor in stored.items()}
    spec = spec_of(rank, 0, {name.split(".")[-2] for name in given})
    _check_layers(given, layers, rank)
    return AdapterFolder(spec, _complete(given, layers, spec, alpha / ALPHA))


def write_training(into: Path, adapter: AdapterFolder, base_model: str) -> None:
    """Write a training checkpoint's files: the adapter, and an optimizer that has not taken a step."""
    write_adapter(into, adapter.spec, adapter.tensors, base_model)
    state: dict[str, Array] = {"t": np.array(0, np.int64)}
    for prefix in ("m", "v"):
        state |= {f"{prefix}.{name}": np.zeros_like(tensor) for name, tensor in adapter.tensors.items()}
    write_tensors(into / OPTIMIZER_FILE, state)


def _read_config(file: Path, max_rank: int) -> tuple[int, float]:
    """Rank and alpha."""
    try:
        config = cast("dict[str, Any]", json.loads(file.read_text()))
    except (OSError, ValueError) as error:
        raise BadRequest(f"{file.parent} has no readable {file.name}: {error}.") from error
    if config.get("peft_type") != "LORA":
        raise BadRequest(f"peft_type is {config.get('peft_type')!r}; only LORA adapters can be imported.")
    if config.get("bias", "none") != "none":
        raise BadRequest(f"bias is {config['bias']!r}: the adapter trained biases, which runs here do not have.")
    for key, meaning in _REFUSED.items():
        if config.get(key):
            raise BadRequest(f"{key} is {config[key]!r}: {meaning} cannot be taken over exactly.")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or not 1 <= rank <= max_rank:
        raise BadRequest(f"r is {rank!r}; legal: 1 to {max_rank}.")
    if not isinstance(alpha, (int, float)) or alpha <= 0:
        raise BadRequest(f"lora_alpha is {alpha!r}; it must be a positive number.")
    return rank, alpha


def _name(key: str) -> str:
    """`<layer>.lora_A` or `<layer>.lora_B`."""
    name = key.removeprefix(PREFIX).removesuffix(SUFFIX)
    layer, _, factor = name.rpartition(".")
    if not key.startswith(PREFIX) or not key.endswith(SUFFIX) or factor not in ("lora_A", "lora_B") or not layer:
        raise BadRequest(f"{ADAPTER_FILE} holds {key!r}; expected {PREFIX}<layer>.lora_A{SUFFIX} or .lora_B{SUFFIX}.")
    return f"{HEAD_NAME if layer == ARCHIVE_HEAD else layer}.{factor}"


def _check_copy(key: str, found: Array, base: Base) -> None:
    """PEFT stores the base's own embeddings and head beside an adapter of them. They add nothing if they are the
    base's, to the precision of bfloat16, in which PEFT may have had them."""
    match = _BASE_COPY.fullmatch(key)
    assert match is not None
    layer = match["layer"]
    own = base.weight(layer) if layer in base.shapes() else None
    if own is None or own.shape != found.shape or not np.allclose(found, own, rtol=2**-7, atol=1e-6):
        raise BadRequest(f"{ADAPTER_FILE} holds {key!r}, which is not the base model's: embeddings that were trained.")


def _check_layers(given: Mapping[str, Array], layers: Mapping[str, LoraShape], rank: int) -> None:
    if not given:
        raise BadRequest(f"{ADAPTER_FILE} is empty.")
    legal = (*ATTN_MODULES, *MLP_MODULES, *EXPERT_MODULES, HEAD_NAME)
    for layer in sorted({name.rpartition(".")[0] for name in given}):
        if layer.rpartition(".")[2] not in legal:
            raise BadRequest(f"the adapter changes {layer!r}; layers that can be adapted: {', '.join(legal)}.")
        if _EXPERT.fullmatch(layer):
            raise BadRequest(
                f"the adapter gives {layer!r} an A and a B of its own; here experts share one of the two.",
                "A Tinker archive has them so, as experts.w1, w3 and w2.",
            )
        if layer not in layers:
            raise BadRequest(f"the adapter changes {layer!r}, which the base model does not have.")
        for factor, shape in zip(("lora_A", "lora_B"), layers[layer].factors(rank), strict=True):
            found = given.get(f"{layer}.{factor}")
            if found is None or found.shape != shape:
                what = "is missing" if found is None else f"has shape {found.shape}"
                raise BadRequest(f"{layer}.{factor} {what}; this base model needs {shape}.")


def _complete(
    given: Mapping[str, Array], layers: Mapping[str, LoraShape], spec: LoraSpec, factor: float
) -> dict[str, Array]:
    """All layers that a run of `spec` has, with B scaled by `factor`."""
    wanted = modules_of(spec)
    tensors: dict[str, Array] = {}
    for layer, shape in layers.items():
        if layer.rpartition(".")[2] in wanted:
            size_a, size_b = shape.factors(spec.rank)
            a = given.get(f"{layer}.lora_A", np.zeros(size_a, np.float32))
            b = given.get(f"{layer}.lora_B", np.zeros(size_b, np.float32))
            tensors[f"{layer}.lora_A"] = np.ascontiguousarray(a)
            tensors[f"{layer}.lora_B"] = (b.astype(np.float64) * factor).astype(np.float32)
    return tensors
