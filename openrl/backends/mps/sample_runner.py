"""The device side of sampling in MLX: prompts and decoding steps through the model, keys and values into the cache.

Which sequences are computed together is decided elsewhere (`openrl.backends.common.schedule`). Nothing is computed
before it is evaluated; so each pass ends by evaluating what it drew or scored and what it stored, and if memory runs
out on the way, the cache, which then hangs on sums that cannot be had, is lost.
"""

from __future__ import annotations

from collections.abc import Generator
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache as PlainCache
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from openrl.backends.common.engine import Token, set_end
from openrl.backends.common.lora import segments_of
from openrl.backends.common.prefill import Prefix
from openrl.backends.common.prefix_cache import Claim
from openrl.backends.common.scoring import Span, head_rows
from openrl.backends.common.sequences import Sequence, TopRow
from openrl.backends.common.slots import place
from openrl.backends.mps.memory import is_out_of_memory
from openrl.backends.mps.model import MlxModel
from openrl.backends.mps.sample_draw import Drawn, draw
from openrl.backends.mps.sample_kv import Blocks, Filling, KVCache, KVShape, LayerShape, fill, restore
from openrl.backends.mps.sample_score import score
from openrl.backends.mps.sample_views import ChunkPass, DecodePass, Layout, Pass, ProbePass, PromptPass, Row
from openrl.errors import ModelError

_GROUPED = frozenset({"gemma2"})  # families that mask groups of heads


class Runner:
    """Implements `openrl.backends.common.engine.Engine`: runs a model for the sampler and owns its KV cache."""

    def __init__(self, model: MlxModel, max_rows: int, max_kv_tokens: int) -> None:
        self._model = model
        self._layout = _layout(model)
        shape = _shape(model, self._layout)
        self.kv = KVCache(shape, max_rows, max_kv_tokens)
        self.blocks = Blocks(shape)
        self.intact = True

    def scope(self) -> AbstractContextManager[object]:
        """See `Engine`."""
        return nullcontext()

    # ---- slots ----

    def place(self, sequences: Items[Sequence], tail: Sequence | None, length: int) -> list[Sequence]:
        """See `Engine`."""
        with self._writing():
            return place(self.kv, sequences, tail, length)

    def clear(self) -> None:
        """See `Engine`."""
        self.kv.clear()
        self.intact = True

    @contextmanager
    def _writing(self) -> Generator[None]:
        """Around whatever changes the cache: what was not evaluated by the end is now, or else the cache is lost."""
        self.intact = False
        yield
        self.kv.evaluate()
        self.intact = True

    # ---- forward passes ----

    def compute(self, prefixes: Items[Prefix], claims: Items[Claim]) -> None:
        """See `Engine`."""
        rows = [Row(p.blocks, p.fresh, sorted(m.slot for m in p.members if m.slot >= 0)) for p in prefixes]
        filling = Filling(self.blocks, [(i, len(p.blocks), claims[i]) for i, p in enumerate(prefixes)])
        width = max(p.fresh for p in prefixes)
        ids = mx.array([p.tokens[p.start :] + [0] * (width - p.fresh) for p in prefixes])
        with self._writing():
            whole = PromptPass(self.kv, self.blocks, self._layout, rows, filling)
            hidden = self._forward(ids, [p.job.adapter for p in prefixes], whole)
            # Copies: a view would keep the whole pass alive.
            ends = [mx.contiguous(hidden[row, p.fresh - 1]) for row, p in enumerate(prefixes)]
            mx.eval(hidden, ends, self.kv.keys, self.kv.values, self.blocks.keys, self.blocks.values)
        score(self._model, [Span(j, p.start, hidden[i]) for i, p in enumerate(prefixes) for j in p.jobs if j.unscored])
        for prefix, end in zip(prefixes, ends, strict=True):
            set_end(prefix, end)

    def compute_part(self, prefix: Prefix, count: int) -> None:
        """See `Engine`."""
        leader = prefix.members[0]
        start, stop = prefix.done, min(prefix.done + count, len(prefix.tokens))
        with self._writing():
            if prefix.blocks and prefix.done == prefix.start:
                restore(self.blocks, self.kv, leader.slot, prefix.blocks)
            whole = ChunkPass(self.kv, self._layout, leader.slot, start)
            hidden = self._forward(mx.array([prefix.tokens[start:stop]]), [leader.job.adapter], whole)
            mx.eval(hidden, self.kv.keys, self.kv.values)
        score(self._model, [Span(job, start, hidden[0]) for job in prefix.jobs if job.unscored])
        prefix.done = stop
        if stop == len(prefix.tokens):
            set_end(prefix, mx.contiguous(hidden[0, -1]))

    def fork(self, source: Sequence, members: Items[Sequence], length: int) -> None:
        """See `Engine`."""
        targets = sorted(m.slot for m in members if m.slot not in (-1, source.slot))
        with self._writing():
            self.kv.spread(source.slot, targets, length)

    def keep(self, claims: Items[tuple[Sequence, Claim]]) -> None:
        """See `Engine`."""
        fill(self.blocks, self.kv, [(sequence.slot, claim) for sequence, claim in claims])

    def decode(self, live: list[Sequence]) -> list[Token]:
        """See `Engine`."""
        positions = [s.length - 1 for s in live]
        with self._writing():
            whole = DecodePass(self.kv, self._layout, positions)
            ids = mx.array([s.tokens[-1] for s in live])[:, None]
            hidden = self._forward(ids, [s.job.adapter for s in live], whole)[:, 0]
            return self._draw(live, hidden)

    def draw(self, sequences: Items[Sequence], ends: Items[Any]) -> list[Token]:
        """See `Engine`."""
        return self._draw(sequences, mx.stack(list(ends)))

    def _forward(self, ids: mx.array, adapters: Items[Any], whole: Pass) -> mx.array:
        with self._model.routing.use(adapters):
            return self._model.hidden(ids, self._layout.views(whole))

    def _draw(self, sequences: Items[Sequence], hidden: mx.array) -> list[Token]:
        """For as many rows at a time as the head may take."""
        tokens: list[Token] = []
        size = head_rows(self._model.vocab_size)
        for start in range(0, len(sequences), size):
            part = sequences[start : start + size]
            logits = self._model.logits(hidden[start : start + size], segments_of([s.job.adapter for s in part]))
            drawn = draw(logits, [s.knobs for s in part], np.array([s.length for s in part]))
            tokens += _tokens(part, drawn)
        return tokens

    # ---- memory ----

    def is_out_of_memory(self, error: RuntimeError) -> bool:
        """See `Engine`."""
        return is_out_of_memory(error)

    def release(self) -> None:
        """See `Engine`."""
        mx.clear_cache()


def _tokens(sequences: Items[Sequence], drawn: Drawn) -> list[Token]:
    tops: list[TopRow | None] = [None] * len(sequences)
    if drawn.top_ids is not None and drawn.top_logprobs is not None:
        tops = [*zip(drawn.top_ids.tolist(), drawn.top_logprobs.tolist(), strict=True)]
    return [
        Token(i, x, (top[0][: s.knobs.top], top[1][: s.knobs.top]) if top and s.knobs.top else None)
        for s, i, x, top in zip(sequences, drawn.tokens.tolist(), drawn.logprobs.tolist(), tops, strict=True)
    ]


def _layout(model: MlxModel) -> Layout:
    """Each layer's window, from the caches that mlx-lm would make. Raises `ModelError` for caches of other kinds."""
    windows: list[int | None] = []
    for cache in make_prompt_cache(model.module):
        if type(cache) is RotatingKVCache and not cache.keep:
            windows.append(cache.max_size)
        elif type(cache) is PlainCache:
            windows.append(None)
        else:
            raise _unknown(model, f"its layers keep their state in a {type(cache).__name__}")
    config = model.config
    grouped = config["model_type"] in _GROUPED and config["num_attention_heads"] != config["num_key_value_heads"]
    return Layout(tuple(windows), grouped)


def _shape(model: MlxModel, layout: Layout) -> KVShape:
    """What each layer stores, from a pass of which nothing is computed but the shapes."""
    probe = ProbePass()
    try:
        model.hidden(mx.zeros((2, 1), mx.int32), layout.views(probe))
    except (AttributeError, TypeError, ValueError) as error:
        raise _unknown(model, f"its layers ask more of a cache than keys and values: {error}") from error
    if sorted(probe.seen) != list(range(len(layout.windows))):
        raise _unknown(model, "some of its layers share their keys and values")
    layers = [LayerShape(k.shape[1], k.shape[3], v.shape[3]) for _, (k, v) in sorted(probe.seen.items())]
    return KVShape(tuple(layers), probe.seen[0][0].dtype)


def _unknown(model: MlxModel, why: str) -> ModelError:
    return ModelError(
        f"model family {model.config['model_type']!r} cannot be sampled by the MLX backend: {why}.",
        "Supported are dense families with the usual attention, such as llama, qwen2, qwen3 and gemma3_text.",
    )
