"""Drawing tokens: the worked numbers of S3, the statistics of S13, and exactness against a float64 loop."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from openrl.backends.common.uniforms import RowKnobs, uniforms
from openrl.backends.torch.draw import Drawn, draw, kept, stack
from openrl.types import SamplingParams
from support.sampling import naive_draw

CPU = torch.device("cpu")
Z = [2.0, 1.0, 0.0, -1.0]


def row(seed: int = 0, temperature: float = 1.0, top_k: int = -1, top_p: float = 1.0, top: int = 0) -> RowKnobs:
    return RowKnobs(seed, temperature, top_k, top_p, top)


def drawn(z: Sequence[float] | torch.Tensor, rows: Sequence[RowKnobs], position: int = 0) -> Drawn:
    """One draw for each of `rows`, all from the same logits."""
    logits = torch.as_tensor(z).float()
    return draw(logits.repeat(len(rows), 1), stack(rows, logits.shape[-1], CPU), np.full(len(rows), position))


@pytest.mark.parametrize(
    ("temperature", "top_k", "expected"),
    [
        (1.0, -1, (-0.440190, -1.440190)),
        (0.5, -1, (-0.145078, -2.145078)),
        (2.0, -1, (-0.787339, -1.287339)),
        (0.5, 2, (-0.145078, -2.145078)),
    ],
)
def test_logprobs_are_scaled_and_not_renormalised_s2_s3(
    temperature: float, top_k: int, expected: tuple[float, float]
) -> None:
    out = drawn(Z, [row(seed, temperature, top_k) for seed in range(200)])
    for token in (0, 1):
        got = out.logprobs[out.tokens == token]
        assert len(got) > 0
        np.testing.assert_allclose(got, expected[token], atol=1e-6)


def test_temperature_zero_is_argmax_with_raw_logprobs_s3() -> None:
    out = drawn(Z, [row(temperature=0.0, top=4)])
    assert out.tokens.tolist() == [0]
    assert out.logprobs.item() == pytest.approx(-0.440190, abs=1e-6)
    assert out.top_logprobs is not None
    np.testing.assert_allclose(out.top_logprobs[0], [-0.440190, -1.440190, -2.440190, -3.440190], atol=1e-6)


def test_ties_take_the_lowest_id_s3() -> None:
    z = torch.zeros(1000)
    z[[77, 300, 999]] = 5.0
    assert drawn(z, [row(temperature=0.0)]).tokens.tolist() == [77]
    out = drawn(z, [row(seed, top_k=2) for seed in range(100)])
    assert set(out.tokens.tolist()) == {77, 300}


def check_frequencies(tokens: torch.Tensor, p: np.ndarray) -> None:
    """Each frequency within 5 standard deviations, and nothing with p = 0 ever (S13)."""
    n = len(tokens)
    counts = np.bincount(tokens.numpy(), minlength=len(p))
    assert (counts[p == 0] == 0).all()
    assert (np.abs(counts / n - p) <= 5 * np.sqrt(p * (1 - p) / n)).all()


def softmax(z: Sequence[float]) -> np.ndarray:
    e = np.exp(np.array(z) - max(z))
    return e / e.sum()


def test_frequencies_over_seeds_s13() -> None:
    check_frequencies(drawn(Z, [row(seed) for seed in range(20_000)]).tokens, softmax(Z))


def test_frequencies_over_positions_s13() -> None:
    """One seed, 20,000 positions: the stream of one sequence is as good as many seeds."""
    logits = torch.tensor(Z).repeat(20_000, 1)
    tokens = draw(logits, stack([row(12345)] * 20_000, 4, CPU), np.arange(20_000)).tokens
    check_frequencies(tokens, softmax(Z))
    pairs = tokens[:-1] * 4 + tokens[1:]
    check_frequencies(pairs, np.outer(softmax(Z), softmax(Z)).ravel())


def test_frequencies_with_temperature_s13() -> None:
    tokens = drawn(Z, [row(seed, 2.0) for seed in range(20_000)]).tokens
    check_frequencies(tokens, softmax([z / 2 for z in Z]))


def test_top_k_two_draws_no_other_id_s13() -> None:
    z = [0.0, 2.0, -1.0, 1.0]
    p = np.array([0, math.e, 0, 1]) / (math.e + 1)
    check_frequencies(drawn(z, [row(seed, top_k=2) for seed in range(20_000)]).tokens, p)


def test_frequencies_over_a_large_vocabulary_s13() -> None:
    """More tokens than one block of the cumulative sum; the mass sits at the edges of blocks."""
    z = torch.full((1001,), -30.0)
    z[[0, 255, 256, 511, 999, 1000]] = torch.tensor([1.0, 2.0, 1.5, 0.0, 2.5, 1.0])
    tokens = drawn(z, [row(seed) for seed in range(20_000)]).tokens
    p = softmax(z.tolist())
    wanted = p > 1e-6
    counts = np.bincount(tokens.numpy(), minlength=1001)
    assert (np.abs(counts / 20_000 - p) <= 5 * np.sqrt(p * (1 - p) / 20_000))[wanted].all()


def keep(p: Sequence[float], top_k: int, top_p: float) -> list[int]:
    logprobs = torch.tensor(p).log()[None]
    mask = kept(logprobs, torch.tensor([top_k]), torch.tensor([top_p], dtype=torch.float64))
    return mask[0].nonzero()[:, 0].tolist()


def test_top_p_keeps_the_crossing_token_s13() -> None:
    p = [0.125, 0.5, 0.25, 0.125]
    assert keep(p, 4, 0.4) == [1]
    assert keep(p, 4, 0.5) == [1]
    assert keep(p, 4, 0.51) == [1, 2]
    assert keep(p, 4, 0.75) == [1, 2]
    assert keep(p, 4, 0.76) == [0, 1, 2]
    assert keep(p, 4, 0.9) == [0, 1, 2, 3]
    assert keep(p, 2, 0.9) == [1, 2]
    assert keep(p, 3, 0.6) == [1, 2]
    assert keep(p, 1, 2.0) == [1]


def test_top_p_of_a_flat_distribution_keeps_its_share() -> None:
    """Far more survivors than the first sort looks at."""
    p = [1 / 4096] * 4096
    assert keep(p, 4096, 0.5) == list(range(2048))
    assert keep(p, 3000, 2.0) == list(range(3000))


@pytest.mark.parametrize("vocab", [700, 1152])  # of which 256 and 128 are blocks
def test_equals_a_float64_loop_s1(vocab: int) -> None:
    """Random rows with every mixture of knobs, drawn together, each as by the book."""
    rng = np.random.default_rng(0)
    rows = 400
    logits = torch.from_numpy(rng.normal(0, 3, (rows, vocab)).astype(np.float32))
    knobs = [
        row(
            seed=int(rng.integers(0, 2**63)),
            temperature=float(rng.choice([0.0, 0.3, 1.0, 1.7])),
            top_k=int(rng.choice([-1, 1, 5, 100, 5000])),
            top_p=float(rng.choice([1.0, 0.95, 0.5, 0.01])),
        )
        for _ in range(rows)
    ]
    positions = rng.integers(0, 5000, rows)
    out = draw(logits.clone(), stack(knobs, vocab, CPU), positions)
    for i, k in enumerate(knobs):
        params = SamplingParams(temperature=k.temperature, top_k=k.top_k, top_p=k.top_p)
        token, logprob = naive_draw(logits[i].double().numpy(), params, k.seed, int(positions[i]))
        assert out.tokens[i].item() == token
        assert out.logprobs[i].item() == pytest.approx(logprob, abs=1e-5)


def test_neighbours_do_not_matter_s11() -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    knobs = [row(1), row(2, 0.5), row(3, top_k=3), row(4, 0.0), row(5, top_p=0.3)]
    together = draw(logits.clone(), stack(knobs, 300, CPU), np.arange(5))
    for i, k in enumerate(knobs):
        alone = draw(logits[i : i + 1].clone(), stack([k], 300, CPU), np.array([i]))
        assert together.tokens[i] == alone.tokens[0]
        assert together.logprobs[i].item() == pytest.approx(alone.logprobs[0].item(), abs=1e-6)


@pytest.mark.parametrize("vocab", [97, 300, 1152])
def test_greedy_rows_take_the_first_maximum_anywhere_s3(vocab: int) -> None:
    for place in (0, vocab // 2, vocab - 1):
        z = torch.full((vocab,), -1.0)
        z[place:] = 2.0
        assert drawn(z, [row(temperature=0.0)]).tokens.tolist() == [place]


def test_tiny_temperatures_do_not_overflow() -> None:
    out = drawn([3.0, 5.0, 4.0], [row(seed, 1e-38) for seed in range(10)])
    assert out.tokens.tolist() == [1] * 10
    assert out.logprobs.tolist() == [0.0] * 10


def test_uniforms_are_fixed_and_spread() -> None:
    """The stream is part of what a seed means: a change of the hash would change everyone's samples."""
    seeds = np.array([0, 0, 1, 2**64 - 1], np.uint64)
    first = uniforms(seeds, np.array([0, 1, 0, 7]))
    assert (first == uniforms(seeds, np.array([0, 1, 0, 7]))).all()
    assert len(set(first.tolist())) == 4
    many = uniforms(np.arange(100_000, dtype=np.uint64), np.zeros(100_000, np.int64))
    assert 0 <= many.min() < many.max() < 1
    assert abs(many.mean() - 0.5) < 0.005
    assert abs(np.corrcoef(many[:-1], many[1:])[0, 1]) < 0.02
