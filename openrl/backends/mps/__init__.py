"""MLX: made for Apple Silicon, where it uses the GPU; on Linux it computes on the CPU."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import psutil

from openrl.backends.base import Backend, BackendSpec
from openrl.backends.common.full_files import check_model
from openrl.backends.common.full_train import FullTrainer
from openrl.backends.common.training import Training
from openrl.backends.common.whole_models import Sampling
from openrl.backends.mps.full_train import MlxFull, MlxRoom
from openrl.backends.mps.memory import device_name, has_gpu, set_limits
from openrl.backends.mps.model import MlxModel, open_model
from openrl.backends.mps.sample import Sampler
from openrl.backends.mps.train import Trainer
from openrl.backends.mps.whole import open_beside, why_not_trained
from openrl.errors import ModelError
from openrl.models.info import MAX_LORA_RANK
from openrl.types import DeviceReport, ModelInfo

_BESIDE = 4  # part of the base model's prefix cache that a whole model beside it has
_DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}


def open_backend(spec: BackendSpec) -> Backend:
    """Load the model and make both halves. Raises `ModelError` for a model that cannot be used."""
    if spec.devices > 1:
        raise ModelError(f"backend 'mps' trains on one device; engine.devices is {spec.devices}.", "Leave it away.")
    dtype = pick_dtype(spec.dtype)
    set_limits()
    model = open_model(spec.folder, dtype)
    sampling = _sampling(model, spec)
    full = FullTrainer(MlxFull(model, spec.folder, spec.max_batch_tokens), spec.name, sampling.release_idle)
    return Backend(
        info=_model_info(model, spec.folder),
        report=_report(spec),
        train=Training(Trainer(model, spec.max_batch_tokens, spec.name), full),
        sample=sampling,
    )


def _sampling(model: MlxModel, spec: BackendSpec) -> Sampling:
    """The base model's sampler, and how one of a checkpoint of all parameters is opened beside it."""

    def sampler(opened: MlxModel, stored: int) -> Sampler:
        # The base folder's tokenizer serves them all: a checkpoint's may be deleted while it is open.
        return Sampler(opened, spec.folder, spec.max_sample_rows, spec.max_kv_tokens, prefix_cache_tokens=stored)

    def beside(folder: Path) -> Sampler:
        check_model(folder, model.tensors)
        return sampler(open_beside(model, spec.folder, folder), spec.prefix_cache_tokens // _BESIDE)

    return Sampling(sampler(model, spec.prefix_cache_tokens), MlxRoom(model), beside)


def pick_dtype(name: str) -> mx.Dtype:
    """`auto` is bf16 on a GPU; a CPU emulates it."""
    if name == "auto":
        return mx.bfloat16 if has_gpu() else mx.float32
    if name not in _DTYPES:
        raise ModelError(f"unknown dtype {name!r}.", f"Known: auto, {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def _model_info(model: MlxModel, folder: Path) -> ModelInfo:
    narrowest = min(min(shape.inputs, shape.outputs) for shape in model.shapes.values())
    return ModelInfo(
        vocab_size=model.vocab_size,
        max_context=model.max_context,
        max_lora_rank=min(MAX_LORA_RANK, narrowest),  # a higher rank than the matrix has adds nothing
        parameters=model.parameters,
        family=str(model.config["model_type"]),
        full_tuning=why_not_trained(model, folder) is None,
    )


def _report(spec: BackendSpec) -> DeviceReport:
    return DeviceReport(
        backend="mlx",
        device=device_name(),
        dtype=str(pick_dtype(spec.dtype)).removeprefix("mlx.core."),
        threads=spec.threads,
        memory_bytes=psutil.Process().memory_info().rss,
    )
