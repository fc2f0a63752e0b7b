"""The sampler: continuous batching over one frozen base model and many LoRA adapters, whatever computes.

Each `step` is one turn on the device: prefill what is waiting, in bounded parts, or decode one token for every live
sequence; the two alternate while both have work, and so do short prompts with the parts of a long one. `schedule`
decides who takes part, `prefix_cache` what need not be computed again, an `Engine` computes.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path

from openrl.backends.base import SampleJob
from openrl.backends.common.adapter_cache import AdapterCache, AdapterLoader
from openrl.backends.common.engine import Engine, Token
from openrl.backends.common.prefill import Prefix
from openrl.backends.common.prefix_cache import PrefixCache, PrefixStats
from openrl.backends.common.sample_checks import check_payload
from openrl.backends.common.schedule import Schedule
from openrl.backends.common.sequences import Job, PromptScores, Sequence, row_knobs
from openrl.backends.common.stops import Stops
from openrl.errors import BadRequest, OpenRLError, OutOfMemory
from openrl.types import RequestId, SampleOutput

_SMALLEST_PART = 64  # prompt tokens a turn, below which running out of memory is final


@dataclass(frozen=True, slots=True)
class Limits:
    """What a model and its device allow. Tokens unless stated otherwise."""

    vocab: int  # token ids
    context: int  # prompt and completion together
    rows: int  # sequences decoded together
    kv_tokens: int  # that the KV cache may hold over all rows
    prefill: int  # prompt tokens that one turn computes
    stored: int  # of earlier requests, kept beside those in hand
    reach: float  # after so many, attending to them costs as much as all else of a token
    coarse: bool  # whether sums are rounded so much that those of another batch may lead to another token


class Sampler:
    """Implements `SampleBackend` on an engine. `folder` is the model's, for its tokenizer; `load` reads adapters."""

    def __init__(
        self, engine: Engine, limits: Limits, folder: Path, eos_ids: frozenset[int], load: AdapterLoader
    ) -> None:
        self._engine = engine
        self._limits = limits
        self._cache = PrefixCache(limits.stored)
        self._schedule = Schedule(limits.rows, limits.prefill, engine.kv.fits, self._stored, limits.reach)
        self._stops = Stops(folder, eos_ids)
        self._adapters = AdapterCache(load)
        self._queued = 0
        self._prefilled = False  # whether the last turn was a prefill
        self._grew = False  # whether the last prefill was a part of a long prompt
        self._lost_alone = False  # whether a sequence that decoded alone lost the cache, and none decoded since
        self._finished: list[tuple[RequestId, SampleOutput | OpenRLError]] = []

    # ---- SampleBackend ----

    @property
    def busy(self) -> bool:
        """Whether `step` has work."""
        return bool(self._finished) or self._schedule.busy

    @property
    def active(self) -> list[RequestId]:
        """The request of each sequence that has a row now."""
        growing = self._schedule.growing
        return [s.job.request for s in self._schedule.live] + ([growing.job.request] if growing else [])

    @property
    def waiting(self) -> int:
        """Sequences that were added and have no row yet."""
        return len(self._schedule.waiting)

    def add(self, job: SampleJob) -> None:
        """Queue a job. Raises `BadRequest` if it can never run: illegal values, or more tokens than ever fit."""
        payload = job.payload
        check_payload(payload, self._limits.vocab)
        self._stops.check(payload.params.stop)
        prompt: list[int] = payload.prompt.tolist()
        seed = secrets.randbits(64) if payload.params.seed is None else payload.params.seed  # fresh randomness (S12)
        entry = Job(
            source=job,
            prompt=prompt,
            limit=self._limit(len(prompt), payload.params.max_tokens),
            scores=PromptScores.wanted(payload, seed),
            results=[None] * payload.num_samples,
        )
        self._schedule.waiting.extend(self._sequences(entry, seed))

    def cancel(self, request: RequestId) -> None:
        """Forget a job and free its rows; unknown ones are ignored."""
        for job in {s.job for s in self._schedule.everyone() if s.job.request == request}:
            job.ended = True
            self._schedule.drop(job)

    def step(self) -> list[tuple[RequestId, SampleOutput | OpenRLError]]:
        """Take one turn; returns the jobs that finished."""
        with self._engine.scope():
            self._turn()
        if not self._schedule.slots:
            self._engine.clear()
            if self._finished:  # work goes on, so that trying more at a time again cannot go in circles
                self._schedule.relax()
                self._cache.relax()
        finished, self._finished = self._finished, []
        return finished

    def stats(self) -> PrefixStats:
        """What the prefix cache holds and has been good for."""
        return self._cache.stats()

    # ---- intake ----

    def _limit(self, prompt: int, max_tokens: int | None) -> int:
        """Most tokens to draw. Without `max_tokens`: what the context, or the cache if smaller, can hold (S10)."""
        wanted = max_tokens or 1
        for limit, name in (
            (self._limits.context, "the model's context"),
            (self._limits.kv_tokens, "the KV cache (max_kv_tokens)"),
        ):
            if prompt + wanted > limit:
                raise BadRequest(
                    f"{prompt} prompt tokens + {wanted} max_tokens = {prompt + wanted}; {name} holds {limit}.",
                    "Shorten the prompt or lower max_tokens.",
                )
        return max_tokens or min(self._limits.context, self._limits.kv_tokens) - prompt

    def _sequences(self, job: Job, seed: int) -> list[Sequence]:
        params = job.source.payload.params
        first, self._queued = self._queued, self._queued + len(job.results)
        return [
            Sequence(job, i, first + i, row_knobs(job.source, seed, i), self._stops.watch(params.stop, job.prompt))
            for i in range(len(job.results))
        ]

    # ---- turns ----

    def _turn(self) -> None:
        schedule = self._schedule
        self._cache.begin_turn()
        if not (schedule.live and self._prefilled) and self._prefill_turn():
            self._prefilled = True
        elif schedule.live:
            self._prefilled = False
            self._shielded(self._decode, ())

    def _prefill_turn(self) -> bool:
        """Compute one part of what is waiting; False when there is no room for any of it."""
        schedule = self._schedule
        growing = schedule.growing
        if growing is None or self._grew:
            self._grew = False
            plan = self._with_adapters(schedule.plan())
            if plan and not plan[0].long:
                self._shielded(lambda: self._prefill(plan), plan)
                return True
            growing = schedule.growing = plan[0] if plan else growing
        if growing is None:
            return False
        self._grew = True
        self._shielded(lambda: self._grow(growing), [growing])
        return True

    def _with_adapters(self, plan: list[Prefix]) -> list[Prefix]:
        """The prefixes whose adapter is there, those of one side by side; jobs whose adapter cannot be loaded fail."""
        everyone = [*self._schedule.live, *(p.members[0] for p in plan)]
        in_use = {s.job.adapter_key for s in everyone}
        if self._schedule.growing is not None:
            in_use.add(self._schedule.growing.job.adapter_key)
        for job in {job for p in plan for job in p.jobs if job.source.adapter is not None}:
            try:
                assert job.source.adapter is not None
                job.adapter = self._adapters.get(job.source.adapter, in_use)
            except OpenRLError as error:
                self._fail(job, error)
        plan = sorted((p for p in plan if not p.job.ended), key=lambda p: p.job.adapter_key)
        for p in plan:
            if p.source is None:
                self._cache.use(p.job.adapter_key, p.tokens, len(p.blocks))
        return plan

    def _prefill(self, plan: list[Prefix]) -> None:
        """Compute short prefixes together, or copy them from a live sequence, and draw first tokens."""
        keepers = [m for p in plan for m in p.keepers]
        if keepers:
            self._place(keepers)
        fresh = [p for p in plan if p.source is None]
        if fresh:
            with self._cache.claiming([_worth_storing(p) for p in fresh]) as claims:
                self._engine.blocks.reserve(self._cache.size, self._cache.limit)
                self._engine.compute(fresh, claims)
        for p in plan:
            if p.source is not None:
                self._engine.fork(p.source, p.members, len(p.tokens))
                p.end = p.source.job.end
                for job in p.jobs:
                    job.end = p.end
        self._draw_first(plan)

    def _grow(self, prefix: Prefix) -> None:
        """Compute the next part of a long prefix; draw the first tokens when it is whole."""
        schedule = self._schedule
        if prefix.done == prefix.start:
            self._place([])
        self._engine.compute_part(prefix, schedule.part(prefix))
        if prefix.end is None:
            return
        self._store([(prefix.members[0], prefix.tokens)])
        # Live sequences have grown meanwhile: what no longer fits begins later, as a copy.
        while len(prefix.keepers) > 1 and not self._fits_with(prefix):
            late = prefix.keepers[-1]
            prefix.members.remove(late)
            schedule.requeue([late])
        schedule.growing = None
        self._place(prefix.keepers)
        self._engine.fork(prefix.members[0], prefix.members, len(prefix.tokens))
        self._draw_first([prefix])

    def _fits_with(self, prefix: Prefix) -> bool:
        schedule = self._schedule
        rows = len(schedule.live) + len(prefix.keepers)
        return rows <= schedule.rows and self._engine.kv.fits(rows, schedule.longest())

    def _draw_first(self, plan: Items[Prefix]) -> None:
        members = [m for p in plan for m in p.members]
        ends = [p.end for p in plan for _ in p.members]
        self._take(members, self._engine.draw(members, ends))

    def _decode(self) -> None:
        schedule = self._schedule
        surplus = schedule.surplus()
        if surplus:
            self._store([(s, s.history()[:-1]) for s in surplus if s.slot >= 0 and s.begun])
            schedule.requeue(surplus)
        if self._unplaced() or not self._engine.kv.holds(schedule.slots, schedule.longest()):
            self._place([])
        self._take(schedule.live, self._engine.decode(schedule.live))
        self._lost_alone = False

    def _unplaced(self) -> bool:
        """Whether live sequences left holes, or stand in an order that is not that of their slots."""
        return any(s.slot != i for i, s in enumerate(self._schedule.live))

    def _place(self, newcomers: Items[Sequence]) -> None:
        """Give newcomers and a prompt that begins to grow their slots, and close the holes that others left."""
        schedule = self._schedule
        everyone = [*schedule.live, *newcomers]
        tail = schedule.growing.members[0] if schedule.growing else None
        length = max(schedule.longest(), max((s.length for s in newcomers), default=0))
        schedule.live = self._engine.place(everyone, tail, length)

    # ---- what is kept for later requests ----

    def _stored(self, sequence: Sequence, most: int) -> list[int]:
        if self._limits.coarse and self._must_repeat(sequence.job):
            return []
        return self._cache.find(sequence.job.adapter_key, sequence.history(), most)

    def _must_repeat(self, job: Job) -> bool:
        """Whether a job may expect the same tokens again: it has a seed and the device to itself (S11). What is stored
        was computed in other batches. Beside other jobs its own batches differ each time, and nothing is gained."""
        return job.source.payload.params.seed is not None and self._schedule.has_only(job)

    def _store(self, beginnings: Items[tuple[Sequence, list[int]]]) -> None:
        """Keep what sequences hold in their slots for these tokens, if memory allows."""
        wanted = [(s.job.adapter_key, tokens) for s, tokens in beginnings]
        try:
            with self._cache.claiming(wanted) as claims:
                if any(claim.blocks for claim in claims):
                    self._engine.blocks.reserve(self._cache.size, self._cache.limit)
                    self._engine.keep([(s, claim) for (s, _), claim in zip(beginnings, claims, strict=True)])
        except RuntimeError as error:
            if not self._engine.is_out_of_memory(error):
                raise
            self._forget()

    def _forget(self) -> bool:
        """Give the memory of what is stored back; whether there was any."""
        self._engine.blocks.clear()
        return self._cache.give_up()

    # ---- results ----

    def _take(self, sequences: Items[Sequence], tokens: Items[Token]) -> None:
        """Hand drawn tokens to their sequences; those that are complete free their rows at once."""
        complete: set[Sequence] = set()
        for sequence, token in zip(sequences, tokens, strict=True):
            job = sequence.job
            if job.ended:
                continue
            if not token.sane:
                self._fail_broken(sequence)
            elif sequence.push(token.id, token.logprob, token.top):
                complete.add(sequence)
                if job.done:
                    job.ended = True
                    self._finished.append((job.request, job.output()))
        held = [s for s in self._schedule.live if s in complete]
        self._schedule.retire(complete)
        self._store([(s, s.history()[:-1]) for s in held])

    def _fail_broken(self, sequence: Sequence) -> None:
        self._fail(
            sequence.job,
            BadRequest(
                f"the model's logits are not finite at token {sequence.length} of sample {sequence.index}.",
                "The adapter's weights have probably diverged: sample from an earlier checkpoint.",
            ),
        )

    def _fail(self, job: Job, error: OpenRLError) -> None:
        job.ended = True
        self._finished.append((job.request, error))
        for sequence in self._schedule.drop(job):
            self._engine.kv.wipe(sequence.slot)

    # ---- memory ----

    def _shielded(self, action: Callable[[], None], plan: Items[Prefix]) -> None:
        """Run a turn's work on `plan`; when the device runs out of memory, arrange for less at a time and go on."""
        try:
            action()
            return
        except RuntimeError as error:
            if not self._engine.is_out_of_memory(error):
                raise
        # Outside the handler, where the traceback no longer holds the tensors that did not fit.
        self._relieve(plan)

    def _relieve(self, plan: Items[Prefix]) -> None:
        """Give up what is stored, then take on less: fewer prompts, fewer rows, shorter parts, in this order; fail what
        is alone and too much."""
        schedule = self._schedule
        members = [m for p in plan for m in p.members if not m.job.ended]
        lost = not self._engine.intact
        if lost:
            members += [*schedule.live, *(schedule.growing.members if schedule.growing else ())]
            members = list(dict.fromkeys(members))
            self._engine.clear()
        schedule.requeue(members)
        rows = len(schedule.live)
        if self._forget():
            pass
        elif len(plan) > 1:
            schedule.prefixes = len(plan) // 2
        elif rows > 1 or (rows and members):
            schedule.rows = max(1, rows // 2)
            schedule.send_back(rows - rows // 2)
        elif plan and schedule.prefill_tokens > _SMALLEST_PART:
            schedule.prefill_tokens = max(_SMALLEST_PART, schedule.prefill_tokens // 2)
        elif len(members) > 1:
            schedule.rows = len(members) // 2
        elif plan or not lost or self._lost_alone:
            self._give_up(members or schedule.live)
        else:  # begun anew at the size now needed, without the old cache beside it
            self._lost_alone = True
        self._engine.release()

    def _give_up(self, sequences: Items[Sequence]) -> None:
        for job in {s.job for s in sequences}:
            self._fail(job, OutOfMemory(f"the device ran out of memory on this request of {len(job.prompt)} tokens."))


def _worth_storing(prefix: Prefix) -> tuple[str, list[int]]:
    """The key and tokens to store of a prefix: nothing of one that is only scored, as it will hardly come again."""
    scored = all(m.last and m.job.scores is not None for m in prefix.members)
    return prefix.job.adapter_key, [] if scored else prefix.tokens
