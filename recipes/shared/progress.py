"""Progress bars with the time that is left, one line a stage."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Bar:
    """One line of the progress display."""

    def __init__(self, display: Progress, task: TaskID) -> None:
        self._display, self._task = display, task

    def advance(self, note: str) -> None:
        """One unit further; `note` stands behind the bar."""
        self._display.update(self._task, advance=1, note=note)

    def note(self, text: str) -> None:
        """Put `text` behind the bar."""
        self._display.update(self._task, note=text)


class Bars:
    """The progress display: a bar a stage."""

    def __init__(self, display: Progress) -> None:
        self._display = display

    def add(self, name: str, total: int, done: int = 0) -> Bar:
        """A new bar below the others, `done` of `total` units along."""
        return Bar(self._display, self._display.add_task(name, total=total, completed=done, note=""))


@contextmanager
def progress(console: Console | None = None) -> Generator[Bars]:
    """Progress bars for the time of a `with` block."""
    columns = (
        TextColumn("{task.description:<20}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as display:
        yield Bars(display)
