"""Training speed: against plain loops, and of joined runs."""

from __future__ import annotations

import statistics
import time

from tinker import types

from openrl.bench.result import Finding, Result
from openrl.bench.rounds import Side, compare
from openrl.bench.served import ServedLoop, datum, policy_datum
from openrl.bench.stage import BEST_PLAIN, MLX, OURS, PLAIN, Stage
from openrl.bench.workload import Example, trained_tokens

_LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo")
_JOINED_RUNS = 8
_TARGETS = {PLAIN: 5, BEST_PLAIN: 2, MLX: None}


def against_plain(stage: Stage, result: Result) -> None:
    """A step on mixed lengths with half the positions masked, and one on short sequences."""
    ours = ServedLoop(stage.door, stage.rank)
    sides: dict[str, Side] = {OURS: ours, **stage.plain()}
    work = stage.workload(seed=0)
    count, low, high = stage.size.mixed
    mixed, short = work.mixed(count, low, high), work.short(stage.size.short)
    taste = work.mixed(4, low, high)
    # The mixed batch takes minutes on a small machine; one round of it weighs as much as several of others.
    rounds = max(1, stage.rounds // 3)
    rates = compare(
        f"train {count} sequences of {low}-{high} tokens, half masked",
        sides,
        lambda side: _step(side, mixed),
        rounds,
        stage.tick,
        warm=lambda side: _step(side, taste),
    )
    result.rates.append(rates)
    for other in stage.plain():
        what = f"training on mixed lengths against {other}"
        result.findings.append(Finding(what, rates.ratio(OURS, other), "x", _TARGETS[other]))
    name = f"train {len(short)} sequences of 40-60 tokens"
    result.rates.append(compare(name, sides, lambda side: _step(side, short), stage.rounds, stage.tick))
    ours.close()


def _step(side: Side, batch: list[Example]) -> int:
    side.train_step(batch)
    return trained_tokens(batch)


def joined_runs(stage: Stage, result: Result) -> None:
    """Passes of runs with different adapters and losses, sent together and one after another."""
    ours = ServedLoop(stage.door, stage.rank, adapters=_JOINED_RUNS)
    work = stage.workload(seed=2)
    batches = [work.even(count=4, length=12 + run % 4) for run in range(_JOINED_RUNS)]
    together, apart = [], []
    for _ in range(stage.rounds + 1):
        apart.append(_passes(ours, batches, wait=True))
        together.append(_passes(ours, batches, wait=False))
        stage.tick("8 runs together and apart")
    ours.close()
    first, second = statistics.median(apart[1:]), statistics.median(together[1:])
    detail = f"{1000 * first:.0f} ms one after another, {1000 * second:.0f} ms together"
    result.findings.append(
        Finding("8 runs, 4 short datums each, joined against apart", first / second, "x", 2, detail=detail)
    )


def _passes(ours: ServedLoop, batches: list[list[Example]], *, wait: bool) -> float:
    """Seconds for one `forward_backward` of every run; the steps that empty the gradients again do not count."""
    started = time.perf_counter()
    pending = []
    for number, (trainer, batch) in enumerate(zip(ours.trainers, batches, strict=True)):
        loss = _LOSSES[number % len(_LOSSES)]
        make = datum if loss == "cross_entropy" else policy_datum
        future = trainer.forward_backward([make(example) for example in batch], loss)
        if wait:
            future.result()
        pending.append(future)
    for future in pending:
        future.result()
    seconds = time.perf_counter() - started
    for trainer in ours.trainers:
        trainer.optim_step(types.AdamParams(learning_rate=1e-4)).result()
    return seconds
