"""Tiny random models in the families that matter, built on the fly; tests download nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PreTrainedConfig, Qwen3Config

VOCAB = 97

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,  # large, so that a random model has opinions and mistakes show
}


def config(family: str, *, tied: bool = True) -> PreTrainedConfig:
    """`family`: llama, qwen3 or gemma3 (sliding window of 16 on two of its three layers)."""
    common = {**_COMMON, "tie_word_embeddings": tied}
    if family == "llama":
        return LlamaConfig(**common)
    if family == "qwen3":
        return Qwen3Config(**common)
    if family == "gemma3":
        layers = ["sliding_attention", "sliding_attention", "full_attention"]
        return Gemma3TextConfig(**common, sliding_window=16, layer_types=layers, query_pre_attn_scalar=8)
    raise ValueError(f"unknown family {family!r}; known: llama, qwen3, gemma3")


def build(folder: Path, family: str = "llama", *, tied: bool = True, seed: int = 0) -> Path:
    """Write a random float32 model (no tokenizer) into `folder`, which is returned."""
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config(family, tied=tied)).save_pretrained(folder)
    return folder
