"""Opening the PyTorch backend: what it reports, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import tiny
from support.training import RUN, SPEC, ce, item, run_pass
from transformers import GPT2Config

from openrl.backends.base import BackendSpec
from openrl.backends.cpu import open_backend
from openrl.backends.torch.device import choose, pick_device, pick_dtype
from openrl.errors import ModelError
from openrl.types import TrainOutput

CPU = torch.device("cpu")


@pytest.fixture
def spec(model_folder: Callable[..., Path]) -> BackendSpec:
    return BackendSpec(model_folder("llama"), "auto", "float32", 1, 256, 4, 512, "tiny/model")


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
