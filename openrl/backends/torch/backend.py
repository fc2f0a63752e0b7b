"""Opening the PyTorch backend: one copy of the base weights, a trainer and a sampler over it."""

from __future__ import annotations

import psutil
from transformers.utils import logging as transformers_logging

from openrl.backends.base import Backend, BackendSpec
from openrl.backends.torch.device import Compute, choose
from openrl.backends.torch.model import CausalLM, open_model
from openrl.backends.torch.sample import Sampler
from openrl.backends.torch.train import Trainer
from openrl.types import DeviceReport, ModelInfo

# Beyond this, an adapter of all layers outweighs a small base model, and LoRA's evidence ends (A13); its memory
# (four float32 values a parameter) is what the limit protects.
MAX_LORA_RANK = 256


def open_backend(spec: BackendSpec) -> Backend:
    """Load the model and make both halves. Raises `ModelError` for a model or device that cannot be used."""
    _quiet_transformers()
    compute = choose(spec.device, spec.dtype, spec.threads)
    model = open_model(spec.folder, compute.device, compute.dtype)
    return Backend(
        info=_model_info(model),
        report=_report(compute),
        train=Trainer(model, spec.max_batch_tokens, spec.name),
        sample=Sampler(
            model,
            spec.folder,
            spec.max_sample_rows,
            spec.max_kv_tokens,
            prefix_cache_tokens=spec.prefix_cache_tokens,
        ),
    )


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
    )


def _report(compute: Compute) -> DeviceReport:
    return DeviceReport(
        backend="torch",
        device=str(compute.device),
        dtype=str(compute.dtype).removeprefix("torch."),
        threads=compute.threads,
        memory_bytes=psutil.Process().memory_info().rss,
    )
