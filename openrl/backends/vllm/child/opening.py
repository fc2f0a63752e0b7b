"""What vLLM is opened with: its environment and its arguments, from the first frame."""

from __future__ import annotations

import os
from typing import Any

from .link import Frame

# vLLM makes no room for an adapter of a larger head; leaving the head out lets the other layers' adapters be used.
_LARGEST_HEAD = 258048
_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def set_environment(opening: Frame) -> None:
    """What vLLM, torch and OpenMP read when they are loaded."""
    variables: dict[str, str] = opening["env"]
    os.environ.update(variables)
    gpu = opening["gpu"]
    if gpu is not None:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = [name for name in seen.split(",") if name]
        os.environ["CUDA_VISIBLE_DEVICES"] = names[gpu] if gpu < len(names) else str(gpu)


def arguments(opening: Frame) -> dict[str, Any]:
    # On a CPU vLLM computes sequences that have no adapter with what is in the last slot: that one must stay empty. The
    # first one that is free is taken, and there are never more adapters than `adapters`.
    slots = opening["adapters"] + (opening["gpu"] is None)
    given: dict[str, Any] = {
        "model": opening["folder"],
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": opening["dtype"],
        "hf_overrides": {"head_dtype": "float32"},  # as the training half has it (L6)
        "max_model_len": opening["context"],
        "max_num_seqs": opening["rows"],
        "enforce_eager": opening["eager"],
        "gpu_memory_utilization": opening["fraction"],
        "enable_prefix_caching": True,
        "enable_lora": True,
        "max_loras": slots,
        "max_cpu_loras": slots,
        "max_lora_rank": opening["rank"],
        "max_logprobs": -1,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
    }
    if opening["vocab"] > _LARGEST_HEAD:
        given["lora_target_modules"] = _LAYERS
    return given
