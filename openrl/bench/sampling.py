"""Sampling speed: against `generate`, against vLLM, with many adapters, and with a shared prompt."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from openrl.bench import vllm_pipe
from openrl.bench.result import Finding, Rates, Result
from openrl.bench.rounds import Side, Work, compare
from openrl.bench.served import ServedLoop, model_input, params
from openrl.bench.stage import BEST_PLAIN, OURS, PLAIN, Stage
from openrl.bench.workload import Tokens

CONCURRENCY = (1, 8, 32)
_PROMPT = 32
_NEW = 48
_ADAPTERS = 8
_GROUP = 16
_LONG_PROMPT = 512


def decoding(stage: Stage, result: Result, vllm_python: Path | None = None) -> None:
    """Decode rates at several numbers of concurrent requests, ours, `generate`'s and, if there is one, vLLM's."""
    ours = ServedLoop(stage.door, stage.rank)
    sides: dict[str, Side] = {OURS: ours, **stage.plain()}
    if vllm_python is not None:
        sides["vLLM"] = vllm_pipe.VllmSide(vllm_python, stage.folder, stage.rank, stage.threads)
    by_count = {count: _decode(stage, result, sides, count) for count in CONCURRENCY}
    busy = by_count[max(CONCURRENCY)]
    faster = max((PLAIN, BEST_PLAIN), key=busy.median)
    detail = f"the faster of its two dtypes: {faster}; against {PLAIN} {busy.ratio(OURS, PLAIN):.2f}x"
    result.findings.append(
        Finding("decoding 32 at once against generate", busy.ratio(OURS, faster), "x", 2.5, detail=detail)
    )
    own = busy.median(OURS) / by_count[1].median(OURS)
    result.findings.append(Finding("decoding 32 at once against 1", own, "x", 12))
    if "vLLM" in sides:
        for count, rates in by_count.items():
            result.findings.append(Finding(f"decoding {count} at once against vLLM", rates.ratio(OURS, "vLLM"), "x", 2))
    _many_adapters(stage, result, ours)
    ours.close()
    for side in sides.values():
        if isinstance(side, vllm_pipe.VllmSide):
            side.close()


def _decode(stage: Stage, result: Result, sides: dict[str, Side], count: int) -> Rates:
    prompts = stage.workload(seed=4).prompts(count, _PROMPT)
    rates = compare(f"sample {count} at once", sides, _draw(prompts), stage.rounds, stage.tick)
    result.rates.append(rates)
    return rates


def _draw(prompts: list[Tokens]) -> Work:
    return lambda side: side.sample(prompts, _NEW)


def _many_adapters(stage: Stage, result: Result, one: ServedLoop) -> None:
    many = ServedLoop(stage.door, stage.rank, adapters=_ADAPTERS)
    prompts = stage.workload(seed=5).prompts(max(CONCURRENCY), _PROMPT)
    sides: dict[str, Side] = {"one adapter": one, "8 adapters": many}
    rates = compare("sample 32 at once", sides, _draw(prompts), stage.rounds, stage.tick)
    many.close()
    result.rates.append(rates)
    share = 100 * rates.ratio("8 adapters", "one adapter")
    result.findings.append(Finding("8 adapters in a batch against one", share, "%", 60))


def shared_prompt(stage: Stage, result: Result) -> None:
    """Time to the first tokens of 16 samples of one long prompt, and of 16 prompts of that length."""
    ours = ServedLoop(stage.door, stage.rank)
    sampler, work = ours.samplers[0], stage.workload(seed=6)
    shared: list[float] = []
    separate: list[float] = []
    for _ in range(stage.rounds + 1):
        prompt = work.sequence(_LONG_PROMPT)
        started = time.perf_counter()
        sampler.sample(model_input(prompt), _GROUP, params(1)).result()
        shared.append(time.perf_counter() - started)
        prompts = work.prompts(_GROUP, _LONG_PROMPT)
        started = time.perf_counter()
        for future in [sampler.sample(model_input(p), 1, params(1)) for p in prompts]:
            future.result()
        separate.append(time.perf_counter() - started)
        stage.tick("a shared prompt")
    ours.close()
    group, alone = statistics.median(shared[1:]), statistics.median(separate[1:])
    detail = f"{1000 * group:.0f} ms against {1000 * alone:.0f} ms"
    what = "first tokens of 16 samples of a 512-token prompt against 16 prompts"
    result.findings.append(Finding(what, alone / group, "x", 5, detail=detail))
