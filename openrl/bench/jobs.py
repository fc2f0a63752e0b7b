"""Several RL-like jobs on one device: how much they get done together, and how equally."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from tinker import types

from openrl.bench.lanes import Lanes, recorded
from openrl.bench.result import Finding, Result
from openrl.bench.served import Door, model_input, params, policy_datum
from openrl.bench.stage import Stage
from openrl.bench.workload import Example, Workload

COUNTS = (1, 2, 3, 8)
PICTURED = (1, 2, 3)
_REWARD_S = 1.0
_PROMPT, _GROUP, _NEW = 12, 4, 12  # sizes as in a small task: pig latin, a short sum


@dataclass(frozen=True, slots=True)
class Outcome:
    """Tokens a second of each job, sampled and trained ones together, and what the device did meanwhile."""

    rates: tuple[float, ...]
    lanes: Lanes

    @property
    def total(self) -> float:
        return sum(self.rates)


def several_jobs(stage: Stage, result: Result, seconds: float) -> dict[int, Outcome]:
    """1, 2, 3 and 8 equal jobs: sample a group, wait a second for rewards, train, take a step, sample anew."""
    outcomes: dict[int, Outcome] = {}
    for count in COUNTS:
        outcomes[count] = _run(
            stage.door, [stage.workload(seed=100 + job) for job in range(count)], stage.rank, seconds
        )
        stage.tick(f"{count} jobs")
    most, one = outcomes[max(COUNTS)], outcomes[1]
    totals = ", ".join(f"{count}: {outcome.total:.0f}" for count, outcome in outcomes.items())
    gain = Finding(
        "8 jobs with 1 s rewards against 1", most.total / one.total, "x", 4, detail=f"tokens/s by jobs: {totals}"
    )
    shares = "tokens/s of each: " + ", ".join(f"{rate:.0f}" for rate in most.rates)
    result.findings += [
        gain,
        Finding("Jain's fairness index of 8 equal jobs", jain(most.rates), "", 0.95, detail=shares),
    ]
    return outcomes


def jain(shares: Sequence[float]) -> float:
    """Jain's index, (sum x)^2 / (n sum x^2): 1 when all get the same, 1/n when one gets all (Jain, Chiu, Hawe 1984)."""
    return sum(shares) ** 2 / (len(shares) * sum(x * x for x in shares))


def _run(door: Door, works: Sequence[Workload], rank: int, seconds: float) -> Outcome:
    jobs = [_Job(door, work, rank) for work in works]
    with ThreadPoolExecutor(len(jobs)) as pool:
        list(pool.map(_Job.round, jobs))  # does not count
        began = time.time()
        list(pool.map(lambda job: job.work(began + seconds), jobs))
    lanes = recorded(door, began, began + seconds)
    rates = tuple(job.rate for job in jobs)
    for job in jobs:
        job.close()
    return Outcome(rates, lanes)


class _Job:
    """One client with a session, a run and a sampler of its own."""

    def __init__(self, door: Door, work: Workload, rank: int) -> None:
        self._service = door.service()
        self._trainer = self._service.create_lora_training_client(door.model, rank=rank).result()
        self._sampler = self._trainer.save_weights_and_get_sampling_client().result()
        self._work_load = work
        self.rate = 0.0

    def close(self) -> None:
        self._service.close("success").result()

    def work(self, until: float) -> None:
        """Rounds until the time is up; the rate is over the time that the whole rounds took."""
        began, tokens = time.time(), 0
        while time.time() < until:
            tokens += self.round()
        self.rate = tokens / (time.time() - began)

    def round(self) -> int:
        """One round; returns its tokens: drawn ones and trained ones."""
        prompt = self._work_load.sequence(_PROMPT)
        drawn = self._sampler.sample(model_input(prompt), _GROUP, params(_NEW)).result().sequences
        time.sleep(_REWARD_S)
        examples = [Example(np.concatenate([prompt, np.array(s.tokens, np.int32)]), _PROMPT - 1) for s in drawn]
        passed = self._trainer.forward_backward([policy_datum(e) for e in examples], "importance_sampling")
        stepped = self._trainer.optim_step(types.AdamParams(learning_rate=1e-5))
        self._sampler = self._trainer.save_weights_and_get_sampling_client().result()
        passed.result()
        stepped.result()
        return sum(len(s.tokens) for s in drawn) + sum(example.length for example in examples)


class Background:
    """Something done over and over in a thread while a `with` block lasts; its error is raised at the end of it."""

    def __init__(self, action: Callable[[], object]) -> None:
        self._action = action
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self) -> Background:
        self._ended = self._pool.submit(self._loop)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown()
        self._ended.result()

    def _loop(self) -> None:
        while not self._stop.is_set():
            self._action()
