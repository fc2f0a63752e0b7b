"""`openrl keys`: who may use a server that others reach."""

from __future__ import annotations

import json
import re
import time
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from openrl.errors import BadRequest
from openrl.keys.key import Key, Quotas, scopes_of
from openrl.settings import load
from openrl_cli import console, options

if TYPE_CHECKING:
    from openrl_cli.cabinet import Cabinet

app = typer.Typer(no_args_is_help=True, help="API keys: make, list and revoke them.")

_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SPANS = {"m": 60, "h": 3600, "d": 86400, "w": 604800}

Url = Annotated[
    str | None, typer.Option("--url", help="A server elsewhere (its admin key in OPENRL_API_KEY).", show_default=False)
]
Ca = Annotated[
    Path | None, typer.Option("--ca", help="Certificates (PEM) to trust for https.", dir_okay=False, show_default=False)
]
Owner = Annotated[str, typer.Option("--owner", help="Whose key it is; what is made with it belongs to them.")]
Scopes = Annotated[
    list[str] | None,
    typer.Option("--scope", help="use, read or admin; may be repeated. Default: use.", show_default=False),
]
Expires = Annotated[
    str | None,
    typer.Option("--expires", help="When it ends: 12h, 30d, 2027-01-01. Default: never.", show_default=False),
]
Note = Annotated[str, typer.Option("--note", help="A word for yourself.", show_default=False)]
Runs = Annotated[int | None, typer.Option("--runs", min=0, help="Runs open at the same time.", show_default=False)]
Tokens = Annotated[
    int | None,
    typer.Option("--tokens-per-day", min=0, help="Tokens trained, read and drawn a day.", show_default=False),
]
Bytes = Annotated[
    str | None, typer.Option("--checkpoint-bytes", help="Size of all checkpoints, as 10GB.", show_default=False)
]


@app.command()
def create(
    owner: Owner,
    scope: Scopes = None,
    expires: Expires = None,
    runs: Runs = None,
    tokens_per_day: Tokens = None,
    checkpoint_bytes: Bytes = None,
    note: Note = "",
    url: Url = None,
    ca: Ca = None,
    data_dir: options.DataDir = None,
    as_json: options.Json = False,
    config: options.Config = None,
) -> None:
    """Make a key and print it. It is shown now and never again; only its hash is kept."""
    quotas = Quotas(runs, tokens_per_day, None if checkpoint_bytes is None else _size(checkpoint_bytes))
    draft = Key("", owner, scopes_of(scope or ["use"]), note=note, expires_at=_expiry(expires))
    with _cabinet(data_dir, config, url, ca) as cabinet:
        made = cabinet.create(draft, quotas)
    if as_json:
        typer.echo(json.dumps(made, indent=2))
        return
    console.err.print(Text(f"key {made['id']} of {owner}; give it to them now, it is not shown again:"))
    typer.echo(made["api_key"])


@app.command("list")
def list_keys(
    url: Url = None,
    ca: Ca = None,
    data_dir: options.DataDir = None,
    as_json: options.Json = False,
    config: options.Config = None,
) -> None:
    """All keys: whose they are, what they are good for, and until when."""
    with _cabinet(data_dir, config, url, ca) as cabinet:
        keys = cabinet.all()
    if as_json:
        typer.echo(json.dumps(keys, indent=2))
    elif keys:
        console.out.print(_table(keys))
    else:
        console.out.print("no keys were made; the machine's own is in the data folder's api_key")


@app.command()
def revoke(
    identity: Annotated[str, typer.Argument(metavar="ID", help="As `openrl keys list` shows it.")],
    url: Url = None,
    ca: Ca = None,
    data_dir: options.DataDir = None,
    config: options.Config = None,
) -> None:
    """End a key, its tokens and its open calls. What was made with it stays, and is its owner's."""
    with _cabinet(data_dir, config, url, ca) as cabinet:
        revoked = cabinet.revoke(identity)
    console.out.print(Text(f"key {revoked['id']} of {revoked['owner']} is revoked"))


def _cabinet(
    data_dir: str | None, config: Path | None, url: str | None, ca: Path | None
) -> AbstractContextManager[Cabinet]:
    from openrl_cli.cabinet import open_cabinet  # brings the database; `openrl --help` does without

    return open_cabinet(load({"data_dir": data_dir}, config), url, ca)


def _table(keys: list[dict[str, Any]]) -> Table:
    table = Table("id", "owner", "scopes", "state", "runs", "tokens a day", "checkpoints", "kept in", "note")
    for key in keys:
        bytes_ = "" if key["checkpoint_bytes"] is None else console.size(key["checkpoint_bytes"])
        counts = ("" if key[name] is None else str(key[name]) for name in ("runs", "tokens_per_day"))
        cells = (key["id"], key["owner"], ", ".join(key["scopes"]), _state(key), *counts, bytes_, key["source"])
        table.add_row(*map(Text, (*cells, key["note"])))
    return table


def _state(key: dict[str, Any]) -> str:
    if key["revoked_at"] is not None:
        return f"revoked {_day(key['revoked_at'])}"
    if key["expires_at"] is None:
        return "good"
    return f"{'expired' if key['expires_at'] <= time.time() else 'good until'} {_day(key['expires_at'])}"


def _day(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _expiry(text: str | None) -> float | None:
    """A span from now (12h, 30d), or a date or time; without offset it is UTC."""
    if text is None:
        return None
    span = re.fullmatch(r"(\d+)([mhdw])", text)
    if span is not None:
        return time.time() + int(span[1]) * _SPANS[span[2]]
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise BadRequest(f"--expires is {text!r}.", "Examples: 12h, 30d, 2027-01-01, 2027-01-01T12:00:00Z.") from None
    return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*(B|kB|MB|GB|TB)?", text)
    if match is None:
        raise BadRequest(f"--checkpoint-bytes is {text!r}.", "Examples: 500MB, 10GB, 10000000000.")
    return int(match[1]) * _UNITS[match[2] or "B"]
