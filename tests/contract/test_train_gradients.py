"""Losses, logprobs and every parameter's gradient against an independent float64 reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from openrl.backends.common.spans import Span
from openrl.backends.torch.head import Head
from openrl.backends.torch.train import Trainer
from openrl.types import LoraSpec, TrainPayload
from support.reference import Reference, distance
from support.training import RUN, SPEC, Held, create, datum, forward_backward, on_policy, trainer

LENGTHS = (5, 30, 17, 1, 22)  # 30 and 22 are beyond gemma's sliding window of 16
LOSSES = ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"]

Folders = Callable[..., Path]
References = Callable[..., Reference]
Opened = Callable[..., Held]


@pytest.fixture
def either(opened: Opened, model_folder: Folders) -> Held:
    """A float32 trainer on the tiny llama, of each backend."""
    return opened(model_folder("llama"))


def check(held: Held, reference: Reference, payload: TrainPayload, spec: LoraSpec = SPEC) -> None:
    """L8, L3, L4 and the whole gradient."""
    output = forward_backward(held, payload)
    expected = reference.answer(payload, held.parameters(RUN), spec.rank)
    for datum_, lp, truth in zip(payload.data, output.logprobs, expected.logprobs, strict=True):
        assert lp.dtype == np.float32
        assert lp.shape == datum_.inputs["target_tokens"].shape
        np.testing.assert_allclose(lp, truth, atol=5e-5, rtol=1e-5)
    scale = max(1.0, abs(expected.total), float(sum(np.abs(d.inputs["target_tokens"]).size for d in payload.data)))
    assert output.metrics["loss:sum"] == pytest.approx(expected.total, abs=2e-5 * scale)
    assert all(key.count(":") == 1 for key in output.metrics)  # L5
    assert distance(held.gradients(RUN), expected.gradients) < 3e-5


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_gradient(
    family: str, loss: str, opened: Opened, model_folder: Folders, references: References, tmp_path: Path
) -> None:
    """1.4-1.8 through the whole model, several micro-batches, padding, all LoRA layers, a tied head (A9)."""
    held = opened(model_folder(family), max_batch_tokens=64)
    create(held, tmp_path)
    payload = TrainPayload(tuple(datum(loss, n, seed) for seed, n in enumerate(LENGTHS)), loss)
    if loss != "cross_entropy":
        payload = on_policy(held, payload)
    check(held, references(family), payload)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma2"])
def test_other_families(family: str, model_folder: Folders, references: References, tmp_path: Path) -> None:
    """Biases in attention, windows on all layers, capped scores and logits: whatever a family computes, so do we."""
    held = trainer(model_folder(family), max_batch_tokens=64)
    create(held, tmp_path)
    payload = TrainPayload(tuple(datum("cross_entropy", n, seed) for seed, n in enumerate(LENGTHS)), "cross_entropy")
    check(held, references(family), payload)


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling"])
def test_rank_2(loss: str, opened: Opened, model_folder: Folders, references: References, tmp_path: Path) -> None:
    """L14, L18, L20: K targets a position, K differing between datums and mixed with rank 1."""
    held = opened(model_folder("llama"))
    create(held, tmp_path)
    data = (datum(loss, 9, 0, k=3), datum(loss, 12, 1, k=1), datum(loss, 7, 2), datum(loss, 4, 3, k=20))
    payload = TrainPayload(data, loss)
    check(held, references("llama"), payload if loss == "cross_entropy" else on_policy(held, payload))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("only", ["train_attn", "train_mlp", "train_unembed"])
def test_modules(
    only: str, tied: bool, opened: Opened, model_folder: Folders, references: References, tmp_path: Path
) -> None:
    """4.2: each flag alone, on tied and untied embeddings (A9)."""
    flags = {"train_attn": False, "train_mlp": False, "train_unembed": False, only: True}
    spec = LoraSpec(rank=3, seed=1, **flags)
    held = opened(model_folder("llama", tied=tied))
    create(held, tmp_path, spec=spec)
    payload = TrainPayload((datum("cross_entropy", 8, 0), datum("cross_entropy", 11, 1)), "cross_entropy")
    check(held, references("llama", tied=tied), payload, spec)


@pytest.mark.parametrize("config", [{"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}, {}])
def test_config_and_per_datum_thresholds(
    config: dict[str, float], either: Held, references: References, tmp_path: Path
) -> None:
    """L15, L16: the request's thresholds, and one datum's own in place of them."""
    create(either, tmp_path)
    data = [datum("ppo", 12, 0), datum("ppo", 9, 1)]
    own = {"clip_low_threshold": np.array([0.5], np.float32), "clip_high_threshold": np.full(9, 1.5, np.float32)}
    data[1] = replace(data[1], inputs={**data[1].inputs, **own})
    check(either, references("llama"), on_policy(either, TrainPayload(tuple(data), "ppo", config)))


def test_fresh_adapter(either: Held, references: References, tmp_path: Path) -> None:
    """A3: with B = 0 the gradient of A is exactly zero, that of B is not."""
    either.create(RUN, SPEC)
    payload = TrainPayload((datum("cross_entropy", 14, 0),), "cross_entropy")
    check(either, references("llama"), payload)
    gradients = either.gradients(RUN)
    assert not any(value.any() for name, value in gradients.items() if name.endswith("lora_A"))
    assert all(value.any() for name, value in gradients.items() if name.endswith("lora_B"))


def test_logits_in_pieces(llama: Trainer, tmp_path: Path) -> None:
    """The head gives the same whether a datum's logits fit its buffer, share it, or need several rounds."""
    create(llama, tmp_path)
    model, adapter = llama._model, llama._runs[RUN].adapter
    rng = np.random.default_rng(0)
    lengths = (3, 9, 2, 2, 25)
    spans = [Span(adapter, rng.integers(0, model.vocab_size, (n, 2))) for n in lengths]
    x = torch.from_numpy(rng.normal(0, 1, (sum(lengths), 32)).astype(np.float32))
    weights = [rng.normal(0, 1, (n, 2)).astype(np.float32) * (rng.random((n, 1)) > 0.3) for n in lengths]

    def run(rows: int) -> tuple[list[np.ndarray], torch.Tensor, tuple[torch.Tensor, ...]]:
        seen: dict[int, np.ndarray] = {}

        def judge(index: int, logprobs: np.ndarray) -> np.ndarray:
            seen[index] = logprobs
            return weights[index].astype(np.float32)

        with torch.no_grad():
            found = Head(model, rows * model.vocab_size).run(x, spans, judge, backward=True)
        return [seen[i] for i in range(len(spans))], found.hidden, found.factors[id(adapter)]

    whole = run(1000)
    for rows in (1, 4, 7, 25):
        pieces = run(rows)
        for a, b in zip(whole[0], pieces[0], strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
        np.testing.assert_allclose(whole[1], pieces[1], atol=1e-5)
        for a, b in zip(whole[2], pieces[2], strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5)
