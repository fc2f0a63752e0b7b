"""The other side of the benchmark on MLX: mlx-lm as people use it.

Its LoRA layers of the given rank on every linear layer (it has none for a head that is the embeddings, which is to its
advantage), padded batches of 8, one AdamW step for all; sampling by its batch generator, adapter in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers
import numpy as np
from mlx.nn.losses import cross_entropy
from mlx.nn.utils import value_and_grad
from mlx.utils import tree_map
from mlx_lm.generate import BatchGenerator
from mlx_lm.tuner.utils import linear_to_lora_layers

from openrl.backends.mps import pick_dtype
from openrl.backends.mps.hf_config import read_config
from openrl.backends.mps.memory import set_limits
from openrl.backends.mps.model import load_module
from openrl.bench.workload import Example, Tokens

_BATCH = 8


class MlxLoop:
    """A model with adapters and an optimizer, in the server's dtype. Holds the weights until it is dropped."""

    def __init__(self, folder: Path, rank: int, dtype: str) -> None:
        set_limits()
        self._model: Any = load_module(folder, read_config(folder))
        self._model.set_dtype(pick_dtype(dtype))
        self._model.freeze()
        layers = {"rank": rank, "scale": 32 / rank, "dropout": 0.0}
        linear_to_lora_layers(self._model, len(self._model.layers), layers)
        self._optimizer: Any = mlx.optimizers.AdamW(1e-4, betas=[0.9, 0.95], eps=1e-12, weight_decay=0.0)
        self._step: Any = value_and_grad(self._model, _loss)
        mx.eval(self._model.parameters())

    def train_step(self, batch: Sequence[Example]) -> None:
        """Cross-entropy over the positions that count, then one optimizer step."""
        self._model.train()
        gradient: Any = None
        for start in range(0, len(batch), _BATCH):
            inputs, targets, weights = _padded(batch[start : start + _BATCH])
            _, part = self._step(self._model, inputs, targets, weights)
            gradient = part if gradient is None else tree_map(mx.add, gradient, part)
            mx.eval(gradient)
        self._optimizer.update(self._model, gradient)
        mx.eval(self._model.trainable_parameters(), self._optimizer.state)

    def sample(self, prompts: Sequence[Tokens], new_tokens: int) -> int:
        """Draw `new_tokens` for each prompt, with no end-of-sequence stop; returns how many tokens came."""
        self._model.eval()
        generator: Any = BatchGenerator(self._model, sampler=mx.random.categorical)
        generator.insert([prompt.tolist() for prompt in prompts], [new_tokens] * len(prompts))
        drawn = 0
        while responses := generator.next_generated():
            drawn += len(responses)
        generator.close()
        return drawn


def _loss(model: Any, inputs: mx.array, targets: mx.array, weights: mx.array) -> mx.array:
    losses: Any = cross_entropy(model(inputs).astype(mx.float32), targets)
    return (losses * weights).sum()


def _padded(batch: Sequence[Example]) -> tuple[mx.array, mx.array, mx.array]:
    """Inputs and targets, int32, and float32 weights [rows, longest], filled up on the right."""
    shape = len(batch), max(example.length for example in batch)
    inputs, targets, weights = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    for row, example in enumerate(batch):
        n = example.length
        inputs[row, :n], targets[row, :n] = example.tokens[:-1], example.tokens[1:]
        weights[row, example.masked : n] = 1.0
    return mx.array(inputs), mx.array(targets), mx.array(weights)
