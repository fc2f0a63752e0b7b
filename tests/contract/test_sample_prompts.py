"""Logprobs of prompts, and the most likely tokens of prompts and samples, against transformers' own full forward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from openrl.backends.common import scoring
from openrl.errors import BadRequest
from openrl.types import Cells, SamplingParams, TopK
from support.sampling import Ask, World, log_softmax, naive_draw, open_world, payload, run, worlds

FAMILIES = ("llama", "qwen3", "gemma3")


@pytest.fixture(scope="module", params=worlds(*FAMILIES, mlx=("llama", "gemma3")))
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return open_world(request.param, tmp_path_factory.mktemp(request.param))


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
    monkeypatch.setattr(scoring, "_CELLS", 7 * 97)
    asks = [
        Ask(payload(prompt(i, 10 + i), 2, max_tokens=3, seed=i, stop=(), prompt_logprobs=True), adapter)
        for i, adapter in enumerate(["a", None, "b", "a", "b", None])
    ]
    results = run(world.sampler(max_rows=12), asks)
    for ask, result in zip(asks, results, strict=True):
        check_prompt(world, ask, result.prompt_logprobs)
        for index, got in enumerate(result.sequences):
            assert got.tokens.tolist() == world.naive(ask.payload, ask.adapter, index).tokens.tolist()


# ---- what else may be asked of a prompt (6.3) ----


def targets_for(tokens: list[int], k: int, seed: int, *, sparse: bool = False) -> Cells:
    """Random ids, some of them -1; sparse: about one cell in two of [N - 1, 50] at random columns."""
    rng = np.random.default_rng(seed)
    rows = len(tokens) - 1
    if not sparse:
        return Cells(rng.integers(-1, 97, rows * k), (rows, k))
    counts = rng.integers(0, k + 1, rows)
    cols = np.concatenate([np.sort(rng.choice(50, count, replace=False)) for count in counts]).astype(np.int64)
    return Cells(rng.integers(-1, 97, cols.size), (rows, 50), np.cumsum([0, *counts]), cols)


def check_targets(table: np.ndarray, wanted: Cells, got: Cells | None) -> None:
    """Same layout, each id's logprob at its position, exactly 0 where nothing was wanted."""
    assert got is not None
    assert (got.shape, got.values.dtype) == (wanted.shape, np.float32)
    assert (got.crow is None) == (wanted.crow is None)
    if got.crow is not None and wanted.crow is not None:
        np.testing.assert_array_equal(got.crow, wanted.crow)
        np.testing.assert_array_equal(got.cols, wanted.cols)
    expected_values = np.where(wanted.values < 0, 0, table[wanted.rows(), wanted.values])
    np.testing.assert_allclose(got.values, expected_values, atol=2e-5)
    assert not got.values[wanted.values < 0].any()


@pytest.mark.parametrize("part", [None, 16])
def test_logprobs_of_named_tokens(world: World, part: int | None) -> None:
    """`target_prompt_logprobs`: at temperature 1, dense and sparse, in one piece or in parts, beside other work."""
    prompts = [prompt(i, length) for i, length in enumerate((40, 9, 1, 21))]
    wanted = [targets_for(tokens, 3, i, sparse=i % 2 == 1) for i, tokens in enumerate(prompts)]
    asks = [
        Ask(payload(tokens, max_tokens=1, temperature=0.4, target_prompt_logprobs=cells), "ab"[i % 2])
        for i, (tokens, cells) in enumerate(zip(prompts, wanted, strict=True))
    ]
    asks.append(Ask(payload(prompt(9, 11), max_tokens=3, prompt_logprobs=True), "a"))
    results = run(world.sampler(max_rows=2, prefill_tokens=part), asks)
    for ask, cells, result in zip(asks, wanted, results, strict=False):
        check_targets(expected(world, ask.payload.prompt.tolist(), ask.adapter), cells, result.target_prompt)
        assert result.prompt_logprobs is None
        assert result.topk_prompt is None
    check_prompt(world, asks[-1], results[-1].prompt_logprobs)
    assert results[-1].target_prompt is None


def test_the_prompts_own_tokens_as_targets_are_its_logprobs(world: World) -> None:
    tokens = prompt(1, 30)
    own = Cells(np.asarray(tokens[1:], np.int64), (29, 1))
    (result,) = run(world.sampler(), [Ask(payload(tokens, prompt_logprobs=True, target_prompt_logprobs=own), "a")])
    assert result.target_prompt is not None
    assert result.prompt_logprobs is not None
    assert result.target_prompt.values.tolist() == result.prompt_logprobs[1:].tolist()


@pytest.mark.parametrize("part", [None, 16])
def test_only_the_last_prompt_tokens_are_scored(world: World, part: int | None) -> None:
    """`prompt_logprobs_last_n`: NaN and empty cells (T34) before them; what else is asked is not cut."""
    tokens = prompt(3, 40)
    table = expected(world, tokens, "a")
    cells = targets_for(tokens, 2, 5)
    for last in (1, 7, 39):
        plain = {"prompt_logprobs": True, "topk_prompt_logprobs": 3, "prompt_logprobs_last_n": last, "max_tokens": 1}
        for more in ({}, {"target_prompt_logprobs": cells, "prompt_alt_tokens_k": 1}):
            ask = Ask(payload(tokens, **plain, **more), "a")
            (result,) = run(world.sampler(prefill_tokens=part), [ask])
            got, top = result.prompt_logprobs, result.topk_prompt
            assert got is not None
            assert top is not None
            assert np.isnan(got[:-last]).all()
            np.testing.assert_allclose(got[-last:], table[np.arange(39), tokens[1:]][-last:], atol=2e-5)
            assert not top.ids[:-last].any()
            assert (top.logprobs[:-last] == -99999.0).all()
            check_top(table[:-1][-last:], TopK(top.ids[-last:], top.logprobs[-last:]), 3)
            if more:
                check_targets(table, cells, result.target_prompt)
                assert result.alt_tokens is not None
                assert result.alt_tokens.logprobs.all()


@pytest.mark.parametrize("part", [None, 16])
def test_alternatives_are_drawn_at_the_requests_temperature(world: World, part: int | None) -> None:
    """`prompt_alt_tokens_k`: the tokens of naive inverse-CDF draws, uncut by top-k and top-p; logprobs raw."""
    tokens = prompt(4, 30)
    z = world.logits(tokens, "b")
    params: dict[str, Any] = {"max_tokens": 2, "seed": 11, "temperature": 0.7, "top_k": 1, "top_p": 0.1, "stop": ()}
    asks = [
        Ask(payload(tokens, **params, prompt_alt_tokens_k=5), "b"),
        Ask(payload(prompt(5, 12), max_tokens=2, seed=1), "a"),
    ]
    drawn = run(world.sampler(prefill_tokens=part), asks)[0].alt_tokens
    assert drawn is not None
    assert drawn.ids.shape == drawn.logprobs.shape == (29, 5)
    assert (drawn.ids.dtype, drawn.logprobs.dtype) == (np.int64, np.float32)
    plain = SamplingParams(temperature=0.7)
    for row in range(29):
        for column in range(5):
            assert drawn.ids[row, column] == naive_draw(z[row], plain, 11 + column, row + 1)[0]
    np.testing.assert_allclose(np.take_along_axis(log_softmax(z)[:-1], drawn.ids, -1), drawn.logprobs, atol=2e-5)


def test_alternatives_follow_the_distribution_and_are_independent(world: World) -> None:
    """Draws come as often as their probability says; without a seed two requests differ; greedy ones are the best."""
    tokens = prompt(6, 4)
    table = expected(world, tokens, None)
    asks = [
        Ask(payload(tokens, max_tokens=1, seed=3, prompt_alt_tokens_k=1000)),
        Ask(payload(tokens, max_tokens=1, prompt_alt_tokens_k=50)),
        Ask(payload(tokens, max_tokens=1, prompt_alt_tokens_k=50)),
        Ask(payload(tokens, max_tokens=1, temperature=0.0, prompt_alt_tokens_k=2)),
        Ask(payload(tokens[:1], max_tokens=1, prompt_alt_tokens_k=2)),
    ]
    many, one, other, greedy, short = (result.alt_tokens for result in run(world.sampler(), asks))
    assert many is not None
    assert one is not None
    assert other is not None
    assert greedy is not None
    assert short is not None
    for row in range(3):
        share = np.bincount(many.ids[row], minlength=97) / 1000
        assert np.abs(share - np.exp(table[row])).sum() < 0.35  # total variation expected of 1000 draws: about 0.2
    assert one.ids.tolist() != other.ids.tolist()
    assert greedy.ids.tolist() == np.repeat(table[:3].argmax(-1)[:, None], 2, 1).tolist()
    assert short.ids.shape == short.logprobs.shape == (0, 2)


def test_extras_when_the_head_is_taken_a_few_positions_at_a_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of 7 rows end in the middle of prompts and of adapters."""
    asks = [
        Ask(
            payload(
                prompt(i, 10 + i),
                max_tokens=2,
                seed=i,
                target_prompt_logprobs=targets_for(prompt(i, 10 + i), 2, i, sparse=i % 2 == 0),
                prompt_alt_tokens_k=i % 3,
                prompt_logprobs=i > 2,
                prompt_logprobs_last_n=4 if i > 2 else None,
            ),
            adapter,
        )
        for i, adapter in enumerate(["a", None, "b", "a", "b", None])
    ]
    whole = run(world.sampler(), asks)
    monkeypatch.setattr(scoring, "_CELLS", 7 * 97)
    for ask, result, once in zip(asks, run(world.sampler(), asks), whole, strict=True):
        cells = ask.payload.target_prompt_logprobs
        assert cells is not None
        check_targets(expected(world, ask.payload.prompt.tolist(), ask.adapter), cells, result.target_prompt)
        assert (result.alt_tokens is None) == (once.alt_tokens is None) == (not ask.payload.prompt_alt_tokens_k)
        if result.alt_tokens is not None and once.alt_tokens is not None:
            assert result.alt_tokens.ids.tolist() == once.alt_tokens.ids.tolist()
        if result.prompt_logprobs is not None:
            assert np.isnan(result.prompt_logprobs).sum() == len(ask.payload.prompt) - 4


@pytest.mark.parametrize(
    "fields",
    [
        {"target_prompt_logprobs": Cells(np.zeros(3, np.int64), (3, 1))},
        {"target_prompt_logprobs": Cells(np.array([97, 0]), (2, 1))},
        {"prompt_alt_tokens_k": -1},
        {"prompt_logprobs": True, "prompt_logprobs_last_n": 3},
    ],
)
def test_what_cannot_be_scored_is_refused(world: World, fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=list(fields)[-1]):
        world.sampler().add(Ask(payload([3, 4, 5], max_tokens=1, **fields)).job("0"))
