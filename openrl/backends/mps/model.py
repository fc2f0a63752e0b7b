"""A frozen causal language model from a Hugging Face or MLX folder, opened up for training and sampling with MLX.

The backbone is mlx-lm's own module. It is taken for what it is only after a look at its structure: the usual names of
projections, windows where the config has them, and logits that are the head's product with the last hidden states. The
head is kept apart in float32, so that logprobs never pass through bf16 logits (L6) and full logits need not be held.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from openrl.backends.common.lora import LoraShape
from openrl.backends.mps.hf_config import eos_ids, read_config, sliding_layers
from openrl.backends.mps.layers import Taps, exact_embedding_scale, tap, tap_embeddings
from openrl.backends.mps.lora import LoraLinear, Routing, Segment, add_lora
from openrl.backends.mps.memory import MemoryPlan, machine_memory
from openrl.checkpoints.peft import ATTN_MODULES, HEAD_NAME, MLP_MODULES
from openrl.errors import ModelError

_PROBE_TOKENS = 8
_PROBE_WINDOW = 1025
_HEAD_ROWS = 1 << 14  # vocabulary entries that are converted to float32 at a time where no wide copy is kept
_WIDE_SHARE = 16  # the head's float32 copy may take this part of the machine's memory


@dataclass(slots=True, eq=False)
class MlxModel:
    """The opened model; `softcap` is the family's logit cap or None, `max_context` what mlx-lm computes correctly.

    `head` is the module whose weight [V, H] gives the logits: `lm_head`, or the embeddings that are tied to it.
    `head_wide` is its float32 copy, where there is room for one. `shapes` are those of layers that adapters can have,
    `tensors` those of all weights, by mlx-lm's names.
    """

    module: Any
    backbone: Any
    head: Any
    head_wide: mx.array | None
    softcap: float | None
    routing: Routing
    taps: Taps
    shapes: dict[str, LoraShape]
    tensors: dict[str, tuple[int, ...]]
    config: dict[str, Any]
    eos_ids: frozenset[int]
    parameters: int
    max_context: int
    dtype: mx.Dtype

    @property
    def vocab_size(self) -> int:
        return int(self.head.weight.shape[0])

    @property
    def memory_plan(self) -> MemoryPlan:
        return MemoryPlan.of(self.shapes, int(self.config["num_attention_heads"]), self.dtype.size)

    def hidden(self, tokens: mx.array, cache: Any = None, mask: mx.array | None = None) -> mx.array:
        """Last hidden states [rows, tokens, H] of `tokens` [rows, tokens], which the routing assigns to adapters.

        `cache` is a list of mlx-lm's caches, one a layer; these make the masks. `mask` goes in place of the mask of
        every layer.
        """
        with self.taps.masked(mask):
            return self.backbone(tokens, cache)

    def logits(self, hidden: mx.array, segments: tuple[Segment, ...]) -> mx.array:
        """Float32 logits [M, V] of hidden states [M, H], whose rows `segments` assign to adapters."""
        return self.cap(add_lora(self.project(hidden), hidden.astype(mx.float32), HEAD_NAME, segments))

    def project(self, hidden: mx.array) -> mx.array:
        """hidden [M, H] times the head, in float32 [M, V] (L6); neither capped nor adapted."""
        x = hidden.astype(mx.float32)
        z = self._quantized(x, transpose=True) if self._is_quantized else self._product(x)
        return z + self.head.bias.astype(mx.float32) if "bias" in self.head else z

    def project_back(self, dz: mx.array) -> mx.array:
        """dz [M, V] times the head's transpose, [M, H] in the compute dtype."""
        if self._is_quantized:
            return self._quantized(dz, transpose=False).astype(self.dtype)
        return (dz.astype(self.dtype) @ self.head.weight.astype(self.dtype)).astype(self.dtype)

    def cap(self, logits: mx.array) -> mx.array:
        """The family's soft-capping, identity where it has none."""
        return logits if self.softcap is None else self.softcap * mx.tanh(logits / self.softcap)

    @property
    def _is_quantized(self) -> bool:
        return "scales" in self.head

    def _product(self, x: mx.array) -> mx.array:
        if self.head_wide is not None:
            return x @ self.head_wide.T
        weight = self.head.weight
        parts = [weight[at : at + _HEAD_ROWS] for at in range(0, weight.shape[0], _HEAD_ROWS)]
        return mx.concatenate([x @ part.astype(mx.float32).T for part in parts], axis=1)

    def _quantized(self, x: mx.array, *, transpose: bool) -> mx.array:
        head = self.head
        return mx.quantized_matmul(
            x,
            head.weight,
            head.scales,
            head.biases,
            transpose=transpose,
            group_size=head.group_size,
            bits=head.bits,
            mode=head.mode,
        )


def open_model(folder: Path, dtype: mx.Dtype) -> MlxModel:
    """Load a folder, freeze it and wrap its linear layers; `dtype` also becomes that of quantisation scales.

    Raises `ModelError` for a family that mlx-lm does not know or whose layers are not as expected.
    """
    config = read_config(folder)
    module = load_module(folder, config)
    module.set_dtype(dtype)
    return open_module(module, config, dtype, eos_ids(folder, config))


def open_module(
    module: Any, config: dict[str, Any], dtype: mx.Dtype, eos: frozenset[int], *, wide: bool = True
) -> MlxModel:
    """Open an mlx-lm module up whose weights are in `dtype`. Without `wide` there is no float32 copy of a bf16 head."""
    module.freeze()
    backbone, head = _parts(module, config)
    tensors, parameters = _tensors(module), _parameters(module)
    routing, taps = Routing(), Taps()
    tap_embeddings(backbone.embed_tokens, taps)
    exact_embedding_scale(backbone, config, dtype)
    shapes = _wrap(backbone, routing, str(config["model_type"]))
    shapes[HEAD_NAME] = _shape(head)
    tap(backbone.layers, taps)
    mx.eval(module.parameters())
    model = MlxModel(
        module=module,
        backbone=backbone,
        head=head,
        head_wide=_wide(head, dtype) if wide or dtype == mx.float32 else None,
        softcap=config.get("final_logit_softcapping"),
        routing=routing,
        taps=taps,
        shapes=shapes,
        tensors=tensors,
        config=config,
        eos_ids=eos,
        parameters=parameters,
        max_context=_context(backbone, taps, config),
        dtype=dtype,
    )
    _check_flow(model)
    return model


def load_module(folder: Path, config: dict[str, Any]) -> Any:
    """mlx-lm's module of a folder whose config was read, with weights that are not read before they are needed."""
    try:
        # lazy: weights are read once they have their final dtype.
        return load_model(folder, lazy=True, model_config=config)[0]
    except (ValueError, TypeError, KeyError, FileNotFoundError, NotImplementedError) as error:
        raise ModelError(
            f"mlx-lm cannot load {folder} (model family {config['model_type']!r}): {error}",
            "The MLX backend serves dense families that mlx-lm knows, such as llama, qwen2, qwen3 and gemma3_text.",
        ) from error


def _parts(module: Any, config: dict[str, Any]) -> tuple[Any, Any]:
    """The backbone and the module with the head's weight."""
    backbone: Any = getattr(module, "model", None)
    if not all(hasattr(backbone, name) for name in ("layers", "norm", "embed_tokens")):
        raise _unusual(config, "it has no model.layers, model.norm and model.embed_tokens")
    head = getattr(module, HEAD_NAME, None)
    return backbone, backbone.embed_tokens if head is None else head


def _wrap(backbone: Any, routing: Routing, family: str) -> dict[str, LoraShape]:
    """Replace attention and MLP projections by `LoraLinear`; returns their sizes by name, in the model's order."""
    shapes: dict[str, LoraShape] = {}
    for number, layer in enumerate(backbone.layers):
        for block, leaves in (("self_attn", ATTN_MODULES), ("mlp", MLP_MODULES)):
            parent = getattr(layer, block, None)
            for leaf in leaves:
                linear = getattr(parent, leaf, None)
                name = f"model.layers.{number}.{block}.{leaf}"
                if not isinstance(linear, nn.Linear | nn.QuantizedLinear):
                    raise _unusual({"model_type": family}, f"{name} is not a linear layer")
                shapes[name] = _shape(linear)
                setattr(parent, leaf, LoraLinear(cast("nn.Module", linear), name, routing))
    return shapes


def _shape(linear: Any) -> LoraShape:
    outputs, inputs = linear.weight.shape
    return LoraShape(inputs * 32 // linear.bits if "scales" in linear else inputs, outputs)


def _tensors(module: Any) -> dict[str, tuple[int, ...]]:
    named: Any = tree_flatten(module.parameters())
    return {name: tuple(array.shape) for name, array in named}


def _parameters(module: Any) -> int:
    """Number of weights; a tied head counts once, and a quantised matrix by its entries."""
    modules: Any = tree_flatten(module.leaf_modules(), is_leaf=nn.Module.is_module)
    return sum(_entries(m) for _, m in modules)


def _entries(module: Any) -> int:
    if "scales" not in module:
        arrays: Any = tree_flatten(module.parameters())
        return sum(int(array.size) for _, array in arrays)
    shape = _shape(module)
    return shape.inputs * shape.outputs + (module.bias.size if "bias" in module else 0)


def _wide(head: Any, dtype: mx.Dtype) -> mx.array | None:
    """The head in float32, where that is another array and small beside the machine's memory."""
    if "scales" in head:
        return None
    if dtype == mx.float32:
        return head.weight
    if head.weight.size * 4 * _WIDE_SHARE > machine_memory():
        return None
    wide = head.weight.astype(mx.float32)
    mx.eval(wide)
    return wide


def _context(backbone: Any, taps: Taps, config: dict[str, Any]) -> int:
    """Tokens up to which mlx-lm computes what the config says: some of its families know no windows."""
    context = int(config["max_position_embeddings"])
    expected = sliding_layers(config)
    window = int(config.get("sliding_window") or 0) if any(expected) else 0
    length = min(context, window + 1 if window else _PROBE_WINDOW)
    # Of the forward pass nothing is computed but a corner of the masks that the layers are given.
    masks = taps.masks_of(lambda: backbone(mx.zeros((1, length), mx.int32)))
    windowed = [isinstance(mask, mx.array) and not bool(mask.reshape(-1, length)[-1, 0]) for mask in masks]
    if any(found and not wanted for found, wanted in zip(windowed, expected, strict=True)):
        raise _unusual(config, "mlx-lm gives layers a window that the config does not")
    return context if windowed == expected or length <= window else window


def _check_flow(model: MlxModel) -> None:
    """Whether a forward pass is what training and sampling make of it: each layer takes what the one before gives, the
    norm what the last one gives, and logits are the head's product with that, capped."""
    tokens = mx.arange(1, 1 + _PROBE_TOKENS)[None] % model.vocab_size
    with model.taps.recorded() as calls:
        expected = model.module(tokens)[0].astype(mx.float32)
    chained = all(after.x is before.y for before, after in pairwise(calls))
    last = model.backbone.norm(calls[-1].y)
    if not chained or not bool(mx.array_equal(last, model.hidden(tokens))):
        raise _unusual(model.config, "more than its layers and a norm lies between embeddings and head")
    found = model.cap(model.project(last[0]))
    size, gap = float(mx.abs(expected).max()), float(mx.abs(found - expected).max())
    if not gap <= size * (1e-4 if model.dtype == mx.float32 else 3e-2):
        raise _unusual(model.config, "its logits are not the plain product of the head and the last hidden states")


def _unusual(config: dict[str, Any], why: str) -> ModelError:
    return ModelError(
        f"model family {config['model_type']!r} is not supported by the MLX backend: {why}.",
        "Supported are dense families with the usual layer names, such as llama, qwen2, qwen3 and gemma3_text.",
    )
