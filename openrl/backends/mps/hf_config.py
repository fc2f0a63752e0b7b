"""What mlx-lm must be told of a Hugging Face `config.json` that it would otherwise take for the family's defaults.

Transformers 5 writes rotary settings under `rope_parameters` and says which layers have a window in `layer_types`;
some of mlx-lm's families read neither, and would compute another model without a word.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from openrl.checkpoints.peft import HEAD_NAME
from openrl.errors import ModelError

_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json`, with what mlx-lm needs spelt out. Raises `ModelError` for what it could not compute."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder} has no readable config.json: {error}.") from error
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{folder / 'config.json'} names no model_type.")
    config |= _rotary(config)
    config |= _windows(config)
    if "tie_word_embeddings" not in config:
        config["tie_word_embeddings"] = not _has_head(folder)
    if {"num_attention_heads", "hidden_size"} <= config.keys():
        heads = config["num_attention_heads"]
        config["num_key_value_heads"] = config.get("num_key_value_heads") or heads
        config["head_dim"] = config.get("head_dim") or config["hidden_size"] // heads
    return config


def eos_ids(folder: Path, config: Mapping[str, Any]) -> frozenset[int]:
    """End-of-sequence ids: of the generation config where there is one, else of the model config."""
    eos = config.get("eos_token_id")
    file = folder / "generation_config.json"
    if file.exists():
        eos = json.loads(file.read_text()).get("eos_token_id") or eos
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)


def sliding_layers(config: Mapping[str, Any]) -> list[bool]:
    """Of each layer, whether it sees only the last `sliding_window` tokens."""
    layers = int(config["num_hidden_layers"])
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return [False] * layers
    if "layer_types" in config:
        return [kind == _SLIDING for kind in config["layer_types"]]
    pattern = config.get("sliding_window_pattern")
    if isinstance(pattern, int):
        return [(layer + 1) % pattern != 0 for layer in range(layers)]
    return [True] * layers


def _rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` under the names of before: `rope_theta`, `rope_scaling`, `rope_local_base_freq`."""
    given = config.get("rope_parameters")
    if not given:
        return {}
    if _FULL not in given:
        return _flat_rotary(given)
    local = given.get(_SLIDING, {})
    if local.get("rope_type", "default") != "default":
        raise ModelError(f"rotary scaling of type {local['rope_type']!r} in layers with a window is not supported.")
    found = _flat_rotary(given[_FULL])
    return found | ({"rope_local_base_freq": local["rope_theta"]} if "rope_theta" in local else {})


def _flat_rotary(given: Mapping[str, Any]) -> dict[str, Any]:
    scaled = given.get("rope_type", "default") != "default"
    found: dict[str, Any] = {"rope_scaling": dict(given) if scaled else None}
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in given:
            found[key] = given[key]
    return found


def _windows(config: Mapping[str, Any]) -> dict[str, Any]:
    """`layer_types` as the period that Gemma 3 goes by in mlx-lm: every so many layers one sees everything."""
    if config["model_type"] != "gemma3_text":
        return {}
    layers = int(config["num_hidden_layers"])
    sliding = sliding_layers(config)
    for period in range(1, layers + 2):
        if sliding == [(layer + 1) % period != 0 for layer in range(layers)]:
            return {"sliding_window_pattern": period}
    raise ModelError(f"layer_types of {config['model_type']} repeat with no period, which mlx-lm cannot compute.")


def _has_head(folder: Path) -> bool:
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, framework="np") as opened:
            if f"{HEAD_NAME}.weight" in opened.keys():  # noqa: SIM118
                return True
    return False
