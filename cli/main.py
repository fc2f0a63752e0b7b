"""The command line: one typer app, a file for each command or group of commands.

`openrl --help` imports all of these files, so what is heavy (the web server, the hub's library, torch) is imported
inside the commands that need it.
"""

from __future__ import annotations

import typer

from openrl.errors import OpenRLError, SettingsError
from openrl_cli import (
    bench,
    checkpoints,
    config,
    doctor,
    keys,
    models,
    recipe,
    remote,
    serve,
    status,
    transfer,
    version,
)
from openrl_cli.console import show_error

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train and sample language models on your own machine, with the tinker SDK.",
)
app.command()(serve.serve)
app.add_typer(models.app, name="models")
app.add_typer(checkpoints.app, name="checkpoints")
app.add_typer(remote.app, name="remote")
app.add_typer(recipe.app, name="recipe")
app.command()(transfer.push)
app.command()(transfer.pull)
app.add_typer(keys.app, name="keys")
app.command()(status.status)
app.command()(config.config)
app.command()(doctor.doctor)
app.command()(bench.bench)
app.command()(version.version)


def main() -> None:
    """Entry of the `openrl` program. Errors that we foresee end with a message and status 1, or 2 for bad settings."""
    try:
        app()
    except OpenRLError as error:
        show_error(error)
        raise SystemExit(2 if isinstance(error, SettingsError) else 1) from None


if __name__ == "__main__":
    main()
