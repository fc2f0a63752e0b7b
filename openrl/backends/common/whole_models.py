"""A whole sampling half: the base model with its adapters, and whole models beside it.

A checkpoint of all parameters is a model of its own: it is opened from its folder, with a sampler, when something is
to be drawn from it. Few are open at a time. One that is idle goes for another that is wanted, the one used longest ago
first, when its folder is gone, or when training needs its memory.

Samplers take turns on the device; each batches its own requests.
"""

from __future__ import annotations

import gc
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from openrl.backends.base import SampleBackend, SampleJob
from openrl.checkpoints.full import is_full
from openrl.errors import OpenRLError, OutOfMemory
from openrl.types import AdapterRef, RequestId, SampleOutput

_OPEN = 2  # whole models beside the base
_GIB = 1 << 30

Finished = list[tuple[RequestId, SampleOutput | OpenRLError]]
Opener = Callable[[Path], SampleBackend]  # a sampler of the model in a folder


class Room(Protocol):
    """The device's memory."""

    def needed(self) -> int:
        """Bytes of another model once it is open."""
        ...

    def free(self) -> int:
        """Bytes that may still be taken."""
        ...

    def release(self) -> None:
        """Models were let go of: give back what the engine keeps for reuse."""
        ...

    def is_out_of_memory(self, error: RuntimeError | MemoryError) -> bool:
        """Whether an allocation that failed is behind an error."""
        ...


class Sampling:
    """Implements `SampleBackend`. `base` samples the base model and adapters; `opener` opens a whole model of the
    same shape."""

    def __init__(self, base: SampleBackend, room: Room, opener: Opener, limit: int = _OPEN) -> None:
        self._base = base
        self._room = room
        self._opener = opener
        self._limit = limit
        self._open: OrderedDict[str, tuple[SampleBackend, AdapterRef]] = OrderedDict()  # used longest ago first
        self._pending: deque[SampleJob] = deque()  # of whole models, in the order in which they came
        self._finished: Finished = []
        self._turn = 0

    @property
    def busy(self) -> bool:
        """Whether `step` has work."""
        return bool(self._pending or self._finished) or any(sampler.busy for sampler in self._all())

    @property
    def active(self) -> list[RequestId]:
        """The request of each sequence that has a row now."""
        return [request for sampler in self._all() for request in sampler.active]

    @property
    def waiting(self) -> int:
        """Sequences that have not begun, but for those whose model is not open: others need not wait for these."""
        return sum(sampler.waiting for sampler in self._all())

    def add(self, job: SampleJob) -> None:
        """Queue a job. Raises `BadRequest` if it can never run."""
        if job.adapter is not None and is_full(job.adapter.folder):
            self._pending.append(job)
        else:
            self._base.add(job)

    def cancel(self, request: RequestId) -> None:
        """Forget a job; unknown ones are ignored."""
        self._pending = deque(job for job in self._pending if job.request != request)
        for sampler in self._all():
            sampler.cancel(request)

    def step(self) -> Finished:
        """One turn of one of the samplers that have work, or the opening of one."""
        if not self._admit():
            samplers = [sampler for sampler in self._all() if sampler.busy]
            if samplers:
                self._turn += 1
                self._finished += samplers[self._turn % len(samplers)].step()
        finished, self._finished = self._finished, []
        return finished

    def release_idle(self) -> None:
        """Give back the memory of whole models that nothing is drawn from now."""
        self._close([key for key, (sampler, _) in self._open.items() if not sampler.busy])

    def _all(self) -> Iterator[SampleBackend]:
        yield self._base
        for sampler, _ in self._open.values():
            yield sampler

    def _admit(self) -> bool:
        """Hand the first pending jobs to their samplers; whether one had to be opened, which is a turn by itself.

        First come, first served: a model that waits for a place is not overtaken by those that are open.
        """
        self._close([key for key, (sampler, ref) in self._open.items() if not (sampler.busy or is_full(ref.folder))])
        while self._pending:
            job = self._pending[0]
            assert job.adapter is not None
            if job.adapter.key in self._open:
                self._pending.popleft()
                self._hand_over(job, job.adapter.key)
                continue
            return self._make_place(job.adapter)
        return False

    def _hand_over(self, job: SampleJob, key: str) -> None:
        self._open.move_to_end(key)
        sampler, _ = self._open[key]
        try:
            # Within its sampler the model is the base: there is no adapter.
            sampler.add(SampleJob(job.request, job.payload, None, job.weight))
        except OpenRLError as error:
            self._finished.append((job.request, error))

    def _make_place(self, ref: AdapterRef) -> bool:
        """Open a model; False if others have to end first. What cannot be opened fails its jobs."""
        while len(self._open) >= self._limit or self._room.needed() > self._room.free():
            idle = [key for key, (sampler, _) in self._open.items() if not sampler.busy]
            if not idle:
                if self._open:
                    return False
                self._fail(ref, self._too_large())
                return True
            self._close(idle[:1])
        try:
            self._open[ref.key] = self._opener(ref.folder), ref
        except OpenRLError as error:
            self._fail(ref, error)
        except (RuntimeError, MemoryError) as error:
            if not self._room.is_out_of_memory(error):
                raise
            self._fail(ref, self._too_large())
        return True

    def _fail(self, ref: AdapterRef, error: OpenRLError) -> None:
        """Fail the jobs that wait for a model."""
        doomed = [job for job in self._pending if job.adapter is not None and job.adapter.key == ref.key]
        gone = {job.request for job in doomed}
        self._pending = deque(job for job in self._pending if job.request not in gone)
        self._finished += [(job.request, error) for job in doomed]

    def _too_large(self) -> OutOfMemory:
        needed, free = self._room.needed(), self._room.free()
        return OutOfMemory(
            f"sampling from this checkpoint of all parameters takes {needed / _GIB:.2f} GiB for another model "
            f"beside the base; {free / _GIB:.2f} GiB are free.",
            "Free memory, or serve the checkpoint's folder as a model of its own.",
        )

    def _close(self, keys: list[str]) -> None:
        if not keys:
            return
        for key in keys:
            del self._open[key]
        gc.collect()  # a sampler refers to itself
        self._room.release()
