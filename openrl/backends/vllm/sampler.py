"""The sampler whose tokens vLLM draws. What vLLM would answer otherwise than the rules have it, our engine answers.

vLLM works in a process of its own, so `step` only takes what has come, sends what can go, and gives the engine a turn.
Stop rules are our engine's (S8, S9), applied to the tokens as they come. Seeds are vLLM's own: a request draws the
same tokens again from the same vLLM, but others than our engine would.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any

from openrl.backends.base import SampleBackend, SampleJob, Spent
from openrl.backends.common.sample_checks import check_payload
from openrl.backends.common.sequences import Job, Sequence, row_knobs
from openrl.backends.common.stops import Stops
from openrl.backends.vllm.adapters import Shelf
from openrl.backends.vllm.life import Life
from openrl.backends.vllm.process import Frame
from openrl.backends.vllm.routes import Routes, asks_of_prompt, prompt_part
from openrl.errors import BackendFault, BadRequest, OpenRLError
from openrl.types import RequestId, SampleOutput, SamplerReport

log = logging.getLogger(__name__)

_DEATHS = 3  # of vLLM with a request in hand, after which the request is what kills it
_SEEDS = (1 << 63) - 1  # vLLM's seeds are int64, and -1 means none

Finished = list[tuple[RequestId, SampleOutput | OpenRLError]]


@dataclass(slots=True, eq=False)
class _Draw:
    """A request that vLLM draws. `rows` are its sequences by the key that vLLM knows them by, until they are whole."""

    job: Job
    seed: int
    scored: bool  # whether the engine computes the prompt's part
    rows: dict[str, Sequence] = field(default_factory=dict[str, Sequence])
    sent: bool = False
    deaths: int = 0
    prompt: SampleOutput | None = None  # that part

    @property
    def done(self) -> bool:
        return self.job.done and (self.prompt is not None or not self.scored)

    def output(self) -> SampleOutput:
        drawn = self.job.output()
        return drawn if self.prompt is None else replace(self.prompt, sequences=drawn.sequences)


class VllmSampler:
    """Implements `SampleBackend` and `Apart`. `engine` is our own sampler, over the training half's weights."""

    def __init__(self, life: Life, engine: SampleBackend, stops: Stops) -> None:
        self._life = life
        self._engine = engine
        self._stops = stops
        self._shelf = Shelf(life.opening.adapters)
        self._routes = Routes()
        self._draws: OrderedDict[RequestId, _Draw] = OrderedDict()
        self._keys: dict[str, _Draw] = {}  # of sequences that vLLM has
        self._number = 0
        self._finished: Finished = []
        self._spent: list[Spent] = []

    # ---- SampleBackend ----

    @property
    def busy(self) -> bool:
        """Whether `step` has work: what vLLM does meanwhile is none."""
        return bool(self._finished) or self._engine.busy or self._life.eventful

    @property
    def active(self) -> list[RequestId]:
        """The request of each sequence that has a row, here or at vLLM."""
        return self._engine.active + self._rows()

    @property
    def waiting(self) -> int:
        """Sequences that have no row yet."""
        return self._engine.waiting + sum(len(draw.rows) for draw in self._draws.values()) - len(self._rows())

    def _rows(self) -> list[RequestId]:
        """The request of each sequence that has a row at vLLM, which takes them in their order."""
        rows = [draw.job.request for draw in self._draws.values() for _ in draw.rows if draw.sent]
        return rows[: self._life.opening.rows]

    def add(self, job: SampleJob) -> None:
        """Queue a job. Raises `BadRequest` if it can never run, `BackendFault` while vLLM keeps failing."""
        if not self._routes.to_vllm(job, self._life.skills):
            self._engine.add(job)
            return
        if self._life.hopeless:
            raise self._life.fault()
        draw = self._draw(job)
        if draw.scored:
            self._engine.add(prompt_part(job))
        self._draws[job.request] = draw
        self._feed()

    def cancel(self, request: RequestId) -> None:
        """Forget a job and free its rows; unknown ones are ignored."""
        self._engine.cancel(request)
        draw = self._draws.pop(request, None)
        if draw is not None:
            self._withdraw(draw)

    def step(self) -> Finished:
        """Take what vLLM has sent, send it what it has room for, and give the engine a turn."""
        frames, ended = self._life.take()
        for frame in frames:
            self._take(frame)
        if ended:
            self._begin_again()
        self._feed()
        if self._engine.busy:
            self._engine_turn()
        finished, self._finished = self._finished, []
        return finished

    # ---- Apart ----

    @property
    def report(self) -> SamplerReport:
        return self._life.report

    def spent(self) -> list[Spent]:
        """What was computed since this was last asked, here and at vLLM."""
        spent, self._spent = self._spent, []
        return spent

    def close(self) -> None:
        """End vLLM."""
        self._life.close()

    # ---- intake ----

    def _draw(self, job: SampleJob) -> _Draw:
        payload = job.payload
        check_payload(payload, self._life.opening.vocab)
        self._stops.check(payload.params.stop)
        seed = secrets.randbits(63) if payload.params.seed is None else payload.params.seed  # fresh randomness (S12)
        prompt: list[int] = payload.prompt.tolist()
        entry = Job(
            source=job,
            prompt=prompt,
            limit=self._limit(len(prompt), payload.params.max_tokens),
            scores=None,
            results=[None] * payload.num_samples,
        )
        draw = _Draw(entry, seed, asks_of_prompt(payload))
        self._renew(draw)
        return draw

    def _limit(self, prompt: int, max_tokens: int | None) -> int:
        """Most tokens to draw; without `max_tokens` what the context can hold (S10)."""
        context = self._life.opening.context
        if prompt + (max_tokens or 1) > context:
            raise BadRequest(
                f"{prompt} prompt tokens and max_tokens {max_tokens or 1} are more than the {context} that fit.",
                "Send a shorter prompt or a smaller max_tokens; the limit is the smaller of the model's context and "
                "max_kv_tokens.",
            )
        return max_tokens or context - prompt

    def _renew(self, draw: _Draw) -> None:
        """Give a job's sequences, those not whole, fresh beginnings under keys that were never used."""
        job, stop = draw.job, draw.job.source.payload.params.stop
        draw.rows, draw.sent = {}, False
        for index in [i for i, result in enumerate(job.results) if result is None]:
            self._number += 1
            knobs = row_knobs(job.source, draw.seed, index)
            watch = self._stops.watch(stop, job.prompt)
            draw.rows[str(self._number)] = Sequence(job, index, self._number, knobs, watch)

    # ---- to vLLM ----

    def _feed(self) -> None:
        """Send the jobs that have not gone yet, as far as there is room for their adapters."""
        if not self._life.ready:
            return
        in_use = {draw.job.adapter_key for draw in self._draws.values() if draw.sent}
        for draw in [draw for draw in self._draws.values() if not draw.sent]:
            ref, number = draw.job.source.adapter, None
            if ref is not None:
                if self._routes.rank(ref) > self._life.opening.rank:
                    self._life.widen(self._routes.rank(ref))
                    return
                placed = self._shelf.place(ref, in_use)
                if placed is None:
                    continue
                number, frames = placed
                for frame in frames:
                    self._life.send(frame)
                in_use.add(ref.key)
            self._send(draw, number)

    def _send(self, draw: _Draw, adapter: int | None) -> None:
        draw.sent = True
        for key, sequence in draw.rows.items():
            self._keys[key] = draw
            self._life.send(self._frame(key, sequence, adapter))

    def _frame(self, key: str, sequence: Sequence, adapter: int | None) -> Frame:
        params, knobs, vocab = sequence.job.source.payload.params, sequence.knobs, self._life.opening.vocab
        stop = self._life.opening.eos if params.stop is None else [id_ for id_ in params.stop if isinstance(id_, int)]
        drawing = knobs.temperature > 0
        return {
            "op": "draw",
            "key": key,
            "prompt": sequence.job.prompt,
            "adapter": adapter,
            "seed": knobs.seed & _SEEDS,
            "temperature": knobs.temperature,
            "top_p": knobs.top_p if drawing else 1.0,
            "top_k": knobs.top_k if drawing and knobs.top_k < vocab else -1,
            "max_tokens": sequence.job.limit,
            "stop": [id_ for id_ in stop if 0 <= id_ < vocab],
            "top": knobs.top,
            "stream": any(isinstance(one, str) for one in params.stop or ()),
        }

    def _withdraw(self, draw: _Draw) -> None:
        """Make vLLM forget a job."""
        keys = [key for key in draw.rows if self._keys.pop(key, None) is not None]
        draw.rows = {}
        if keys and self._life.ready:
            self._life.send({"op": "cancel", "keys": keys})

    # ---- from vLLM ----

    def _take(self, frame: Frame) -> None:
        match frame["op"]:
            case "drawn":
                self._note(frame)
                for part in frame["parts"]:
                    self._push(*part)
            case "alive":
                self._note(frame)
            case "adapter":
                key = self._shelf.lost(frame["id"])
                log.warning("vLLM cannot load the adapter %s: %s; our engine samples from it", key, frame["error"])
                if key is not None:
                    self._routes.refuse(key)
            case "failed":
                self._hand_over(frame["key"], frame["error"])
            case other:
                raise BackendFault(f"vLLM's process sent {other!r}, which means nothing.")

    def _note(self, frame: Frame) -> None:
        """What vLLM did since it last told, and for whom."""
        rows = self._rows()
        if rows and frame["steps"]:
            began_at = time.time() - frame["seconds"]
            self._spent.append(Spent(began_at, frame["seconds"], tuple(rows), frame["steps"]))

    def _push(self, key: str, tokens: list[int], logprobs: list[float], tops: list[Any], ended: bool) -> None:
        draw = self._keys.get(key)
        if draw is None:
            return  # given up meanwhile
        sequence = draw.rows[key]
        for i, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            if not math.isfinite(logprob):
                self._fail(draw, _broken(sequence))
                return
            if sequence.push(token, logprob, (tops[i][0], tops[i][1]) if tops else None):
                self._whole(draw, key, ended)
                return
        if ended:
            self._fail(draw, BackendFault(f"vLLM ended a sequence after {len(sequence.tokens)} tokens."))

    def _whole(self, draw: _Draw, key: str, ended: bool) -> None:
        """A sequence is complete; vLLM, which need not know of our stop, is told if it goes on."""
        del draw.rows[key], self._keys[key]
        if not ended and self._life.ready:
            self._life.send({"op": "cancel", "keys": [key]})
        self._settle(draw)

    def _settle(self, draw: _Draw) -> None:
        if draw.done:
            del self._draws[draw.job.request]
            self._finished.append((draw.job.request, draw.output()))

    def _hand_over(self, key: str, why: str) -> None:
        """vLLM will not draw this: our engine does."""
        draw = self._keys.get(key)
        if draw is None:
            return
        request = draw.job.request
        log.warning("vLLM does not draw %s: %s; our engine does", request, why)
        self.cancel(request)
        try:
            self._engine.add(draw.job.source)
        except OpenRLError as error:
            self._finished.append((request, error))

    def _begin_again(self) -> None:
        """vLLM is gone, with all that it had in hand: the next one draws it again, with the same seeds."""
        self._shelf.clear()
        self._keys.clear()
        for draw in list(self._draws.values()):
            draw.deaths += draw.sent and not self._life.planned
            if self._life.hopeless:
                self._fail(draw, self._life.fault())
            elif draw.deaths >= _DEATHS:
                self._fail(draw, BackendFault(f"vLLM ended {_DEATHS} times with this request in hand."))
            else:
                self._renew(draw)

    def _fail(self, draw: _Draw, error: OpenRLError) -> None:
        self.cancel(draw.job.request)
        self._finished.append((draw.job.request, error))

    # ---- our engine ----

    def _engine_turn(self) -> None:
        began_at, start = time.time(), time.perf_counter()
        finished = self._engine.step()
        seconds = time.perf_counter() - start
        rows = [*self._engine.active, *(request for request, _ in finished)]
        self._spent.append(Spent(began_at, seconds, tuple(rows), 1))
        for request, result in finished:
            draw = self._draws.get(request)
            if draw is None:
                self._finished.append((request, result))
            elif isinstance(result, OpenRLError):
                self._fail(draw, result)
            else:
                draw.prompt = result
                self._settle(draw)


def _broken(sequence: Sequence) -> BadRequest:
    return BadRequest(
        f"the model's logits are not finite at token {sequence.length} of sample {sequence.index}.",
        "The adapter's weights have probably diverged: sample from an earlier checkpoint.",
    )
