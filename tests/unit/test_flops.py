"""The operations of a training step, against a count by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, Qwen3MoeConfig

from openrl.backends.torch.flops import matrix_rate, step_flops


def test_a_step_s_operations_are_those_counted_by_hand(tmp_path: Path) -> None:
    LlamaConfig(
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=32,
    ).save_pretrained(tmp_path)
    attention, mlp, head = 8 * 8 + 2 * 8 * 4 + 8 * 8, 3 * 8 * 12, 8 * 32
    weights = attention + mlp + head
    factors = 2 * ((8 + 8) + 2 * (8 + 4) + (8 + 8) + 3 * (8 + 12) + (8 + 32))
    scores = 4 * 8 * (3 * 4 / 2)  # three tokens see 1 + 2 + 3 keys
    assert step_flops(tmp_path, [3], rank=2) == 3 * (4 * weights + 6 * factors) + 3 * scores


def test_of_a_mixture_those_count_that_a_token_meets(tmp_path: Path) -> None:
    """Two of four experts, and the router."""
    config = Qwen3MoeConfig(
        hidden_size=8,
        moe_intermediate_size=6,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        vocab_size=32,
    )
    config.save_pretrained(tmp_path)
    weights = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 2 * 3 * 8 * 6 + 8 * 4 + 8 * 32
    factors = 2 * ((8 + 8) + 2 * (8 + 4) + (8 + 8) + 2 * 3 * (8 + 6) + (8 + 32))
    assert step_flops(tmp_path, [1], rank=2) == 4 * weights + 6 * factors + 3 * 4 * 8


def test_operations_grow_with_tokens(tmp_path: Path) -> None:
    LlamaConfig(
        hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    ).save_pretrained(tmp_path)
    assert step_flops(tmp_path, [4, 4], 2) == pytest.approx(2 * step_flops(tmp_path, [4], 2))
    assert step_flops(tmp_path, [8], 2) > step_flops(tmp_path, [4, 4], 2)


def test_the_matrix_rate_is_that_of_a_machine() -> None:
    assert 1e8 < matrix_rate(torch.float32) < 1e16
