"""Putting vLLM in the place of a backend's sampler, where the settings have it so."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import replace

from openrl.backends.base import Backend, BackendSpec
from openrl.backends.common.stops import Stops
from openrl.backends.vllm.life import Life
from openrl.backends.vllm.plan import plan, python_of
from openrl.backends.vllm.sampler import VllmSampler
from openrl.backends.vllm.wholes import Wholes
from openrl.errors import ModelError

log = logging.getLogger(__name__)

# Families whose experts' adapters vLLM reads in another form than ours (A10), and on some devices none at all.
MIXTURES = frozenset({"qwen3_moe"})


def training_half(spec: BackendSpec, device: str) -> BackendSpec:
    """What the other half is opened with on "cpu" or "cuda": it knows who samples."""
    return replace(spec, device=device, sampler="vllm" if wanted(spec, device) else "engine")


def attach(backend: Backend, spec: BackendSpec) -> Backend:
    """The backend, with vLLM as its sampling half if that is wanted; its own engine stays for what vLLM cannot.

    Waits until vLLM has started. Raises ModelError, with the end of its log, if it cannot.
    """
    if spec.vllm is None or not wanted(spec, backend.report.device):
        return backend
    if backend.info.family in MIXTURES:
        _check_free(spec, backend.info.family)
        return backend
    opening = plan(spec, spec.vllm, backend.info, backend.report)
    life = Life(opening, python_of(spec.vllm), spec.vllm, spec.wake)
    spec.report("loading vLLM")
    life.open()
    wholes = Wholes(spec.folder, backend.info.parameters)
    sampler = VllmSampler(life, backend.sample, Stops(spec.folder, frozenset(opening.eos)), wholes)
    report = replace(backend.report, sampler=f"{life.report.engine} on {life.report.detail}")
    return replace(backend, report=report, sample=sampler, apart=sampler)


def _check_free(spec: BackendSpec, family: str) -> None:
    """Raises ModelError if our engine may not sample in vLLM's place."""
    if spec.sampler == "vllm":
        raise ModelError(
            f"vLLM does not sample {family!r}: it does not read adapters of a mixture's experts as they are trained.",
            "Take --sampler engine or auto.",
        )
    log.warning("our own engine samples %s: vLLM does not read adapters of a mixture's experts", spec.name)


def wanted(spec: BackendSpec, device: str) -> bool:
    """Whether vLLM is to sample: asked for by name, by an interpreter that has it, or there beside a GPU.

    Not beside a quantised base: it would compute with other weights than training does. Raises ModelError if it was
    asked for all the same.
    """
    if spec.quantize != "none":
        if spec.sampler == "vllm" or (spec.vllm is not None and spec.vllm.python is not None):
            raise ModelError(
                f"vLLM does not sample beside a base in {spec.quantize}: it would compute with other weights.",
                "Take --sampler engine, or leave --quantize away.",
            )
        return False
    if spec.sampler != "auto" or spec.vllm is None:
        return spec.sampler == "vllm"
    return spec.vllm.python is not None or (device.startswith("cuda") and importlib.util.find_spec("vllm") is not None)
