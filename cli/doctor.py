"""`openrl doctor`: what this machine can do, and what to do about each gap."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from openrl.settings import load
from openrl_cli import checks, console, options
from openrl_cli.checks import Check, State

_COLOURS = {State.OK: "green", State.NOTE: "yellow", State.GAP: "red"}


SelfTest = Annotated[
    bool, typer.Option("--self-test", help="Instead, try the backend on this device and print a report for an issue.")
]
Backend = Annotated[str | None, typer.Option(help="Of the self-test: auto, cpu, cuda or mps.", show_default=False)]
Dtype = Annotated[str | None, typer.Option(help="Of the self-test: auto, float32 or bfloat16.", show_default=False)]
VllmPython = Annotated[
    str | None, typer.Option(help="Of the self-test: a Python that has vLLM, to sample with it.", show_default=False)
]
Families = Annotated[
    list[str] | None, typer.Option("--family", help="Of the self-test: only this model family. May be repeated.")
]
Output = Annotated[
    Path | None, typer.Option(dir_okay=False, help="Of the self-test: also write the report here.", show_default=False)
]


def doctor(
    self_test: SelfTest = False,
    backend: Backend = None,
    dtype: Dtype = None,
    vllm_python: VllmPython = None,
    family: Families = None,
    output: Output = None,
    data_dir: options.DataDir = None,
    as_json: options.Json = False,
    config: options.Config = None,
) -> None:
    """Accelerators, engines, memory, bf16, hub, port and data folder; status 1 if `openrl serve` would not work.

    With --self-test: tiny models of each family are trained and sampled on this device, and every number is held
    against one that was computed in float64. Takes about half a minute; status 1 if anything is wrong.
    """
    flags = {"engine.backend": backend, "engine.dtype": dtype, "engine.vllm_python": vllm_python}
    settings = load({"data_dir": data_dir, **flags}, config).settings
    if self_test:
        from openrl_cli import selftest  # brings the whole server

        selftest.self_test(settings, family or [], output)
        return
    with console.err.status("looking around ..."):
        results = list(checks.run(settings))
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in results], indent=2))
    else:
        console.out.print(_table(results))
    if any(check.state is State.GAP for check in results):
        raise typer.Exit(1)


def _table(results: list[Check]) -> Table:
    table = Table("", "what", "found", "what to do")
    for check in results:
        state = Text(check.state.value, style=_COLOURS[check.state])
        table.add_row(state, check.name, Text(check.found), Text(check.advice))
    return table
