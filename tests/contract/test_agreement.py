"""Sampler and trainer of one backend agree: same weights, same logprobs, through a checkpoint folder."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

from openrl.backends.base import Backend, BackendSpec, SampleJob, TrainItem
from openrl.types import (
    AdamParams,
    AdapterRef,
    Datum,
    FloatArray,
    LoraSpec,
    RequestId,
    RunId,
    SampleOutput,
    SamplePayload,
    SamplingParams,
    TrainOutput,
    TrainPayload,
)
from support import tiny

RUN = RunId("s:train:0")
PROMPT = [5, 17, 42, 8, 61]


def forward(backend: Backend, sequences: list[list[int]], *, backward: bool = False) -> list[FloatArray]:
    data = tuple(Datum(np.array(s[:-1], np.int32), {"target_tokens": np.array(s[1:], np.int64)}) for s in sequences)
    item = TrainItem(RequestId("f"), RUN, TrainPayload(data, "cross_entropy"), backward)
    results = {k: v for part in backend.train.train_pass((item,)) for k, v in part.items()}
    output = results[RequestId("f")]
    assert isinstance(output, TrainOutput)
    return list(output.logprobs)


def sample(backend: Backend, adapter: AdapterRef, tokens: list[int], n: int, max_tokens: int) -> SampleOutput:
    params = SamplingParams(max_tokens=max_tokens, stop=(), seed=3)
    payload = SamplePayload(np.array(tokens, np.int32), n, params, prompt_logprobs=True)
    backend.sample.add(SampleJob(RequestId("s"), payload, adapter))
    while backend.sample.busy:
        for _, output in backend.sample.step():
            assert isinstance(output, SampleOutput), output
            return output
    raise AssertionError("the sampler lost its job")


@pytest.mark.parametrize("engine", ["cpu", "mps"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("tied", [True, False])
def test_s6_s14_s15_sampler_equals_trainer(tmp_path: Path, engine: str, family: str, tied: bool) -> None:
    """S6, S14 (v2 < 1e-8 on one device in float32), S15: also once the run has moved on."""
    if engine == "mps":
        pytest.importorskip("mlx.core", reason="needs mlx")
    open_backend = importlib.import_module(f"openrl.backends.{engine}").open_backend
    backend = open_backend(
        BackendSpec(tiny.build(tmp_path / "m", family, tied=tied), "cpu", "float32", 1, 512, 8, 4096)
    )
    backend.train.create(RUN, LoraSpec(rank=4, seed=1))
    forward(backend, [[*PROMPT, 1, 2, 3]], backward=True)
    backend.train.optim_step(RUN, AdamParams(learning_rate=0.05))
    folder = tmp_path / "adapter"
    folder.mkdir()
    backend.train.save(RUN, folder, optimizer=False, gradients=False)
    adapter = AdapterRef("one", folder)

    drawn = sample(backend, adapter, PROMPT, 6, 30)
    sequences = [PROMPT + s.tokens.tolist() for s in drawn.sequences]
    trained = forward(backend, sequences)
    q = np.concatenate([s.logprobs for s in drawn.sequences]).astype(np.float64)
    lp = np.concatenate([x[len(PROMPT) - 1 :] for x in trained]).astype(np.float64)
    assert 0.5 * np.mean((q - lp) ** 2) < 1e-8
    assert drawn.prompt_logprobs is not None
    np.testing.assert_allclose(drawn.prompt_logprobs[1:], trained[0][: len(PROMPT) - 1], atol=1e-5)

    forward(backend, [[*PROMPT, 9, 9]], backward=True)
    backend.train.optim_step(RUN, AdamParams(learning_rate=0.5))
    scored = sample(backend, adapter, sequences[0], 1, 1).prompt_logprobs
    assert scored is not None
    np.testing.assert_allclose(scored[1:], trained[0], atol=1e-5)
