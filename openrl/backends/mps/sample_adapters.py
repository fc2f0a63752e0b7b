"""Reading adapter folders for the MLX sampler."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx

from openrl.backends.common.lora import LoraShape
from openrl.backends.common.run_files import adapter_arrays
from openrl.backends.mps.lora import Adapter
from openrl.checkpoints.peft import read_adapter


def load_adapter(folder: Path, shapes: Mapping[str, LoraShape]) -> Adapter:
    """Read a PEFT folder as an adapter of the model whose layers are `shapes`; float32.

    Raises `BadRequest` when the files are missing or damaged, or do not fit the model (C3). Call `Adapter.freeze` on
    the result for sampling.
    """
    read = read_adapter(folder)
    arrays = adapter_arrays(read, shapes)
    a = {name: mx.array(pair[0]) for name, pair in arrays.items()}
    b = {name: mx.array(pair[1]) for name, pair in arrays.items()}
    return Adapter(read.spec, a, b)
