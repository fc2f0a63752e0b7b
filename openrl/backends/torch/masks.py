"""Attention masks for sampling, in the form each model family takes: one 4-D mask, or one for each kind of layer.

Masks are additive, in the compute dtype: boolean ones would be converted again in every layer. None means that the
plain causal pattern is right and the faster kernels may be used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Mask = Tensor | None | dict[str, Tensor | None]

_NEVER = 1 << 40  # a position that no query reaches


class Masks:
    """Builds masks for one model, from its transformers config."""

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        self._layer_types: set[str] = set(getattr(config, "layer_types", None) or ())
        self._window: int | None = getattr(config, "sliding_window", None)
        # Eager attention adds whatever it is given and knows no causality of its own.
        self._explicit = config._attn_implementation == "eager"
        self._dtype = dtype
        self._device = device

    def prompt(self, start: int, count: int) -> Mask:
        """For positions start..start+count-1 of one or more rows, with all keys before them; broadcasts over rows.

        Padding stands after a row's tokens, where causality already hides it from them.
        """
        queries = torch.arange(start, start + count, device=self._device)[None]
        keys = torch.arange(start + count, device=self._device)
        return self._build(queries, keys, plain=start == 0 and not self._explicit)

    def after(self, starts: Tensor, past: int, count: int) -> Mask:
        """For `count` positions of each row from `starts` [rows] on. Keys are `past` columns, of which a row's own are
        those below its start, and then the new positions."""
        columns = torch.arange(past, device=self._device)
        queries = starts[:, None] + torch.arange(count, device=self._device)
        stored = torch.where(columns < starts[:, None], columns, _NEVER)
        return self._build(queries, torch.cat([stored, queries], 1)[:, None], plain=False)

    def decode(self, positions: Tensor, length: int) -> Mask:
        """For one query a row at `positions` [rows] over `length` keys, some of which may not be in use."""
        return self._build(positions[:, None], torch.arange(length, device=self._device), plain=False)

    def _build(self, queries: Tensor, keys: Tensor, *, plain: bool) -> Mask:
        """Masks for `queries` [rows, tokens] over `keys` at positions [length] or [rows, 1, length]; `plain`: without a
        window no mask is needed."""
        if not self._layer_types:
            return self._one(queries, keys, self._window, plain)
        windows = {"full_attention": None, "sliding_attention": self._window}
        return {kind: self._one(queries, keys, windows[kind], plain) for kind in self._layer_types}

    def _one(self, queries: Tensor, keys: Tensor, window: int | None, plain: bool) -> Tensor | None:
        if plain and (window is None or keys.shape[-1] <= window):
            return None
        hidden = keys > queries[..., None]
        if window is not None:
            hidden |= keys <= queries[..., None] - window
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(hidden, float("-inf"))[:, None]
