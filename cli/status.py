"""`openrl status`: what a running server is doing."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from openrl import apikey
from openrl.errors import NotReady, OpenRLError, Unauthorized
from openrl.settings import load
from openrl_cli import console, options

Url = Annotated[
    str | None, typer.Option("--url", help="The server, if not the one of the settings.", show_default=False)
]
_SECONDS = 5.0


def status(
    url: Url = None, data_dir: options.DataDir = None, as_json: options.Json = False, config: options.Config = None
) -> None:
    """Models, runs, queue and device of a running server."""
    resolved = load({"data_dir": data_dir}, config)
    server = resolved.settings.server
    host = "127.0.0.1" if server.host in ("0.0.0.0", "::") else server.host
    key = resolved.api_key or apikey.api_key(resolved.settings.data_dir)
    picture = fetch(url or f"http://{f'[{host}]' if ':' in host else host}:{server.port}", key)
    if as_json:
        typer.echo(json.dumps(picture, indent=2))
    else:
        _show(picture)


def fetch(url: str, key: str) -> dict[str, Any]:
    """The server's own picture of itself. Raises OpenRLError when it does not answer as openrl does."""
    import httpx

    try:
        answer = httpx.get(f"{url.rstrip('/')}/api/v1/status", headers={"X-API-Key": key}, timeout=_SECONDS)
    except httpx.HTTPError as error:
        raise NotReady(f"no server answers at {url} ({error}).", "Start one with: openrl serve") from error
    if answer.status_code == HTTPStatus.UNAUTHORIZED:
        raise Unauthorized(
            f"the server at {url} does not take this key.",
            "Give --data-dir of the server, or its key in OPENRL_API_KEY.",
        )
    if answer.status_code != HTTPStatus.OK:
        raise OpenRLError(f"{url} answered with status {answer.status_code}.", "Is it an openrl server?")
    try:
        return answer.json()
    except ValueError as error:
        raise OpenRLError(f"{url} did not answer with JSON.", "Is it an openrl server?") from error


def _show(picture: dict[str, Any]) -> None:
    queue = picture["queue"]
    console.out.print(f"openrl {picture['version']}, up {console.duration(picture['uptime_s'])}")
    console.out.print(f"waiting: {queue['train']} training requests, {queue['sample']} samples")
    console.out.print(_models(picture["models"]))
    if picture["runs"]:
        console.out.print(_runs(picture["runs"]))
    else:
        console.out.print("no runs")


def _models(models: list[dict[str, Any]]) -> Table:
    table = Table("model", "state", "backend", "device", "dtype")
    for model in models:
        name = f"{model['name']} (alias of {model['alias_of']})" if model["alias_of"] else model["name"]
        state = f"{model['state']}: {model['detail']}" if model["detail"] else model["state"]
        cells = (name, state, *(str(model[key] or "") for key in ("backend", "device", "dtype")))
        table.add_row(*map(Text, cells))
    return table


def _runs(runs: list[dict[str, Any]]) -> Table:
    table = Table("run", "base model", "state", "rank", "next request", "queued")
    for run in runs:
        table.add_row(*(Text(str(run[key])) for key in ("id", "base_model", "state", "rank", "next_seq", "queued")))
    return table
