"""Logprobs of prompts, and the most likely tokens of prompts and samples, against transformers' own full forward."""

from __future__ import annotations

import numpy as np
import pytest

from openrl.backends.torch import score
from openrl.types import TopK
from support.sampling import Ask, World, log_softmax, payload, run

FAMILIES = ("llama", "qwen3", "gemma3")


@pytest.fixture(scope="module", params=FAMILIES)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp(request.param), request.param)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 97, length).tolist()


def expected(world: World, tokens: list[int], adapter: str | None) -> np.ndarray:
    """[N, V] log-probabilities of what may follow each token."""
    return log_softmax(world.logits(tokens, adapter))


def check_prompt(world: World, ask: Ask, got: np.ndarray | None) -> None:
    tokens = ask.payload.prompt.tolist()
    table = expected(world, tokens, ask.adapter)
    assert got is not None
    assert got.dtype == np.float32
    assert got.shape == (len(tokens),)
    assert np.isnan(got[0])
    np.testing.assert_allclose(got[1:], table[np.arange(len(tokens) - 1), tokens[1:]], atol=2e-5)


def check_top(table: np.ndarray, got: TopK, k: int) -> None:
    """Rows of `got` are the k largest of `table`, descending."""
    assert got.ids.shape == got.logprobs.shape == (len(table), k)
    assert (got.ids.dtype, got.logprobs.dtype) == (np.int32, np.float32)
    np.testing.assert_allclose(got.logprobs, -np.sort(-table, -1)[:, :k], atol=2e-5)
    np.testing.assert_allclose(np.take_along_axis(table, got.ids.astype(np.int64), -1), got.logprobs, atol=2e-5)


@pytest.mark.parametrize("part", [None, 16])
def test_prompt_logprobs_are_raw_and_nan_at_zero_s5(world: World, part: int | None) -> None:
    """Length N, NaN first, at temperature 1 whatever the request's; in one piece or in parts, beside other work."""
    asks = [
        Ask(payload(prompt(0, 40), max_tokens=1, temperature=0.3, prompt_logprobs=True), "a"),
        Ask(payload(prompt(1, 7), max_tokens=1, prompt_logprobs=True), "b"),
        Ask(payload(prompt(2, 1), max_tokens=1, prompt_logprobs=True), None),
        Ask(payload(prompt(3, 12), max_tokens=6, temperature=0.0, prompt_logprobs=True), None, at=1),
        Ask(payload(prompt(4, 25), 3, max_tokens=4, seed=1, prompt_logprobs=True), "b", at=2),
        Ask(payload(prompt(5, 9), max_tokens=4, seed=1), "b", at=2),
    ]
    results = run(world.sampler(max_rows=2, prefill_tokens=part), asks)
    for ask, result in zip(asks[:-1], results[:-1], strict=True):
        check_prompt(world, ask, result.prompt_logprobs)
        assert result.topk_prompt is None
    assert results[-1].prompt_logprobs is None


def test_many_compute_logprobs_batch_together(world: World) -> None:
    """compute_logprobs is max_tokens 1 with prompt logprobs: twenty of them take few turns and no cache at all."""
    asks = [Ask(payload(prompt(i, 10), max_tokens=1, prompt_logprobs=True), "ab"[i % 2]) for i in range(20)]
    sampler = world.sampler(max_rows=2, max_kv_tokens=64)
    for i, ask in enumerate(asks):
        sampler.add(ask.job(str(i)))
    results = dict(sampler.step())
    assert len(results) == 20
    assert not sampler.busy
    for i, ask in enumerate(asks):
        check_prompt(world, ask, getattr(results[str(i)], "prompt_logprobs"))  # noqa: B009


def test_topk_of_prompts_s7(world: World) -> None:
    """[N, k] descending; row 0 holds id 0 and -99999.0; a request for it alone carries no prompt logprobs."""
    asks = [
        Ask(payload(prompt(0, 20), max_tokens=2, topk_prompt_logprobs=5, temperature=0.5), "a"),
        Ask(payload(prompt(1, 8), max_tokens=1, topk_prompt_logprobs=2, prompt_logprobs=True), "b"),
    ]
    results = run(world.sampler(), asks)
    for ask, result, k in zip(asks, results, (5, 2), strict=True):
        top = result.topk_prompt
        assert top is not None
        assert top.ids[0].tolist() == [0] * k
        assert top.logprobs[0].tolist() == [-99999.0] * k
        table = expected(world, ask.payload.prompt.tolist(), ask.adapter)
        check_top(table[:-1], TopK(top.ids[1:], top.logprobs[1:]), k)
    assert results[0].prompt_logprobs is None
    check_prompt(world, asks[1], results[1].prompt_logprobs)


def test_topk_of_samples_is_scaled_by_temperature_s1(world: World) -> None:
    asks = [
        Ask(payload(prompt(2, 6), 2, max_tokens=5, seed=3, temperature=0.5, topk_sample_logprobs=4, stop=()), "a"),
        Ask(payload(prompt(3, 6), max_tokens=5, temperature=0.0, topk_sample_logprobs=2, stop=()), "b"),
        Ask(payload(prompt(4, 6), max_tokens=5, seed=1, stop=()), "b"),
    ]
    results = run(world.sampler(), asks)
    for ask, result, heat, k in zip(asks[:2], results[:2], (0.5, 1.0), (4, 2), strict=True):
        for sequence in result.sequences:
            tokens = ask.payload.prompt.tolist() + sequence.tokens.tolist()
            z = world.logits(tokens, ask.adapter)[len(ask.payload.prompt) - 1 : -1]
            assert sequence.topk is not None
            check_top(log_softmax(z / heat), sequence.topk, k)
    assert results[2].sequences[0].topk is None


def test_the_head_is_taken_a_few_positions_at_a_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """[N, V] is never held whole; the parts end at odd places and in the middle of adapters."""
    monkeypatch.setattr(score, "_CELLS", 7 * 97)
    asks = [
        Ask(payload(prompt(i, 10 + i), 2, max_tokens=3, seed=i, stop=(), prompt_logprobs=True), adapter)
        for i, adapter in enumerate(["a", None, "b", "a", "b", None])
    ]
    results = run(world.sampler(max_rows=12), asks)
    for ask, result in zip(asks, results, strict=True):
        check_prompt(world, ask, result.prompt_logprobs)
        for index, got in enumerate(result.sequences):
            assert got.tokens.tolist() == world.naive(ask.payload, ask.adapter, index).tokens.tolist()
