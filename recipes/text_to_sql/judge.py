"""Scores answers in worker processes, so that no query can hurt the training run, and scoring overlaps with it.

    with Judge() as judge:
        scores = judge.score([(item, query), ...])          # waits
        future = judge.submit([(item, query), ...])         # does not; future.result() gives the same list

A worker that dies or hangs is replaced; the answer that it was at counts as wrong, the others are scored all the
same. Measure it on this machine: `python -m openrl_recipes.text_to_sql.judge`
"""

from __future__ import annotations

import json
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from types import TracebackType

from openrl_recipes.text_to_sql.generator import make_items
from openrl_recipes.text_to_sql.item import Item
from openrl_recipes.text_to_sql.scoring import Score
from openrl_recipes.text_to_sql.worker import READY, pack

WORKER = (sys.executable, "-m", "openrl_recipes.text_to_sql.worker")
HANG_SECONDS = 5.0  # for one answer, by the clock; the worker's own limits act long before
START_SECONDS = 60.0  # for a worker to start on a busy machine

Pair = tuple[Item, str]


class JudgeError(Exception):
    """The worker processes are not there: they cannot be started, or nobody has."""


class Judge:
    """A pool of worker processes that score answers. Use it as a context manager; it may be used by many threads."""

    def __init__(
        self, workers: int = 2, *, hang_seconds: float = HANG_SECONDS, command: Sequence[str] = WORKER
    ) -> None:
        self._workers = [_Worker(command, hang_seconds) for _ in range(workers)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="judge")
        self._watchdog = threading.Thread(target=self._watch, name="judge-watchdog", daemon=True)
        self._closed = threading.Event()

    def __enter__(self) -> Judge:
        for worker in self._workers:
            worker.start()
            self._idle.put(worker)
        self._watchdog.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._closed.set()
        self._watchdog.join()
        for worker in self._workers:
            worker.stop()

    @property
    def process_ids(self) -> list[int]:
        """The processes of the workers that live now."""
        return [worker.process.pid for worker in self._workers if worker.process is not None]

    def score(self, pairs: Sequence[Pair]) -> list[Score]:
        """A score for each answer, in the order given."""
        return self.submit(pairs).result()

    def submit(self, pairs: Sequence[Pair]) -> Future[list[Score]]:
        """Start scoring and return at once. Neighbouring answers to the same item go to one worker together."""
        if not self._watchdog.is_alive():
            raise JudgeError("a Judge scores within its with block only")
        groups = [list(group) for _, group in groupby(pairs, key=lambda pair: id(pair[0]))]
        return _gather([self._threads.submit(self._judge, g[0][0], [query for _, query in g]) for g in groups])

    def _judge(self, item: Item, answers: list[str]) -> list[Score]:
        worker = self._idle.get()
        try:
            return worker.judge(pack(item.gold, item.databases), answers)
        finally:
            self._idle.put(worker)

    def _watch(self) -> None:
        """Kill workers that are over their time; their threads then see the end of their output."""
        while not self._closed.wait(0.05):
            for worker in self._workers:
                worker.kill_if_late()


class _Worker:
    """One process, used by one thread at a time; the watchdog alone looks on from another."""

    def __init__(self, command: Sequence[str], hang_seconds: float) -> None:
        self._command, self._hang_seconds = command, hang_seconds
        self._due: float | None = None  # when the watchdog loses patience; None while idle
        self._ready = False
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self._ready = False
        self.process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="ascii",  # JSON escapes everything else, lone surrogates too
            start_new_session=True,  # Ctrl-C is for the training run to handle
        )

    def stop(self) -> None:
        """Kill the process, if there is one, and close its pipes."""
        if self.process is not None:
            self.process.kill()
            try:
                self.process.communicate()
            except (OSError, ValueError):
                self.process.wait()
            self.process = None

    def judge(self, item: str, answers: list[str]) -> list[Score]:
        """Score all answers. Where the process ends early, the answer it was at is wrong and a new one goes on."""
        scores: list[Score] = []
        while len(scores) < len(answers):
            scores += self._judge_some(item, answers[len(scores) :])
        return scores

    def _judge_some(self, item: str, answers: list[str]) -> list[Score]:
        """Score until done or until the process dies, then with one more score for the answer it died of."""
        scores: list[Score] = []
        process = self._ready_process()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            self._due = time.monotonic() + self._hang_seconds
            process.stdin.write(f"{item}\n{json.dumps(answers)}\n")
            process.stdin.flush()
            for _ in answers:
                scores.append(_parse(process.stdout.readline()))
                self._due = time.monotonic() + self._hang_seconds
        except (OSError, ValueError):
            scores.append(Score(error="the worker process died or hung"))
            self._due = None
            self.stop()
        self._due = None
        return scores

    def _ready_process(self) -> subprocess.Popen[str]:
        """The running process once it has said that it is ready; a new one if there is none or it died while idle."""
        if self.process is not None and self.process.poll() is not None:
            self.stop()
        for _ in range(2):
            if self.process is None:
                self.start()
            assert self.process is not None
            assert self.process.stdout is not None
            self._due = time.monotonic() + START_SECONDS
            if self._ready or self.process.stdout.readline() == READY + "\n":
                self._ready = True
                return self.process
            self.stop()
        raise JudgeError(f"the scoring process does not start: {' '.join(self._command)}")

    def kill_if_late(self) -> None:
        due, process = self._due, self.process
        if due is not None and process is not None and time.monotonic() > due:
            process.kill()


def _parse(line: str) -> Score:
    """A score from a worker's line. Raises `ValueError` for anything else, such as the empty line of a dead worker."""
    match json.loads(line):
        case [bool(match), bool(parses), bool(runs), float() | int() as columns, float() | int() as values, str(error)]:
            return Score(match, parses, runs, float(columns), float(values), error)
        case other:
            raise ValueError(f"not a score: {other}")


def _gather(futures: Sequence[Future[list[Score]]]) -> Future[list[Score]]:
    """One future for the results of many, joined in their order."""
    joined: Future[list[Score]] = Future()
    waiting, lock = len(futures), threading.Lock()

    def done(_: Future[list[Score]]) -> None:
        nonlocal waiting
        with lock:
            waiting -= 1
            if waiting:
                return
        finish()

    def finish() -> None:
        error = next((f.exception() for f in futures if not f.cancelled() and f.exception()), None)
        if error is not None:
            joined.set_exception(error)
        elif any(f.cancelled() for f in futures):
            joined.cancel()
        else:
            joined.set_result([score for f in futures for score in f.result()])

    for future in futures:
        future.add_done_callback(done)
    if not futures:
        finish()
    return joined


# ------------------------------------------------------------------------------------------------------------------
# How fast is it here?


@dataclass(frozen=True, slots=True)
class Speed:
    """Milliseconds for one answer sent alone and waited for, and answers a second when many are sent at once."""

    p50: float
    p99: float
    per_second: float

    def __str__(self) -> str:
        return f"one answer: p50 {self.p50:.2f} ms, p99 {self.p99:.2f} ms; many: {self.per_second:,.0f} answers/s"


def measure(workers: int = 2, items: int = 100, group: int = 8) -> Speed:
    """Score `group` answers to each of `items` questions, right and wrong ones, first singly and then all at once."""
    drawn = make_items("train", items, seed=0)
    pairs = [(item, query) for item in drawn for query in (item.gold, *_wrong(item, group - 1))]
    with Judge(workers) as judge:
        judge.score([(drawn[0], drawn[0].gold)] * workers)  # the processes are up
        singly: list[float] = []
        for pair in pairs[:: max(1, group // 2)]:
            sent = time.perf_counter()
            judge.score([pair])
            singly.append(1000 * (time.perf_counter() - sent))
        sent = time.perf_counter()
        judge.score(pairs)
        per_second = len(pairs) / (time.perf_counter() - sent)
    return Speed(statistics.median(singly), sorted(singly)[int(0.99 * len(singly))], per_second)


def _wrong(item: Item, count: int) -> list[str]:
    """Answers of the kinds that a policy gives: other columns, other tables, bad grammar."""
    table = item.gold.split(" FROM ", 1)[1].split()[0]
    kinds = [
        f"SELECT * FROM {table}",
        f"SELECT id FROM {table} ORDER BY id",
        "SELECT colour FROM nowhere",
        "SELECT FROM",
    ]
    return [kinds[i % len(kinds)] for i in range(count)]


if __name__ == "__main__":
    print(measure())
