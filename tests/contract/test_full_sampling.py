"""Sampling from checkpoints of all parameters: exact versions beside the base model, few open at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from openrl.backends.base import Backend, SampleJob
from openrl.backends.common.whole_models import Sampling
from openrl.errors import BadRequest, OpenRLError, OutOfMemory
from openrl.types import AdamParams, AdapterRef, Datum, FloatArray, RequestId, SampleOutput, TrainPayload
from support.full import backend
from support.sampling import payload
from support.training import RUN, ce, item, run_pass

PROMPT = [5, 17, 42, 8, 61]

Folders = Callable[..., Path]


def draw(held: Backend, ref: AdapterRef | None, tokens: list[int], n: int = 1, **params: int) -> SampleOutput:
    """One request, alone."""
    asked = payload(tokens, n, **{"max_tokens": 1, "stop": (), "seed": 3, **params}, prompt_logprobs=True)  # type: ignore[arg-type]
    held.sample.add(SampleJob(RequestId("s"), asked, ref))
    while held.sample.busy:
        for _, output in held.sample.step():
            assert isinstance(output, SampleOutput), output
            return output
    raise AssertionError("the sampler lost its job")


def trainers(held: Backend, tokens: list[int]) -> FloatArray:
    """The trainer's logprobs of tokens[1:]."""
    targets = {"target_tokens": np.array(tokens[1:], np.int64)}
    data = (Datum(np.array(tokens[:-1], np.int32), targets),)
    (output,) = run_pass(held.train, item(TrainPayload(data, "cross_entropy"), backward=False)).values()  # type: ignore[arg-type]
    assert not isinstance(output, OpenRLError)
    return output.logprobs[0]


def step(held: Backend, lr: float = 0.05) -> None:
    run_pass(held.train, item(ce(12, 9)))  # type: ignore[arg-type]
    held.train.optim_step(RUN, AdamParams(learning_rate=lr))


def save(held: Backend, into: Path) -> AdapterRef:
    into.mkdir()
    held.train.save(RUN, into, optimizer=False, gradients=False)
    return AdapterRef(into.name, into)


@pytest.mark.parametrize(
    ("family", "tied", "dtype", "v2"),
    [("llama", True, "float32", 1e-8), ("gemma3", False, "float32", 1e-8), ("qwen3", True, "bfloat16", 1e-4)],
)
def test_f5_s14_s15_exact_versions(
    engine: str, family: str, tied: bool, dtype: str, v2: float, model_folder: Folders, tmp_path: Path
) -> None:
    """F5, S14, S15, C4: a sampler has the weights of its own step, later steps or not; the base stays as it is."""
    held = backend(model_folder(family, tied=tied), dtype, engine=engine)
    base = draw(held, None, PROMPT)
    step(held)
    one = save(held, tmp_path / "one")
    drawn = draw(held, one, PROMPT, 4, max_tokens=20)
    sequences = [PROMPT + s.tokens.tolist() for s in drawn.sequences]
    q = np.concatenate([s.logprobs for s in drawn.sequences]).astype(np.float64)
    told = [trainers(held, tokens) for tokens in sequences]
    lp = np.concatenate([x[len(PROMPT) - 1 :] for x in told]).astype(np.float64)
    assert 0.5 * np.mean((q - lp) ** 2) < v2
    assert np.abs(told[0][0] - _scored(base)[1]) > 1e-3
    step(held)
    two = save(held, tmp_path / "two")
    assert 0.5 * np.mean((_scored(draw(held, one, sequences[0]))[1:] - told[0]) ** 2) < v2
    assert 0.5 * np.mean((_scored(draw(held, two, sequences[0]))[1:] - trainers(held, sequences[0])) ** 2) < v2
    assert np.array_equal(_scored(draw(held, None, PROMPT))[1:], _scored(base)[1:])


def _scored(output: SampleOutput) -> FloatArray:
    assert output.prompt_logprobs is not None
    return output.prompt_logprobs


def test_weights_that_do_not_fit_fail_their_request(engine: str, model_folder: Folders, tmp_path: Path) -> None:
    """Also files that came from elsewhere: nothing but weights of the base model's shapes is opened."""
    held = backend(model_folder("llama"), engine=engine)
    ref = save(held, tmp_path / "one")
    shutil.copyfile(model_folder("llama", tied=False) / "model.safetensors", ref.folder / "model.safetensors")
    held.sample.add(SampleJob(RequestId("s"), payload([1], max_tokens=1), ref))
    ((request, error),) = held.sample.step()
    assert (request, type(error)) == ("s", BadRequest)
    assert not held.sample.busy


def test_nothing_of_a_checkpoint_counts_but_its_weights(engine: str, model_folder: Folders, tmp_path: Path) -> None:
    """Files may come from another server: they say neither how the model computes, nor what code is run for it."""
    held = backend(model_folder("llama"), engine=engine)
    step(held)
    ref, other = save(held, tmp_path / "one"), save(held, tmp_path / "two")
    foreign = {"model_type": "gpt2", "rms_norm_eps": 0.5, "model_file": "mine.py", "quantization": {"bits": 4}}
    (other.folder / "config.json").write_text(json.dumps(foreign))
    assert np.array_equal(_scored(draw(held, ref, PROMPT))[1:], _scored(draw(held, other, PROMPT))[1:])


# ---- which models are open ----


@dataclass
class Stub:
    """A sampler whose requests take `left` turns each."""

    log: list[str]
    name: str
    jobs: dict[RequestId, int] = field(default_factory=dict[RequestId, int])

    @property
    def busy(self) -> bool:
        return bool(self.jobs)

    @property
    def active(self) -> list[RequestId]:
        return list(self.jobs)

    @property
    def waiting(self) -> int:
        return 0

    def add(self, job: SampleJob) -> None:
        assert job.adapter is None or self.name == "base"
        self.jobs[job.request] = job.payload.params.max_tokens or 1

    def cancel(self, request: RequestId) -> None:
        self.jobs.pop(request, None)

    def step(self) -> list[tuple[RequestId, SampleOutput | OpenRLError]]:
        self.log.append(self.name)
        self.jobs = {request: left - 1 for request, left in self.jobs.items()}
        done = [request for request, left in self.jobs.items() if left == 0]
        for request in done:
            del self.jobs[request]
        return [(request, SampleOutput(())) for request in done]


@dataclass
class Memory:
    """Room for any number of models of 1 MiB, unless a test says how much."""

    left: int = 1 << 40

    def needed(self) -> int:
        return 1 << 20

    def free(self) -> int:
        return self.left

    def release(self) -> None:
        pass

    def is_out_of_memory(self, error: RuntimeError | MemoryError) -> bool:
        return isinstance(error, MemoryError)


class Desk:
    """A `Sampling` over stubs; `log` says who had each turn, and who was opened."""

    def __init__(self, root: Path) -> None:
        self.log: list[str] = []
        self.memory = Memory()
        self._root = root
        self.sampling = Sampling(Stub(self.log, "base"), self.memory, self._open, limit=2)
        self.count = 0

    def _open(self, folder: Path) -> Stub:
        self.log.append(f"open {folder.name}")
        return Stub(self.log, folder.name)

    def ask(self, name: str, turns: int = 1) -> RequestId:
        folder = self._root / name
        folder.mkdir(exist_ok=True)
        if name != "base":
            (folder / "config.json").write_text("{}")
        self.count += 1
        request = RequestId(f"{name}-{self.count}")
        self.sampling.add(SampleJob(request, payload([1], max_tokens=turns), AdapterRef(name, folder)))
        return request

    def run(self) -> dict[RequestId, SampleOutput | OpenRLError]:
        results: dict[RequestId, SampleOutput | OpenRLError] = {}
        while self.sampling.busy:
            results |= dict(self.sampling.step())
        return results


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_the_model_used_longest_ago_makes_way(desk: Desk) -> None:
    for name in ("a", "b", "a", "c", "a", "b"):
        desk.ask(name)
        assert len(desk.run()) == 1
    assert [entry for entry in desk.log if entry.startswith("open")] == ["open a", "open b", "open c", "open b"]


def test_others_go_on_while_a_model_waits_for_a_place(desk: Desk) -> None:
    """The third model waits for one of two busy ones; adapters and base are drawn from meanwhile, and later requests
    for the open ones do not overtake it."""
    desk.ask("a", 2)
    desk.ask("b", 6)
    third = desk.ask("c")
    desk.ask("a", 3)
    base = desk.ask("base", 1)
    results = desk.run()
    assert len(results) == 5
    opened = desk.log.index("open c")
    assert desk.log.index("base") < opened
    assert desk.log[opened:].count("a") == 3  # its second request had to wait too
    assert {third, base} <= set(results)


def test_a_model_whose_files_are_gone_is_closed_once_idle(desk: Desk, tmp_path: Path) -> None:
    desk.ask("a", 3)
    desk.sampling.step()
    desk.sampling.step()
    shutil.rmtree(tmp_path / "a")
    assert len(desk.run()) == 1  # what is under way ends
    desk.ask("b")
    desk.run()
    assert list(desk.sampling._open) == ["b"]


def test_training_gets_the_memory_of_idle_models(desk: Desk) -> None:
    desk.ask("a", 1)
    desk.ask("b", 5)
    for _ in range(4):
        desk.sampling.step()
    desk.sampling.release_idle()
    assert list(desk.sampling._open) == ["b"]


def test_what_cannot_fit_is_refused_with_the_numbers(desk: Desk) -> None:
    """Idle models go first; then it fails in words, and the rest goes on."""
    desk.ask("a")
    desk.run()
    desk.memory.left = 1 << 10
    doomed, fine = desk.ask("b"), desk.ask("base")
    results = desk.run()
    assert isinstance(results[doomed], OutOfMemory)
    assert "GiB for another model beside the base; 0.00 GiB are free" in str(results[doomed])
    assert isinstance(results[fine], SampleOutput)
    assert not desk.sampling._open


def test_a_cancelled_request_is_forgotten(desk: Desk) -> None:
    desk.sampling.cancel(desk.ask("a"))
    assert not desk.sampling.busy
    request = desk.ask("a", 9)
    desk.sampling.step()
    desk.sampling.step()
    assert desk.sampling.active == [request]
    desk.sampling.cancel(request)
    assert not desk.sampling.busy
