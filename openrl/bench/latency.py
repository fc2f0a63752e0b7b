"""How long small requests take: alone, beside training, and when very many come at once."""

from __future__ import annotations

import time

from tinker import APIFuture, TinkerError, types

from openrl.bench.jobs import Background
from openrl.bench.lanes import recorded
from openrl.bench.result import Finding, Result, percentiles
from openrl.bench.served import ServedLoop, model_input, params, step_latencies
from openrl.bench.stage import Stage

_STEPS = 200
_PROBES = 60


def overhead(stage: Stage, result: Result) -> None:
    """The round trip of an empty optimizer step."""
    p50, p95 = percentiles(step_latencies(stage.door, _STEPS))
    stage.tick("empty steps")
    what = "round trip of an empty optim_step, p50"
    result.findings.append(Finding(what, p50, "ms", 5, at_most=True, detail=f"p95 {p95:.1f} ms, {_STEPS} steps"))


def beside_training(stage: Stage, result: Result) -> None:
    """A one-token sample while another job trains flat out, against the longest micro-batch of that job."""
    trainer, sampler = ServedLoop(stage.door, stage.rank), ServedLoop(stage.door, stage.rank)
    work = stage.workload(seed=7)
    batch, prompt = work.even(*stage.size.behind), work.sequence(16)
    trainer.train_step(batch[:1])
    seconds: list[float] = []
    began = time.time()
    with Background(lambda: trainer.train_step(batch)):
        for _ in range(_PROBES):
            started = time.perf_counter()
            sampler.samplers[0].sample(model_input(prompt), 1, params(1)).result()
            seconds.append(time.perf_counter() - started)
            time.sleep(0.05)
    longest = 1000 * recorded(stage.door, began, time.time()).longest("train")
    trainer.close()
    sampler.close()
    stage.tick("samples beside training")
    p50, p95 = percentiles(seconds)
    detail = f"p50 {p50:.0f} ms, p95 {p95:.0f} ms, longest micro-batch {longest:.0f} ms"
    what = "1-token sample beside training: p95 in longest micro-batches"
    result.findings.append(Finding(what, p95 / longest, "x", 1.5, at_most=True, detail=detail))


def flood(stage: Stage, result: Result) -> None:
    """Very many one-token samples at once, beside a training loop and heartbeats."""
    trainer, sampler = ServedLoop(stage.door, stage.rank), ServedLoop(stage.door, stage.rank)
    work = stage.workload(seed=8)
    batch, prompts = work.even(count=8, length=64), work.prompts(stage.size.flood, 16)
    beats: list[float] = []
    with stage.door.http() as client:
        created = client.post("create_session", json={"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}).json()

        def beat() -> None:
            started = time.perf_counter()
            client.post("session_heartbeat", json={"session_id": created["session_id"]}).raise_for_status()
            beats.append(time.perf_counter() - started)
            time.sleep(0.05)

        started = time.perf_counter()
        with Background(lambda: trainer.train_step(batch)), Background(beat):
            futures = [sampler.samplers[0].sample(model_input(p), 1, params(1)) for p in prompts]
            failed = sum(_failed(future) for future in futures)
        seconds = time.perf_counter() - started
    trainer.close()
    sampler.close()
    stage.tick(f"{len(prompts)} samples at once")
    p50, p95 = percentiles(beats)
    detail = f"{len(beats)} heartbeats, p50 {p50:.0f} ms; all samples after {seconds:.1f} s"
    result.findings += [
        Finding(f"{len(prompts)} one-token samples at once: failed", failed, "", 0, at_most=True),
        Finding("heartbeat p95 meanwhile", p95, "ms", 200, at_most=True, detail=detail),
    ]


def _failed(future: APIFuture[types.SampleResponse]) -> bool:
    try:
        return len(future.result().sequences) != 1
    except TinkerError:
        return True
