"""Work in floating point operations: of a LoRA training step, and what the machine's matrix products reach."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

_SIZE = 2048  # of the square products that are timed
_REPEATS = 8


def step_flops(folder: Path, lengths: Sequence[int], rank: int) -> float:
    """Operations of a `forward_backward` on sequences of these lengths, adapters on every linear layer and the head.

    A product with a weight of P parameters costs 2 P a token forward and 2 P for the gradient of its input; a frozen
    weight needs no gradient of its own, so 4 P in all, where full training takes 6 P (Kaplan et al. 2020, section
    2.1). An adapter's factors do need theirs: 6 P. Causal attention multiplies queries with keys and weights with
    values, 2 * 2 * width * N * (N + 1) / 2 a layer for N tokens, and twice that on the way back. Norms, activations
    and softmax are left out, as is usual.
    """
    config = AutoConfig.from_pretrained(folder)
    weights, factors = _parameters(config, rank)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = config.num_attention_heads * head_dim
    attention = config.num_hidden_layers * 4 * width * sum(n * (n + 1) / 2 for n in lengths)
    return (4 * weights + 6 * factors) * sum(lengths) + 3 * attention


def _parameters(config: Any, rank: int) -> tuple[int, int]:
    """Parameters of the base model's products, head included, and of an adapter of that rank on all of them: those that
    a token meets, where there are experts (in all layers, as released mixtures have them)."""
    hidden = config.hidden_size
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    attention = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
    inner, active, experts = config.intermediate_size, 1, 0
    if getattr(config, "num_experts", 0):
        inner, active, experts = config.moe_intermediate_size, config.num_experts_per_tok, config.num_experts
    mlp = active * [(hidden, inner), (hidden, inner), (inner, hidden)]
    shapes = [*config.num_hidden_layers * [*attention, *mlp], (hidden, config.vocab_size)]
    routers = config.num_hidden_layers * hidden * experts
    return sum(i * o for i, o in shapes) + routers, rank * sum(i + o for i, o in shapes)


def matrix_rate(dtype: torch.dtype) -> float:
    """Operations a second of a large square product with torch's present number of threads: the best of a few."""
    x, w = torch.randn(_SIZE, _SIZE).to(dtype), torch.randn(_SIZE, _SIZE).to(dtype)
    best = float("inf")
    for _ in range(_REPEATS):
        started = time.perf_counter()
        torch.nn.functional.linear(x, w)
        best = min(best, time.perf_counter() - started)
    return 2 * _SIZE**3 / best
