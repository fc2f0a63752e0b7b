"""5.9 on a tiny model: a loss that runs beside the model equals the client's way of two passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from openrl.backends.base import TrainItem
from openrl.backends.torch.train import Trainer
from openrl.custom_loss import LossProgram
from openrl.errors import BadRequest
from openrl.types import Array, Datum, RequestId, RunId, TrainOutput, TrainPayload
from support import losses
from support.reference import distance
from support.tiny import VOCAB
from support.training import RUN, SPEC, ce, create, forward, forward_backward, run_pass, same, trainer

LENGTHS = (5, 30, 17, 1, 22)
OTHER = RunId("other")


def payload(ranks: dict[str, int]) -> TrainPayload:
    """Random datums with all that a loss reads, and one input that it does not."""
    rng = np.random.default_rng(5)
    data: list[Datum] = []
    for n in LENGTHS:
        shape = (n,) if ranks["logprobs"] == 1 else (n, 4)
        inputs: dict[str, Array] = {"unread": rng.normal(0, 1, 3).astype(np.float32)}
        for key, rank in ranks.items():
            inputs[key] = rng.normal(-1, 1, {0: (1,), 1: (n,), 2: shape}[rank]).astype(np.float32)
        inputs["target_tokens"] = rng.integers(0, VOCAB, shape)
        data.append(Datum(rng.integers(0, VOCAB, n).astype(np.int32), inputs))
    return TrainPayload(tuple(data), "custom", {"loss_id": "any"})


def custom(content: TrainPayload, program: LossProgram, run: RunId = RUN, *, backward: bool = True) -> TrainItem:
    return TrainItem(RequestId(f"custom of {run}"), run, content, backward, program)


def plain(content: TrainPayload, weights: list[Array] | None = None) -> TrainPayload:
    """The same datums for cross_entropy, as the client sends them (1.9)."""
    data = [replace(d, inputs={"target_tokens": d.inputs["target_tokens"]}) for d in content.data]
    if weights is not None:
        data = [replace(d, inputs={**d.inputs, "weights": w}) for d, w in zip(data, weights, strict=True)]
    return TrainPayload(tuple(data), "cross_entropy")


def in_the_client(held: Trainer, content: TrainPayload, fn: losses.LossFn, ranks: dict[str, int]) -> dict[str, float]:
    """Forward, the function, and a surrogate whose weights are -dC/dlp; returns the metrics (1.9)."""
    lps = [torch.tensor(lp, requires_grad=True) for lp in forward(held, plain(content)).logprobs]
    metrics: dict[str, float] = {"loss:sum": 0.0}
    for lp, datum in zip(lps, content.data, strict=True):
        reads = {key: torch.tensor(datum.inputs[key]) for key in list(ranks)[1:]}
        loss, found = fn(lp, *(value if ranks[key] else value.reshape(()) for key, value in reads.items()))
        loss.backward()
        metrics["loss:sum"] += float(loss.detach())
        for key, value in found.items():
            share = len(lps) if key.endswith(":mean") else 1
            metrics[key] = metrics.get(key, 0.0) + float(value.detach()) / share
    forward_backward(held, plain(content, [-lp.grad.numpy() for lp in lps]))
    return metrics


@pytest.mark.parametrize("name", sorted(losses.LOSSES))
@pytest.mark.parametrize("max_batch_tokens", [40, 4096])
def test_one_pass_equals_two(
    name: str, max_batch_tokens: int, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Loss, metrics (sums and means over datums), logprobs and the whole gradient, to 1e-5."""
    fn, ranks = losses.LOSSES[name]
    held = trainer(model_folder("llama"), max_batch_tokens=max_batch_tokens)
    create(held, tmp_path)
    create(held, tmp_path, OTHER)
    content = payload(ranks)
    (output,) = run_pass(held, custom(content, losses.program(fn, ranks), OTHER)).values()
    assert isinstance(output, TrainOutput), output
    expected = in_the_client(held, content, fn, ranks)
    assert output.metrics == pytest.approx(expected, rel=1e-5, abs=1e-5)
    for found, truth in zip(output.logprobs, forward(held, plain(content)).logprobs, strict=True):
        np.testing.assert_allclose(found, truth, rtol=1e-5, atol=1e-5)
    assert distance(held.gradients(OTHER), held.gradients(RUN)) < 1e-5
    assert any(g.any() for g in held.gradients(RUN).values())


def test_forward_gives_the_loss_and_changes_nothing(llama: Trainer, tmp_path: Path) -> None:
    """G5, L4."""
    fn, ranks = losses.LOSSES["clipped"]
    create(llama, tmp_path)
    before = llama.gradients(RUN)
    content, program = payload(ranks), losses.program(fn, ranks)
    (only,) = run_pass(llama, custom(content, program, backward=False)).values()
    assert same(llama.gradients(RUN), before)
    (both,) = run_pass(llama, custom(content, program)).values()
    assert isinstance(only, TrainOutput)
    assert isinstance(both, TrainOutput)
    assert only.metrics == pytest.approx(both.metrics)


def overflows(logprobs: torch.Tensor, scale: torch.Tensor) -> losses.Answer:
    return (logprobs * scale).exp().sum(), {}


def misfits(logprobs: torch.Tensor, other: torch.Tensor) -> losses.Answer:
    return (logprobs * other).sum(), {}


@pytest.mark.parametrize(("fn", "words"), [(overflows, "not finite"), (misfits, r"data\[1\].*node 'mul'")])
@pytest.mark.parametrize("max_batch_tokens", [20, 4096])
def test_l11_g6_a_loss_that_fails_on_one_datum_leaves_no_trace(
    fn: losses.LossFn, words: str, max_batch_tokens: int, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Not finite, or shapes that do not fit: the request fails as the user's, G is untouched, neighbours are served."""
    held = trainer(model_folder("llama"), max_batch_tokens=max_batch_tokens)
    create(held, tmp_path)
    create(held, tmp_path, OTHER, seed=1)
    forward_backward(held, ce(10))
    before = held.gradients(RUN)
    name = "scale" if fn is overflows else "other"
    content = payload({"logprobs": 1, name: 1})
    bad: dict[str, Any] = {"scale": np.full(30, -1000, np.float32), "other": np.ones(7, np.float32)}
    data = list(content.data)
    data[1] = replace(data[1], inputs={**data[1].inputs, name: bad[name]})
    program = losses.program(fn, {"logprobs": 1, name: 1})
    good = TrainItem(RequestId("good"), OTHER, ce(17, 8), backward=True)
    outcomes = run_pass(held, custom(replace(content, data=tuple(data)), program), good)
    failed = outcomes[RequestId(f"custom of {RUN}")]
    assert isinstance(failed, BadRequest)
    assert failed.category == "user"
    with pytest.raises(BadRequest, match=words):
        raise failed
    assert same(held.gradients(RUN), before)
    assert isinstance(outcomes[RequestId("good")], TrainOutput)


def test_infinite_metrics_are_the_users_own(llama: Trainer) -> None:
    """Only loss and gradient must be finite; a metric is reported as it is."""

    def odd(logprobs: torch.Tensor) -> losses.Answer:
        loss = logprobs.sum()
        return loss, {"custom/inf:sum": loss / 0, "custom/nan:mean": loss * 0 / 0}

    llama.create(RUN, SPEC)
    (output,) = run_pass(llama, custom(payload({"logprobs": 1}), losses.program(odd, {"logprobs": 1}))).values()
    assert isinstance(output, TrainOutput), output
    assert output.metrics["custom/inf:sum"] == -np.inf
    assert np.isnan(output.metrics["custom/nan:mean"])
