"""Several runs side by side, from their folders alone: `compare.html`, `compare.png`, and a table to print.

python -m openrl_recipes.shared.compare runs/text_to_sql/*/      # writes both into runs/text_to_sql
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from openrl_recipes.shared import page
from openrl_recipes.shared.measured import Measured, measured
from openrl_recipes.shared.page import Key
from openrl_recipes.shared.plots import Line, Panel, png
from openrl_recipes.shared.report import METRICS, SPEEDS, clock

NAMES = ("run", "state", "held-out", "reward", "loss", "KL v2", "took", "best held-out", "tokens/s trained", "sampled")
_PRINTED = 7  # columns that a terminal has room for


@dataclass(frozen=True, slots=True)
class Compared:
    """One of the runs: what to call it, its folder, and how it ended."""

    name: str
    folder: Path
    state: str = "done"


def write_comparison(runs: Sequence[Compared], out: Path, title: str = "") -> Path:
    """Write `compare.html`, which needs no other file, and `compare.png` into `out`; returns the page's path."""
    title = title or out.resolve().name
    found = [measured(run.folder) for run in runs]
    panels = comparison_panels(runs, found)
    keys = [Key(run.name, number) for number, run in enumerate(runs)]
    parts = [
        page.heading(title, f"{len(runs)} runs side by side"),
        page.section("Runs", page.table(NAMES, comparison_rows(runs, found), numbers=True)),
        page.section("Curves", page.legend(keys), page.charts(panels)),
        page.section("Options that differ", _options_part(runs, found)),
    ]
    out.mkdir(parents=True, exist_ok=True)
    png(panels, out / "compare.png", title)
    file = out / "compare.html"
    file.write_text(page.page(title, parts), encoding="utf-8")
    return file


def show_comparison(runs: Sequence[Compared], console: Console | None = None) -> None:
    """Print the runs as a table."""
    rows = comparison_rows(runs, [measured(run.folder) for run in runs])
    table = Table(title="Runs", title_justify="left", box=box.SIMPLE_HEAD)
    for number, name in enumerate(NAMES[:_PRINTED]):
        table.add_column(name, justify="right" if number > 1 else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style="red" if cell == "failed" else "") for cell in row[:_PRINTED]))
    (console or Console()).print(table)


def comparison_rows(runs: Sequence[Compared], found: Sequence[Measured]) -> list[list[str]]:
    """A row a run, under NAMES. Reward and loss are those at the end, KL v2 is the worst."""
    return [
        [
            run.name,
            run.state,
            " → ".join(f"{score:.1%}" for score in _ends(of.values("held_out"))),
            "".join(f"{reward:.2f}" for reward in _at_the_end(of.values("reward"))),
            "".join(f"{loss:.3g}" for loss in _at_the_end(of.values("loss"))),
            "".join(f"{distance:.1e}" for distance in _largest(of.values("kl_v2"))),
            clock(of.duration) if of.records else "",
            "".join(f"{score:.1%}" for score in _largest(of.values("held_out"))),
            *(f"{of.speed(counter):,.0f}" if of.speed(counter) else "" for counter, _ in SPEEDS),
        ]
        for run, of in zip(runs, found, strict=True)
    ]


def comparison_panels(runs: Sequence[Compared], found: Sequence[Measured]) -> list[Panel]:
    """The charts of the runs, a line a run over the steps of all its stages."""
    panels: list[Panel] = []
    for metric, title, how in METRICS:
        lines = [
            Line([point for points in of.series(metric).values() for point in points], number, label=run.name)
            for number, (run, of) in enumerate(zip(runs, found, strict=True))
            if of.values(metric)
        ]
        if any(len(line.points) > 1 for line in lines):
            panels.append(Panel(title, lines, **{**how, "joined": False}))
    return panels


def _options_part(runs: Sequence[Compared], found: Sequence[Measured]) -> str:
    names = dict.fromkeys(name for of in found for name in of.config if name != "out")
    other = [name for name in names if len({str(of.config.get(name)) for of in found if of.config}) > 1]
    rows = [[run.name, *(str(of.config.get(name, "")) for name in other)] for run, of in zip(runs, found, strict=True)]
    return page.table(("run", *other), rows) if other else ""


def _ends(values: Sequence[float]) -> list[float]:
    return [values[0], values[-1]] if len(values) > 1 else [*values]


def _largest(values: Sequence[float]) -> list[float]:
    return [max(values)] if values else []


def _at_the_end(values: Sequence[float]) -> list[float]:
    """The mean of the last values, as single steps are noisy; nothing if there are none."""
    last = values[-max(1, min(5, len(values) // 4)) :]
    return [sum(last) / len(last)] if last else []


if __name__ == "__main__":
    folders = [Path(argument) for argument in sys.argv[1:]]
    compared = [Compared(folder.name, folder) for folder in folders]
    show_comparison(compared)
    print(write_comparison(compared, folders[0].parent))
