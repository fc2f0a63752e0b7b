"""Recipes as processes: one in the foreground, or several at once with a table of how far they are.

Every process has a session of its own: a Ctrl-C in the terminal reaches `openrl` alone, which ends the recipes in
order, and then whatever they have left behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from openrl_cli import console
from openrl_recipes.shared.folder import METRICS, Record, read_lines

_STOP_SECONDS = 10.0
_EVERY_SECONDS = 0.25
_TAIL_LINES = 15


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, or a signal that ends a program."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.status = 128 + number


@contextmanager
def interruptible() -> Generator[None]:
    """SIGINT, SIGTERM and SIGHUP raise `Interrupted`, once: those that follow do not disturb the cleaning up."""
    ended: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if not ended:
            ended.append(number)
            raise Interrupted(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, handle) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def run_one(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a recipe on this terminal; its exit status, 128 + N if signal N ended it."""
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        return _status(process.wait())
    finally:
        _stop([process])


@dataclass(slots=True)
class Experiment:
    """One run of a sweep. `command` writes into `folder`; what it prints goes to `log`."""

    name: str
    command: Sequence[str]
    folder: Path
    log: Path
    process: subprocess.Popen[bytes] | None = None
    began: float = 0.0
    took: float = 0.0

    @property
    def state(self) -> str:
        """waiting, running, done or failed."""
        if self.process is None:
            return "waiting"
        code = self.process.poll()
        return "running" if code is None else "done" if code == 0 else "failed"

    def start(self, environment: Mapping[str, str]) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.began = time.monotonic()

    def tail(self) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])


def run_all(experiments: Sequence[Experiment], parallel: int, environment: Mapping[str, str]) -> None:
    """Run all, at most `parallel` at once, and show how far they are. One that fails does not stop the others."""
    waiting = [*experiments]
    running: list[Experiment] = []
    try:
        with Live(_table(experiments), console=console.out, auto_refresh=False, transient=True) as live:
            while waiting or running:
                while waiting and len(running) < parallel:
                    running.append(waiting.pop(0))
                    running[-1].start(environment)
                    _note(running[-1], "started")
                time.sleep(_EVERY_SECONDS)
                for experiment in running:
                    experiment.took = time.monotonic() - experiment.began
                    if experiment.state != "running":
                        _note(experiment, f"{experiment.state} after {console.duration(experiment.took)}")
                running = [experiment for experiment in running if experiment.state == "running"]
                live.update(_table(experiments), refresh=True)
    finally:
        _stop([experiment.process for experiment in experiments if experiment.process is not None])


def python_module(module: str, flags: Sequence[str]) -> list[str]:
    """The command that runs a module with this Python."""
    return [sys.executable, "-m", module, *flags]


def _note(experiment: Experiment, what: str) -> None:
    """A line for a log; on a terminal the table says it."""
    if not console.out.is_terminal:
        console.err.print(f"{experiment.name}: {what}", markup=False, soft_wrap=True)


def _table(experiments: Sequence[Experiment]) -> Group:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("run", "state", "stage", "step", "loss", "reward", "held-out", "time"):
        table.add_column(name, justify="left" if name in ("run", "state", "stage") else "right")
    for experiment in experiments:
        table.add_row(*_row(experiment))
    return Group(Text(), table)


_STYLES = {"waiting": "dim", "running": "cyan", "done": "green", "failed": "bold red"}


def _row(experiment: Experiment) -> list[Text]:
    records = read_lines(experiment.folder / METRICS) if experiment.process is not None else []
    last = records[-1] if records else {}
    cells = [last.get("stage", ""), str(last.get("step", ""))]
    cells += [_newest(records, "loss", ".3g"), _newest(records, "reward", ".2f"), _newest(records, "held_out", ".1%")]
    state = Text(experiment.state, style=_STYLES[experiment.state])
    took = console.duration(experiment.took) if experiment.process is not None else ""
    return [Text(experiment.name), state, *(Text(cell) for cell in cells), Text(took)]


def _newest(records: Sequence[Record], metric: str, form: str) -> str:
    return next((format(record[metric], form) for record in reversed(records) if metric in record), "")


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ctrl-C to all that run, time to end in peace, then the end of every process in their sessions."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + _STOP_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for process in processes:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _status(code: int) -> int:
    return code if code >= 0 else 128 - code
