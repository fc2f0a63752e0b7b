"""A picture of device use: lanes of training and sampling over time, one panel for each number of jobs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

from openrl.bench.lanes import Lanes

_COLOURS = {"train": "#4477aa", "sample": "#ee6677", "other": "#bbbbbb"}


def draw(lanes: Mapping[int, Lanes], into: Path, window: float = 15.0) -> None:
    """One panel a number of jobs, the first `window` seconds of each; the busy share of the whole is in the titles."""
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(lanes), 1, figsize=(10, 1.7 * len(lanes)), sharex=True, squeeze=False)
    for axis, (count, lane) in zip(axes[:, 0], lanes.items(), strict=True):
        _panel(axis, count, lane, window)
    axes[-1, 0].set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(into, dpi=110)
    pyplot.close(figure)


def _panel(axis: Any, count: int, lane: Lanes, window: float) -> None:
    kinds = list(_COLOURS)
    for row, kind in enumerate(kinds):
        chosen = [span for span in lane.spans if span.kind == kind and span.start < lane.began + window]
        bars = [(span.start - lane.began, span.end - span.start) for span in chosen]
        axis.broken_barh(bars, (row - 0.4, 0.8), facecolors=_COLOURS[kind])
    axis.set_yticks(range(len(kinds)), kinds)
    axis.set_xlim(0, window)
    axis.invert_yaxis()
    axis.set_title(f"{count} {'job' if count == 1 else 'jobs'}: device busy {lane.busy:.0%}", loc="left", fontsize=10)
