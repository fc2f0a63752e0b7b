"""The sampler whose tokens vLLM draws. What vLLM would answer otherwise than the rules have it, our engine answers.

vLLM works in a process of its own, so `step` only takes what has come, sends what can go, and gives the engine a turn.
Stop rules are our engine's (S8, S9), applied to the tokens as they come. Seeds are vLLM's own: a request draws the
same tokens again from the same vLLM, but others than our engine would.

vLLM holds one set of weights: the base model's, for itself and its adapters, or those of a checkpoint that is a whole
model. Others take their place while it runs (`turns` has the rule); what waits for them is sent once they are there.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import OrderedDict
from typing import Any

from openrl.backends.base import SampleBackend, SampleJob, Spent
from openrl.backends.common.sample_checks import check_payload
from openrl.backends.common.sequences import Job, Sequence, row_knobs
from openrl.backends.common.stops import Stops
from openrl.backends.vllm.adapters import Shelf
from openrl.backends.vllm.draws import Draw, draw_frame
from openrl.backends.vllm.life import Life
from openrl.backends.vllm.process import Frame
from openrl.backends.vllm.routes import Routes, asks_of_prompt, prompt_part
from openrl.backends.vllm.turns import BASE, Turns
from openrl.backends.vllm.wholes import Wholes
from openrl.errors import BackendFault, BadRequest, OpenRLError
from openrl.types import RequestId, SampleOutput, SamplerReport

log = logging.getLogger(__name__)

_DEATHS = 3  # of vLLM with a request in hand, after which the request is what kills it

Finished = list[tuple[RequestId, SampleOutput | OpenRLError]]


class VllmSampler:
    """Implements `SampleBackend` and `Apart`. `engine` is our own sampler, over the training half's weights; `wholes`
    knows which whole models vLLM can take."""

    def __init__(self, life: Life, engine: SampleBackend, stops: Stops, wholes: Wholes) -> None:
        self._life = life
        self._engine = engine
        self._stops = stops
        self._shelf = Shelf(life.opening.adapters)
        self._routes = Routes(wholes)
        self._wholes = wholes
        self._turns = Turns()
        self._draws: OrderedDict[RequestId, Draw] = OrderedDict()
        self._keys: dict[str, Draw] = {}  # of sequences that vLLM has
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
        """Sequences that have no row yet, but for those of other weights: nobody has to wait for these."""
        near = [draw for draw in self._draws.values() if draw.weights == self._turns.holds]
        return self._engine.waiting + sum(len(draw.rows) for draw in near) - len(self._rows())

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

    def _draw(self, job: SampleJob) -> Draw:
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
        draw = Draw(entry, seed, self._routes.weights(job.adapter), asks_of_prompt(payload))
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

    def _renew(self, draw: Draw) -> None:
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
        """Send the jobs whose turn it is and that have not gone yet, as far as there is room for their adapters."""
        if not self._life.ready or not self._ready_to_send():
            return
        in_use = {draw.job.adapter_key for draw in self._draws.values() if draw.sent}
        for draw in [d for d in self._draws.values() if not d.sent and self._turns.has(d.job.request)]:
            ref, number = draw.job.source.adapter, None
            if ref is not None and draw.weights == BASE:
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

    def _send(self, draw: Draw, adapter: int | None) -> None:
        draw.sent = True
        for key, sequence in draw.rows.items():
            self._keys[key] = draw
            self._life.send(draw_frame(self._life.opening, key, sequence, adapter))

    def _ready_to_send(self) -> bool:
        """Whether vLLM holds the weights of those whose turn it is; has others loaded when it is time for them."""
        while not self._turns.loading:
            queue = [(draw.job.request, draw.weights) for draw in self._draws.values() if draw.rows]
            wanted = self._turns.take(queue)
            if wanted is None:
                return True
            self._exchange(wanted)
        return False

    def _exchange(self, weights: str) -> None:
        """Have vLLM take other weights, for which something waits. Its adapters go with the old ones."""
        ref = next(draw.job.source.adapter for draw in self._draws.values() if draw.weights == weights)
        if weights != BASE and ref is not None and (why := self._wholes.misfit(ref.folder)):
            self._refuse(weights, why)  # its files have gone, or changed, since it was asked for
            return
        self._shelf.clear()
        self._turns.load(weights)
        folder = None if weights == BASE or ref is None else str(ref.folder.absolute())
        self._life.send({"op": "weights", "folder": folder})

    def _refuse(self, weights: str, why: str) -> None:
        """vLLM does not take a whole model: what waits for it is our engine's."""
        log.warning("vLLM cannot take the weights of %s: %s; our engine samples from them", weights, why)
        self._routes.refuse(weights)
        for draw in [draw for draw in self._draws.values() if draw.weights == weights]:
            self._hand_over(draw)

    def _withdraw(self, draw: Draw) -> None:
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
            case "weights":
                self._exchanged(frame)
            case "failed" if frame["key"] in self._keys:
                draw = self._keys[frame["key"]]
                log.warning("vLLM does not draw %s: %s; our engine does", draw.job.request, frame["error"])
                self._hand_over(draw)
            case "failed":
                pass  # given up meanwhile
            case other:
                raise BackendFault(f"vLLM's process sent {other!r}, which means nothing.")

    def _exchanged(self, frame: Frame) -> None:
        """vLLM has taken the weights that were to be loaded, or it has not."""
        weights = self._turns.holds
        if frame["able"] and not frame["error"]:
            self._turns.loaded(weights)
            return
        if not frame["able"]:
            self._life.lose_weights()
        doomed = {draw.weights for draw in self._draws.values()} if not frame["able"] else {weights}
        for one in sorted(doomed - {BASE}):
            self._refuse(one, frame["error"] or "what it computes with other weights is wrong")
        if frame["whole"]:
            self._turns.loaded(BASE)
        elif self._life.ready:  # else it has ended by itself meanwhile
            self._life.renew("to have the base model's weights again")

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

    def _whole(self, draw: Draw, key: str, ended: bool) -> None:
        """A sequence is complete; vLLM, which need not know of our stop, is told if it goes on."""
        del draw.rows[key], self._keys[key]
        if not ended and self._life.ready:
            self._life.send({"op": "cancel", "keys": [key]})
        self._settle(draw)

    def _settle(self, draw: Draw) -> None:
        if draw.done:
            del self._draws[draw.job.request]
            self._finished.append((draw.job.request, draw.output()))

    def _hand_over(self, draw: Draw) -> None:
        """vLLM will not draw this: our engine does."""
        request = draw.job.request
        self.cancel(request)
        try:
            self._engine.add(draw.job.source)
        except OpenRLError as error:
            self._finished.append((request, error))

    def _begin_again(self) -> None:
        """vLLM is gone, with all that it had in hand: the next one draws it again, with the same seeds."""
        loading = self._turns.holds if self._turns.loading else BASE
        self._shelf.clear()
        self._turns.clear()
        self._keys.clear()
        for draw in list(self._draws.values()):
            in_hand = draw.sent or draw.weights == loading != BASE
            draw.deaths += in_hand and not self._life.planned
            if self._life.hopeless:
                self._fail(draw, self._life.fault())
            elif draw.deaths >= _DEATHS:
                self._fail(draw, BackendFault(f"vLLM ended {_DEATHS} times with this request in hand."))
            else:
                self._renew(draw)

    def _fail(self, draw: Draw, error: OpenRLError) -> None:
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
