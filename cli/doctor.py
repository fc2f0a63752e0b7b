"""`openrl doctor`: what this machine can do, and what to do about each gap."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer
from rich.table import Table
from rich.text import Text

from openrl.settings import load
from openrl_cli import checks, console, options
from openrl_cli.checks import Check, State

_COLOURS = {State.OK: "green", State.NOTE: "yellow", State.GAP: "red"}


def doctor(data_dir: options.DataDir = None, as_json: options.Json = False, config: options.Config = None) -> None:
    """Accelerators, engines, memory, bf16, hub, port and data folder; status 1 if `openrl serve` would not work."""
    settings = load({"data_dir": data_dir}, config).settings
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
