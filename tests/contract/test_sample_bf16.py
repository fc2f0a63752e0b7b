"""Sampling in bf16 with packed weights: the numbers of plain weights, and those of float32 within bf16's reach."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from openrl.backends.torch.model import CausalLM, open_model
from openrl.backends.torch.packed import Packing, fits_float16, pack_head, packing_for, product
from openrl.backends.torch.sample import Sampler
from openrl.backends.torch.sample_fused import FusedBackbone
from support.sampling import Ask, World, log_softmax, payload, run

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("bf16"), "llama")


def opened(folder: Path) -> CausalLM:
    return open_model(folder, CPU, torch.bfloat16)


def test_packed_products_equal_plain_ones(world: World) -> None:
    if packing_for(opened(world.folder), []) is not Packing.ONEDNN:
        pytest.skip("this CPU has no bf16 products")
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(48, 32, generator=generator).bfloat16(), torch.randn(48, generator=generator).bfloat16()
    for rows in (1, 5, 70):
        x = torch.randn(rows, 32, generator=generator).bfloat16()
        want = product(weight, bias, Packing.NONE)(x)
        torch.testing.assert_close(product(weight, bias, Packing.ONEDNN)(x), want, rtol=1e-2, atol=1e-2)


def test_the_sampler_runs_from_packed_copies(world: World) -> None:
    model = opened(world.folder)
    assert FusedBackbone(model).packing is packing_for(model, [])
    packed = pack_head(model)
    assert pack_head(model) == packed  # again, which changes nothing


def test_float32_models_whose_weights_float16_holds_are_packed(tmp_path: Path) -> None:
    """Exactly: the logprobs of a model with weights from bf16 are transformers' in float32 (S1)."""
    world = World(tmp_path, "qwen2")
    if packing_for(world.model, []) is not Packing.FBGEMM:
        pytest.skip("this PyTorch has no FBGEMM")
    assert FusedBackbone(world.model).packing is Packing.NONE  # random float32 does not fit
    with torch.no_grad():
        for parameter in world.twin(None).parameters():
            parameter.copy_(parameter.bfloat16())
    world.twin(None).save_pretrained(tmp_path)
    world = World(tmp_path, None)
    assert FusedBackbone(world.model).packing is Packing.FBGEMM
    asks = [Ask(payload([5 + i, 9, 60], max_tokens=20, seed=i, stop=()), ("a", "b", None)[i]) for i in range(3)]
    for ask, result in zip(asks, run(world.sampler(), asks), strict=True):
        want = world.naive(ask.payload, ask.adapter)
        assert result.sequences[0].tokens.tolist() == want.tokens.tolist()
        np.testing.assert_allclose(result.sequences[0].logprobs, want.logprobs, atol=2e-5)


@pytest.mark.parametrize(("largest", "fits"), [(1.0, True), (1e-6, True), (1e5, False)])
def test_the_packed_head_is_as_exact_as_float32_l6(world: World, largest: float, fits: bool) -> None:
    """Also for weights that float16 holds badly: to 1e-6 of what is added up."""
    model = opened(world.folder)
    model.head_wide = (model.head_wide * (largest / model.head_wide.abs().max())).bfloat16().float()
    assert fits_float16(model.head_wide) is fits
    pack_head(model)
    for rows in (1, 5, 70):
        hidden = torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows)).to(torch.bfloat16)
        exact = hidden.double() @ model.head_wide.double().t()
        error = (model.project(hidden).double() - exact).abs().max()
        assert error <= 1e-6 * max(largest, 1.0)


def test_logprobs_are_near_float32_and_agree_with_themselves(world: World) -> None:
    """Drawn logprobs, those of compute_logprobs on the same tokens, and a float32 model's: the table of section 6."""
    sampler = Sampler(opened(world.folder), world.folder, 8, 4096, load=world.load)
    asks = [Ask(payload([5 + i, 9, 60], 2, max_tokens=30, seed=i, stop=()), ("a", "b", None)[i]) for i in range(3)]
    results = run(sampler, asks)
    for ask, result in zip(asks, results, strict=True):
        for sequence in result.sequences:
            tokens = ask.payload.prompt.tolist() + sequence.tokens.tolist()
            (scored,) = run(sampler, [Ask(payload(tokens, max_tokens=1, prompt_logprobs=True), ask.adapter)])
            assert scored.prompt_logprobs is not None
            table = log_softmax(world.logits(tokens, ask.adapter))
            exact = table[np.arange(2, len(tokens) - 1), tokens[3:]]
            for got in (sequence.logprobs, scored.prompt_logprobs[3:]):
                assert np.abs(got - exact).mean() < 5e-2
                assert np.abs(got - exact).max() < 0.5
            difference = sequence.logprobs - scored.prompt_logprobs[3:]
            assert np.square(difference).mean() / 2 < 1e-3  # S14: kl v2 of a healthy bf16 sampler


def test_s11_a_seeded_request_alone_repeats_whatever_is_stored(world: World) -> None:
    """S11 in bf16: alone it is computed anew; beside others, or without a seed, it goes on from what is stored."""
    sampler = Sampler(opened(world.folder), world.folder, 8, 4096, load=world.load)
    prompt = [3 + (7 * i) % 90 for i in range(80)]
    again = Ask(payload(prompt, 2, max_tokens=40, seed=7, stop=()), "a")
    other = Ask(payload([*prompt[:70], 9, 9, 4], max_tokens=2, stop=()), "a")
    first = run(sampler, [again])[0]
    assert sampler.stats().hits == 0
    run(sampler, [other, replace(other, at=0)])
    hits = sampler.stats().hits
    assert hits > 0
    second = run(sampler, [again])[0]
    assert sampler.stats().hits == hits
    assert [x.tokens.tolist() for x in first.sequences] == [x.tokens.tolist() for x in second.sequences]
    run(sampler, [again, other])
    assert sampler.stats().hits > hits
