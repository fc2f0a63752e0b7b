"""Sampling in bf16 with packed weights: the numbers of plain weights, and those of float32 within bf16's reach."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from openrl.backends.torch.lora import LoraLinear
from openrl.backends.torch.model import CausalLM, open_model
from openrl.backends.torch.packed import PackedLinear, pack
from openrl.backends.torch.sample import Sampler
from support.sampling import Ask, World, log_softmax, payload, run

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("bf16"), "llama")


def opened(folder: Path) -> CausalLM:
    return open_model(folder, CPU, torch.bfloat16)


def test_packed_products_equal_plain_ones(world: World) -> None:
    plain, packed = opened(world.folder), opened(world.folder)
    if not pack(packed):
        pytest.skip("this CPU has no bf16 products")
    layers = list(zip(plain.backbone.modules(), packed.backbone.modules(), strict=True))
    for rows in (1, 5, 70):
        hidden = torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows)).to(torch.bfloat16)
        with torch.inference_mode():
            assert torch.allclose(plain.project(hidden), packed.project(hidden), atol=1e-4)
            for a, b in layers:
                if isinstance(a, LoraLinear) and isinstance(b, LoraLinear) and a.base.in_features == 32:
                    assert isinstance(b.base, PackedLinear)
                    torch.testing.assert_close(a.base(hidden), b.base(hidden), rtol=1e-2, atol=1e-2)


def test_packing_twice_changes_nothing(world: World) -> None:
    model = opened(world.folder)
    assert pack(model) == pack(model)


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
