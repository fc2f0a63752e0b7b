"""MLX: made for Apple Silicon, where it uses the GPU; on Linux it computes on the CPU."""

from __future__ import annotations

import mlx.core as mx
import psutil

from openrl.backends.base import Backend, BackendSpec
from openrl.backends.mps.memory import device_name, has_gpu, set_limits
from openrl.backends.mps.model import MlxModel, open_model
from openrl.backends.mps.sample import Sampler
from openrl.backends.mps.train import Trainer
from openrl.errors import ModelError
from openrl.models.info import MAX_LORA_RANK
from openrl.types import DeviceReport, ModelInfo

_DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}


def open_backend(spec: BackendSpec) -> Backend:
    """Load the model and make both halves. Raises `ModelError` for a model that cannot be used."""
    dtype = _dtype(spec.dtype)
    set_limits()
    model = open_model(spec.folder, dtype)
    return Backend(
        info=_model_info(model),
        report=_report(spec),
        train=Trainer(model, spec.max_batch_tokens, spec.name),
        sample=Sampler(
            model,
            spec.folder,
            spec.max_sample_rows,
            spec.max_kv_tokens,
            prefix_cache_tokens=spec.prefix_cache_tokens,
        ),
    )


def _dtype(name: str) -> mx.Dtype:
    """`auto` is bf16 on a GPU; a CPU emulates it."""
    if name == "auto":
        return mx.bfloat16 if has_gpu() else mx.float32
    if name not in _DTYPES:
        raise ModelError(f"unknown dtype {name!r}.", f"Known: auto, {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def _model_info(model: MlxModel) -> ModelInfo:
    narrowest = min(min(shape.inputs, shape.outputs) for shape in model.shapes.values())
    return ModelInfo(
        vocab_size=model.vocab_size,
        max_context=model.max_context,
        max_lora_rank=min(MAX_LORA_RANK, narrowest),  # a higher rank than the matrix has adds nothing
        parameters=model.parameters,
        family=str(model.config["model_type"]),
        full_tuning=False,
    )


def _report(spec: BackendSpec) -> DeviceReport:
    return DeviceReport(
        backend="mlx",
        device=device_name(),
        dtype=str(_dtype(spec.dtype)).removeprefix("mlx.core."),
        threads=spec.threads,
        memory_bytes=psutil.Process().memory_info().rss,
    )
