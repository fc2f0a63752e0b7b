"""The weights of a GGUF file as one safetensors file in bfloat16, read, unpacked and written a few rows at a time.

Undone is what llama.cpp changes for itself: names; in Llama the order of rows in queries and keys (its rotary embedding
pairs neighbours, Hugging Face's pairs halves); in Gemma the 1 that it adds to the weights of norms.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from openrl.models.gguf_config import FREQUENCIES, GEMMA, HEAD, architecture
from openrl.models.gguf_file import GgufFile, Tensor

_CHUNK = 1 << 20  # numbers unpacked at a time
_LAYER = {
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "attn_norm.weight": "input_layernorm.weight",
}
_NORMS = {"ffn_norm.weight": "post_attention_layernorm.weight"}
_GEMMA_NORMS = {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
_HEAD_NORMS = {"attn_q_norm.weight": "self_attn.q_norm.weight", "attn_k_norm.weight": "self_attn.k_norm.weight"}
_BIASES = {f"attn_{letter}.bias": f"self_attn.{letter}_proj.bias" for letter in "qkv"}
_OF_LAYER = {
    "llama": _LAYER | _NORMS,
    "qwen2": _LAYER | _NORMS | _BIASES,
    "qwen3": _LAYER | _NORMS | _HEAD_NORMS,
    "gemma2": _LAYER | _GEMMA_NORMS,
    "gemma3": _LAYER | _GEMMA_NORMS | _HEAD_NORMS,
}


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight of the new folder: the tensor it comes from, its rows in the order wanted, what is taken off."""

    name: str
    source: Tensor
    rows: NDArray[np.intp]
    offset: float

    @property
    def size(self) -> int:
        return self.source.rows * self.source.shape[-1] * 2


def plan(file: GgufFile, config: Mapping[str, Any]) -> list[Weight]:
    """All weights of the model, by name. Raises ModelError for some that lack, or that we would have to leave out."""
    names = _names(file, int(config["num_hidden_layers"]))
    missing = sorted(theirs for ours, theirs in names.items() if ours not in file.tensors)
    if missing:
        raise file.unusable(f"it lacks weights of the model ({', '.join(missing[:5])})", "The file is not complete.")
    unknown = sorted(set(file.tensors) - set(names) - {FREQUENCIES})
    if unknown:
        raise file.unusable(f"it has weights that {architecture(file)} has no place for ({', '.join(unknown[:5])})")
    weights = [_weight(file, ours, theirs, config) for ours, theirs in names.items()]
    return sorted(weights, key=lambda weight: weight.name)


def write(file: GgufFile, weights: list[Weight], path: Path, wrote: Callable[[int], None]) -> None:
    """Write a safetensors file; `wrote` is told of each weight's bytes."""
    with path.open("wb") as out:
        _write_header(weights, out)
        for weight in weights:
            width = weight.source.shape[-1]
            parts = -(-weight.rows.size * width // _CHUNK)
            for rows in np.array_split(weight.rows, min(parts, weight.rows.size)):
                values = file.read(weight.source.name, rows)
                if weight.offset:
                    values = values - np.float32(weight.offset)
                out.write(gguf.quantize(values, GGMLQuantizationType.BF16).tobytes())
            wrote(weight.size)


def _names(file: GgufFile, layers: int) -> dict[str, str]:
    """Hugging Face's name of each tensor that the model has in a GGUF file."""
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if HEAD in file.tensors:
        names[HEAD] = "lm_head.weight"
    of_layer = _OF_LAYER[architecture(file)]
    return names | {
        f"blk.{layer}.{ours}": f"model.layers.{layer}.{theirs}"
        for layer in range(layers)
        for ours, theirs in of_layer.items()
    }


def _weight(file: GgufFile, source: str, name: str, config: Mapping[str, Any]) -> Weight:
    tensor, family = file.tensors[source], architecture(file)
    rows = np.arange(tensor.rows)
    if family == "llama" and source.endswith((".attn_q.weight", ".attn_k.weight")):
        heads = config["num_attention_heads" if ".attn_q." in source else "num_key_value_heads"]
        if tensor.rows % (2 * heads):
            raise file.unusable(f"the {tensor.rows} rows of {source} are not those of {heads} heads")
        rows = rows.reshape(heads, -1, 2).swapaxes(1, 2).ravel()
    return Weight(name, tensor, rows, 1.0 if family in GEMMA and source.endswith("norm.weight") else 0.0)


def _write_header(weights: list[Weight], out: BinaryIO) -> None:
    """8 bytes of length, then JSON, padded so that the numbers begin at a multiple of 8."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for weight in weights:
        offsets = [start, start + weight.size]
        header[weight.name] = {"dtype": "BF16", "shape": weight.source.shape, "data_offsets": offsets}
        start += weight.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    out.write(len(text).to_bytes(8, "little") + text)
