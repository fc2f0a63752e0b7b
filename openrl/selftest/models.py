"""Tiny models and adapters, written as Hugging Face and PEFT folders; the same bytes on every machine.

All values are ones that bf16 holds exactly, so that a backend in bf16 rounds sums and not weights. They are large
enough for a random model to have opinions, so that mistakes show.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from openrl.checkpoints.peft import HEAD_NAME, write_adapter
from openrl.errors import BadRequest
from openrl.selftest.hashing import fractions
from openrl.types import FloatArray, LoraSpec

VOCAB = 101
EOS = 2
FIRST = 3  # ids before it are special
LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 3, 64, 128, 4, 2, 32
EXPERTS, ACTIVE, EXPERT_INNER = 6, 2, 48  # of a mixture
WINDOW = 16  # tokens that sliding attention sees
CONTEXT = 256
SEED = 7

_LETTERS = [
    chr(code) for code in range(33, 33 + VOCAB - FIRST - 5)
]  # what tokens spell; more than ASCII in a few cases
_TEXTS = ["<pad>", "<bos>", "<eos>", *_LETTERS, " ", "ä", "é", "文", "字"]

_COMMON: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "torch_dtype": "float32",
    }
)
_GEMMA: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,  # not the head's size, which a mistaken backend would take
        "sliding_window": WINDOW,
        "rope_theta": 10000.0,
    }
)


@dataclass(frozen=True, slots=True)
class Family:
    """A model family: what its config says beyond the common, and which weights a layer has.

    `norms` are a layer's norms by name, each with its size. `gemma`: 1 is added to the weights of norms, so that these
    are around 0, and embeddings are multiplied by the root of their size, so that they are smaller.
    """

    title: str
    architecture: str
    tied: bool
    norms: Mapping[str, int]
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    gemma: bool = False
    mixtures: tuple[int, ...] = ()  # layers that are mixtures of experts


_PLAIN_NORMS = {"input_layernorm": HIDDEN, "post_attention_layernorm": HIDDEN}
_GEMMA_NORMS = {**_PLAIN_NORMS, "pre_feedforward_layernorm": HIDDEN, "post_feedforward_layernorm": HIDDEN}
_QK_NORMS = {"self_attn.q_norm": HEAD_DIM, "self_attn.k_norm": HEAD_DIM}
_SCALED_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(
            "Llama 3 (scaled rope, untied head)",
            "LlamaForCausalLM",
            False,
            _PLAIN_NORMS,
            {"hidden_act": "silu", "mlp_bias": False, "rope_theta": 500000.0, "rope_scaling": _SCALED_ROPE},
        ),
        "qwen3": Family(
            "Qwen3 (norms on queries and keys, tied head)",
            "Qwen3ForCausalLM",
            True,
            {**_PLAIN_NORMS, **_QK_NORMS},
            {"hidden_act": "silu", "rope_theta": 1000000.0, "use_sliding_window": False},
        ),
        "gemma2": Family(
            "Gemma 2 (soft-capping, tied head)",
            "Gemma2ForCausalLM",
            True,
            _GEMMA_NORMS,
            # A window that reaches over everything: mlx-lm has none for this family, and its backend takes no more.
            {
                **_GEMMA,
                "sliding_window": CONTEXT,
                "final_logit_softcapping": 8.0,
                "attn_logit_softcapping": 2.0,
            },
            gemma=True,
        ),
        "gemma3_text": Family(
            "Gemma 3 (sliding window with a rope of its own, tied head)",
            "Gemma3ForCausalLM",
            True,
            {**_GEMMA_NORMS, **_QK_NORMS},
            {
                **_GEMMA,
                "rope_theta": 1000000.0,
                "rope_local_base_freq": 10000.0,
                "sliding_window_pattern": LAYERS,
                "layer_types": ["sliding_attention"] * (LAYERS - 1) + ["full_attention"],
            },
            gemma=True,
        ),
        "qwen3_moe": Family(
            "Qwen3 mixture of experts",
            "Qwen3MoeForCausalLM",
            False,
            {**_PLAIN_NORMS, **_QK_NORMS},
            {
                "hidden_act": "silu",
                "rope_theta": 1000000.0,
                "use_sliding_window": False,
                "num_experts": EXPERTS,
                "num_experts_per_tok": ACTIVE,
                "moe_intermediate_size": EXPERT_INNER,
                "norm_topk_prob": True,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [1],
            },
            mixtures=(0, 2),
        ),
    }
)


# Experts have much in common, and what is each one's own is so much smaller. Which of two that are all but equal a
# token goes to is a matter of rounding, and in bf16 it may be another than in float64: that must not change too much.
_ALIKE = 4
# Adapters by name. Several ranks, so that a scale which does not go by the rank shows (A1); "head" has the unembedding
# alone.
_ADAPTERS: Mapping[str, LoraSpec] = MappingProxyType(
    {
        "a": LoraSpec(rank=4, seed=1),
        "b": LoraSpec(rank=2, seed=2),
        "head": LoraSpec(rank=4, seed=3, train_attn=False, train_mlp=False),
    }
)


def adapter_spec(name: str) -> LoraSpec:
    return _ADAPTERS[name]


@dataclass(frozen=True, slots=True)
class World:
    """A family's model and its adapters as folders."""

    family: str
    folder: Path
    adapters: Mapping[str, Path]


def build(root: Path, family: str) -> World:
    """Write a family's model and adapters into subfolders of `root`. Raises `BadRequest` for an unknown family."""
    if family not in FAMILIES:
        raise BadRequest(f"unknown model family {family!r}.", f"Legal: {', '.join(FAMILIES)}.")
    folder = root / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config(family), indent=2) + "\n")
    save_file(dict(weights(family)), folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(folder)
    adapters: dict[str, Path] = {}
    for name in _ADAPTERS:
        adapters[name] = root / f"adapter-{name}"
        adapters[name].mkdir()
        write_adapter(adapters[name], adapter_spec(name), adapter(name, family), f"selftest/{family}")
    return World(family, folder, adapters)


def config(family: str) -> dict[str, Any]:
    """As released checkpoints have it, rather than as the newest transformers would write it."""
    kind = FAMILIES[family]
    head = {"architectures": [kind.architecture], "model_type": family, "tie_word_embeddings": kind.tied}
    return {**head, **_COMMON, **kind.config}


def weights(family: str) -> Iterator[tuple[str, FloatArray]]:
    """All tensors by name. Matrices deviate by 0.1, so that rounding in bf16 does not pile up; norms are uneven."""
    kind = FAMILIES[family]

    def matrix(name: str, *shape: int, most: int = 45) -> tuple[str, FloatArray]:
        return f"{name}.weight", fractions(f"{family}/{name}", shape, most, 256)

    def norm(name: str, size: int, middle: float = 1.0) -> tuple[str, FloatArray]:
        middle -= kind.gemma
        return f"{name}.weight", fractions(f"{family}/{name}", (size,), 38, 128) + np.float32(middle)

    def vocabulary(name: str) -> tuple[str, FloatArray]:
        """A row for each token; a large one for the end of sequence, so that it is likely every now and then."""
        most = 45 if kind.gemma else 90
        key, rows = matrix(name, VOCAB, HIDDEN, most=most)
        rows[EOS] = fractions(f"{family}/{name}/eos", (HIDDEN,), most * 7 // 4, 256)
        return key, rows

    def expert(name: str, *shape: int) -> tuple[str, FloatArray]:
        key, own = matrix(name, *shape, most=45 // _ALIKE)
        return key, own + matrix(re.sub(r"experts\.\d+", "experts", name), *shape)[1]

    yield vocabulary("model.embed_tokens")
    for layer, (inputs, outputs) in _projections(kind).items():
        yield expert(layer, outputs, inputs) if ".experts." in layer else matrix(layer, outputs, inputs)
    for i in range(LAYERS):
        for name, size in kind.norms.items():
            yield norm(f"model.layers.{i}.{name}", size)
        if i in kind.mixtures:
            router = f"model.layers.{i}.mlp.gate"  # most choices are clear
            yield f"{router}.weight", fractions(f"{family}/{router}", (EXPERTS, HIDDEN), 100, 64)
    yield norm("model.norm", HIDDEN, middle=2.5 if kind.gemma else 1.25)
    if not kind.tied:
        yield vocabulary(HEAD_NAME)


_ATTENTION: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "self_attn.q_proj": (HIDDEN, HEADS * HEAD_DIM),
        "self_attn.k_proj": (HIDDEN, KV_HEADS * HEAD_DIM),
        "self_attn.v_proj": (HIDDEN, KV_HEADS * HEAD_DIM),
        "self_attn.o_proj": (HEADS * HEAD_DIM, HIDDEN),
    }
)


def _projections(kind: Family) -> dict[str, tuple[int, int]]:
    """Input and output size of the linear layers within the decoder's."""
    return {
        f"model.layers.{i}.{name}": size
        for i in range(LAYERS)
        for name, size in {**_ATTENTION, **_mlp(i in kind.mixtures)}.items()
    }


def _mlp(mixture: bool) -> dict[str, tuple[int, int]]:
    inner = EXPERT_INNER if mixture else INNER
    sizes = {"gate_proj": (HIDDEN, inner), "up_proj": (HIDDEN, inner), "down_proj": (inner, HIDDEN)}
    places = [f"mlp.experts.{e}" for e in range(EXPERTS)] if mixture else ["mlp"]
    return {f"{place}.{name}": size for place in places for name, size in sizes.items()}


def factors(spec: LoraSpec, family: str) -> dict[str, tuple[int, ...]]:
    """The shapes of what `spec` trains, by name (4.2): A [r, in] and B [out, r], those of experts in stacks (A10)."""
    kind = FAMILIES[family]
    found: dict[str, tuple[int, ...]] = {}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        if spec.train_attn:
            for name, (inputs, outputs) in _ATTENTION.items():
                found |= {f"{layer}.{name}.lora_A": (spec.rank, inputs), f"{layer}.{name}.lora_B": (outputs, spec.rank)}
        if spec.train_mlp:
            found |= _stacks(f"{layer}.mlp.experts", spec.rank) if i in kind.mixtures else _dense(layer, spec.rank)
    if spec.train_unembed:
        found |= {f"{HEAD_NAME}.lora_A": (spec.rank, HIDDEN), f"{HEAD_NAME}.lora_B": (VOCAB, spec.rank)}
    return found


def _dense(layer: str, rank: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for name, (inputs, outputs) in _mlp(mixture=False).items():
        found |= {f"{layer}.{name}.lora_A": (rank, inputs), f"{layer}.{name}.lora_B": (outputs, rank)}
    return found


def _stacks(experts: str, rank: int) -> dict[str, tuple[int, ...]]:
    """Gate (w1) and up (w3) share A, down (w2) shares B."""
    found: dict[str, tuple[int, ...]] = {}
    for name in ("w1", "w3"):
        found[f"{experts}.{name}.lora_A"] = (1, rank, HIDDEN)
        found[f"{experts}.{name}.lora_B"] = (EXPERTS, EXPERT_INNER, rank)
    found[f"{experts}.w2.lora_A"] = (EXPERTS, rank, EXPERT_INNER)
    found[f"{experts}.w2.lora_B"] = (1, HIDDEN, rank)
    return found


def adapter(name: str, family: str) -> dict[str, FloatArray]:
    """An adapter's tensors; its B is not zero."""
    spec = adapter_spec(name)
    tensors: dict[str, FloatArray] = {}
    for full, shape in factors(spec, family).items():
        layer, _, factor = full.rpartition(".lora_")
        most, unit = (math.floor(256 / math.sqrt(shape[-1])), 256) if factor == "A" else (30 * spec.rank, 2048)
        tensors[full] = fractions(f"{name}/{layer}/{factor}", shape, most, unit)
        if len(shape) == 3 and shape[0] > 1:
            own = fractions(f"{name}/{layer}/{factor} own", shape, most // _ALIKE, unit)
            tensors[full] = own + fractions(f"{name}/{layer}/{factor}", shape[1:], most, unit)
    return tensors


# ---- the tokenizer ----


def text(tokens: list[int]) -> str:
    """What tokens spell."""
    return "".join(_TEXTS[token] for token in tokens)


def _write_tokenizer(folder: Path) -> None:
    """One character a token, so that any tokenizer library decodes the same."""
    special = [
        {"id": i, "content": content, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False, "special": True}
        for i, content in enumerate(_TEXTS[:FIRST])
    ]
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {content: i for i, content in enumerate(_TEXTS)},
        "merges": [],
    }
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": model,
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer.json").write_text(json.dumps(whole, ensure_ascii=False))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
