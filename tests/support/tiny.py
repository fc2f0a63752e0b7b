"""Tiny random models in the families that matter, built on the fly; tests download nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

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


_PLAIN: dict[str, Any] = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
FAMILIES = (*_PLAIN, "mistral", "gemma2", "gemma3")  # the dense ones
MIXTURE = "qwen3_moe"


def config(family: str, *, tied: bool = True, **changes: Any) -> PreTrainedConfig:
    """`family`: a supported one. gemma3 and gemma2 have a sliding window of 16 on some of their three layers, mistral
    on all; gemma2 caps its logits and attention scores softly; of a mixture of experts the middle layer is dense.
    `changes` are other values of the config."""
    common: dict[str, Any] = {**_COMMON, "tie_word_embeddings": tied, **changes}
    if family in _PLAIN:
        return _PLAIN[family](**common)
    if family == "mistral":
        return MistralConfig(**common, sliding_window=16)
    if family == "gemma2":
        caps: dict[str, Any] = {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 2.0}
        return Gemma2Config(**common, **caps, sliding_window=16, query_pre_attn_scalar=8)
    if family == "gemma3":
        layers = ["sliding_attention", "sliding_attention", "full_attention"]
        own: dict[str, Any] = {"sliding_window": 16, "layer_types": layers, "query_pre_attn_scalar": 8}
        return Gemma3TextConfig(**(own | common))
    if family == MIXTURE:
        experts: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        return Qwen3MoeConfig(**(experts | {"norm_topk_prob": True, "mlp_only_layers": [1]} | common))
    raise ValueError(f"unknown family {family!r}; known: {', '.join((*FAMILIES, MIXTURE))}")


def build(folder: Path, family: str = "llama", *, tied: bool = True, seed: int = 0, **changes: Any) -> Path:
    """Write a random float32 model (no tokenizer) into `folder`, which is returned. `changes` to the config."""
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config(family, tied=tied, **changes)).save_pretrained(folder)
    return folder


def build_uneven(folder: Path, family: str, **changes: Any) -> Path:
    """As `build`, with random norm weights and biases where new models have ones and zeros."""
    model: Any = AutoModelForCausalLM.from_pretrained(build(folder, family, **changes))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    return folder
