"""A backend on trial: the protocol of `openrl.backends.base` in the few words that the cases need."""

from __future__ import annotations

import itertools
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from openrl.backends.base import Backend, SampleJob, TrainItem
from openrl.checkpoints.peft import (
    GRADIENTS_FILE,
    OPTIMIZER_FILE,
    read_adapter,
    read_tensors,
)
from openrl.errors import BackendFault, OpenRLError
from openrl.selftest.expected import Expected
from openrl.selftest.measures import Tolerance, apart, flat, tolerance
from openrl.selftest.models import SEED, World
from openrl.types import (
    AdamParams,
    AdapterRef,
    Array,
    Datum,
    LoraSpec,
    RequestId,
    RunId,
    SampleOutput,
    SamplePayload,
    TrainOutput,
    TrainPayload,
    TrainSpec,
)

PATIENCE = 120.0  # seconds that a sample may take
_PAUSE = 0.002
_SESSION = "selftest"


class Subject:
    """An opened backend with a family's model. Runs live until `clear`."""

    def __init__(self, name: str, backend: Backend, world: World, expected: Expected, scratch: Path) -> None:
        """`name`: the backend's in the registry. `scratch`: an empty folder for checkpoints."""
        self.name = name
        self.world = world
        self.expected = expected
        self.backend = backend
        self.limit: Tolerance = tolerance(backend.report.dtype)
        self._scratch = scratch
        self._numbers = itertools.count()
        self._runs: list[RunId] = []
        self._jobs: set[RequestId] = set()

    def clear(self) -> None:
        """Leave nothing for the next case."""
        for job in self._jobs:
            self.backend.sample.cancel(job)
        for run in self._runs:
            self.backend.train.drop(run)
        self._jobs.clear()
        self._runs.clear()

    # -- runs --

    def fresh(self, spec: TrainSpec) -> RunId:
        run = self._new_run()
        self.backend.train.create(run, spec)
        return run

    def hold(self, adapter: str) -> RunId:
        """A new run with one of the world's adapters; "base": one that does nothing yet."""
        if adapter == "base":
            return self.fresh(LoraSpec(rank=4, seed=SEED))
        return self.load(self.world.adapters[adapter])

    def load(self, folder: Path, *, optimizer: bool = False, run: RunId | None = None) -> RunId:
        run = run or self._new_run()
        self.backend.train.load(run, folder, optimizer=optimizer)
        return run

    def save(self, run: RunId, *, optimizer: bool = False, gradients: bool = False) -> Path:
        folder = self._scratch / f"saved-{next(self._numbers)}"
        folder.mkdir()
        self.backend.train.save(run, folder, optimizer=optimizer, gradients=gradients)
        return folder

    def step(self, run: RunId, adam: AdamParams) -> Mapping[str, float]:
        return self.backend.train.optim_step(run, adam).metrics

    def parameters(self, run: RunId) -> Mapping[str, Array]:
        return read_adapter(self.save(run)).tensors

    def gradient(self, run: RunId) -> Mapping[str, Array]:
        """The accumulator by parameter name; empty while it is zero."""
        file = self.save(run, gradients=True) / GRADIENTS_FILE
        return read_tensors(file) if file.exists() else {}

    def moments(self, run: RunId) -> Mapping[str, Array]:
        """`m.NAME`, `v.NAME` and `t` (O11)."""
        return read_tensors(self.save(run, optimizer=True) / OPTIMIZER_FILE)

    def _new_run(self) -> RunId:
        run = RunId(f"{_SESSION}:train:{next(self._numbers)}")
        self._runs.append(run)
        return run

    # -- passes --

    def item(self, run: RunId, payload: TrainPayload, *, backward: bool = True) -> TrainItem:
        return TrainItem(RequestId(f"{run}:{next(self._numbers)}"), run, payload, backward)

    def train(self, *items: TrainItem) -> list[TrainOutput | OpenRLError]:
        """A whole pass; each item must be answered exactly once."""
        found: dict[RequestId, TrainOutput | OpenRLError] = {}
        for finished in self.backend.train.train_pass(items):
            if finished.keys() & found.keys():
                raise BackendFault("an item of a pass was answered twice")
            found.update(finished)
        if found.keys() != {item.request for item in items}:
            raise BackendFault(f"{len(items)} items of a pass got {len(found)} answers")
        return [found[item.request] for item in items]

    def forward(self, run: RunId, payload: TrainPayload) -> TrainOutput:
        return trained(self.train(self.item(run, payload, backward=False)))[0]

    def forward_backward(self, run: RunId, payload: TrainPayload) -> TrainOutput:
        return trained(self.train(self.item(run, payload)))[0]

    def next_logprobs(self, run: RunId, sequences: Sequence[list[int]]) -> list[Array]:
        """The trainer's logprobs of each token but the first."""
        datums = [Datum(np.array(x[:-1], np.int32), {"target_tokens": np.array(x[1:], np.int64)}) for x in sequences]
        return list(self.forward(run, TrainPayload(tuple(datums), "cross_entropy")).logprobs)

    # -- samples --

    def adapter(self, name: str) -> AdapterRef | None:
        """A sampler's adapter by the world's name; "base" is none."""
        return None if name == "base" else AdapterRef(f"{self.world.family}/{name}", self.world.adapters[name])

    def snapshot(self, run: RunId) -> AdapterRef:
        """A run as it is now, for sampling."""
        folder = self.save(run)
        return AdapterRef(f"{run}/{folder.name}", folder)

    def job(self, payload: SamplePayload, adapter: str | AdapterRef = "base") -> SampleJob:
        ref = self.adapter(adapter) if isinstance(adapter, str) else adapter
        return SampleJob(RequestId(f"{_SESSION}:sample:{next(self._numbers)}"), payload, ref)

    def sample(self, payload: SamplePayload, adapter: str | AdapterRef = "base") -> SampleOutput:
        return self.samples(self.job(payload, adapter))[0]

    def samples(self, *jobs: SampleJob) -> list[SampleOutput]:
        """Jobs that are under way together; raises the first one's error."""
        self.add(*jobs)
        found = self.finish(*jobs)
        outputs = [found[job.request] for job in jobs]
        for output in outputs:
            if isinstance(output, OpenRLError):
                raise output
        return [output for output in outputs if isinstance(output, SampleOutput)]

    def add(self, *jobs: SampleJob) -> None:
        for job in jobs:
            self.backend.sample.add(job)
            self._jobs.add(job.request)

    def finish(self, *jobs: SampleJob) -> dict[RequestId, SampleOutput | OpenRLError]:
        """Take turns until these jobs are done; what else ended meanwhile is in the answer, too."""
        wanted = {job.request for job in jobs}
        found: dict[RequestId, SampleOutput | OpenRLError] = {}
        begun = time.monotonic()
        while not wanted <= found.keys():
            self._await_work(begun, len(wanted - found.keys()))
            for request, output in self.backend.sample.step():
                if request in found or request not in self._jobs:
                    raise BackendFault(f"the sampler answered {request}, which is not under way")
                found[request] = output
                self._jobs.discard(request)
        return found

    def _await_work(self, begun: float, missing: int) -> None:
        """A sampler that works in a process of its own has nothing to take now and then; others have lost the job."""
        while not self.backend.sample.busy and self.backend.apart is not None and time.monotonic() - begun < PATIENCE:
            time.sleep(_PAUSE)
        if not self.backend.sample.busy:
            raise BackendFault(f"the sampler has nothing to do, and {missing} requests are not answered")
        if time.monotonic() - begun > PATIENCE:
            raise BackendFault(f"{missing} requests were not answered within {PATIENCE:.0f} s")

    def cancel(self, job: SampleJob) -> None:
        self.backend.sample.cancel(job.request)
        self._jobs.discard(job.request)


def gaps(subject: Subject, run: RunId, prompt: Sequence[int], drawn: SampleOutput) -> tuple[float, float]:
    """The worst token and KL v2 (S14) of drawn sequences against the trainer's logprobs of the same tokens."""
    trained = subject.next_logprobs(run, [[*prompt, *x.tokens.tolist()] for x in drawn.sequences])
    found = [x.logprobs for x in drawn.sequences]
    wanted = [lp[len(prompt) - 1 :] for lp in trained]
    return apart(found, wanted), float(0.5 * np.mean(np.square(flat(found) - flat(wanted))))


def same_tensors(one: Path, other: Path) -> bool:
    """Whether two safetensors files hold the same, bit for bit."""
    a, b = read_tensors(one), read_tensors(other)
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and a[n].shape == b[n].shape and a[n].tobytes() == b[n].tobytes() for n in a
    )


def trained(outcomes: Sequence[TrainOutput | OpenRLError]) -> list[TrainOutput]:
    """Outcomes that must be results; raises the first error."""
    for outcome in outcomes:
        if isinstance(outcome, OpenRLError):
            raise outcome
    return [outcome for outcome in outcomes if isinstance(outcome, TrainOutput)]


@contextmanager
def scratch() -> Generator[Path]:
    """A folder that is gone afterwards."""
    with TemporaryDirectory(prefix="openrl-selftest-") as folder:
        yield Path(folder)
