"""`config.json` and `generation_config.json` of a GGUF file, from its metadata.

GGUF names what llama.cpp must be told; what it knows by itself of a family is spelled out here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from openrl.models.gguf_file import GgufFile

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")
GEMMA = ("gemma2", "gemma3")
HEAD = "output.weight"
FREQUENCIES = "rope_freqs.weight"  # Llama 3.1 and later: what each rotary frequency is divided by
_EMBEDDINGS = "token_embd.weight"
_CLASSES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}
_SPECIAL = {
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "pad_token_id": "padding_token_id",
    "unk_token_id": "unknown_token_id",
}
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}  # the two models that scale queries by another width than the head's
_LOCAL_THETA = 10000.0  # of Gemma 3's layers with a window, where the file does not say
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class Fields:
    """The metadata of a file under its architecture's prefix, numbers as their author wrote them."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = architecture(file)

    def get(self, key: str, default: Any = None) -> Any:
        return shortest(self.file.metadata.get(f"{self.architecture}.{key}", default))

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise self.file.unusable(f"its metadata has no {self.architecture}.{key}")
        return value

    @property
    def head_dim(self) -> int:
        by_width = int(self.need("embedding_length")) // int(self.need("attention.head_count"))
        size = int(self.get("attention.key_length", self.get("rope.dimension_count", by_width)))
        if self.get("attention.value_length", size) != size or self.get("rope.dimension_count", size) != size:
            raise self.file.unusable("its heads differ in size between keys and values, or are rotated in part only")
        return size


def architecture(file: GgufFile) -> str:
    """The file's architecture. Raises ModelError if it is none of ours."""
    named = file.metadata.get("general.architecture")
    if named not in ARCHITECTURES:
        raise file.unusable(
            f"its architecture is {named!r}",
            f"GGUF files of {', '.join(ARCHITECTURES)} can be; for others give --model the Hugging Face folder.",
        )
    return named


def model_config(file: GgufFile) -> dict[str, Any]:
    """`config.json` as transformers 5 writes it."""
    fields = Fields(file)
    if fields.get("expert_count", 0):
        raise file.unusable("it is a mixture of experts", "Give --model the Hugging Face folder.")
    return dict(sorted((_common(fields) | _family(fields)).items()))


def generation_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """What `generate` takes from a model that comes without wishes of its own."""
    tokens = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in config}
    return {"_from_model_config": True, **tokens}


def special_tokens(file: GgufFile) -> dict[str, int]:
    """Ids by the names that configs use, of those that the file has."""
    found = {name: file.metadata.get(f"tokenizer.ggml.{key}") for name, key in _SPECIAL.items()}
    return {name: int(value) for name, value in found.items() if value is not None}


def shortest(value: Any) -> Any:
    """GGUF holds float32, so that 1e-6 comes back as 9.99999997e-07: take the shortest number with that float32."""
    if isinstance(value, float) and float(np.float32(value)) == value:
        return float(str(np.float32(value)))
    return value


def _common(fields: Fields) -> dict[str, Any]:
    file, heads = fields.file, int(fields.need("attention.head_count"))
    name, model_type = _CLASSES[fields.architecture]
    if _EMBEDDINGS not in file.tensors:
        raise file.unusable(f"it has no weights {_EMBEDDINGS}")
    return {
        "architectures": [name],
        "model_type": model_type,
        "dtype": "bfloat16",
        "vocab_size": file.tensors[_EMBEDDINGS].rows,
        "hidden_size": int(fields.need("embedding_length")),
        "intermediate_size": int(fields.need("feed_forward_length")),
        "num_hidden_layers": int(fields.need("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fields.get("attention.head_count_kv", heads)),
        "head_dim": fields.head_dim,
        "max_position_embeddings": int(fields.need("context_length")),
        "rms_norm_eps": float(fields.need("attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": HEAD not in file.tensors,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        **special_tokens(file),
    }


def _family(fields: Fields) -> dict[str, Any]:
    match fields.architecture:
        case "gemma2" | "gemma3":
            return _gemma(fields)
        case "llama":
            return {
                "hidden_act": "silu",
                "attention_bias": False,
                "mlp_bias": False,
                "pretraining_tp": 1,
                **_rope(fields),
            }
        case "qwen3":
            return {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False, **_rope(fields)}
        case _:
            return {"hidden_act": "silu", "use_sliding_window": False, **_rope(fields)}


def _gemma(fields: Fields) -> dict[str, Any]:
    """Layers with and without a window take turns; queries are scaled by the head's size, save in the largest model."""
    scalar, layers = fields.head_dim, int(fields.need("block_count"))
    if layers == _LAYERS_OF_27B[fields.architecture]:
        scalar = int(fields.need("embedding_length")) // int(fields.need("attention.head_count"))
    common = {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": scalar,
        "sliding_window": int(fields.get("attention.sliding_window", 4096)),
    }
    return common | (_gemma2(fields, layers) if fields.architecture == "gemma2" else _gemma3(fields, layers))


def _gemma2(fields: Fields, layers: int) -> dict[str, Any]:
    return {
        "attn_logit_softcapping": float(fields.get("attn_logit_softcapping", 50.0)),
        "final_logit_softcapping": float(fields.get("final_logit_softcapping", 30.0)),
        "layer_types": _layer_types(layers, 2),
        **_rope(fields),
    }


def _gemma3(fields: Fields, layers: int) -> dict[str, Any]:
    full = _rope(fields, theta=1_000_000.0)["rope_parameters"]
    local = {"rope_type": "default", "rope_theta": float(fields.get("rope.freq_base_swa", _LOCAL_THETA))}
    return {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "layer_types": _layer_types(layers, 6),
        "_sliding_window_pattern": 6,
        "use_bidirectional_attention": False,
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
    }


def _layer_types(layers: int, every: int) -> list[str]:
    """Each `every`-th layer sees all, the others a window."""
    return ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]


def _rope(fields: Fields, theta: float = 10_000.0) -> dict[str, Any]:
    """The rotary settings as transformers 5 writes them. Raises ModelError for a scaling that we cannot state."""
    theta = float(fields.get("rope.freq_base", theta))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    kind, factor = fields.get("rope.scaling.type", "none"), float(fields.get("rope.scaling.factor", 1.0))
    if kind not in ("none", "linear"):
        raise fields.file.unusable(f"its rotary scaling is {kind!r}; legal are 'none' and 'linear'")
    if FREQUENCIES in fields.file.tensors:
        rope |= _llama3(fields, theta)
    elif kind == "linear" and factor != 1.0:
        rope |= {"rope_type": "linear", "factor": factor}
    return {"rope_parameters": rope}


def _llama3(fields: Fields, theta: float) -> dict[str, Any]:
    """Llama 3.1 and later: GGUF holds what the rule gives and not the rule. Its factor is the greatest of the divisors;
    with the other settings, which have been the same in all releases, it must give them all again."""
    stored = fields.file.read(FREQUENCIES, np.arange(1)).ravel()
    factor, (low, high, trained) = float(stored.max()), _LLAMA3.values()
    wavelengths = 2 * np.pi * theta ** (np.arange(0, fields.head_dim, 2) / fields.head_dim)
    smooth = np.clip((trained / wavelengths - low) / (high - low), 0, 1)
    divisors = 1 / ((1 - smooth) / factor + smooth)
    if stored.shape != divisors.shape or not np.allclose(stored, divisors, rtol=1e-3):
        raise fields.file.unusable(f"its rotary frequencies ({FREQUENCIES}) are not scaled as Llama 3.1's are")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
