"""From rows of tokens to the gradient of every parameter: what `gradient` is for adapters, with the same two ways back.

Each parameter's gradient is added to its float32 sum as it comes, layer by layer from the last one, and let go of. That
of the embeddings is a sum over tokens in float32, rather than what MLX's gather would add up in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from openrl.backends.common.spans import Judge, Span
from openrl.backends.mps.full_model import FullModel
from openrl.backends.mps.full_state import Named, add
from openrl.backends.mps.gradient import Padded, pull, untraced
from openrl.backends.mps.head import Head, HeadGradient
from openrl.backends.mps.lora import Adapter

Score = Callable[[mx.array], HeadGradient]


def differentiate(
    model: FullModel,
    head: Head,
    batch: Padded,
    spans: Sequence[Span[Adapter]],
    judge: Judge,
    into: Named | None,
    *,
    keep: bool,
) -> None:
    """Ask `judge` for each datum's gradient, and add what follows from it to `into`, unless that is None.

    With `keep` the forward pass is kept whole, else it goes layer by layer.
    """

    if into is None:
        x = batch.real(model.scorer.hidden(batch.tokens))
        mx.eval(x)
        head.run(x, spans, judge, backward=False)
        return

    def score(x: mx.array) -> HeadGradient:
        return head.run(x, spans, judge, backward=True, sink=lambda dz, rows: _add_head(into, model.head, dz, rows))

    rows = (_kept if keep else _by_layer)(model, batch, score, into)
    if rows is not None:
        _add_rows(into, model, batch.tokens, rows)


def _kept(model: FullModel, batch: Padded, score: Score, into: Named) -> mx.array | None:
    """dL/dE [rows, tokens, H] of what the embeddings gave; None where all is zero."""
    scorer, of_head = model.scorer, HeadGradient()
    groups = [model.norm, *reversed(model.layers)]

    def objective(rows: mx.array, weights: Named) -> mx.array:
        """See `gradient`: values stay in the graph once computed, so that the losses can be worked out amid it."""
        nonlocal of_head
        with model.given(weights), scorer.taps.embedded(rows):
            x = batch.real(scorer.hidden(batch.tokens))
        of_head = score(untraced(x))
        return mx.array(0.0) if of_head.hidden is None else (x * of_head.hidden).sum()

    weights = model.held([name for group in groups for name in group])
    differentiated: Any = mx.grad(objective, argnums=(0, 1))
    of_rows, of_weights = differentiated(_embedded(model, batch), weights)
    if of_head.hidden is None:
        return None
    for group in groups:
        for name in group:
            add(into, name, of_weights.pop(name))
    mx.eval(of_rows)
    return of_rows


def _by_layer(model: FullModel, batch: Padded, score: Score, into: Named) -> mx.array | None:
    """The same, keeping only the layers' inputs."""
    scorer = model.scorer
    with scorer.taps.recorded() as calls:
        x = batch.real(scorer.hidden(batch.tokens))
    mx.eval(x, [call.x for call in calls], calls[-1].y)
    of_head = score(x)
    if of_head.hidden is None:
        return None
    dy = _back(model, model.norm, scorer.backbone.norm, calls[-1].y, batch.padded(of_head.hidden), into)
    for names in reversed(model.layers):
        call = calls.pop()
        dy = _back(model, names, lambda x, call=call: call.run(x, call.mask), call.x, dy, into)

    def first_input(rows: mx.array) -> mx.array:
        """What a family makes of its embeddings before the first layer; the layers are not computed for it."""
        with scorer.taps.embedded(rows), scorer.taps.recorded() as calls:
            scorer.hidden(batch.tokens)
        return calls[0].x

    return pull(first_input, [_embedded(model, batch)], dy)[0]


def _back(
    model: FullModel, names: list[str], function: Callable[[mx.array], mx.array], x: mx.array, dy: mx.array, into: Named
) -> mx.array:
    """dL/dx of a part of the model from dL/dy; the gradients of its weights are added to `into`."""

    def part(x: mx.array, *weights: mx.array) -> mx.array:
        with model.given(dict(zip(names, weights, strict=True))):
            return function(x)

    dx, *gradients = pull(part, [x, *model.held(names).values()], dy)
    mx.eval(dx, gradients)
    for name in names:
        add(into, name, gradients.pop(0))
    return dx


def _embedded(model: FullModel, batch: Padded) -> mx.array:
    return model.held([model.embeddings])[model.embeddings][batch.tokens]


def _add_rows(into: Named, model: FullModel, tokens: mx.array, rows: mx.array) -> None:
    """Each token's row to that of its embedding; a tied head may have been there before (F4)."""
    name = model.embeddings
    total = into.pop(name) if name in into else mx.zeros_like(model.state.theta[name])
    into[name] = total.at[tokens.reshape(-1)].add(rows.reshape(-1, rows.shape[-1]).astype(mx.float32))
    mx.eval(into[name])


def _add_head(into: Named, name: str, dz: mx.array, x: mx.array) -> None:
    """dL/dW [V, H] of the head from dL/dz [m, V] and its input [m, H], in float32."""
    x = x.astype(mx.float32)
    into[name] = mx.addmm(into.pop(name), dz.T, x) if name in into else dz.T @ x
    mx.eval(into[name])
