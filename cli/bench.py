"""`openrl bench`: speed, memory and sharing, measured in one run and held against targets."""

from __future__ import annotations

import importlib.util
import json
import statistics
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import psutil
import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from openrl.backends import registry
from openrl.errors import BackendFault, ModelError, SettingsError
from openrl.models import catalog
from openrl.settings import load
from openrl_cli import console
from openrl_recipes.local_server import ServerError, local_server

if TYPE_CHECKING:
    from openrl.bench.result import Finding, Rates, Result
    from openrl.bench.run import Extras

_NEEDED = ("tinker", "matplotlib")
_NEEDED_MLX = ("mlx", "mlx_lm")
_NEEDED_TORCH = ("torch", "transformers", "peft")
TORCH_PARTS = ("matrix", "memory")  # measured, or prepared, with PyTorch
PARTS = ("overhead", "train", "matrix", "joined", "sample", "prefix", "jobs", "latency", "memory")

Parts = Annotated[list[str] | None, typer.Argument(help=f"What to measure: {', '.join(PARTS)}. By default all.")]
Model = Annotated[str, typer.Option(help="The model, as for `openrl serve`.")]
Rank = Annotated[int, typer.Option(min=1, help="LoRA rank on all sides.")]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds that count; their median is shown.")]
Threads = Annotated[int, typer.Option(min=0, help="Threads of each side; 0 means physical cores.")]
Backend = Annotated[str, typer.Option(help="The server's backend: auto, cpu, cuda or mps.")]
Small = Annotated[
    bool, typer.Option(help="A small model of random weights and less work, for devices that are tried, not measured.")
]
Dtype = Annotated[str, typer.Option(help="The server's dtype: auto, float32 or bfloat16.")]
VllmPython = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="A Python that has vLLM: sample with it too.")
]
Picture = Annotated[Path, typer.Option(help="Where the part `jobs` draws what the device did, as PNG.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def bench(
    parts: Parts = None,
    model: Model = catalog.DEFAULT.name,
    rank: Rank = 16,
    rounds: Rounds = 3,
    threads: Threads = 0,
    backend: Backend = "auto",
    dtype: Dtype = "auto",
    small: Small = False,
    vllm_python: VllmPython = None,
    picture: Picture = Path("device-use.png"),
    as_json: AsJson = False,
) -> None:
    """Measure this server, side by side with plain transformers + PEFT (on MLX: mlx-lm), and hold the figures against
    targets.

    Starts servers of its own and uses them through the `tinker` SDK over HTTP. Sides take turns; none runs while
    another does. All of it takes about half an hour on two cores.
    """
    registry.check_backend(backend)
    mlx = registry.choices(backend) == ("mps",)
    needed = (*_NEEDED, *(_NEEDED_MLX if mlx else _NEEDED_TORCH))
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(f"openrl bench needs {', '.join(missing)}.", "Run: pip install 'openrl[dev]'")
    legal = [part for part in PARTS if not mlx or part not in TORCH_PARTS]
    unknown = [part for part in parts or () if part not in legal]
    if unknown:
        where = " on MLX" if unknown[0] in PARTS else ""
        raise SettingsError(f"openrl bench measures no {unknown[0]!r}{where}.", f"Legal: {', '.join(legal)}.")
    threads = threads or psutil.cpu_count(logical=False) or 1
    plan = _Plan(tuple(parts or legal), rank, rounds, threads, backend, dtype, mlx, small)
    try:
        result = _run(plan, model, vllm_python, picture)
    except ServerError as error:
        raise BackendFault(str(error)) from None
    if as_json:
        typer.echo(json.dumps(result.as_json(), indent=2))
    else:
        _show(result)


@dataclass(frozen=True, slots=True)
class _Plan:
    parts: tuple[str, ...]
    rank: int
    rounds: int
    threads: int
    backend: str
    dtype: str
    mlx: bool
    small: bool


def _run(plan: _Plan, model: str, vllm_python: Path | None, picture: Path) -> Result:
    """Everything that is heavy is imported here: the other commands do without."""
    from openrl.bench.result import Result
    from openrl.bench.run import Extras, Part
    from openrl.bench.setting import describe
    from openrl.bench.small import small_model
    from openrl.models.prepare import prepare

    with tempfile.TemporaryDirectory(prefix="openrl-bench-") as made:
        if plan.small:
            model, folder = "a random Llama of 3.7 million weights", small_model(Path(made) / "small")
        else:
            console.err.print(f"preparing {model}")
            folder = prepare(catalog.resolve(model), load({}).settings.data_dir, lambda progress: None)
        result = Result(describe(model, plan.threads, plan.rank, plan.dtype, mlx=plan.mlx))
        with _progress() as tick:
            _measure(plan, folder, plan.parts, result, Extras(vllm_python, picture), tick)
            if Part.MEMORY in plan.parts:
                from openrl.bench import memory

                large = memory.large_vocabulary_model(folder, Path(made) / "large-vocabulary")
                _measure(plan, large, (Part.MEMORY,), result, Extras(), tick)
    return result


def _measure(
    plan: _Plan, folder: Path, parts: tuple[str, ...], result: Result, extras: Extras, tick: Callable[[str], None]
) -> None:
    """Measure parts on a server for the model in `folder`, which has a data folder of its own."""
    from openrl.bench import run
    from openrl.bench.served import Door
    from openrl.bench.stage import Stage
    from openrl.bench.workload import FULL, SMALL
    from openrl.models import info

    engine = ["--backend", plan.backend, "--threads", str(plan.threads), "--dtype", plan.dtype]
    size, mlx = SMALL if plan.small else FULL, plan.dtype if plan.mlx else None
    with tempfile.TemporaryDirectory(prefix="openrl-bench-") as scratch:
        flags = ["--model", str(folder), "--data-dir", scratch, *engine]
        with local_server(Path(scratch) / "server.log", flags, {"HF_HOME": scratch}) as endpoint:
            door = Door(endpoint.base_url, endpoint.api_key, catalog.resolve(str(folder)).name)
            vocabulary = info.describe(folder).vocab_size
            stage = Stage(
                door, endpoint.process, folder, vocabulary, plan.rank, plan.threads, plan.rounds, tick, size, mlx
            )
            run.measure(tuple(map(run.Part, parts)), stage, result, extras)


@contextmanager
def _progress() -> Generator[Callable[[str], None]]:
    """A spinner with the last thing measured; yields what tells it."""
    columns = (SpinnerColumn(), TextColumn("{task.completed} measurements"), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[last]}"), console=console.err) as display:
        task = display.add_task("", total=None, last="")
        yield lambda last: display.update(task, advance=1, last=last)


def _show(result: Result) -> None:
    for name, value in result.setting.items():
        console.out.print(f"{name:>10}  {value}", highlight=False)
    if result.rates:
        console.out.print(_rates_table(result.rates))
    if result.findings:
        console.out.print(_findings_table(result.findings))


def _rates_table(rates: Sequence[Rates]) -> Table:
    table = Table("", "side", title="Tokens a second, medians of the rounds (least to most)")
    table.add_column("tokens/s", justify="right")
    for row in rates:
        for number, (side, figures) in enumerate(row.sides.items()):
            spread = f"{statistics.median(figures):.0f} ({min(figures):.0f} to {max(figures):.0f})"
            table.add_row("" if number else row.name, side, spread)
    return table


def _findings_table(findings: Sequence[Finding]) -> Table:
    table = Table("what", title="Against the targets")
    for heading in ("measured", "target"):
        table.add_column(heading, justify="right")
    table.add_column("behind it")
    for row in findings:
        colour = {True: "green", False: "red", None: "default"}[row.met]
        table.add_row(row.what, f"[{colour}]{_figure(row.figure, row.unit)}[/]", _target(row), row.detail)
    return table


def _target(row: Finding) -> str:
    if row.target is None:
        return ""
    return f"{'at most' if row.at_most else 'at least'} {_figure(row.target, row.unit)}"


def _figure(figure: float, unit: str) -> str:
    """Two places for ratios, one digit behind the point for small figures, none for large ones."""
    text = f"{figure:.2f}" if unit in ("x", "") else f"{figure:.1f}" if figure < 100 else f"{figure:.0f}"
    return f"{text} {unit}".strip()
