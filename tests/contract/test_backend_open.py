"""Opening the PyTorch backend: what it reports, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config

from openrl.backends.base import BackendSpec
from openrl.backends.cpu import open_backend
from openrl.backends.torch.device import choose, pick_device, pick_dtype
from openrl.errors import ModelError
from openrl.types import AdamParams, TrainOutput
from support import tiny
from support.training import RUN, SPEC, ce, forward, forward_backward, item, run_pass, trainer

CPU = torch.device("cpu")


@pytest.fixture
def spec(model_folder: Callable[..., Path]) -> BackendSpec:
    return BackendSpec(model_folder("llama"), "auto", "float32", 1, 256, 4, 512, name="tiny/model")


def test_info_and_report(spec: BackendSpec) -> None:
    """What the daemon checks requests against, and what `openrl status` shows."""
    backend = open_backend(spec)
    info, report = backend.info, backend.report
    assert (info.vocab_size, info.max_context, info.family) == (tiny.VOCAB, 256, "llama")
    assert info.max_lora_rank == 16  # two key-value heads of 8: no narrower matrix
    assert info.parameters == 97 * 32 + 3 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32) + 32
    assert (report.device, report.dtype, report.threads) == ("cpu", "float32", 1)
    assert report.memory_bytes > 0
    backend.train.create(RUN, SPEC)
    assert not backend.sample.busy
    (outcome,) = run_pass(backend.train, item(ce(5))).values()
    assert isinstance(outcome, TrainOutput)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_both_halves_share_one_model(family: str, model_folder: Callable[..., Path], spec: BackendSpec) -> None:
    """What the sampler does to the weights for its own speed leaves training as it was."""
    spec = replace(spec, folder=model_folder(family), dtype="bfloat16")
    backend, alone = open_backend(spec), trainer(spec.folder, torch.bfloat16)
    for held in (backend.train, alone):
        held.create(RUN, SPEC)
    payload = ce(40, 70)
    assert forward(backend.train, payload).metrics == forward_backward(backend.train, payload).metrics  # G5
    backend.train.optim_step(RUN, AdamParams(learning_rate=0.0))
    outcomes = [next(iter(run_pass(held, item(payload)).values())) for held in (backend.train, alone)]
    assert all(isinstance(outcome, TrainOutput) for outcome in outcomes)
    steps = [held.optim_step(RUN, AdamParams()) for held in (backend.train, alone)]
    assert outcomes[0].metrics == pytest.approx(outcomes[1].metrics, rel=1e-5)
    assert steps[0].metrics == pytest.approx(steps[1].metrics, rel=1e-3)


def test_unsupported_family_is_refused(spec: BackendSpec, tmp_path: Path) -> None:
    """Refused rather than guessed, with the families that work."""
    GPT2Config(n_layer=1, n_embd=8, n_head=2).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"gpt2.*llama"):
        open_backend(replace(spec, folder=tmp_path))


def test_devices_and_dtypes() -> None:
    """ "auto" is resolved to something that works here, with its reason; unknown names list the legal ones."""
    assert pick_device("cpu") == CPU
    assert pick_dtype("bfloat16", CPU)[0] is torch.bfloat16
    dtype, reason = pick_dtype("auto", CPU)
    assert dtype in (torch.float32, torch.bfloat16)
    assert "ms in float32" in reason
    assert choose("cpu", "float32", 1).threads == 1
    for call in (lambda: pick_device("tpu"), lambda: pick_dtype("int8", CPU)):
        with pytest.raises(ModelError, match="Known: auto"):
            call()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_that_is_not_there() -> None:
    """No silent fallback to the CPU."""
    with pytest.raises(ModelError, match="no CUDA device"):
        pick_device("cuda")
