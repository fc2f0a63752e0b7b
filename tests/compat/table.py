"""`python -m compat.table [FILE] [NAME...]`: run all probes against a server of a tiny model, and write the table.

Ends with an error if a name or command has no probe, a probe no name, or an answer is not what it must be. With names
only their probes run, and nothing is written.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compat import probes_commands, probes_rest, probes_sampling, probes_service, probes_training, surface
from compat.registry import COMMAND_PROBES, PROBES, Result, run
from compat.stage import Server, Stage
from openrl_recipes.local_server import local_server
from support import tiny
from support.tokenizers import save_byte_tokenizer

MODULES = (probes_service, probes_training, probes_sampling, probes_rest, probes_commands)  # importing registers

_HEAD = """# Compatibility with the tinker SDK

Written by `make compat`: it lists the public names and commands of the installed SDK by introspection, calls each
against a running server with small real arguments, and checks what the answer means. "Endpoints" are those that the
server logged during the call; start-up, heartbeats and telemetry are left out.
"""


def gaps() -> list[str]:
    """Names without a probe, and probes without a name."""
    wanted = {*surface.names(), *surface.commands()}
    have = {*PROBES, *COMMAND_PROBES}
    return [f"{name} has no probe" for name in sorted(wanted - have)] + [
        f"{name} has a probe, but is not in the SDK" for name in sorted(have - wanted)
    ]


@contextmanager
def staged() -> Iterator[Stage]:
    """A stage on a server of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = tiny.build(folder / "tiny")
        save_byte_tokenizer(model)
        arguments = ["--data-dir", str(folder / "data"), "--model", str(model), "--dtype", "float32", "--threads", "1"]
        logs = {"OPENRL_LOG_FOLDER": str(folder / "logs")}
        with local_server(folder / "server.log", arguments, logs) as endpoint:
            os.environ.update(endpoint.environment() | {"TINKER_TELEMETRY": "1"})
            (folder / "work").mkdir()
            yield Stage(Server(endpoint, folder / "logs"), folder / "work")


def table(results: list[Result]) -> str:
    """The page: a count, then a table for each client and one for the commands."""
    parts = [_HEAD]
    names = [result for result in results if result.name in PROBES]
    commands = [result for result in results if result.name in COMMAND_PROBES]
    parts.append(f"SDK {surface.VERSION}: {_count(names)} names and {_count(commands)} commands.\n")
    for client in surface.CLIENTS:
        own = [result for result in names if result.name.startswith(f"{client.__name__}.")]
        parts.append(f"## {client.__name__}: {_count(own)}\n\n{_rows(own, f'{client.__name__}.')}")
    parts.append(f"## Commands: {_count(commands)}\n\n{_rows(commands, '')}")
    return "\n".join(parts)


def _count(results: list[Result]) -> str:
    return f"{sum(not result.error for result in results)} of {len(results)}"


def _rows(results: list[Result], prefix: str) -> str:
    lines = ["| name | endpoints | result | remark |", "|---|---|---|---|"]
    for result in results:
        endpoints = ", ".join(f"`{endpoint}`" for endpoint in result.endpoints) or "none"
        said = " ".join((result.error or result.remark).split())[:300].replace("|", "\\|")
        lines.append(
            f"| `{result.name.removeprefix(prefix)}` | {endpoints} | {'fails' if result.error else 'ok'} | {said} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    if missing := gaps():
        print("\n".join(missing), file=sys.stderr)
        return 1
    every = [*surface.names(), *surface.commands()]
    chosen = [name for name in every if name in arguments]
    with staged() as stage:
        assert stage.trained
        results = [_timed(stage, name) for name in chosen or every]
        stage.service.close("success").result(timeout=60)
    if arguments and not chosen:
        Path(arguments[0]).write_text(table(results))
    failed = [result for result in results if result.error]
    print(f"{len(results) - len(failed)} of {len(results)} ok")
    return 1 if failed else 0


def _timed(stage: Stage, name: str) -> Result:
    started = time.monotonic()
    result = run(stage, name)
    seconds = time.monotonic() - started
    print(f"{'FAILS' if result.error else 'ok':5} {seconds:5.1f} s  {name}  {result.error}", flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
