"""From rows of tokens to gradients of their adapters: the backbone there and back, with the head in between.

Two ways back. Kept: the whole forward pass stays in memory as one graph, and nothing is computed twice. Layer by layer:
only what goes into each layer stays, and on the way back each layer is computed again before it is differentiated, so
that one layer's values are held at a time (gradient checkpointing).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from openrl.backends.common.spans import Judge, Span
from openrl.backends.mps.head import Head, HeadGradient
from openrl.backends.mps.layers import Call
from openrl.backends.mps.lora import Adapter
from openrl.backends.mps.model import MlxModel
from openrl.checkpoints.peft import HEAD_NAME
from openrl.types import Array, IntArray

Named = dict[str, mx.array]  # by parameter name
Pair = tuple[mx.array, mx.array]
# Of each distinct adapter of a batch, in turn: A and B of each layer below the head.
Factors = list[dict[str, Pair]]


@dataclass(frozen=True, slots=True)
class Example:
    """One datum as the gradient sees it: tokens [N], targets int64 [N, K]."""

    tokens: IntArray
    targets: Array
    adapter: Adapter


class Padded:
    """Rows padded on the right. No mask is needed: a causal model's real positions never see what follows them (B2)."""

    def __init__(self, sequences: Sequence[IntArray]) -> None:
        lengths = [len(tokens) for tokens in sequences]
        self.longest = max(lengths)
        padded = np.zeros((len(sequences), self.longest), dtype=np.int32)
        for row, tokens in zip(padded, sequences, strict=True):
            row[: len(tokens)] = tokens
        self.tokens = mx.array(padded)
        real = np.arange(self.longest)[None] < np.array(lengths)[:, None]
        self._real = None if real.all() else mx.array(np.flatnonzero(real))

    def real(self, hidden: mx.array) -> mx.array:
        """Positions that are no padding, [M, H], of [rows, tokens, H]."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        return flat if self._real is None else flat[self._real]

    def padded(self, x: mx.array) -> mx.array:
        """The way back from `real`: [rows, tokens, H], zeros at the padding."""
        if self._real is not None:
            x = mx.zeros((self.tokens.size, x.shape[-1]), x.dtype).at[self._real].add(x)
        return x.reshape(*self.tokens.shape, x.shape[-1])


class Batch(Padded):
    """Datums of runs that train adapters, each row with its own."""

    def __init__(self, examples: Sequence[Example]) -> None:
        super().__init__([example.tokens for example in examples])
        self.adapters = [example.adapter for example in examples]
        self.distinct = list({id(adapter): adapter for adapter in self.adapters}.values())
        self.spans = [Span(example.adapter, example.targets) for example in examples]

    def factors(self) -> Factors:
        """What is differentiated by."""
        return [_below_head(adapter) for adapter in self.distinct]

    def nothing(self) -> Factors:
        """A gradient that is zero."""
        return [{} for _ in self.distinct]

    def route(self, factors: Factors) -> list[Adapter]:
        """Each row's adapter, with these factors in place of its own."""
        places = {id(adapter): place for place, adapter in enumerate(self.distinct)}
        stand_ins = [
            Adapter(adapter.spec, {n: a for n, (a, _) in part.items()}, {n: b for n, (_, b) in part.items()})
            for adapter, part in zip(self.distinct, factors, strict=True)
        ]
        return [stand_ins[places[id(adapter)]] for adapter in self.adapters]


def differentiate(
    model: MlxModel, head: Head, batch: Batch, judge: Judge, *, backward: bool, keep: bool
) -> dict[int, Named]:
    """Gradients of the batch by adapter `id` and parameter name, after asking `judge` for each datum's.

    With `keep` the forward pass is kept whole, else it goes layer by layer. Empty where all gradients are zero, and
    without `backward`.
    """

    def score(x: mx.array) -> HeadGradient:
        return head.run(x, batch.spans, judge, backward=backward)

    if backward and any(batch.factors()):
        found, of_head = (_kept if keep else _by_layer)(model, batch, score)
    else:  # nothing below the head is trained
        with model.routing.use(batch.adapters):
            x = batch.real(model.hidden(batch.tokens))
        mx.eval(x)
        found, of_head = batch.nothing(), score(x)
    gradients: dict[int, Named] = {}
    for adapter, part in zip(batch.distinct, found, strict=True):
        gradients[id(adapter)] = _named(part)
        if id(adapter) in of_head.factors:
            gradients[id(adapter)] |= _named({HEAD_NAME: of_head.factors[id(adapter)]})
    return gradients


def _kept(model: MlxModel, batch: Batch, score: Callable[[mx.array], HeadGradient]) -> tuple[Factors, HeadGradient]:
    of_head = HeadGradient()

    def objective(factors: Factors) -> mx.array:
        """A number whose gradient is that of the loss. While it is traced, values stay in the graph once computed, so
        that the losses can be worked out on the host in the middle of it."""
        nonlocal of_head
        with model.routing.use(batch.route(factors)):
            x = batch.real(model.hidden(batch.tokens))
        of_head = score(untraced(x))
        return mx.array(0.0) if of_head.hidden is None else (x * of_head.hidden).sum()

    factors = batch.factors()
    found = mx.grad(objective)(factors)
    if of_head.hidden is None:
        return batch.nothing(), of_head
    mx.eval(found)
    return found, of_head


def untraced(x: mx.array) -> mx.array:
    """The values of x, by way of the host: what is computed from them is not kept as part of a graph that is traced."""
    if x.dtype != mx.bfloat16:
        return mx.array(np.array(x))
    return mx.array(np.array(x.view(mx.uint16))).view(mx.bfloat16)


def _by_layer(model: MlxModel, batch: Batch, score: Callable[[mx.array], HeadGradient]) -> tuple[Factors, HeadGradient]:
    with model.routing.use(batch.adapters), model.taps.recorded() as calls:
        x = batch.real(model.hidden(batch.tokens))
    mx.eval(x, [call.x for call in calls], calls[-1].y)
    of_head = score(x)
    found = batch.nothing()
    if of_head.hidden is None:
        return found, of_head
    dy = pull(model.backbone.norm, [calls[-1].y], batch.padded(of_head.hidden))[0]
    for number in reversed(range(len(calls))):
        factors = [_of_layer(part, number) for part in batch.factors()]
        dy, gradients = _layer_back(model, batch, calls.pop(), factors, dy, first=number == 0)
        for total, part in zip(found, gradients, strict=True):
            total |= part
    return found, of_head


def _layer_back(
    model: MlxModel, batch: Batch, call: Call, factors: Factors, dy: mx.array, *, first: bool
) -> tuple[mx.array, Factors]:
    """dL/dx of a layer from dL/dy, and the gradients of its factors."""
    flat = [array for part in factors for pair in part.values() for array in pair]

    def layer(x: mx.array, *arrays: mx.array) -> mx.array:
        given = iter(arrays)
        traced = [{name: (next(given), next(given)) for name in part} for part in factors]
        with model.routing.use(batch.route(traced)):
            return call.run(x, call.mask)

    dx, *gradients = pull(layer, [call.x, *flat], dy)
    mx.eval(gradients if first else [dx, *gradients])  # nothing below the first layer is trained
    given = iter(gradients)
    return dx, [{name: (next(given), next(given)) for name in part} for part in factors]


def pull(function: Any, inputs: list[mx.array], dy: mx.array) -> list[mx.array]:
    """The vector-Jacobian product of a function with one output."""
    return mx.vjp(function, inputs, [dy])[1]


def _below_head(adapter: Adapter) -> dict[str, Pair]:
    return {name: (adapter.a[name], adapter.b[name]) for name in adapter.a if name != HEAD_NAME}


def _of_layer(part: Mapping[str, Pair], number: int) -> dict[str, Pair]:
    return {name: pair for name, pair in part.items() if name.startswith(f"model.layers.{number}.")}


def _named(part: Mapping[str, Pair]) -> Named:
    named: Named = {}
    for name, (a, b) in part.items():
        named |= {f"{name}.lora_A": a, f"{name}.lora_B": b}
    return named
