"""Line charts as SVG for a page in light or dark, and as one PNG. Knows nothing of runs: panels of lines."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, PercentFormatter
from matplotlib.typing import RcKeyType

# On a light ground. In an SVG each stands as a CSS variable of its name, which the page sets for light and dark.
COLOURS = ("#2f6fde", "#d9660b", "#0b8f7a", "#8a4fd3", "#c2356d", "#7a8a06", "#0989b1", "#9a6a3c")
INK, MUTED, GRID, LIMIT = "#1f2430", "#667085", "#d9dde5", "#c62f2f"
VARIABLES = {
    **{colour: f"var(--c{number})" for number, colour in enumerate(COLOURS)},
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    GRID: "var(--grid)",
    LIMIT: "var(--bad)",
}

_STYLE: dict[RcKeyType, Any] = {
    "svg.fonttype": "none",  # text stays text: small, and in the page's font
    "font.size": 9,
    "text.color": INK,
    "text.parse_math": False,
    "axes.facecolor": "none",
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
}
_MANY = 24  # from so many points on, a running mean is drawn over them


@dataclass(frozen=True, slots=True)
class Line:
    """Points of one colour: an index into COLOURS, or None for grey. With few points they are marked."""

    points: Sequence[tuple[float, float]]
    number: int | None
    dashed: bool = False
    label: str = ""

    @property
    def colour(self) -> str:
        return MUTED if self.number is None else COLOURS[self.number % len(COLOURS)]

    @property
    def style(self) -> str:
        """Dashed too where the colours begin anew."""
        return "--" if self.dashed or (self.number or 0) >= len(COLOURS) else "-"


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart. `limit` is drawn as a line that values should stay below; `log` asks for a logarithmic axis.

    With `joined`, a grey line leads from each of `lines` to the next.
    """

    title: str
    lines: Sequence[Line]
    percent: bool = False
    log: bool = False
    limit: float | None = None
    joined: bool = False


def svg(panel: Panel) -> str:
    """The chart, without its title, as an `<svg>` element to stand in a page."""
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": panel.title}):
        figure = Figure(figsize=(4.6, 2.6), layout="constrained")
        figure.patch.set_alpha(0)
        _draw(figure.add_subplot(), panel)
        file = io.StringIO()
        FigureCanvasSVG(figure).print_svg(file, metadata={"Date": None})
    return _for_a_page(file.getvalue())


def png(panels: Sequence[Panel], file: Path, title: str) -> None:
    """All charts in one picture, with legends if the lines have labels."""
    across = min(3, max(1, len(panels)))
    down = max(1, math.ceil(len(panels) / across))
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(4.6 * across, 2.9 * down + 0.3), layout="constrained", dpi=110)
        figure.suptitle(title)
        for number, panel in enumerate(panels, 1):
            axes = figure.add_subplot(down, across, number)
            _draw(axes, panel)
            axes.set_title(panel.title, fontsize=10)
        labels = {line.label: line for panel in panels for line in panel.lines if line.label}
        if labels:
            handles = [Line2D([], [], color=line.colour, ls=line.style) for line in labels.values()]
            figure.legend(handles, [*labels], loc="outside lower center", ncols=min(6, len(labels)), frameon=False)
        FigureCanvasAgg(figure).print_png(str(file))


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean over up to `window` values around each one."""
    half = window // 2
    around = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in around]


def _draw(axes: Axes, panel: Panel) -> None:
    if panel.joined:
        together = [point for line in panel.lines for point in line.points]
        axes.plot([x for x, _ in together], [y for _, y in together], color=MUTED, linewidth=1, alpha=0.6)
    for line in panel.lines:
        _draw_line(axes, line)
    values = [y for line in panel.lines for _, y in line.points if math.isfinite(y)]
    if panel.limit is not None:
        axes.axhline(panel.limit, color=LIMIT, linewidth=1, linestyle=":")
    if panel.log and values and min(values) > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif panel.percent:
        axes.set_ylim(-0.03, 1.03)
    elif values and min(values) >= 0:
        axes.set_ylim(0, None)
    if panel.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True, steps=[1, 2, 5, 10]))
    axes.set_xlim(-0.02 * axes.get_xlim()[1], None)
    axes.set_xlabel("step")


def _draw_line(axes: Axes, line: Line) -> None:
    xs, ys = [x for x, _ in line.points], [y for _, y in line.points]
    if len(ys) < _MANY:
        axes.plot(xs, ys, color=line.colour, linestyle=line.style, linewidth=1.6, marker="o", markersize=3.2)
        return
    axes.plot(xs, ys, color=line.colour, linestyle=line.style, linewidth=0.8, alpha=0.35)
    smooth = running_mean(ys, 2 * (len(ys) // _MANY) + 3)
    axes.plot(xs, smooth, color=line.colour, linestyle=line.style, linewidth=1.8)


def _for_a_page(text: str) -> str:
    """Only the element itself, scaled to its place, its colours as variables; no ids that two charts would share."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r' id="[a-z0-9]+_\d+"', "", text)
    text = re.sub(r' width="[\d.]+pt" height="[\d.]+pt"', "", text, count=1)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, variable)
    return text.replace("<svg", '<svg role="img"', 1)
