"""Adapter folders as Hugging Face PEFT reads them, plus the optimizer's files beside them. Numpy only.

Tensors go by `<layer>.lora_A` and `<layer>.lora_B` in this project, with the layer's name in the base model. The head
is stored under PEFT's own name, `lm_head`; the Tinker archive's name for it is a matter of export.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from openrl.errors import BadRequest
from openrl.types import Array, LoraSpec

ALPHA = 32  # A1
ATTN_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_MODULES = ("gate_proj", "up_proj", "down_proj")
# The same of a mixture's experts, in stacks of all of them (A10): gate, up and down.
EXPERT_MODULES = ("w1", "w3", "w2")
HEAD_NAME = "lm_head"
ARCHIVE_HEAD = "model.unembed_tokens"  # the head's name in a Tinker archive (A15)

CONFIG_FILE = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
GRADIENTS_FILE = "gradients.safetensors"

PREFIX, SUFFIX = "base_model.model.", ".weight"
_SEED = "openrl_seed"  # in the file's metadata, since PEFT warns of keys in the config that it does not know


@dataclass(frozen=True, slots=True)
class LoraShape:
    """Input and output size of a layer that can carry an adapter.

    `stack`: of a stack of experts (A10), how many A and how many B there are; one of the two is 1, shared by all.
    """

    inputs: int
    outputs: int
    stack: tuple[int, int] | None = None

    def factors(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of A and B: [r, in] and [out, r], or [E, r, in] and [1, out, r], or with E and 1 exchanged."""
        a, b = (rank, self.inputs), (self.outputs, rank)
        return (a, b) if self.stack is None else ((self.stack[0], *a), (self.stack[1], *b))


def expert_shapes(experts: int, hidden: int, inner: int) -> dict[str, LoraShape]:
    """The stacks of a mixture's layer (A10): gate and up share A, down shares B."""
    into = LoraShape(hidden, inner, (1, experts))
    return {"w1": into, "w3": into, "w2": LoraShape(inner, hidden, (experts, 1))}


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """A folder's adapter: its spec and float32 tensors by `<layer>.lora_A` and `<layer>.lora_B`."""

    spec: LoraSpec
    tensors: Mapping[str, Array]

    @property
    def layers(self) -> list[str]:
        return sorted({name.rpartition(".")[0] for name in self.tensors})


def modules_of(spec: LoraSpec) -> frozenset[str]:
    """The modules that a spec trains (4.2), by the last part of their layers' names."""
    attn = ATTN_MODULES if spec.train_attn else ()
    mlp = (*MLP_MODULES, *EXPERT_MODULES) if spec.train_mlp else ()
    return frozenset((*attn, *mlp, *((HEAD_NAME,) if spec.train_unembed else ())))


def spec_of(rank: int, seed: int, modules: set[str]) -> LoraSpec:
    """The spec of an adapter that has layers of these modules."""
    return LoraSpec(
        rank=rank,
        seed=seed,
        train_attn=bool(modules & set(ATTN_MODULES)),
        train_mlp=bool(modules & {*MLP_MODULES, *EXPERT_MODULES}),
        train_unembed=HEAD_NAME in modules,
    )


def write_adapter(into: Path, spec: LoraSpec, tensors: Mapping[str, Array], base_model: str) -> None:
    """Write `adapter_config.json` (A14) and `adapter_model.safetensors` (A15) into an existing folder."""
    (into / CONFIG_FILE).write_text(json.dumps(_config(spec, tensors, base_model), indent=2) + "\n")
    named = {f"{PREFIX}{name}{SUFFIX}": tensor for name, tensor in tensors.items()}
    save_file(named, into / ADAPTER_FILE, metadata={"format": "pt", _SEED: str(spec.seed)})


def read_adapter(folder: Path) -> AdapterFolder:
    """Read what `write_adapter` or PEFT wrote. Raises `BadRequest` for what cannot be served as it was trained."""
    config = read_config(folder / CONFIG_FILE)
    tensors, metadata = _read(folder / ADAPTER_FILE)
    named = {layer_name(key): tensor for key, tensor in tensors.items()}
    modules = {name.split(".")[-2] for name in named}
    return AdapterFolder(spec_of(int(config["r"]), int(metadata.get(_SEED, "0")), modules), named)


def write_tensors(file: Path, tensors: Mapping[str, Array]) -> None:
    """Write a safetensors file."""
    save_file(dict(tensors), file)


def read_tensors(file: Path) -> dict[str, Array]:
    """Read a safetensors file. Raises `BadRequest` if it is missing or damaged."""
    return _read(file)[0]


def _config(spec: LoraSpec, tensors: Mapping[str, Array], base_model: str) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model or None,
        "r": spec.rank,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": sorted({name.split(".")[-2] for name in tensors}),
        "rank_pattern": {},
        "alpha_pattern": {},
        "modules_to_save": None,
        "inference_mode": True,
        "init_lora_weights": True,
    }


def read_config(file: Path) -> dict[str, Any]:
    try:
        config = cast("dict[str, Any]", json.loads(file.read_text()))
    except (OSError, ValueError) as error:
        raise BadRequest(f"the checkpoint has no readable {file.name}: {error}.") from error
    expected = {"peft_type": "LORA", "lora_alpha": ALPHA, "bias": "none"}
    for key, value in expected.items():
        if config.get(key) != value:
            raise BadRequest(f"{file.name} has {key} = {config.get(key)!r}; supported is {value!r}.")
    for key in ("rank_pattern", "alpha_pattern", "modules_to_save", "use_rslora", "use_dora"):
        if config.get(key):
            raise BadRequest(f"{file.name} sets {key} to {config[key]!r}; adapters with it are not supported.")
    if not isinstance(config.get("r"), int) or config["r"] < 1:
        raise BadRequest(f"{file.name} has r = {config.get('r')!r}; it must be a positive integer.")
    return config


def layer_name(key: str) -> str:
    name = key.removeprefix(PREFIX).removesuffix(SUFFIX)
    legal = key.startswith(PREFIX) and key.endswith(SUFFIX) and name.count(".")
    if not legal or name.rpartition(".")[2] not in ("lora_A", "lora_B"):
        raise BadRequest(
            f"{ADAPTER_FILE} has the tensor {key!r}; expected {PREFIX}<layer>.lora_A{SUFFIX} or .lora_B{SUFFIX}."
        )
    return name


def _read(file: Path) -> tuple[dict[str, Array], dict[str, str]]:
    if not file.is_file():
        raise BadRequest(f"the checkpoint has no {file.name}.")
    try:
        with safe_open(file, framework="np") as opened:
            metadata = dict(opened.metadata() or {})
            return {key: np.asarray(opened.get_tensor(key)) for key in opened.keys()}, metadata  # noqa: SIM118
    except (SafetensorError, OSError, TypeError) as error:
        raise BadRequest(f"{file.name} of the checkpoint cannot be read: {error}.") from error
