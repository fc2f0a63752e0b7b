"""Continuous batching gives every request what it would get alone: compared with a naive loop over the whole prefix."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from openrl.backends.base import SampleJob
from openrl.errors import BadRequest, OutOfMemory
from openrl.types import RequestId, SampleOutput
from support import tiny
from support.sampling import Ask, MlxWorld, World, open_world, payload, run, run_all, worlds

FAMILIES = tiny.FAMILIES


@pytest.fixture(scope="module", params=worlds(*FAMILIES))
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return open_world(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=worlds("llama"))
def llama(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return open_world(request.param, tmp_path_factory.mktemp("plain"))


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 97, length).tolist()


def check(world: World, asks: list[Ask], results: list[SampleOutput]) -> None:
    """Every sample's tokens, logprobs and reason are those of the naive loop (S1, S8, S11)."""
    for ask, result in zip(asks, results, strict=True):
        assert len(result.sequences) == ask.payload.num_samples
        for index, got in enumerate(result.sequences):
            want = world.naive(ask.payload, ask.adapter, index)
            assert got.tokens.tolist() == want.tokens.tolist()
            assert got.stop_reason == want.stop_reason
            np.testing.assert_allclose(got.logprobs, want.logprobs, atol=2e-5)
            assert (got.tokens.dtype, got.logprobs.dtype) == (np.int32, np.float32)


def crowd() -> list[Ask]:
    """Requests of many kinds that join and leave at odd times."""
    return [
        Ask(payload(prompt(0, 5), max_tokens=12, temperature=0.0, stop=()), "a", at=0),
        Ask(payload(prompt(1, 9), max_tokens=5, seed=7, stop=()), None, at=0),
        Ask(payload(prompt(2, 3), 3, max_tokens=9, seed=11, stop=()), "b", at=2),
        Ask(payload(prompt(3, 1), max_tokens=20, seed=3, temperature=0.7, top_p=0.9), "a", at=3),
        Ask(payload(prompt(4, 30), 2, max_tokens=7, seed=4, top_k=5, stop=()), None, at=7),
        Ask(payload(prompt(5, 12), max_tokens=1, seed=5), "b", at=8),
        Ask(payload(prompt(6, 6), max_tokens=15, temperature=0.0), "a", at=9),
        Ask(payload(prompt(7, 17), max_tokens=11, seed=9, temperature=1.5, top_k=20, top_p=0.8, stop=()), "b", at=13),
    ]


def test_mixed_requests_equal_the_naive_loop_s11(world: World) -> None:
    asks = crowd()
    check(world, asks, run(world.sampler(), asks))


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_few_rows_change_nothing_s11(llama: World, rows: int) -> None:
    """More samples than rows: they begin as rows become free, from a copy of the prompt's cache or computed anew."""
    asks = crowd()
    check(llama, asks, run(llama.sampler(max_rows=rows), asks))


def test_prompts_in_parts_change_nothing(world: World) -> None:
    """Prompts longer than one turn's share are computed in parts, between which others decode."""
    asks = [
        Ask(payload(prompt(10, 4), max_tokens=25, seed=1, stop=()), "a"),
        Ask(payload(prompt(11, 45), 3, max_tokens=10, seed=2, stop=()), "b", at=1),
        Ask(payload(prompt(12, 33), max_tokens=1, seed=3, stop=()), None, at=2),
        Ask(payload(prompt(13, 8), max_tokens=6, seed=4, stop=()), "a", at=2),
    ]
    check(world, asks, run(world.sampler(prefill_tokens=16), asks))


def test_masks_for_heads_in_groups(tmp_path: Path) -> None:
    """mlx-lm's Gemma 2, which knows no windows, with one as long as the context: as many rows as heads, and more."""
    config = tiny.build(tmp_path, "gemma2") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"sliding_window": 256}))
    asks = [
        Ask(payload(prompt(i, 5 + 3 * i), max_tokens=4 + i, seed=i, temperature=float(i % 2), stop=()), "ab"[i % 2])
        for i in range(4)
    ]
    world = MlxWorld(tmp_path, None)
    check(world, asks, run(world.sampler(), asks))


def test_long_sequences_beyond_the_window(world: World) -> None:
    """gemma3's window is 16: prompts and completions reach far beyond it, beside short ones."""
    asks = [
        Ask(payload(prompt(20, 70), max_tokens=40, temperature=0.0, stop=()), "a"),
        Ask(payload(prompt(21, 3), max_tokens=60, seed=5, stop=()), "b"),
        Ask(payload(prompt(22, 15), max_tokens=8, seed=6, stop=()), None, at=4),
    ]
    check(world, asks, run(world.sampler(), asks))


def test_a_full_cache_sends_the_youngest_back(llama: World) -> None:
    """Three sequences outgrow a cache of 150 tokens; all finish with the tokens they would have had alone."""
    asks = [Ask(payload(prompt(30 + i, 10), max_tokens=90, seed=i, stop=()), None) for i in range(3)]
    check(llama, asks, run(llama.sampler(max_kv_tokens=150), asks))


def test_a_full_cache_with_a_long_prompt_arriving(llama: World) -> None:
    asks = [
        Ask(payload(prompt(40, 10), max_tokens=80, seed=1, stop=()), "a"),
        Ask(payload(prompt(41, 60), 2, max_tokens=30, seed=2, stop=()), "b", at=3),
        Ask(payload(prompt(42, 5), max_tokens=60, seed=3, stop=()), "a", at=4),
    ]
    check(llama, asks, run(llama.sampler(max_kv_tokens=200, prefill_tokens=8), asks))


def test_max_tokens_none_runs_to_the_context_limit_s10(llama: World) -> None:
    (result,) = run(llama.sampler(), [Ask(payload(prompt(50, 200), temperature=0.0, stop=()))])
    assert len(result.sequences[0].tokens) == 56
    assert result.sequences[0].stop_reason == "length"


def test_max_tokens_none_stops_where_the_cache_ends(llama: World) -> None:
    (result,) = run(llama.sampler(max_kv_tokens=64), [Ask(payload(prompt(50, 40), stop=(), seed=1))])
    assert len(result.sequences[0].tokens) == 24


def test_what_can_never_fit_is_refused(llama: World) -> None:
    sampler = llama.sampler(max_kv_tokens=100)
    with pytest.raises(BadRequest, match=r"60 prompt tokens \+ 41 max_tokens = 101; the KV cache .* holds 100"):
        sampler.add(Ask(payload(prompt(0, 60), max_tokens=41)).job("x"))
    with pytest.raises(BadRequest, match="context holds 256"):
        llama.sampler().add(Ask(payload(prompt(0, 200), max_tokens=57)).job("x"))
    assert not sampler.busy


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": 0},
        {"top_k": -2},
        {"max_tokens": 0},
        {"num_samples": 0},
        {"topk_sample_logprobs": 98},
    ],
)
def test_illegal_values_are_refused_s3(llama: World, bad: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=next(iter(bad))):
        llama.sampler().add(Ask(payload([5, 6], **bad)).job("x"))


def test_seedless_samples_differ_s12(llama: World) -> None:
    sampler = llama.sampler()
    ask = Ask(payload(prompt(60, 4), 4, max_tokens=20, stop=()))
    sequences = [s for _ in range(2) for s in run(sampler, [ask])[0].sequences]
    assert len({tuple(s.tokens.tolist()) for s in sequences}) == 8


def test_the_global_generator_is_left_alone_s11(llama: World) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    run(llama.sampler(), [Ask(payload(prompt(61, 4), max_tokens=5, seed=1))])
    assert torch.equal(before, torch.get_rng_state())


def test_cancel_frees_rows_at_once(llama: World) -> None:
    """Waiting, half-computed and live requests can all be forgotten; the others go on undisturbed."""
    sampler = llama.sampler(max_rows=2, prefill_tokens=16)
    kept = Ask(payload(prompt(70, 5), max_tokens=12, seed=1, stop=()), "a")
    sampler.add(Ask(payload(prompt(71, 5), max_tokens=90, seed=2, stop=()), "b").job("live"))
    sampler.step()
    sampler.add(Ask(payload(prompt(72, 60), max_tokens=90, seed=2, stop=()), "b").job("growing"))
    sampler.step()
    sampler.step()
    sampler.add(kept.job("kept"))
    sampler.add(Ask(payload(prompt(73, 5), max_tokens=9, stop=())).job("waiting"))
    for name in ("waiting", "growing", "live", "unknown"):
        sampler.cancel(RequestId(name))
    results = dict(finished for _ in range(40) for finished in sampler.step())
    assert list(results) == ["kept"]
    check(llama, [kept], [results[RequestId("kept")]])
    assert not sampler.busy


def test_a_broken_adapter_fails_its_own_request_only(llama: World) -> None:
    """Weights that are not finite: a clear error for that request, the right tokens for the others."""
    broken = llama.make_adapter(3)
    for layer in ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj"):
        broken.b[layer] = torch.full_like(broken.b[layer], torch.nan)
    llama.adapters["broken"] = broken
    asks = [
        Ask(payload(prompt(80, 5), max_tokens=9, seed=1, stop=()), "a"),
        Ask(payload(prompt(81, 5), 2, max_tokens=9, seed=1, stop=()), "broken", at=1),
        Ask(payload(prompt(82, 3), 2, max_tokens=19, seed=1, stop=()), None, at=3),
    ]
    results = run_all(llama.sampler(max_rows=3), asks)
    assert isinstance(results[1], BadRequest)
    assert "not finite" in str(results[1])
    check(llama, [asks[0], asks[2]], [r for r in results if isinstance(r, SampleOutput)])


def test_an_adapter_that_cannot_load_fails_its_own_request_only(llama: World) -> None:
    def load(ref: Any) -> Any:
        raise BadRequest(f"no adapter at {ref.key}")

    sampler = llama.sampler(load=load)
    asks = [
        Ask(payload(prompt(83, 5), 2, max_tokens=4, seed=1, stop=()), "a"),
        Ask(payload(prompt(84, 5), max_tokens=4, seed=1, stop=())),
    ]
    results = run_all(sampler, asks)
    assert isinstance(results[0], BadRequest)
    check(llama, asks[1:], [r for r in results[1:] if isinstance(r, SampleOutput)])


class Failing:
    """Makes the model run out of memory when a pass has more rows or tokens than it may."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch, rows: int, tokens: int) -> None:
        self.failures = 0

        def before(shape: tuple[int, ...]) -> None:
            if shape[0] > rows or math.prod(shape) > tokens:
                self.failures += 1
                raise world.out_of_memory()

        world.watch_passes(monkeypatch, before)


def test_running_out_of_memory_is_survived(llama: World, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing(llama, monkeypatch, rows=2, tokens=70)
    asks = crowd()
    results = run(llama.sampler(), asks)
    assert failing.failures
    check(llama, asks, results)


def test_what_does_not_fit_alone_fails_with_out_of_memory(llama: World, monkeypatch: pytest.MonkeyPatch) -> None:
    Failing(llama, monkeypatch, rows=2, tokens=20)
    asks = [
        Ask(payload(prompt(90, 150), max_tokens=5, seed=1, stop=())),
        Ask(payload(prompt(91, 5), 2, max_tokens=5, seed=1, stop=())),
    ]
    results = run_all(llama.sampler(), asks)
    assert isinstance(results[0], OutOfMemory)
    check(llama, asks[1:], [r for r in results[1:] if isinstance(r, SampleOutput)])


@pytest.mark.parametrize("failing", [(1,), (2,), (2, 3), (3,)])
def test_running_out_of_memory_while_the_cache_grows(
    llama: World, monkeypatch: pytest.MonkeyPatch, failing: tuple[int, ...]
) -> None:
    """A cache that may be half moved is given up; all sequences are computed anew."""
    calls = 0
    real = llama.kv.reserve

    def reserve(cache: Any, *sizes: int) -> None:
        nonlocal calls
        calls += 1
        if calls in failing:
            cache.keys = cache.keys[:1]
            raise llama.out_of_memory(by_words=True)
        real(cache, *sizes)

    monkeypatch.setattr(llama.kv, "reserve", reserve)
    asks = [
        Ask(payload(prompt(100, 5), max_tokens=150, seed=1, stop=()), "a"),
        Ask(payload(prompt(101, 5), 2, max_tokens=9, seed=2, stop=()), "b", at=2),
        Ask(payload(prompt(102, 40), max_tokens=9, seed=3, stop=()), "a", at=4),
    ]
    check(llama, asks, run(llama.sampler(prefill_tokens=128), asks))
    assert calls > max(failing)


def test_a_cache_that_can_never_be_had_fails_the_request(llama: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def reserve(cache: Any, *sizes: int) -> None:
        raise llama.out_of_memory()

    monkeypatch.setattr(llama.kv, "reserve", reserve)
    asks = [Ask(payload(prompt(i, 5), 2, max_tokens=9, seed=i)) for i in range(2)]
    assert all(isinstance(r, OutOfMemory) for r in run_all(llama.sampler(), asks))


def test_neither_prefill_nor_decoding_starves(llama: World) -> None:
    """While prompts keep arriving, a live sequence gets a token at least every other turn."""
    sampler = llama.sampler(max_rows=8, prefill_tokens=16)
    sampler.add(Ask(payload(prompt(95, 4), max_tokens=10, seed=1, stop=())).job("first"))
    finished: list[str] = []
    for turn in range(25):
        sampler.add(Ask(payload(prompt(96, 12), max_tokens=1, seed=turn)).job(f"later-{turn}"))
        finished += [request for request, _ in sampler.step()]
    assert "first" in finished
    assert sum(name.startswith("later") for name in finished) >= 8


def test_job_without_adapter_and_with_all_features_at_once(llama: World) -> None:
    """The worker hands over plain jobs; nothing but the protocol is needed."""
    sampler = llama.sampler()
    sampler.add(SampleJob(RequestId("r"), payload([5, 6, 7], 2, max_tokens=3, seed=1, topk_sample_logprobs=2), None))
    results = dict(finished for _ in range(10) for finished in sampler.step())
    output = results[RequestId("r")]
    assert isinstance(output, SampleOutput)
    assert all(s.topk is not None and s.topk.ids.shape == (len(s.tokens), 2) for s in output.sequences)
