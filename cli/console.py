"""What all commands share of the terminal: results go to stdout, everything else to stderr."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from openrl.errors import OpenRLError

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def show_error(error: OpenRLError) -> None:
    """The message in red, and what to do next below it. Not wrapped, so that paths and commands can be copied."""
    err.print(Text.assemble(("error: ", "bold red"), error.message), soft_wrap=True)
    if error.hint:
        err.print(Text(error.hint), soft_wrap=True)


def size(count: float) -> str:
    """Bytes for a person: 269 MB, 1.2 GB."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def duration(seconds: float) -> str:
    """Seconds for a person: 42 s, 3 min, 5.2 h, 2.1 days."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} days"
