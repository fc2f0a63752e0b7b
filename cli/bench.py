"""`openrl bench`: tokens a second of our server against plain transformers + PEFT, in one run on the same data."""

from __future__ import annotations

import importlib.util
import json
import statistics
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import psutil
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from openrl.errors import BackendFault, ModelError
from openrl.models import catalog
from openrl.settings import load
from openrl.types import ModelSpec
from openrl_cli import console
from openrl_recipes.local_server import Endpoint, ServerError, local_server

if TYPE_CHECKING:
    from openrl.bench.rounds import Result

_NEEDED = ("tinker", "torch", "transformers", "peft")
_LATENCY_STEPS = 200


class Part(StrEnum):
    """What can be measured."""

    TRAIN = "train"
    SAMPLE = "sample"
    OVERHEAD = "overhead"


Parts = Annotated[list[Part] | None, typer.Argument(help="What to measure; all of it by default.")]
Model = Annotated[str, typer.Option(help="The model, as for `openrl serve`.")]
Rank = Annotated[int, typer.Option(min=1, help="LoRA rank on both sides.")]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds that count; their median is shown.")]
Threads = Annotated[int, typer.Option(min=0, help="Threads of each side; 0 means physical cores.")]
Dtype = Annotated[str, typer.Option(help="The server's dtype: auto, float32 or bfloat16. The plain loop is float32.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def bench(
    parts: Parts = None,
    model: Model = catalog.DEFAULT.name,
    rank: Rank = 16,
    rounds: Rounds = 3,
    threads: Threads = 0,
    dtype: Dtype = "auto",
    as_json: AsJson = False,
) -> None:
    """Compare this server's speed with plain transformers + PEFT, and measure the overhead of a request.

    Starts a server of its own and uses it through the `tinker` SDK over HTTP. The plain loop runs float32, one
    sequence a forward, and samples with `model.generate`. The sides take turns; neither runs while the other does.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(f"openrl bench needs {', '.join(missing)}.", "Run: pip install 'openrl[dev]'")
    plan = Plan(tuple(parts or Part), rank, rounds, threads or psutil.cpu_count(logical=False) or 1, dtype)
    try:
        result = _run(plan, catalog.resolve(model))
    except ServerError as error:
        raise BackendFault(str(error)) from None
    if as_json:
        typer.echo(json.dumps(result.as_json(), indent=2))
    else:
        _show(result)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure and how."""

    parts: tuple[Part, ...]
    rank: int
    rounds: int
    threads: int
    dtype: str


def _run(plan: Plan, spec: ModelSpec) -> Result:
    """Prepare the model, start a server for it, measure.

    The server has a data folder of its own, so that the user's runs are left alone; it serves the ready model's
    folder, under the folder's name.
    """
    from openrl.bench import setting
    from openrl.models.prepare import prepare

    console.err.print(f"preparing {spec.name}")
    folder = prepare(spec, load({}).settings.data_dir, lambda progress: None)
    engine = ["--threads", str(plan.threads), "--dtype", plan.dtype]
    with tempfile.TemporaryDirectory(prefix="openrl-bench-") as scratch:
        flags = ["--model", str(folder), "--data-dir", scratch, *engine]
        with local_server(Path(scratch) / "server.log", flags, {"HF_HOME": scratch}) as endpoint:
            result = _measure(plan, folder, endpoint)
    result.setting = setting.describe(spec.name, plan.threads, plan.rank, plan.dtype)
    return result


def _measure(plan: Plan, folder: Path, endpoint: Endpoint) -> Result:
    """All figures of one run. What is heavy is imported here: the other commands do without."""
    from openrl.bench import rounds, served, workload
    from openrl.models import info

    name, result = catalog.resolve(str(folder)).name, rounds.Result({})
    work = workload.make(info.describe(folder).vocab_size)
    measures = [*(rounds.train_measures(work) if Part.TRAIN in plan.parts else [])]
    measures += rounds.sample_measures(work) if Part.SAMPLE in plan.parts else []
    if Part.OVERHEAD in plan.parts:
        console.err.print("measuring the overhead of a request")
        seconds = served.step_latencies(endpoint.base_url, endpoint.api_key, name, _LATENCY_STEPS)
        result.latencies.append(rounds.latency("empty optim_step of a rank 1 adapter, over HTTP", seconds))
    if measures:
        from openrl.bench.plain import PlainLoop

        ours = served.ServedLoop(endpoint.base_url, endpoint.api_key, name, plan.rank)
        plain = PlainLoop(folder, plan.rank, plan.threads)
        with _progress(2 * (plan.rounds + 1) * len(measures)) as tick:
            result.comparisons = rounds.compare(ours, plain, measures, plan.rounds, tick)
        ours.close()
    return result


@contextmanager
def _progress(total: int) -> Generator[Callable[[str], None]]:
    """A progress bar; yields what moves it one measurement on."""
    columns = (TextColumn("measuring"), BarColumn(bar_width=30), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[last]}"), console=console.err) as display:
        task = display.add_task("", total=total, last="")
        yield lambda last: display.update(task, advance=1, last=last)


def _show(result: Result) -> None:
    for name, value in result.setting.items():
        console.out.print(f"{name:>10}  {value}", highlight=False)
    if result.comparisons:
        console.out.print(_speed_table(result))
    for latency in result.latencies:
        console.out.print(f"{latency.name}, {latency.count} times: p50 {latency.p50:.1f} ms, p95 {latency.p95:.1f} ms")


def _speed_table(result: Result) -> Table:
    table = Table(title="Tokens a second, medians of the rounds (least to most)")
    for heading in ("", "openrl", "plain", "ratio"):
        table.add_column(heading, justify="right" if heading else "left")
    for row in result.comparisons:
        table.add_row(row.name, _spread(row.ours), _spread(row.plain), f"[bold]{row.ratio:.2f}[/]")
    return table


def _spread(figures: Sequence[float]) -> str:
    return f"{statistics.median(figures):.0f} ({min(figures):.0f} to {max(figures):.0f})"
