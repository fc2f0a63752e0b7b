"""Opening the PyTorch backend: one copy of the base weights, a trainer and a sampler over it."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import psutil
import torch
from transformers.utils import logging as transformers_logging

from openrl.backends.base import Backend, BackendSpec
from openrl.backends.common.full_files import check_model
from openrl.backends.common.full_train import FullTrainer
from openrl.backends.common.training import Training
from openrl.backends.common.whole_models import Sampling
from openrl.backends.torch.device import Compute, choose
from openrl.backends.torch.full_model import parameter_shapes
from openrl.backends.torch.full_sample import TorchRoom
from openrl.backends.torch.full_train import TorchFull
from openrl.backends.torch.model import CausalLM, open_model
from openrl.backends.torch.sample import Sampler
from openrl.backends.torch.train import Trainer
from openrl.errors import BadRequest
from openrl.types import DeviceReport, ModelInfo

# Beyond this, an adapter of all layers outweighs a small base model, and LoRA's evidence ends (A13); its memory
# (four float32 values a parameter) is what the limit protects.
MAX_LORA_RANK = 256

_BESIDE = 4  # part of the base model's prefix cache that a whole model beside it has


def open_backend(spec: BackendSpec) -> Backend:
    """Load the model and make both halves. Raises `ModelError` for a model or device that cannot be used."""
    _quiet_transformers()
    compute = choose(spec.device, spec.dtype, spec.threads)
    if spec.devices > 1:
        return _open_on_several(spec, compute)
    model = open_model(spec.folder, compute.device, compute.dtype, quantize=spec.quantize)
    sampling = _sampling(model, spec, compute)
    full = FullTrainer(TorchFull(model, spec.folder, spec.max_batch_tokens), spec.name, sampling.release_idle)
    return Backend(
        info=_model_info(model),
        report=_report(compute, spec.quantize),
        use_threads=torch.set_num_threads,
        train=Training(Trainer(model, spec.max_batch_tokens, spec.name), full),
        sample=sampling,
    )


def _open_on_several(spec: BackendSpec, compute: Compute) -> Backend:
    """The model's layers spread over several devices; rank 0, in this process, samples."""
    from openrl.backends.torch.distributed.opening import open_team  # brings what one device does without

    opened = open_team(spec, compute)
    return Backend(
        info=replace(_model_info(opened.model), full_tuning=False),
        report=replace(_report(compute, spec.quantize), device=opened.place, memory_bytes=opened.resident),
        use_threads=opened.trainer.use_threads,
        train=opened.trainer,
        sample=_sampling(opened.model, spec, compute),
    )


def _sampling(model: CausalLM, spec: BackendSpec, compute: Compute) -> Sampling:
    """The base model's sampler, and how one of a checkpoint of all parameters is opened beside it."""

    def sampler(opened: CausalLM, stored: int) -> Sampler:
        # The base folder's tokenizer serves them all: a checkpoint's may be deleted while it is open.
        return Sampler(opened, spec.folder, spec.max_sample_rows, spec.max_kv_tokens, prefix_cache_tokens=stored)

    def beside(folder: Path) -> Sampler:
        if model.quantize != "none":
            raise BadRequest(
                f"with engine.quantize {model.quantize!r} only the base model and adapters are sampled; this "
                "checkpoint is a whole model.",
                "Serve without --quantize.",
            )
        # Nothing of the folder counts but its weights: it may have come from another server.
        check_model(folder, parameter_shapes(model.config))
        opened = open_model(folder, compute.device, compute.dtype, deepcopy(model.config))
        opened.eos_ids = model.eos_ids
        return sampler(opened, spec.prefix_cache_tokens // _BESIDE)

    return Sampling(sampler(model, spec.prefix_cache_tokens), TorchRoom(model), beside)


def _quiet_transformers() -> None:
    """A worker's terminal belongs to the daemon, which shows its own progress."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


def _model_info(model: CausalLM) -> ModelInfo:
    narrowest = min(min(shape.inputs, shape.outputs) for shape in model.shapes.values())
    return ModelInfo(
        vocab_size=model.vocab_size,
        max_context=model.config.max_position_embeddings,
        max_lora_rank=min(MAX_LORA_RANK, narrowest),  # a higher rank than the matrix has adds nothing
        parameters=model.parameters,
        family=model.config.model_type,
        full_tuning=model.quantize == "none" and not model.is_mixture,
        projections=sum(shape.inputs * shape.outputs for shape in model.shapes.values()) - model.head.numel(),
    )


def _report(compute: Compute, quantize: str) -> DeviceReport:
    return DeviceReport(
        backend="torch",
        device=str(compute.device),
        dtype=str(compute.dtype).removeprefix("torch."),
        quantize=quantize,
        threads=compute.threads,
        memory_bytes=psutil.Process().memory_info().rss,
    )
