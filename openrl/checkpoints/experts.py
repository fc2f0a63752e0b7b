"""Adapters of a mixture's experts as PEFT reads them: each expert's projections with an A and a B of their own, in
which what experts share (A10) is repeated. It is the same function."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from openrl.checkpoints.peft import EXPERT_MODULES, MLP_MODULES, AdapterFolder
from openrl.errors import BadRequest
from openrl.types import Array

_PROJECTIONS: dict[str, str] = dict(zip(EXPERT_MODULES, MLP_MODULES, strict=True))


def has_stacks(adapter: AdapterFolder) -> bool:
    """Whether an adapter has experts in stacks."""
    return any(tensor.ndim == 3 for tensor in adapter.tensors.values())


def one_by_one(adapter: AdapterFolder) -> Mapping[str, Array]:
    """The tensors, with `<...>.experts.w1.lora_A` and so on as `<...>.experts.<number>.gate_proj.lora_A`.

    Raises `BadRequest` for a mixture some of whose layers are dense: PEFT then leaves those layers out without a word.
    """
    dense = [layer for layer in adapter.layers if layer.endswith(tuple(f".mlp.{name}" for name in MLP_MODULES))]
    if dense:
        raise BadRequest(
            f"PEFT cannot have experts and dense layers in one adapter, and {dense[0]!r} is dense.",
            "Export with --as archive or --as merged.",
        )
    found: dict[str, Array] = {}
    for layer in adapter.layers:
        a, b = (adapter.tensors[f"{layer}.lora_{factor}"] for factor in "AB")
        if a.ndim == 2:
            found |= {f"{layer}.lora_A": a, f"{layer}.lora_B": b}
            continue
        place, _, stack = layer.rpartition(".")
        for expert in range(max(len(a), len(b))):
            name = f"{place}.{expert}.{_PROJECTIONS[stack]}"
            found[f"{name}.lora_A"] = np.ascontiguousarray(a[expert if len(a) > 1 else 0])
            found[f"{name}.lora_B"] = np.ascontiguousarray(b[expert if len(b) > 1 else 0])
    return found
