"""Helpers around a trainer on a tiny model, of any engine: datums for every loss, passes, and adapters that do
something."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import torch

from openrl.backends.base import TrainBackend, TrainItem
from openrl.backends.torch.model import open_model
from openrl.backends.torch.train import Trainer
from openrl.checkpoints.peft import write_adapter
from openrl.errors import OpenRLError
from openrl.types import Array, Datum, LoraSpec, RequestId, RunId, TrainOutput, TrainPayload
from support.tiny import VOCAB

RUN = RunId("run")
SPEC = LoraSpec(rank=4, seed=7)

needs_mlx = pytest.mark.skipif(
    any(importlib.util.find_spec(package) is None for package in ("mlx", "mlx_lm")), reason="MLX is not installed"
)
ENGINES = ["cpu", pytest.param("mps", marks=needs_mlx)]


class Held(TrainBackend, Protocol):
    """A trainer that can be looked into."""

    def gradients(self, run: RunId) -> dict[str, Array]: ...

    def parameters(self, run: RunId) -> dict[str, Array]: ...


def open_trainer(engine: str, folder: Path, dtype: str = "float32", max_batch_tokens: int = 256) -> Held:
    """A trainer of a backend by name, in one thread where it has any."""
    if engine == "cpu":
        return trainer(folder, getattr(torch, dtype), max_batch_tokens)
    import mlx.core as mx

    from openrl.backends.mps import memory, model, train

    memory.set_limits()
    return train.Trainer(model.open_model(folder, getattr(mx, dtype)), max_batch_tokens, "tiny/model")


def trainer(folder: Path, dtype: torch.dtype = torch.float32, max_batch_tokens: int = 256) -> Trainer:
    """A trainer on the CPU, in one thread."""
    torch.set_num_threads(1)
    return Trainer(open_model(folder, torch.device("cpu"), dtype), max_batch_tokens, "tiny/model")


def create(held: Held, into: Path, run: RunId = RUN, spec: LoraSpec = SPEC, seed: int = 0) -> None:
    """A run whose adapter does something: B is not zero. `into` is a scratch folder."""
    held.create(run, spec)
    rng = np.random.default_rng(seed)
    tensors = {
        name: value if name.endswith("A") else rng.normal(0, 0.05, value.shape).astype(np.float32)
        for name, value in held.parameters(run).items()
    }
    folder = into / f"{run}-{seed}"
    folder.mkdir(exist_ok=True)
    write_adapter(folder, spec, tensors, "tiny/model")
    held.load(run, folder, optimizer=False)


def datum(loss: str, n: int, seed: int, k: int | None = None) -> Datum:
    """A random datum of `n` tokens for a loss; rank-2 with `k` targets a position. Some positions count for nothing."""
    rng = np.random.default_rng(seed)
    shape = (n,) if k is None else (n, k)
    inputs: dict[str, Array] = {"target_tokens": rng.integers(0, VOCAB, shape)}
    if loss == "cross_entropy":
        inputs["weights"] = (rng.normal(0.5, 1, shape) * (rng.random(shape) > 0.2)).astype(np.float32)
    else:
        inputs["logprobs"] = rng.normal(-6, 1.5, shape).astype(np.float32)
        inputs["advantages"] = (rng.normal(0, 1, shape) * (rng.random(shape) > 0.2)).astype(np.float32)
    if loss == "gspo":
        inputs["sequence_ratio_mask"] = np.ones(n, dtype=np.float32)
    return Datum(rng.integers(0, VOCAB, n).astype(np.int32), inputs)


def on_policy(held: Held, payload: TrainPayload, run: RunId = RUN, spread: float = 0.3) -> TrainPayload:
    """The payload with `logprobs` near the model's own, as after sampling, so that ratios are neither 0 nor huge."""
    rng = np.random.default_rng(1)
    plain = tuple(Datum(d.tokens, {"target_tokens": d.inputs["target_tokens"]}) for d in payload.data)
    own = forward(held, TrainPayload(plain, "cross_entropy"), run).logprobs
    data = [
        replace(d, inputs={**d.inputs, "logprobs": (lp + rng.normal(0, spread, lp.shape)).astype(np.float32)})
        for d, lp in zip(payload.data, own, strict=True)
    ]
    return replace(payload, data=tuple(data))


def run_pass(held: Held, *items: TrainItem) -> dict[RequestId, TrainOutput | OpenRLError]:
    """A whole pass; checks that every item is answered exactly once."""
    outcomes: dict[RequestId, TrainOutput | OpenRLError] = {}
    for finished in held.train_pass(items):
        assert not finished.keys() & outcomes.keys()
        outcomes |= finished
    assert outcomes.keys() == {item.request for item in items}
    return outcomes


def item(payload: TrainPayload, run: RunId = RUN, *, backward: bool = True) -> TrainItem:
    """One request of a run, named after it."""
    return TrainItem(RequestId(f"request of {run}"), run, payload, backward)


def forward_backward(held: Held, payload: TrainPayload, run: RunId = RUN) -> TrainOutput:
    """A pass of one request that must succeed."""
    return _only(run_pass(held, item(payload, run)))


def forward(held: Held, payload: TrainPayload, run: RunId = RUN) -> TrainOutput:
    """The same without a gradient."""
    return _only(run_pass(held, item(payload, run, backward=False)))


def _only(outcomes: Mapping[Any, TrainOutput | OpenRLError]) -> TrainOutput:
    (outcome,) = outcomes.values()
    assert isinstance(outcome, TrainOutput), outcome
    return outcome


def ce(*lengths: int, seed: int = 0) -> TrainPayload:
    """A cross-entropy request with datums of the given lengths."""
    return TrainPayload(tuple(datum("cross_entropy", n, seed + i) for i, n in enumerate(lengths)), "cross_entropy")


def same(found: Mapping[str, Array], expected: Mapping[str, Array]) -> bool:
    """Bit for bit."""
    return found.keys() == expected.keys() and all(
        found[name].tobytes() == expected[name].tobytes() for name in expected
    )


def size(gradients: Sequence[Array]) -> float:
    """L2 norm over all tensors."""
    return float(np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradients)))
