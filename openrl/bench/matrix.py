"""Training against the machine's matrix rate, measured with PyTorch."""

from __future__ import annotations

import statistics
import time

import torch

from openrl.backends.torch.flops import matrix_rate, step_flops
from openrl.bench.result import Finding, Result
from openrl.bench.served import ServedLoop
from openrl.bench.stage import Stage
from openrl.bench.workload import trained_tokens


def matrix_share(stage: Stage, result: Result) -> None:
    """How much of the machine's measured bf16 matrix rate a step on 512-token sequences gets to use."""
    ours = ServedLoop(stage.door, stage.rank)
    batch = stage.workload(seed=1).even(count=8, length=512)
    ours.train_step(batch[:1])
    seconds: list[float] = []
    for _ in range(stage.rounds):
        started = time.perf_counter()
        ours.train_step(batch)
        seconds.append(time.perf_counter() - started)
        stage.tick("train 8 x 512 tokens")
    ours.close()
    torch.set_num_threads(stage.threads)
    rate = matrix_rate(torch.bfloat16)
    took = statistics.median(seconds)
    used = step_flops(stage.folder, [example.length for example in batch], stage.rank) / took
    detail = f"{used / 1e9:.0f} of {rate / 1e9:.0f} GFLOP/s, {trained_tokens(batch) / took:.0f} tokens/s"
    what = "share of the bf16 matrix rate, 8 x 512 tokens"
    result.findings.append(Finding(what, 100 * used / rate, "%", 30, detail=detail))
