"""What the installed SDK offers, by introspection: the public names of its clients, and the commands of its CLI."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version

import click
import tinker
from tinker.cli.__main__ import main_cli

CLIENTS = (
    tinker.ServiceClient,
    tinker.TrainingClient,
    tinker.SamplingClient,
    tinker.RestClient,
    tinker.AdminClient,
)
VERSION = version("tinker")


def names() -> list[str]:
    """`Client.name` for each public method and property."""
    return [f"{client.__name__}.{name}" for client in CLIENTS for name in dir(client) if not name.startswith("_")]


def commands() -> list[str]:
    """`tinker run list` and so on, each as it is typed."""
    return [f"tinker {path}" for path in _leaves(main_cli, "")]


def _leaves(group: click.Group, prefix: str) -> Iterator[str]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from _leaves(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}"
