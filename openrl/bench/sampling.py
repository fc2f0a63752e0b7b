"""Sampling speed: against `generate`, against vLLM, with many adapters, and with a shared prompt."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from openrl.bench.result import Finding, Rates, Result
from openrl.bench.rounds import Drawer, compare
from openrl.bench.served import ServedLoop, model_input, params
from openrl.bench.stage import OURS, PLAIN, Stage
from openrl.bench.workload import Tokens

CONCURRENCY = (1, 8, 32)
_PROMPT = 32
_NEW = 48
_ADAPTERS = 8


def decoding(stage: Stage, result: Result, vllm_python: Path | None = None) -> None:
    """Decode rates at several numbers of concurrent requests, ours, `generate`'s and, if there is one, vLLM's."""
    ours = ServedLoop(stage.door, stage.rank)
    with ExitStack() as stack:
        sides: dict[str, Drawer] = {OURS: ours, **stage.plain()}
        if vllm_python is not None:
            from openrl.bench.vllm_pipe import VllmSide

            vllm = sides["vLLM"] = VllmSide(vllm_python, stage.folder, stage.rank, stage.threads)
            stack.callback(vllm.close)
        _at_once(stage, result, sides)
    _many_adapters(stage, result, ours)
    ours.close()


def _at_once(stage: Stage, result: Result, sides: dict[str, Drawer]) -> None:
    by_count = {count: _decode(stage, result, sides, count) for count in CONCURRENCY}
    busy = by_count[max(CONCURRENCY)]
    faster = max(stage.plain(), key=busy.median)
    what, target, detail = f"decoding 32 at once against {faster}", None, ""
    if PLAIN in sides:
        what, target = "decoding 32 at once against generate", 2.5
        detail = f"the faster of its two dtypes: {faster}; against {PLAIN} {busy.ratio(OURS, PLAIN):.2f}x"
    result.findings.append(Finding(what, busy.ratio(OURS, faster), "x", target, detail=detail))
    own = busy.median(OURS) / by_count[1].median(OURS)
    target = 12 if stage.mlx is None else None
    result.findings.append(Finding("decoding 32 at once against 1", own, "x", target))
    if "vLLM" in sides:
        for count, rates in by_count.items():
            result.findings.append(Finding(f"decoding {count} at once against vLLM", rates.ratio(OURS, "vLLM"), "x", 2))


def _decode(stage: Stage, result: Result, sides: dict[str, Drawer], count: int) -> Rates:
    prompts = stage.workload(seed=4).prompts(count, _PROMPT)
    rates = compare(f"sample {count} at once", sides, _draw(prompts), stage.rounds, stage.tick)
    result.rates.append(rates)
    return rates


def _draw(prompts: list[Tokens]) -> Callable[[Drawer], int]:
    return lambda side: side.sample(prompts, _NEW)


def _many_adapters(stage: Stage, result: Result, one: ServedLoop) -> None:
    many = ServedLoop(stage.door, stage.rank, adapters=_ADAPTERS)
    prompts = stage.workload(seed=5).prompts(max(CONCURRENCY), _PROMPT)
    sides: dict[str, Drawer] = {"one adapter": one, "8 adapters": many}
    rates = compare("sample 32 at once", sides, _draw(prompts), stage.rounds, stage.tick)
    many.close()
    result.rates.append(rates)
    share = 100 * rates.ratio("8 adapters", "one adapter")
    result.findings.append(Finding("8 adapters in a batch against one", share, "%", 60))


def shared_prompt(stage: Stage, result: Result) -> None:
    """Time to the first tokens of samples of one long prompt, and of as many prompts of that length."""
    group, length = stage.size.shared
    ours = ServedLoop(stage.door, stage.rank)
    sampler, work = ours.samplers[0], stage.workload(seed=6)
    shared: list[float] = []
    separate: list[float] = []
    for _ in range(stage.rounds + 1):
        prompt = work.sequence(length)
        started = time.perf_counter()
        sampler.sample(model_input(prompt), group, params(1)).result()
        shared.append(time.perf_counter() - started)
        prompts = work.prompts(group, length)
        started = time.perf_counter()
        for future in [sampler.sample(model_input(p), 1, params(1)) for p in prompts]:
            future.result()
        separate.append(time.perf_counter() - started)
        stage.tick("a shared prompt")
    ours.close()
    together, alone = statistics.median(shared[1:]), statistics.median(separate[1:])
    detail = f"{1000 * together:.0f} ms against {1000 * alone:.0f} ms"
    what = f"first tokens of {group} samples of a {length}-token prompt against {group} prompts"
    # All but one of the prompts are saved; what that can give goes with their number.
    result.findings.append(Finding(what, alone / together, "x", 5 if group >= 16 else None, detail=detail))
