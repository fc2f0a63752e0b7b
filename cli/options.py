"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[
    Path | None,
    typer.Option(
        "--config", help="Settings file (TOML) instead of the default one.", dir_okay=False, show_default=False
    ),
]
DataDir = Annotated[
    str | None, typer.Option("--data-dir", help="Where models, checkpoints and the database live.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
