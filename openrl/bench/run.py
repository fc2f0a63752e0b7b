"""Takes the parts of the benchmark one after another, on servers that the caller has started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from openrl.bench import jobs, latency, picture, sampling, training
from openrl.bench.result import Result
from openrl.bench.stage import Stage


class Part(StrEnum):
    """What can be measured."""

    OVERHEAD = "overhead"
    TRAIN = "train"
    MATRIX = "matrix"
    JOINED = "joined"
    SAMPLE = "sample"
    PREFIX = "prefix"
    JOBS = "jobs"
    LATENCY = "latency"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Extras:
    """`vllm_python`: an interpreter that has vLLM, or None; `picture`: the PNG of device use to write, or None."""

    vllm_python: Path | None = None
    picture: Path | None = None


def measure(parts: tuple[Part, ...], stage: Stage, result: Result, extras: Extras) -> None:
    """Measure the parts, in the order of `Part`, and add what was found to `result`."""
    for part in Part:
        if part in parts:
            _work(part, extras)(stage, result)


def _work(part: Part, extras: Extras) -> Callable[[Stage, Result], None]:
    def decoding(stage: Stage, result: Result) -> None:
        sampling.decoding(stage, result, extras.vllm_python)

    def several_jobs(stage: Stage, result: Result) -> None:
        outcomes = jobs.several_jobs(stage, result, stage.size.seconds)
        if extras.picture is not None:
            picture.draw({count: outcomes[count].lanes for count in jobs.PICTURED}, extras.picture)

    def latencies(stage: Stage, result: Result) -> None:
        latency.beside_training(stage, result)
        latency.flood(stage, result)

    # These two need PyTorch, whatever the server computes with.
    def matrix_share(stage: Stage, result: Result) -> None:
        from openrl.bench import matrix

        matrix.matrix_share(stage, result)

    def step_memory(stage: Stage, result: Result) -> None:
        from openrl.bench import memory

        memory.step_memory(stage, result)

    work: dict[Part, Callable[[Stage, Result], None]] = {
        Part.OVERHEAD: latency.overhead,
        Part.TRAIN: training.against_plain,
        Part.MATRIX: matrix_share,
        Part.JOINED: training.joined_runs,
        Part.SAMPLE: decoding,
        Part.PREFIX: sampling.shared_prompt,
        Part.JOBS: several_jobs,
        Part.LATENCY: latencies,
        Part.MEMORY: step_memory,
    }
    return work[part]
