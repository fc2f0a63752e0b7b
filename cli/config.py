"""`openrl config`: each setting, its value and where the value came from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from openrl.setting_table import reference
from openrl.settings import Value, load
from openrl_cli import console, options

Markdown = Annotated[bool, typer.Option("--markdown", help="Print the page docs/configuration.md instead.")]


def config(
    config: options.Config = None,
    data_dir: options.DataDir = None,
    as_json: options.Json = False,
    markdown: Markdown = False,
) -> None:
    """Each setting, its value, and whether a flag, a variable, the file or the default gave it."""
    if markdown:
        typer.echo(reference(), nl=False)
        return
    values = load({"data_dir": data_dir}, config).values
    if as_json:
        rows = [{"key": v.setting.key, "value": shown(v), "origin": v.origin} for v in values]
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table("key", "value", "from")
    for value in values:
        table.add_row(value.setting.key, Text(str(shown(value))), Text(value.origin))
    console.out.print(table)


def shown(value: Value) -> Any:
    """The value for JSON or a table; a secret is only said to be set."""
    content = value.value
    if value.setting.secret:
        return "(set)" if content else "(in the data folder)"
    if isinstance(content, Path):
        return str(content)
    if isinstance(content, Mapping):
        return ", ".join(f"{name}={target}" for name, target in content.items())
    return ", ".join(content) if isinstance(content, tuple) else content
