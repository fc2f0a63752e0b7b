"""Putting vLLM in the place of a backend's sampler, where the settings have it so."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

from openrl.backends.base import Backend, BackendSpec
from openrl.backends.common.stops import Stops
from openrl.backends.vllm.life import Life
from openrl.backends.vllm.plan import plan, python_of
from openrl.backends.vllm.sampler import VllmSampler


def attach(backend: Backend, spec: BackendSpec) -> Backend:
    """The backend, with vLLM as its sampling half if that is wanted; its own engine stays for what vLLM cannot.

    Waits until vLLM has started. Raises ModelError, with the end of its log, if it cannot.
    """
    if spec.vllm is None or not wanted(spec, backend.report.device):
        return backend
    opening = plan(spec, spec.vllm, backend.info, backend.report)
    life = Life(opening, python_of(spec.vllm), spec.vllm, spec.wake)
    spec.report("loading vLLM")
    life.open()
    sampler = VllmSampler(life, backend.sample, Stops(spec.folder, frozenset(opening.eos)))
    report = replace(backend.report, sampler=f"{life.report.engine} on {life.report.detail}")
    return replace(backend, report=report, sample=sampler, apart=sampler)


def wanted(spec: BackendSpec, device: str) -> bool:
    """Whether vLLM is to sample: asked for by name, by an interpreter that has it, or there beside a GPU."""
    if spec.sampler != "auto" or spec.vllm is None:
        return spec.sampler == "vllm"
    return spec.vllm.python is not None or (device.startswith("cuda") and importlib.util.find_spec("vllm") is not None)
