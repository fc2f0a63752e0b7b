"""The demo: start a server, teach it SQL through the `tinker` SDK, show what it learned, stop the server.

    python -m openrl_recipes.demo            # what `make demo` runs; about four minutes on two CPU cores

It is `openrl_recipes.text_to_sql.train` in short, and takes all its options, and `--data-dir` for the server's data
(default: the server's own). Leaves the run folder and server.log in `demo-out`, and nothing running.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import click
from rich.console import Console

from openrl_recipes.local_server import ServerError, local_server
from openrl_recipes.shared.folder import CONFIG, METRICS, PROGRESS, SAMPLES
from openrl_recipes.shared.options import OptionError, parse

SHORT = ["--sft-steps", "12", "--rl-steps", "8", "--rl-groups", "8", "--eval-items", "64", "--eval-every", "0"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns the process's exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="folder for the server's data (default: the server's own)")
    parser.add_argument("--out", default="demo-out", help="folder for what the demo writes")
    own, for_training = parser.parse_known_args(arguments)
    console = Console()
    signal.signal(signal.SIGTERM, _interrupt)  # so that the server is stopped then too
    try:
        _run(console, own.data_dir, Path(own.out), for_training)
    except (ServerError, OptionError) as error:
        console.print(f"[red]{error}[/]", highlight=False)
        return 1
    except click.UsageError as error:
        console.print(f"[red]{error.format_message()}[/]", highlight=False)
        return 2
    except KeyboardInterrupt:
        console.print("Stopped.")
        return 130
    return 0


def _run(console: Console, data_dir: str | None, out: Path, for_training: Sequence[str]) -> None:
    started = time.monotonic()
    for name in (CONFIG, METRICS, SAMPLES, PROGRESS):  # a demo begins anew, where a recipe would go on
        (out / name).unlink(missing_ok=True)
    console.print("Starting [bold]openrl serve[/] ...")
    with local_server(out / "server.log", ["--data-dir", data_dir] if data_dir else []) as endpoint:
        console.print(f"It answers at {endpoint.base_url}; its log is {out / 'server.log'}.", highlight=False)
        # Set before the import below: Hugging Face's code reads its variables while it is imported.
        os.environ.update(endpoint.environment())  # noqa: TID251 -- the SDK is configured as a user would do it
        from openrl_recipes.text_to_sql import train

        train.main(parse(train.Options, [*SHORT, *for_training, "--out", str(out)]))
    console.print(f"Report, curves and metrics are in [bold]{out}[/]. Took {time.monotonic() - started:.0f} s.")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
