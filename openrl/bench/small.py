"""A small Llama with random weights, for devices that are to be tried and not measured, such as MLX on a CPU."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

_VOCABULARY, _HIDDEN, _INNER, _LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM = 2048, 256, 768, 4, 8, 4, 32

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": _VOCABULARY,
    "hidden_size": _HIDDEN,
    "intermediate_size": _INNER,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _KV_HEADS,
    "head_dim": _HEAD_DIM,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float16",
}


def small_model(into: Path) -> Path:
    """Write a model of 3.7 million weights, without a tokenizer, into a new folder, which is returned."""
    into.mkdir(parents=True)
    (into / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray[Any, np.dtype[np.float16]]:
        return (rng.standard_normal((rows, columns), np.float32) / math.sqrt(columns)).astype(np.float16)

    ones = np.ones(_HIDDEN, np.float16)
    weights = {"model.embed_tokens.weight": matrix(_VOCABULARY, _HIDDEN), "model.norm.weight": ones}
    queries, keys = _HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM
    for layer in (f"model.layers.{number}" for number in range(_LAYERS)):
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            weights[f"{layer}.self_attn.{name}_proj.weight"] = matrix(rows, _HIDDEN)
        weights[f"{layer}.self_attn.o_proj.weight"] = matrix(_HIDDEN, queries)
        weights[f"{layer}.mlp.gate_proj.weight"] = matrix(_INNER, _HIDDEN)
        weights[f"{layer}.mlp.up_proj.weight"] = matrix(_INNER, _HIDDEN)
        weights[f"{layer}.mlp.down_proj.weight"] = matrix(_HIDDEN, _INNER)
        weights[f"{layer}.input_layernorm.weight"] = weights[f"{layer}.post_attention_layernorm.weight"] = ones
    save_file(weights, into / "model.safetensors", metadata={"format": "pt"})
    return into
