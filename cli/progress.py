"""Progress of models being fetched, converted and loaded: bars on a terminal, a line a stage elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn


class ModelBars:
    """One bar a model, shown while there is one that is not ready. Use as a context manager or call `close`."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stderr, highlight=False)
        self._bars = Progress(
            TextColumn("{task.fields[model]}"),
            TextColumn("[cyan]{task.description}"),
            BarColumn(bar_width=30),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self._stages: dict[str, str] = {}

    def __enter__(self) -> ModelBars:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def update(self, model: str, stage: str, done: int, total: int | None) -> None:
        """Show where a model is; a total of None makes the bar pulse."""
        if not self._console.is_terminal:
            if self._stages.get(model) != stage:
                self._console.print(f"{model}: {stage} ...", soft_wrap=True)
            self._stages[model] = stage
            return
        if model not in self._tasks:
            self._tasks[model] = self._bars.add_task(stage, total=total, model=model)
            self._bars.start()
        if self._stages.get(model) != stage:
            self._bars.reset(self._tasks[model], description=stage, total=total, completed=done)
        self._stages[model] = stage
        self._bars.update(self._tasks[model], total=total, completed=done)

    def finish(self, model: str) -> None:
        """Take a model's bar away; the display ends with the last one."""
        self._stages.pop(model, None)
        task = self._tasks.pop(model, None)
        if task is not None:
            self._bars.remove_task(task)
            if not self._tasks:
                self._bars.stop()

    def close(self) -> None:
        for model in list(self._tasks):
            self.finish(model)
