"""A sampler over the fake of vLLM's child process, our engine replaced by one that notes what it was given."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from openrl.backends.base import SampleJob, VllmSpec
from openrl.backends.common.stops import Stops
from openrl.backends.vllm.life import Life
from openrl.backends.vllm.plan import Opening
from openrl.backends.vllm.sampler import VllmSampler
from openrl.backends.vllm.wholes import Wholes
from openrl.checkpoints.full import MODEL_CONFIG, MODEL_FILE
from openrl.checkpoints.peft import write_adapter
from openrl.errors import OpenRLError
from openrl.types import AdapterRef, LoraSpec, RequestId, SampledSequence, SampleOutput, SamplePayload, SamplingParams
from support import fake_vllm
from support.apart import Driver

SHAPES = {"model.embed_tokens.weight": (5, 2), "model.norm.weight": (2,)}

OPENING = Opening(
    folder="model",
    dtype="float32",
    vocab=100_000,
    hidden=2,
    context=64,
    rows=4,
    adapters=2,
    rank=8,
    fraction=0.5,
    gpu=None,
    eager=True,
    eos=(5,),
    env={},
    where="cpu",
)


class FakeEngine:
    """Our engine's place: answers each job with token 1 and, if asked, prompt logprobs of -2."""

    def __init__(self) -> None:
        self.jobs: list[SampleJob] = []
        self.seen: list[SampleJob] = []

    busy = property(lambda self: bool(self.jobs))
    active = property(lambda self: [])
    waiting = property(lambda self: len(self.jobs))

    def add(self, job: SampleJob) -> None:
        self.jobs.append(job)
        self.seen.append(job)

    def cancel(self, request: RequestId) -> None:
        self.jobs = [job for job in self.jobs if job.request != request]

    def step(self) -> list[tuple[RequestId, SampleOutput | OpenRLError]]:
        jobs, self.jobs = self.jobs, []
        one = SampledSequence(np.array([1], np.int32), np.array([-1.0], np.float32), "length")
        return [
            (
                job.request,
                SampleOutput(
                    (one,) * job.payload.num_samples,
                    np.full(len(job.payload.prompt), -2.0, np.float32) if job.payload.prompt_logprobs else None,
                ),
            )
            for job in jobs
        ]


class Stage:
    """A sampler over the fake, and what the fake was sent."""

    def __init__(self, folder: Path, lives: list[dict[str, Any]], hang_seconds: float, opening: Opening) -> None:
        self.folder = folder
        (folder / "lives.json").write_text(json.dumps(lives))
        python = folder / "python"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{fake_vllm.__file__}" "{folder}" "$@"\n')
        python.chmod(0o755)
        self.woken = threading.Event()
        spec = VllmSpec(scratch=folder / "scratch", python=python, hang_seconds=hang_seconds)
        self.life = Life(opening, python, spec, self.woken.set)
        self.engine = FakeEngine()
        self.base = _model(folder / "base", SHAPES)

    def open(self) -> None:
        self.life.open()
        self.sampler = VllmSampler(
            self.life, self.engine, Stops(self.folder, frozenset(OPENING.eos)), Wholes(self.base, 12)
        )
        self.driver = Driver(self.sampler, self.woken)

    def sent(self, life: int, op: str) -> list[dict[str, Any]]:
        """The frames of a kind that one of the fakes was sent."""
        lines = (self.folder / f"frames-{life}.jsonl").read_text().splitlines()
        return [frame for frame in map(json.loads, lines) if frame.get("op") == op]

    def lives(self) -> int:
        return len(list(self.folder.glob("frames-*.jsonl")))

    def whole(self, name: str, shapes: dict[str, tuple[int, ...]] = SHAPES) -> AdapterRef:
        """A checkpoint of all parameters."""
        return AdapterRef(name, _model(self.folder / name, shapes))

    def adapter(self, name: str, rank: int = 4, *, head: bool = False) -> AdapterRef:
        folder = self.folder / name
        folder.mkdir()
        layer = "lm_head" if head else "model.layers.0.mlp.up_proj"
        tensors = {
            f"{layer}.lora_A": np.zeros((rank, 2), np.float32),
            f"{layer}.lora_B": np.zeros((3, rank), np.float32),
        }
        write_adapter(folder, LoraSpec(rank=rank, seed=0), tensors, "")
        return AdapterRef(name, folder)


def _model(folder: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    folder.mkdir()
    (folder / MODEL_CONFIG).write_text("{}")
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, folder / MODEL_FILE)
    return folder


MakeStage = Callable[..., Stage]


def stages(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeStage]:
    """For a fixture: `stage(life, life, ...)`: what each start of vLLM is to do; opened unless told otherwise."""
    monkeypatch.setattr("openrl.backends.vllm.life._FIRST_PAUSE", 0.01)
    open_ones: list[Stage] = []

    def make(
        *lives: dict[str, Any], hang_seconds: float = 60.0, opened: bool = True, opening: Opening = OPENING
    ) -> Stage:
        made = Stage(folder, list(lives) or [{}], hang_seconds, opening)
        open_ones.append(made)
        if opened:
            made.open()
        return made

    yield make
    for made in open_ones:
        made.life.close()


def ask(num_samples: int = 1, /, *, prompt_logprobs: bool = False, topk: int = 0, **params: Any) -> SamplePayload:
    usual: dict[str, Any] = {"max_tokens": 3, "seed": 10, "stop": ()}
    return SamplePayload(
        np.array([3, 4], np.int32),
        num_samples,
        SamplingParams(**{**usual, **params}),
        prompt_logprobs=prompt_logprobs,
        topk_sample_logprobs=topk,
    )


def tokens(output: SampleOutput | OpenRLError) -> list[list[int]]:
    assert isinstance(output, SampleOutput), output
    return [sequence.tokens.tolist() for sequence in output.sequences]
