"""GGUF files of tiny random models as llama.cpp's converter writes them: names, order of rows, norms plus 1."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType

from support import tiny

WORDS = ["<unk>", "<s>", "</s>", *(chr(33 + i) for i in range(tiny.VOCAB - 4)), "ab"]
GEMMA = ("gemma2", "gemma3")


def write(
    path: Path,
    model: Any,
    family: str = "llama",
    *,
    without: str = "",
    extra: Mapping[str, torch.Tensor] = MappingProxyType({}),
    packed: GGMLQuantizationType | None = None,
) -> Path:
    """`without`: a tensor to leave out; `extra`: more tensors. `packed`: how matrices are stored whose rows divide by
    32, else in float32."""
    writer = GGUFWriter(str(path), family)
    _write_metadata(writer, model.config, family)
    _write_tokenizer(writer)
    more = {name: weight.detach().float().numpy() for name, weight in extra.items()}
    for name, weight in (tensors(model, family) | more).items():
        if name == without:
            continue
        if packed is None or weight.ndim == 1 or weight.shape[1] % 32:
            writer.add_tensor(name, weight)
        else:
            writer.add_tensor(name, gguf.quantize(weight, packed), raw_dtype=packed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors(model: Any, family: str) -> dict[str, np.ndarray[Any, Any]]:
    """The model's weights by the names that the package gguf has for them."""
    config = model.config
    by_value = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(by_value[family], config.num_hidden_layers)
    found: dict[str, np.ndarray[Any, Any]] = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = weight.float()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if family == "llama" and heads:
            values = _neighbours(values, heads)
        if family in GEMMA and "norm" in name:
            values = values + 1
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        found[theirs] = values.contiguous().numpy()
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        found["rope_freqs.weight"] = _divisors(config.head_dim, rope).numpy()
    return found


def _neighbours(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q and k in llama.cpp's order: its rotary embedding pairs neighbours, Hugging Face's pairs halves."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _divisors(head_dim: int, rope: dict[str, Any]) -> torch.Tensor:
    """What Llama 3.1 divides each rotary frequency by, wave by wave."""
    divisors: list[float] = []
    for pair in range(0, head_dim, 2):
        turns = rope["original_max_position_embeddings"] / (2 * np.pi * rope["rope_theta"] ** (pair / head_dim))
        low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
        smooth = (turns - low) / (high - low)
        divisors.append(1.0 if turns > high else factor if turns < low else 1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(divisors)


def _write_metadata(writer: GGUFWriter, config: Any, family: str) -> None:
    writer.add_name("a title")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if family == "llama":
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_vocab_size(config.vocab_size)
    elif family != "qwen2":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    if family != "gemma2":
        writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if family in GEMMA:
        writer.add_sliding_window(config.sliding_window)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _write_tokenizer(writer: GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(WORDS)
    writer.add_token_types(
        [TokenType.CONTROL if word.startswith("<") and len(word) > 1 else TokenType.NORMAL for word in WORDS]
    )
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}")
