"""`openrl version`."""

from __future__ import annotations

import typer

from openrl.version import VERSION


def version() -> None:
    """The installed version."""
    typer.echo(f"openrl {VERSION}")
