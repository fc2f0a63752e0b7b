"""Drawing with MLX: the worked numbers of S3, and the tokens that the PyTorch engine draws from the same logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from openrl.backends.common.uniforms import RowKnobs, uniforms
from openrl.backends.torch import draw as torch_draw

mx: Any = pytest.importorskip("mlx.core", reason="needs mlx")
mlx_draw: Any = pytest.importorskip("openrl.backends.mps.sample_draw")

Z = [2.0, 1.0, 0.0, -1.0]


def row(seed: int = 0, temperature: float = 1.0, top_k: int = -1, top_p: float = 1.0, top: int = 0) -> RowKnobs:
    return RowKnobs(seed, temperature, top_k, top_p, top)


def drawn(z: Sequence[float], rows: Sequence[RowKnobs]) -> Any:
    """One draw for each of `rows`, all from the same logits."""
    logits = mx.array(np.tile(np.array(z, np.float32), (len(rows), 1)))
    return mlx_draw.draw(logits, rows, np.zeros(len(rows), np.int64))


@pytest.mark.parametrize(
    ("temperature", "top_k", "expected"),
    [
        (1.0, -1, (-0.440190, -1.440190)),
        (0.5, -1, (-0.145078, -2.145078)),
        (2.0, -1, (-0.787339, -1.287339)),
        (0.5, 2, (-0.145078, -2.145078)),
        (0.0, -1, (-0.440190,)),
    ],
)
def test_logprobs_are_scaled_and_not_renormalised_s2_s3(
    temperature: float, top_k: int, expected: tuple[float, ...]
) -> None:
    out = drawn(Z, [row(seed, temperature, top_k) for seed in range(200)])
    for token, logprob in enumerate(expected):
        got = out.logprobs[out.tokens == token]
        assert len(got) > 0
        np.testing.assert_allclose(got, logprob, atol=1e-6)


def test_frequencies_s13() -> None:
    """Within 5 standard deviations; with top_k = 2 no other id ever."""
    p = np.exp(Z) / np.exp(Z).sum()
    tokens = drawn(Z, [row(seed) for seed in range(20_000)]).tokens
    assert (np.abs(np.bincount(tokens, minlength=4) / 20_000 - p) <= 5 * np.sqrt(p * (1 - p) / 20_000)).all()
    assert set(drawn(Z, [row(seed, top_k=2) for seed in range(500)]).tokens.tolist()) == {0, 1}


@pytest.mark.parametrize("vocab", [97, 700, 2048])
def test_the_same_seed_draws_what_pytorch_draws_s11(vocab: int) -> None:
    """Every mixture of knobs in one batch, over vocabularies with and without a rest of a block, flat and peaked."""
    rng = np.random.default_rng(vocab)
    rows = [
        row(
            seed=int(rng.integers(0, 2**63)),
            temperature=float(rng.choice([0.0, 0.3, 1.0, 1.7])),
            top_k=int(rng.choice([-1, 1, 5, 100, 5000])),
            top_p=float(rng.choice([1.0, 0.95, 0.5, 0.01])),
            top=3,
        )
        for _ in range(300)
    ]
    logits = rng.normal(0, rng.choice([0.1, 3.0], (300, 1)), (300, vocab)).astype(np.float32)
    positions = rng.integers(0, 5000, 300)
    ours = mlx_draw.draw(mx.array(logits), rows, positions)
    knobs = torch_draw.stack(rows, vocab, torch.device("cpu"))
    theirs = torch_draw.draw(torch.from_numpy(logits.copy()), knobs, positions)
    assert ours.tokens.tolist() == theirs.tokens.tolist()
    np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=2e-6)
    assert theirs.top_ids is not None
    assert theirs.top_logprobs is not None
    assert ours.top_ids.tolist() == theirs.top_ids.tolist()
    np.testing.assert_allclose(ours.top_logprobs, theirs.top_logprobs, atol=2e-6)


def test_repeated_draws_are_pytorchs() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (20, 300)).astype(np.float32)
    u = uniforms(np.arange(5, dtype=np.uint64)[None], np.arange(20)[:, None])
    for temperature in (0.0, 0.7, 1.0):
        ours = mlx_draw.draw_repeatedly(mx.array(logits), temperature, u)
        theirs = torch_draw.draw_repeatedly(torch.from_numpy(logits), temperature, torch.from_numpy(u))
        assert ours.tolist() == theirs.tolist()


def test_ties_take_the_lowest_ids_s3() -> None:
    z = np.zeros(1000)
    z[[77, 300, 999]] = 5.0
    assert drawn(z, [row(temperature=0.0)]).tokens.tolist() == [77]
    assert set(drawn(z, [row(seed, top_k=2) for seed in range(100)]).tokens.tolist()) == {77, 300}


def test_logits_that_are_not_finite_give_such_logprobs() -> None:
    """The sampler fails a request by these; nothing else may go wrong on the way."""
    for z in ([float("nan")] * 4, [float("inf"), 0.0, 0.0, 0.0]):
        out = drawn(z, [row(), row(top_k=2), row(temperature=0.0), row(top_p=0.5, top=2)])
        assert not np.isfinite(out.logprobs).any()


def test_tiny_temperatures_do_not_overflow() -> None:
    out = drawn([3.0, 5.0, 4.0], [row(seed, 1e-38) for seed in range(10)])
    assert out.tokens.tolist() == [1] * 10
    assert out.logprobs.tolist() == [0.0] * 10
