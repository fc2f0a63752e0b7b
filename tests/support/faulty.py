"""Backends with planted mistakes, to show that the self-test finds them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from openrl.backends.base import Backend, SampleJob, TrainBackend, TrainItem
from openrl.checkpoints.peft import HEAD_NAME, read_adapter, write_adapter
from openrl.errors import OpenRLError
from openrl.types import (
    AdamParams,
    AdapterRef,
    Array,
    OptimOutput,
    RequestId,
    RunId,
    SampledSequence,
    SampleOutput,
    TrainOutput,
    TrainSpec,
)

Outcomes = dict[RequestId, TrainOutput | OpenRLError]
Samples = list[tuple[RequestId, SampleOutput | OpenRLError]]


class Trainer:
    """A trainer that passes everything on; faults override."""

    def __init__(self, inner: TrainBackend) -> None:
        self.inner = inner

    def create(self, run: RunId, spec: TrainSpec) -> None:
        self.inner.create(run, spec)

    def drop(self, run: RunId) -> None:
        self.inner.drop(run)

    def train_pass(self, items: tuple[TrainItem, ...]) -> Iterator[Outcomes]:
        return self.inner.train_pass(items)

    def optim_step(self, run: RunId, adam: AdamParams) -> OptimOutput:
        return self.inner.optim_step(run, adam)

    def save(self, run: RunId, into: Path, *, optimizer: bool, gradients: bool) -> None:
        self.inner.save(run, into, optimizer=optimizer, gradients=gradients)

    def load(self, run: RunId, source: Path, *, optimizer: bool) -> None:
        self.inner.load(run, source, optimizer=optimizer)


@dataclass
class Sampler:
    """A sampler that passes jobs on as `job` changes them, and outputs as `output` does."""

    backend: Backend
    job: Callable[[SampleJob], SampleJob] = lambda job: job
    output: Callable[[SampleJob, SampleOutput], SampleOutput] = lambda _job, output: output
    _jobs: dict[RequestId, SampleJob] = field(default_factory=dict[RequestId, SampleJob])

    def add(self, job: SampleJob) -> None:
        self._jobs[job.request] = job
        self.backend.sample.add(self.job(job))

    def cancel(self, request: RequestId) -> None:
        self.backend.sample.cancel(request)

    def step(self) -> Samples:
        return [
            (request, self.output(self._jobs[request], found) if isinstance(found, SampleOutput) else found)
            for request, found in self.backend.sample.step()
        ]

    @property
    def busy(self) -> bool:
        return self.backend.sample.busy

    @property
    def active(self) -> list[RequestId]:
        return self.backend.sample.active

    @property
    def waiting(self) -> int:
        return self.backend.sample.waiting


# ---- trainers ----


class WrongScale(Trainer):
    """alpha is 16: every adapter counts half (A1)."""

    def __init__(self, inner: TrainBackend, scratch: Path) -> None:
        super().__init__(inner)
        self._scratch = Copies(scratch, lambda name, t: t / 2 if name.endswith("B") else t)

    def load(self, run: RunId, source: Path, *, optimizer: bool) -> None:
        self.inner.load(run, self._scratch.of(source), optimizer=optimizer)


class Mean(Trainer):
    """Losses are divided by the number of tokens (L3)."""

    def train_pass(self, items: tuple[TrainItem, ...]) -> Iterator[Outcomes]:
        return self.inner.train_pass(tuple(map(self._averaged, items)))

    def _averaged(self, item: TrainItem) -> TrainItem:
        count = sum(len(datum.tokens) for datum in item.payload.data)
        data = tuple(
            replace(d, inputs={**d.inputs, "weights": (d.inputs.get("weights", np.ones(1)) / count).astype(np.float32)})
            if "weights" in d.inputs
            else d
            for d in item.payload.data
        )
        return replace(item, payload=replace(item.payload, data=data))


class FrozenBetas(Trainer):
    """Adam's betas are those of the first step (O3)."""

    def __init__(self, inner: TrainBackend) -> None:
        super().__init__(inner)
        self._first: dict[RunId, AdamParams] = {}

    def optim_step(self, run: RunId, adam: AdamParams) -> OptimOutput:
        first = self._first.setdefault(run, adam)
        return self.inner.optim_step(run, replace(adam, beta1=first.beta1, beta2=first.beta2))


class ForgottenGradients(Trainer):
    """A pass replaces the gradient of the one before it, instead of adding to it (G1): weights are loaded anew."""

    def __init__(self, inner: TrainBackend, scratch: Path) -> None:
        super().__init__(inner)
        self._scratch = scratch
        self._numbers = itertools.count()

    def train_pass(self, items: tuple[TrainItem, ...]) -> Iterator[Outcomes]:
        for item in items:
            if item.backward:
                folder = self._scratch / f"kept-{next(self._numbers)}"
                folder.mkdir()
                self.inner.save(item.run, folder, optimizer=True, gradients=False)
                self.inner.load(item.run, folder, optimizer=True)
        return self.inner.train_pass(items)


class LostStep(Trainer):
    """The count of steps is not restored (O11)."""

    def load(self, run: RunId, source: Path, *, optimizer: bool) -> None:
        self.inner.load(run, source, optimizer=False)


# ---- samplers ----


class Copies:
    """Adapter folders with changed tensors, each made once."""

    def __init__(self, scratch: Path, change: Callable[[str, Array], Array | None]) -> None:
        self._scratch = scratch
        self._change = change
        self._made: dict[Path, Path] = {}

    def of(self, source: Path) -> Path:
        if source not in self._made:
            read = read_adapter(source)
            changed = {name: self._change(name, tensor) for name, tensor in read.tensors.items()}
            target = self._scratch / f"copy-{len(self._made)}"
            target.mkdir()
            write_adapter(target, read.spec, {n: t for n, t in changed.items() if t is not None}, "")
            self._made[source] = target
        return self._made[source]


def without_head(scratch: Path) -> Callable[[SampleJob], SampleJob]:
    """The unembed adapter is dropped, as vLLM does without a word (A9); one of nothing else does nothing."""
    copies = Copies(scratch, lambda name, t: np.zeros_like(t) if name.startswith(HEAD_NAME) else t)

    def change(job: SampleJob) -> SampleJob:
        if job.adapter is None:
            return job
        # Another key: the sampler may hold the whole adapter under its own.
        return replace(job, adapter=AdapterRef(f"{job.adapter.key}/headless", copies.of(job.adapter.folder)))

    return change


def stale_prefix() -> Callable[[SampleJob], SampleJob]:
    """A prompt is continued under the weights it was first seen with."""
    seen: dict[bytes, AdapterRef | None] = {}

    def change(job: SampleJob) -> SampleJob:
        return replace(job, adapter=seen.setdefault(job.payload.prompt.tobytes(), job.adapter))

    return change


def with_params(**changes: object) -> Callable[[SampleJob], SampleJob]:
    """Parameters of requests are overridden; greedy ones are left alone."""

    def change(job: SampleJob) -> SampleJob:
        params = job.payload.params
        if params.temperature == 0:
            return job
        return replace(job, payload=replace(job.payload, params=replace(params, **changes)))

    return change


def with_top(vocab: int) -> Callable[[SampleJob], SampleJob]:
    """All logprobs of each drawn token's place come along, for `raw` and `renormalised`."""
    return lambda job: replace(job, payload=replace(job.payload, topk_sample_logprobs=vocab))


def raw(job: SampleJob, output: SampleOutput) -> SampleOutput:
    """Logprobs are those of temperature 1 (S1)."""
    return _changed(output, lambda ids, top: top * (job.payload.params.temperature or 1.0))


def renormalised(job: SampleJob, output: SampleOutput) -> SampleOutput:
    """Logprobs are those after top-p and top-k (S2)."""
    params = job.payload.params

    def cut(ids: Array, top: Array) -> Array:
        mass = np.exp(top).cumsum()
        count = int(np.searchsorted(mass, params.top_p)) + 1 if params.top_p < 1 else len(top)
        count = min(count, params.top_k) if params.top_k > 0 else count
        return np.where(np.arange(len(top)) < count, top, -np.inf)

    return _changed(output, cut)


def _changed(output: SampleOutput, change: Callable[[Array, Array], Array]) -> SampleOutput:
    """Each drawn token's logprob from its place's changed and normalised distribution."""

    def sequence(one: SampledSequence) -> SampledSequence:
        assert one.topk is not None
        logprobs: list[float] = []
        for token, ids, top in zip(one.tokens, one.topk.ids, one.topk.logprobs, strict=True):
            changed = change(ids, top.astype(np.float64))
            changed = changed - np.log(np.exp(changed).sum())
            logprobs.append(float(changed[ids.tolist().index(int(token))]))
        return replace(one, logprobs=np.array(logprobs, np.float32))

    return replace(output, sequences=tuple(map(sequence, output.sequences)))


def no_stop_token(job: SampleJob, output: SampleOutput) -> SampleOutput:
    """The token that stopped a sequence is cut off (S8)."""

    def sequence(one: SampledSequence) -> SampledSequence:
        if one.stop_reason != "stop":
            return one
        return replace(one, tokens=one.tokens[:-1], logprobs=one.logprobs[:-1])

    return replace(output, sequences=tuple(map(sequence, output.sequences)))


def shifted(job: SampleJob, output: SampleOutput) -> SampleOutput:
    """Prompt logprobs lack the first token's place (S5)."""
    found = output.prompt_logprobs
    return output if found is None else replace(output, prompt_logprobs=np.append(found[1:], np.float32(np.nan)))


FAULTS: Mapping[str, Callable[[Backend, Path, int], Backend]] = {
    "scale 16/r": lambda b, scratch, _: replace(b, train=WrongScale(b.train, scratch)),
    "mean": lambda b, _s, _v: replace(b, train=Mean(b.train)),
    "frozen betas": lambda b, _s, _v: replace(b, train=FrozenBetas(b.train)),
    "forgotten gradients": lambda b, scratch, _: replace(b, train=ForgottenGradients(b.train, scratch)),
    "lost step": lambda b, _s, _v: replace(b, train=LostStep(b.train)),
    "no unembed adapter": lambda b, scratch, _: replace(b, sample=Sampler(b, without_head(scratch))),
    "stale prefix cache": lambda b, _s, _v: replace(b, sample=Sampler(b, stale_prefix())),
    "temperature ignored": lambda b, _s, _v: replace(b, sample=Sampler(b, with_params(temperature=1.0))),
    "top-k ignored": lambda b, _s, _v: replace(b, sample=Sampler(b, with_params(top_k=-1))),
    "seed ignored": lambda b, _s, _v: replace(b, sample=Sampler(b, with_params(seed=None))),
    "raw logprobs": lambda b, _s, vocab: replace(b, sample=Sampler(b, with_top(vocab), raw)),
    "logprobs after top-p": lambda b, _s, vocab: replace(b, sample=Sampler(b, with_top(vocab), renormalised)),
    "no stop token": lambda b, _s, _v: replace(b, sample=Sampler(b, output=no_stop_token)),
    "prompt logprobs off by one": lambda b, _s, _v: replace(b, sample=Sampler(b, output=shifted)),
}
