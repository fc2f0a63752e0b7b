"""The run folder: what a recipe was asked, what it measured, what the model wrote, and how far it came.

    config.json     the options                       metrics.jsonl   one record a step: stage, step, seconds, values
    samples.jsonl   prompts and what was written      progress.json   the newest point from which to go on
    report.html     made from the files above by `openrl_recipes.shared.report`

A run that was killed is run again with the same command: what was logged after its newest point is cut off, and the
recipe goes on from there.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrl_recipes.shared.options import OptionError

Record = dict[str, Any]

DONE = "done"  # the stage of a run that is whole
CONFIG, METRICS, SAMPLES, PROGRESS = "config.json", "metrics.jsonl", "samples.jsonl", "progress.json"
BOARD = "tensorboard"
FREE = ("out", "tensorboard")  # options that change nothing of what is computed


@dataclass(frozen=True, slots=True)
class Point:
    """From where to go on: the stage, how many of its steps are done, and what the recipe needs to know beside."""

    stage: str
    step: int
    notes: Record


class RunFolder:
    """One run's folder. `records` are those of metrics.jsonl; `point` is None for a run that starts."""

    def __init__(
        self,
        path: Path,
        options: object,
        *,
        free: Sequence[str] = FREE,
        tensorboard: bool = False,
        goes_on: bool = False,
    ) -> None:
        """Open or make `path` for a run with `options`, a dataclass. Fields named in `free` may differ on a return.

        `goes_on`: the recipe can go on from a point, so that it also knows what to do with a run that is done. Raises
        `OptionError` if the folder holds a run with other options, or a finished one that would be overwritten.
        """
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self._claim(options, free)
        self.point = self._cut_back()
        if self.point is not None and self.point.stage == DONE and not goes_on:
            raise OptionError(f"{path} holds a finished run, see its report.html. Take another --out, or remove it.")
        self.records = read_lines(path / METRICS)
        self._began = time.monotonic() - (self.records[-1]["at"] if self.records else 0.0)
        self._board = _tensorboard(path, self.records) if tensorboard else None

    def log(self, stage: str, step: int, *, sent: float | None = None, **values: float | int | str | bool) -> Record:
        """Append one record. `at` is seconds of running since the start, `seconds` those since `sent` (monotonic)."""
        now = time.monotonic()
        record: Record = {"stage": stage, "step": step, "at": round(now - self._began, 3)}
        if sent is not None:
            record["seconds"] = round(now - sent, 3)
        record |= values
        self.records.append(record)
        _append(self.path / METRICS, record)
        if self._board is not None:
            _show_on(self._board, record)
        return record

    def sample(self, stage: str, **values: Any) -> None:
        """Append what the model wrote. The report shows `prompt`, `completion`, `score` and, if given, `wanted`."""
        _append(self.path / SAMPLES, {"stage": stage, **values})

    def reached(self, stage: str, step: int, **notes: Any) -> None:
        """From now on a new start goes on here. Call it once everything that it needs is saved."""
        sizes = {name: _size(self.path / name) for name in (METRICS, SAMPLES)}
        text = json.dumps({"stage": stage, "step": step, "notes": notes, "sizes": sizes}, indent=1)
        _write_whole(self.path / PROGRESS, text)
        self.point = Point(stage, step, notes)

    def finished(self) -> None:
        """The run is whole: nothing of it is to be written again."""
        self.reached(DONE, 0)

    def _claim(self, options: object, free: Sequence[str]) -> None:
        mine: Record = json.loads(json.dumps(dataclasses.asdict(options)))  # pyright: ignore[reportArgumentType]
        file = self.path / CONFIG
        there: Record = json.loads(file.read_text()) if file.exists() else mine
        other = [name for name in mine if name not in free and there.get(name) != mine[name]]
        if other:
            was = ", ".join(f"{name}={there.get(name)!r} (now {mine[name]!r})" for name in other)
            raise OptionError(f"{self.path} holds a run with {was}. Take another --out, or the same options to go on.")
        _write_whole(file, json.dumps(mine, indent=1))

    def _cut_back(self) -> Point | None:
        """Forget what was logged after the newest point; without one, everything."""
        file = self.path / PROGRESS
        known: Record = json.loads(file.read_text()) if file.exists() else {"sizes": {METRICS: 0, SAMPLES: 0}}
        for name, size in known["sizes"].items():
            if _size(self.path / name) > size:
                os.truncate(self.path / name, size)
        return Point(known["stage"], known["step"], known["notes"]) if "stage" in known else None


def read_lines(file: Path) -> list[Record]:
    """The records of a .jsonl file; none if there is no file. A last line that is still being written is left out."""
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []


def _append(file: Path, record: Record) -> None:
    with file.open("a") as opened:
        opened.write(json.dumps(record) + "\n")


def _write_whole(file: Path, text: str) -> None:
    """All or nothing: a kill in the middle leaves the old file."""
    beside = file.with_suffix(".new")
    beside.write_text(text)
    beside.replace(file)


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _tensorboard(path: Path, records: Sequence[Record]) -> Any:
    """A writer of event files that hold `records` and nothing else: what was cut off is not shown either."""
    try:
        from tensorboard.summary import Writer
    except ImportError:
        raise OptionError("--tensorboard needs the package tensorboard: pip install 'openrl[recipes]'") from None
    shutil.rmtree(path / BOARD, ignore_errors=True)
    board = Writer(str(path / BOARD))
    for record in records:
        _show_on(board, record)
    return board


def _show_on(board: Any, record: Record) -> None:
    """Every number of a record as a curve of its stage. Flushed at once: a run may be killed at any time."""
    for name, value in record.items():
        if name not in ("stage", "step", "at") and isinstance(value, (int, float)):
            board.add_scalar(f"{record['stage']}/{name}", float(value), record["step"])
    board.flush()
