"""The device side of sampling: prompts and decoding steps through the model, keys and values into the cache.

Which sequences are computed together is decided elsewhere (`openrl.backends.common.schedule`).
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from openrl.backends.common.engine import Token, set_end
from openrl.backends.common.lora import segments_of
from openrl.backends.common.prefill import Prefix
from openrl.backends.common.prefix_cache import Claim
from openrl.backends.common.scoring import Span, head_rows
from openrl.backends.common.sequences import Sequence, TopRow
from openrl.backends.common.slots import place
from openrl.backends.torch.draw import Drawn, Knobs, draw, stack
from openrl.backends.torch.kv import ChunkView, KVCache, KVShape
from openrl.backends.torch.kv_blocks import Blocks, Filling, PrefillView, Row, fill, restore
from openrl.backends.torch.masks import Masks
from openrl.backends.torch.memory import is_out_of_memory
from openrl.backends.torch.model import CausalLM
from openrl.backends.torch.sample_backbone import backbone_of
from openrl.backends.torch.score import score


@dataclass(slots=True)
class _Batch:
    """What decoding needs of the live sequences; good while `sequences` is the same list."""

    sequences: list[Sequence]
    knobs: list[Knobs]
    tokens: Tensor  # int64 [rows], drawn and not yet computed
    positions: Tensor  # int64 [rows], of those tokens


class Runner:
    """Implements `openrl.backends.common.engine.Engine`: runs a model for the sampler and owns its KV cache."""

    def __init__(self, model: CausalLM, max_rows: int, max_kv_tokens: int) -> None:
        self._model = model
        self._masks = Masks(model.config, model.dtype, model.device)
        self._backbone = backbone_of(model)
        self._batch: _Batch | None = None
        shape = KVShape.of(model.config, model.dtype, model.device)
        self.kv = KVCache(shape, max_rows, max_kv_tokens)
        self.blocks = Blocks(shape)
        self.intact = True  # False: running out of memory left the cache half moved

    def scope(self) -> AbstractContextManager[object]:
        """See `Engine`."""
        return torch.inference_mode()

    # ---- slots ----

    def place(self, sequences: Items[Sequence], tail: Sequence | None, length: int) -> list[Sequence]:
        """See `Engine`."""
        self.intact = False
        order = place(self.kv, sequences, tail, length)
        self.intact = True
        return order

    def clear(self) -> None:
        """Forget everything that the cache holds."""
        self._batch = None
        self.kv.clear()
        self.intact = True

    # ---- forward passes ----

    def compute(self, prefixes: Items[Prefix], claims: Items[Claim]) -> None:
        """Whole prefixes in one padded pass: their ends, scores and, for members that have a slot, keys and values.

        `claims` says, for each prefix, which stored blocks to fill with its keys and values.
        """
        rows = [Row(p.blocks, sorted(m.slot for m in p.members if m.slot >= 0)) for p in prefixes]
        filling = Filling(self.blocks, [(i, len(p.blocks), claims[i]) for i, p in enumerate(prefixes)])
        view = PrefillView(self.kv, self.blocks, rows, filling)
        width = max(p.fresh for p in prefixes)
        ids = torch.tensor([p.tokens[p.start :] + [0] * (width - p.fresh) for p in prefixes])
        starts = torch.tensor([p.start for p in prefixes], device=self._model.device)
        after = self._masks.after(starts, view.past, width) if view.past else self._masks.prompt(0, width)
        positions = starts[:, None] + torch.arange(width, device=self._model.device)
        with self._model.routing.use([p.job.adapter for p in prefixes]):
            hidden = self._forward(ids, positions if view.past else positions[:1], after, view)
        spans = [Span(job, p.start, hidden[i]) for i, p in enumerate(prefixes) for job in p.jobs if job.unscored]
        score(self._model, spans)
        for row, prefix in enumerate(prefixes):
            set_end(prefix, hidden[row, prefix.fresh - 1].clone())  # a view would keep the whole pass alive

    def compute_part(self, prefix: Prefix, count: int) -> None:
        """The next `count` tokens of a prefix whose first member has a slot."""
        leader = prefix.members[0]
        if prefix.blocks and prefix.done == prefix.start:
            restore(self.blocks, self.kv, leader.slot, prefix.blocks)
        start, stop = prefix.done, min(prefix.done + count, len(prefix.tokens))
        ids = torch.tensor([prefix.tokens[start:stop]])
        view = ChunkView(self.kv, leader.slot, start)
        with self._model.routing.use([leader.job.adapter]):
            mask = self._masks.prompt(start, stop - start)
            hidden = self._forward(ids, torch.arange(start, stop)[None], mask, view)
        score(self._model, [Span(job, start, hidden[0]) for job in prefix.jobs if job.unscored])
        prefix.done = stop
        if stop == len(prefix.tokens):
            set_end(prefix, hidden[0, -1].clone())

    def fork(self, source: Sequence, members: Items[Sequence], length: int) -> None:
        """Copy the first `length` columns of one sequence to others that begin with the same tokens."""
        self.kv.spread(source.slot, sorted(m.slot for m in members if m.slot not in (-1, source.slot)), length)

    def keep(self, claims: Items[tuple[Sequence, Claim]]) -> None:
        """Fill stored blocks with the beginnings of sequences that have a slot."""
        fill(self.blocks, self.kv, [(sequence.slot, claim) for sequence, claim in claims])

    def decode(self, live: list[Sequence]) -> list[Token]:
        """Compute the newest token of all live sequences, in their slots' order, and draw the next of each."""
        batch = self._batch
        if batch is None or batch.sequences is not live:
            batch = self._batch = self._new_batch(live)
        columns = self.kv.whole_blocks(max(s.length for s in live))
        mask = self._masks.decode(batch.positions, columns)
        with self._model.routing.use([s.job.adapter for s in live]):
            hidden = self._backbone.step(batch.tokens, batch.positions, self.kv, columns, mask)
        drawn = self._draw(live, hidden, batch.knobs)
        batch.tokens = torch.cat([d.tokens for d in drawn]) if len(drawn) > 1 else drawn[0].tokens
        batch.positions += 1
        return _tokens(live, drawn)

    def draw(self, sequences: Items[Sequence], ends: Items[Tensor]) -> list[Token]:
        """Draw each sequence's next token from the hidden state [H] of its last one."""
        return _tokens(sequences, self._draw(sequences, torch.stack(list(ends)), self._knobs(sequences)))

    # ---- memory ----

    def is_out_of_memory(self, error: RuntimeError) -> bool:
        """See `Engine`."""
        return is_out_of_memory(error)

    def release(self) -> None:
        """See `Engine`."""
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()

    def _new_batch(self, live: list[Sequence]) -> _Batch:
        tokens = torch.tensor([s.tokens[-1] for s in live], device=self._model.device)
        positions = torch.tensor([s.length - 1 for s in live], device=self._model.device)
        return _Batch(live, self._knobs(live), tokens, positions)

    def _forward(self, ids: Tensor, positions: Tensor, mask: Any, view: Any) -> Tensor:
        device = self._model.device
        return self._backbone.prompt(ids.to(device), positions.to(device), mask, view)

    def _knobs(self, sequences: Items[Sequence]) -> list[Knobs]:
        """For as many rows at a time as the head may take."""
        size, vocab = head_rows(self._model.vocab_size), self._model.vocab_size
        parts = [sequences[i : i + size] for i in range(0, len(sequences), size)]
        return [stack([s.knobs for s in part], vocab, self._model.device) for part in parts]

    def _draw(self, sequences: Items[Sequence], hidden: Tensor, knobs: Items[Knobs]) -> list[Drawn]:
        drawn: list[Drawn] = []
        start = 0
        for part in knobs:
            stop = start + len(part.seeds)
            rows = sequences[start:stop]
            logits = self._model.logits(hidden[start:stop], segments_of([s.job.adapter for s in rows]))
            drawn.append(draw(logits, part, np.array([s.length for s in rows])))
            start = stop
        return drawn


def _tokens(sequences: Items[Sequence], drawn: Items[Drawn]) -> list[Token]:
    """To the host, with one transfer an array."""
    ids = [i for d in drawn for i in d.tokens.tolist()]
    logprobs = [x for d in drawn for x in d.logprobs.tolist()]
    tops: list[TopRow | None] = []
    for d in drawn:
        if d.top_ids is None or d.top_logprobs is None:
            tops += [None] * len(d.tokens)
        else:
            tops += zip(d.top_ids.tolist(), d.top_logprobs.tolist(), strict=True)
    return [
        Token(i, x, (top[0][: s.knobs.top], top[1][: s.knobs.top]) if top and s.knobs.top else None)
        for s, i, x, top in zip(sequences, ids, logprobs, tops, strict=True)
    ]
