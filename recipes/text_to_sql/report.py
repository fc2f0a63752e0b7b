"""What the recipe shows: progress bars, the metric log, the final tables, the curves and the written report."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from openrl_recipes.text_to_sql.generator import Item

Record = dict[str, Any]


# ------------------------------------------------------------------------------------------------------------------
# While it runs


class Bar:
    """One line of the progress display."""

    def __init__(self, display: Progress, task: TaskID) -> None:
        self._display, self._task = display, task

    def advance(self, note: str) -> None:
        """One unit further; `note` stands behind the bar."""
        self._display.update(self._task, advance=1, note=note)


class Bars:
    """The progress display: a bar a stage."""

    def __init__(self, display: Progress) -> None:
        self._display = display

    def add(self, name: str, total: int) -> Bar:
        """A new bar below the others."""
        return Bar(self._display, self._display.add_task(name, total=total, note=""))


@contextmanager
def progress(console: Console | None = None) -> Generator[Bars]:
    """Progress bars for the time of a `with` block."""
    columns = (
        TextColumn("{task.description:<20}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as display:
        yield Bars(display)


class MetricLog:
    """Appends one JSON object a record to `metrics.jsonl` and keeps all of them."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "metrics.jsonl"
        self._file.write_text("")
        self._start = time.monotonic()
        self.records: list[Record] = []

    def add(self, kind: str, *, sent: float, **values: float | int | str) -> None:
        """One record; `sent` is the `time.monotonic()` at which its work was sent off."""
        now = time.monotonic()
        record: Record = {"kind": kind, "at": round(now - self._start, 3), "seconds": round(now - sent, 3), **values}
        self.records.append(record)
        with self._file.open("a") as file:
            file.write(json.dumps(record) + "\n")


# ------------------------------------------------------------------------------------------------------------------
# Afterwards


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Greedy queries for the held-out questions, and which of them were right."""

    name: str
    queries: Sequence[str]
    solved: Sequence[bool]

    @property
    def accuracy(self) -> float:
        return sum(self.solved) / len(self.solved)

    def level(self, held_out: Sequence[Item], level: int) -> float:
        """Accuracy on the questions of one level."""
        chosen = [ok for item, ok in zip(held_out, self.solved, strict=True) if item.level == level]
        return sum(chosen) / max(1, len(chosen))


@dataclass(frozen=True, slots=True)
class Summary:
    """A whole run: evaluations before, after SFT and after RL, and all records."""

    held_out: Sequence[Item]
    evaluations: Sequence[Evaluation]
    records: Sequence[Record]

    def speed(self, counter: str) -> float:
        """Tokens a second over all records that count `counter`: `train_tokens` or `sampled_tokens`.

        Overlapping records (the next step is sent before the last one ends) share their time: it counts once.
        """
        spans = [(r["at"] - r["seconds"], r["at"], r[counter]) for r in self.records if counter in r]
        busy = 0.0
        until = float("-inf")
        for start, end, _ in sorted(spans):
            busy += max(0.0, end - max(start, until))
            until = max(until, end)
        return sum(tokens for _, _, tokens in spans) / busy if busy else 0.0


def show(summary: Summary, console: Console | None = None) -> None:
    """Print the final tables."""
    console = console or Console()
    console.print(accuracy_table(summary), sample_table(summary), speed_table(summary))


def accuracy_table(summary: Summary) -> Table:
    """Held-out execution accuracy, overall and by level."""
    table = Table(title="Held-out execution accuracy", caption=f"{len(summary.held_out)} questions about unseen tables")
    for name in ("", "all", "level 1", "level 2", "level 3"):
        table.add_column(name, justify="right" if name else "left")
    for evaluation in summary.evaluations:
        levels = (f"{evaluation.level(summary.held_out, level):.0%}" for level in (1, 2, 3))
        table.add_row(evaluation.name, f"[bold]{evaluation.accuracy:.1%}[/]", *levels)
    return table


def chosen_samples(summary: Summary, count: int = 4) -> list[int]:
    """Numbers of a few questions worth showing: first those that training turned from wrong to right."""
    first, last = summary.evaluations[0].solved, summary.evaluations[-1].solved
    order = sorted(range(len(summary.held_out)), key=lambda i: (first[i] or not last[i], i))
    return order[:count]


def sample_table(summary: Summary) -> Table:
    """A few questions with the query before and after."""
    table = Table(title="Sampled queries", show_lines=True)
    for name in ("question", "before", "after"):
        table.add_column(name, overflow="fold")
    for i in chosen_samples(summary):
        cells = [_verdict(evaluation, i) for evaluation in (summary.evaluations[0], summary.evaluations[-1])]
        table.add_row(f"{summary.held_out[i].domain.schema}\n{summary.held_out[i].question}", *cells)
    return table


def _verdict(evaluation: Evaluation, i: int) -> str:
    query = evaluation.queries[i].replace("[", "\\[")
    return f"[green]{query}[/]" if evaluation.solved[i] else f"[red]{query}[/]"


def speed_table(summary: Summary) -> Table:
    """Tokens a second as the client saw them, round trips included."""
    table = Table(title="Speed seen by the client")
    table.add_column("")
    table.add_column("tokens/s", justify="right")
    table.add_row("training", f"{summary.speed('train_tokens'):.0f}")
    table.add_row("sampling", f"{summary.speed('sampled_tokens'):.0f}")
    return table


def write(summary: Summary, folder: Path) -> None:
    """Write `curves.png` and `report.md` beside the metric log."""
    folder.mkdir(parents=True, exist_ok=True)
    plot(summary, folder / "curves.png")
    (folder / "report.md").write_text(markdown(summary))


def plot(summary: Summary, file: Path) -> None:
    """Loss of the supervised stage, reward of the GRPO stage, held-out accuracy."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    loss, reward, accuracy = figure.subplots(1, 3)
    losses = [r["loss"] for r in summary.records if r["kind"] == "sft"]
    rewards = [r["reward"] for r in summary.records if r["kind"] == "grpo"]
    loss.plot(range(1, len(losses) + 1), losses, marker="o")
    loss.set(title="SFT: loss a token", xlabel="step", ylim=(0, None))
    reward.plot(range(1, len(rewards) + 1), rewards, marker="o", color="tab:orange")
    reward.set(title="GRPO: mean reward of all samples", xlabel="step", ylim=(0, 1))
    names, values = [e.name for e in summary.evaluations], [e.accuracy for e in summary.evaluations]
    bars = accuracy.bar(names, values, color="tab:green")
    accuracy.bar_label(bars, [f"{value:.0%}" for value in values])
    accuracy.set(title="Execution accuracy, unseen tables", ylim=(0, 1.05))
    FigureCanvasAgg(figure).print_png(str(file))


def markdown(summary: Summary) -> str:
    """The run as a short Markdown page."""
    lines = [
        "# Text-to-SQL: SFT, then GRPO",
        "",
        f"Execution accuracy (greedy) on {len(summary.held_out)} questions about tables unseen in training:",
        "",
        "| | all | level 1 | level 2 | level 3 |",
        "|---|---|---|---|---|",
    ]
    for e in summary.evaluations:
        levels = " | ".join(f"{e.level(summary.held_out, level):.0%}" for level in (1, 2, 3))
        lines.append(f"| {e.name} | {e.accuracy:.1%} | {levels} |")
    speeds = f"{summary.speed('train_tokens'):.0f} tokens/s trained, {summary.speed('sampled_tokens'):.0f} sampled"
    lines += ["", f"Seen by the client, round trips included: {speeds}.", "", "![curves](curves.png)", ""]
    for i in chosen_samples(summary):
        lines += [f"**{summary.held_out[i].question}** `{summary.held_out[i].domain.schema}`", ""]
        for e in summary.evaluations:
            lines.append(f"- {e.name}, {'right' if e.solved[i] else 'wrong'}: `{e.queries[i]}`")
        lines.append("")
    return "\n".join(lines)
