"""Trying a backend in a process of its own, as the daemon would have it: a crash is a result, not our end."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from openrl.errors import ModelError, WorkerDied
from openrl.selftest.case import Case, Outcome, State
from openrl.selftest.messages import Began, Ended, News, Opened, Order, Unopened
from openrl.selftest.report import FamilyResult, Report
from openrl.selftest.subject import scratch
from openrl.workers.messages import WorkerSpec

CHILD = "openrl.selftest.child"
PATIENCE = 300.0  # seconds without news after which the process is hung
_LEAVE = 10.0  # seconds that it has for its end


def run(worker: WorkerSpec, families: Sequence[str], cases: Sequence[Case]) -> Iterator[News]:
    """Try the cases on a backend with each family's model, and tell how it goes.

    `worker.model` does not count. What kills the process fails the case that it had in hand; the rest is tried in
    another one.
    """
    left = _Left({family: [case.name for case in cases] for family in families})
    with scratch() as root:
        while left.todo:
            before = left.size
            child = _Child(worker, root, left.todo)
            try:
                for news in child.news():
                    left.take(news)
                    yield news
            finally:
                how = child.end()
            lost = left.blame(how, stuck=left.size == before)
            if lost is not None:
                left.take(lost)
                yield lost


@dataclass
class _Left:
    """What is still to be tried; a process that ends early leaves it to the next one."""

    todo: dict[str, list[str]]
    under_way: tuple[str, str] | None = None  # family and case

    @property
    def size(self) -> int:
        return sum(len(names) for names in self.todo.values())

    def take(self, news: News) -> None:
        match news:
            case Opened():
                pass
            case Unopened(family):
                del self.todo[family]
            case Began(family, case):
                self.under_way = family, case
            case Ended(family, outcome):
                self.under_way = None
                self.todo[family].remove(outcome.case)
                if not self.todo[family]:
                    del self.todo[family]

    def blame(self, how: str, *, stuck: bool) -> News | None:
        """What comes of a process that ended by itself, if it should not have: `how`, and whether it got nowhere."""
        if how and self.under_way is not None:
            family, case = self.under_way
            return Ended(family, Outcome(case, State.FAILED, f"{how}; its output above may say why."))
        if stuck and self.todo:
            family = next(iter(self.todo))
            return Unopened(family, WorkerDied(f"{how or 'the process ended'} while it opened the model."))
        return None


class _Child:
    """A process with an order."""

    def __init__(self, worker: WorkerSpec, root: Path, todo: dict[str, list[str]]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            command = [sys.executable, "-m", CHILD, str(fd)]
            self._process = subprocess.Popen(
                command, pass_fds=(fd,), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )
        self._connection = Connection(ours.detach())
        self._hung = False
        self._connection.send(Order(worker, root, tuple((family, tuple(names)) for family, names in todo.items())))

    def news(self) -> Iterator[News]:
        """What it tells until it ends, or is silent for too long."""
        while self._connection.poll(PATIENCE):
            try:
                yield self._connection.recv()
            except (EOFError, OSError):
                return
        self._hung = True

    def end(self) -> str:
        """Wait for its end, or make it; what was wrong with that, or nothing."""
        self._connection.close()
        if self._hung:
            self._process.kill()
        try:
            code = self._process.wait(_LEAVE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if self._hung:
            return f"nothing was heard for {PATIENCE:.0f} s"
        return f"the process ended with exit code {code}" if code else ""


def collect(report: Report, news: News) -> None:
    """Enter news into a report."""
    match news:
        case Opened(family, info, device):
            result = report.families.setdefault(family, FamilyResult(family))
            result.info, result.device = info, device
        case Unopened(family, error):
            result = report.families.setdefault(family, FamilyResult(family))
            if isinstance(error, ModelError):
                result.refusal = str(error)
            else:
                report.fatal[family] = f"{type(error).__name__}: {error}"
        case Began():
            pass
        case Ended(family, outcome):
            report.families[family].outcomes[outcome.case] = outcome
