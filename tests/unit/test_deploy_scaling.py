"""docs/scaling.md: its tables are its formulas', and the formulas are the engine's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

TEXT = (Path(__file__).parents[2] / "docs/scaling.md").read_text()
TOKENS = 65536 + 16384  # max_kv_tokens and prefix_cache_tokens, by default
RANK = 16


@dataclass(frozen=True)
class Shape:
    name: str
    hidden: int
    layers: int
    queries: int
    keys: int
    mlp: int
    vocabulary: int
    tied: bool

    @property
    def multiplied(self) -> int:
        """Weights that a token is multiplied with."""
        attention = 2 * self.hidden * (self.queries + self.keys)
        return self.layers * (attention + 3 * self.hidden * self.mlp) + self.hidden * self.vocabulary

    @property
    def parameters(self) -> int:
        return self.multiplied + (0 if self.tied else self.hidden * self.vocabulary)

    def adapter(self, rank: int) -> int:
        h, q, k, i = self.hidden, self.queries, self.keys, self.mlp
        return rank * (self.layers * ((h + q) + 2 * (h + k) + (q + h) + 3 * (h + i)) + h + self.vocabulary)

    @property
    def token_bytes(self) -> int:
        return 2 * self.layers * self.keys * 2


SHAPES = [
    Shape("SmolLM2-135M", 576, 30, 576, 192, 1536, 49152, True),
    Shape("Qwen3-0.6B", 1024, 28, 2048, 1024, 3072, 151936, True),
    Shape("Qwen3-4B", 2560, 36, 4096, 1024, 9728, 151936, True),
    Shape("Llama-3.1-8B", 4096, 32, 4096, 1024, 14336, 128256, False),
    Shape("Qwen3-32B", 5120, 64, 8192, 1024, 25600, 151936, False),
]
GPUS = [("L4", 121e12, 300e9), ("A100", 312e12, 2039e9), ("H100", 989e12, 3350e9)]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_memory_table(shape: Shape) -> None:
    n = shape.adapter(RANK)
    row = (
        f"| {shape.name} | {2 * shape.parameters / 1e9:.2f} GB | {16 * n / 1e6:,.0f} MB | {4 * n / 1e6:.0f} MB "
        f"| {shape.token_bytes / 1024:g} KiB | {TOKENS * shape.token_bytes / 1e9:.1f} GB |"
    )
    assert row in TEXT


@pytest.mark.parametrize("shape", SHAPES[1:4], ids=lambda shape: shape.name)
def test_speed_table(shape: Shape) -> None:
    """Rounded to two or three digits, so within a twentieth."""
    for words, speed in (("trained", trained), ("sampled", sampled)):
        (line,) = [line for line in TEXT.splitlines() if line.startswith(f"| {shape.name}, {words} |")]
        shown = [float(cell.replace(",", "")) for cell in line.split("|")[2:5]]
        assert shown == [pytest.approx(speed(shape, *gpu[1:]), rel=0.05) for gpu in GPUS]


def trained(shape: Shape, peak: float, _: float) -> float:
    return 0.3 * peak / (4 * shape.multiplied)


def sampled(shape: Shape, _: float, bandwidth: float) -> float:
    read = 2 * shape.multiplied + 64 * 1024 * shape.token_bytes
    return 64 / (read / (0.6 * bandwidth) + 0.0005 * shape.layers)


def test_runs_at_once() -> None:
    def runs(shape: Shape, memory: float, tokens: int) -> float:
        left = 0.94 * memory - 2 * shape.parameters - tokens * shape.token_bytes - 2e9
        return left / (16 * shape.adapter(RANK))

    _, small, middle, large, largest = SHAPES
    assert f"| Qwen3-0.6B | {runs(small, 24e9, TOKENS):.0f} | {runs(small, 80e9, TOKENS):.0f} |" in TEXT
    assert f"| Qwen3-4B | 1; with 40,960 tokens of keys and values {runs(middle, 24e9, 40960):.0f} |" in TEXT
    assert f"| {runs(middle, 80e9, TOKENS):.0f} |" in TEXT
    assert f"| does not fit with these settings | {runs(large, 80e9, TOKENS):.0f} |" in TEXT
    assert 1 <= runs(largest, 80e9, 16384) < 2


def test_adapters_are_as_large_as_the_formula_says() -> None:
    """By a model with these layers, and PEFT's rule that a layer's factors have (in + out) x r values."""
    shape = Shape("tiny", 32, 2, 32, 16, 64, 100, False)
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=100,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert sum(module.in_features + module.out_features for module in layers) * 8 == shape.adapter(8)
    norms = sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
    assert sum(p.numel() for p in model.parameters()) - norms == shape.parameters
