"""The sampler: continuous batching over one frozen base model and many LoRA adapters.

Each `step` is one turn on the device: prefill what is waiting, in bounded parts, or decode one token for every live
sequence; the two alternate while both have work. `schedule` decides who takes part, `runner` computes.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from collections.abc import Sequence as Items
from pathlib import Path

import torch

from openrl.backends.base import SampleJob
from openrl.backends.torch.adapter_cache import AdapterCache, AdapterLoader
from openrl.backends.torch.adapter_files import load_adapter
from openrl.backends.torch.memory import is_out_of_memory
from openrl.backends.torch.model import CausalLM
from openrl.backends.torch.packed import pack
from openrl.backends.torch.runner import Runner, Token
from openrl.backends.torch.schedule import Prefix, Schedule
from openrl.backends.torch.sequences import Job, PromptScores, Sequence, row_knobs
from openrl.backends.torch.stops import Stops
from openrl.errors import BadRequest, OpenRLError, OutOfMemory
from openrl.types import Cells, RequestId, SampleOutput, SamplePayload, SamplingParams

# Prompt tokens that one turn computes: a turn should end soon, so that decoding and training get theirs.
_PREFILL_TOKENS_CPU = 512
_PREFILL_TOKENS_GPU = 8192
_SMALLEST_PART = 64  # prompt tokens a turn, below which running out of memory is final


class Sampler:
    """Implements `SampleBackend` on a `CausalLM`. `folder` is the model's, for its tokenizer.

    `load` reads adapters (default: PEFT folders); `prefill_tokens` bounds the prompt tokens of one turn.
    """

    def __init__(
        self,
        model: CausalLM,
        folder: Path,
        max_rows: int,
        max_kv_tokens: int,
        *,
        load: AdapterLoader | None = None,
        prefill_tokens: int | None = None,
    ) -> None:
        usual = _PREFILL_TOKENS_CPU if model.device.type == "cpu" else _PREFILL_TOKENS_GPU
        load = load or (lambda ref: load_adapter(ref.folder, model.shapes, model.device))
        pack(model)
        self._model = model
        self._max_kv_tokens = max_kv_tokens
        self._runner = Runner(model, max_rows, max_kv_tokens)
        self._schedule = Schedule(max_rows, prefill_tokens or usual, self._runner.kv.fits)
        self._stops = Stops(folder, model.eos_ids)
        self._adapters = AdapterCache(load, model.dtype)
        self._queued = 0
        self._prefilled = False  # whether the last turn was a prefill
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

    def add(self, job: SampleJob) -> None:
        """Queue a job. Raises `BadRequest` if it can never run: illegal values, or more tokens than ever fit."""
        payload = job.payload
        check_payload(payload, self._model.vocab_size)
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
        with torch.inference_mode():
            self._turn()
        if not self._schedule.slots:
            self._runner.clear()
            if self._finished:  # work goes on, so that trying more at a time again cannot go in circles
                self._schedule.relax()
        finished, self._finished = self._finished, []
        return finished

    # ---- intake ----

    def _limit(self, prompt: int, max_tokens: int | None) -> int:
        """Most tokens to draw. Without `max_tokens`: what the context, or the cache if smaller, can hold (S10)."""
        wanted = max_tokens or 1
        for limit, name in (
            (self._model.config.max_position_embeddings, "the model's context"),
            (self._max_kv_tokens, "the KV cache (max_kv_tokens)"),
        ):
            if prompt + wanted > limit:
                raise BadRequest(
                    f"{prompt} prompt tokens + {wanted} max_tokens = {prompt + wanted}; {name} holds {limit}.",
                    "Shorten the prompt or lower max_tokens.",
                )
        return max_tokens or min(self._model.config.max_position_embeddings, self._max_kv_tokens) - prompt

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
        if not (schedule.live and self._prefilled) and self._prefill_turn():
            self._prefilled = True
        elif schedule.live:
            self._prefilled = False
            self._shielded(self._decode, ())

    def _prefill_turn(self) -> bool:
        """Compute one part of what is waiting; False when there is no room for any of it."""
        schedule = self._schedule
        if schedule.growing is None:
            plan = self._with_adapters(schedule.plan())
            if not plan:
                return False
            if plan[0].source is not None or not schedule.long(plan[0].members[0]):
                self._shielded(lambda: self._prefill(plan), plan)
                return True
            schedule.growing = plan[0]
        growing = schedule.growing
        self._shielded(lambda: self._grow(growing), [growing])
        return True

    def _with_adapters(self, plan: list[Prefix]) -> list[Prefix]:
        """The prefixes whose adapter is there, those of one side by side; jobs whose adapter cannot be loaded fail."""
        in_use = {s.job.adapter_key for s in self._schedule.live} | {p.job.adapter_key for p in plan}
        for job in {p.job for p in plan if p.job.source.adapter is not None}:
            try:
                assert job.source.adapter is not None
                job.adapter = self._adapters.get(job.source.adapter, in_use)
            except OpenRLError as error:
                self._fail(job, error)
        return sorted((p for p in plan if not p.job.ended), key=lambda p: p.job.adapter_key)

    def _prefill(self, plan: list[Prefix]) -> None:
        """Compute short prefixes together, or copy them from a live sequence, and draw first tokens."""
        members = [m for p in plan for m in p.members]
        self._place([m for m in members if self._schedule.needs_slot(m)])
        fresh = [p for p in plan if p.source is None]
        if fresh:
            self._runner.compute(fresh)
        for p in plan:
            if p.source is not None:
                self._runner.fork(p.source, p.members, len(p.tokens))
                p.end = p.job.end
        self._draw_first(plan)

    def _grow(self, prefix: Prefix) -> None:
        """Compute the next part of a long prefix; draw the first tokens when it is whole."""
        schedule = self._schedule
        if prefix.done == 0:
            self._place([])
        self._runner.compute_part(prefix, schedule.prefill_tokens)
        if prefix.end is None:
            return
        # Live sequences have grown meanwhile: what no longer fits begins later, as a copy.
        while len(prefix.members) > 1 and not self._fits_with(prefix):
            schedule.requeue([prefix.members.pop()])
        schedule.growing = None
        self._place(prefix.members)
        self._runner.fork(prefix.members[0], prefix.members, len(prefix.tokens))
        self._draw_first([prefix])

    def _fits_with(self, prefix: Prefix) -> bool:
        schedule = self._schedule
        rows = len(schedule.live) + len(prefix.members)
        return rows <= schedule.rows and self._runner.kv.fits(rows, schedule.longest())

    def _draw_first(self, plan: Items[Prefix]) -> None:
        members = [m for p in plan for m in p.members]
        ends = [p.end for p in plan for _ in p.members]
        self._take(members, self._runner.draw(members, torch.stack([e for e in ends if e is not None])))

    def _decode(self) -> None:
        schedule = self._schedule
        schedule.make_room()
        if self._unplaced() or not self._runner.kv.holds(schedule.slots, schedule.longest()):
            self._place([])
        self._take(schedule.live, self._runner.decode(schedule.live))

    def _unplaced(self) -> bool:
        """Whether live sequences left holes, or stand in an order that is not that of their slots."""
        return any(s.slot != i for i, s in enumerate(self._schedule.live))

    def _place(self, newcomers: Items[Sequence]) -> None:
        schedule = self._schedule
        everyone = [*schedule.live, *newcomers]
        tail = schedule.growing.members[0] if schedule.growing else None
        length = max(schedule.longest(), max((s.length for s in newcomers), default=0))
        schedule.live = self._runner.place(everyone, tail, length)

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
        self._schedule.retire(complete)

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
            self._runner.kv.wipe(sequence.slot)

    # ---- memory ----

    def _shielded(self, action: Callable[[], None], plan: Items[Prefix]) -> None:
        """Run a turn's work on `plan`; when the device runs out of memory, arrange for less at a time and go on."""
        try:
            action()
            return
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        # Outside the handler, where the traceback no longer holds the tensors that did not fit.
        self._relieve(plan)

    def _relieve(self, plan: Items[Prefix]) -> None:
        """Take on less: fewer prompts, fewer rows, shorter parts, in this order; fail what is alone and too much."""
        schedule = self._schedule
        members = [m for p in plan for m in p.members if not m.job.ended]
        lost = not self._runner.intact
        if lost:
            members += schedule.live
            self._runner.clear()
        schedule.requeue(members)
        rows = len(schedule.live)
        if len(plan) > 1:
            schedule.prefixes = len(plan) // 2
        elif rows > 1 or (rows and members):
            schedule.rows = max(1, rows // 2)
            schedule.send_back(rows - rows // 2)
        elif plan and schedule.prefill_tokens > _SMALLEST_PART:
            schedule.prefill_tokens = max(_SMALLEST_PART, schedule.prefill_tokens // 2)
        elif len(members) > 1:
            schedule.rows = len(members) // 2
        elif plan or not lost:  # a cache lost in growing is begun anew at the size now needed, without the old one
            self._give_up(members or schedule.live)
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()

    def _give_up(self, sequences: Items[Sequence]) -> None:
        for job in {s.job for s in sequences}:
            self._fail(job, OutOfMemory(f"the device ran out of memory on this request of {len(job.prompt)} tokens."))


def check_payload(payload: SamplePayload, vocab: int) -> None:
    """Raises BadRequest for values that no sampler can work with (S3, S10)."""
    params: SamplingParams = payload.params
    ids, last = payload.prompt, payload.prompt_logprobs_last_n
    rules = {
        "prompt": (ids.ndim == 1 and len(ids) > 0 and ids.min() >= 0 and ids.max() < vocab, f"ids below {vocab}"),
        "num_samples": (payload.num_samples >= 1, "1 or more"),
        "max_tokens": (params.max_tokens is None or params.max_tokens >= 1, "1 or more, or none"),
        "temperature": (0 <= params.temperature < float("inf"), "0 or more"),
        "top_p": (0 < params.top_p <= 1, "above 0, up to 1"),
        "top_k": (params.top_k == -1 or params.top_k >= 1, "-1 for all, or 1 or more"),
        "topk_prompt_logprobs": (0 <= payload.topk_prompt_logprobs <= vocab, f"0 to {vocab}"),
        "prompt_alt_tokens_k": (payload.prompt_alt_tokens_k >= 0, "0 or more"),
        "prompt_logprobs_last_n": (last is None or 1 <= last < len(ids), "1 to the prompt's length less 1, or none"),
        "target_prompt_logprobs": (_legal_targets(payload, vocab), f"[prompt - 1, K] of ids below {vocab}, or -1"),
        "topk_sample_logprobs": (0 <= payload.topk_sample_logprobs <= vocab, f"0 to {vocab}"),
    }
    for name, (good, legal) in rules.items():
        if not good:
            given = getattr(payload, name, getattr(params, name, None))
            shown = f"{len(ids)} ids" if name == "prompt" else "another table" if isinstance(given, Cells) else given
            raise BadRequest(f"{name} is {shown}.", f"Legal: {legal}.")


def _legal_targets(payload: SamplePayload, vocab: int) -> bool:
    cells = payload.target_prompt_logprobs
    if cells is None:
        return True
    return cells.shape[0] == len(payload.prompt) - 1 and bool(((cells.values >= -1) & (cells.values < vocab)).all())
