"""`openrl status`: what a running server is doing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from ssl import SSLContext
from typing import Annotated, Any

import typer
from rich.live import Live

from openrl import apikey
from openrl.errors import BadRequest, Forbidden, NotReady, OpenRLError, Unauthorized
from openrl.settings import load
from openrl.tls import trusting
from openrl_cli import console, options
from openrl_cli.status_tables import shown

Ca = Annotated[
    Path | None, typer.Option("--ca", help="Certificates (PEM) to trust for https.", dir_okay=False, show_default=False)
]
Url = Annotated[
    str | None, typer.Option("--url", help="The server, if not the one of the settings.", show_default=False)
]
Remote = Annotated[
    str | None,
    typer.Option("--remote", metavar="NAME", help="A remote's server (openrl remote list).", show_default=False),
]
Watch = Annotated[bool, typer.Option("--watch", help="Keep showing it, anew every second, until Ctrl-C.")]
_SECONDS = 5.0
_EVERY_SECONDS = 1.0


def status(
    url: Url = None,
    ca: Ca = None,
    remote: Remote = None,
    data_dir: options.DataDir = None,
    as_json: options.Json = False,
    watch: Watch = False,
    config: options.Config = None,
) -> None:
    """Models, sessions and their shares, runs, queue and device of a running server."""
    if remote is not None:
        if url is not None:
            raise BadRequest("--url and --remote both name a server; give one of them.")
        _print(lambda: _of_remote(remote), as_json, watch)
        return
    resolved = load({"data_dir": data_dir}, config)
    server = resolved.settings.server
    host = "127.0.0.1" if server.host in ("0.0.0.0", "::") else server.host
    scheme = "http" if server.tls_cert is None else "https"
    key = resolved.api_key or apikey.api_key(resolved.settings.data_dir)
    place = url or f"{scheme}://{f'[{host}]' if ':' in host else host}:{server.port}"
    trust = trusting(None if url else resolved.settings.data_dir, ca)
    _print(lambda: fetch(place, key, trust), as_json, watch)


def _print(read: Callable[[], dict[str, Any]], as_json: bool, watch: bool) -> None:
    if as_json and watch:
        raise BadRequest("--json and --watch do not go together.", "Call with --json as often as you need.")
    if as_json:
        typer.echo(json.dumps(read(), indent=2))
        return
    if not watch:
        console.out.print(shown(read()))
        return
    with suppress(KeyboardInterrupt), Live(shown(read()), console=console.out, auto_refresh=False) as live:
        while True:
            time.sleep(_EVERY_SECONDS)
            live.update(shown(read()), refresh=True)


def _of_remote(name: str) -> dict[str, Any]:
    """The picture of a remote's server, which may have to be reached through a port-forward."""
    import asyncio

    from openrl import remotes
    from openrl.transfer.server import reach

    async def ask() -> dict[str, Any]:
        async with reach(remotes.find(name), patience=0) as server:
            return (await server.call("GET", "status")).json()

    return asyncio.run(ask())


def fetch(url: str, key: str, trust: SSLContext | None = None) -> dict[str, Any]:
    """The server's own picture of itself; `trust` is for https.

    Raises OpenRLError when it does not answer as openrl does.
    """
    import httpx

    try:
        address = f"{url.rstrip('/')}/api/v1/status"
        answer = httpx.get(address, headers={"X-API-Key": key}, timeout=_SECONDS, verify=trust or True)
    except httpx.HTTPError as error:
        raise NotReady(f"no server answers at {url} ({error}).", "Start one with: openrl serve") from error
    if answer.status_code == HTTPStatus.UNAUTHORIZED:
        raise Unauthorized(
            f"the server at {url} does not take this key.",
            "Give --data-dir of the server, or its key in OPENRL_API_KEY.",
        )
    if answer.status_code == HTTPStatus.FORBIDDEN:
        raise Forbidden(f"the server at {url} shows its state to keys with scope read or admin only.")
    if answer.status_code != HTTPStatus.OK:
        raise OpenRLError(f"{url} answered with status {answer.status_code}.", "Is it an openrl server?")
    try:
        return answer.json()
    except ValueError as error:
        raise OpenRLError(f"{url} did not answer with JSON.", "Is it an openrl server?") from error
