"""A base in four bits (QLoRA): training and sampling compute with the dequantised weights, and with nothing else."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from openrl.backends.base import Backend, BackendSpec, SampleJob, VllmSpec
from openrl.backends.cpu import open_backend
from openrl.backends.torch.lora import LoraLinear
from openrl.backends.torch.model import CausalLM, open_model
from openrl.backends.torch.nf4 import Nf4Linear
from openrl.backends.torch.train import Trainer
from openrl.errors import BadRequest, ModelError
from openrl.types import (
    AdapterRef,
    Datum,
    FullSpec,
    RequestId,
    RunId,
    SampleOutput,
    SamplePayload,
    SamplingParams,
    TrainPayload,
)
from support import tiny
from support.reference import Reference, distance
from support.training import RUN, SPEC, ce, create, forward, forward_backward, same, trainer

pytest.importorskip("bitsandbytes", reason="openrl[quantize] is not installed")
Folders = Callable[..., Path]
DTYPES = [torch.float32, torch.bfloat16]
PROMPT = [5, 17, 42, 8, 61]


def held_in_nf4(folder: Path, dtype: torch.dtype, device: str = "cpu") -> Trainer:
    torch.set_num_threads(1)
    return Trainer(open_model(folder, torch.device(device), dtype, quantize="nf4"), 256, "tiny/model")


def linears(model: CausalLM) -> dict[str, Nf4Linear]:
    """All layers that can carry an adapter, but for the head."""
    wrapped = [m for m in model.backbone.modules() if isinstance(m, LoraLinear)]
    assert {m.name for m in wrapped} | {"lm_head"} == set(model.shapes)
    found = {m.name: m.base for m in wrapped if isinstance(m.base, Nf4Linear)}
    assert len(found) == len(wrapped)
    return found


def dequantised(model: CausalLM, source: Path, into: Path) -> Path:
    """A model with the weights that an engine computes with, as a folder."""
    whole: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        for name, linear in linears(model).items():
            whole.get_parameter(f"{name}.weight").copy_(linear.weight)
    whole.save_pretrained(into)
    return into


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_training_is_that_of_the_dequantised_weights(
    family: str, dtype: torch.dtype, model_folder: Folders, tmp_path: Path
) -> None:
    """Against float64 within the dtype's tolerance (docs/backends.md), and against our own engine on those weights to
    the last bit: the adapters' part is as it always is."""
    held = held_in_nf4(model_folder(family), dtype)
    folder = dequantised(held._model, model_folder(family), tmp_path / "dense")
    plain = trainer(folder, dtype)
    for each in (held, plain):
        create(each, tmp_path)
    payload = ce(40, 21, 70)
    output, usual = forward_backward(held, payload), forward_backward(plain, payload)
    assert output.metrics == usual.metrics
    assert same(held.gradients(RUN), plain.gradients(RUN))
    answer = Reference(folder).answer(payload, held.parameters(RUN), SPEC.rank)
    worst, far = (1e-4, 1e-4) if dtype is torch.float32 else (0.2, 0.1)
    for found, expected in zip(output.logprobs, answer.logprobs, strict=True):
        assert abs(found - expected).max() < worst
    assert distance(held.gradients(RUN), answer.gradients) < far


@pytest.mark.parametrize("size", [128, 48])
def test_nf4_has_four_bits(size: int, tmp_path: Path) -> None:
    """Weights lie at the sixteen levels of their block of 64, of which the outermost is the largest weight, and take
    less than 0.28 of what they do in bf16 (with whole blocks in a row, and with blocks that go on in the next)."""
    folder = tiny.build(tmp_path / "m", "llama", hidden_size=size, intermediate_size=2 * size, num_hidden_layers=1)
    model = open_model(folder, torch.device("cpu"), torch.float32, quantize="nf4")
    whole: Any = AutoModelForCausalLM.from_pretrained(folder)
    held, in_bf16 = 0, 0
    for name, linear in linears(model).items():
        weight: torch.Tensor = whole.get_parameter(f"{name}.weight").detach()
        blocks, made = weight.view(-1, 64), linear.weight.clone().view(-1, 64)
        largest = blocks.abs().amax(1, keepdim=True)
        scaled = made / made.abs().amax(1, keepdim=True)
        assert len(scaled.mul(1e4).round().unique()) <= 17  # 16 levels, and -1 where that is not one of them
        assert ((made - blocks).abs() <= 0.16 * largest).all()
        held += linear.held_bytes
        in_bf16 += 2 * weight.numel()
    assert held < 0.28 * in_bf16
    assert model.parameters == sum(p.numel() for p in whole.parameters())
    assert model.head.dtype is torch.float32


def open_nf4(folder: Path, dtype: str, **changes: Any) -> Backend:
    return open_backend(
        BackendSpec(folder, "cpu", dtype, 1, 512, 8, 4096, name="tiny/model", quantize="nf4", **changes)
    )


def drawn(backend: Backend, adapter: AdapterRef | None, n: int) -> SampleOutput:
    payload = SamplePayload(np.array(PROMPT, np.int32), n, SamplingParams(max_tokens=30, stop=(), seed=3))
    backend.sample.add(SampleJob(RequestId("s"), payload, adapter))
    while backend.sample.busy:
        for _, output in backend.sample.step():
            assert isinstance(output, SampleOutput), output
            return output
    raise AssertionError("the sampler lost its job")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_s14_sampler_and_trainer_agree(family: str, dtype: str, model_folder: Folders, tmp_path: Path) -> None:
    """S14: KL v2 of both halves over one base in four bits is what it is over whole weights."""
    backend = open_nf4(model_folder(family), dtype)
    create(backend.train, tmp_path)  # type: ignore[arg-type]
    (tmp_path / "saved").mkdir()
    backend.train.save(RUN, tmp_path / "saved", optimizer=False, gradients=False)
    sequences = drawn(backend, AdapterRef("one", tmp_path / "saved"), 8).sequences
    whole = [np.array([*PROMPT, *s.tokens.tolist()], np.int32) for s in sequences]
    data = tuple(Datum(s[:-1], {"target_tokens": s[1:].astype(np.int64)}) for s in whole)
    scored = forward(backend.train, TrainPayload(data, "cross_entropy")).logprobs  # type: ignore[arg-type]
    q = np.concatenate([s.logprobs for s in sequences]).astype(np.float64)
    p = np.concatenate([lp[len(PROMPT) - 1 :] for lp in scored]).astype(np.float64)
    assert 0.5 * np.mean((q - p) ** 2) < {"float32": 1e-8, "bfloat16": 1e-3}[dtype]


def test_checkpoints_are_the_usual_ones(model_folder: Folders, tmp_path: Path) -> None:
    """C4, and the base is not in them: a run goes on over whole weights, as another function of the same adapter."""
    held, plain = held_in_nf4(model_folder("llama"), torch.float32), trainer(model_folder("llama"))
    create(held, tmp_path)
    (tmp_path / "saved").mkdir()
    held.save(RUN, tmp_path / "saved", optimizer=False, gradients=False)
    plain.load(RUN, tmp_path / "saved", optimizer=False)
    assert same(plain.parameters(RUN), held.parameters(RUN))
    one, two = (forward(each, ce(30)).logprobs[0] for each in (held, plain))
    assert 1e-3 < abs(one - two).max() < 5


def test_f1_all_parameters_cannot_be_trained(model_folder: Folders, tmp_path: Path) -> None:
    """F1: `full_tuning` says so, and a request or a checkpoint of such a run is refused with the reason."""
    backend = open_nf4(model_folder("llama"), "float32")
    assert backend.info.full_tuning is False
    with pytest.raises(BadRequest, match=r"four bits.*rank of 1 or more"):
        backend.train.create(RunId("full"), FullSpec())
    plain = open_backend(BackendSpec(model_folder("llama"), "cpu", "float32", 1, 512, 8, 4096))
    plain.train.create(RUN, FullSpec())
    folder = tmp_path / "whole"
    folder.mkdir()
    plain.train.save(RUN, folder, optimizer=False, gradients=False)
    with pytest.raises(BadRequest, match="four bits"):
        backend.train.load(RunId("full"), folder, optimizer=False)


def test_whole_models_are_not_sampled_beside_it(model_folder: Folders, tmp_path: Path) -> None:
    plain = open_backend(BackendSpec(model_folder("llama"), "cpu", "float32", 1, 512, 8, 4096))
    plain.train.create(RUN, FullSpec())
    plain.train.save(RUN, tmp_path, optimizer=False, gradients=False)
    backend = open_nf4(model_folder("llama"), "float32")
    payload = SamplePayload(np.array(PROMPT, np.int32), 1, SamplingParams(max_tokens=3))
    backend.sample.add(SampleJob(RequestId("s"), payload, AdapterRef("whole", tmp_path)))
    answers = [answer for _ in range(3) for answer in backend.sample.step()]
    assert [type(error) for _, error in answers] == [BadRequest]
    assert "only the base model and adapters are sampled" in str(answers[0][1])


@pytest.mark.parametrize(
    ("sampler", "vllm"), [("vllm", VllmSpec(Path("x"))), ("auto", VllmSpec(Path("x"), Path("python")))]
)
def test_vllm_is_refused(sampler: str, vllm: VllmSpec, model_folder: Folders) -> None:
    with pytest.raises(ModelError, match="vLLM does not sample beside a base in nf4"):
        open_nf4(model_folder("llama"), "float32", sampler=sampler, vllm=vllm)


def test_a_mixture_of_experts_is_refused(tmp_path: Path, model_folder: Folders) -> None:
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(num_experts=4, num_hidden_layers=1, hidden_size=32, moe_intermediate_size=16)
    with pytest.raises(ModelError, match="dense models; 'qwen3_moe' is a mixture"):
        open_model(model_folder("llama"), torch.device("cpu"), torch.float32, config, quantize="nf4")


def test_without_bitsandbytes_the_way_to_install_it_is_told(
    model_folder: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else find(name))
    with pytest.raises(ModelError, match=r"bitsandbytes.*pip install 'openrl\[quantize\]'"):
        open_nf4(model_folder("llama"), "float32")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU (scripts/gpu_check.sh)")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_nf4_on_the_gpu(family: str, model_folder: Folders, tmp_path: Path) -> None:
    """bitsandbytes' own kernels, which write into memory that they are given: as over the same weights held whole."""
    held = held_in_nf4(model_folder(family), torch.bfloat16, "cuda")
    folder = dequantised(held._model, model_folder(family), tmp_path / "dense")
    plain = Trainer(open_model(folder, torch.device("cuda"), torch.bfloat16), 256, "tiny/model")
    for each in (held, plain):
        create(each, tmp_path)
        forward_backward(each, ce(40, 21, 70))
    assert distance(held.gradients(RUN), plain.gradients(RUN)) < 1e-3
