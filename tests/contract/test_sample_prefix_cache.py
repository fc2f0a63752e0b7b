"""What earlier requests computed is used again, and changes nothing: warm results are cold ones (B1, S6, S11, S15)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from openrl.backends.common.prefix_cache import BLOCK
from openrl.backends.torch.adapter_files import load_adapter
from openrl.backends.torch.lora import Adapter, fresh_adapter
from openrl.backends.torch.model import open_model
from openrl.backends.torch.sample import Sampler
from openrl.checkpoints.peft import write_adapter
from openrl.errors import BadRequest
from openrl.types import AdapterRef, LoraSpec, RequestId, SampleOutput
from support import tiny
from support.sampling import Ask, World, log_softmax, open_world, payload, run, run_all, worlds


@pytest.fixture(scope="module", params=worlds(*tiny.FAMILIES, mlx=("llama", "gemma3")))
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return open_world(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=worlds("llama"))
def llama(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return open_world(request.param, tmp_path_factory.mktemp("plain"))


# For what is decided apart from any engine, or differs between them.
@pytest.fixture(scope="module")
def torch_llama(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("torch"), "llama")


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 97, length).tolist()


def cold(world: World, asks: list[Ask]) -> list[SampleOutput]:
    """Each request alone, nothing stored."""
    sampler = world.sampler(prefix_cache_tokens=0)
    return [run(sampler, [replace(ask, at=0)])[0] for ask in asks]


def check(got: list[SampleOutput], want: list[SampleOutput], atol: float = 5e-6) -> None:
    """Same tokens; logprobs to the rounding of float32 sums in another order."""
    for a, b in zip(got, want, strict=True):
        for x, y in zip(a.sequences, b.sequences, strict=True):
            assert x.tokens.tolist() == y.tokens.tolist()
            assert x.stop_reason == y.stop_reason
            np.testing.assert_allclose(x.logprobs, y.logprobs, atol=atol)
        assert (a.prompt_logprobs is None) == (b.prompt_logprobs is None)
        if a.prompt_logprobs is not None and b.prompt_logprobs is not None:
            np.testing.assert_allclose(a.prompt_logprobs, b.prompt_logprobs, atol=atol)


def few_shot(common: list[int]) -> list[Ask]:
    """Requests of many kinds whose prompts begin alike, at once and one after another."""
    return [
        Ask(payload(common + prompt(1, 9), max_tokens=6, temperature=0.0, stop=()), "a"),
        Ask(payload(common + prompt(2, 30), 2, max_tokens=7, seed=3, stop=()), "a", at=1),
        Ask(payload(common + prompt(3, 1), max_tokens=1, seed=4, stop=()), "a", at=20),
        Ask(payload(common + prompt(4, 50), max_tokens=40, temperature=0.0, stop=()), "a", at=20),
        Ask(payload(common[:70], 3, max_tokens=5, seed=5, stop=()), "a", at=20),
        Ask(payload(common, max_tokens=5, seed=6, top_p=0.9, stop=()), "a", at=20),
        Ask(payload(prompt(5, 12), max_tokens=5, seed=7, stop=()), "a", at=20),
        Ask(payload(common + prompt(1, 9), max_tokens=6, seed=8, stop=()), "b", at=20),
        Ask(payload(common + prompt(1, 9), max_tokens=6, seed=9, stop=()), None, at=21),
    ]


def test_warm_results_are_cold_ones_b1_s11(world: World) -> None:
    """Greedy and seeded, beside others, with windows shorter than what is stored."""
    asks, want = few_shot(prompt(0, 100)), cold(world, few_shot(prompt(0, 100)))
    sampler = world.sampler(max_rows=16)
    check(run(sampler, asks), want)
    stats = sampler.stats()
    assert stats.hits >= 4
    assert stats.hit_tokens >= 4 * 64
    check(run(sampler, [replace(ask, at=0) for ask in asks]), want)
    assert sampler.stats().hit_tokens >= stats.hit_tokens + 6 * 64


@pytest.mark.parametrize("part", [20, 40])
def test_what_is_not_stored_may_be_computed_in_parts(llama: World, part: int) -> None:
    asks = few_shot(prompt(0, 100))
    sampler = llama.sampler(prefill_tokens=part, max_rows=16)
    check(run(sampler, asks), cold(llama, asks))
    assert sampler.stats().hits >= 4


def test_a_conversation_goes_on_from_what_was_drawn(world: World) -> None:
    """Prompt and answer are the next prompt's beginning; only what is new is computed."""
    sampler = world.sampler()
    said = prompt(10, 20)
    for turn in range(4):
        ask = Ask(payload(said, max_tokens=25, seed=turn, temperature=0.0 if turn % 2 else 1.0, stop=()), "a")
        before = sampler.stats()
        results = run(sampler, [ask])
        check(results, cold(world, [ask]))
        computed = sampler.stats().computed_tokens - before.computed_tokens
        assert computed <= (20 if turn == 0 else 10 + BLOCK)
        said = said + results[0].sequences[0].tokens.tolist() + prompt(20 + turn, 10)


def test_in_bf16_warm_results_are_near_cold_ones(torch_llama: World) -> None:
    """The table of section 6: logprobs of the same tokens within bf16's reach."""
    common = prompt(0, 96)
    model = open_model(torch_llama.folder, torch.device("cpu"), torch.bfloat16)

    def scores(cached: int, tokens: list[int]) -> np.ndarray:
        sampler = Sampler(model, torch_llama.folder, 8, 4096, load=torch_llama.load, prefix_cache_tokens=cached)
        run(sampler, [Ask(payload(common + prompt(1, 5), max_tokens=3, seed=1, stop=()), "a")])
        last = Ask(payload(tokens, max_tokens=1, prompt_logprobs=True, prompt_logprobs_last_n=20), "a")
        (result,) = run(sampler, [last])
        assert result.prompt_logprobs is not None
        assert bool(sampler.stats().hits) == bool(cached)
        return result.prompt_logprobs[-20:]

    tokens = common + prompt(2, 24)
    warm, plain = scores(1024, tokens), scores(0, tokens)
    exact = log_softmax(torch_llama.logits(tokens, "a"))[np.arange(99, 119), tokens[-20:]]
    assert np.abs(warm - plain).max() < 0.3
    assert np.abs(warm - exact).mean() < np.abs(plain - exact).mean() + 0.02


def test_new_weights_under_the_same_name_never_meet_old_cache_s15(llama: World, tmp_path: Path) -> None:
    """Two checkpoints that were saved under one name are two folders and two keys; real files, one sampler."""

    def save(seed: int, folder: str) -> tuple[AdapterRef, Adapter]:
        adapter = fresh_adapter(LoraSpec(rank=4, seed=seed), llama.model.shapes, torch.device("cpu"))
        generator = torch.Generator().manual_seed(seed)
        for name, b in adapter.b.items():
            adapter.b[name] = 0.05 * torch.randn(b.shape, generator=generator)
        (tmp_path / folder).mkdir(parents=True)
        tensors = {name: tensor.numpy() for name, tensor in adapter.parameters()}
        write_adapter(tmp_path / folder, adapter.spec, tensors, "m")
        return AdapterRef(folder, tmp_path / folder), adapter

    tokens = prompt(3, 90)
    sampler = llama.sampler(load=None)
    seen: list[list[float]] = []
    for number in (1, 2):
        ref, adapter = save(number, f"run/name.{number}")
        llama.adapters[ref.key] = adapter
        for _ in range(2):
            job = replace(Ask(payload(tokens, max_tokens=8, seed=1, stop=())).job(f"r{number}"), adapter=ref)
            sampler.add(job)
            results = dict(finished for _ in range(20) for finished in sampler.step())
            output = results[RequestId(f"r{number}")]
            assert isinstance(output, SampleOutput)
            check([output], cold(llama, [Ask(job.payload, ref.key)]))
            seen.append(output.sequences[0].logprobs.tolist())
        assert sampler.stats().hits == number
    assert seen[0] == pytest.approx(seen[1], abs=2e-6)
    assert seen[1] != pytest.approx(seen[2], abs=1e-3)
    assert load_adapter(tmp_path / "run/name.1", llama.model.shapes, torch.device("cpu")).spec.rank == 4


def test_requests_with_one_prompt_share_one_pass(llama: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GRPO group sent as requests of one sample each costs what one request of many samples does; scores of the
    prompt remain with the request that asked for them."""
    shapes: list[tuple[int, ...]] = []
    llama.watch_passes(monkeypatch, shapes.append)
    tokens = prompt(6, 60)
    asks = [Ask(payload(tokens, max_tokens=5, seed=i, stop=()), "a") for i in range(6)]
    asks.append(Ask(payload(tokens, max_tokens=5, seed=9, prompt_logprobs=True, stop=()), "a"))
    asks.append(Ask(payload(tokens, max_tokens=1, seed=9, topk_prompt_logprobs=2), "a"))
    results = run(llama.sampler(max_rows=8), asks)
    assert [shape for shape in shapes if 60 in shape] == [(1, 60)]
    monkeypatch.undo()
    check(results, cold(llama, asks))
    assert [r.prompt_logprobs is not None for r in results] == [False] * 6 + [True, False]
    assert [r.topk_prompt is not None for r in results] == [False] * 7 + [True]


def test_a_group_larger_than_the_rows_goes_on_from_its_members(torch_llama: World) -> None:
    asks = [Ask(payload(prompt(7, 50), max_tokens=4 + i % 3, seed=i, stop=()), "a", at=i // 4) for i in range(12)]
    sampler = torch_llama.sampler(max_rows=3)
    check(run(sampler, asks), cold(torch_llama, asks))
    assert sampler.stats().computed_tokens == 50


def test_full_caches_change_nothing(llama: World) -> None:
    """Rows that give way under a KV cache of 150 tokens, and a store that holds two blocks: results stay the same."""
    asks = [Ask(payload(prompt(30 + i, 40), 1 + i % 2, max_tokens=60, seed=i, stop=()), "ab"[i % 2]) for i in range(5)]
    sampler = llama.sampler(max_kv_tokens=150, prefix_cache_tokens=2 * BLOCK)
    check(run(sampler, asks), cold(llama, asks))
    assert sampler.stats().evicted_tokens > 0
    assert sampler.stats().stored_tokens <= 2 * BLOCK


def test_rows_that_gave_way_go_on_from_what_is_stored(torch_llama: World) -> None:
    asks = [Ask(payload(prompt(40 + i, 10), max_tokens=90, seed=i, stop=()), None) for i in range(3)]
    sampler = torch_llama.sampler(max_kv_tokens=150)
    check(run(sampler, asks), cold(torch_llama, asks))
    stats = sampler.stats()
    assert stats.hits > 0
    assert stats.computed_tokens < 30 + 3 * stats.hits * BLOCK


def test_cancelling_one_of_a_group_leaves_the_others(torch_llama: World) -> None:
    """Also while their long prompt is being computed in parts, in the slot of the one that is cancelled."""
    tokens = prompt(50, 100)
    asks = [Ask(payload(tokens, max_tokens=6, seed=i, stop=()), "a") for i in range(3)]
    for after in range(6):
        sampler = torch_llama.sampler(prefill_tokens=30)
        for i, ask in enumerate(asks):
            sampler.add(ask.job(str(i)))
        done = dict(finished for _ in range(after) for finished in sampler.step())
        sampler.cancel(RequestId("0"))
        done.update(finished for _ in range(30) for finished in sampler.step())
        assert sorted(done) == ["1", "2"]
        others = [done[RequestId(name)] for name in ("1", "2")]
        check([r for r in others if isinstance(r, SampleOutput)], cold(torch_llama, asks[1:]))
        assert not sampler.busy


def test_short_prompts_do_not_wait_for_a_long_one(torch_llama: World) -> None:
    """While 200 tokens are computed 20 at a time, a one-token sample takes at most three turns, and whoever decodes
    gets a token every other turn."""
    sampler = torch_llama.sampler(max_rows=4, prefill_tokens=20)
    beside = Ask(payload(prompt(60, 5), max_tokens=40, seed=1, stop=()), "a")
    sampler.add(beside.job("beside"))
    sampler.step()
    long = Ask(payload(prompt(61, 200), 2, max_tokens=4, seed=2, stop=()), "b")
    sampler.add(long.job("long"))
    done: dict[str, Any] = {}
    for i in range(6):
        sampler.add(Ask(payload(prompt(62 + i, 7), max_tokens=1, seed=i)).job(f"short{i}"))
        done.update(finished for _ in range(4) for finished in sampler.step())
        assert f"short{i}" in done
    assert "long" not in done
    done.update(finished for _ in range(80) for finished in sampler.step())
    check([done["long"], done["beside"]], cold(torch_llama, [long, beside]))


def test_two_long_prompts_beside_short_ones_that_stay(llama: World) -> None:
    """The prompt being computed keeps its slot while newcomers take theirs and the cache grows."""
    asks = [
        Ask(payload(prompt(70, 120), 2, max_tokens=9, seed=1, stop=()), "a"),
        *(Ask(payload(prompt(71 + i, 6 + i), max_tokens=12 + i, seed=i, stop=()), "ba"[i % 2], at=i) for i in range(9)),
        Ask(payload(prompt(90, 90), 2, max_tokens=9, seed=2, prompt_logprobs=True, stop=()), "b", at=1),
        Ask(payload(prompt(91, 90), max_tokens=1, seed=2, stop=()), None, at=1),
    ]
    check(run(llama.sampler(max_rows=12, prefill_tokens=16), asks), cold(llama, asks))


def test_a_broken_adapter_spoils_nobody_elses_store(llama: World) -> None:
    """Blocks that held values which are not finite are used again by others, beside rows without stored blocks."""
    broken = llama.make_adapter(3)
    broken.b["model.layers.0.self_attn.v_proj"].fill_(torch.nan)
    llama.adapters["broken"] = broken
    sampler = llama.sampler(prefix_cache_tokens=4 * BLOCK)
    common = prompt(80, 70)
    (result,) = run_all(sampler, [Ask(payload(common, 2, max_tokens=3, seed=1), "broken")])
    assert isinstance(result, BadRequest)
    asks = few_shot(common)
    for _ in range(2):
        check(run(sampler, asks), cold(llama, asks))


def test_memory_trouble_gives_up_the_store_first(llama: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asks = few_shot(prompt(0, 100))
    want = cold(llama, asks)
    sampler = llama.sampler(max_rows=16)
    run(sampler, [replace(ask, at=0) for ask in asks])
    assert sampler.stats().stored_tokens
    failures = [llama.out_of_memory()]

    def failing(shape: tuple[int, ...]) -> None:
        if failures:
            assert sampler.stats().stored_tokens
            raise failures.pop()

    llama.watch_passes(monkeypatch, failing)
    hits = sampler.stats().hits
    sampler.add(asks[0].job("x"))
    sampler.step()
    assert sampler.stats().stored_tokens == 0
    done = dict(finished for _ in range(20) for finished in sampler.step())
    check([r for r in done.values() if isinstance(r, SampleOutput)], want[:1])
    assert sampler.stats().hits == hits + 1  # of the try that failed


@pytest.mark.parametrize("failing", [(1,), (2,), (1, 2, 3), tuple(range(1, 99))])
def test_a_store_that_cannot_be_had_is_done_without(
    llama: World, monkeypatch: pytest.MonkeyPatch, failing: tuple[int, ...]
) -> None:
    calls = 0
    real = llama.blocks.reserve

    def reserve(blocks: Any, count: int, most: int) -> None:
        nonlocal calls
        if count > blocks.count:
            calls += 1
            if calls in failing:
                raise llama.out_of_memory(by_words=True)
        real(blocks, count, most)

    monkeypatch.setattr(llama.blocks, "reserve", reserve)
    asks = few_shot(prompt(0, 100))
    check(run(llama.sampler(max_rows=16, prefill_tokens=60), asks), cold(llama, asks))
    assert calls
