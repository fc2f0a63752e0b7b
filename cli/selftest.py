"""`openrl doctor --self-test`: the contract of all backends, tried on this machine's device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from openrl.app import worker_spec
from openrl.backends.registry import check_backend
from openrl.errors import SettingsError
from openrl.selftest import process
from openrl.selftest.case import State
from openrl.selftest.messages import Began, Ended, News, Unopened
from openrl.selftest.models import FAMILIES
from openrl.selftest.report import Report, markdown
from openrl.selftest.suite import CASES
from openrl.settings import Settings
from openrl.types import ModelSpec
from openrl.workers.messages import WorkerSpec
from openrl_cli import console

_COLOURS: dict[str, str] = {State.OK: "green", State.REFUSED: "yellow", State.FAILED: "red"}
# Small, so that a pass has several micro-batches, and little memory is asked for beside a server.
_SMALL = {"max_batch_tokens": 64, "max_sample_rows": 16, "max_kv_tokens": 8192, "prefix_cache_tokens": 4096}


def self_test(settings: Settings, families: Sequence[str], output: Path | None) -> None:
    """Run the suite on the settings' backend and print the report; status 1 if anything fails."""
    backend = settings.engine.backend
    check_backend(backend)
    if backend == "remote":
        raise SettingsError("--self-test tries a device of this machine; the backend is remote.", "Give --backend.")
    if settings.engine.quantize != "none":
        raise SettingsError(
            f"--self-test expects what whole weights give; engine.quantize is {settings.engine.quantize!r}.",
            "Set it to none for the test.",
        )
    chosen = _families(families)
    report = Report(backend, CASES)
    _watch(process.run(_worker(settings), chosen, CASES), report, len(chosen) * len(CASES))
    text = markdown(report)
    if output is not None:
        output.write_text(text)
    if console.out.is_terminal:
        console.out.print(_table(report))
        console.out.print("\nFor an issue:\n")
    typer.echo(text)
    if not report.ok:
        raise typer.Exit(1)


def _families(given: Sequence[str]) -> list[str]:
    unknown = [family for family in given if family not in FAMILIES]
    if unknown:
        raise SettingsError(f"--family {unknown[0]!r} is unknown.", f"Legal: {', '.join(FAMILIES)}.")
    return [family for family in FAMILIES if not given or family in given]


def _worker(settings: Settings) -> WorkerSpec:
    worker = replace(worker_spec(settings, ModelSpec("selftest", "selftest")), **_SMALL)
    return replace(worker, threads=worker.threads or 1)  # tiny models take longer with more


def _watch(news: Iterator[News], report: Report, total: int) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console.err, transient=True) as bar:
        task = bar.add_task("opening the backend ...", total=total)
        for item in news:
            process.collect(report, item)
            match item:
                case Began(family, case):
                    bar.update(task, description=f"{family}: {case}")
                case Ended(family, outcome):
                    bar.advance(task)
                    if outcome.state is State.FAILED:
                        bar.console.print(Text(f"failed: {family}, {outcome.case}: {outcome.message}", "red"))
                case Unopened(family, error):
                    bar.advance(task, len(CASES))
                    bar.console.print(Text(f"{family}: {error}", "yellow"))
                case _:
                    pass


def _table(report: Report) -> Table:
    table = Table("", *report.families)
    for title, *cells in report.rows():
        table.add_row(title, *(Text(cell, _COLOURS.get(cell, "")) for cell in cells))
    return table
