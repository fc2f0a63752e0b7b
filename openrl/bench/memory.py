"""Peak memory of a training step, for a small vocabulary and for a large one."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
import transformers

from openrl.bench.result import Finding, Result
from openrl.bench.served import ServedLoop
from openrl.bench.stage import Stage

LARGE_VOCABULARY = 262_144
_TOKENS = (8, 512)  # sequences and their length: 4,096 tokens
_LIMIT_MB = 600
_PERIOD_S = 0.002


class Peak:
    """The most resident memory seen of a process, above what it had at the start, in bytes."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._before = self._highest = process.memory_info().rss

    def look(self) -> None:
        self._highest = max(self._highest, self._process.memory_info().rss)

    @property
    def extra(self) -> int:
        return self._highest - self._before


@contextmanager
def watching(process: psutil.Process) -> Generator[Peak]:
    """Looks at a process's memory every few milliseconds within the block."""
    peak, done = Peak(process), threading.Event()

    def look() -> None:
        while not done.wait(_PERIOD_S):
            peak.look()

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()


def step_memory(stage: Stage, result: Result) -> None:
    """Peak extra memory of one step with 4,096 tokens, over that of a worker that has done a tiny one."""
    ours = ServedLoop(stage.door, stage.rank)
    work = stage.workload(seed=3)
    ours.train_step(work.even(count=1, length=8))
    with watching(stage.worker()) as peak:
        ours.train_step(work.even(*_TOKENS))
    ours.close()
    stage.tick("memory of a step")
    what = f"peak extra memory of a step with 4,096 tokens, vocabulary {stage.vocabulary:,}"
    result.findings.append(Finding(what, peak.extra / 1e6, "MB", _LIMIT_MB, at_most=True))


def large_vocabulary_model(like: Path, into: Path) -> Path:
    """A model of the sizes of the one in `like`, with random weights and a vocabulary of 262,144."""
    config = transformers.AutoConfig.from_pretrained(like)
    config.vocab_size = LARGE_VOCABULARY
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(into)
    for file in like.glob("token*"):
        (into / file.name).write_bytes(file.read_bytes())
    return into
