"""What a training step is said to take: plausible figures for known models, and what follows from them."""

from __future__ import annotations

from typing import Any

import pytest

from openrl.backends.torch.memory_plan import MemoryPlan, Sizes, plan

_MIB = 1 << 20
SMOL: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}
GEMMA: dict[str, Any] = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 18,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 262144,
}


def of(config: dict[str, Any], available: int = 1 << 40, *, gpu: bool = False) -> MemoryPlan:
    sizes = Sizes.of(config, 2)
    return plan(sizes, available, 0, sizes.adapter(16), gpu=gpu)


def test_adapter_size() -> None:
    """Rank 1 on all layers of SmolLM2-135M: the sum of in + out."""
    layer = 2 * (576 + 576) + 2 * (576 + 192) + 2 * (576 + 1536) + (1536 + 576)
    assert Sizes.of(SMOL, 2).adapter(1) == 30 * layer + 576 + 49152


@pytest.mark.parametrize("config", [SMOL, GEMMA])
def test_4096_tokens_stay_within_600_mb(config: dict[str, Any]) -> None:
    """Whatever the vocabulary, as one sequence or many; a larger model may take as much as its weights."""
    held = of(config)
    assert held.budget == 300 * _MIB
    assert held.needed(held.limit(4096)) <= 600e6
    if config is SMOL:
        assert held.needed(4096) <= 600e6


def test_a_mixture_keeps_what_its_experts_see() -> None:
    """Eight of 128 experts see a token; adapters have all of them, in the layout of A10 (A8)."""
    mixture = {**SMOL, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 64}
    dense, sizes = Sizes.of({**SMOL, "intermediate_size": 8 * 64}, 2), Sizes.of(mixture, 2)
    assert sizes.kept == dense.kept + sizes.routing
    assert sizes.routing < dense.kept / 5
    assert sizes.passing >= dense.passing + 2 * 4 * 8 * sizes.hidden  # rows of experts, there and back
    stacks = 3 * (sizes.hidden + 128 * 64)
    assert sizes.adapter(1) - Sizes.of(SMOL, 2).adapter(1) == 30 * (stacks - 3 * (576 + 1536))


def test_the_buffers_do_not_depend_on_the_vocabulary() -> None:
    assert Sizes.of(SMOL, 2).buffers == Sizes.of({**SMOL, "vocab_size": 262144}, 2).buffers


def test_recomputing_begins_where_memory_ends() -> None:
    held = of(SMOL)
    assert held.recomputed(held.fitting) == 0
    counts = [held.recomputed(tokens) for tokens in range(held.fitting + 50, 4096, 50)]
    assert counts == sorted(counts)
    assert counts[0] > 0
    assert counts[-1] <= 30
    for tokens in (800, 1000, 1200):
        assert held.needed(tokens) <= held.fixed + held.budget


def test_little_free_memory_bounds_a_pass() -> None:
    """Half of what is free, even where that is less than a pass would like."""
    held = of(SMOL, 700 * _MIB)
    assert held.fixed + held.budget == 350 * _MIB
    assert held.recomputed(512) > 0
    assert held.limit(4096) == 512  # smaller ones would be slow
    assert held.limit(100) == 100
    assert of(SMOL, 0).recomputed(100) == 30


def test_a_cpu_gains_nothing_from_larger_micro_batches() -> None:
    """Where memory abounds, as for a model with large weights."""
    sizes = Sizes.of(SMOL, 2)
    assert plan(sizes, 1 << 40, 1 << 36, sizes.adapter(16)).limit(4096) == 768


def test_a_gpu_is_used_whole() -> None:
    assert of(SMOL, 80 << 30, gpu=True).limit(1 << 20) > 100_000
