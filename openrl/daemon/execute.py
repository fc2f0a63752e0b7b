"""Carrying out one batch: bring its runs onto the device, run the operation, commit what came of it."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass

from openrl.backends.base import TrainItem
from openrl.daemon.codec import Codec, Result
from openrl.daemon.futures import Effect, Futures
from openrl.daemon.ledger import note_result
from openrl.daemon.recovery import Recovery
from openrl.daemon.runs import MUTATING, Entry, RunHandle
from openrl.daemon.saving import Saving
from openrl.daemon.timing import Timing
from openrl.daemon.work import LoadState, OptimStep, SaveExternal, SaveSampler, SaveState, Train
from openrl.errors import OpenRLError, OutOfMemory, WorkerDied
from openrl.store import runs
from openrl.store.records import RunState
from openrl.types import FullSpec, ModelInfo, Op, OptimOutput, SessionId, TrainOutput, TrainSpec
from openrl.validation import check_full, check_lora
from openrl.workers import messages
from openrl.workers.protocol import Worker

_BIG_RESULT = 4096  # logprobs in a result above which it is encoded off the event loop

Member = tuple[RunHandle, Entry]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an operation gave: something to encode, and what else is committed with it."""

    output: Result
    effect: Effect | None = None
    state: RunState | None = None  # the run's state from now on
    stale: str | None = None  # a checkpoint folder that nothing names any more once this is committed


class Executor:
    """Runs batches; owns nothing, so that every step's state is either in the store or in the handles."""

    def __init__(self, codec: Codec, futures: Futures, recovery: Recovery, saving: Saving) -> None:
        self._codec = codec
        self._futures = futures
        self._recovery = recovery
        self._saving = saving
        self.spent: Callable[[SessionId, float], None] = lambda *_: None  # told of the tokens that worked

    async def run(
        self, members: list[Member], worker: Worker, info: ModelInfo, weight: float, freed: Callable[[], None]
    ) -> None:
        """Carry out a batch. Raises only `WorkerDied`: the members that had not ended then are still queued.

        `weight` is that of the batch's sessions together. `freed` is called once the device has done its part, while
        the results are still on their way into the store.
        """
        present: list[Member] = []
        for handle, entry in members:
            entry.timing = Timing(dispatched_at=time.time())
            try:
                if entry.work is None:
                    check_spec(handle.run.spec, info)
                await self._recovery.bring(handle, worker)
                entry.timing.sent_at = time.time()
                present.append((handle, entry))
            except WorkerDied:
                raise
            except OpenRLError as error:
                await self._not_there(handle, entry, error)
        if present and isinstance(present[0][1].work, Train):
            await self._train(present, worker, weight, freed)
        elif present:
            applied = _Countdown(len(present), freed)
            await all_of(self._single(handle, entry, worker, applied) for handle, entry in present)

    async def _train(
        self, members: list[Member], worker: Worker, weight: float, freed: Callable[[], None] = lambda: None
    ) -> None:
        items: list[TrainItem] = []
        for handle, entry in members:
            assert isinstance(entry.work, Train)
            work = entry.work
            items.append(TrainItem(entry.id, handle.id, work.payload, work.backward, work.program))
        try:
            results = await self._pass(members, messages.TrainPass(tuple(items), weight), worker)
        except WorkerDied:
            raise
        except OpenRLError as error:
            if len(members) == 1:
                await self.fail(*members[0], error)
                return
            for member in members:  # someone's data broke the pass; alone, each fails or works for itself
                await self._train([member], worker, weight)
            return
        freed()
        await all_of(self._end(handle, entry, results[entry.id]) for handle, entry in members)

    async def _end(self, handle: RunHandle, entry: Entry, result: TrainOutput | OpenRLError) -> None:
        if isinstance(result, OpenRLError):
            await self.fail(handle, entry, result)
        else:
            await self._finish(handle, entry, Outcome(result))

    async def _pass(self, members: list[Member], work: messages.TrainPass, worker: Worker) -> messages.PassResult:
        """Run a pass; each member gets its tokens' share of the device time."""
        watch = messages.Stopwatch()
        results = await worker.call(work, watch)
        assert isinstance(results, dict)
        tokens = sum(entry.tokens for _, entry in members) or 1
        for _, entry in members:
            entry.timing.watch = messages.Stopwatch(watch.started_at, watch.seconds * entry.tokens / tokens)
        return results

    async def _single(self, handle: RunHandle, entry: Entry, worker: Worker, applied: Callable[[], None]) -> None:
        try:
            outcome = await self._apply(handle, entry, worker)
        except WorkerDied:
            raise
        except OpenRLError as error:
            # A step on a non-finite gradient fails, but clears the gradient (O8): a replay has to do the same.
            await self.fail(handle, entry, error, keep_payload=entry.op is Op.OPTIM_STEP)
            return
        finally:
            applied()
        await self._finish(handle, entry, outcome)

    async def _apply(self, handle: RunHandle, entry: Entry, worker: Worker) -> Outcome:
        match entry.work:
            case None:  # `bring` made the adapter
                return Outcome({"model_id": handle.id, "type": "create_model"}, state=RunState.LIVE)
            case OptimStep(adam):
                output = await worker.call(messages.OptimStep(handle.id, adam), entry.timing.watch)
                assert isinstance(output, OptimOutput)
                return Outcome(output)
            case SaveState() as save:
                saved = await self._saving.training(handle, worker, save)
                return Outcome({**saved.answer, "type": "save_weights"}, saved.effect, stale=saved.stale)
            case SaveSampler() as save:
                saved = await self._saving.sampler(handle, worker, save)
                return Outcome({**saved.answer, "type": "save_weights_for_sampler"}, saved.effect)
            case SaveExternal() as save:
                saved = await self._saving.external(handle, worker, save)
                return Outcome({**saved.answer, "type": "save_weights_external"}, saved.effect)
            case LoadState() as load:
                loaded = await self._saving.load(handle, worker, entry.id, load)
                answer = {"path": load.path, "model_id": handle.id, "type": "load_weights"}
                return Outcome(answer, loaded, state=RunState.LIVE)
            case _:  # Unload
                await worker.call(messages.DropRun(handle.id))
                handle.worker = None
                return Outcome({"model_id": handle.id, "type": "unload_model"}, state=RunState.CLOSED)

    async def _finish(self, handle: RunHandle, entry: Entry, outcome: Outcome) -> None:
        if isinstance(outcome.output, TrainOutput) and sum(x.size for x in outcome.output.logprobs) > _BIG_RESULT:
            content_type, body = await asyncio.to_thread(self._codec.encode_result, entry.op, outcome.output)
        else:
            content_type, body = self._codec.encode_result(entry.op, outcome.output)
        await self._futures.finish(
            entry.id,
            content_type,
            body,
            dispatched_at=entry.timing.dispatched_at,
            started_at=entry.timing.started_at,
            keep_payload=entry.op in MUTATING,
            effect=_with_cursor(handle, _noted(handle, entry, outcome), outcome.state),
        )
        self.spent(handle.run.session_id, entry.tokens)
        handle.queue.advance()
        if outcome.state is not None:
            handle.set_state(outcome.state)
        if outcome.stale is not None:
            await self._saving.remove_stale(outcome.stale)

    async def fail(self, handle: RunHandle, entry: Entry, error: OpenRLError, *, keep_payload: bool = False) -> None:
        """End the run's head with an error; the run itself goes on (O9)."""
        creating = entry.seq == 0
        state = RunState.BROKEN if creating else None
        effect = _with_cursor(handle, None, state, str(error))
        timing = entry.timing
        sent = timing.started_at if timing.sent_at else None
        await self._futures.fail(
            entry.id,
            error,
            dispatched_at=timing.dispatched_at,
            started_at=sent,
            keep_payload=keep_payload,
            effect=effect,
        )
        handle.queue.advance()
        if state is not None:
            handle.set_state(state, str(error))

    async def _not_there(self, handle: RunHandle, entry: Entry, error: OpenRLError) -> None:
        """A run that could not be made, or whose state cannot be brought back: now, for lack of memory, or ever."""
        if entry.seq == 0 or isinstance(error, OutOfMemory):
            await self.fail(handle, entry, error)
        else:
            await self.break_run(handle, f"the run's state could not be restored: {error}")

    async def break_run(self, handle: RunHandle, reason: str) -> None:
        """End a run that cannot go on; its checkpoints stay."""
        error = OpenRLError(reason, "Create a training client from its newest checkpoint.")
        waiting = handle.queue.waiting()
        handle.queue.clear()
        handle.set_state(RunState.BROKEN, reason)
        next_seq = handle.queue.next_seq

        def effect(db: sqlite3.Connection) -> None:
            runs.set_state(db, handle.id, RunState.BROKEN, reason)
            runs.set_cursor(db, handle.id, next_seq, time.time())

        for entry in waiting:
            await self._futures.fail(entry.id, error, effect=effect)


class _Countdown:
    """Calls `done` when it has been called itself `count` times."""

    def __init__(self, count: int, done: Callable[[], None]) -> None:
        self._left = count
        self._done = done

    def __call__(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._done()


async def all_of(works: Iterable[Coroutine[None, None, None]]) -> None:
    """Do these side by side, so that their commits are one. Raises only when all have ended: none goes on unseen."""
    ended = await asyncio.gather(*works, return_exceptions=True)
    errors = [error for error in ended if error is not None]
    for error in sorted(errors, key=lambda error: not isinstance(error, WorkerDied)):
        raise error


def check_spec(spec: TrainSpec, info: ModelInfo) -> None:
    """Raise BadRequest if the model cannot carry such an adapter (A5, A6), or its backend cannot train it whole."""
    if isinstance(spec, FullSpec):
        check_full(info, train_attn=True, train_mlp=True, train_unembed=True)
        return
    check_lora(
        spec.rank,
        info,
        train_attn=spec.train_attn,
        train_mlp=spec.train_mlp,
        train_unembed=spec.train_unembed,
    )


def _noted(handle: RunHandle, entry: Entry, outcome: Outcome) -> Effect:
    """An outcome's own effect, and what the ledger keeps of it."""

    def write(db: sqlite3.Connection) -> None:
        if outcome.effect is not None:
            outcome.effect(db)
        note_result(db, handle, entry, outcome.output)

    return write


def _with_cursor(handle: RunHandle, effect: Effect | None, state: RunState | None, reason: str = "") -> Effect:
    """Commit the cursor with the request that moved it, so that a restart knows what has ended."""
    next_seq, now = handle.queue.after_head(), time.time()

    def write(db: sqlite3.Connection) -> None:
        runs.set_cursor(db, handle.id, next_seq, now)
        if state is not None:
            runs.set_state(db, handle.id, state, reason)
        if effect is not None:
            effect(db)

    return write
