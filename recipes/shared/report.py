"""The report of a run, from the files of its folder alone: `report.html` and `curves.png`, and tables to print.

python -m openrl_recipes.shared.report runs/text_to_sql      # write both again, and print the tables
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from openrl_recipes.shared import page
from openrl_recipes.shared.folder import Record
from openrl_recipes.shared.measured import Measured, is_evaluation, measured
from openrl_recipes.shared.page import Answer, Key, Tile
from openrl_recipes.shared.plots import Line, Panel, png

KL_LIMIT = 0.01  # in nats a token; further apart, the sampler is no longer the policy that is trained
_SHOWN, _LISTED = 12, 200  # samples in the open, and behind a click

# What is drawn, in this order, if the run has it: metric, title, and how.
METRICS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("held_out", "Held-out score", {"percent": True, "joined": True}),
    ("reward", "Reward, mean of all rollouts", {}),
    ("train_score", "Score on training items", {"percent": True}),
    ("mixed_groups", "Groups whose rewards differ", {"percent": True}),
    ("loss", "Loss (nats a token)", {}),
    ("reverse_kl", "Reverse KL, student to teacher (nats a token)", {}),
    ("forward_kl", "Forward KL, teacher to student (nats a token)", {}),
    ("kl_v2", "KL v2, sampler to trainer (nats)", {"log": True, "limit": KL_LIMIT}),
    ("entropy", "Entropy (nats a token)", {}),
    ("completion_tokens", "Completion length (tokens)", {}),
)
SPEED = "Speed (tokens/s)"
SPEEDS = (("train_tokens", "trained"), ("sampled_tokens", "sampled"))


def write_report(folder: Path) -> Path:
    """Write `report.html`, which needs no other file and no network, and `curves.png`; returns the page's path."""
    run = measured(folder)
    stages = training_stages(run)
    panels = run_panels(run, stages)
    speeds = [name for counter, name in SPEEDS if run.speeds(counter)]
    keys = [Key(stage, number) for stage, number in stages.items()]
    if len(speeds) > 1:
        keys.append(Key("in the speed chart: sampled (trained is solid)", max(0, len(stages) - 1), dashed=True))
    parts = [
        page.heading(run.title, _below(run)),
        page.tiles(summary(run)),
        page.section("Curves", page.legend(keys), page.charts(panels)),
        page.section("Held-out score", _evaluation_part(run)),
        page.section("Samples", *_sample_parts(run)),
        page.section("Options", page.table(("option", "value"), [(k, _plain(v)) for k, v in run.config.items()])),
    ]
    png(panels, folder / "curves.png", run.title)
    file = folder / "report.html"
    file.write_text(page.page(run.title, parts), encoding="utf-8")
    return file


def show(folder: Path, console: Console | None = None) -> None:
    """Print the held-out scores by stage, a few samples, and the speed."""
    run = measured(folder)
    console = console or Console()
    names, rows = evaluation_rows(run)
    if rows:
        console.print(_rich("Held-out score", names, rows))
    stages, samples = sample_rows(run)
    if samples:
        console.print(_rich_samples(stages, samples[:4]))
    figures = [tile for tile in summary(run) if not tile.name.startswith("Held-out")]
    if figures:
        console.print(_rich("Summary", ("", "", ""), [(t.name, t.value, t.remark) for t in figures], heads=False))
    console.print(Text(f"Report: {folder / 'report.html'}"), soft_wrap=True)


# ------------------------------------------------------------------------------------------------------------------
# Figures


def summary(run: Measured) -> list[Tile]:
    """The figures at the top, those that the run has."""
    made: list[Tile] = []
    scores = run.values("held_out")
    if scores:
        change = f"{len(scores)} evaluations, best {max(scores):.1%}" if len(scores) > 1 else "one evaluation"
        made.append(Tile("Held-out score", _from_to([f"{scores[0]:.1%}", f"{scores[-1]:.1%}"], len(scores)), change))
    rewards = run.values("reward")
    if rewards:
        some = max(1, min(5, len(rewards) // 4))
        ends = [f"{statistics.fmean(part):.2f}" for part in (rewards[:some], rewards[-some:])]
        made.append(Tile("Reward", _from_to(ends, len(rewards)), f"first and last {some} of {len(rewards)} steps"))
    losses = run.values("loss")
    if losses and not rewards:
        made.append(Tile("Loss", _from_to([f"{losses[0]:.3g}", f"{losses[-1]:.3g}"], len(losses)), "nats a token"))
    if run.records:
        made.append(Tile("Duration", clock(run.duration), f"{max(run.positions)} training steps"))
    for counter, name in SPEEDS:
        if run.speed(counter):
            total = sum(record.get(counter, 0) for record in run.records)
            made.append(
                Tile(f"Tokens/s {name}", f"{run.speed(counter):,.0f}", f"{total:,.0f} tokens, as the client saw")
            )
    distances = [value for value in run.values("kl_v2") if math.isfinite(value)]
    if distances:
        middle = statistics.median(distances)
        made.append(Tile("KL v2, worst", f"{max(distances):.1e}", f"median {middle:.1e}; below {KL_LIMIT} is well"))
    return made


def run_panels(run: Measured, stages: dict[str, int]) -> list[Panel]:
    """The charts of one run, a line a stage."""
    panels: list[Panel] = []
    for metric, title, how in METRICS:
        lines = [Line(points, stages.get(stage), label=stage) for stage, points in run.series(metric).items()]
        if sum(len(line.points) for line in lines) > 1:  # what was measured once is no curve
            panels.append(Panel(title, lines, **how))
    speeds = [
        Line(points, stages.get(stage), dashed=counter == "sampled_tokens")
        for counter, _ in SPEEDS
        for stage, points in run.speeds(counter).items()
    ]
    return [*panels, Panel(SPEED, speeds)] if speeds else panels


def training_stages(run: Measured) -> dict[str, int]:
    """The run's stages that train, in order, with the colour of each."""
    names = dict.fromkeys(r["stage"] for r in run.records if not is_evaluation(r["stage"]))
    return {name: number for number, name in enumerate(names)}


def evaluation_rows(run: Measured) -> tuple[list[str], list[list[str]]]:
    """Names and rows of a table of all evaluations: stage, step, score, and whatever `held_out_...` they have."""
    found = run.evaluations()
    parts = list(dict.fromkeys(k for _, r in found for k in r if k.startswith("held_out_")))
    names = ["stage", "step", "score", *(part.removeprefix("held_out_").replace("_", " ") for part in parts)]
    rows = [
        [stage, str(record["step"]), *(_percent(record.get(key)) for key in ("held_out", *parts))]
        for stage, record in found
    ]
    return names, rows


def sample_rows(run: Measured) -> tuple[list[str], list[tuple[str, str, list[list[Answer]]]]]:
    """The stages that have samples, and a row a prompt; first those that training turned from wrong to right."""
    stages = list(dict.fromkeys(str(sample["stage"]) for sample in run.samples))
    by_prompt: dict[str, list[Record]] = {}
    for sample in run.samples:
        by_prompt.setdefault(_plain(sample.get("prompt", "")), []).append(sample)
    rows: list[tuple[str, str, list[list[Answer]]]] = []
    for prompt, samples in by_prompt.items():
        wanted = next((_plain(s["wanted"]) for s in samples if s.get("wanted") is not None), "")
        answers = [[_answer(s) for s in samples if s["stage"] == stage][:4] for stage in stages]
        rows.append((prompt, wanted, answers))
    return stages, sorted(rows, key=lambda row: -_gain(row[2]))


def clock(seconds: float) -> str:
    """42 s, 3 min 05 s, 1 h 02 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.0f} s"
    return (
        f"{whole // 60} min {whole % 60:02d} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    )


# ------------------------------------------------------------------------------------------------------------------
# Parts of the page and of the terminal


def _below(run: Measured) -> str:
    named = [f"{key} {run.config[key]}" for key in ("rank", "seed") if key in run.config]
    return " · ".join([str(run.config.get("model", "")), *named]).strip(" ·")


def _evaluation_part(run: Measured) -> str:
    names, rows = evaluation_rows(run)
    return page.table(names, rows, numbers=True) if rows else ""


def _sample_parts(run: Measured) -> list[str]:
    stages, rows = sample_rows(run)
    more = rows[_SHOWN:_LISTED]
    parts = [page.sample_table(stages, rows[:_SHOWN])] if rows else []
    return [*parts, page.folded(f"{len(more)} more", page.sample_table(stages, more))] if more else parts


def _rich(title: str, names: Sequence[str], rows: Sequence[Sequence[str]], heads: bool = True) -> Table:
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_header=heads)
    for number, name in enumerate(names):
        made.add_column(name, justify="right" if heads and number else "left")
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    return made


def _rich_samples(stages: Sequence[str], rows: Sequence[tuple[str, str, list[list[Answer]]]]) -> Table:
    made = Table(title="Samples", title_justify="left", box=box.ROUNDED, show_lines=True)
    wanted = any(text for _, text, _ in rows)
    for name in ("prompt", *(["wanted"] if wanted else []), *stages):
        made.add_column(name, overflow="fold")
    for prompt, text, answers in rows:
        cells = [_coloured(of_stage[0]) if of_stage else Text("") for of_stage in answers]
        made.add_row(Text(prompt), *([Text(text)] if wanted else []), *cells)
    return made


def _coloured(answer: Answer) -> Text:
    if answer.score is None:
        return Text(answer.text)
    return Text(answer.text, style="green" if answer.score >= 1 else "red" if answer.score <= 0 else "yellow")


def _answer(sample: Record) -> Answer:
    score = sample.get("score")
    return Answer(_plain(sample.get("completion", "")), None if score is None else float(score))


def _gain(answers: Sequence[Sequence[Answer]]) -> float:
    """Best last score less best first one, among the stages that have answers."""
    scores = [max(a.score or 0.0 for a in of_stage) for of_stage in answers if of_stage]
    return scores[-1] - scores[0] if scores else 0.0


def _from_to(ends: Sequence[str], count: int) -> str:
    return " → ".join(ends) if count > 1 else ends[0]


def _percent(value: object) -> str:
    return f"{value:.1%}" if isinstance(value, (int, float)) else ""


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    write_report(Path(sys.argv[1]))
    show(Path(sys.argv[1]))
