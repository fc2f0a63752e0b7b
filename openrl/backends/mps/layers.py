"""Hooks on the layers of an mlx-lm model: seeing and setting the masks that they get, and what each was given.

A layer object is given a subclass of its own class, so that whatever else the family asks of it stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

Mask = mx.array | str | None
# Families whose embeddings mlx-lm scales by a bf16 number whatever the dtype.
_ROUNDED_SCALE = frozenset({"gemma3_text"})


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One layer's turn in a forward pass without a cache: `run(x, mask)` is the layer, without any hook."""

    run: Callable[[mx.array, Mask], mx.array]
    x: mx.array
    mask: Mask
    y: mx.array


class Taps:
    """What the hooks of one model's layers do at the moment: nothing, as a rule."""

    def __init__(self) -> None:
        self.mask: mx.array | None = None
        self.calls: list[Call] | None = None
        self.rows: mx.array | None = None

    @contextmanager
    def masked(self, mask: mx.array | None) -> Generator[None]:
        """Give this mask to every layer; None leaves them those of the family."""
        before, self.mask = self.mask, mask
        try:
            yield
        finally:
            self.mask = before

    @contextmanager
    def embedded(self, rows: mx.array) -> Generator[None]:
        """Within the block the embeddings give these rows [rows, tokens, H], whatever the tokens."""
        before, self.rows = self.rows, rows
        try:
            yield
        finally:
            self.rows = before

    @contextmanager
    def recorded(self) -> Generator[list[Call]]:
        """The calls of the layers within the block, in turn."""
        before, self.calls = self.calls, []
        try:
            yield self.calls
        finally:
            self.calls = before

    def masks_of(self, forward: Callable[[], Any]) -> list[Mask]:
        """The masks that the layers get in a forward pass."""
        with self.recorded() as calls:
            forward()
        return [call.mask for call in calls]


def tap(layers: Sequence[Any], taps: Taps) -> None:
    """Hook all layers of a model up to `taps`."""
    kinds: dict[type, type] = {}
    for layer in layers:
        kind = type(layer)
        if kind not in kinds:
            kinds[kind] = _tapped(kind, taps)
        layer.__class__ = kinds[kind]


def _tapped(kind: Any, taps: Taps) -> type:
    def call(self: Any, x: mx.array, mask: Mask = None, *args: Any, **kwargs: Any) -> Any:
        mask = taps.mask if taps.mask is not None else mask
        y = kind.__call__(self, x, mask, *args, **kwargs)
        if taps.calls is not None:
            taps.calls.append(Call(lambda x, mask: kind.__call__(self, x, mask), x, mask, y))
        return y

    return type(kind.__name__, (kind,), {"__call__": call})


def tap_embeddings(embeddings: Any, taps: Taps) -> None:
    """Hook the embeddings of a model up to `taps`."""
    kind: Any = type(embeddings)

    def call(self: Any, tokens: mx.array) -> mx.array:
        # An object of its own each time: families scale it in place.
        return kind.__call__(self, tokens) if taps.rows is None else taps.rows.reshape(taps.rows.shape)

    embeddings.__class__ = type(kind.__name__, (kind,), {"__call__": call})


def exact_embedding_scale(backbone: Any, config: Mapping[str, Any], dtype: mx.Dtype) -> None:
    """Make up for a scale of embeddings that mlx-lm rounds to bf16 even in float32."""
    if config["model_type"] not in _ROUNDED_SCALE or dtype == mx.bfloat16:
        return
    scale = config["hidden_size"] ** 0.5
    ratio = scale / float(mx.array(scale, mx.bfloat16).astype(mx.float32))
    kind: Any = type(backbone.embed_tokens)

    def call(self: Any, tokens: mx.array) -> mx.array:
        return kind.__call__(self, tokens) * ratio

    backbone.embed_tokens.__class__ = type(kind.__name__, (kind,), {"__call__": call})
